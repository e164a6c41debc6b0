"""Plain values in place of policies, such as `save_every="10min"` and `keep=3`. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from holdfast.errors import OutOfRangeError, UsageError
from holdfast.numbers import check_whole, parse_time
from holdfast.policies.retention import All, Latest, Newer, RetentionPolicy
from holdfast.policies.saving import Auto, Epochs, SavePolicy, Seconds, Steps

_COUNT: Final = re.compile(r"(?:(\d[\d_]{0,17})\s*)?(step|epoch)s?", re.ASCII)
_ARGUMENTS: Final = {
    "Steps": "500",
    "Seconds": "600",
    "Latest": "3",
    "EveryN": "1000",
    "EveryHours": "6",
    "Best": '"val_loss"',
    "Newer": "86_400",
}
"""Examples, by the names of the policies."""


def read_save_every(value: Any) -> SavePolicy | None:
    """**Pure.** Returns the policy for the argument `save_every`; None for None.

    Args:
        value: A policy, a number of steps, or text: a time such as "10min", "500 steps", "1 epoch" or "auto".

    Raises:
        OutOfRangeError: If it is a number below 1, or no time at all.
        UsageError: If it is something else.
    """
    if value is None or _is_policy("save_every", value, "decide_save"):
        policy: SavePolicy | None = value
        return policy
    number, kind = _parse_rhythm(value) if isinstance(value, str) else (_find_whole(value), Steps)
    if kind is Auto:
        return Auto()
    if number is not None and number > 0:
        return kind(number)  # type: ignore[arg-type]  # A count, except for seconds.
    hint = "The policies are Steps, Seconds, Epochs and Auto."
    if isinstance(value, str) and value.strip().isdecimal():
        hint = f'Write {value.strip()} for steps, or "{value.strip()} s" for seconds.'
    raise (UsageError if number is None else OutOfRangeError)(
        "save_every must be a policy such as holdfast.Steps(500), a number of steps such as 500, or text such as "
        f'"10min" or "1 epoch", got {type(value).__name__} {value!r}',
        hint=hint,
    )


def _parse_rhythm(text: str) -> tuple[float | None, type[Steps | Epochs | Seconds | Auto]]:
    """**Pure.** Returns the number in the text and its kind of policy; None for other text."""
    text = text.strip().lower()
    if counted := _COUNT.fullmatch(text):
        return int((counted[1] or "1").replace("_", "")), Steps if counted[2] == "step" else Epochs
    return parse_time(text), Auto if text == "auto" else Seconds


def read_keep(value: Any) -> RetentionPolicy | None:
    """**Pure.** Returns the policy for the argument `keep`; None for None.

    Args:
        value: A policy, the number of newest checkpoints to keep, or text: a time such as "7 days" for all that are
            newer, or "all".

    Raises:
        OutOfRangeError: If it is a number below 1, or no time at all.
        UsageError: If it is something else.
    """
    if value is None or _is_policy("keep", value, "choose_kept"):
        policy: RetentionPolicy | None = value
        return policy
    is_text = isinstance(value, str)
    if is_text and value.strip().lower() == "all":
        return All()
    number = parse_time(value) if is_text else _find_whole(value)
    if number is not None and number > 0:
        return Newer(number) if is_text else Latest(int(number))
    raise (UsageError if number is None else OutOfRangeError)(
        "keep must be a policy such as holdfast.Latest(3), a number of checkpoints such as 3, or text such as "
        f'"7 days" or "all", got {type(value).__name__} {value!r}',
        hint="The policies are Latest, EveryN, EveryHours, Best, LastGood, Newer and All.",
    )


def _find_whole(value: Any) -> int | None:
    """**Pure.** Returns a whole number as a plain int; None for anything else."""
    try:
        return check_whole("n", value, -(1 << 63))
    except UsageError:
        return None


def _is_policy(name: str, value: Any, method: str) -> bool:
    """**Pure.** Returns True for a policy; a class of policies is a `UsageError`."""
    if isinstance(value, type) and hasattr(value, method):
        raise UsageError(
            f"{name} must be a policy, got the class {value.__name__}",
            hint=f"Write {name}=holdfast.{value.__name__}({_ARGUMENTS.get(value.__name__, '')}).",
        )
    return callable(getattr(value, method, None))
