"""What all events have, and the words in which they tell times and sizes."""

from __future__ import annotations

import re
import time

import msgspec


def _kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_kind):
    """What all events have.

    Attributes:
        at_unix_seconds: When it happened, by the wall clock.
    """

    at_unix_seconds: float = msgspec.field(default_factory=time.time)


def time_text(seconds: float) -> str:
    """**Pure.** A time as a person reads it."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def span_text(seconds: float) -> str:
    """**Pure.** A time as a person speaks of it: one unit, and no fractions."""
    for unit, unit_seconds in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_seconds or (unit == "min" and seconds >= unit_seconds):
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def size_text(size_bytes: float) -> str:
    """**Pure.** A size as a person reads it."""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # From 0.9995 of a unit on, three digits would round up to it.
        if size_bytes >= 0.9995 * unit_bytes:
            return f"{size_bytes / unit_bytes:.{0 if size_bytes >= 99.95 * unit_bytes else 1}f} {unit}"
    return f"{size_bytes:.0f} B"
