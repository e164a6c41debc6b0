"""What programs of the tests tell of their steps, and how they ask themselves to leave."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import torch

_PATIENCE_SECONDS = 60.0


def tell(**record: object) -> None:
    """Writes one line at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def digest(*parts: object) -> str:
    """A digest of tensors and plain values."""
    content = hashlib.sha256()
    for part in parts:
        part = part.to_local() if hasattr(part, "to_local") else part
        content.update(part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return content.hexdigest()[:16]


def digest_generators() -> str:
    """A digest of the states of all three generators."""
    state: Any = np.random.get_state()
    return digest(random.getstate(), state[1].tolist(), torch.get_rng_state())


def ask_to_leave(run: Any, *, gets_signal: bool = True) -> None:
    """Sends SIGTERM to the worker that gets it, and returns when the run has heard that the job is to leave."""
    if gets_signal:
        os.kill(os.getpid(), signal.SIGTERM)
    end_at = time.monotonic() + _PATIENCE_SECONDS
    while not run.should_stop():
        assert time.monotonic() < end_at, "the notice was not heard"
        time.sleep(0.002)
