"""A look at a run takes several calls, between which other jobs go on: what it finds is of one moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.errors import SaveFailedError
from holdfast.format.names import StepName
from holdfast.format.records import make_base
from interrupted_storage import Interrupted

LATE = StepName(2, 1)


def open_manager(storage: Interrupted) -> hf.CheckpointManager:
    return hf.CheckpointManager(storage, hf.Checkpoint(weights=np.zeros(4)), threads=1)


def publish_late_step(storage: Interrupted, files: dict[str, bytes]) -> None:
    storage.make_directory(LATE.directory)
    for path, data in files.items():
        storage.publish(path, data)


def begin_job(storage: Interrupted, base: StepName) -> None:
    """A job opens a generation, and has saved nothing yet."""
    run = StoredRun(storage)
    run.record_base(make_base(run.open_generation(), base))


def pass_over_a_zombie(storage: Interrupted, files: dict[str, bytes]) -> StepName:
    """A job begins from step 1 and writes its first step; then the fenced one publishes its step 2."""
    begin_job(storage, StepName(1, 1))
    first = StepName(2, 2).directory
    storage.make_directory(first)
    storage.write(f"{first}/data-00000-of-00001.safetensors", b"")
    publish_late_step(storage, files)
    return StepName(1, 1)


def go_on_from_a_new_step(storage: Interrupted, files: dict[str, bytes]) -> StepName:
    """Step 2 is committed, and another job begins from it."""
    publish_late_step(storage, files)
    begin_job(storage, LATE)
    return LATE


@pytest.mark.parametrize("is_deep", [False, True], ids=["flat", "deep"])
@pytest.mark.parametrize("meanwhile", [pass_over_a_zombie, go_on_from_a_new_step])
def test_a_job_goes_on_from_the_line_that_it_has_seen_or_is_fenced(
    meanwhile: Callable[[Interrupted, dict[str, bytes]], StepName], is_deep: bool
) -> None:
    went_on = []
    for at in itertools.count(1):
        storage = Interrupted()
        storage.traits = msgspec.structs.replace(storage.traits, lists_deep=is_deep)
        with open_manager(storage) as manager:
            for step in (1, 2):
                manager.save(step).wait_committed(60)
        paths = [f"{LATE.directory}/{entry.name}" for entry in storage.list(LATE.directory)]
        files = {path: storage.read(path, 1 << 20) for path in paths}
        # The zombie has still to name its step; the other one has not begun it.
        is_begun = meanwhile is pass_over_a_zombie
        storage.delete([LATE.manifest_path, LATE.committed_path] if is_begun else [*paths, LATE.directory])
        base = None

        def act() -> None:
            nonlocal base
            base = meanwhile(storage, files)  # noqa: B023

        with open_manager(storage) as manager:
            storage.interrupt(at, act)
            restoration = manager.restore()
            if not storage.was_interrupted:
                break
            assert restoration is not None
            try:
                manager.save(5).wait_committed(60)
            except SaveFailedError:
                continue
            assert restoration.name == base, f"call {at}"
            went_on.append(at)
    assert 1 in went_on
    assert len(went_on) < at - 1, "some are fenced"
