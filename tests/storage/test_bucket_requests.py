"""What is asked of a job through a bucket, how many requests that takes, and readers of a bucket."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter

import numpy as np
from obstore.store import MemoryStore

import holdfast as hf
from holdfast.catalog.holds import read_holds
from holdfast.catalog.requests import REQUESTS_DIRECTORY
from holdfast.storage import Entry
from holdfast.storage.objects import ObjectStorage


class CountedBucket(ObjectStorage):
    """A bucket in memory that counts what the thread that listens asks of it."""

    def __init__(self) -> None:
        super().__init__(f"memory-objects://{uuid.uuid4().hex}", MemoryStore())
        self.calls: Counter[str] = Counter()

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        self.calls[threading.current_thread().name] += 1
        return super().list(path, deep=deep)


def test_a_job_is_asked_through_a_bucket_and_rests_at_little_cost() -> None:
    bucket, replies, w = CountedBucket(), list[hf.Reply](), np.zeros(10)

    def ask() -> None:
        replies.append(hf.ask(bucket, "save", timeout_seconds=60))
        replies.append(hf.ask(bucket, "status"))
        is_over.set()

    is_over, asking = threading.Event(), threading.Thread(target=ask)
    begun_at = time.monotonic()
    with hf.resumable(bucket, w=w, save_every=10**9, quiet=True) as run:
        asking.start()
        for _ in run.steps(10**9):
            time.sleep(0.01)
            if is_over.is_set():
                break
        seconds = time.monotonic() - begun_at
    asking.join()
    assert [reply.outcome for reply in replies] == ["done", "done"]
    assert replies[0].committed_step == replies[1].committed_step
    # One listing each five seconds at rest, and one a second while something is asked.
    assert bucket.calls["holdfast-notices-ask"] <= seconds + 2
    assert bucket.list(REQUESTS_DIRECTORY) == []


def test_a_reader_of_a_bucket_keeps_the_step_that_it_reads() -> None:
    bucket, w, read = CountedBucket(), np.zeros(10), np.zeros(10)
    with hf.CheckpointManager(bucket, hf.Checkpoint(w=w), keep=1) as manager:
        w[:] = 1
        manager.save(1).wait_ended()
        with hf.follow(bucket, name="reader", w=read) as followed:
            assert next(followed).step == 1
            assert [hold.name.step for hold in read_holds(bucket)] == [1]
            for step in (2, 3):
                w[:] = step
                manager.save(step).wait_ended()
            assert (manager.steps(), read[0]) == ((1, 3), 1)
            newest = next(followed)
            assert (newest.step, newest.missed, read[0]) == (3, (), 3)
        manager.save(4).wait_ended()
        assert manager.steps() == (4,)
    assert read_holds(bucket) == []
