"""Where things lie in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = ROOT / "tests"
SUPPORT: Final = TESTS / "support"
"""What several tests share; each program that a test starts finds it too."""

PROGRAMS: Final = TESTS / "programs"
"""The programs that tests start."""

DATA: Final = TESTS / "data"
"""Checkpoints of each version of the format, which are never changed."""

EXAMPLES: Final = ROOT / "examples"
