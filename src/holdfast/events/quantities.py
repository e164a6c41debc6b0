"""Times and sizes as people read them."""

from __future__ import annotations


def say_time(seconds: float) -> str:
    """**Pure.** Such as `250 ms` or `3 min 20 s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole_seconds} s"


def say_size(size_bytes: float) -> str:
    """**Pure.** Such as `1.5 GB`."""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # From 0.9995 of a unit on, three digits would round up to it.
        if size_bytes >= 0.9995 * unit_bytes:
            return f"{size_bytes / unit_bytes:.{0 if size_bytes >= 99.95 * unit_bytes else 1}f} {unit}"
    return f"{size_bytes:.0f} B"
