"""Takes state from objects into bytes and back into other objects, without any storage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.state.capture import capture_objects
from holdfast.state.leaves import ArraySpec, Differences
from holdfast.state.match.matching import Matching, match_objects


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds: skeletons as JSON text, and the bytes of each leaf."""

    text: str
    specs: dict[str, ArraySpec]
    data: dict[str, bytes]

    @property
    def objects(self) -> dict[str, Any]:
        return dict(json.loads(self.text))


def store(**objects: Any) -> Stored:
    """CaptureCache objects and copies their arrays, one after the other without gaps, into one image."""
    captured = capture_objects(objects)
    sizes = [spec.size_bytes for spec in captured.specs]
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    image = memoryview(bytearray(sum(sizes)))
    for backend in {backend.name: backend for backend in captured.backends}.values():
        own = [place for place, other in enumerate(captured.backends) if other.name == backend.name]
        backend.copy_out([captured.arrays[place] for place in own], image, [offsets[place] for place in own])
    return Stored(
        json.dumps(captured.objects),
        dict(zip(captured.names, captured.specs, strict=True)),
        {
            name: bytes(image[at : at + size_bytes])
            for name, at, size_bytes in zip(captured.names, offsets, sizes, strict=True)
        },
    )


def match(stored: Stored, objects: Mapping[str, Any], select: Callable[[str], bool] | None = None) -> Matching:
    return match_objects(objects, stored.objects, stored.specs, select=select)


def fill(stored: Stored, matching: Matching) -> None:
    """Does what the restore does with the targets."""
    for target in matching.targets:
        assert target.spec == stored.specs[target.leaf]
        target.backend.copy_in(target.array, memoryview(stored.data[target.leaf]))


def bring_back(
    stored: Stored,
    objects: dict[str, Any],
    select: Callable[[str], bool] | None = None,
    *,
    strict: bool = True,
) -> Differences:
    """Restores into objects; those that cannot be changed are replaced in the dict."""
    matching = match(stored, objects, select)
    if strict:
        assert not matching.differences, matching.differences
    fill(stored, matching)
    objects.update(matching.apply())
    return matching.differences
