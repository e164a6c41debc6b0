"""What the exit code of a job says that was asked to leave."""

from __future__ import annotations

from typing import Final

from holdfast.save.drain import EXIT_INTERRUPTED, EXIT_SAVE_FAILED

EXIT_RESTART: Final = 42
"""What was trained is in a committed checkpoint; the same command, started again, goes on from there."""

__all__ = ["EXIT_INTERRUPTED", "EXIT_RESTART", "EXIT_SAVE_FAILED"]
