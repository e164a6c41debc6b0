"""Pins of people, and leases of readers: they keep a step although the retention of its job gives it up.

All are empty files in `holds/`, and their names say everything. A pin stays until it is removed. A lease is renewed
under a new name, and ends by itself: a job that sees no change for a minute of its own clock forgets it.

A reader writes its lease, then looks whether the copy of the manifest is there. A job removes that copy first, then
looks for leases, and only then removes the manifest. So of two that do this at the same time at least one sees the
other, and no step goes while it is read.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.catalog.named_step import find_step, split_place
from holdfast.catalog.stored_run import StoredRun
from holdfast.errors import HoldfastError, NoCheckpointError, StorageError, UsageError
from holdfast.format.names import COMMITTED_NAME, MAX_GENERATION, MAX_STEP, StepName, parse_step_directory
from holdfast.storage.protocol import Storage
from holdfast.tracebacks import short_traceback

HOLDS_DIRECTORY: Final = "holds"

LEASE_SECONDS: Final = 60.0
"""A lease that has not changed for so long is over."""

RENEWAL_SECONDS: Final = 15.0

PINNED: Final = "pinned"

_LONG_AGO_SECONDS: Final = 600.0
_PATIENCE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1
_MOST_LISTED: Final = 10_000
_HOLD: Final = re.compile(r"(step-[0-9]+\.g[0-9.a]+)\.(?:pin|lease-([0-9A-Za-z_-]{1,64})-([0-9]{1,16}))")
_PLACE: Final = re.compile(r"reader-([0-9A-Za-z_-]{1,64})\.([0-9]{1,16})\.([0-9]{1,10})\.(begun|done)")


class Hold(msgspec.Struct, frozen=True):
    """A pin, or a lease.

    Attributes:
        name: The step.
        reader: The reader; empty for a pin.
        renewed_at_unix_seconds: When the lease was renewed, by the reader's clock; for people only.
    """

    name: StepName
    reader: str = ""
    renewed_at_unix_seconds: int = 0

    @property
    def path(self) -> str:
        """The file."""
        end = f"lease-{self.reader}-{self.renewed_at_unix_seconds}" if self.reader else "pin"
        return f"{HOLDS_DIRECTORY}/{self.name.directory}.{end}"

    @property
    def reason(self) -> str:
        """The reason why the step stays."""
        return f"read by {self.reader.rpartition('-')[0] or self.reader}" if self.reader else PINNED


class ReaderPlace(msgspec.Struct, frozen=True, order=True):
    """The last step of a reader of a name, for its next start; the newest record counts.

    Attributes:
        generation: The generation of the step that it read last.
        step: That step.
        is_done: True if it has ended with it.
    """

    generation: int
    step: int
    is_done: bool = False

    def path(self, reader: str) -> str:
        """Returns the file."""
        end = "done" if self.is_done else "begun"
        return f"{HOLDS_DIRECTORY}/reader-{reader}.{self.step}.{self.generation}.{end}"


def read_holds(storage: Storage) -> list[Hold]:
    """**Blocks.** Returns the pins and leases of a run; names that are none are ignored."""
    found: list[Hold] = []
    for entry in storage.list(HOLDS_DIRECTORY)[:_MOST_LISTED]:
        match = None if entry.is_directory else _HOLD.fullmatch(entry.name)
        name = None if match is None else parse_step_directory(match[1])
        if match is not None and name is not None:
            found.append(Hold(name, match[2] or "", int(match[3] or 0)))
    return found


def list_current_holds(storage: Storage) -> list[Hold]:
    """**Blocks.** Returns the holds for people, without leases that were renewed long ago by the clock.

    No job is there to end them, or it has not saved since.
    """
    oldest = time.time() - _LONG_AGO_SECONDS
    return [hold for hold in read_holds(storage) if not hold.reader or hold.renewed_at_unix_seconds > oldest]


def read_places(storage: Storage, reader: str) -> list[ReaderPlace]:
    """**Blocks.** Returns the recorded places of a reader, the newest one last."""
    matches = (_PLACE.fullmatch(entry.name) for entry in storage.list(HOLDS_DIRECTORY))
    own = [match for match in matches if match is not None and match[1] == reader]
    places = (ReaderPlace(int(match[3]), int(match[2]), match[4] == "done") for match in own)
    return sorted(one for one in places if one.step <= MAX_STEP and one.generation <= MAX_GENERATION)


class HoldWatch:
    """The holds in a run, as its job knows them. Not thread-safe.

    Attributes:
        pins: The pinned steps, each with the reason why it stays.
        leases: Likewise the steps that are being read.
        held: All of them.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.pins: dict[StepName, str] = {}
        self.leases: dict[StepName, str] = {}
        self.held: dict[StepName, str] = {}
        # By step and reader, the newest renewal, and when it was first seen.
        self._seen: dict[tuple[StepName, str], tuple[int, float]] = {}

    def look(self, now_seconds: float) -> None:
        """**Blocks.** Looks at the holds, and removes the leases that are over, by the monotonic clock of the job."""
        holds = read_holds(self._storage)
        self.pins = {hold.name: hold.reason for hold in holds if not hold.reader}
        self.leases, before, self._seen = {}, self._seen, {}
        over: list[str] = []
        for hold in sorted((hold for hold in holds if hold.reader), key=lambda hold: hold.renewed_at_unix_seconds):
            key, renewal = (hold.name, hold.reader), hold.renewed_at_unix_seconds
            known = before.get(key)
            since = known[1] if known is not None and renewal <= known[0] else now_seconds
            if now_seconds - since > LEASE_SECONDS:
                over.append(hold.path)
                continue
            self._seen[key] = (max(renewal, known[0] if known else 0), since)
            self.leases[hold.name] = hold.reason
        self.held = {**self.leases, **self.pins}
        if over:
            with suppress(HoldfastError):
                self._storage.delete(over)

    def forget(self, names: Iterable[StepName]) -> None:
        """Forgets the leases of steps that are gone in spite of them."""
        for name in names:
            self.leases.pop(name, None)
            self.held.pop(name, None)


def wait_staying(run: StoredRun, name: StepName) -> bool:
    """**Blocks.** Called when a step is held: returns True if it stays, and False if it is gone.

    The newest step stays, by a look that began after it was held, and so does one with a copy of its manifest. The copy
    may also be missing for other reasons; but a step that is being removed is gone soon.
    """
    end_at = time.monotonic() + _PATIENCE_SECONDS
    while (step := run.step(name)).is_committed():
        if run.look().newest == name or step.has(COMMITTED_NAME) or time.monotonic() >= end_at:
            return step.is_committed()
        time.sleep(_LOOK_SECONDS)
    return False


@short_traceback
def pin(run: str | os.PathLike[str] | Storage) -> StepName:
    """**Blocks.** Keeps a checkpoint, regardless of the job's `keep` and of `holdfast prune`, until `unpin`.

    Args:
        run: `RUN@STEP`, where the step is a number or a name such as `best:val_loss`; the newest one without `@`.

    Returns:
        The step, with its generation.

    Raises:
        NoCheckpointError: If there is no such checkpoint, or the job is about to remove it.
        UsageError: If the storage is of an unknown kind.
        StorageError: If the storage fails, or this process may not write there.
    """
    storage, _, asked = split_place(run)
    stored = StoredRun(storage)
    name = find_step(stored, stored.look(), asked)
    hold = Hold(name)
    write_hold(storage, hold)
    if not wait_staying(stored, name):
        storage.delete([hold.path])
        raise NoCheckpointError(f"step {name.step} of {storage.url} was removed just now", hint="Pin a newer one.")
    return name


@short_traceback
def unpin(run: str | os.PathLike[str] | Storage) -> bool:
    """**Blocks.** Removes a pin: from its next save on, the job may remove the checkpoint.

    Args:
        run: `RUN@STEP`, as in `pin`; the step must be named.

    Returns:
        True if the checkpoint was pinned.

    Raises:
        UsageError: If no step is named.
        NoCheckpointError: If there is no such checkpoint.
        StorageError: If the storage fails, or this process may not write there.
    """
    storage, location, asked = split_place(run)
    if asked is None:
        raise UsageError(f"{location}: which step is to be unpinned?", hint=f"Write {location}@STEP.")
    pinned = [hold for hold in read_holds(storage) if not hold.reader]
    if isinstance(asked, int):
        going = [hold for hold in pinned if hold.name.step == asked]
    else:
        stored = StoredRun(storage)
        name = find_step(stored, stored.look(), asked)
        going = [hold for hold in pinned if hold.name == name]
    storage.delete([hold.path for hold in going])
    return bool(going)


def write_hold(storage: Storage, hold: Hold) -> None:
    """**Blocks.** Writes a pin or a lease; one that is there already is fine."""
    storage.make_directory(HOLDS_DIRECTORY)
    if (place := storage.location) is not None:
        # All who may write to the run may hold its steps.
        with suppress(OSError):
            (place / HOLDS_DIRECTORY).chmod(place.stat().st_mode & 0o7777)
    write_name(storage, hold.path)


def write_name(storage: Storage, path: str) -> None:
    """**Blocks.** Creates an empty file; one that is there already is fine. A crash leaves it, or nothing."""
    try:
        storage.write(path, b"")
    except StorageError as error:
        try:
            storage.read(path, 0)
        except HoldfastError:
            raise error from None
