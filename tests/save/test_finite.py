"""Whether parameters and optimizer states are finite: found while a save takes digests, with all that follows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import holdfast
import preloaded
from command_line import call, call_json, lines_of
from holdfast.catalog import StoredRun
from holdfast.errors import NotFiniteError
from holdfast.events import Event, NotFinite
from holdfast.format.records import Nonfinite
from holdfast.policies import KeptCandidate, plan_retention
from holdfast.storage import open_storage
from holdfast.storage.digesting import FLOAT_MARKS, NONFINITE, MarkedParts, digest_parts
from holdfast.testing.processes import Workers, python
from jobs import HOST, environment, find_port
from patience import PATIENCE_SECONDS
from places import PROGRAMS

SPAN = 1 << 20


@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "F64"])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(name: str) -> None:
    """By the compiled code and by NumPy alike, at the ends of what is looked at together."""
    kind, largest = {"F16": ("<f2", 65504.0), "F32": ("<f4", 3.4e38), "F64": ("<f8", 1.7e308)}.get(
        name, ("<f4", 3.3e38)
    )
    generator = np.random.default_rng(3)
    for count in (0, 1, 1023, 1024, 1025, 2 * SPAN // 4 + 5):
        for bad in (None, np.nan, -np.nan, np.inf, -np.inf):
            numbers = generator.normal(size=count).astype(kind)
            numbers[:1], numbers[1:2] = largest, -largest
            places = {0, count - 1, int(generator.integers(max(count, 1)))} if bad is not None and count else set()
            numbers[list(places)] = bad if bad is not None else 0
            if name == "BF16":
                numbers = (numbers.view("<u4") >> 16).astype("<u2")
            memory = memoryview(numbers.tobytes())
            spans = [memory[begin : begin + SPAN] for begin in range(0, len(memory), SPAN)]
            found = {place * numbers.itemsize // SPAN for place in places}
            expected = bytearray(NONFINITE if number in found else 0 for number in range(len(spans)))
            quick, plain = MarkedParts(spans), MarkedParts(spans)
            quick.marks, plain.marks = (bytearray([FLOAT_MARKS[name]]) * len(spans) for _ in range(2))
            assert digest_parts(quick) == digest_parts(list(spans))
            quick.look_through()
            plain.look_through()
            assert (quick.marks, plain.marks) == (expected, expected), (count, bad)


def train(
    directory: Path,
    total: int,
    bad: dict[int, str],
    events: list[Event] | None = None,
    *,
    value: float = float("nan"),
    **options: Any,
) -> None:
    """Trains a model with a mask and an optimizer; in some steps, or before the first, a tensor of that name gets a
    value that is not finite."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"best": float("nan"), "table": np.full(3, np.inf)}
    sinks = [] if events is None else [events.append]
    with holdfast.resumable(
        directory,
        model=model,
        optimizer=optimizer,
        state=state,
        rng=holdfast.RNG(),
        save_every=1,
        sinks=sinks,
        **options,
    ) as run:
        if name := bad.get(0):
            dict(model.named_parameters())[name].data.fill_(value)
            run.save()
        for step in run.steps(total):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if name := bad.get(step + 1):
                values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                found = values.get(name)
                target = optimizer.state[[*model.parameters()][1]][name] if found is None else found
                target.data.view(-1)[-1] = value


def judged(directory: Path) -> dict[int, Nonfinite | None]:
    run = StoredRun(open_storage(directory))
    return {name.step: run.step(name).manifest().nonfinite for name in run.look().living}


@pytest.mark.parametrize("incremental", [False, True])
def test_parameters_and_optimizer_states_count_and_nothing_else(tmp_path: Path, incremental: bool) -> None:
    events: list[Event] = []
    bad = {2: "1.running_mean", 4: "0.weight"}
    train(tmp_path / "a", 3, bad, events, keep=holdfast.All(), incremental=incremental)
    assert judged(tmp_path / "a") == dict.fromkeys((1, 2, 3), Nonfinite())
    assert not any(isinstance(event, NotFinite) for event in events)
    train(tmp_path / "a", 4, bad, events, keep=holdfast.All(), incremental=incremental)
    assert judged(tmp_path / "a")[4] == Nonfinite(1, ("model/0.weight",))
    (event,) = [event for event in events if isinstance(event, NotFinite)]
    assert str(event) == "step 4 is not finite: nan or infinity in model/0.weight"
    train(tmp_path / "b", 2, {2: "exp_avg"}, keep=holdfast.All(), incremental=incremental)
    assert judged(tmp_path / "b")[2] == Nonfinite(1, ("optimizer/state/model.0.weight/exp_avg",))


def test_what_was_infinite_in_the_first_checkpoint_does_not_count(tmp_path: Path) -> None:
    events: list[Event] = []
    for total in (2, 3):  # Another process knows of it by the checkpoint.
        bad = {1: "unused", 3: "1.weight"}
        train(tmp_path, total, bad, events, keep=holdfast.All(), value=-float("inf"))
    found = judged(tmp_path)
    assert found[1] is not None
    assert found[2] is not None
    assert found[1].exempt == ("model/unused",)
    assert (found[1].leaves, found[2].leaves, found[2].exempt) == (0, 0, found[1].exempt)
    assert found[3] == Nonfinite(1, ("model/1.weight",), found[1].exempt)
    said = [event for event in events if isinstance(event, NotFinite)]
    assert [(event.step, event.is_exempt) for event in said] == [(1, True), (3, False)]


@pytest.mark.parametrize("incremental", [False, True])
def test_nan_in_a_first_checkpoint_that_training_has_made_counts(tmp_path: Path, incremental: bool) -> None:
    events: list[Event] = []
    with pytest.raises(NotFiniteError, match=r"step 1 is not finite: nan or infinity in model/0\.weight") as caught:
        train(tmp_path, 9, {1: "0.weight"}, events, on_nonfinite="raise", incremental=incremental)
    assert caught.value.hint == "No checkpoint is finite: find the cause, and start over."
    assert judged(tmp_path)[1] == Nonfinite(1, ("model/0.weight",))
    assert {event.is_exempt for event in events if isinstance(event, NotFinite)} == {False}


def test_nan_in_a_checkpoint_from_before_training_does_not_count(tmp_path: Path) -> None:
    for total in (2, 3):
        train(tmp_path, total, {0: "unused"} if total == 2 else {}, keep=holdfast.All(), on_nonfinite="raise")
    assert judged(tmp_path) == dict.fromkeys(range(4), Nonfinite(exempt=("model/unused",)))


def test_the_newest_good_step_stays(tmp_path: Path) -> None:
    train(tmp_path / "a", 6, {4: "0.weight"}, keep=1)
    assert [*judged(tmp_path / "a")] == [3, 6]
    train(tmp_path / "b", 6, {4: "0.weight"}, keep=holdfast.LastGood(2))
    assert [*judged(tmp_path / "b")] == [2, 3, 6]


def test_list_and_show_name_the_steps_that_are_not_finite(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 4, {2: "exp_avg", 3: "0.weight", 4: "0.weight"}, keep=holdfast.All())
    holdfast.pin(f"{run}@2")
    _, *rows = lines_of(call("list", run).stdout)
    assert [row[7] for row in rows] == ["-", "not_finite,pinned", "not_finite", "newest,not_finite"]
    page = call("list", run, "--human").stdout
    assert "not finite, pinned" in page
    assert "newest, not finite" in page
    good, bad, *_ = call_json("list", run)["steps"]
    assert (good["is_finite"], good["nonfinite"]) == (True, {"leaves": 0, "names": [], "exempt": []})
    names = ["optimizer/state/model.0.weight/exp_avg"]
    assert (bad["is_finite"], bad["nonfinite"]) == (False, {"leaves": 1, "names": names, "exempt": []})
    assert call_json("show", f"{run}@2")["nonfinite"]["names"] == names
    assert f"nan or infinity in {names[0]}\n" in call("show", f"{run}@2").stdout
    assert "not finite" not in call("show", f"{run}@1", "--human").stdout


def test_last_good_looks_at_metrics() -> None:
    steps = [
        KeptCandidate(step, step, step, {"loss": float(step % 3)} if step != 7 else {}, step != 6) for step in range(9)
    ]
    keep = holdfast.LastGood(2, where=lambda metrics: metrics["loss"] < 1)
    assert list(keep.choose_kept(steps, 9.0)) == [0, 3]
    plan = plan_retention(keep, steps, {}, 9.0)
    assert list(plan.keep) == [0, 3, 8]
    assert list(plan_retention(keep, steps[:7], {}, 9.0).keep) == [0, 3, 5, 6]


def test_training_ends_with_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"step 4 is not finite: nan or infinity in model/0.weight\n.*Step 3|.*@3"):
        train(tmp_path, 50, {4: "0.weight"}, on_nonfinite="raise")
    assert max(judged(tmp_path)) < 50
    with pytest.raises(NotFiniteError):  # And so does the next start.
        train(tmp_path, 50, {}, on_nonfinite="raise")
    with pytest.raises(holdfast.errors.UsageError, match="on_nonfinite='stop'"):
        holdfast.resumable(tmp_path, state={}, on_nonfinite="stop")  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "step"), [(8, 9), (1, 3)], ids=["later", "before the first save"])
def test_all_workers_end_with_that_error_at_one_step(tmp_path: Path, batch: int, step: int) -> None:
    with Workers(tmp_path) as workers:
        port = find_port()
        for rank in range(2):
            command = python(PROGRAMS / "gone_bad.py", tmp_path / "run", "raise", "400", "1", str(batch), "steps")
            workers.start(command, environment(rank, 2, port, agent=True), preloaded.TrainingPopen)
        workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [1, 1], workers.report(0) + workers.report(1)
        for rank in range(2):
            assert re.search(rf"NotFiniteError: step {step} is not finite", workers.errors(rank)), workers.report(rank)
        assert "prints all of it" in workers.errors(1)
        ends = [workers.records(rank)[-1]["step"] for rank in range(2)]
        assert ends[0] == ends[1] < 400
    assert (judged(tmp_path / "run")[step] or Nonfinite()).leaves
