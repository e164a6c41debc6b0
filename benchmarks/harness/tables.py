"""How numbers are written on the page. Pure."""

from __future__ import annotations

from benchmarks.harness.summary import Spread


def show_spread(values: Spread) -> str:
    """**Pure.** The median, and after it the extremes if there are several values."""
    if values.count < 2:
        return show_number(values.median)
    return f"{show_number(values.median)} ({show_number(values.low)} to {show_number(values.high)})"


def show_number(value: float) -> str:
    """**Pure.** Three digits, and never more than three after the point."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def multiple(value: float) -> str:
    """**Pure.** So many times something."""
    return f"{value:.2f} x"


def seconds(value: float) -> str:
    """**Pure.** A short time."""
    return f"{value * 1000:.0f} ms"


def show_time(value: float) -> str:
    """**Pure.** Seconds, or milliseconds if it is shorter."""
    return (
        f"{value:.2f} s"
        if abs(value) >= 1
        else f"{value * 1e3:.0f} ms"
        if abs(value) >= 0.01
        else f"{value * 1e3:.1f} ms"
    )
