"""Figures, times and foreign text as a person reads them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

import click

_UNITS: Final = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_ROUGH_UNITS: Final = ((86400, 2 * 86400, "days"), (3600, 3600, "h"), (60, 120, "min"), (1, 0.0995, "s"))
_AGES: Final = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))


def legible(text: str) -> str:
    """**Pure.** Text with everything escaped that a terminal might obey rather than show.

    Names and notes in a checkpoint are whatever its writer put there: escape sequences that move the cursor, marks
    that turn the direction of writing, ends of line, bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def shortened(text: str, limit: int) -> str:
    """**Pure.** Text of at most so many characters; what was cut is an ellipsis."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def size_text(size_bytes: float) -> str:
    """**Pure.** A size such as `1.2 GB`, in powers of a thousand."""
    for unit, unit_bytes in _UNITS:
        # From 0.9995 of a unit on, three digits would round up to it.
        if size_bytes >= 0.9995 * unit_bytes:
            return f"{size_bytes / unit_bytes:.{0 if size_bytes >= 99.95 * unit_bytes else 1}f} {unit}"
    return f"{size_bytes:.0f} B"


def duration_text(seconds: float) -> str:
    """**Pure.** A duration such as `3.2 s` or `5 min 7 s`."""
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def rough_text(seconds: float) -> str:
    """**Pure.** A duration to three digits, such as `2.1 ms`, `0.83 s` or `14.2 min`."""
    for unit_seconds, least_seconds, unit in _ROUGH_UNITS:
        if seconds >= least_seconds:
            return f"{seconds / unit_seconds:.3g} {unit}"
    return f"{seconds * 1000:.2g} ms"


def age_text(age_seconds: float) -> str:
    """**Pure.** How long ago something was, such as `3 min ago`."""
    if age_seconds < -60:
        return "in the future"
    for unit_seconds, unit in _AGES:
        # Twice the unit, so that what is said is never off by more than a third.
        if age_seconds >= 2 * unit_seconds:
            return f"{age_seconds // unit_seconds:.0f} {unit} ago"
    return "just now"


def local_time_text(unix_seconds: float) -> str:
    """A time on this machine's calendar, such as `2031-04-05 06:07:08`; `?` if no calendar has it."""
    moment = _moment(unix_seconds)
    return "?" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso_text(unix_seconds: float) -> str | None:
    """**Pure.** A time in ISO 8601, UTC, to the millisecond; None if no calendar has it."""
    moment = _moment(unix_seconds)
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(unix_seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(unix_seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def figure_text(figure: float) -> str:
    """**Pure.** A metric, to six digits."""
    return f"{figure:.6g}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """**Pure.** A count with its noun, such as `1 step` or `3 steps`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


_NUMBER: Final = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE = re.compile(_NUMBER + r"\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"\s*(ms|s|min|h|d)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_BYTES: Final = 10**18
_MIN_SECONDS: Final = 1e-6
_MAX_SECONDS: Final = 1e10


def parse_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """**Pure.** The bytes that `1.5GB`, `2GiB` or plain `4096` stands for; for an option that may be left out."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write one as 500MB, 1.5GB or 2GiB.", ctx, param)
    power = 1024.0 if match[3] else 1000.0
    size_bytes = float(match[1]) * power ** _POWERS[match[2].lower()]
    if not 1 <= size_bytes <= _MAX_BYTES:
        raise click.BadParameter(f"{text!r} is not between 1 byte and {_MAX_BYTES} bytes.", ctx, param)
    return round(size_bytes)


def parse_seconds(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """**Pure.** The seconds that `350ms` or `24h` stands for; for an option that may be left out."""
    if text is None:
        return None
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time; write its unit: 350ms, 30s, 90min, 24h or 7d.", ctx, param)
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise click.BadParameter(f"{text!r} is not between a microsecond and 300 years.", ctx, param)
    return seconds
