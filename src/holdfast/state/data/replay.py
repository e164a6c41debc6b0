"""A position in data that is only followed: what was seen of an epoch, what its order was drawn from, and the way back.

Such data is not asked for an order: that follows from random generators and samplers as they were when the epoch began.
So a position is what they were then, and how much was taken since, in batches and in samples (`Taken`). There are three
ways back to it, of which each kind of data has one (`Way`). torch's loaders, Keras' data and accelerate's loaders are
followed in this way; their followers show each batch that is passed on to training (`Watched`).
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from holdfast.numbers import span_text
from holdfast.process.progress import LongRead
from holdfast.process.terminal import inform

_LONG_SECONDS: Final = 1.0


class Way(enum.Enum):
    """The ways in which training comes back to a position, the best one first.

    Attributes:
        INDICES: The order of the epoch is drawn again. Nothing that was trained is loaded.
        STATE: The data restores a state of its own. Nothing that was trained is loaded.
        READING: The data is read from its beginning, and what was trained is discarded.
    """

    INDICES = "indices"
    STATE = "state"
    READING = "reading"


def describe_reading(name: str, advice: str) -> str:
    """**Pure.** Returns the warning about data to which `Way.READING` leads back.

    Args:
        name: The data.
        advice: What to use instead, as a sentence without its full stop.
    """
    return (
        f"{name} can only be read from its beginning: a restart in the middle of an epoch loads the trained batches "
        f"again and discards them. {advice}"
    )


def read_past(batches: Iterator[Any], number: int, name: str) -> None:
    """**Blocks.** Reads batches that were trained, and reports it if that takes a while; the data may have fewer.

    Args:
        batches: The batches of a pass from its beginning.
        number: How many were trained.
        name: The data.
    """
    begun_at = time.monotonic()
    with LongRead(f"returning to the place in {name}", lambda: number, "batches") as shown:
        for _ in itertools.islice(batches, number):
            shown.advance(1)
    if (seconds := time.monotonic() - begun_at) >= _LONG_SECONDS:
        inform(f"read {number} trained batches of {name} again in {span_text(seconds)}, to continue after them")


class Taken(msgspec.Struct):
    """The part of an epoch that was taken.

    Attributes:
        batches: How many batches; those before `first` are counted in batches of the present size.
        has_ended: True if the data has no other batch in this epoch.
        first: The number of the batch at which this process began in the epoch.
        samples_before: How many samples were taken before that batch; None if that is not known.
        earlier: For each smaller number of samples that the data had in this epoch, that number and how many of these
            were taken.
    """

    batches: int = 0
    has_ended: bool = False
    first: int = 0
    samples_before: int | None = 0
    earlier: list[list[int]] = msgspec.field(default_factory=list)

    def count_samples(self, batches: int, size: int | None) -> int | None:
        """**Pure.** Returns the samples in so many batches of this epoch, not in `earlier`; None if it is not known."""
        if size is None or self.samples_before is None:
            return None
        return self.samples_before + (batches - self.first) * size


def describe_change(changes: Mapping[str, tuple[Any, Any]], *, is_exact: bool) -> str:
    """**Pure.** Returns the warning that an epoch continues in other batches than those it was saved with.

    Args:
        changes: What decides the batches, by its name: its present value, and that of the save.
        is_exact: True if each sample that was not trained comes once.
    """
    text = ", ".join(f"{name} {now} ({then} at the save)" for name, (now, then) in changes.items() if now != then)
    if not is_exact:
        return f"{text}: in the rest of this epoch some samples may come twice, and others not at all"
    return f"{text}: the rest of this epoch has the samples that were not trained"


class Untrained(Iterator[Any]):
    """The indices of an epoch that are left. Those of trained batches are drawn with the first one, and not given."""

    def __init__(self, indices: Iterator[Any], trained: int) -> None:
        self._indices, self._trained = indices, trained

    def skip(self) -> None:
        """Draws what was trained, unless that is done.

        Raises:
            StopIteration: If nothing is left.
        """
        trained, self._trained = self._trained, 0
        for _ in range(trained):
            next(self._indices)

    def __next__(self) -> Any:
        if self._trained:
            self.skip()
        return next(self._indices)


class Watched:
    """Something that passes batches on to training, and shows each of them to one function.

    Attributes:
        see: The function; None for none.
    """

    see: Callable[[Any], None] | None = None

    def follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object] | None:
        """Sets `see`; returns what ends that, or None if another function sees the batches already."""
        if self.see is not None:
            return None
        self.see = see
        return lambda: setattr(self, "see", None)
