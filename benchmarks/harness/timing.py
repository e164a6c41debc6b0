"""How long something took."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(action: Callable[[], object]) -> float:
    """**Blocks.** Does it, and gives the seconds."""
    begun_at = time.perf_counter()
    action()
    return time.perf_counter() - begun_at
