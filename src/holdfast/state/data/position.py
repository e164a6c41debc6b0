"""The stored position in the data, and the check that all workers of a job have the same one."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from holdfast.errors import UsageError
from holdfast.format.digests import digest
from holdfast.numbers import check_whole
from holdfast.state.data.order import MAX_LENGTH, VERSION
from holdfast.state.leaves import Skeleton


@dataclass(frozen=True, slots=True)
class Position:
    """The training loop's position in the data, and their order.

    Attributes:
        epoch: The epoch, from 0.
        position_samples: The samples of it that were taken, on all workers together.
        seed: The seed of the orders.
        length: The number of samples.
        shuffle: True if each epoch has another order.
    """

    epoch: int
    position_samples: int
    seed: int
    length: int
    shuffle: bool

    def state_dict(self) -> dict[str, Any]:
        """**Pure.** Returns the position as plain values."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """**Pure.** Returns the position in a state.

        Raises:
            UsageError: If it is not the state of a sampler, or of another version.
        """
        if not is_position(state):
            raise UsageError(f"expected the state of a sampler, with {', '.join(_NAMES)}")
        if state["version"] != VERSION:
            raise UsageError(
                f"the sampler's state has version {state['version']!r}, but this holdfast reads version {VERSION}",
                hint="Install the version of holdfast that wrote it, or a newer one.",
            )
        position = cls(**{name: state[name] for name in _NAMES})
        counts = (position.epoch, position.position_samples, position.seed, position.length)
        if (
            not all(type(count) is int and count >= 0 for count in counts)
            or not isinstance(position.shuffle, bool)
            or position.position_samples > position.length
            or position.seed >= 1 << 64
        ):
            raise UsageError(f"the sampler's state is malformed: {dict(state)!r}")
        return position


class StepBreak(threading.local):
    """The time between two steps of `handler.run(train_step, next(batches))`, in this thread.

    The batch of such a step is taken before the step begins, and before the last step is saved. So a batch that is
    taken in this time belongs to the next step, and the saved position is the one before it. At any other time, as in a
    loop that takes its batches inside its steps, a batch counts as soon as it is taken.

    Attributes:
        number: The number of the break; 0 outside of one.
        is_open: True if batches that are taken now count for the next step.
    """

    number = 0
    is_open = False

    def begin(self) -> None:
        """Called when a step has ended."""
        self.number, self.is_open = next(_numbers), True

    def end(self) -> None:
        """Called when a step begins: all taken batches count."""
        self.number, self.is_open = 0, False

    def close(self) -> None:
        """Called when the loop has ended. A batch for a step that never came does not count; later ones do."""
        self.is_open = False


_numbers = itertools.count(1)
step_break = StepBreak()

_NAMES = tuple(field.name for field in dataclasses.fields(Position))


def is_position(state: Any) -> bool:
    """**Pure.** Returns True if a state has the keys of a sampler's state."""
    return isinstance(state, Mapping) and {"version", *_NAMES} <= state.keys()


def count_samples(length_or_dataset: Any) -> int:
    """Returns the number of samples.

    Args:
        length_or_dataset: The number, or an object with a length.

    Raises:
        UsageError: If it is neither.
    """
    if isinstance(length_or_dataset, int):
        length: Any = length_or_dataset
    elif hasattr(length_or_dataset, "__len__"):
        length = len(length_or_dataset)
    else:
        raise UsageError(
            f"expected a number of samples or a dataset with a length, got {type(length_or_dataset).__name__}",
            hint="An iterable dataset needs a loader that saves the dataset's own state.",
        )
    return check_whole("the number of samples", length, 0, MAX_LENGTH)


_POSITION: Final = "data_position"
_ORDER: Final = ("seed", "length", "shuffle")


class PositionRecord(msgspec.Struct, frozen=True, array_like=True):
    """The position of one worker in its data.

    Attributes:
        name: The name of the object that has it.
        order: The digest of the order of the samples.
        epoch: The epoch.
        samples: The samples of it that all workers have taken together.
    """

    name: str
    order: str
    epoch: int
    samples: int


def list_positions(objects: Mapping[str, Skeleton]) -> list[PositionRecord]:
    """**Pure.** Returns the positions of a worker's objects, also those in trees, except per-worker ones."""
    positions = []
    for path, state in _find_states(objects):
        epoch, samples = state.get("epoch"), state.get("position_samples")
        # What is beyond 64 bits is stored in another form, and no job gets there.
        if isinstance(epoch, int) and isinstance(samples, int):
            order = digest(repr([state.get(part) for part in _ORDER]).encode(errors="replace"))
            positions.append(PositionRecord(path.encode(errors="replace").decode(), order, epoch, samples))
    return positions


def _find_states(objects: Mapping[str, Skeleton]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns the stored samplers, with their paths; not those inside the state of other objects."""
    ahead: list[tuple[str, Any]] = list(objects.items())
    # Without recursion: what another worker has stored may be nested in any depth.
    while ahead:
        path, node = ahead.pop()
        if isinstance(node, list):
            ahead += [(f"{path}/{number}", part) for number, part in enumerate(node) if isinstance(part, (dict, list))]
        elif isinstance(node, dict):
            tag, payload = node.get("$"), node.get("v")
            if tag is None:
                ahead += [(f"{path}/{key}", part) for key, part in node.items() if isinstance(part, (dict, list))]
            elif tag != "object":
                # A tuple, say, or a dict with keys that are not text.
                ahead.append((path, payload))
            elif node.get("k") == _POSITION and isinstance(payload, dict):
                yield path, payload


def find_apart(positions: Sequence[Iterable[PositionRecord]]) -> str:
    """**Pure.** Describes which workers are at different positions of the same order; empty if none are.

    Args:
        positions: The positions of each worker, in order of rank.
    """
    # Not needed by a program of one worker.
    from holdfast.cluster.protocol import name_ranks

    orders: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
    for rank, own in enumerate(positions):
        for one in own:
            orders.setdefault((one.name, one.order), {}).setdefault((one.epoch, one.samples), []).append(rank)
    for (name, _), places in orders.items():
        if len(places) > 1:
            found = "; ".join(
                f"{name_ranks(ranks)} at {samples} samples of epoch {epoch}"
                for (epoch, samples), ranks in sorted(places.items())[:3]
            )
            return (
                f"the workers are at different positions in the same data of {name}: {found}. Another number of "
                "workers cannot resume from there without losing or repeating samples. All workers must take the "
                "same number of batches between saves; wrap data that differs per worker in holdfast.PerWorker"
            )
    return ""
