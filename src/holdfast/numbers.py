"""Checks of numeric arguments, and times and sizes as text. Pure.

A value of a wrong type is a `UsageError`, and a number outside of the valid range an `OutOfRangeError`.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any, Final

from holdfast.errors import OutOfRangeError, UsageError

_MOST_SECONDS: Final = 1e300
"""Computing with larger numbers could overflow."""


def check_whole(name: str, value: Any, least: int = 0, most: int | None = None, *, hint: str = "") -> int:
    """**Pure.** Returns a whole number within a range, as a plain int.

    Args:
        name: The name of the argument, for the error.
        value: The argument.
        least: The smallest valid value.
        most: The largest valid value; None for any.
        hint: What to do, for the error.

    Raises:
        OutOfRangeError: If it is not in that range.
        UsageError: If it is not a whole number.
    """
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:  # An array has `__index__`, and refuses unless it is one whole number.
        number = None
    if number is None or isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number {wanted}, got {value!r}", hint=hint) from None
    if number < least or (most is not None and number > most):
        raise OutOfRangeError(f"{name} must be a whole number {wanted}, got {number}", hint=hint)
    return number


def check_seconds(
    name: str, value: Any, *, least: float | None = None, most: float = _MOST_SECONDS, hint: str = ""
) -> float:
    """**Pure.** Returns a number of seconds within a range.

    Args:
        name: The name of the argument, for the error.
        value: The argument.
        least: The smallest valid value; None for anything above 0.
        most: The largest valid value.
        hint: What to do, for the error.

    Raises:
        OutOfRangeError: If it is not in that range, or not a number (NaN).
        UsageError: If it is neither an int nor a float.
    """
    wanted = " above 0" if least is None else "" if least == -math.inf else f" of at least {least:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number of seconds{wanted}, got {value!r}", hint=hint)
    if value > most:
        raise OutOfRangeError(f"{name} must be a number of seconds of at most {most:g}, got {value!r}", hint=hint)
    if math.isnan(value) or (value <= 0 if least is None else value < least):
        raise OutOfRangeError(f"{name} must be a number of seconds{wanted}, got {value!r}", hint=hint)
    return value


_UNITS: Final = {
    0.001: ("ms", "millisecond", "milliseconds"),
    1.0: ("s", "sec", "secs", "second", "seconds"),
    60.0: ("m", "min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
    86_400.0: ("d", "day", "days"),
}
_SECONDS: Final = {name: seconds for seconds, names in _UNITS.items() for name in names}
_PART: Final = re.compile(
    rf"(\d+(?:\.\d*)?|\.\d+)\s*({'|'.join(_SECONDS)})(?![a-z])[\s,]*|\s+", re.ASCII | re.IGNORECASE
)


def parse_time(text: str) -> float | None:
    """**Pure.** Returns the seconds of a time with units, such as "90 s", "10min" or "1h 30m"; None for other text."""
    parts = [(number, unit.lower()) for number, unit in _PART.findall(text) if unit]
    if not parts or _PART.sub("", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def span_text(seconds: float) -> str:
    """**Pure.** Returns a time in one unit, without fractions."""
    for unit, unit_seconds in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_seconds or (unit == "min" and seconds >= unit_seconds):
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def read_time(name: str, value: Any, *, least: float | None = None) -> float:
    """**Pure.** Returns the seconds of an argument: a number of seconds, or text such as "30s".

    Raises:
        OutOfRangeError: If it is not in the range of `check_seconds`.
        UsageError: If it is neither a number nor a time.
    """
    seconds = parse_time(value) if isinstance(value, str) else value
    if seconds is None:
        raise UsageError(
            f'{name} must be a number of seconds such as 600, or a time such as "10min", got {value!r}',
            hint='Write the unit: "30s", "10min", "1h30m" or "2 days".',
        )
    return check_seconds(name, seconds, least=least)


def check_share(name: str, value: Any, *, hint: str = "") -> float:
    """**Pure.** Returns a number between 0 and 1, exclusive.

    Raises:
        OutOfRangeError: If it is not between 0 and 1.
        UsageError: If it is neither an int nor a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} must be a number between 0 and 1, got {value!r}", hint=hint)
    if not 0 < value < 1:
        raise OutOfRangeError(f"{name} must be a number between 0 and 1, got {value!r}", hint=hint)
    return value


def time_text(seconds: float) -> str:
    """**Pure.** Returns a time in words."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {whole_seconds} s"


def size_text(size_bytes: float) -> str:
    """**Pure.** Returns a size in words."""
    for unit, unit_bytes in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= 0.9995 * unit_bytes:  # From there on three digits would round up to it.
            return f"{size_bytes / unit_bytes:.{0 if size_bytes >= 99.95 * unit_bytes else 1}f} {unit}"
    return f"{size_bytes:.0f} B"
