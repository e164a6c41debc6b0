"""What a person should know besides the figures of a bench. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from holdfast.bench.figures import Measured
from holdfast.bench.file_system import FileSystem
from holdfast.bench.place import Swept
from holdfast.bench.plan import Limit, TrialPlan
from holdfast.cli.wording import counted, size_text

NoticeKind: TypeAlias = Literal[
    "in_memory",
    "layered",
    "shared",
    "not_direct",
    "not_compiled",
    "no_room",
    "little_room",
    "no_memory",
    "smaller_trial",
    "no_cold_read",
    "noisy",
    "save_in_progress",
    "other_bench",
    "swept",
]

_LIMITS: Final[dict[Limit, str]] = {
    "time": "more would take long",
    "memory": "more would take memory from others",
    "room": "more would take room from others",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to know.

    Attributes:
        kind: What it is about.
        text: The same for people.
    """

    kind: NoticeKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a bench was made under.

    Attributes:
        size_bytes: The size of the state.
        has_checkpoint: Whether the run has a checkpoint already.
        may_be_saving: Whether a job may be saving there at this moment.
        file_system: Where the directory lies.
        available_bytes: How much memory could be taken before; None if that is not known.
        swept: What earlier benches had left.
        plan: How much was saved in a trial, and why it was no more.
        measured: What was found.
        is_compiled: Whether holdfast has its compiled copy and read.
    """

    size_bytes: int
    has_checkpoint: bool
    may_be_saving: bool
    file_system: FileSystem
    available_bytes: int | None
    swept: Swept
    plan: TrialPlan
    measured: Measured
    is_compiled: bool


def find_notices(known: Circumstances) -> list[Notice]:
    """**Pure.** What a person should know, the gravest first."""
    return [*_about_place(known), *_about_room(known), *_about_figures(known)]


def _about_place(known: Circumstances) -> Iterator[Notice]:
    where = known.file_system
    if where.is_in_memory:
        yield Notice("in_memory", f"{where.kind} lies in memory: when the machine goes, what is saved there is gone")
    if where.is_layered:
        yield Notice(
            "layered", f"{where.kind} is mostly a container's own layer, which ends with it: save to a volume instead"
        )
    if where.is_shared:
        yield Notice("shared", f"{where.kind} is shared with others, and what they do changes the figures")


def _about_room(known: Circumstances) -> Iterator[Notice]:
    free_bytes, size = known.file_system.free_bytes, size_text(known.size_bytes)
    if free_bytes is not None and free_bytes < known.size_bytes:
        yield Notice("no_room", f"a save of {size} does not fit: {size_text(free_bytes)} are free")
    elif free_bytes is not None and free_bytes < 2 * known.size_bytes and not known.has_checkpoint:
        yield Notice(
            "little_room",
            f"only one checkpoint of {size} fits, {size_text(free_bytes)} are free; and the second is written before "
            "the first is removed",
        )
    if known.available_bytes is not None and known.available_bytes < known.size_bytes:
        yield Notice(
            "no_memory",
            f"a save copies the state into memory of its own: that takes {size}, and "
            f"{size_text(known.available_bytes)} are available",
        )


def _about_figures(known: Circumstances) -> Iterator[Notice]:
    measured = known.measured
    if not measured.is_direct:
        yield Notice(
            "not_direct",
            "the file system takes no direct writes: bytes pass through the page cache, which takes time of the "
            "processor from training",
        )
    if not known.is_compiled:
        yield Notice(
            "not_compiled",
            "holdfast copies and reads the state with what Python has, since it was installed without a C compiler, or "
            "with a package of xxhash that does not show its functions: installed anew where there is a compiler, with "
            "xxhash's own wheel, a save may hold training up for less, and a restore be quicker",
        )
    if measured.restore_cold_seconds is None:
        yield Notice(
            "no_cold_read", "what a cold restore takes is not known: the page cache does not let go of files here"
        )
    trial, size = size_text(known.plan.size_bytes), size_text(known.size_bytes)
    if trial != size:
        why = f" ({_LIMITS[known.plan.limited_by]})" if known.plan.limited_by else ""
        yield Notice("smaller_trial", f"{trial} were saved in the trials{why}; what {size} cost is reckoned from that")
    if known.may_be_saving:
        yield Notice("save_in_progress", "a job may be saving here at this moment, and each slows the other down")
    if known.swept.left_alone:
        count = counted(len(known.swept.left_alone), "directory", "directories")
        yield Notice(
            "other_bench",
            f"another bench may be at work here, or its file system has no locks: {count} left alone, "
            f"{', '.join(known.swept.left_alone)}",
        )
    if measured.is_noisy:
        yield Notice("noisy", "the rounds differ widely: something else used the machine or the disk meanwhile")
    if known.swept.removed:
        yield Notice("swept", f"what a bench that died had left was removed: {size_text(known.swept.removed_bytes)}")
