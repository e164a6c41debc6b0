"""`holdfast copy`: the same bytes in another place, whole at each moment, and a run with which a job goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import holdfast
from command_line import DATA, INDEX, PROGRAM, call, call_json, complaint, flip_bit, make_objects, show_on_terminal
from faulty import Fault, FaultyStorage, StoppedDead
from holdfast.catalog import StoredRun
from holdfast.errors import HoldfastError
from holdfast.events.sinks import JOURNAL_NAME
from holdfast.format.names import StepName
from holdfast.restore.copying import copy_steps
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from interrupted_storage import Interrupted
from object_storage import ObjectStorage
from patience import read_line
from places import DATA as OLD_RUNS
from whole_runs import check_whole, steps_of


def list_files(place: Storage) -> dict[str, bytes]:
    return {entry.name: place.read(entry.name, 1 << 30) for entry in place.list("", deep=True)}


def copy_all(source: Storage, goal: Storage) -> list[str]:
    run = StoredRun(source)
    catalog = run.look(closely=True)
    return [copied.outcome.value for copied in copy_steps(run, goal, catalog.living, catalog.generation)]


def save(place: str | Path | Storage, steps: Iterable[int], **options: object) -> None:
    array = np.zeros(3)
    with holdfast.CheckpointManager(place, holdfast.Checkpoint(array=array), keep=holdfast.All(), **options) as manager:  # type: ignore[arg-type]
        manager.restore()
        for step in steps:
            array[:] = step
            manager.save(step, metrics={"loss": 1 / step}, metadata={"note": f"after {step}"})


def test_copy_has_the_bytes_of_the_lineage_and_a_second_what_is_new(run: Path, tmp_path: Path) -> None:
    copied = call_json("copy", run, there := f"file://{tmp_path}/there")
    assert [(one["step"], one["outcome"]) for one in copied["steps"]] == [
        (step, "copied") for step in (100, 200, 250, 300)
    ]
    mine, other = list_files(LocalStorage(run)), list_files(LocalStorage(tmp_path / "there"))
    off_line = {name for name in mine if name.startswith("step-000000300.g0001")}
    assert other == {name: data for name, data in mine.items() if name not in {*off_line, JOURNAL_NAME}}
    with holdfast.CheckpointManager(run, holdfast.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(400)
    again = call_json("copy", run, there)
    assert [one["outcome"] for one in again["steps"]] == ["there"] * 4 + ["copied"]
    assert call_json("rollback", f"{run}@250")["opened_generation"] == 4
    call_json("copy", run, there)
    assert steps_of(tmp_path / "there") == steps_of(run) == [100, 200, 250]
    with holdfast.CheckpointManager(there, holdfast.Checkpoint(**make_objects(1)), keep=2) as manager:
        assert manager.restore().step == 250  # type: ignore[union-attr]
        manager.save(260)
    assert check_whole(tmp_path / "there") == [250, 260]
    assert list(tmp_path.glob("there/step-000000400*")), "a step off the lineage is never swept away"


@pytest.mark.parametrize("name", ["v1", "v1-shards", "v1-references", "v1-raw-types", "v1-objects", "v1-summary"])
@pytest.mark.parametrize("make", [ObjectStorage, lambda: ObjectStorage(least_piece_bytes=8192, most_pieces=3)])
def test_runs_of_each_format_are_copied_there_and_back(name: str, make: Callable[[], Storage], tmp_path: Path) -> None:
    bucket, source, back = make(), LocalStorage(OLD_RUNS / name), LocalStorage(tmp_path / "back")
    assert set(copy_all(source, bucket)) == set(copy_all(bucket, back)) == {"copied"}
    steps = check_whole(bucket)
    assert steps == check_whole(back) == steps_of(source)
    assert list_files(back) == list_files(bucket)
    assert set(copy_all(source, back)) == {"there"}


def test_data_of_several_pieces_and_of_several_workers_arrives_whole(tmp_path: Path) -> None:
    arrays = {f"a{number}": np.random.default_rng(number).bytes(9_000_001 + number) for number in range(3)}
    save_one(tmp_path / "run", {name: np.frombuffer(data, np.uint8) for name, data in arrays.items()})
    assert call_json("copy", f"{tmp_path}/run@latest", tmp_path / "there")["copied_bytes"] > 27_000_000
    restored = holdfast.load(str(tmp_path / "there"))
    assert {name: array.tobytes() for name, array in restored["state"].items()} == arrays


def save_one(place: Path, state: dict[str, np.ndarray]) -> None:
    with holdfast.CheckpointManager(place, holdfast.Checkpoint(state=state)) as manager:
        manager.save(1)


@pytest.mark.parametrize("make", [MemoryStorage, ObjectStorage])
@pytest.mark.parametrize(("done", "stops_dead"), [("nothing", True), ("half", True), ("all", True), ("all", False)])
def test_copy_that_ends_at_any_call_leaves_whole_steps_and_goes_on(
    make: Callable[[str], Storage], done: str, stops_dead: bool
) -> None:
    source = MemoryStorage("source")
    save(source, (1, 2))
    save(source, (3,))
    whole = FaultyStorage(MemoryStorage("whole"))
    copy_all(source, whole)
    for number in range(1, len(whole.calls) + 1):
        inner = make(f"goal-{number}")
        faulty = FaultyStorage(inner, [Fault(number, done, stops_dead)])  # type: ignore[arg-type]
        with suppress(HoldfastError, StoppedDead):
            copy_all(source, faulty)
        before = check_whole(inner)
        assert before == [1, 2, 3][: len(before)], faulty.calls[-1]
        assert "damaged" not in copy_all(source, inner), faulty.calls[-1]
        assert check_whole(inner) == [1, 2, 3]
        temporary = {name for name in list_files(inner) if name.endswith(".tmp")}
        assert list_files(inner).keys() - temporary == list_files(whole).keys()


def test_job_that_begins_in_the_destination_ends_the_copy() -> None:
    source = MemoryStorage("source")
    save(source, (1, 2, 3))
    untouched = Interrupted()
    copy_all(source, untouched)
    errors: list[str] = []
    for number in range(1, untouched.calls + 1):
        goal = Interrupted()
        goal.interrupt(number, partial(save, goal, (10,)))
        try:
            copy_all(source, goal)
        except HoldfastError as error:
            errors.append(error.message)
        assert check_whole(goal)[-1] == 10
    assert len(errors) > untouched.calls // 2
    known = ("a job has", "were removed", "another run")
    assert [error for error in errors if not any(text in error for text in known)] == []


def remove(source: Storage) -> None:
    step = StoredRun(source).step(StepName(2, 1))
    step.withdraw()
    step.discard()


def test_steps_that_go_meanwhile_are_left_out() -> None:
    seen = set()
    for number in range(1, 60):
        source, goal = Interrupted(), MemoryStorage(f"goal-{number}")
        save(source, (1, 2, 3))
        names = StoredRun(source).look().living
        source.interrupt(number, partial(remove, source))
        outcomes = [copied.outcome.value for copied in copy_steps(StoredRun(source), goal, names)]
        assert outcomes in (["copied"] * 3, ["copied", "removed", "copied"])
        assert check_whole(goal) == [
            step for step, outcome in zip((1, 2, 3), outcomes, strict=True) if outcome[0] == "c"
        ]
        seen.add(tuple(outcomes))
    assert len(seen) == 2


def test_killed_copy_continues_and_offers_no_half_step(tmp_path: Path) -> None:
    save_one(tmp_path / "run", {f"a{number}": np.full(3_000_000, number) for number in range(4)})
    there = tmp_path / "there"
    for _ in range(2):
        copying = subprocess.Popen([PROGRAM, "copy", tmp_path / "run", there], stdout=subprocess.PIPE)
        while not list(there.glob("step-*/data*")) and copying.poll() is None:
            pass
        copying.send_signal(signal.SIGKILL)
        copying.wait(60)
        assert steps_of(there) in ([], [1])
    assert call("copy", tmp_path / "run", there).exit_code == 0
    assert check_whole(there) == [1]


def test_what_is_whole_of_an_interrupted_copy_is_not_copied_again(tmp_path: Path) -> None:
    source, there = OLD_RUNS / "v1-shards", tmp_path / "there"
    call("copy", source, there)
    (step,) = there.glob("step-*")
    (step / "manifest.json").unlink()
    (step / "committed").unlink()
    files = sorted(step.glob("data-*"))
    flip_bit(files[0], -1)
    written = [file.stat().st_mtime_ns for file in files]
    assert call_json("copy", source, there)["steps"][0]["outcome"] == "copied"
    assert [file.stat().st_mtime_ns == time for file, time in zip(files, written, strict=True)] == [False, True]
    assert check_whole(there) == steps_of(source)


def test_damaged_step_is_named_and_all_others_are_copied(run: Path, tmp_path: Path) -> None:
    flip_bit(run / "step-000000200.g0001" / DATA, -1)
    flip_bit(run / "step-000000250.g0002" / DATA, 100)
    result = call("copy", run, tmp_path / "there")
    assert result.exit_code == 1
    assert "damaged  step 200" in result.stdout
    assert "the header does not match" in result.stdout
    assert steps_of(tmp_path / "there") == [100, 300]
    assert not list(tmp_path.glob("there/step-0000002*"))


@pytest.mark.parametrize("lacking", ["manifest.json", "committed", "data-*", "index-*", "step-000000100*", "0002*"])
def test_copy_by_another_tool_that_lacks_files_is_completed(run: Path, tmp_path: Path, lacking: str) -> None:
    there = tmp_path / "there"
    shutil.copytree(run, there, ignore=shutil.ignore_patterns(lacking, "step-000000300.g0001"))
    (there / "step-000000250.g0002" / INDEX).write_bytes(b"cut off")
    assert call("copy", run, there).exit_code == 0
    assert check_whole(there) == [100, 200, 250, 300]
    with holdfast.CheckpointManager(there, holdfast.Checkpoint(**make_objects(1)), keep=holdfast.All()) as manager:
        manager.restore()
        manager.save(400)
    assert check_whole(there) == [100, 200, 250, 300, 400]


def test_late_metrics_follow_and_the_notes_of_a_save_stay(tmp_path: Path) -> None:
    save(tmp_path / "run", (1, 2))
    call("copy", tmp_path / "run", tmp_path / "there")
    with holdfast.CheckpointManager(tmp_path / "run", holdfast.Checkpoint(array=np.zeros(3))) as manager:
        manager.restore()
        manager.add_metrics(2, {"hits": 5.0})
    call("copy", tmp_path / "run", tmp_path / "there")
    shown = call_json("show", f"{tmp_path}/there@2")
    assert (shown["metrics"], shown["metadata"]) == ({"loss": 0.5, "hits": 5.0}, {"note": "after 2"})


def test_steps_and_ranges_bring_what_they_refer_to(tmp_path: Path) -> None:
    source = OLD_RUNS / "v1-references"
    chosen = call_json("copy", f"{source}@latest", tmp_path / "latest")
    assert [one["step"] for one in chosen["steps"]] == [1, 4]
    assert call("verify", tmp_path / "latest").exit_code == 0
    save(tmp_path / "run", range(1, 8))
    copied = call_json("copy", "--steps", "2, 4-5,step-000000007.g0001", tmp_path / "run", tmp_path / "some")
    assert [one["step"] for one in copied["steps"]] == [2, 4, 5, 7]
    assert check_whole(tmp_path / "some") == [2, 4, 5, 7]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("{run}", "{run}"), 2, "is what is to be copied"),
        (("{run}", "file://{run}/"), 2, "is what is to be copied"),
        (("{run}", "{other}"), 2, "is another run than"),
        (("{run}", "{tmp}"), 2, "holds other files, and no run"),
        (("{run}", "{tmp}/new@3"), 2, "Write {tmp}/new, without @3"),
        (("{run}", "{other}/step-000000001.g0001"), 2, "is the directory of a single step"),
        (("{run}/step-000000100.g0001", "{tmp}/new"), 2, "is the directory of a single step"),
        (("{run}@100", "{tmp}/new", "--steps", "3"), 2, "cannot be combined"),
        (("{run}", "{tmp}/new", "--steps", "3-x"), 2, "is not a step"),
        (("{run}", "{tmp}/new", "--steps", "1-9"), 3, "has no step from 1 to 9"),
        (("{run}", "{tmp}/new", "--steps", "7"), 3, "there is no checkpoint of step 7"),
        (("{tmp}/nothing", "{tmp}/new"), 3, "there is no directory"),
        (("{run}", "s4://new"), 2, "is not supported"),
    ],
)
def test_what_cannot_be_copied_is_refused(
    run: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    save(tmp_path / "other", (1,))
    places = {"run": run, "other": tmp_path / "other", "tmp": tmp_path}
    found_code, words = complaint("copy", *(argument.format(**places) for argument in arguments))
    assert (found_code, text.format(**places) in words) == (code, True), words
    assert not (tmp_path / "new").exists()


def test_step_that_differs_stays_and_a_copy_that_went_on_is_refused(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    call("copy", run, there)
    with holdfast.CheckpointManager(tmp_path / "other", holdfast.Checkpoint(**make_objects(1))) as manager:
        manager.save(100)
    shutil.rmtree(there / "step-000000100.g0001")
    other = shutil.copytree(tmp_path / "other" / "step-000000100.g0001", there / "step-000000100.g0001")
    result = call("copy", run, there)
    assert result.exit_code == 1
    assert "there/step-000000100.g0001 differs from the step in" in result.stdout
    assert (Path(other) / "manifest.json").exists()
    with holdfast.CheckpointManager(there, holdfast.Checkpoint(**make_objects(1))) as manager:
        manager.restore()
        manager.save(400)
    assert "a job has continued there: its generation 3" in complaint("copy", run, there)[1]


def test_open_run_is_not_copied_into(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TAKE_OVER")
    program = """if True:
        import sys, holdfast
        with holdfast.resumable(sys.argv[1], a=1) as run:
            for _ in run.steps(1):
                print("in", flush=True)
                sys.stdin.read()
        """
    job = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "open"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert read_line(job) == "in\n"
    code, text = complaint("copy", run, tmp_path / "open")
    assert (code, f"process {job.pid}" in text) == (2, True), text
    job.communicate("", 60)


def test_terminal_shows_each_step_and_the_speed(run: Path, tmp_path: Path) -> None:
    shown = show_on_terminal("copy", run, tmp_path / "there")
    assert "✓ copied   step 300" in shown.text
    assert "4 steps: 4 copied" in shown.text
    assert "/s" in shown.text
    assert "1 step off the current lineage" in shown.text
