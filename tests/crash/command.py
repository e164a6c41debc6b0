"""What the programs that kill have in common: their command line, how far they are, and what must never be found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.catalog import Catalog
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import Storage


class WrongStateError(AssertionError):
    """A crash left something that must not be."""


def run_command(
    name: str, purpose: str, options: Mapping[str, Mapping[str, Any]], play: Callable[[Path, argparse.Namespace], str]
) -> None:
    """Runs such a program as a command.

    Args:
        name: The module in this package.
        purpose: What it does; the first line is shown.
        options: What it can be told besides `--seed` and `--directory`, each with what argparse is to know of it.
        play: Does it, in a directory; gives what is to be said in the end, with SECONDS for how long it took.
    """
    parser = argparse.ArgumentParser(prog=f"python -m crash.{name}", description=purpose.split("\n")[0])
    for option, known in options.items():
        parser.add_argument(option, **known)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="a new directory to work in; by default a temporary one")
    chosen = parser.parse_args()
    begun_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"holdfast-crash-{name}-") as temporary:
        try:
            told = play(chosen.directory or Path(temporary) / "run", chosen)
        except WrongStateError as error:
            raise SystemExit(f"\nWRONG: {error}") from error
    print("\n" + told.replace("SECONDS", f"{time.monotonic() - begun_at:.0f} s"))  # noqa: T201


def show_progress(done: int, all_of_them: int, what: str) -> None:
    """Says how far a program is, to a person who looks on."""
    if sys.stderr.isatty():
        print(f"\r{done} of {all_of_them} {what} survived", end="", file=sys.stderr)  # noqa: T201


def check_whole(storage: Storage, catalog: Catalog) -> None:
    """**Blocks.** Makes sure that all checkpoints that are there are whole.

    Raises:
        WrongStateError: If one is not.
    """
    for name in catalog.committed:
        if damages := verify_data(storage, open_step(storage, name.directory, name)):
            raise WrongStateError(f"{name} is not whole: {damages[0]}")
