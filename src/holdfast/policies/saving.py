"""Policies that decide when to save. Pure."""

from __future__ import annotations

import math
from typing import ClassVar, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds, check_share, check_whole, span_text
from holdfast.tracebacks import short_traceback

DEFAULT_MTBF_SECONDS: Final = 6 * 3600.0
"""The mean time between failures that `Auto` assumes until it has seen some: that of preemptible machines, or of a few
hundred GPUs."""

DEFAULT_OVERHEAD: Final = 0.01
"""The share of the time for which saves may block training, while no failure is known."""

PROBE_STEPS: Final = 3
"""The step of `Auto`'s first save, which measures the cost: late enough for the optimizer to have its state."""

UNMEASURED_BLOCKED_SECONDS: Final = 1.0
"""The cost of a save that `Auto` assumes while its first save is in progress and none has been measured."""

Bound: TypeAlias = Literal["optimum", "overhead", "durable", "unmeasured"]


class SaveMoment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts between two steps on which the decision to save is based.

    Attributes:
        step: The number of complete steps of the whole training.
        last_saved_step: The newest step whose save was begun, or the restored one; None if neither.
        first_step: The number of complete steps with which this process began.
        seconds_since_last_save: The time since this process began its last save, or since it started.
        step_seconds: The recent mean duration of a step; None before the first.
        save_blocked_seconds: How long a save usually blocks training: the median of the last five, so that one slow
            save changes little. The first save, which touches fresh memory, counts only until two others are known.
            None before any was measured.
        save_durable_seconds: The time from the call of the newest durable save until it was durable; None before one.
        epochs: The number of complete epochs; None if it is not known, or the policy contains no `Epochs`.
        last_saved_epochs: How many of them were complete at the last save, or when this process began.
        failures: How many earlier starts of the run are known to have failed.
        observed_seconds: How long these starts and this process have trained together.
    """

    step: int
    last_saved_step: int | None = None
    first_step: int = 0
    seconds_since_last_save: float = 0.0
    step_seconds: float | None = None
    save_blocked_seconds: float | None = None
    save_durable_seconds: float | None = None
    epochs: int | None = None
    last_saved_epochs: int = 0
    failures: int = 0
    observed_seconds: float = 0.0

    @property
    def saved_from_step(self) -> int:
        """The step up to which training is safe: the last one saved, or else the first of this process."""
        if self.last_saved_step is None or self.last_saved_step > self.step:
            return self.first_step
        return self.last_saved_step


class SaveDecision(msgspec.Struct, frozen=True):
    """A decision whether to save now, with the reason."""

    save: bool
    reason: str


@runtime_checkable
class SavePolicy(Protocol):
    """Interface of policies that decide between two steps whether to save."""

    def decide_save(self, moment: SaveMoment) -> SaveDecision:
        """**Pure.** Returns whether to save at this moment, and why."""
        ...


class _Deciding(SavePolicy, Protocol):
    def _decide(self, moment: SaveMoment) -> SaveDecision: ...


class _SavePolicy:
    """A policy of holdfast's own. Each class declares `by_step` and `rhythm`: one without them cannot be defined."""

    __slots__ = ()
    __struct_fields__: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        if not {"by_step", "rhythm"} <= vars(cls).keys():
            raise TypeError(f"{cls.__name__} must declare by_step and rhythm")

    def decide_save(self: _Deciding, moment: SaveMoment) -> SaveDecision:
        """**Pure.** Returns whether to save at this moment, and why; never twice at the same step."""
        if moment.step == moment.saved_from_step:
            return SaveDecision(False, f"nothing has been trained since step {moment.step}")
        return self._decide(moment)

    def __or__(self: SavePolicy, other: SavePolicy) -> AnySave:
        return AnySave((self, other))

    def __ror__(self: SavePolicy, other: SavePolicy) -> AnySave:
        return AnySave((other, self))

    def __repr__(self) -> str:
        # As it is written, where what is given has no name.
        return f"{type(self).__name__}({', '.join(repr(getattr(self, name)) for name in self.__struct_fields__)})"


class AnySave(_SavePolicy, msgspec.Struct, frozen=True):
    """Saves when any of its policies says so; created by `|`."""

    policies: tuple[SavePolicy, ...]

    @property
    def by_step(self) -> bool:
        """True if it depends on step numbers only, so that all workers decide the same."""
        return all(map(is_by_step, self.policies))

    @property
    def rhythm(self) -> str:
        """How often it saves, in words; empty if that is not known of a policy."""
        parts = [describe_rhythm(policy) for policy in self.policies]
        return " or ".join(parts) if all(parts) else ""

    @short_traceback
    def __post_init__(self) -> None:
        flat: list[SavePolicy] = []
        for policy in self.policies:
            if not isinstance(policy, SavePolicy):
                raise UsageError(
                    f"{policy!r} is not a save policy",
                    hint="Combine save policies (Steps, Seconds, Epochs, Auto) with each other, "
                    "and retention policies (Latest, LastGood, EveryN, EveryHours, Best, Newer, All) with each other.",
                )
            flat.extend(policy.policies if isinstance(policy, AnySave) else (policy,))
        msgspec.structs.force_setattr(self, "policies", tuple(flat))

    def _decide(self, moment: SaveMoment) -> SaveDecision:
        decisions = [policy.decide_save(moment) for policy in self.policies]
        yes = [decision.reason for decision in decisions if decision.save]
        if yes:
            return SaveDecision(True, "; ".join(yes))
        return SaveDecision(False, "; ".join(decision.reason for decision in decisions))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


class Steps(_SavePolicy, msgspec.Struct, frozen=True):
    """Saves every `n` steps: when a multiple of `n` complete steps was reached since the last save."""

    by_step: ClassVar = True

    n: int

    @short_traceback
    def __post_init__(self) -> None:
        check_whole("Steps(n)", self.n, 1)

    @property
    def rhythm(self) -> str:
        """How often it saves, in words."""
        return f"every {self.n} steps" if self.n > 1 else "every step"

    def _decide(self, moment: SaveMoment) -> SaveDecision:
        multiple = moment.step // self.n * self.n
        if multiple > moment.saved_from_step:
            return SaveDecision(True, f"{multiple} steps are a multiple of {self.n}")
        return SaveDecision(False, f"the next multiple of {self.n} steps is {multiple + self.n}")


class Epochs(_SavePolicy, msgspec.Struct, frozen=True):
    """Saves with the last step of every `n`-th epoch.

    Epochs are those of the framework that trains. In your own loop they are those of `run.epochs`, or of the first
    saved loader or sampler of holdfast.
    """

    by_step: ClassVar = True

    n: int = 1

    @short_traceback
    def __post_init__(self) -> None:
        check_whole("Epochs(n)", self.n, 1)

    @property
    def rhythm(self) -> str:
        """How often it saves, in words."""
        return f"every {self.n} epochs" if self.n > 1 else "every epoch"

    def _decide(self, moment: SaveMoment) -> SaveDecision:
        if moment.epochs is None:
            raise UsageError(
                f"{self!r} saves at the end of an epoch, and no saved object counts epochs: is the data loader saved?",
                hint="Take the batches from run.batches(loader), or pass loader=loader, a ResumableDataLoader; "
                'or save by steps or by time: save_every=500, or save_every="10min".',
            )
        multiple = moment.epochs // self.n * self.n
        if multiple > moment.last_saved_epochs:
            return SaveDecision(True, f"epoch {multiple} has ended")
        return SaveDecision(False, f"the next save is at the end of epoch {multiple + self.n}")


class Seconds(_SavePolicy, msgspec.Struct, frozen=True):
    """Saves when that many seconds have passed since the last save."""

    by_step: ClassVar = False

    seconds: float

    @short_traceback
    def __post_init__(self) -> None:
        check_seconds("Seconds(seconds)", self.seconds)

    @property
    def rhythm(self) -> str:
        """How often it saves, in words."""
        return f"every {span_text(self.seconds)}"

    def _decide(self, moment: SaveMoment) -> SaveDecision:
        passed = moment.seconds_since_last_save
        sentence = f"{passed:.3g} of {self.seconds:.6g} s have passed since the last save"
        return SaveDecision(passed >= self.seconds, sentence)


class ChosenInterval(msgspec.Struct, frozen=True):
    """The interval that `Auto` chose.

    Attributes:
        seconds: The time from one save to the next.
        steps: About how many steps that is; None before a step was measured.
        bound: What determined it: `optimum` (Young and Daly), `overhead`, `durable`, or `unmeasured`.
    """

    seconds: float
    steps: int | None
    bound: Bound


class Auto(_SavePolicy, msgspec.Struct, frozen=True):
    """Saves as often as is worthwhile, by the measured cost of a save and the mean time between failures.

    The interval is that of Young and Daly: it minimizes the sum of the time spent on saves and the work that failures
    are expected to undo. How often the run fails is learned from its own earlier starts, as its journal on a local disk
    has them; a start that ended with a save after a notice is not a failure. Until one is known, a failure every six
    hours is assumed, and saves block training for at most 1 % of the time. The interval is lengthened if a save would
    begin before the previous one is durable.

    Pass `mtbf_seconds` to set how often the run fails, and `overhead` to bound the share of the time for which saves
    block training. Because nothing is measured at first, the
    first save comes after a few steps. One slow save does not make saves rare: the cost is the median of the last five,
    and the first save, which touches fresh memory, counts only until two others are known.
    """

    by_step: ClassVar = False
    rhythm: ClassVar = "as often as is worthwhile (holdfast.Auto)"

    overhead: float | None = None
    mtbf_seconds: float | None = None

    @short_traceback
    def __post_init__(self) -> None:
        hint = "For example, 0.01 lets saves block training for at most one percent of the time."
        if self.overhead is not None:
            check_share("Auto(overhead)", self.overhead, hint=hint)
        if self.mtbf_seconds is not None:
            check_seconds("Auto(mtbf_seconds)", self.mtbf_seconds)

    def _decide(self, moment: SaveMoment) -> SaveDecision:
        if moment.save_blocked_seconds is None and moment.saved_from_step <= moment.first_step:
            trained = moment.step - moment.first_step
            return SaveDecision(
                trained >= PROBE_STEPS,
                f"no save has been measured yet: the first save comes after {PROBE_STEPS} steps",
            )
        due = moment.seconds_since_last_save >= self.chosen(moment).seconds
        return SaveDecision(due, self.describe(moment))

    def chosen(self, moment: SaveMoment) -> ChosenInterval:
        """**Pure.** Returns the interval that follows from the measurements so far."""
        blocked = moment.save_blocked_seconds
        cost = UNMEASURED_BLOCKED_SECONDS if blocked is None else max(blocked, 0.0)
        optimum = daly_interval_seconds(cost, self.failure_seconds(moment))
        # A share e of the time is blocked when e = cost / (interval + cost).
        affordable = 0.0 if (share := self._find_share(moment)) is None else cost * (1 / share - 1)
        durable = moment.save_durable_seconds or 0.0
        seconds = max(optimum, affordable, durable)
        bound: Bound = "optimum"
        if blocked is None:
            bound = "unmeasured"
        elif seconds > optimum:
            bound = "overhead" if seconds == affordable else "durable"
        steps = max(1, math.ceil(seconds / moment.step_seconds)) if moment.step_seconds else None
        return ChosenInterval(seconds, steps, bound)

    def failure_seconds(self, moment: SaveMoment) -> float:
        """**Pure.** Returns after how long a failure is expected."""
        if self.mtbf_seconds is not None:
            return self.mtbf_seconds
        return estimate_failure_seconds(moment.failures, moment.observed_seconds)

    def _find_share(self, moment: SaveMoment) -> float | None:
        """Returns the share of the time for which saves may block training; None if the failures alone decide."""
        if self.overhead is not None or self.mtbf_seconds is not None or not moment.failures:
            return DEFAULT_OVERHEAD if self.overhead is None else self.overhead
        return None

    def describe(self, moment: SaveMoment) -> str:
        """**Pure.** Returns what it chose and why, in one line of text."""
        chosen = self.chosen(moment)
        blocks = f"a save usually blocks for {moment.save_blocked_seconds or 0:.3g} s"
        reasons: dict[Bound, str] = {
            "unmeasured": f"no save has been measured yet; {UNMEASURED_BLOCKED_SECONDS:.3g} s is assumed",
            "optimum": f"{blocks} and a failure is expected every {self.failure_seconds(moment):.6g} s",
            "overhead": f"{blocks}, and {self._find_share(moment) or 0:.3g} of the time may be spent on that",
            "durable": f"a save takes {moment.save_durable_seconds or 0:.3g} s until it is durable",
        }
        about = f" (about {chosen.steps} steps)" if chosen.steps else ""
        return f"a save every {chosen.seconds:.3g} s{about}: {reasons[chosen.bound]}"

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return f"Auto({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


def estimate_failure_seconds(failures: int, observed_seconds: float) -> float:
    """**Pure.** Returns the mean time between failures: what was observed, with what is assumed as one observation.

    That observation counts less the more failures are known: after the first one it is a quarter of a failure, after
    ten a hundredth.

    Args:
        failures: How many failures were seen.
        observed_seconds: The time in which they came, including that since the last one.
    """
    weight = (failures + 1) ** -2
    return (weight * DEFAULT_MTBF_SECONDS + observed_seconds * (failures > 0)) / (weight + failures)


def daly_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """**Pure.** Returns the optimal time between saves: Daly's higher-order estimate, whose first term is Young's."""
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * cost_seconds) * math.sqrt(mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def is_by_step(policy: SavePolicy) -> bool:
    """**Pure.** Returns True if a policy depends on step numbers only, so that all workers decide the same.

    Your own policy can declare that with an attribute `by_step = True`.
    """
    return getattr(policy, "by_step", False) is True


def describe_rhythm(policy: SavePolicy) -> str:
    """**Pure.** Returns how often a policy saves, in words: the attribute `rhythm`; empty if it has none."""
    return str(getattr(policy, "rhythm", ""))


def learns_failures(policy: SavePolicy | None) -> bool:
    """**Pure.** Returns True if a policy contains an `Auto` that learns how often the run fails."""
    if isinstance(policy, AnySave):
        return any(map(learns_failures, policy.policies))
    return isinstance(policy, Auto) and policy.mtbf_seconds is None


def counts_epochs(policy: SavePolicy | None) -> bool:
    """**Pure.** Returns True if a policy contains `Epochs`."""
    return isinstance(policy, Epochs) or (isinstance(policy, AnySave) and any(map(counts_epochs, policy.policies)))
