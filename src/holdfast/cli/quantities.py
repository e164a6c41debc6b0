"""Sizes and times as they are written on a command line. Pure."""

from __future__ import annotations

import re
from typing import Final

import click

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
