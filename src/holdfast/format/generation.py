"""Generations: who opened the run, and from which step each began. Pure.

Every start of a job that saves opens a generation, the next number. Its base is the checkpoint that it began from. The
living line is what the newest generation saved, then what its base's generation saved up to that base, and so on back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

from holdfast.errors import FormatError
from holdfast.format.digests import Record, unseal
from holdfast.format.names import MAX_ATTEMPT, MAX_STEP, AttemptNumber, GenerationNumber, StepName, StepNumber

MAX_GENERATION_BYTES: Final = 1 << 20


class Opening(Record, frozen=True):
    """The record that opens a generation.

    Attributes:
        generation: Its number.
        token: Random text that tells who opened it: one manager of one process.
        host: The machine that opened it.
        process: The process's number there.
        opened_at_unix_seconds: The opener's clock; for people only.
    """

    kind: ClassVar[str] = "generation"

    generation: GenerationNumber
    token: str
    host: str
    process: int
    opened_at_unix_seconds: float


class Base(Record, frozen=True):
    """The record that says where a generation began.

    Attributes:
        generation: The generation that began.
        step: The step of the checkpoint that it began from, or None if it began anew.
        base_generation: That checkpoint's generation, or None.
        base_attempt: That checkpoint's attempt, or None.
    """

    kind: ClassVar[str] = "base"

    generation: GenerationNumber
    step: StepNumber | None
    base_generation: GenerationNumber | None
    base_attempt: AttemptNumber | None

    @property
    def name(self) -> StepName | None:
        """The checkpoint that it began from, or None if it began anew."""
        if self.step is None or self.base_generation is None or self.base_attempt is None:
            return None
        return StepName(self.step, self.base_generation, self.base_attempt)


def make_base(generation: int, name: StepName | None) -> Base:
    """**Pure.** The base record of a generation that began from `name`, or anew."""
    if name is None:
        return Base(generation, None, None, None)
    return Base(generation, name.step, name.generation, name.attempt)


def decode_opening(data: bytes, *, path: str) -> Opening:
    """**Pure.** The opening that the bytes hold.

    Raises:
        FormatError: If it is damaged.
    """
    return unseal(Opening, data, path=path)


def decode_base(data: bytes, *, path: str, generation: int) -> Base:
    """**Pure.** The base that the bytes hold.

    Raises:
        FormatError: If it is damaged, another generation's, or does not lie before its generation.
    """
    base = unseal(Base, data, path=path)
    parts = (base.step, base.base_generation, base.base_attempt)
    if base.generation != generation or (None in parts and any(part is not None for part in parts)):
        raise FormatError(f"{path}: is not a well-formed base of generation {generation}", path=path)
    name = base.name
    if name is not None and name.generation >= generation:
        raise FormatError(f"{path}: {name} cannot be the base of generation {generation}", path=path)
    return base


def choose_living(steps: Iterable[StepName], bases: Mapping[int, Base]) -> tuple[StepName, ...]:
    """**Pure.** The steps on the living line, oldest first; of one step, the attempt that counts.

    Args:
        steps: The committed steps, in any order.
        bases: The base of each generation that recorded one. A generation that recorded none saved nothing; should it
            have steps all the same (its record was lost), they are taken to follow what lies before them.
    """
    by_generation: dict[int, list[StepName]] = {}
    for name in steps:
        by_generation.setdefault(name.generation, []).append(name)
    living: dict[int, StepName] = {}
    # An earlier generation counts up to the place, as step and attempt, where a later one left it, inclusive: what lies
    # beyond was saved, or replaced, when the later one had begun.
    last = (MAX_STEP, MAX_ATTEMPT)
    generation = max((*bases, *by_generation), default=0)
    while generation > 0:
        own = sorted(name for name in by_generation.get(generation, ()) if (name.step, name.attempt) <= last)
        for name in own:
            holder = living.get(name.step)
            if holder is None or holder.generation == generation:
                living[name.step] = name
        base = bases.get(generation)
        if base is None:
            generation -= 1
            if own:
                last = min(last, (own[0].step - 1, MAX_ATTEMPT))
        elif (left := base.name) is not None:
            generation, last = left.generation, min(last, (left.step, left.attempt))
        else:
            break
    return tuple(living[step] for step in sorted(living))
