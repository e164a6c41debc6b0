"""What the arguments of a policy must be. Pure."""

from __future__ import annotations

from typing import Any

from holdfast.errors import UsageError


def is_number(value: Any) -> bool:
    """**Pure.** Whether a value is a finite number that computing with does not overflow at once."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def check_count(what: str, count: Any) -> None:
    """**Pure.** Accepts a whole number from 1 on.

    Raises:
        UsageError: If it is anything else.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"{what}: {count!r} is not a whole number from 1 on")


def check_seconds(what: str, seconds: Any) -> None:
    """**Pure.** Accepts a length of time above zero.

    Raises:
        UsageError: If it is anything else.
    """
    if not is_number(seconds) or seconds <= 0:
        raise UsageError(f"{what}: {seconds!r} is not a number of seconds above 0")
