"""Memory by its address."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

MEMORY: Final = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""All memory there may be, of which only what arrays have may be touched. A slice of it takes a tenth of the time in
which a library makes a view of an array."""
