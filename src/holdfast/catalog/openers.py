"""The processes that open a run: how one is known from another, and whether it is alive."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from holdfast.errors import StorageError
from holdfast.format.names import generation_path
from holdfast.format.records import Opener

_PROC: Final = Path("/proc")


def describe_process(token: str) -> dict[str, Any]:
    """Returns the fields of an `Opener` for this process, now."""
    return {"token": token, "opened_at_unix_seconds": time.time(), **_identify(os.getpid())}


def is_own(opener: Opener) -> bool:
    """Returns True if this process is the opener. Containers may have one host name, and each its process 1."""
    return all(getattr(opener, name) == value for name, value in _identify(os.getpid()).items())


def is_alive(opener: Opener) -> bool:
    """Returns True if the opener is alive on this machine, and not a later process with its number.

    From a container, processes outside of it cannot be seen, and count as not alive.
    """
    own = _identify(os.getpid())
    if not opener.boot_id:
        return opener.host == own["host"] and _is_alive_by_time(opener)
    if opener.boot_id != own["boot_id"]:
        return False
    if opener.pid_namespace == own["pid_namespace"]:
        return _find_start(str(opener.process)) == opener.started_at_ticks
    # That of a container has another number outside of it.
    return any(
        _find_start(number) == opener.started_at_ticks and _read_namespace(number) == opener.pid_namespace
        for number in _list_processes()
    )


def make_gone_error(url: str, generation: int) -> StorageError:
    """**Pure.** Returns the error for a run without the record of a generation that this job has seen there."""
    path = generation_path(generation)
    return StorageError(
        f"{url}: the run was moved, removed or unmounted during training: its {path} is gone",
        path=path,
        hint="Put the directory back (mount the volume, undo the move); the next save then continues there. Until "
        "then nothing is saved: a new run is never begun in its place.",
    )


@lru_cache(maxsize=1)
def _identify(process: int) -> dict[str, Any]:
    """Returns what identifies this process; the parts that the system does not give are empty."""
    boot_id = ""
    with suppress(OSError):
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return {
        "host": socket.gethostname(),
        "process": process,
        "boot_id": boot_id,
        "pid_namespace": _read_namespace("self"),
        "started_at_ticks": _find_start("self"),
    }


def _list_processes() -> Iterator[str]:
    with suppress(OSError):
        yield from filter(str.isdigit, os.listdir(_PROC))  # noqa: PTH208  Names are enough.


def _read_namespace(number: str) -> str:
    with suppress(OSError):
        return os.readlink(_PROC / number / "ns/pid")  # noqa: PTH115  It is no path.
    return ""


def _find_start(number: str) -> int:
    """Returns when a process began, in ticks since the machine started; 0 if it has ended. A zombie has ended."""
    with suppress(OSError, ValueError, IndexError):
        # The name of the program is in brackets, and may hold anything.
        fields = (_PROC / number / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    return 0


def _is_alive_by_time(opener: Opener) -> bool:
    """Returns True if the process with the number of an older record's opener began before that record."""
    with suppress(OSError, ValueError, StopIteration):
        lines = (_PROC / "stat").read_text().splitlines()
        booted_at = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
        ticks = _find_start(str(opener.process))
        # The time of boot is given in whole seconds.
        return ticks > 0 and booted_at + ticks / os.sysconf("SC_CLK_TCK") <= opener.opened_at_unix_seconds + 2
    return False
