"""The kinds of events, each readable as a line of text and as a line of JSON."""

from __future__ import annotations

import re
import time
from typing import Final, TypeAlias

import msgspec

from holdfast.numbers import size_text, time_text

_MOST_SHOWN: Final = 3


def _kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_kind):
    """The base class of all events.

    Attributes:
        at_unix_seconds: When it happened, by the wall clock.
    """

    at_unix_seconds: float = msgspec.field(default_factory=time.time)


class GenerationOpened(Event, frozen=True):
    """This process has opened a generation: from now on it is the one that saves here.

    Attributes:
        generation: Its number.
        base_step: The step that it resumes from; None if it starts from the beginning.
    """

    generation: int
    base_step: int | None = None

    def __str__(self) -> str:
        base = "from the beginning" if self.base_step is None else f"from step {self.base_step}"
        return f"generation {self.generation} opened, {base}"


class Staged(Event, frozen=True):
    """The state of a step has been copied; training continues.

    Attributes:
        step, generation: The step being saved, and the generation that saves it.
        blocked_seconds: How long training was blocked, including a wait for the previous save.
        size_bytes: The size of the copy.
        reason: Why the step is saved, in the words of the policy; empty if the user asked for it.
    """

    step: int
    generation: int
    blocked_seconds: float
    size_bytes: int
    reason: str = ""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        held_up = time_text(self.blocked_seconds)
        return f"step {self.step}{reason} staged: {size_text(self.size_bytes)}, training blocked for {held_up}"


class Held(Event, frozen=True):
    """An optimizer step waited because the state was still being copied.

    Attributes:
        step: The step being saved.
        blocked_seconds: How long training was blocked.
    """

    step: int
    blocked_seconds: float

    def __str__(self) -> str:
        return f"step {self.step}: the optimizer waited {time_text(self.blocked_seconds)} for the copy"


class Written(Event, frozen=True):
    """The bytes of a step are durable, but not yet committed.

    Attributes:
        step, generation: The step being saved, and the generation that saves it.
        background_seconds: How long the writing took in the background; it begins while training still copies.
        size_bytes: The size of what was written.
    """

    step: int
    generation: int
    background_seconds: float
    size_bytes: int

    def __str__(self) -> str:
        seconds = time_text(self.background_seconds)
        return f"step {self.step} written: {size_text(self.size_bytes)}, {seconds} in the background"


class Committed(Event, frozen=True):
    """A step is committed: it can be restored from now on.

    Attributes:
        step, generation: The step, and the generation that saved it.
        blocked_seconds: How long it blocked training, as in its `Staged`.
        background_seconds: How long the rest took, in the background.
        size_bytes: The size of what was written.
        training_saved_seconds: The training time between the previous commit and this one, now safe from a crash.
        referred_bytes: The size of unchanged data that is stored in earlier steps and was not written again.
    """

    step: int
    generation: int
    blocked_seconds: float
    background_seconds: float
    size_bytes: int
    training_saved_seconds: float
    referred_bytes: int = 0

    def __str__(self) -> str:
        referred = f", {size_text(self.referred_bytes)} reused from earlier steps" if self.referred_bytes else ""
        return (
            f"step {self.step} committed: {size_text(self.size_bytes)}{referred}, training blocked for "
            f"{time_text(self.blocked_seconds)}, {time_text(self.background_seconds)} in the background, "
            f"covers {time_text(self.training_saved_seconds)} of training"
        )


class PartsWritten(Event, frozen=True):
    """A step of several workers is committed: how long each of them took for its part.

    Attributes:
        step, generation: The step, and the generation that saved it.
        ranks: The workers whose parts were durable last, the last one first; 32 at most.
        blocked_seconds, background_seconds, size_bytes: For each of them, as in `Written` and its `Staged`.
    """

    step: int
    generation: int
    ranks: tuple[int, ...]
    blocked_seconds: tuple[float, ...]
    background_seconds: tuple[float, ...]
    size_bytes: tuple[int, ...]

    def __str__(self) -> str:
        seconds = time_text(max(self.background_seconds, default=0.0))
        return f"step {self.step}: the last part to be durable was that of {_ranks(self.ranks[:1])}, after {seconds}"


class Copied(Event, frozen=True):
    """A step is committed in a farther tier as well; see `holdfast.Tiers`.

    Attributes:
        step, generation: The step, and the generation that saved it.
        tier: The URL of the tier.
        background_seconds: How long the copy took, in the background.
        size_bytes: The size of what this worker has copied.
    """

    step: int
    generation: int
    tier: str
    background_seconds: float
    size_bytes: int

    def __str__(self) -> str:
        cost = f"{size_text(self.size_bytes)}, {time_text(self.background_seconds)} in the background"
        return f"step {self.step} is in {self.tier} as well: {cost}"


class Restored(Event, frozen=True):
    """The live objects have been restored to the state of a step.

    Attributes:
        step, generation: The step, and the generation that saved it.
        blocked_seconds: How long it took.
        size_bytes: The size of what was read and checked.
        tiers: The URLs of the tiers that this worker has read data from; empty if the run has none.
    """

    step: int
    generation: int
    blocked_seconds: float
    size_bytes: int
    tiers: tuple[str, ...] = ()

    def __str__(self) -> str:
        source = f" from {' and '.join(self.tiers)}" if self.tiers else ""
        return f"step {self.step} restored{source}: {size_text(self.size_bytes)} in {time_text(self.blocked_seconds)}"


class Resized(Event, frozen=True):
    """A checkpoint of a different number of workers has been restored.

    Attributes:
        step, generation: The step, and the generation that saved it.
        stored_workers: How many workers saved it.
        workers: How many workers there are now.
        reseeded: Random generators that were reseeded from their saved state, differently on each worker.
        left: Per-worker state that was not restored, because its saved values belong to no worker any more.
    """

    step: int
    generation: int
    stored_workers: int
    workers: int
    reseeded: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        savers = "1 worker" if self.stored_workers == 1 else f"{self.stored_workers} workers"
        text = f"step {self.step} was saved by {savers} and is restored by {self.workers}"
        notes = [f"reseeded: {', '.join(self.reseeded)}"] if self.reseeded else []
        notes += [f"not restored: {', '.join(self.left)}"] if self.left else []
        return f"{text} ({'; '.join(notes)})" if notes else text


class Diverged(Event, frozen=True):
    """Workers that should hold equal values of a tensor do not.

    Attributes:
        step: The step that was saved; it holds the values of one of them.
        generation: The generation that saved it.
        tensor: The leaf.
        ranks: The workers in groups that agree; the largest group first.
    """

    step: int
    generation: int
    tensor: str
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        sides = " from ".join(_ranks(ranks) for ranks in self.ranks)
        return f"step {self.step}: {self.tensor} should be equal on all workers, but differs: {sides}"


class PassedOver(Event, frozen=True):
    """A damaged step was skipped, and an older one is tried.

    Attributes:
        step: The damaged step.
        generation: The generation that saved it.
        file: The damaged file, below the run's directory.
        error: The damage.
        offset_bytes: Where in the file the damage begins; None if it is not known.
        tensor: The leaf whose bytes are damaged, or an empty string.
    """

    step: int
    generation: int
    file: str
    error: str
    offset_bytes: int | None = None
    tensor: str = ""

    def __str__(self) -> str:
        place = self.file
        if self.offset_bytes is not None:
            place += f" at byte {self.offset_bytes}"
        if self.tensor:
            place += f" ({self.tensor})"
        # Most errors begin with the file's name, which need not be repeated. Some are not about a file.
        error = self.error.removeprefix(f"{self.file}: ")
        if self.file and (place != self.file or not error.startswith(f"{self.file} ")):
            error = f"{place}: {error}"
        return f"step {self.step} skipped because it is damaged: {error}"


class Retained(Event, frozen=True):
    """Retention has run: old steps were kept or removed.

    Attributes:
        kept: The kept steps, each with the reason; at most the newest 100.
        removed: The steps that were removed.
        background_seconds: How long it took.
        more_kept: How many older steps stay that `kept` does not name.
        kept_bytes: The size of all kept steps; bytes that several of them share count once.
    """

    kept: dict[int, str]
    removed: tuple[int, ...]
    background_seconds: float = 0.0
    more_kept: int = 0
    kept_bytes: int = 0

    def __str__(self) -> str:
        removed = ", ".join(map(str, self.removed)) or "none"
        kept = ", ".join(f"{step} ({reason})" for step, reason in self.kept.items()) or "none"
        more = f", and {self.more_kept} older ones" if self.more_kept else ""
        return f"steps removed: {removed}; kept: {kept}{more}"


class Failed(Event, frozen=True):
    """Something failed.

    Attributes:
        stage: What failed: `save`, `restore`, `retain`, or a stage of these, such as `write`; `training`, if an error
            ended the training of one of several workers.
        error: The error in words.
        step: The step concerned, or None.
        generation: The generation concerned, or None.
        save_lost: True if a requested checkpoint does not exist because of it.
        background_seconds: The time spent on it in the background.
        rank: The worker on which it failed, if there are several; None if it is not known.
        path: The directory of the run; empty if that does not matter.
        is_raised: True if an error says it as well, because a save before has failed too.
    """

    stage: str
    error: str
    step: int | None = None
    generation: int | None = None
    save_lost: bool = False
    background_seconds: float = 0.0
    rank: int | None = None
    path: str = ""
    is_raised: bool = False

    def __str__(self) -> str:
        # An error of another worker names that one itself, with its node.
        who = "" if self.rank is None or self.error.startswith(f"rank {self.rank} ") else f"rank {self.rank}: "
        where = "" if self.step is None else f" of step {self.step}"
        place = f" in {self.path}" if self.path else ""
        if self.stage == "retain":
            return (
                f"step {self.step} is committed, but the cleanup failed, and is retried after each save: {self.error}"
            )
        return f"{who}{self.stage}{where}{place} failed: {self.error}"


class Skipped(Event, frozen=True):
    """A requested save was skipped.

    Attributes:
        step: The step that is not saved.
        reason: Why.
    """

    step: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} not saved: {self.reason}"


class Warned(Event, frozen=True):
    """A warning.

    Attributes:
        text: One sentence.
        step: The step concerned, or None.
        is_error: True if it is logged as an error, because something is lost.
        by_each: True if each worker of a job finds the same; rank 0 logs it.
    """

    text: str
    step: int | None = None
    is_error: bool = False
    by_each: bool = False

    def __str__(self) -> str:
        return self.text if self.step is None else f"step {self.step}: {self.text}"


class WitnessAgreed(Event, frozen=True):
    """The steps that were repeated after a restart are as they were before it.

    Attributes:
        first_step: The first step that was compared.
        last_step: The last one.
        what: What was compared: `data`, `loss` or `data and loss`.
    """

    first_step: int
    last_step: int
    what: str

    def __str__(self) -> str:
        is_one = self.first_step == self.last_step
        steps = f"step {self.first_step} was" if is_one else f"steps {self.first_step} to {self.last_step} were"
        return f"{steps} repeated with the same {self.what.replace('and', 'and the same')}"


class WitnessDiffers(Event, frozen=True):
    """A step that was repeated after a restart took other data than before it, or gave another loss.

    Attributes:
        step: The first step that differs.
        what: `data` or `loss`.
        loader: The loaders that give the data; empty for a loss if the data could not be compared.
        before: What it was before the restart: the loss, or the number of batches.
        now: What it is now.
        rank: The worker.
        is_raised: True if an error says it as well.
    """

    step: int
    what: str
    loader: str
    before: float
    now: float
    rank: int = 0
    is_raised: bool = False

    def __str__(self) -> str:
        how = f"with other data of {self.loader} than before the restart"
        if self.what == "loss":
            known = "the same data, but " if self.loader else ""
            how = f"with {known}the loss {self.now!r}; before the restart it was {self.before!r}"
        elif self.before != self.now:
            how = f"with {self.now:g} of the batches of {self.loader}; before the restart it took {self.before:g}"
        worker = f"rank {self.rank}: " if self.rank else ""
        return (
            f'{worker}step {self.step} was repeated {how} (see "If repeated steps differ" in docs/guides/restoring.md)'
        )


class GroupEnded(Event, frozen=True):
    """All tasks of a group of a job have succeeded.

    Attributes:
        group: The group, such as `init` or `epoch`.
        epoch: The epoch, counted from 1; 0 before the first.
        seconds: How long the tasks ran.
    """

    group: str
    epoch: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.group}{f' {self.epoch}' if self.group == 'epoch' else ''} ended after {time_text(self.seconds)}"


class NodesTimed(Event, frozen=True):
    """The state of a job's nodes has been saved or loaded.

    Attributes:
        action: `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.
        epoch: The epoch.
        node_seconds: How long each node took.
        slowest: The node that took longest.
    """

    action: str
    epoch: int
    node_seconds: dict[str, float]
    slowest: str

    def __str__(self) -> str:
        longest = time_text(self.node_seconds.get(self.slowest, 0.0))
        what = self.action.replace("_", " ")
        return f"{what} of epoch {self.epoch}: {len(self.node_seconds)} nodes, longest {self.slowest} with {longest}"


class NoticeHeard(Event, frozen=True):
    """A preemption notice arrived: this process, or its machine, is about to be taken away.

    Attributes:
        source: The source of the notice.
        text: The notice in words.
        demand: What it asks for: `save`, `leave_by` or `leave`.
        left_seconds: The time until the process must be gone; None if it is not known.
        by_hand: True if a person pressed Ctrl-C.
    """

    source: str
    text: str
    demand: str
    left_seconds: float | None = None
    by_hand: bool = False

    def __str__(self) -> str:
        left = "" if self.left_seconds is None else f", {time_text(max(self.left_seconds, 0.0))} left"
        # Of Ctrl-C a line has said so at once.
        then = (
            "; the step in progress is finished and saved first" if self.demand == "leave" and not self.by_hand else ""
        )
        return f"{self.text}{left}{then}"


class NotFinite(Event, frozen=True):
    """A step was committed whose parameters or optimizer states have nan or an infinity.

    Attributes:
        step, generation: The step, and the generation that saved it.
        leaves: How many leaves.
        names: The first of them.
        is_exempt: True if this is the run's first checkpoint, and these leaves are not counted.
        is_raised: True if an error says it as well.
    """

    step: int
    generation: int
    leaves: int
    names: tuple[str, ...] = ()
    is_exempt: bool = False
    is_raised: bool = False

    def __str__(self) -> str:
        more = f" and {self.leaves - _MOST_SHOWN} more" if self.leaves > _MOST_SHOWN else ""
        then = "; they do not count from here on: start over if training did it" if self.is_exempt else ""
        return f"step {self.step} is not finite: nan or infinity in {', '.join(self.names[:_MOST_SHOWN])}{more}{then}"


class Leaving(Event, frozen=True):
    """The process exits, as it was asked to.

    Attributes:
        step: The newest step that is saved; None if nothing was.
        exit_code: Its exit code. After an interrupt in a notebook, or at a prompt, the process stays.
        reason: Why it exits now.
        error: Why the state could not be saved; empty if it was.
        blocked_seconds: How long the last save blocked training.
        saved: What is saved, in words, such as "step 500 is saved"; empty if the state could not be saved.
    """

    step: int | None
    exit_code: int
    reason: str
    error: str = ""
    blocked_seconds: float = 0.0
    saved: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"leaving with exit code {self.exit_code}; the state could not be saved: {self.error}"
        return f"leaving with exit code {self.exit_code}, {self.saved or f'step {self.step} is saved'} ({self.reason})"


class Clocked(Event, frozen=True):
    """The time that a start of the run has spent so far, by phases: after each commit, and at its end.

    Attributes:
        begun_at_unix_seconds: When the process began. The sums are those of worker 0 since then.
        setup_seconds, restore_seconds: All before the restore, such as imports; and the restore.
        train_seconds, data_seconds: Steps, and the program's own code; waits for data, as far as holdfast sees them.
        save_seconds: The time for which saves stopped training.
        leave_seconds: The end, with the last save.
        first_step, step: How many steps were complete when it began, and how many are now.
        first_step_seconds: The part of `train_seconds` until the first of them was complete; 0 if it is not known.
        repeated_steps: How many of those that it has done an earlier start had done, too.
        is_last: True if the run was left, and is not to be expected to go on.
        evaluate_seconds, error: Evaluations that are marked; the error that ended training, in a line.
    """

    begun_at_unix_seconds: float
    setup_seconds: float
    restore_seconds: float
    train_seconds: float
    data_seconds: float
    save_seconds: float
    leave_seconds: float
    first_step: int
    step: int
    repeated_steps: int = 0
    is_last: bool = False
    evaluate_seconds: float = 0.0
    first_step_seconds: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        whole = time_text(self.at_unix_seconds - self.begun_at_unix_seconds)
        return f"step {self.step}: {time_text(self.train_seconds)} of training in the {whole} since the start"


AnyEvent: TypeAlias = (
    GenerationOpened
    | Staged
    | Held
    | Written
    | Committed
    | PartsWritten
    | Copied
    | Restored
    | Resized
    | Diverged
    | PassedOver
    | Retained
    | Failed
    | Skipped
    | Warned
    | WitnessAgreed
    | WitnessDiffers
    | GroupEnded
    | NodesTimed
    | NoticeHeard
    | NotFinite
    | Leaving
    | Clocked
)
"""Every kind of event; the field `kind` tells them apart in JSON."""


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
