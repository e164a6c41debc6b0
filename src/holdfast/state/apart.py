"""Whether the workers of a job stand at the same place in the data that they divide. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.format.digests import digest
from holdfast.state.leaves import Skeleton

_POSITION: Final = "data_position"
_ORDER: Final = ("seed", "length", "shuffle")


class PositionRecord(msgspec.Struct, frozen=True, array_like=True):
    """How far one worker has got in its data.

    Attributes:
        name: What the object is called that says so.
        order: The digest of which order of which samples it is.
        epoch: The epoch.
        samples: The samples of it that all workers have taken together.
    """

    name: str
    order: str
    epoch: int
    samples: int


def list_positions(objects: Mapping[str, Skeleton]) -> list[PositionRecord]:
    """**Pure.** The positions among a worker's objects, and in trees of them, without those that are its own."""
    positions = []
    for path, state in _find_states(objects):
        epoch, samples = state.get("epoch"), state.get("position_samples")
        # What is beyond 64 bits is stored in another form, and no job gets there.
        if isinstance(epoch, int) and isinstance(samples, int):
            order = digest(repr([state.get(part) for part in _ORDER]).encode(errors="replace"))
            positions.append(PositionRecord(path.encode(errors="replace").decode(), order, epoch, samples))
    return positions


def _find_states(objects: Mapping[str, Skeleton]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The stored samplers, with their paths; not what other objects have in their state."""
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
                # A tuple, say, or a dict with keys that are no text.
                ahead.append((path, payload))
            elif node.get("k") == _POSITION and isinstance(payload, dict):
                yield path, payload


def find_apart(positions: Sequence[Iterable[PositionRecord]]) -> str:
    """**Pure.** Which workers are at different places of the same order; empty if none are.

    Args:
        positions: Those of each worker, in order of rank.
    """
    # Not needed by a program of one worker.
    from holdfast.cluster.membership import name_ranks

    orders: dict[tuple[str, str], dict[tuple[int, int], list[int]]] = {}
    for rank, own in enumerate(positions):
        for one in own:
            orders.setdefault((one.name, one.order), {}).setdefault((one.epoch, one.samples), []).append(rank)
    for (name, _), places in orders.items():
        if len(places) > 1:
            told = "; ".join(
                f"{name_ranks(ranks)} at {samples} samples of epoch {epoch}"
                for (epoch, samples), ranks in sorted(places.items())[:3]
            )
            return (
                f"the workers are at different places of the same data in {name}: {told}. Another number of workers "
                "cannot go on from there without losing or repeating samples. All workers have to take as many "
                "batches between saves; data that are each worker's own are given as hf.PerWorker"
            )
    return ""
