"""Replay buffers: many small arrays in long sequences come back with their values, forms and shared memory."""

from __future__ import annotations

import collections
import pickle  # The control: what torch.save does with such a buffer.
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import FormatError
from holdfast.format.decoding import Decoder

COUNT = 100


class Transition(NamedTuple):
    state: Any
    action: Any
    reward: Any
    next_state: Any
    done: Any


def make_transitions() -> Iterator[Transition]:
    """An environment's: each observation is in its own row and in the one before."""
    generator = np.random.default_rng(0)
    state = generator.random(4, np.float32)
    for number in range(COUNT):
        next_state = generator.random(4, np.float32)
        yield Transition(state, number % 3, generator.random(), next_state, np.array([number % 9 == 0]))
        state = next_state


def make_odd() -> list[Any]:
    """Rows that no bulk way may take for others: views of one memory, other orders, nothing, and what is no array."""
    memory = np.arange(4.0 * COUNT).reshape(COUNT, 4)
    rows: list[Any] = [(memory[number], memory[number][:2], np.zeros(0), number) for number in range(COUNT)]
    rows[3] = (memory[3], memory.T[0], None, np.datetime64("2020-01-01"))
    rows[7] = (memory[7], np.arange(6.0).reshape(2, 3).T, float("nan"), "text")
    return rows


def share(rows: list[Any]) -> dict[str, Any]:
    return {"recent": collections.deque(rows[-50:]), "all": rows}


BUFFERS: dict[str, Callable[[], Any]] = {
    "deque of tuples": lambda: collections.deque(map(tuple, make_transitions()), maxlen=COUNT),
    "deque of named tuples": lambda: collections.deque(make_transitions(), maxlen=COUNT + 5),
    "list of dicts": lambda: [row._asdict() for row in make_transitions()],
    "list of lists": lambda: list(map(list, make_transitions())),
    "list of arrays": lambda: [row.state for row in make_transitions()],
    "two that share": lambda: share([*make_transitions()]),
    "preallocated": lambda: {"state": np.random.default_rng(0).random((COUNT, 4)), "at": 7},
    "odd": make_odd,
    "nested": lambda: [(row.state, {"a": [row.next_state]}, row.reward) for row in make_transitions()],
    "scalars of NumPy": lambda: [(row.state, np.float64(row.reward), float("inf")) for row in make_transitions()],
    "big-endian": lambda: [(np.arange(3, dtype=">i4"), np.array(1.5)) for _ in range(COUNT)],
    "uneven": lambda: [tuple(np.arange(number % 4 + 1)) + (np.ones(2),) * (number % 3) for number in range(COUNT)],
}


def describe(value: Any, seen: dict[int, int] | None) -> Any:
    """A value with its arrays by content and form, each with the number under which it was first met."""
    if isinstance(value, np.ndarray):
        number = None if seen is None else seen.setdefault(id(value), len(seen))
        return value.dtype.name, value.shape, value.tolist(), number
    if isinstance(value, dict):
        return {key: describe(part, seen) for key, part in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), getattr(value, "maxlen", 0), [describe(part, seen) for part in value]
    return repr(value)


def begin_empty(buffer: Any) -> Any:
    """What the program has at a restart: the same containers, without entries."""
    if isinstance(buffer, dict):
        return {key: begin_empty(part) for key, part in buffer.items()}
    return type(buffer)(maxlen=buffer.maxlen) if isinstance(buffer, collections.deque) else type(buffer)()


@pytest.mark.parametrize("at_restart", ["empty", "full", "shorter"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_comes_back_as_pickle_keeps_it(kind: str, at_restart: str, tmp_path: Path) -> None:
    hf.register_type(Transition)
    buffer = BUFFERS[kind]()
    # Where live arrays end and new ones begin, one that both need is a live one and a new one.
    seen: dict[int, int] | None = None if at_restart == "shorter" else {}
    expected = describe(pickle.loads(pickle.dumps(buffer)), seen)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(memory=buffer)) as manager:
        manager.save(1)
        manager.save(2)
    live = BUFFERS[kind]() if at_restart != "empty" or kind == "preallocated" else begin_empty(buffer)
    if at_restart == "shorter" and not isinstance(live, dict):
        for _ in range(COUNT // 3):
            live.pop()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(memory=live)) as manager:
        assert manager.restore() is not None
    assert describe(live, None if seen is None else {}) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"$": [], "v": []},
        {"$": "tuple", "v": 3},
        {"$": "tuple", "v": [1], "k": 1},
        {"$": "", "v": 1},
        {"a": {"$": "array"}},
    ],
)
def test_rows_that_no_encoder_writes_are_refused(row: Any) -> None:
    with pytest.raises(FormatError):
        Decoder().decode([row] * COUNT)
