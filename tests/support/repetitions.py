"""How often a test repeats what it does with other moments or other examples."""

from __future__ import annotations

import os


def repeated(count: int, *, in_gate: int) -> int:
    """Gives `count` in `make crash`, and fewer in the gate, which has no time for all."""
    return count if "HOLDFAST_LONG" in os.environ else in_gate
