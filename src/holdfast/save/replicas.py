"""Whether what several workers hold alike is alike: their digests, compared behind training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from holdfast.cluster.protocol import MAX_VALUE_BYTES, Cluster
from holdfast.cluster.rendezvous import gather
from holdfast.format.digests import digest
from holdfast.save.handoffs import Snapshot
from holdfast.state.leaves import Replica
from holdfast.storage.crew import Crew

_DIGEST_CHARACTERS: Final = 16
"""How much of a digest is sent: enough to tell values apart that nobody has made equal on purpose."""

_MOST_DETAILS: Final = MAX_VALUE_BYTES // 64
"""So many boxes are looked at one by one where something differs; a record with more would be too large."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor of which workers that should hold the same do not.

    Attributes:
        leaf: Its name.
        ranks: The workers, those that agree together; the most first.
    """

    leaf: str
    ranks: tuple[tuple[int, ...], ...]


class _Group(msgspec.Struct, frozen=True, array_like=True):
    """What one worker holds together with certain others: who these are, how many boxes, and the digest of all."""

    holders: str
    boxes: int
    digest: str


def digest_replicas(
    replicas: Sequence[Replica], written: Snapshot, witnesses: Snapshot | None, crew: Crew
) -> dict[Replica, str]:
    """**Blocks.** The digest of each box that this worker holds together with others.

    Args:
        replicas: These boxes.
        written: The snapshot of what this worker writes.
        witnesses: The snapshot of what others write of them.
        crew: The threads that work.
    """
    found: dict[Replica, str] = {}
    snapshots = (written, witnesses)
    places = [{place.name: place for place in one.layout.places} if one is not None else {} for one in snapshots]

    def take(replica: Replica) -> None:
        snapshot, place = snapshots[not replica.is_written], places[not replica.is_written][replica.name]
        assert snapshot is not None  # There is a place in it.
        found[replica] = digest(snapshot.image[place.begin : place.end])[:_DIGEST_CHARACTERS]

    crew.run(partial(take, replica) for replica in replicas)
    return found


def compare_replicas(
    cluster: Cluster, name: str, digests: Mapping[Replica, str], timeout_seconds: float
) -> list[Divergence]:
    """**Collective.** **Blocks.** What differs among the boxes that workers hold together.

    Each worker sends one digest for each set of workers with which it holds something, and only if one of them differs,
    a second record with that of each box.

    Args:
        cluster: The workers.
        name: The meeting's.
        digests: What this worker holds together with others.
        timeout_seconds: How long to wait for the others.

    Returns:
        What differs among the workers of which this one is the first, so that each difference is told once.

    Raises:
        AbsentError: If workers did not come in time.
        ClusterError: If the store does not answer.
    """
    own = _by_holders(digests)
    groups = [_Group(holders, len(boxes), _join(boxes)) for holders, boxes in own.items()]
    records = gather(cluster, f"{name}/groups", msgspec.msgpack.encode(groups), timeout_seconds)
    suspects = find_suspects([msgspec.msgpack.decode(record, type=list[_Group]) for record in records])
    if not suspects:
        return []
    details = {
        holders: {replica.key: found for replica, found in sorted(own.get(holders, {}).items())}
        for holders in sorted(suspects)
    }
    packed = msgspec.msgpack.encode(_cut(details))
    rows = gather(cluster, f"{name}/boxes", packed, timeout_seconds)
    all_details = [msgspec.msgpack.decode(row, type=dict[str, dict[str, str]]) for row in rows]
    return _name_divergences(own, suspects, all_details, cluster.rank)


def find_suspects(groups: Sequence[Sequence[_Group]]) -> dict[str, list[int]]:
    """**Pure.** The sets of workers that do not agree, each with those of them that have brought something.

    Args:
        groups: For each worker, in order of rank, what it has brought.
    """
    brought: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, own in enumerate(groups):
        for group in own:
            brought.setdefault(group.holders, {})[rank] = (group.boxes, group.digest)
    return {holders: sorted(found) for holders, found in brought.items() if len(set(found.values())) > 1}


def _name_divergences(
    own: Mapping[str, Mapping[Replica, str]],
    suspects: Mapping[str, Sequence[int]],
    details: Sequence[Mapping[str, Mapping[str, str]]],
    rank: int,
) -> list[Divergence]:
    """What this worker has to tell of: it knows the names of what it holds."""
    by_leaf: dict[str, dict[tuple[int, ...], None]] = {}
    for holders, ranks in suspects.items():
        if ranks[0] != rank:
            continue
        for replica in own[holders]:
            values: dict[str, list[int]] = {}
            for other in ranks:
                found = details[other].get(holders, {}).get(replica.key)
                if found is not None:
                    values.setdefault(found, []).append(other)
            if len(values) > 1:
                split = sorted(map(tuple, values.values()), key=lambda ranks: (-len(ranks), ranks))
                by_leaf.setdefault(replica.leaf, dict.fromkeys(split))
    return [Divergence(leaf, tuple(ranks)) for leaf, ranks in by_leaf.items()]


def _by_holders(digests: Mapping[Replica, str]) -> dict[str, dict[Replica, str]]:
    groups: dict[str, dict[Replica, str]] = {}
    names: dict[int, str] = {}
    for replica, found in digests.items():
        # Very many boxes have the very same holders.
        name = names.get(id(replica.holders))
        if name is None:
            name = names[id(replica.holders)] = digest(",".join(map(str, replica.holders)).encode())
        groups.setdefault(name, {})[replica] = found
    return groups


def _join(boxes: Mapping[Replica, str]) -> str:
    return digest("\n".join(f"{replica.key} {found}" for replica, found in sorted(boxes.items())).encode())


def _cut(details: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """As much of the details as one record may hold: of all workers the same, since they are in order."""
    cut: dict[str, dict[str, str]] = {}
    for holders, key, found in itertools.islice(_flatten(details), _MOST_DETAILS):
        cut.setdefault(holders, {})[key] = found
    return cut


def _flatten(details: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    for holders, boxes in details.items():
        for key, found in boxes.items():
            yield holders, key, found
