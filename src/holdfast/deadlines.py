"""The default deadlines of waits."""

from __future__ import annotations

from typing import Final

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
"""The deadline of every wait that sets none of its own."""

JOIN_SECONDS: Final = 300.0
"""How long to wait for the slowest worker: on a large job, importing a framework alone takes minutes."""

LIVENESS_SECONDS: Final = 15.0
"""How long a worker may be silent before the others continue without it."""

LEAST_SECONDS: Final = 1.0
"""The minimum duration of every wait of an exiting job, which may not be killed as soon as announced."""
