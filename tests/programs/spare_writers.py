"""Processes that write files in the room of others; the arguments are the program, a directory, and numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.storage import LocalStorage
from holdfast.storage.local.recycle import try_keep
from spare_files import MIB, identity, lay, lay_over, pattern, spare_of


def write_in_turn(directory: str, turns: str) -> None:
    storage = LocalStorage(directory)
    lay(storage, "0/data", 0, MIB)
    for turn in range(1, int(turns)):
        try_keep(storage.location, f"{turn - 1}/data", MIB)
        lay_over(storage, f"{turn}/data", turn, MIB)
        storage.delete([f"{turn - 1}/data"])
    print("through")


def compete(directory: str, turns: str, own_number: str) -> None:
    storage = LocalStorage(directory)
    kept: tuple[Path, int] | None = None
    taken = 0
    for turn in range(int(turns)):
        spares = set()
        if os.path.lexists(spare_of(storage)):
            with suppress(FileNotFoundError):
                spares.add(identity(spare_of(storage)))
        number = 1000 * int(own_number) + turn
        path = lay_over(storage, f"{own_number}-{turn}/data", number, 2 * MIB)
        taken += identity(path) in spares
        if kept is not None:
            # Until here it counted.
            assert kept[0].read_bytes() == pattern(kept[1], 2 * MIB), "other code has written into it"
            try_keep(storage.location, str(kept[0].relative_to(storage.url)), 2 * MIB)
            storage.delete([str(kept[0].relative_to(storage.url))])
        kept = (path, number)
    print(taken)


PROGRAMS: dict[str, Callable[..., None]] = {program.__name__: program for program in (write_in_turn, compete)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
