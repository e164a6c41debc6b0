"""A place in the data, as it is stored."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError
from holdfast.numbers import check_whole
from holdfast.state.permutation import MAX_LENGTH, VERSION


@dataclass(frozen=True, slots=True)
class Position:
    """How far the training loop has got, and in which order.

    Attributes:
        epoch: The epoch, from 0 on.
        position_samples: The samples of it that were taken, on all workers together.
        seed: Which orders these are.
        length: How many samples there are.
        shuffle: Whether they come in another order each epoch.
    """

    epoch: int
    position_samples: int
    seed: int
    length: int
    shuffle: bool

    def state_dict(self) -> dict[str, Any]:
        """**Pure.** The position as plain values."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """**Pure.** The position in a state.

        Raises:
            UsageError: If it is not the state of a sampler, or of another version.
        """
        if not is_position(state):
            raise UsageError(f"this is not the state of a sampler, which has {', '.join(_NAMES)}")
        if state["version"] != VERSION:
            raise UsageError(
                f"the sampler's state is of version {state['version']!r}, and this holdfast knows version {VERSION}",
                hint="Install the version of holdfast that wrote it, or a newer one.",
            )
        position = cls(**{name: state[name] for name in _NAMES})
        counts = (position.epoch, position.position_samples, position.seed, position.length)
        if (
            not all(map(is_count, counts))
            or not isinstance(position.shuffle, bool)
            or position.position_samples > position.length
            or position.seed >= 1 << 64
        ):
            raise UsageError(f"the sampler's state is malformed: {dict(state)!r}")
        return position


class StepBreak(threading.local):
    """The time between two steps that a function runs, on this thread: `handler.run(train_step, next(batches))`.

    Such a step's batch is taken before the step begins, and before the last step is saved. So a batch that is taken in
    this time belongs to the next step, and the position that is saved is the one before it. Outside of this time, as in
    a loop that takes its batches within its steps, a batch counts as soon as it is taken.

    Attributes:
        number: Which break it is; 0 outside of one.
        is_open: Whether batches that are taken now count for the next step.
    """

    number = 0
    is_open = False

    def begin(self) -> None:
        """A step has ended."""
        self.number, self.is_open = next(_numbers), True

    def end(self) -> None:
        """A step begins, and all batches that were taken count."""
        self.number, self.is_open = 0, False

    def close(self) -> None:
        """The loop has ended. A batch for a step that never came does not count; one taken from now on does."""
        self.is_open = False


_numbers = itertools.count(1)
step_break = StepBreak()

_NAMES = tuple(field.name for field in dataclasses.fields(Position))


def is_position(state: Any) -> bool:
    """**Pure.** Whether a state is that of a sampler, so far as its keys tell."""
    return isinstance(state, Mapping) and {"version", *_NAMES} <= state.keys()


def is_count(value: Any) -> bool:
    """**Pure.** Whether a value is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def count_samples(length_or_dataset: Any) -> int:
    """How many samples there are.

    Args:
        length_or_dataset: Their number, or something whose `len` says so.

    Raises:
        UsageError: If it is neither.
    """
    if isinstance(length_or_dataset, int):
        length: Any = length_or_dataset
    elif hasattr(length_or_dataset, "__len__"):
        length = len(length_or_dataset)
    else:
        raise UsageError(
            f"{type(length_or_dataset).__name__} is neither a number of samples nor something with a length",
            hint="A dataset that can only be iterated needs a loader that keeps the dataset's own state.",
        )
    return check_whole("the number of samples", length, 0, MAX_LENGTH)
