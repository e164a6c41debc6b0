"""The processes that open a run: how one is known from another, and whether it is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.events.sinks import JOURNAL_NAME
from holdfast.format.digests import unseal
from holdfast.format.names import GENERATIONS_DIRECTORY, generation_path, parse_generation_file
from holdfast.format.records import MAX_GENERATION_BYTES, Opener, Opening
from holdfast.numbers import span_text
from holdfast.storage import Storage

_PROC: Final = Path("/proc")


def is_own(opener: Opener) -> bool:
    """Returns True if this process is the opener. Containers may have one host name, and each its process 1."""
    return all(getattr(opener, name) == value for name, value in identify(os.getpid()).items())


TAKE_OVER: Final = "HOLDFAST_TAKE_OVER"
"""The environment variable that lets a job take a run over from another one on this machine."""

_LEAVING_SECONDS: Final = 10.0
"""How long to wait for the other job, which may be leaving: saving its last step, say."""

_LOOK_SECONDS: Final = 0.1

_RECENT_SECONDS: Final = 60.0
"""A job that wrote within this time may still be at work."""

# The descriptors of the runs that this process has open; and this process, with those that it was forked from.
_held: dict[object, int] = {}
_family: set[int] = {os.getpid()}


class RunLock:
    """Marks a run as open in this process, from its entry on, by a lock on its directory (`flock`).

    The kernel drops the lock when the process ends; what it has forked or started does not keep it. A job that takes a
    run over has the lock beside the older one. Where there are no locks, nothing is marked.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._key = storage, object()

    def take(self, say: Callable[[str], object] | None = None) -> None:
        """**Blocks.** Marks the run, unless that is done, or it has no directory yet. No other job is fenced by that.

        Args:
            say: Called with a line before this waits a while for another process, or if a job elsewhere seems to save
                here; None to not wait.

        Raises:
            UsageError: If another process of this machine has the run open; the error names it.
        """
        if self._key in _held or (descriptor := _open_directory(self._storage)) is None:
            return
        self._key = key = object()  # In a forked child, an older one means nothing.
        _held[key] = descriptor
        weakref.finalize(self, _let_go, key).atexit = False
        try:
            _wait_free(self._storage, descriptor, say)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Undoes `take`; a second call does nothing."""
        _let_go(self._key)


def find_owner(storage: Storage) -> str:
    """**Blocks.** Names the process of this machine that has a run open, this one or another; empty if none has."""
    if (descriptor := _open_directory(storage)) is None:
        return ""
    try:
        return "" if _try_lock(descriptor, fcntl.LOCK_EX) else _find_process(storage, descriptor, ())
    finally:
        os.close(descriptor)


def is_of_this_machine(opener: Opener) -> bool:
    """Returns True if the opener ran on this machine, since that was started."""
    boot_id = identify(os.getpid())["boot_id"]
    return bool(boot_id) and opener.boot_id == boot_id


def has_ended(identity: Mapping[str, Any]) -> bool:
    """Returns True if that process ran where this one can see it, and has ended.

    Args:
        identity: What `identify` returned in that process; there may be more in it.
    """
    own, number = identify(os.getpid()), str(identity["process"])
    is_seen = all(own[name] and own[name] == identity[name] for name in ("boot_id", "pid_namespace"))
    return is_seen and _find_start(number) != identity["started_at_ticks"]


def is_locked(storage: Storage) -> bool:
    """**Blocks.** Returns True if a process has a run open, as far as this machine knows: its name may not be known."""
    if (descriptor := _open_directory(storage)) is None:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _wait_free(storage: Storage, descriptor: int, say: Callable[[str], object] | None) -> None:
    begun_at, has_waited = time.monotonic(), False
    while True:
        is_free = _try_lock(descriptor, fcntl.LOCK_EX)
        found = "" if is_free else _find_process(storage, descriptor, _list_own())
        # The kernel turns the one lock into the other at once; where it does not, another job may come between.
        if (not found or os.environ.get(TAKE_OVER)) and _try_lock(descriptor, fcntl.LOCK_SH):
            if say is not None and not has_waited and (text := _describe_other(storage, found, is_free)):
                say(f"{storage.url}: another job ({text}) saves here; this job takes the run over")
            return
        text, seconds = f"{storage.url}: {found or 'another process'} has this run open", time.monotonic() - begun_at
        if seconds >= (_LOOK_SECONDS if say is None else _LEAVING_SECONDS):
            written = f"; the run was last written {ago} ago" if (ago := _find_last_write(storage)) else ""
            raise UsageError(
                f"{text}, and is still running{written}. This job has changed nothing there",
                hint=f"Stop it first (SIGTERM lets it save), or use another directory. {TAKE_OVER}=1 in the "
                "environment takes the run over; the other job then ends with an error at its next save.",
            )
        # `holdfast list` has the lock for a moment: this is said at the second look.
        if say is not None and not has_waited and seconds >= _LOOK_SECONDS:
            say(f"{text}; waiting up to {_LEAVING_SECONDS:.0f} s until it has left")
            has_waited = True
        time.sleep(_LOOK_SECONDS)


def _open_directory(storage: Storage) -> int | None:
    with suppress(OSError):
        if storage.location is not None:
            return os.open(storage.location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _try_lock(descriptor: int, kind: int) -> bool:
    """Returns False if another lock is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def _let_go(key: object) -> None:
    if (descriptor := _held.pop(key, None)) is not None:
        with suppress(OSError):  # A child that was forked by no code of Python has the lock as well.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _let_go_in_child() -> None:
    """A forked child has the descriptors of its parent: the lock is to end with the parent, and not before."""
    _family.add(os.getpid())  # By now its parent may be another process.
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_let_go_in_child)


def _list_own() -> set[int]:
    """Returns this process, and those that it is a part of: a child of `multiprocessing` is not another job."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    return {os.getpid(), *_family, 0 if parent is None else parent.pid}


def _find_process(storage: Storage, descriptor: int, own: Collection[int]) -> str:
    """Names a process that has a lock on the run's directory, and is not one of our own; empty if none is seen here.

    That of another user shows only by the newest generation, and that outside of this container not at all.
    """
    directory = os.fstat(descriptor)
    found = [int(number) for number in _list_numbers(_PROC) if _has_lock(_PROC / number, directory)]
    if not found and (opening := _find_newest(storage)) is not None and opening.started_at_ticks:
        # Alive, as far as that can be seen from here, and not a later process.
        started = {"process": opening.process, "started_at_ticks": _find_start(str(opening.process))}
        known = identify(os.getpid()) | started
        found = [opening.process] * all(getattr(opening, name) == value for name, value in known.items())
    return next((f"process {number} on {socket.gethostname()}" for number in found if number not in own), "")


def _has_lock(process: Path, directory: os.stat_result) -> bool:
    for number in _list_numbers(process / "fd"):
        with suppress(OSError):
            # Only then: to look at what others have open may take long, on a volume that is gone.
            is_locked = "FLOCK" in (process / "fdinfo" / number).read_text()
            if is_locked and os.path.samestat((process / "fd" / number).stat(), directory):
                return True
    return False


def _describe_other(storage: Storage, found: str, is_free: bool) -> str:
    """Returns the job that a run is taken over from; empty if it is known to have ended, or wrote long ago."""
    opening, ago = _find_newest(storage), _find_last_write(storage, 1e9 if found else _RECENT_SECONDS)
    if not found and ago and opening is not None and not is_own(opening):
        is_here = is_free and opening.boot_id == identify(os.getpid())["boot_id"]  # Then it has ended.
        found = "" if is_here else f"process {opening.process} on {opening.host}"
    return f"{found}, last wrote {ago} ago" if found and ago else found


def _find_last_write(storage: Storage, most_seconds: float = 1e9) -> str:
    """Returns how long ago a job wrote to a run; empty if that is not known, or longer ago."""
    with suppress(OSError):
        seconds = time.time() - (Path(storage.url) / JOURNAL_NAME).stat().st_mtime
        return span_text(seconds) if seconds < most_seconds else ""
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
def identify(process: int) -> dict[str, Any]:
    """Returns what identifies this process; the parts that the system does not give are empty."""
    boot_id = namespace = ""
    with suppress(OSError):
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink(_PROC / "self/ns/pid")  # noqa: PTH115  It is no path.
    return {
        "host": socket.gethostname(),
        "process": process,
        "boot_id": boot_id,
        "pid_namespace": namespace,
        "started_at_ticks": _find_start("self"),
    }


def _list_numbers(directory: Path) -> list[str]:
    with suppress(OSError):
        return [*filter(str.isdigit, os.listdir(directory))]  # noqa: PTH208  Names are enough.
    return []


def _find_start(number: str) -> int:
    """Returns when a process began, in ticks since the machine started; 0 if it has ended. A zombie has ended."""
    with suppress(OSError, ValueError, IndexError):
        # The name of the program is in brackets, and may hold anything.
        fields = (_PROC / number / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] == "Z" else int(fields[19])
    return 0
