"""The work that is done for a save of very many workers, by DCP as well. `python -m benchmarks.planning --help`.

`__main__` measures holdfast's own code (`job`) and DCP's (`dcp`) in one process, and draws the figures (`page`).
"""

from __future__ import annotations

from typing import Final

ROWS: Final = 4
COLUMNS: Final = 8
"""The dimensions of each worker's part of a tensor."""
