"""Bugs of the kinds that such programs have had, planted one at a time: the simulation must find every one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from obstore.exceptions import AlreadyExistsError

from holdfast.catalog import StoredRun, StoredStep
from holdfast.catalog.stored_step import remove_own_files
from holdfast.errors import StorageError
from holdfast.format.names import COMMITTED_NAME, StepName
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.handle import Origin
from holdfast.save.retention import Retention
from holdfast.save.run_writer import RunWriter
from holdfast.save.writer import StepFiles
from holdfast.storage.objects import ObjectStorage
from simulation.disk import DiskStorage


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug.

    Attributes:
        what: What is wrong with the program, as the docs list it.
        seed: A seed that finds it.
        plant: Plants it, for the block.
    """

    what: str
    seed: int
    plant: Callable[[], AbstractContextManager[object]]


def _believe(is_made: Callable[[str | None, str], bool | None]) -> AbstractContextManager[object]:
    """Plants a belief about "already exists", by the token that is there, if any, and that of the put."""
    made: set[tuple[int, str]] = set()

    def publish(self: Any, path: str, data: bytes) -> bool:
        token, key = uuid.uuid4().hex, (id(self), path)
        with self.errors("publish", path):
            for _ in range(5):
                try:
                    self._client.put(self._store, path, data, mode="create", attributes={"holdfast-token": token})
                    answer: bool | None = True
                except AlreadyExistsError:
                    # What a job has made once, it does not take for made again.
                    answer = key not in made and is_made(self._find_token(path), token)
                if answer is not None:
                    made.add(key)
                    return answer
        raise StorageError("it was there, and then it was not", path=path)

    return patch.object(ObjectStorage, "publish", publish)


def _overwrite() -> AbstractContextManager[object]:
    made: set[tuple[int, str]] = set()

    def publish(self: Any, path: str, data: bytes) -> bool:
        with self.errors("publish", path):
            self._client.put(self._store, path, data, mode="overwrite")
        key, before = (id(self), path), len(made)
        made.add(key)
        return len(made) > before

    return patch.object(ObjectStorage, "publish", publish)


@contextmanager
def _both(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _trust_numbers() -> AbstractContextManager[object]:
    """Plants that the record of a generation is not compared with the job's own."""
    return patch.object(StoredRun, "check_owned", lambda self, generation, token: self.check_fence(generation))


def _manifest_first() -> AbstractContextManager[object]:
    left = threading.local()

    def finish(self: Any, pool: WorkerPool) -> object:
        left.finish = self._writer.finish
        with patch.object(self._writer, "finish", lambda: None):
            return real_finish(self, pool)

    def commit(self: Any, *arguments: Any) -> object:
        manifest = real_commit(self, *arguments)
        left.finish()
        return manifest

    real_finish, real_commit = StepFiles.finish, RunWriter.commit
    return _both(patch.object(StepFiles, "finish", finish), patch.object(RunWriter, "commit", commit))


def _unsynced_data() -> AbstractContextManager[object]:
    def finish(self: Any, pool: WorkerPool) -> object:
        with patch.object(self._writer, "finish", lambda: None):
            return real_finish(self, pool)

    real_finish = StepFiles.finish
    return patch.object(StepFiles, "finish", finish)


def _blind(owner: type, name: str) -> AbstractContextManager[object]:
    """Plants that a newer generation is not minded during a method; it is looked for, so that nothing else changes."""
    inside = threading.local()

    def call(*arguments: Any, **options: Any) -> object:
        inside.is_blind = True
        try:
            return real(*arguments, **options)
        finally:
            inside.is_blind = False

    def check_fence(self: StoredRun, generation: int, opened: Sequence[int] | None = None) -> None:
        if not getattr(inside, "is_blind", False):
            check(self, generation, opened)
        elif opened is None:
            self.list_generations()

    real, check = getattr(owner, name), StoredRun.check_fence
    return _both(patch.object(owner, name, call), patch.object(StoredRun, "check_fence", check_fence))


def _retain_early() -> AbstractContextManager[object]:
    def commit(self: Any, receipts: Any, name: StepName, *arguments: Any) -> object:
        for old in self._run.look().living[:-1] or self._run.look().living:
            self._run.step(old).withdraw()
            remove_own_files(self._storage, old.directory)
        return real(self, receipts, name, *arguments)

    real = RunWriter.commit
    return patch.object(RunWriter, "commit", commit)


def _reuse_generation() -> AbstractContextManager[object]:
    def open_(self: Any, origin: Origin, *arguments: Any) -> object:
        if self.generation is None and origin.seen_generation:
            self.follow(origin.seen_generation, origin.base)
        return real(self, origin, *arguments)

    real = RunWriter.open
    return patch.object(RunWriter, "open", open_)


def _data_before_manifest() -> AbstractContextManager[object]:
    def withdraw(self: StoredStep) -> None:
        parts = [name for name in self.list_names() if name.startswith(("data", "index"))]
        self.storage.delete([f"{self.directory}/{name}" for name in sorted(parts)])
        real(self)

    real = StoredStep.withdraw
    return patch.object(StoredStep, "withdraw", withdraw)


def _unsynced_removal() -> AbstractContextManager[object]:
    def withdraw(self: StoredStep) -> None:
        self.storage.delete([f"{self.directory}/{COMMITTED_NAME}", f"{self.directory}/manifest.json"])

    return patch.object(StoredStep, "withdraw", withdraw)


def _forget_attempts() -> AbstractContextManager[object]:
    def name(self: Any, *arguments: Any) -> object:
        self._named = self._named[0], 0
        return real(self, *arguments)

    real = RunWriter._name_attempt
    return patch.object(RunWriter, "_name_attempt", name)


def _forget_undecided() -> AbstractContextManager[object]:
    def commit(self: Any, *arguments: Any) -> object:
        try:
            return real(self, *arguments)
        finally:
            self._undecided = frozenset()

    real = RunWriter.commit
    return patch.object(RunWriter, "commit", commit)


def _write_in_place() -> AbstractContextManager[object]:
    def publish(self: DiskStorage, path: str, data: bytes) -> bool:
        if any(entry.name == path.rpartition("/")[2] for entry in self.list(path.rpartition("/")[0])):
            return False
        self.write(path, data)
        self.sync_directory(path.rpartition("/")[0])
        return True

    return patch.object(DiskStorage, "publish", publish)


def _skip(owner: type, name: str) -> AbstractContextManager[object]:
    """Plants that a method does nothing."""
    return patch.object(owner, name, lambda *arguments, **options: None)


BUGS: Final[Mapping[str, Bug]] = {
    "token": Bug(
        "no token is compared: what exists after the own put is taken for the own",
        32,
        lambda: _both(_believe(lambda found, token: found is not None or None), _trust_numbers()),
    ),
    "conflict": Bug(
        "a conflict (409) is believed: the object is taken to be there",
        10,
        lambda: _believe(lambda found, token: found in (None, token)),
    ),
    "overwrite": Bug(
        "the put is not create-only",
        32,
        lambda: _both(_overwrite(), _trust_numbers()),
    ),
    "manifest-first": Bug("the manifest is published before the data are whole", 0, _manifest_first),
    "fence": Bug("no look at the generations after the manifest is published", 18, lambda: _blind(RunWriter, "commit")),
    "early-retention": Bug("old steps are removed before the new one is committed", 0, _retain_early),
    "digest": Bug(
        "the digest of what a ranged read returns is not checked",
        52,
        lambda: patch("holdfast.restore.read.find_damages", lambda *arguments: iter(())),
    ),
    "stale-generation": Bug("a job goes on in the generation of the job before it", 2, _reuse_generation),
    "passed": Bug(
        "a job that slept opens a generation past one that has saved meanwhile",
        2,
        lambda: _skip(StoredRun, "check_unpassed"),
    ),
    "data-first": Bug("the data of a step are removed before its manifest", 2, _data_before_manifest),
    "fenced-removal": Bug("a removal goes on after a newer job has begun", 84, lambda: _blind(Retention, "_remove")),
    "attempt": Bug("the name of a failed attempt is used again", 204, _forget_attempts),
    "undecided": Bug("the data of a save are removed whose manifest may still arrive", 50, _forget_undecided),
    "base": Bug("a job begins from a step that was removed meanwhile", 112, lambda: _skip(StoredRun, "check_base")),
    "lineage": Bug(
        "a restore takes the highest number, no matter which job has saved it",
        2,
        lambda: patch("holdfast.catalog.stored_run.choose_living", lambda names, bases: tuple(sorted(names))),
    ),
    "unsynced-data": Bug("the data are not synced before the commit", 19, _unsynced_data),
    "unsynced-names": Bug(
        "the directory of a step is not synced before the commit",
        175,
        lambda: _skip(DiskStorage, "sync_directory"),
    ),
    "unsynced-removal": Bug(
        "the removal of a manifest is not synced before the data are removed", 175, _unsynced_removal
    ),
    "in-place": Bug("a manifest is written in its place, not named once it is whole", 1, _write_in_place),
}
