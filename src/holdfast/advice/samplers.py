"""The batches that training takes from the saved samplers, and from those of saved loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.state.data.sampler import BatchCount, ResumableSampler, SamplerAdapter
from holdfast.state.registry import list_members


class TakenBatches:
    """Counts what is taken from the samplers that are saved when this is created.

    Attributes:
        counts: The count of each, by its path.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        samplers = find_samplers(objects)
        self.counts: dict[str, BatchCount] = {path: sampler.count for path, sampler in samplers.items()}
        self._samplers = [*samplers.values()]
        self._step_began = self.count()

    def count(self) -> tuple[int, int]:
        """Returns how many batches were taken, and how often a loop asked for another one at the end of an epoch."""
        batches = ends = 0
        for count in self.counts.values():  # At each step: quicker than sums.
            batches += count.batches
            ends += count.ends
        return batches, ends

    def begin_step(self) -> None:
        """Called when a step begins that will be counted."""
        self._step_began = self.count()

    def is_step_empty(self) -> bool:
        """Returns True if the step took no batch and ended an epoch, like the last one of `zip(steps, loader)`."""
        began, now = self._step_began, self.count()
        return now[1] > began[1] and now[0] == began[0]

    def find_epoch_end(self) -> int | None:
        """Returns how many batches were taken if the last one of an epoch was the newest; else None."""
        return self.count()[0] if any(one.has_taken_last() for one in self._samplers) else None


def count_taken(objects: Mapping[str, object]) -> dict[str, int]:
    """Returns how many batches were taken in this process from each saved sampler, or that of a saved loader."""
    return {path: sampler.count.batches for path, sampler in find_samplers(objects).items()}


def describe_epochs(objects: Mapping[str, object]) -> str:
    """Returns how many epochs the first of the saved samplers has completed, in words; "" if none has."""
    for path, sampler in find_samplers(objects).items():
        if complete := sampler.count_complete():
            return f"{epochs_text(complete)} of {path}"
    return ""


def list_overruled(objects: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Returns the script's settings of the saved samplers, as `loader.seed`, and the restored ones."""
    return {
        f"{path}.{name}": pair
        for path, sampler in find_samplers(objects).items()
        for name, pair in sampler.count.overruled.items()
    }


def find_samplers(objects: Mapping[str, object]) -> dict[str, ResumableSampler]:
    """Returns each sampler once, even if a loader that is built on it is saved as well."""
    found: dict[int, tuple[str, ResumableSampler]] = {}
    for path, obj, adapter in list_members(objects):
        sampler = adapter.find_sampler(obj) if isinstance(adapter, SamplerAdapter) else None
        if sampler is not None:
            found.setdefault(id(sampler), (path, sampler))
    return dict(found.values())


def epochs_text(number: int) -> str:
    """**Pure.** Returns "1 complete epoch", say."""
    return f"{number} complete {'epoch' if number == 1 else 'epochs'}"
