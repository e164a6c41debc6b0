"""Policies that decide which checkpoints to keep. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds, check_whole
from holdfast.tracebacks import short_traceback

Key = TypeVar("Key", bound=Hashable)


class KeptCandidate(msgspec.Struct, Generic[Key], frozen=True):
    """A committed checkpoint, as retention policies see it.

    Attributes:
        key: Its identity: its step, or its step and generation.
        step: Its step.
        committed_at_seconds: When it was committed, in seconds since 1970.
        metrics: The metrics that the user reported at that step.
        is_finite: False if parameters or optimizer states are known to have nan or an infinity.
    """

    key: Key
    step: int
    committed_at_seconds: float
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    is_finite: bool = True


@runtime_checkable
class RetentionPolicy(Protocol):
    """Interface of policies that choose which checkpoints to keep."""

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the checkpoints to keep, each with the reason.

        Args:
            committed: All committed checkpoints, the newest last.
            now_seconds: Seconds since 1970.
        """
        ...


class _RetentionPolicy:
    __slots__ = ()
    __struct_fields__: ClassVar[tuple[str, ...]]

    def __or__(self: RetentionPolicy, other: RetentionPolicy) -> AnyKeeps:
        return AnyKeeps((self, other))

    def __ror__(self: RetentionPolicy, other: RetentionPolicy) -> AnyKeeps:
        return AnyKeeps((other, self))

    def __repr__(self) -> str:
        # As it is written, where what is given has no name.
        return f"{type(self).__name__}({', '.join(repr(getattr(self, name)) for name in self.__struct_fields__)})"


class AnyKeeps(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps every checkpoint that any of its policies keeps; created by `|`."""

    policies: tuple[RetentionPolicy, ...]

    @short_traceback
    def __post_init__(self) -> None:
        flat: list[RetentionPolicy] = []
        for policy in self.policies:
            if not isinstance(policy, RetentionPolicy):
                raise UsageError(
                    f"{policy!r} is not a retention policy",
                    hint="Combine retention policies (Latest, LastGood, EveryN, EveryHours, Best, Newer, All) with "
                    "each other, and save policies (Steps, Seconds, Epochs, Auto) with each other.",
                )
            flat.extend(policy.policies if isinstance(policy, AnyKeeps) else (policy,))
        msgspec.structs.force_setattr(self, "policies", tuple(flat))

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the union of what its policies keep, with all their reasons."""
        joined: dict[Key, str] = {}
        for policy in self.policies:
            kept = policy.choose_kept(committed, now_seconds)
            joined |= {key: f"{joined[key]}; {why}" if key in joined else why for key, why in kept.items()}
        return joined

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


class Latest(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps the `n` newest checkpoints."""

    n: int

    @short_traceback
    def __post_init__(self) -> None:
        check_whole("Latest(n)", self.n, 1)

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the `n` newest."""
        return dict.fromkeys([candidate.key for candidate in committed[-self.n :]], f"among the {self.n} latest")


class EveryN(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps the steps that are multiples of `n`."""

    n: int

    @short_traceback
    def __post_init__(self) -> None:
        check_whole("EveryN(n)", self.n, 1)

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the steps that are multiples of `n`."""
        return dict.fromkeys([one.key for one in committed if one.step % self.n == 0], f"a multiple of {self.n}")


class Best(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps the `n` checkpoints with the best value of a metric.

    A checkpoint without the metric, or with NaN for it, is not considered. Of equal values the newer wins.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    @short_traceback
    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"Best({self.metric!r}): the metric must be named")
        if self.mode not in ("min", "max"):
            raise UsageError(f"Best(mode={self.mode!r}): the mode must be 'min' or 'max'")
        check_whole("Best(n)", self.n, 1)

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the `n` with the best value."""
        sign = 1.0 if self.mode == "min" else -1.0
        running = [
            (sign * candidate.metrics[self.metric], -place, candidate)
            for place, candidate in enumerate(committed)
            if not math.isnan(candidate.metrics.get(self.metric, math.nan))
        ]
        running.sort(key=lambda entry: entry[:2])
        return {
            candidate.key: f"{self.metric} = {candidate.metrics[self.metric]:.6g} is {self._place(place)}"
            for place, (_, _, candidate) in enumerate(running[: self.n])
        }

    def _place(self, place: int) -> str:
        return f"the {self.mode}imum" if place == 0 else f"among the {self.n} best"

    def __repr__(self) -> str:
        mode = f", mode={self.mode!r}" if self.mode != "min" else ""
        count = f", n={self.n}" if self.n != 1 else ""
        return f"Best({self.metric!r}{mode}{count})"


class LastGood(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps the `n` newest checkpoints whose parameters and optimizer states are finite.

    With `where`, their metrics must satisfy that too: `LastGood(2, where=lambda metrics: metrics["loss"] < 10)`. A
    checkpoint that lacks such a metric is not good.
    """

    n: int = 1
    where: Callable[[Mapping[str, float]], object] | None = None

    @short_traceback
    def __post_init__(self) -> None:
        check_whole("LastGood(n)", self.n, 1)
        if self.where is not None and not callable(self.where):
            raise UsageError(
                f"LastGood(where={self.where!r}): where must be a function of the metrics",
                hint='For example, where=lambda metrics: metrics["loss"] < 10.',
            )

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns the `n` newest that are good."""
        good = [candidate.key for candidate in committed if is_good(self, candidate)]
        return dict.fromkeys(good[-self.n :], f"among the {self.n} latest good ones")


def is_good(policy: LastGood, candidate: KeptCandidate[Key]) -> bool:
    """**Pure.** Returns True if a checkpoint is finite, and its metrics are as the policy wants them."""
    try:
        return candidate.is_finite and (policy.where is None or bool(policy.where(candidate.metrics)))
    except KeyError:
        return False


class Newer(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps checkpoints that were committed less than that many seconds ago, or have a commit time in the future."""

    seconds: float

    @short_traceback
    def __post_init__(self) -> None:
        check_seconds("Newer(seconds)", self.seconds)

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns those that were committed less than that many seconds ago."""
        # A clock that went back makes an age negative: what cannot be shown to be old is kept.
        return {
            candidate.key: f"newer than {self.seconds:.6g} s"
            for candidate in committed
            if not now_seconds - candidate.committed_at_seconds > self.seconds
        }


class EveryHours(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps the oldest checkpoint, and then one for each `hours` that have passed since the last one kept so."""

    hours: float

    @short_traceback
    def __post_init__(self) -> None:
        check_seconds("EveryHours(hours)", self.hours)

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns one for each `hours`; the same ones again once the others are removed."""
        kept: dict[Key, str] = {}
        last = -math.inf
        for candidate in committed:
            # After a clock that went back, time counts from there.
            if abs(candidate.committed_at_seconds - last) >= self.hours * 3600:
                kept[candidate.key], last = f"one for each {self.hours:.6g} h", candidate.committed_at_seconds
        return kept


class All(_RetentionPolicy, msgspec.Struct, frozen=True):
    """Keeps every checkpoint."""

    def choose_kept(self, committed: Sequence[KeptCandidate[Key]], now_seconds: float) -> dict[Key, str]:
        """**Pure.** Returns all of them."""
        return dict.fromkeys([candidate.key for candidate in committed], "every step is kept")


class Referrer(msgspec.Struct, Generic[Key], frozen=True):
    """A checkpoint that stores some of its bytes in others.

    Attributes:
        key: Its identity; it need not be one of those to choose from.
        step: Its step.
        refers_to: Those others.
    """

    key: Key
    step: int
    refers_to: tuple[Key, ...]


def spare_referred(going: Collection[Key], referrers: Sequence[Referrer[Key]]) -> dict[Key, str]:
    """**Pure.** Returns which of those to remove must stay because a kept one refers to them, with the reason.

    A checkpoint that stays for that reason stays whole, and so does everything that it refers to itself. `referrers`
    are all checkpoints that refer to others, including those to remove.
    """
    leaving = set(going)
    reasons: dict[Key, list[int]] = {}
    by_key = {referrer.key: referrer for referrer in referrers}
    staying = [referrer for referrer in referrers if referrer.key not in leaving]
    while staying:
        referrer = staying.pop()
        for key in referrer.refers_to:
            if key in leaving:
                leaving.remove(key)
                reasons[key] = []
                staying += [by_key[key]] if key in by_key else []
            if key in reasons:
                reasons[key].append(referrer.step)
    return {key: _name_referrers(reasons[key]) for key in going if key in reasons}


def _name_referrers(steps: list[int]) -> str:
    others = len(steps) - 1
    if others == 0:
        return f"step {steps[0]} refers to it"
    return f"step {max(steps)} and {others} more refer to it"


class RetentionPlan(msgspec.Struct, Generic[Key], frozen=True):
    """The checkpoints to keep, each with the reason, and those to remove; both oldest first."""

    keep: dict[Key, str]
    remove: tuple[Key, ...]


def plan_retention(
    policy: RetentionPolicy,
    committed: Sequence[KeptCandidate[Key]],
    protected: Mapping[Key, str],
    now_seconds: float,
    referrers: Sequence[Referrer[Key]] = (),
    replaced: Collection[Key] = (),
) -> RetentionPlan[Key]:
    """**Pure.** Returns what to remove, so that no policy can lose the job.

    The newest checkpoint, the newest that is finite and the `protected` ones always stay, and so does everything that a
    kept checkpoint refers to.

    Args:
        policy: The user's policy.
        committed: All whole checkpoints, the newest last, no two with the same key.
        protected: Further keys that must stay, such as the one restored from, each with the reason.
        now_seconds: Seconds since 1970.
        referrers: All checkpoints that refer to others, including those that stay in any case.
        replaced: Further keys to remove, unless they are protected, or a kept checkpoint refers to them.
    """
    keys = [candidate.key for candidate in committed]
    if len(set(keys)) != len(keys):
        raise UsageError("two of the checkpoints have the same key")
    reasons = dict(policy.choose_kept(committed, now_seconds))
    always_kept = [protected, dict.fromkeys(keys[-1:], "the newest")]
    if committed and not committed[-1].is_finite:
        finite = [candidate.key for candidate in committed if candidate.is_finite]
        always_kept.append(dict.fromkeys(finite[-1:], "the newest that is finite"))
    for always in always_kept:
        reasons |= {key: f"{why}; {reasons[key]}" if key in reasons else why for key, why in always.items()}
    going = [*(key for key in keys if key not in reasons), *(key for key in replaced if key not in protected)]
    if going and (spared := spare_referred(going, referrers)):
        reasons |= spared
        keys += replaced
        going = [key for key in going if key not in spared]
    return RetentionPlan({key: reasons[key] for key in keys if key in reasons}, tuple(going))


def count_kept(policy: RetentionPolicy) -> int:
    """**Pure.** Returns how many checkpoints a policy keeps at a time, as far as it has a limit."""
    if isinstance(policy, AnyKeeps):
        return sum(map(count_kept, policy.policies))
    return policy.n if isinstance(policy, Latest | Best | LastGood) else 0


def find_good(policy: RetentionPolicy, committed: Sequence[KeptCandidate[Key]]) -> list[Key]:
    """**Pure.** Returns the checkpoints that are finite, and good for each `LastGood` of a policy; the newest last."""
    parts = policy.policies if isinstance(policy, AnyKeeps) else (policy,)
    wanted = [part for part in parts if isinstance(part, LastGood)] or [LastGood()]
    return [candidate.key for candidate in committed if all(is_good(part, candidate) for part in wanted)]


def absent_metrics(policy: RetentionPolicy, committed: Sequence[KeptCandidate[Key]]) -> tuple[str, ...]:
    """**Pure.** Returns the metrics of a `Best` that no checkpoint has: perhaps misspelled, or never reported."""
    if isinstance(policy, AnyKeeps):
        return tuple(metric for part in policy.policies for metric in absent_metrics(part, committed))
    if not isinstance(policy, Best) or any(policy.metric in candidate.metrics for candidate in committed):
        return ()
    return (policy.metric,)


def find_modes(policy: RetentionPolicy) -> dict[str, Literal["min", "max"]]:
    """**Pure.** Returns the mode of each `Best` in a policy, by its metric."""
    if isinstance(policy, AnyKeeps):
        return {metric: mode for part in policy.policies for metric, mode in find_modes(part).items()}
    return {policy.metric: policy.mode} if isinstance(policy, Best) else {}
