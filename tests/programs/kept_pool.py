"""A pool of threads that is kept until the interpreter's end, when its module's names are gone."""

from __future__ import annotations

import threading
from typing import Any

from holdfast.process import worker_pool

keeper: Any = threading
keeper.kept = [worker_pool, worker_pool.WorkerPool(2, "kept")]
