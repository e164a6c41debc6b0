"""How long things are waited for unless somebody says otherwise."""

from __future__ import annotations

from typing import Final

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
"""The deadline of every wait that names none of its own."""

JOIN_SECONDS: Final = 300.0
"""How long to wait for the slowest worker: on a large job the import of a framework alone takes minutes."""

LIVENESS_SECONDS: Final = 15.0
"""How long a worker may not be heard of before the others go on without it."""

LEAST_SECONDS: Final = 1.0
"""How long each wait of a job that has to leave lasts in any case: it may not be killed as soon as was said."""
