"""What several workers hold alike: whether all of them have it, and, if that is asked for, with the same values.

Each worker says little: for each set of workers with which it holds something, how many boxes these are, and a digest
of their names, types and shapes, and one of their values. Only of those that differ more is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec

from holdfast.cluster.joining import name_ranks
from holdfast.cluster.peers import make_sendable
from holdfast.format.boxes import Box
from holdfast.format.digests import digest
from holdfast.save.handoffs import Snapshot
from holdfast.state.leaves import ArraySpec, Replica
from holdfast.storage.crew import Crew

_DIGEST_CHARACTERS: Final = 16
"""How much of a digest is sent: enough to tell values apart that nobody has made equal on purpose."""

_NAMED_LEAVES: Final = 3

MOST_CAMPS: Final = 16
"""So many different sides are looked at. Where more workers differ, they have nothing in common."""

LEAVES_HINT: Final = (
    "State that not all workers have, or that has a form of its own on each, is given as hf.PerWorker, or as hf.Shard."
)


class Group(msgspec.Struct, frozen=True, array_like=True):
    """What one worker holds together with certain others.

    Attributes:
        holders: The digest of their ranks, this worker's among them.
        size: How many they are.
        boxes: How many boxes it has.
        names: The digest of what these are.
        values: The digest of what is in them; empty if that is not to be compared.
    """

    holders: str
    size: int
    boxes: int
    names: str
    values: str


class Suspect(NamedTuple):
    """Workers that should all hold the same, and do not.

    Attributes:
        holders: The digest of their ranks.
        camps: Those of them that agree together; the most first. Who has nothing of it is in none.
        are_named_alike: True if only values differ.
    """

    holders: str
    camps: tuple[tuple[int, ...], ...]
    are_named_alike: bool


Boxes: TypeAlias = dict[str, list[tuple[str, str]]]
"""What one worker has: by leaf, what each box of it is, and the digest of its values."""


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """All that one worker holds together with certain others.

    Attributes:
        holders: Their ranks.
        boxes: What it has.
    """

    holders: tuple[int, ...]
    boxes: Boxes


class Divergence(NamedTuple):
    """A leaf of which workers that should hold the same do not.

    Attributes:
        leaf: Its name.
        ranks: The workers, those that agree together; the most first.
    """

    leaf: str
    ranks: tuple[tuple[int, ...], ...]


class Holding:
    """What one worker holds together with others.

    Attributes:
        replicas: The boxes.
        groups: What it says of them.
    """

    def __init__(self, replicas: Sequence[Replica], digests: Sequence[str]) -> None:
        """Sums up.

        Args:
            replicas: The boxes.
            digests: The digest of the values of each; nothing if they are not to be compared.
        """
        self.replicas = replicas
        self._details: dict[str, Detail] = {}
        holders_by_id: dict[int, str] = {}
        kinds: dict[tuple[ArraySpec, Box], str] = {}
        for number, replica in enumerate(replicas):
            # Very many boxes have the very same holders.
            holders = holders_by_id.get(id(replica.holders))
            if holders is None:
                holders = _digest(",".join(map(str, replica.holders)))
                holders_by_id[id(replica.holders)] = holders
                self._details.setdefault(holders, Detail(tuple(replica.holders), {}))
            kind = f"the same array as {replica.same_as}" if replica.same_as else kinds.get((replica.spec, replica.box))
            if kind is None:
                kind = kinds[replica.spec, replica.box] = _describe(replica.spec, replica.box)
            value = digests[number] if digests else ""
            self._details[holders].boxes.setdefault(replica.leaf, []).append((kind, value))
        for detail in self._details.values():
            for boxes in detail.boxes.values():
                boxes.sort()
        self.groups = [_sum_up(holders, detail) for holders, detail in self._details.items()]

    def details(self, holders: Collection[str]) -> dict[str, Detail]:
        """All that there is to say of these groups, in words that can be sent."""
        return {
            one: Detail(
                detail.holders,
                {
                    make_sendable(leaf): [(make_sendable(kind), value) for kind, value in boxes]
                    for leaf, boxes in detail.boxes.items()
                },
            )
            for one, detail in self._details.items()
            if one in holders
        }


def make_holding(snapshot: Snapshot, crew: Crew, last: Holding) -> Holding:
    """**Blocks.** What the worker of a snapshot holds together with others; behind training.

    Args:
        snapshot: The snapshot.
        crew: The threads that work.
        last: What it held at the save before: as a rule the same.
    """
    has_values = any(group.values for group in last.groups)
    if snapshot.witnesses is None and not has_values and snapshot.replicas == last.replicas:
        return last
    return Holding(snapshot.replicas, _digest_values(snapshot, crew))


def _digest_values(snapshot: Snapshot, crew: Crew) -> list[str]:
    """The digest of the values of each box, if they are to be compared."""
    if snapshot.witnesses is None:
        return []
    sides = (snapshot.witnesses, snapshot)
    places = [{place.name: place for place in side.layout.places} for side in sides]
    found = [""] * len(snapshot.replicas)

    def take(number: int, replica: Replica) -> None:
        parts = []
        for name, is_written in replica.parts:
            place = places[is_written][name]
            parts.append(digest(sides[is_written].image[place.begin : place.end]))
        found[number] = _digest(" ".join(parts))

    crew.run(partial(take, number, replica) for number, replica in enumerate(snapshot.replicas))
    return found


def find_suspects(groups: Sequence[Sequence[Group]]) -> list[Suspect]:
    """**Pure.** The groups of workers that do not agree.

    Args:
        groups: What each worker says, in order of rank.
    """
    said: dict[str, dict[int, Group]] = {}
    for rank, own in enumerate(groups):
        for group in own:
            said.setdefault(group.holders, {})[rank] = group
    suspects = []
    for holders, by_rank in said.items():
        names = {(group.boxes, group.names) for group in by_rank.values()}
        are_named_alike = len(names) == 1 and all(group.size == len(by_rank) for group in by_rank.values())
        # Who was not told to compare values has none to show.
        values = {group.values for group in by_rank.values() if group.values}
        if not are_named_alike or len(values) > 1:
            camps: dict[Group, list[int]] = {}
            for rank, group in by_rank.items():
                camps.setdefault(group, []).append(rank)
            suspects.append(Suspect(holders, _order(camps.values()), are_named_alike))
    return suspects


def name_difference(suspect: Suspect, details: Mapping[int, Detail]) -> tuple[int, str]:
    """**Pure.** Whose leaves differ from those of the others, and in what.

    Args:
        suspect: The workers.
        details: Of some of them, all that they hold: of the first of a camp.

    Returns:
        A worker that has something else than most, and what there is to say of it.
    """
    sides = [(camp, details[camp[0]]) for camp in suspect.camps if camp[0] in details]
    if not sides:
        return suspect.camps[-1][0], "its leaves are not those of the others"
    holders = set(sides[0][1].holders)
    without = tuple(sorted(holders.difference(*suspect.camps)))
    if without:
        sides.append((without, Detail((), {})))
    sides.sort(key=lambda side: (-len(side[0]), side[0]))
    (most, usual), (few, other) = sides[0], sides[-1]
    if len(sides) == 1:
        return suspect.camps[-1][0], f"its leaves are not those of {name_ranks(most)}"
    differing = [
        leaf
        for leaf in [*usual.boxes, *(leaf for leaf in other.boxes if leaf not in usual.boxes)]
        if _kinds(usual, leaf) != _kinds(other, leaf)
    ]
    told = [_tell(leaf, _kinds(usual, leaf), _kinds(other, leaf), name_ranks(most)) for leaf in differing]
    more = f"; and {len(told) - _NAMED_LEAVES} leaves more" if len(told) > _NAMED_LEAVES else ""
    also = f"; the same goes for {name_ranks(few[1:])}" if len(few) > 1 else ""
    return few[0], f"{'; '.join(told[:_NAMED_LEAVES])}{more}{also}"


def name_divergences(suspect: Suspect, details: Mapping[int, Detail]) -> list[Divergence]:
    """**Pure.** The leaves whose values differ; see `name_difference`."""
    sides = [(camp, details[camp[0]]) for camp in suspect.camps if camp[0] in details]
    found = []
    for leaf in sides[0][1].boxes if sides else ():
        values: dict[tuple[str, ...], list[int]] = {}
        for camp, detail in sides:
            found_there = tuple(value for _, value in detail.boxes.get(leaf, ()))
            if all(found_there):
                values.setdefault(found_there, []).extend(camp)
        if len(values) > 1:
            found.append(Divergence(leaf, _order(values.values())))
    return found


def _order(camps: Collection[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted((tuple(sorted(camp)) for camp in camps), key=lambda camp: (-len(camp), camp)))


def _tell(leaf: str, usual: Sequence[str], other: Sequence[str], most: str) -> str:
    ending = "" if most.startswith("ranks") else "s"
    if not other:
        return f"it lacks {leaf} ({', '.join(usual)}), which {most} hold{ending}"
    if not usual:
        return f"it holds {leaf} ({', '.join(other)}), which {most} lack{ending}"
    return f"its {leaf} is {', '.join(other)}, and with {most} it is {', '.join(usual)}"


def _kinds(detail: Detail, leaf: str) -> list[str]:
    return [kind for kind, _ in detail.boxes.get(leaf, ())]


def _describe(spec: ArraySpec, box: Box) -> str:
    whole = f"{spec.dtype} {list(spec.shape)}"
    return whole if box.is_whole(spec.shape) else f"{box} of {whole}"


def _sum_up(holders: str, detail: Detail) -> Group:
    ordered = sorted(detail.boxes.items())
    names = "\n".join(f"{leaf}\t{kind}" for leaf, boxes in ordered for kind, _ in boxes)
    values = "".join(value for _, boxes in ordered for _, value in boxes)
    count = sum(len(boxes) for _, boxes in ordered)
    return Group(holders, len(detail.holders), count, _digest(names), _digest(values) if values else "")


def _digest(words: str) -> str:
    return digest(words.encode(errors="surrogatepass"))[:_DIGEST_CHARACTERS]
