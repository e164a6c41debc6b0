"""Incremental saves: what is written and what is referred to, what is kept for it, and how damage shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast as hf
from command_line import flip_bit
from faulty import FullStorage
from holdfast.catalog import StoredRun
from holdfast.errors import (
    DamageError,
    FormatError,
    NoWholeCheckpointError,
    SaveFailedError,
    UsageError,
)
from holdfast.events import Committed, Event, PassedOver, Retained
from holdfast.format.digests import digest, seal
from holdfast.format.names import StepName
from holdfast.format.records import Manifest
from holdfast.restore.verify import open_step, verify_data
from holdfast.save.incremental import MAX_KEPT_STEPS
from holdfast.storage import LocalStorage, MemoryStorage, Storage

MIB = 1 << 20


def make_objects() -> dict[str, Any]:
    return {
        "frozen": {"table": np.arange(400_000.0), "bias": np.full(33, 1.5, np.float32)},
        "trained": {"head": np.zeros((50, 40)), "scale": np.zeros((), np.float32)},
        "counter": {"step": 0},
    }


def train(objects: dict[str, Any], step: int) -> None:
    for array in objects["trained"].values():
        array[...] = step
    objects["counter"]["step"] = step


def manager_of(place: Any, objects: dict[str, Any], **options: Any) -> hf.CheckpointManager:
    return hf.CheckpointManager(place, hf.Checkpoint(**objects), **{"incremental": True, **options})


def save_steps(place: Any, *steps: int, **options: Any) -> None:
    objects = make_objects()
    with manager_of(place, objects, **options) as manager:
        manager.restore()
        for step in steps:
            train(objects, step)
            manager.save(step)


def check_restored(place: Any, step: int) -> hf.Restoration:
    """Restores the newest whole step into objects that have nothing of it yet, and looks at each value."""
    objects = make_objects()
    for name in ("frozen", "trained"):
        for array in objects[name].values():
            array[...] = -1
    with manager_of(place, objects) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == step
    expected = make_objects()
    train(expected, step)
    for name in ("frozen", "trained"):
        for leaf, array in objects[name].items():
            np.testing.assert_array_equal(array, expected[name][leaf])
    assert objects["counter"] == {"step": step}
    return restored


def references_of(storage: Storage, step: int, generation: int = 1, attempt: int = 1) -> dict[int, int]:
    """For each step that a step refers to, how many leaves of it lie there."""
    manifest = StoredRun(storage).step(StepName(step, generation, attempt)).manifest()
    return {reference.step: reference.leaves for reference in manifest.references}


def sizes_of(storage: Storage) -> dict[int, int]:
    return {
        name.step: StoredRun(storage).step(name).manifest().data_bytes for name in StoredRun(storage).look().committed
    }


def damages_of(storage: Storage) -> dict[int, list[DamageError]]:
    """What is damaged in each committed step."""
    return {
        name.step: verify_data(storage, open_step(storage, name.directory, name))
        for name in StoredRun(storage).look().committed
    }


# What is written.


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(1, 11))
    storage = LocalStorage(tmp_path)
    full, *others = sizes_of(storage).values()
    assert full > 400_000 * 8
    assert set(others) == {4096 + 2000 * 8 + 4}
    for step in range(2, 11):
        assert references_of(storage, step) == {1: 2}, "references are flat: always to the file that has the bytes"
    assert load_file(tmp_path / "step-000000007.g0001" / "data-00000-of-00001.safetensors").keys() == {
        "trained/head",
        "trained/scale",
    }
    restored = check_restored(tmp_path, 10)
    assert restored.size_bytes == 400_000 * 8 + 33 * 4 + 2000 * 8 + 4


def test_a_run_that_saves_as_usual_knows_nothing_of_references(tmp_path: Path) -> None:
    save_steps(tmp_path / "plain", 1, 2, incremental=False)
    save_steps(tmp_path / "incremental", 1)
    for run in ("plain", "incremental"):
        body = msgspec.json.decode((tmp_path / run / "step-000000001.g0001" / "manifest.json").read_bytes())["body"]
        assert "references" not in body
        assert body["features"] == []
        index = (tmp_path / run / "step-000000001.g0001" / "index-00000-of-00001.json").read_bytes()
        assert not {"sources", "referred"} & msgspec.json.decode(index)["body"].keys()
    for name in ("index-00000-of-00001.json", "data-00000-of-00001.safetensors"):
        plain, incremental = (tmp_path / run / "step-000000001.g0001" / name for run in ("plain", "incremental"))
        assert plain.read_bytes() == incremental.read_bytes(), "nothing to refer to: the same bytes"
    assert set(sizes_of(LocalStorage(tmp_path / "plain")).values()) == {sizes_of(LocalStorage(tmp_path / "plain"))[1]}


def test_a_state_that_has_not_changed_at_all_takes_no_room() -> None:
    storage = MemoryStorage()
    objects = make_objects()
    with manager_of(storage, objects) as manager:
        manager.save(1)
        manager.save(2)
    assert sizes_of(storage)[2] == 4096
    assert references_of(storage, 2) == {1: 4}


@pytest.mark.parametrize("restore", [True, False])
def test_a_new_process_refers_to_what_it_goes_on_from(tmp_path: Path, restore: bool) -> None:
    save_steps(tmp_path, 1, 2)
    objects = make_objects()
    with manager_of(tmp_path, objects) as manager:
        if restore:
            manager.restore()
        train(objects, 3)
        manager.save(3)
    assert references_of(LocalStorage(tmp_path), 3, generation=2) == {1: 2}
    check_restored(tmp_path, 3)


def test_incremental_and_usual_saves_mix(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, incremental=False)
    save_steps(tmp_path, 3)
    save_steps(tmp_path, 4, incremental=False)
    save_steps(tmp_path, 5)
    storage = LocalStorage(tmp_path)
    assert references_of(storage, 3, 2) == {2: 2}
    assert references_of(storage, 4, 3) == {}
    assert references_of(storage, 5, 4) == {4: 2}
    check_restored(tmp_path, 5)


def test_what_is_not_quite_the_same_is_written() -> None:
    storage = MemoryStorage()
    checkpoint = hf.Checkpoint(
        typed=np.ones(8, np.int32), shaped=np.ones((2, 4)), named=np.ones(3), kept=np.ones(5), empty=np.ones((0, 3))
    )
    with hf.CheckpointManager(storage, checkpoint, incremental=True) as manager:
        manager.save(1)
        manager.wait()
        checkpoint.typed = np.ones(8, np.int32).view(np.float32)
        checkpoint.shaped = np.ones((4, 2))
        checkpoint.renamed = checkpoint.named
        del checkpoint.named
        manager.save(2)
    manifest = StoredRun(storage).step(StepName(2, 1)).manifest()
    index = StoredRun(storage).step(StepName(2, 1)).index(manifest, 0)
    assert [leaf.name for leaf in index.referred] == ["kept"]
    assert {leaf.name for leaf in index.leaves} == {"typed", "shaped", "renamed", "empty"}
    assert damages_of(storage) == {1: [], 2: []}


def test_a_value_that_comes_back_is_referred_to_where_it_last_lay() -> None:
    storage = MemoryStorage()
    array = np.zeros(1000)
    with manager_of(storage, {"array": array, "other": np.ones(10)}) as manager:
        for step, value in enumerate((0, 1, 0, 0), start=1):
            array[:] = value
            manager.save(step)
    assert [references_of(storage, step) for step in (2, 3, 4)] == [{1: 1}, {1: 1}, {1: 1, 3: 1}]


def test_the_event_says_what_was_referred_to() -> None:
    events: list[Event] = []
    save_steps(MemoryStorage(), 1, 2, sinks=[events.append])
    first, second = (event for event in events if isinstance(event, Committed))
    assert (first.referred_bytes, second.referred_bytes) == (0, 400_000 * 8 + 33 * 4)
    assert second.size_bytes < 40_000
    assert ", 3.2 MB reused from earlier steps, " in str(second)
    assert "referred" not in str(first)


def test_resumable_saves_incrementally(tmp_path: Path) -> None:
    frozen = np.arange(50_000.0)
    for total in (3, 5):
        with hf.resumable(tmp_path, frozen=frozen, save_every=hf.Steps(1), keep=hf.Latest(2), incremental=True) as run:
            list(run.steps(total))
    storage = LocalStorage(tmp_path)
    assert [name.step for name in StoredRun(storage).look().living] == [1, 4, 5], "they refer to 1; 3 went at the end"
    assert references_of(storage, 5, 2) == {1: 1}


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_the_option_is_true_or_false(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="incremental must be"):
        manager_of(tmp_path, make_objects(), incremental=wrong)


# What is kept.


def test_referenced_step_is_kept_and_the_reason_is_reported() -> None:
    storage = MemoryStorage()
    events: list[Event] = []
    save_steps(storage, *range(1, 6), keep=hf.Latest(1), sinks=[events.append])
    assert [name.step for name in StoredRun(storage).look().committed] == [1, 5]
    retained = [event for event in events if isinstance(event, Retained)]
    assert retained[-1].kept[1] == "step 5 refers to it"
    assert retained[-1].removed == (4,)
    check_restored(storage, 5)


def test_what_nothing_refers_to_any_more_is_removed() -> None:
    storage = MemoryStorage()
    objects = make_objects()
    with manager_of(storage, objects, keep=hf.Latest(1)) as manager:
        for step in range(1, 4):
            train(objects, step)
            manager.save(step)
        for array in objects["frozen"].values():
            array += 1
        manager.save(4)
        manager.wait()
        assert manager.steps() == (4,)


def test_steps_off_the_living_line_keep_what_they_refer_to() -> None:
    storage = MemoryStorage()
    save_steps(storage, 1, 2, 3)
    objects = make_objects()
    with manager_of(storage, objects, keep=hf.Latest(1)) as manager:
        manager.restore(2)
        for array in (*objects["frozen"].values(), *objects["trained"].values()):
            array += 1
        manager.save(4)
    catalog = StoredRun(storage).look()
    assert [name.step for name in catalog.committed] == [1, 2, 3, 4]
    assert [name.step for name in catalog.living] == [1, 2, 4]
    assert damages_of(storage) == {1: [], 2: [], 3: [], 4: []}


def test_a_replaced_step_stays_while_it_is_referred_to() -> None:
    storage = MemoryStorage()
    objects = make_objects()
    events: list[Event] = []
    with manager_of(storage, objects, keep=hf.Latest(1), sinks=[events.append]) as manager:
        manager.save(1)
        train(objects, 7)
        manager.save(1, replace=True)
        manager.wait()
        assert references_of(storage, 1, 1, attempt=2) == {1: 2}
        assert [name.attempt for name in StoredRun(storage).look().committed] == [1, 2]
        for array in objects["frozen"].values():
            array += 1
        train(objects, 8)
        manager.save(2)
    assert [name.step for name in StoredRun(storage).look().committed] == [2]
    assert damages_of(storage) == {2: []}


def test_an_older_step_that_is_replaced_refers_to_nothing() -> None:
    """What refers comes after what it refers to, in the order of the steps: so nothing refers in a circle."""
    storage = MemoryStorage()
    objects = make_objects()
    with manager_of(storage, objects) as manager:
        for step in (1, 2, 3):
            train(objects, step)
            manager.save(step)
        manager.save(2, replace=True)
        manager.save(4)
        manager.wait()
    assert references_of(storage, 2, 1, attempt=2) == {}
    assert references_of(storage, 4) == {1: 2, 3: 2}
    assert all(damages == [] for damages in damages_of(storage).values())


@pytest.mark.parametrize("keep", [hf.Latest(3), hf.All()])
def test_the_sources_of_a_step_are_few_and_so_is_what_is_kept_for_them(keep: Any) -> None:
    """One of many arrays changes before each save, in turn: without a limit every step would be kept for ever."""
    storage = MemoryStorage()
    arrays = {f"a{number}": np.zeros(500) for number in range(40)}
    with manager_of(storage, {"arrays": arrays}, keep=keep) as manager:
        for step in range(1, 101):
            arrays[f"a{step % 40}"][:] = step
            manager.save(step).wait_ended(60)
            assert len(references_of(storage, step)) <= MAX_KEPT_STEPS
    committed = StoredRun(storage).look().committed
    assert len(committed) == 100 if keep == hf.All() else len(committed) <= 3 * (1 + MAX_KEPT_STEPS)
    assert sum(sizes_of(storage).values()) < 0.3 * 100 * 40 * 500 * 8
    objects = {"arrays": {name: np.zeros(500) for name in arrays}}
    with manager_of(storage, objects) as manager:
        manager.restore()
    for name, array in arrays.items():
        np.testing.assert_array_equal(objects["arrays"][name], array)


@pytest.mark.parametrize(("keep", "is_referred_to"), [(hf.Latest(1), False), (hf.All(), True)])
def test_a_large_step_is_not_kept_for_the_sake_of_a_small_array(keep: Any, is_referred_to: bool) -> None:
    storage = MemoryStorage()
    objects = {"small": np.ones(100), "large": np.zeros(MIB)}
    with manager_of(storage, objects, keep=keep) as manager:
        for step in (1, 2, 3):
            objects["large"][:] = step
            manager.save(step)
    assert (references_of(storage, 3) == {1: 1}) is is_referred_to
    if not is_referred_to:
        assert [name.step for name in StoredRun(storage).look().committed] == [3]


def test_a_policy_that_fails_does_not_fail_the_save(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def choose_kept(self, committed: Any, now_seconds: float) -> Any:
            raise ZeroDivisionError("by the policy")

    storage = MemoryStorage()
    objects = make_objects()
    manager = manager_of(storage, objects, keep=Broken())
    first = manager.save(1)
    first.wait_ended(60)
    assert first.committed
    manager.save(2)
    manager.close()
    assert len([text for text in caplog.messages if "by the policy" in text]) == 1
    assert references_of(storage, 2) == {1: 4}


def test_a_source_that_lost_its_manifest_is_not_swept_away(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-000000001.g0001" / "manifest.json").unlink()
    assert check_restored(tmp_path, 2).passed_over == ()
    save_steps(tmp_path, 3)
    storage = LocalStorage(tmp_path)
    assert references_of(storage, 3, 2) == {}, "what is not committed is not referred to anew"
    assert [name.step for name in StoredRun(storage).look().lost] == [1]
    assert damages_of(storage) == {2: [], 3: []}


def test_what_a_step_of_a_newer_holdfast_needs_is_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "step-000000002.g0001" / "manifest.json"
    storage = LocalStorage(tmp_path)
    manifest = StoredRun(storage).step(StepName(2, 1)).manifest()
    path.write_bytes(seal(msgspec.structs.replace(manifest, features=("references", "holograms"))))
    with pytest.raises(FormatError, match="'holograms'") as refused:
        open_step(storage, StepName(2, 1).directory, StepName(2, 1))
    assert "references" not in refused.value.message
    assert "newer" in refused.value.hint
    objects = make_objects()
    with manager_of(tmp_path, objects, begin_anew=True, keep=hf.Latest(1)) as manager:
        manager.save(5)
    with manager_of(tmp_path, objects, keep=hf.Latest(1)) as manager:
        manager.save(6)
        manager.wait()
    assert [name.step for name in StoredRun(storage).look().committed] == [1, 2, 5, 6]


# What is missing or damaged.


def table_offset(run: Path, step: int = 1) -> int:
    storage = LocalStorage(run)
    name = StepName(step, 1)
    index = StoredRun(storage).step(name).index(StoredRun(storage).step(name).manifest(), 0)
    return next(leaf.begin for leaf in index.leaves if leaf.name == "frozen/table")


def test_damage_in_a_source_is_found_from_every_step_that_refers_to_it(tmp_path: Path) -> None:
    objects = make_objects()
    with manager_of(tmp_path, objects) as manager:
        manager.save(1)
        objects["frozen"]["table"] += 1
        for step in (2, 3, 4):
            train(objects, step)
            manager.save(step)
    data = "step-000000002.g0001/data-00000-of-00001.safetensors"
    flip_bit(tmp_path / data, table_offset(tmp_path, 2) + MIB + 7)
    events: list[Event] = []
    with manager_of(tmp_path, make_objects(), sinks=[events.append]) as manager:
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 1
    passed = [event for event in events if isinstance(event, PassedOver)]
    assert [event.step for event in passed] == [4, 3, 2]
    assert {(event.file, event.tensor, event.offset_bytes) for event in passed} == {
        (data, "frozen/table", table_offset(tmp_path, 2) + MIB)
    }
    assert passed[0].error.endswith("they belong to 'frozen/table'; step-000000004.g0001 refers to it")
    assert "refers" not in passed[2].error
    damages = damages_of(LocalStorage(tmp_path))
    assert [(step, damage.step, damage.path) for step, found in damages.items() for damage in found] == [
        (step, step, data) for step in (2, 3, 4)
    ]
    with pytest.raises(NoWholeCheckpointError, match="step 4 is damaged"):
        manager_of(tmp_path, make_objects()).restore(4)


@pytest.mark.parametrize("what", ["directory", "file"])
def test_missing_source_is_named_with_its_expected_directory(tmp_path: Path, what: str) -> None:
    save_steps(tmp_path, 1, 2)
    source = tmp_path / "step-000000001.g0001"
    if what == "directory":
        shutil.rmtree(source)
    else:
        (source / "data-00000-of-00001.safetensors").unlink()
    with pytest.raises(
        NoWholeCheckpointError,
        match=r"step-000000001.g0001/data-00000-of-00001.safetensors is missing; the directory step-000000001.g0001 "
        "must be next to that of step 2",
    ):
        manager_of(tmp_path, make_objects()).restore()


def test_a_source_of_another_size_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with (tmp_path / "step-000000001.g0001" / "data-00000-of-00001.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(NoWholeCheckpointError, match=r"were written; step-000000002.g0001 refers to it"):
        manager_of(tmp_path, make_objects()).restore()


def test_links_to_sources_are_not_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 2)
    (run / "step-000000001.g0001").rename(tmp_path / "elsewhere")
    (run / "step-000000001.g0001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoWholeCheckpointError, match="is not a regular file"):
        manager_of(run, make_objects()).restore()


def test_arrays_of_directories_removed_by_hand_are_written_again(tmp_path: Path) -> None:
    objects = make_objects()
    with manager_of(tmp_path, objects) as manager:
        for step in (1, 2):
            train(objects, step)
            manager.save(step)
        manager.wait()
        shutil.rmtree(tmp_path / "step-000000001.g0001")
        train(objects, 3)
        manager.save(3)
    assert references_of(LocalStorage(tmp_path), 3) == {}
    check_restored(tmp_path, 3)


@pytest.mark.parametrize("newest", [5, 6])
def test_a_directory_removed_by_hand_is_not_taken_for_what_replaces_it(tmp_path: Path, newest: int) -> None:
    """The new file has the size of the one that was removed, and other bytes in the same places."""
    objects = make_objects()
    table = objects["frozen"]["table"]
    with manager_of(tmp_path, objects) as manager:
        for step in range(5, newest + 1):
            train(objects, step)
            manager.save(step)
        manager.wait()
        shutil.rmtree(tmp_path / "step-000000005.g0001")
        table += 1
        manager.save(5, replace=True).wait_committed()
        table -= 1
        train(objects, newest + 1)
        manager.save(newest + 1)
    assert [name.attempt for name in StoredRun(LocalStorage(tmp_path)).look().committed if name.step == 5] == [2]
    check_restored(tmp_path, newest + 1)
    assert damages_of(LocalStorage(tmp_path))[newest + 1] == []


def test_a_base_that_is_damaged_is_not_built_on(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "step-000000001.g0001" / "index-00000-of-00001.json").write_bytes(b"{}")
    objects = make_objects()
    with manager_of(tmp_path, objects) as manager:
        train(objects, 2)
        manager.save(2)
    check_restored(tmp_path, 2)
    assert references_of(LocalStorage(tmp_path), 2, 2) == {}


def test_a_base_with_other_spans_is_not_compared(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    name = StepName(1, 1)
    storage = LocalStorage(tmp_path)
    manifest = StoredRun(storage).step(name).manifest()
    index = StoredRun(storage).step(name).index(manifest, 0)
    small = [leaf for leaf in index.leaves if leaf.end - leaf.begin <= MIB]
    assert small, "their digests are the same, whatever the length of a span"
    rewrite(
        tmp_path,
        manifest,
        seal(msgspec.structs.replace(index, span_bytes=4 * MIB, leaves=respanned(tmp_path, index.leaves))),
    )
    assert damages_of(storage) == {1: []}
    save_steps(tmp_path, 2)
    assert references_of(storage, 2, 2) == {}
    check_restored(tmp_path, 2)


def respanned(run: Path, leaves: Any) -> tuple[Any, ...]:
    data = (run / "step-000000001.g0001" / "data-00000-of-00001.safetensors").read_bytes()
    return tuple(
        msgspec.structs.replace(leaf, spans=digest(data[leaf.begin : leaf.end]) if leaf.end > leaf.begin else "")
        for leaf in leaves
    )


def rewrite(run: Path, manifest: Manifest, index: bytes) -> None:
    directory = run / manifest.name.directory
    (directory / "index-00000-of-00001.json").write_bytes(index)
    worker = msgspec.structs.replace(manifest.workers[0], index_bytes=len(index), index_digest=digest(index))
    (directory / "manifest.json").write_bytes(seal(msgspec.structs.replace(manifest, workers=(worker,))))


def test_after_a_failed_save_the_next_refers_to_what_was_committed() -> None:
    objects = make_objects()
    storage = FullStorage(is_full=False)
    with manager_of(storage, objects) as manager:
        manager.save(1)
        manager.wait()
        storage.is_full = True
        train(objects, 2)
        with pytest.raises(SaveFailedError, match="no room"):
            manager.save(2).wait_committed(60)
        storage.is_full = False
        train(objects, 3)
        manager.save(3)
    assert references_of(storage, 3) == {1: 2}
    check_restored(storage, 3)


def test_a_part_of_a_step_is_restored_from_whichever_file_holds_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for pattern, frozen, trained in (("frozen/table", True, False), ("trained", False, True)):
        objects = make_objects()
        objects["frozen"]["table"][:] = -1
        with manager_of(tmp_path, objects) as manager:
            manager.restore(only=pattern)
        assert objects["frozen"]["table"][-1] == (399_999 if frozen else -1)
        assert objects["trained"]["head"][0, 0] == (2 if trained else 0)


def test_large_arrays_between_others_are_gathered(tmp_path: Path) -> None:
    """Several pieces, some of which lie in the image as they lie in the file and some of which do not."""
    sizes = (MIB, 3, 5 * MIB // 8, 4096, 7, 2 * MIB, 1)
    objects = {f"a{number}": np.zeros(size, np.float64) for number, size in enumerate(sizes)}
    with manager_of(tmp_path, objects) as manager:
        manager.save(1)
        manager.wait()
        for step, changed in enumerate(([0, 2], [1, 2, 5], [3, 4, 5, 6], [5], [0, 1, 2, 3, 4, 5, 6]), start=2):
            for number in changed:
                array = objects[f"a{number}"]
                array[:] = np.arange(array.size) * step
            manager.save(step)
            manager.wait()
            fresh = {name: np.zeros_like(array) for name, array in objects.items()}
            with manager_of(tmp_path, fresh) as other:
                other.restore()
            for name, array in objects.items():
                np.testing.assert_array_equal(fresh[name], array)
    assert all(damages == [] for damages in damages_of(LocalStorage(tmp_path)).values())
