"""The events of runs in a bucket: one object for each start of a job."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.catalog import StoredRun
from holdfast.events import Committed, GenerationOpened
from holdfast.events.sinks import decode_event
from holdfast.storage.objects import ObjectStorage


class Bucket(ObjectStorage):
    """A bucket in memory that notes what was replaced, and may refuse it."""

    def __init__(self) -> None:
        super().__init__(f"memory-objects://{uuid.uuid4().hex}", MemoryStore())
        self.replaced: list[str] = []
        self.refuses = False

    def replace(self, path: str, data: bytes) -> None:
        """See `ObjectStorage`."""
        self.replaced.append(path)
        if self.refuses:
            raise holdfast.errors.StorageError("refused", path=path)
        super().replace(path, data)


def train(bucket: Bucket, steps: int) -> None:
    with holdfast.resumable(bucket, a=1, save_every=1, keep="all") as run:
        for _ in run.steps(steps):
            pass


def read(bucket: Bucket, name: str) -> list[object]:
    return [decode_event(line) for line in bucket.read(f"events/{name}", 1 << 20).splitlines()]


def test_each_start_writes_its_events_at_the_end_and_not_at_each_save() -> None:
    bucket = Bucket()
    train(bucket, 30)
    train(bucket, 33)
    assert [entry.name for entry in bucket.list("events")] == ["0001.jsonl", "0002.jsonl"]
    first, second = read(bucket, "0001.jsonl"), read(bucket, "0002.jsonl")
    assert [event.step for event in first if isinstance(event, Committed)] == list(range(1, 31))
    assert [event.step for event in second if isinstance(event, Committed)] == [31, 32, 33]
    assert [event.base_step for event in (*first, *second) if isinstance(event, GenerationOpened)] == [None, 30]
    # Once after a second of training and once at the end.
    assert len(bucket.replaced) <= 5


def test_reader_leaves_no_events(tmp_path: Path) -> None:
    bucket = Bucket()
    train(bucket, 2)
    bucket.replaced.clear()
    with holdfast.CheckpointManager(bucket, holdfast.Checkpoint(a=1)) as manager:
        manager.restore()
    assert bucket.replaced == []


def test_journal_that_cannot_be_written_is_one_warning_and_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket()
    bucket.refuses = True
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(bucket, 3)
    assert bucket.replaced
    assert [record.getMessage() for record in caplog.records if "events are not recorded" in record.getMessage()] == [
        "the run's events are not recorded (saves and restores don't need them): refused"
    ]
    assert [name.step for name in StoredRun(bucket).look().living] == [1, 2, 3]


def test_step_that_the_events_of_any_start_name_is_found_without_markers() -> None:
    bucket = Bucket()
    train(bucket, 2)
    train(bucket, 3)
    (newest,) = (name for name in StoredRun(bucket).look().living if name.step == 3)
    bucket.delete([newest.manifest_path, newest.committed_path])
    catalog = StoredRun(bucket).look()
    assert StoredRun(bucket).find_lost(catalog) == (newest,)
