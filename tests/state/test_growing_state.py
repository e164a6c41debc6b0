"""State that has another form when it is saved than it had when the program began, and has again at a restart."""

from __future__ import annotations

import collections
import enum
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import MismatchError, UnsupportedValueError
from holdfast.events import Event, Warned
from state_trip import bring_back, match, store


class Own:
    """An object of the program, which takes any state."""

    def __init__(self, **kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


ONE, TWO = np.ones(1), np.arange(2.0)
LATER: dict[str, tuple[Any, Any]] = {
    "a key that comes later": ({"loss": 9.0}, {"loss": 1.0, "weights": {"w": TWO}}),
    "arrays beside arrays": ({"a": ONE}, {"a": ONE * 2, "b": TWO, "c": [TWO, TWO * 2]}),
    "None that became an array": ({"hidden": None}, {"hidden": (TWO, TWO * 3)}),
    "an array that became None": ({"hidden": TWO}, {"hidden": None}),
    "a number that became an array": ({"count": 0, "ema": 0.0}, {"count": np.array(3), "ema": TWO}),
    "an array without dimensions that became a scalar": ({"mean": np.array(0.0)}, {"mean": np.float64(2.5)}),
    "a scalar that became an array": ({"mean": np.float32(0)}, {"mean": np.array(2.5, np.float32)}),
    "another length": ({"todo": np.arange(20)}, {"todo": np.arange(16)}),
    "another element type": ({"mean": np.zeros(3, np.float32)}, {"mean": np.arange(3.0)}),
    "other dimensions": ({"seen": np.zeros((1, 4))}, {"seen": np.ones((3, 4))}),
    "a cleared cache": ({"warm": {"a": ONE, "b": TWO}}, {"warm": {}}),
    "a cache that was replaced by None": ({"warm": {"a": ONE, "b": TWO}}, {"warm": None}),
    "a longer list": ([ONE], [ONE, TWO, np.zeros((2, 2))]),
    "a shorter list": ([ONE, TWO, TWO], [TWO]),
    "a list whose arrays shift": ([np.arange(2), np.arange(3)], [np.arange(3), np.arange(4)]),
    "a deque": (collections.deque([ONE], 3), collections.deque([(TWO, 1), (ONE, 2)], 3)),
    "lists by key": (collections.defaultdict(list, a=[ONE]), collections.defaultdict(list, a=[ONE, TWO], b=[TWO])),
    "a list that became a dict": ({"log": [ONE]}, {"log": {"x": TWO}}),
}


@pytest.mark.parametrize("case", LATER)
def test_a_tree_takes_what_is_stored(case: str) -> None:
    first, later = LATER[case]
    for around in (lambda tree: tree, lambda tree: {"deep": [tree]}, hf.PerWorker):
        objects = {"x": around(_fresh(first))}
        held = objects["x"]
        bring_back(store(x=around(later)), objects)
        assert objects["x"] is held, "the program holds it"
        found, expected = (hf.PerWorker(held).value, hf.PerWorker(around(later)).value)
        assert same(*((one.value if isinstance(one, hf.PerWorker) else one) for one in (found, expected)))


@pytest.mark.parametrize("case", LATER)
def test_an_object_judges_its_own_state(case: str) -> None:
    first, later = LATER[case]
    live = Own(lr=0.1, x=_fresh(first))
    bring_back(store(own=Own(lr=0.2, x=later)), {"own": live})
    assert same(live.kept, {"lr": 0.2, "x": later})


def _fresh(tree: Any) -> Any:
    """Returns a copy, with its own arrays and containers."""
    objects = {"x": Own(tree=tree)}
    bring_back(store(**objects), objects)
    return objects["x"].kept["tree"]


NAMED: dict[str, tuple[Any, Any]] = {
    "a number that became an array": (0, TWO),
    "None that became a tree": (None, {"a": TWO}),
    "an array without dimensions that became a scalar": (np.array(0.0), np.float64(2.5)),
    "a scalar that became an array": (np.float32(1), np.array(2.5, np.float32)),
    "an empty dict that became an array": ({}, TWO),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_named_value_takes_what_is_stored(case: str) -> None:
    first, later = NAMED[case]
    objects = {"x": first}
    bring_back(store(x=later), objects)
    assert same(objects["x"], later)


def test_arrays_and_objects_that_the_program_names_stay_what_they_are() -> None:
    stored = store(a=np.ones(3), b=np.ones(2), c=None, d={"own": 1}, e={"x": Own(a=1)})
    live = {"a": np.ones(2), "b": np.ones(2, np.float32), "c": TWO, "d": {"own": Own()}, "e": {"x": 1}}
    found = match(stored, live).differences
    assert found.wrong_shape == ["a: stored [3], live [2]"]
    assert found.wrong_dtype == ["b: stored F64, live F32"]
    assert [text.split(":")[0] for text in found.wrong_kind] == ["c", "d/own", "e/x"]
    gone = match(store(d={"a": 1}), {"d": {"a": 1, "own": Own(), "array": TWO}}).differences
    assert gone.missing == ["d/own"]
    more = match(store(d={"own": Own()}, later=Own()), {"d": {}}).differences
    assert more.extra == ["d/own", "later"]


def test_the_program_sees_through_its_own_reference_what_a_restart_brings(tmp_path: Path) -> None:
    best: dict[str, Any] = {"loss": 9.0, "seen": np.zeros(2), "same": np.zeros(3)}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(best=best)) as manager:
        best |= {"loss": 1.0, "weights": {"w": TWO}, "seen": np.arange(5)}
        best["same"] += 1
        manager.checkpoint.extra = {"given": "later"}
        manager.save(1)
    fresh: dict[str, Any] = {"loss": 9.0, "seen": np.zeros(2), "same": (same_array := np.zeros(3))}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(best=fresh)) as manager:
        manager.restore()
        assert manager.checkpoint.extra == {"given": "later"}
    assert same(fresh, {**best, "weights": {"w": TWO}}), fresh
    assert fresh["same"] is same_array, "an array that fits is filled in place"


def test_what_a_template_describes_is_fixed(tmp_path: Path) -> None:
    hf.save(tmp_path / "tree", {"a": np.ones(3), "b": np.ones(2)})
    for like in ({"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(3)}):
        with pytest.raises(MismatchError):
            hf.load(tmp_path / "tree", like=like)


def test_a_part_is_asked_for_by_name() -> None:
    stored = store(tree={"model": {"a": np.ones(2), "b": np.ones(3)}, "rest": 1})
    for live in ({"model": None, "rest": 0}, {"rest": 0}, {"model": {}, "rest": 0}):
        objects = {"tree": dict(live)}
        bring_back(stored, objects, lambda path: path.startswith("tree/model/"))
        assert same(objects["tree"].pop("model"), {"a": np.ones(2), "b": np.ones(3)})
        assert objects["tree"] == {"rest": 0}
    live = {"model": {"c": np.zeros(1)}, "rest": 0}
    assert match(stored, {"tree": live}, lambda path: path == "tree/model/c").differences.missing == ["tree/model/c"]


class Schedule:
    """As of a library: driven by a metric, without state_dict."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


def test_a_restored_object_that_the_program_does_not_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnsupportedValueError) as refused, hf.resumable(tmp_path / "refused", own=Schedule(1.0)):
        pass
    hint = str(refused.value)
    assert 0 < hint.index("state_dict") < hint.index("wrapper") < hint.index("register_codec")
    hf.register_codec(Schedule, tag="tests.Schedule", encode=lambda one: one.lr, decode=Schedule)

    def live(end: int, *reads: str) -> list[str]:
        caplog.clear()
        own = Schedule(1.0)
        with hf.resumable(tmp_path / "run", own=own, best=None, lr=0.1, log={"a": 0}, save_every=hf.Steps(1)) as run:
            for name in reads:
                getattr(run.checkpoint, name)
            for step in run.steps(end):
                own.lr = run.checkpoint.objects["log"]["a"] = 0.5
                if step == 0:
                    run.checkpoint.best = 7
        return [
            text.split(": nothing has read")[0]
            for text in caplog.messages
            if ": nothing has read the restored value" in text
        ]

    assert live(2) == []
    assert live(4) == ["own", "best"], "what the program holds at the first save, the rest at the end"
    assert live(6, "own", "best") == []
    assert live(6) == [], "nothing was trained"


def test_a_file_in_memory_comes_back_with_its_position() -> None:
    file = io.BytesIO(b"some bytes")
    file.seek(4)
    objects = {"x": {"file": None, "other": io.BytesIO(b"old")}}
    bring_back(store(x={"file": file, "other": io.BytesIO(b"new")}), objects)
    found: Any = objects["x"]
    assert (found["file"].tell(), found["file"].getvalue()) == (4, b"some bytes")
    assert found["other"].read() == b"new"


def test_state_that_a_restart_would_refuse_is_reported_at_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> dict[str, Any]:
        tree = {"log": [], "own": Own(), "gone": Own(), "seen": np.zeros(2)}
        return {"tree": tree, "array": np.zeros(2), "number": 0, "scalar": np.array(0.0), "plain": [1]}

    with hf.resumable(tmp_path, **begin(), save_every=hf.Steps(1)) as run:
        kept, tree = run.checkpoint, run.checkpoint.tree
        for step in run.steps(2000):
            # After a look that took long, as on a busy machine, some saves go without one.
            if step > 4 and sum("A restart that" in text for text in caplog.messages) == 4:
                run.stop()
            tree["seen"] = np.zeros(step)
            kept.number, kept.scalar, kept.later = np.ones(step), np.float64(step), {"a": np.ones(step)}
            if step == 2:
                tree["more"], kept.array = Own(a=1), np.zeros(5)
                del tree["gone"]
            if step == 3:
                kept.log = [Stopped.EARLY]
    texts = [text.removeprefix("holdfast: ") for text in caplog.messages if "A restart that" in text]
    assert sorted(text.split(" is saved")[0] for text in texts) == ["Stopped in log", "array", "tree/gone", "tree/more"]
    with pytest.raises(MismatchError) as caught, hf.resumable(tmp_path, **begin()):
        pass
    assert all(path in str(caught.value) for path in ("array", "tree/gone", "tree/more"))


class Stopped(enum.Enum):
    EARLY = 1


def test_arrays_restored_in_another_shape_than_the_script_has_are_named(tmp_path: Path) -> None:
    """A program whose model has changed is not to train on in the old sizes without a word."""
    warnings = []
    for width in (4, 6):
        params = {"w": np.ones((3, width)), "grown": np.ones(0)}
        events: list[Event] = []
        with hf.resumable(tmp_path, params=params, save_every=hf.Steps(2), sinks=[events.append]) as run:
            params["grown"] = np.ones(5)
            for _ in run.steps(run.step + 3):
                pass
        warnings.append([event.text for event in events if isinstance(event, Warned) and "stored shapes" in event.text])
    assert warnings[0] == []
    (text,) = warnings[1]
    assert "params/w [3, 4] (your script begins with [3, 6])" in text
    assert "grown" not in text.partition("If the program")[0]
