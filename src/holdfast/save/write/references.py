"""Which arrays of a save are not written, since they lie on the disk already. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.format.index import Index, LeafRecord, ReferredRecord, Source
from holdfast.format.layout import Place
from holdfast.format.names import StepName

MAX_KEPT_STEPS: Final = 16
"""How many steps a step may refer to, and how many may be kept on its account."""

MAX_SHARE: Final = 2
"""How many times as large as what is referred to all that is kept for it may be."""

SMALL_BYTES: Final = 1 << 20
"""What may be kept beyond that: so few bytes are not weighed."""


class Held(msgspec.Struct, frozen=True):
    """An array that lies on the disk.

    Attributes:
        record: What it is, with its digests and its place in the file.
        source: The file.
    """

    record: LeafRecord
    source: Source

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self.record.end - self.record.begin


def list_held(index: Index) -> dict[str, Held]:
    """**Pure.** The arrays of a step by name, each with the file that holds its bytes."""
    own = index.own_source
    held = {leaf.name: Held(leaf, own) for leaf in index.leaves}
    held |= {leaf.name: Held(leaf, index.sources[leaf.source]) for leaf in index.referred}
    return held


def find_unchanged(places: Sequence[Place], spans: Sequence[str], held: Mapping[str, Held]) -> dict[str, Held]:
    """**Pure.** The arrays that are what they were: of the same name, type, shape and digests.

    Args:
        places: The arrays as they are now.
        spans: The digests of each, over spans of the same length.
        held: What they were.
    """
    unchanged = {}
    for place, digests in zip(places, spans, strict=True):
        known = held.get(place.name)
        if known is None or not digests or known.record.spans != digests:
            continue
        if (known.record.dtype, known.record.shape) == (place.dtype, place.shape):
            unchanged[place.name] = known
    return unchanged


class Offer(msgspec.Struct, frozen=True):
    """A step that could be referred to.

    Attributes:
        name: Which one.
        held_bytes: How many bytes of the save lie there.
        kept_bytes: What has to stay on the disk if it is referred to, by step: its own data, and that of all that it
            refers to itself.
    """

    name: StepName
    held_bytes: int
    kept_bytes: Mapping[StepName, int]


def choose_sources(offers: Iterable[Offer], wanted: Collection[StepName]) -> frozenset[StepName]:
    """**Pure.** The steps that are worth being referred to; arrays that lie in others are written anew.

    A step that is referred to stays on the disk, with all that it refers to itself, whatever the retention policy
    says. So that this does not add up without bound, they are looked at one by one, what holds most first, and one is
    chosen only if what it adds to the steps that the policy would give up takes no more than `MAX_SHARE` times what is
    referred to there and `SMALL_BYTES`, and if they are no more than `MAX_KEPT_STEPS` then.

    Args:
        offers: The steps that could be referred to.
        wanted: The steps that the retention policy keeps anyway once the save is committed: these cost nothing.
    """
    free = frozenset(wanted)
    chosen: set[StepName] = set()
    kept: set[StepName] = set()
    for offer in sorted(offers, key=lambda offer: (-offer.held_bytes, offer.name)):
        added = offer.kept_bytes.keys() - free - kept
        cost_bytes = sum(offer.kept_bytes[name] for name in added)
        is_cheap = cost_bytes <= MAX_SHARE * offer.held_bytes + SMALL_BYTES
        if is_cheap and len(chosen) < MAX_KEPT_STEPS and len(kept) + len(added) <= MAX_KEPT_STEPS:
            chosen.add(offer.name)
            kept |= added
    return frozenset(chosen)


def make_references(kept: Mapping[str, Held]) -> tuple[tuple[Source, ...], tuple[ReferredRecord, ...]]:
    """**Pure.** The sources of an index, and its records of the arrays that are referred to there, in order."""
    sources = tuple(sorted({held.source for held in kept.values()}))
    numbers = {source: number for number, source in enumerate(sources)}
    referred = (
        ReferredRecord(
            name=name,
            dtype=held.record.dtype,
            shape=held.record.shape,
            begin=held.record.begin,
            end=held.record.end,
            spans=held.record.spans,
            source=numbers[held.source],
        )
        for name, held in kept.items()
    )
    return sources, tuple(sorted(referred, key=lambda leaf: (leaf.source, leaf.begin)))
