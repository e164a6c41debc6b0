"""The processes that open a run: how one is known from another, and whether it is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.events.kinds import span_text
from holdfast.events.sinks import JOURNAL_NAME
from holdfast.format.digests import unseal
from holdfast.format.names import GENERATIONS_DIRECTORY, generation_path, parse_generation_file
from holdfast.format.records import MAX_GENERATION_BYTES, Opener, Opening
from holdfast.storage import Storage, local_directory

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


TAKE_OVER: Final = "HOLDFAST_TAKE_OVER"
"""The environment variable that lets a job take a run over from another one on this machine."""

_LEAVING_SECONDS: Final = 10.0
"""How long to wait for the other job, which may be leaving: saving its last step, say."""

_LOOK_SECONDS: Final = 0.1

_RECENT_SECONDS: Final = 60.0
"""A job that wrote within this time may still be at work."""


def hold(storage: Storage, generation: int) -> int | None:
    """Marks a run as open in this process, by a lock on the record of its generation; returns what `release` takes.

    The kernel drops the lock when the process ends. Where there are no locks, nothing is marked.
    """
    directory, descriptor = local_directory(storage), None
    if directory is None:
        return None
    try:
        descriptor = os.open(directory / generation_path(generation), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        release(descriptor)
        return None
    return descriptor


def release(descriptor: int | None) -> None:
    """Undoes `hold`, also for the processes that were forked since."""
    if descriptor is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_open(storage: Storage, opening: Opening) -> bool:
    """**Blocks.** Returns True if the opener of the newest generation is alive here, and has not closed the run."""
    directory = local_directory(storage)
    if not is_alive(opening) or directory is None or not opening.boot_id:
        return is_alive(opening)
    descriptor = None
    try:
        descriptor = os.open(directory / generation_path(opening.generation), os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        release(descriptor)
    return False


def check_not_open(storage: Storage, say: Callable[[str], object] | None = None) -> None:
    """**Blocks.** Checks that no other process of this machine has the run open. Nothing is fenced by then.

    Args:
        storage: The storage of the run.
        say: Called with a line before this waits a while for the other process, or if a job elsewhere seems to save
            here; None to not wait.

    Raises:
        UsageError: If one has; the error names it.
    """
    begun_at, has_waited = time.monotonic(), False
    while local_directory(storage) is not None:
        opening = _find_newest(storage)
        if opening is None or is_own(opening):
            return
        name = f"process {opening.process} on {opening.host}"
        if os.environ.get(TAKE_OVER) or not is_open(storage, opening):
            if say is not None and not has_waited and (ago := _find_recent(storage, opening)):
                say(
                    f"{storage.url}: another job ({name}, last wrote {ago} ago) saves here; this job takes the run over"
                )
            return
        if say is None or time.monotonic() >= begun_at + _LEAVING_SECONDS:
            raise UsageError(
                f"{storage.url}: {name} saves to this run, and is still running",
                hint=f"Stop it first (SIGTERM lets it save), or use another directory. {TAKE_OVER}=1 in the "
                "environment takes the run over; the other job then ends with an error at its next save.",
            )
        if not has_waited:
            say(f"{storage.url}: {name} has this run open; waiting until it has left")
            has_waited = True
        time.sleep(_LOOK_SECONDS)


def _find_recent(storage: Storage, opening: Opening) -> str:
    """Returns how long ago a job wrote to a run that it may still have open, where that cannot be seen from here; empty
    if that is long ago, or it is known to have ended."""
    own = _identify(os.getpid())
    is_here = (opening.boot_id, opening.pid_namespace) == (own["boot_id"], own["pid_namespace"])
    with suppress(OSError):
        seconds = time.time() - (Path(storage.url) / JOURNAL_NAME).stat().st_mtime
        if seconds < _RECENT_SECONDS and (not is_here or is_open(storage, opening)):
            return span_text(seconds)
    return ""


def _find_newest(storage: Storage) -> Opening | None:
    numbers = (parse_generation_file(entry.name) for entry in storage.list(GENERATIONS_DIRECTORY))
    newest = max(filter(None, numbers), default=0)
    path = generation_path(newest)
    with suppress(HoldfastError):
        return unseal(Opening, storage.read(path, MAX_GENERATION_BYTES), path=path) if newest else None
    return None


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
