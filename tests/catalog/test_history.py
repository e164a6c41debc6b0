"""A run with a long history: it costs no more reads than a short one, and what is read of it is true.

A summary says of old steps that they are committed. `read_catalog(closely=True)` looks into each directory instead,
and is the oracle here.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

import holdfast as hf
from command_line import call
from faulty import Call, Fault, FaultyStorage
from holdfast.catalog import Catalog, StoredRun
from holdfast.cluster import Cluster
from holdfast.errors import FencedError, HoldfastError, NoWholeCheckpointError, SaveFailedError
from holdfast.events import Event, Warned
from holdfast.format.digests import seal
from holdfast.format.names import StepName, base_path, generation_path, parse_summary_file, summary_path
from holdfast.format.records import Base, Opening, Summary, decode_summary, make_base
from holdfast.policies import RetentionPolicy
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from interrupted_storage import Interrupted
from memory_engine import run_workers
from places import DATA
from whole_runs import check_whole

LONG = "HOLDFAST_LONG" in os.environ


def open_manager(storage: Storage | Path, **options: Any) -> hf.CheckpointManager:
    options.setdefault("cluster", "alone")
    return hf.CheckpointManager(storage, hf.Checkpoint(weights=np.zeros(4)), threads=1, **options)


def save_steps(storage: Storage | Path, steps: int, **options: Any) -> int:
    """One job, which goes on from the newest step and saves so many more; gives the last of them."""
    with open_manager(storage, **options) as manager:
        restored = manager.restore()
        last = 0 if restored is None else restored.step
        for step in range(last + 1, last + steps + 1):
            manager.save(step, metrics={"loss": 1 / step}).wait_ended(60)
    return last + steps


def copy_into(storage: Storage, copy: Storage, path: str = "") -> Any:
    """Puts all that lies in one storage into another one, which it gives."""
    for entry in storage.list(path):
        below = f"{path}/{entry.name}" if path else entry.name
        if entry.is_directory:
            copy.make_directory(below)
            copy_into(storage, copy, below)
        else:
            copy.write(below, storage.read(below, 1 << 30))
    return copy


def list_summaries(storage: Storage) -> list[str]:
    return [entry.name for entry in storage.list("generations") if parse_summary_file(entry.name)]


def strip(catalog: Catalog) -> Catalog:
    """Without what only a look at each directory finds."""
    return msgspec.structs.replace(catalog, bases={}, faults=())


def check_true(storage: Storage) -> Catalog:
    """Makes sure that a look which believes the summary finds what a close look finds."""
    catalog = StoredRun(storage).look()
    assert strip(catalog) == strip(StoredRun(storage).look(closely=True))
    return catalog


# What it costs.


def count_calls(storage: Storage, act: Callable[[Storage], object]) -> Counter[str]:
    counted = FaultyStorage(storage)
    act(counted)
    return Counter(call.name for call in counted.calls)


def count_each(storage: Storage, keep: RetentionPolicy, *, jobs: int = 2, saves: int = 17) -> dict[str, Counter[str]]:
    """The calls of each thing that a job does; of those that come again and again, the most of each kind."""

    def measure(act: Callable[[], object]) -> Counter[str]:
        before = len(counted.calls)
        act()
        return Counter(call.name for call in counted.calls[before:])

    most: dict[str, Counter[str]] = {}
    for _ in range(jobs):
        counted = FaultyStorage(storage)
        manager: list[hf.CheckpointManager] = []
        most["open"] = most.get("open", Counter()) | measure(
            lambda: manager.append(open_manager(counted, keep=keep))  # noqa: B023
        )
        most["restore"] = most.get("restore", Counter()) | measure(manager[0].restore)
        last = manager[0].steps()[-1]
        for step in range(last + 1, last + saves + 1):
            name = "first save" if step == last + 1 else "save"
            found = measure(lambda: manager[0].save(step, metrics={"loss": 1.0}).wait_ended(60))  # noqa: B023
            most[name] = most.get(name, Counter()) | found
        manager[0].close()
    return most


def check_equal_counts(many: dict[str, Counter[str]], few: dict[str, Counter[str]]) -> None:
    """A few calls more or less depend on which old steps a job happens to look at."""
    assert many.keys() == few.keys()
    for name, calls in many.items():
        assert not {call: (calls[call], few[name][call]) for call in calls if abs(calls[call] - few[name][call]) > 4}, (
            name
        )


@pytest.mark.parametrize("keeps", ["all", "latest"])
def test_kept_steps_cost_no_calls(keeps: str) -> None:
    few, many = (MemoryStorage(keeps) for _ in range(2))
    for storage, steps in ((few, 40), (many, 400)):
        keep: RetentionPolicy = hf.Latest(steps) if keeps == "latest" else hf.All()
        save_steps(storage, steps + 20, keep=keep)
    costs = count_each(few, hf.Latest(40) if keeps == "latest" else hf.All())
    check_equal_counts(count_each(many, hf.Latest(400) if keeps == "latest" else hf.All()), costs)
    assert sum(costs["open"].values()) < 60
    assert sum(costs["save"].values()) < 120
    check_true(many)


def count_save(kept: int) -> dict[str, float]:
    """The calls of a save in a run that keeps so many steps, on the average of 100 saves."""
    counted, saves = FaultyStorage(MemoryStorage("run")), 100
    with open_manager(counted, keep=hf.Latest(3) | hf.EveryN(1000)) as manager:
        for step in (*range(1000, 1000 * (kept - 2), 1000), *range(10**6 + 1, 10**6 + 31)):
            manager.save(step).wait_ended(60)
        assert len(manager.steps()) == kept
        before = len(counted.calls)
        for step in range(10**6 + 31, 10**6 + 31 + saves):
            manager.save(step).wait_ended(60)
        return {name: calls / saves for name, calls in Counter(call.name for call in counted.calls[before:]).items()}


def test_history_costs_a_save_two_looks() -> None:
    """Of what is kept two manifests are looked for in turn; with hundreds of steps as with dozens."""
    few = count_save(3)
    for kept in (66, 300):
        many = count_save(kept)
        assert many.keys() == few.keys()
        more = {name: calls - few[name] for name, calls in many.items()}
        assert more == pytest.approx(dict.fromkeys(few, 0.0) | {"open_reader": 2.0}, abs=0.15)


@pytest.mark.parametrize("goes_back", [False, True], ids=["goes on", "went back once"])
def test_generations_cost_no_calls(goes_back: bool) -> None:
    few, many = (MemoryStorage("run") for _ in range(2))
    for storage, generations in ((few, 60), (many, 160)):
        save_steps(storage, 3, keep=hf.Latest(5))
        if goes_back:
            with open_manager(storage, keep=hf.Latest(5)) as manager:
                manager.restore(2)
                manager.save(4)
        for _ in range(generations):
            save_steps(storage, 1, keep=hf.Latest(5))
    costs = count_each(few, hf.Latest(5), jobs=30, saves=2)
    check_equal_counts(count_each(many, hf.Latest(5), jobs=30, saves=2), costs)
    assert sum(costs["open"].values()) < 60
    off_line = set(StoredRun(many).look().committed) - set(StoredRun(many).look().living)
    assert off_line == ({StepName(3, 1)} if goes_back else set())


def test_a_short_run_has_no_summary(tmp_path: Path) -> None:
    save_steps(tmp_path, 8)
    save_steps(tmp_path, 8)
    assert {path.name for path in (tmp_path / "generations").iterdir()} == {
        "0001.json",
        "0001.base.json",
        "0002.json",
        "0002.base.json",
    }


# What is believed is true.


def make_long(*, keep: RetentionPolicy | None = None, steps: int = 40, name: str = "run") -> MemoryStorage:
    storage = MemoryStorage(name)
    save_steps(storage, steps // 2, keep=keep)
    save_steps(storage, steps - steps // 2, keep=keep)
    assert list_summaries(storage)
    return storage


def go_on(storage: Storage) -> None:
    """A job for which all is done that is done for a long history: a summary is taken over, steps go."""
    with open_manager(storage, keep=hf.Latest(20) | hf.EveryN(10)) as manager:
        manager.restore()
        for step in (41, 42, 43):
            manager.save(step, metrics={"loss": 1.0})


@pytest.mark.parametrize("stops_dead", [True, False], ids=["dead", "error"])
@pytest.mark.parametrize("done", ["nothing", "half", "all"])
def test_summary_is_true_after_a_death_or_fault_at_any_call(
    done: Literal["nothing", "half", "all"], stops_dead: bool
) -> None:
    ground = make_long()
    for _ in range(26):
        with open_manager(ground, keep=hf.All()) as manager:
            manager.restore()
            manager.save(40, replace=True)
    calls = len(count_and_keep(copy_into(ground, MemoryStorage("run")), go_on))
    numbers = range(1, calls + 1)
    if not LONG:
        numbers = numbers[("nothing", "half", "all").index(done) + 3 * stops_dead :: 6]
    seen = set()
    for number in numbers:
        inner = copy_into(ground, MemoryStorage("run"))
        storage = FaultyStorage(inner, [Fault(number, done=done, stops_dead=stops_dead)])
        try:
            go_on(storage)
        except (HoldfastError, BaseException) as error:
            if not isinstance(error, HoldfastError) and not storage.is_dead:
                raise
        where = f"fault at call {number}: {storage.calls[min(number, len(storage.calls)) - 1]}"
        catalog = check_true(inner)
        assert catalog.living[-1].step in (40, 41, 42, 43), where
        seen.add(catalog.living[-1].step)
        # The next job goes on, and clears up.
        last = save_steps(inner, 2, keep=hf.Latest(20) | hf.EveryN(10))
        catalog = check_true(inner)
        assert (catalog.unfinished, catalog.trash) == ((), ()), where
        assert not [entry for entry in inner.list("generations") if entry.name.endswith(".tmp")], where
        assert check_whole(inner)[-1] == last, where
    assert {40, 43} <= seen


def count_and_keep(storage: Storage, act: Callable[[Storage], object]) -> tuple[Any, ...]:
    counted = FaultyStorage(storage)
    act(counted)
    return counted.calls


def test_a_full_disk_does_not_keep_steps_from_being_removed() -> None:
    storage = make_long(steps=40)

    class Full(MemoryStorage):
        def publish(self, path: str, data: bytes) -> bool:
            if ".summary-" in path and "-0001." not in path:
                raise hf.errors.StorageFullError("no room", path=path)
            return super().publish(path, data)

    full = copy_into(storage, Full("run"))
    save_steps(full, 1, keep=hf.Latest(10))
    assert [name.step for name in check_true(full).committed] == list(range(32, 42))
    assert list_summaries(full) == []


# Two jobs.


def race(seed: int, at: int) -> bool:
    """Has a second job begin at one call of the first; False if the first one has ended before that call."""
    choose = random.Random(seed)
    storage = copy_into(GROUND, Interrupted())
    keep = hf.Latest(choose.choice([10, 20, 30]))
    told: list[int] = []

    def take_over() -> None:
        told.append(save_steps(storage, choose.randint(1, 12), keep=hf.Latest(choose.choice([10, 20, 30, 40]))))

    storage.interrupt(at, take_over)
    given_up: set[StepName] = set()
    with suppress(FencedError, SaveFailedError, HoldfastError):
        with open_manager(storage, keep=keep) as manager:
            manager.restore()
            for step in range(41, 41 + choose.randint(2, 10)):
                manager.save(step).wait_ended(60)
    if not storage.was_interrupted:
        return False
    before = StoredRun(storage).look()
    closely = StoredRun(storage).look(closely=True)
    # A job that was stopped between its look at the fence and the removal takes manifests of what it gave up.
    given_up = set(before.committed) - set(closely.committed)
    assert given_up.isdisjoint(closely.living)
    assert before.newest == closely.newest
    assert told[0] in {name.step for name in closely.living}, "what was acknowledged last has left the line"
    # The next job finds that out in time.
    save_steps(storage, 40, keep=hf.Latest(70))
    check_true(storage)
    check_whole(storage)
    return True


GROUND = MemoryStorage("ground")
save_steps(GROUND, 20)
save_steps(GROUND, 20)


@pytest.mark.parametrize("seed", range(40 if LONG else 1))
def test_a_second_job_begins_at_each_call_of_the_first(seed: int) -> None:
    at = 1 if LONG else 3
    races = 0
    while race(seed + at, at):
        at += 11 if LONG else 9
        races += 1
    assert races > 15


class Sleeping(MemoryStorage):
    """Something happens once, right before the call on a path that has this in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.path = ""
        self.meanwhile: Callable[[], object] = list

    def sleep(self, path: str, meanwhile: Callable[[], object]) -> None:
        self.path, self.meanwhile = path, meanwhile

    def _wake(self, path: str) -> None:
        if self.path and self.path in path:
            self.path = ""
            self.meanwhile()

    def publish(self, path: str, data: bytes) -> bool:
        self._wake(path)
        return super().publish(path, data)

    def make_directory(self, path: str) -> None:
        self._wake(path)
        super().make_directory(path)


@pytest.mark.parametrize("others", [1, 3], ids=["one", "three"])
def test_a_job_that_sleeps_at_its_opening_disturbs_none_that_began(others: int) -> None:
    storage = Sleeping("run")
    save_steps(storage, 5)
    with ExitStack() as stack:
        running: list[hf.CheckpointManager] = []

        def begin_others() -> None:
            for _ in range(others - 1):
                save_steps(storage, 5)
            other = stack.enter_context(open_manager(storage))
            restored = other.restore()
            assert restored is not None
            other.save(restored.step + 5).wait_ended(60)
            running.append(other)

        storage.sleep("generations/0002.json", begin_others)
        with pytest.raises(SaveFailedError, match="after this job chose"):
            save_steps(storage, 1)
        (other,) = running
        newest = other.steps()[-1]
        other.save(newest + 1).wait_committed(60)
        assert StoredRun(storage).look().living[-2:] == (
            StepName(newest, others + 1),
            StepName(newest + 1, others + 1),
        )


def test_a_step_of_a_dead_lineage_stays_off_the_line_for_ever() -> None:
    storage = Sleeping("run")
    keep = hf.Latest(3) | hf.Best("loss")

    def go_on_for_long() -> None:
        for _ in range(40):
            save_steps(storage, 2, keep=keep)

    with suppress(FencedError, SaveFailedError), open_manager(storage, keep=keep) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, metrics={"loss": 0.001}).wait_ended(60)
        storage.sleep("step-000000060", go_on_for_long)
        manager.save(60, metrics={"loss": 0.0}).wait_ended(60)
    late = StepName(60, 1)
    assert late in StoredRun(storage).look(closely=True).committed, "it was published"
    for _ in range(3):
        save_steps(storage, 1, keep=keep)
        assert late not in StoredRun(storage).look().living
        assert late not in StoredRun(storage).look(closely=True).living


def test_a_job_whose_base_another_job_has_removed_starts_nothing_over() -> None:
    """Two jobs in one directory: the younger one takes over, and ends within its first save."""
    storage = MemoryStorage()
    with open_manager(storage, keep=hf.Latest(2)) as older:
        older.save(1).wait_committed()
        with open_manager(storage) as younger:
            assert younger.restore() is not None
            for step in range(2, 6):
                older.save(step).wait_committed()
            older.wait()
            # It has opened its generation, and wrote nothing else.
            base = StepName(1, 1)
            StoredRun(storage).record_base(make_base(StoredRun(storage).open_generation(), base))
    with open_manager(storage) as manager:
        with pytest.raises(NoWholeCheckpointError, match="step 1, from which the newest job began, is gone") as caught:
            manager.restore()
        assert "holdfast rollback memory://@5" in caught.value.hint
        restored = manager.restore(5)
        assert restored is not None
        assert restored.step == 5
        manager.save(6).wait_committed()
    with open_manager(storage, begin_anew=True) as manager:
        assert manager.restore() is None


def test_a_step_is_synced_before_a_generation_begins_from_it() -> None:
    """Its saver may have died between its publication and the sync, and the power may fail next."""
    storage = FaultyStorage(MemoryStorage())
    last = save_steps(storage, 1)
    before = len(storage.calls)
    save_steps(storage, 1)
    calls = storage.calls[before:]
    synced = calls.index(Call("sync_directory", StepName(last, 1).directory))
    assert synced < calls.index(Call("publish", base_path(2)))


def test_a_directory_named_like_a_summary_is_left_alone() -> None:
    storage = make_long()
    generation, number = max(filter(None, map(parse_summary_file, list_summaries(storage))))
    storage.make_directory(summary_path(generation + 1, number + 5))
    storage.write(f"{summary_path(generation + 1, number + 5)}/x", b"x")
    remove_manifest(storage, StepName(7, 1))
    save_steps(storage, 50)
    check_true(storage)


# Anything that a run goes through.


KEEPS: list[RetentionPolicy] = [
    hf.All(),
    hf.Latest(5),
    hf.Latest(20),
    hf.EveryN(3) | hf.Latest(2),
    hf.Best("loss", n=15),
]


@pytest.mark.parametrize("seed", range(200 if LONG else 6))
def test_summary_is_true_after_random_changes_of_a_run(seed: int) -> None:
    choose = random.Random(seed)
    storage = MemoryStorage(str(seed))
    last = save_steps(storage, 30, keep=hf.All())
    for _ in range(20):
        keep = choose.choice(
            [hf.All(), hf.Latest(5), hf.Latest(20), hf.EveryN(3) | hf.Latest(2), hf.Best("loss", n=15)]
        )
        catalog = StoredRun(storage).look()
        match choose.randrange(6):
            case 0 | 1 | 2:
                last = save_steps(storage, choose.randint(1, 15), keep=keep)
            case 3:  # Goes back.
                with open_manager(storage, keep=keep) as manager:
                    step = choose.choice(catalog.living).step
                    manager.restore(step)
                    manager.save(step + 1, metrics={"loss": 0.0})
                last = step + 1
            case 4:  # A person removes directories.
                for name in choose.sample(catalog.committed, min(3, len(catalog.committed) - 1)):
                    if name != catalog.newest:
                        for entry in storage.list(name.directory):
                            storage.delete([f"{name.directory}/{entry.name}"])
                        storage.delete([name.directory])
            case 5:  # Or summaries, or what other programs left.
                for summary in list_summaries(storage):
                    if choose.random() < 0.5:
                        storage.delete([f"generations/{summary}"])
        check_true(storage)
        assert StoredRun(storage).look() == StoredRun(storage).look()
    assert check_whole(storage)[-1] == last


# What is not true is found.


def remove_manifest(storage: Storage, name: StepName) -> None:
    storage.delete([name.manifest_path])


def test_a_step_that_has_lost_its_manifest_is_not_offered() -> None:
    storage = make_long()
    lost = StepName(7, 1)
    remove_manifest(storage, lost)
    with open_manager(storage) as manager:
        with pytest.raises(NoWholeCheckpointError, match="step 7 was committed, and its manifest is gone"):
            manager.restore(7)
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 40


def test_the_newest_step_is_looked_for_though_a_summary_vouches_for_it() -> None:
    storage = make_long()
    # A person removes the newest steps, of which there was no word in the summary; and the manifest of what is left.
    run = StoredRun(storage)
    history = run.history
    catalog = run.look()
    for name in catalog.living:
        if name not in history.believed or name.step > 30:
            for entry in storage.list(name.directory):
                storage.delete([f"{name.directory}/{entry.name}"])
            storage.delete([name.directory])
    newest = StoredRun(storage).look().living[-1]
    assert newest in history.believed
    remove_manifest(storage, newest)
    assert check_true(storage).newest == StepName(newest.step - 1, newest.generation)


def test_a_job_finds_what_lost_its_manifest_and_keeps_it() -> None:
    storage = make_long()
    lost = StepName(7, 1)
    remove_manifest(storage, lost)
    events: list[Event] = []
    # Two steps are looked at after each save, from a random one on, while one more comes each time.
    save_steps(storage, 50, sinks=[events.append])
    assert any("step 7 was committed" in event.text for event in events if isinstance(event, Warned))
    check_true(storage)
    save_steps(storage, 2, keep=hf.Latest(5))
    assert {entry.name for entry in storage.list(lost.directory)} >= {"committed", "data-00000-of-00001.safetensors"}


def test_retention_keeps_what_lost_its_manifest_just_now() -> None:
    storage = make_long()
    lost = StepName(7, 1)
    remove_manifest(storage, lost)
    save_steps(storage, 1, keep=hf.Latest(5))
    assert {entry.name for entry in storage.list(lost.directory)} >= {"committed", "data-00000-of-00001.safetensors"}
    assert check_true(storage).lost == (lost,)


def forge(storage: Storage, change: Callable[[Summary], Summary | bytes]) -> None:
    """Puts another summary in the place of the one that counts."""
    path = f"generations/{max(list_summaries(storage))}"
    generation, number = parse_summary_file(path.rpartition("/")[2]) or (0, 0)
    summary = decode_summary(storage.read(path, 1 << 30), path=path, generation=generation, number=number)
    forged = change(summary)
    storage.delete([path])
    storage.write(path, forged if isinstance(forged, bytes) else seal(forged))


def replaced(**fields: Any) -> Callable[[Summary], Summary]:
    return lambda summary: msgspec.structs.replace(summary, **fields)


FORGERIES: dict[str, Callable[[Summary], Summary | bytes]] = {
    "torn": lambda summary: seal(summary)[:-100],
    "empty": lambda summary: b"",
    "changed": lambda summary: seal(summary).replace(b"step-000000007", b"step-000000008"),
    "of another run": replaced(token="0" * 32),
    "of another generation": replaced(generation=1),
    "with another number": replaced(number=77),
    "with names that lead elsewhere": replaced(directories=("../..", "step-000000007.g0001/../x", "step-7.g1", "")),
    "with no facts": replaced(facts=msgspec.Raw(b"[]")),
    "with odd facts": replaced(facts=msgspec.Raw(b'{"a": [1e999]}')),
    "with a base after its generation": lambda summary: msgspec.structs.replace(
        summary, bases=(msgspec.structs.replace(summary.bases[0], step=5, base_generation=9, base_attempt=1),)
    ),
    "of a later format": lambda summary: seal(summary).replace(b'"version":1', b'"version":2'),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_summary_that_is_not_this_runs_own_costs_only_time(forgery: str) -> None:
    storage = make_long()
    forge(storage, FORGERIES[forgery])
    check_true(storage)
    # Retention judges by what the manifests say.
    save_steps(storage, 1, keep=hf.Best("loss", "max", n=3) | hf.Latest(2))
    assert [name.step for name in check_true(storage).committed] == [1, 2, 3, 40, 41]


def test_a_forged_summary_cannot_make_an_unfinished_step_the_newest() -> None:
    storage = make_long()
    unfinished = StepName(99, 2)
    storage.make_directory(unfinished.directory)
    storage.write(f"{unfinished.directory}/index-00000-of-00001.json", b"half")
    forge(storage, lambda one: msgspec.structs.replace(one, directories=(*one.directories, unfinished.directory)))
    catalog = check_true(storage)
    assert catalog.newest == StepName(40, 2)
    assert catalog.unfinished == (unfinished,)


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_summary_that_is_not_a_plain_file_is_ignored(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    save_steps(run, 30)
    (path,) = (run / "generations").glob("*.summary-0002.json")
    path.rename(tmp_path / "elsewhere.json")
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere.json")
    assert StoredRun(LocalStorage(run)).history.believed == frozenset()
    check_true(LocalStorage(run))
    assert save_steps(run, 20) == 50
    check_true(LocalStorage(run))


def test_a_job_that_knows_of_no_summaries_may_go_on() -> None:
    """It removes a step and dies half-way. The summary of the job before says otherwise, and does not count."""
    storage = make_long()
    known = StoredRun(storage).look()
    publish(storage, Opening("older", "host", 1, 0.0, generation=3), make_base(3, known.newest))
    removed = known.committed[0]
    storage.delete([removed.committed_path])
    storage.delete([removed.manifest_path])
    assert check_true(storage).unfinished == (removed,)
    save_steps(storage, 1)
    assert check_true(storage).unfinished == ()


def publish(storage: Storage, opening: Opening, base: Base) -> None:
    assert storage.publish(generation_path(opening.generation), seal(opening))
    assert storage.publish(base_path(opening.generation), seal(base))


# Beside a person, other workers, and old runs.


def test_what_a_person_prunes_is_gone_though_a_job_runs(tmp_path: Path) -> None:
    with open_manager(tmp_path) as manager:
        for step in range(1, 31):
            manager.save(step).wait_ended(60)
        assert call("prune", tmp_path, "--steps", "3,4", "--yes").exit_code == 0
        assert 3 not in manager.steps()
        for step in range(31, 45):
            manager.save(step).wait_ended(60)
        assert manager.steps() == (1, 2, *range(5, 45))
    check_true(LocalStorage(tmp_path))


def test_several_workers_sum_up_too() -> None:
    storage = MemoryStorage("several")

    def work(cluster: Cluster) -> None:
        checkpoint = hf.Checkpoint(weights=np.zeros(4))
        for _ in range(2):
            with hf.CheckpointManager(storage, checkpoint, cluster=cluster, threads=1, keep=hf.Latest(25)) as manager:
                restored = manager.restore()
                last = 0 if restored is None else restored.step
                for step in range(last + 1, last + 31):
                    manager.save(step).wait_ended(60)

    run_workers(2, work)
    assert list_summaries(storage)
    assert [name.step for name in check_true(storage).living] == list(range(36, 61))


@pytest.mark.parametrize("run", ["v1", "v1-references"])
def test_old_runs_get_a_summary(tmp_path: Path, run: str) -> None:
    place = tmp_path / "run"
    shutil.copytree(DATA / run, place)
    storage = LocalStorage(place)
    before = StoredRun(storage).look(closely=True)
    with open_manager(place, begin_anew=True) as manager:
        for step in range(1, 31):
            manager.save(step).wait_ended(60)
    catalog = check_true(storage)
    assert set(before.committed) < set(catalog.committed)
    assert set(before.committed) <= StoredRun(storage).history.believed | set(StoredRun(storage).look().committed)
    check_whole(place)


def test_a_summary_is_named_by_generation_and_number() -> None:
    assert summary_path(7, 3) == "generations/0007.summary-0003.json"
    assert parse_summary_file("0007.summary-0003.json") == (7, 3)
    for name in (
        "0007.summary-3.json",
        "0000.summary-0001.json",
        "0007.summary-0000.json",
        "0007.json",
        "7.summary-0001.json",
    ):
        assert parse_summary_file(name) is None


def test_a_stored_run_with_a_summary_is_read(tmp_path: Path) -> None:
    """`tests/data/v1-summary` has 18 steps of two generations, and step 19, whose job went on from 17."""
    place = tmp_path / "run"
    shutil.copytree(DATA / "v1-summary", place)
    storage = LocalStorage(place)
    run = StoredRun(storage)
    history = run.history
    catalog = run.look()
    assert history.believed == {StepName(step, 1 + (step > 9)) for step in range(1, 14)}
    assert strip(catalog) == strip(StoredRun(storage).look(closely=True))
    assert [name.step for name in catalog.living] == [*range(1, 18), 19]
    facts = history.facts(StepName(4, 1))
    assert facts is not None
    assert (facts.metrics, facts.size_bytes, facts.refers_to) == ({"loss": 0.25}, 4128, ())
    weights = np.zeros(4)
    manager = hf.CheckpointManager(place, hf.Checkpoint(weights=weights), cluster="alone")
    for step in (None, 4):
        restored = manager.restore(step)
        assert restored is not None
        assert (weights == restored.step).all()
    manager.close()
    save_steps(place, 10, keep=hf.Latest(4))
    assert len(check_true(storage).living) == 4
