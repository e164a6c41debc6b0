"""One process of the demo: runs the training script, tells of its steps, and leaves evidence of what it ended with.

    python -m demo.child SETTINGS EVIDENCE [DIRECTORY]

Settings are JSON, and without a directory nothing is saved. Standard input is a leash: when whoever holds its other
end has gone, this process goes too, and its supervisor if it has one.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from demo.reports import Begun, Evidence, Settings, StepDone
from holdfast.events import Event, encode_event

if TYPE_CHECKING:
    from demo.train import History, Trained


def main() -> None:
    """Trains to the end."""
    threading.Thread(target=_end_with_supervisor, name="leash", daemon=True).start()
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    directory = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    # Reports go where standard output was; whatever else is printed must not get between them.
    reports = os.dup(1)
    os.dup2(2, 1)

    def tell(line: bytes) -> None:
        # One call, since the training thread and those that save both tell: so short a write is never divided.
        os.write(reports, line + b"\n")

    def tell_step(history: History) -> None:
        done = StepDone(
            step=len(history.losses),
            loss=history.losses[-1].hex(),
            samples=tuple(history.samples[-1]),
            at_seconds=time.monotonic(),
        )
        tell(msgspec.json.encode(done))

    def tell_event(event: Event) -> None:
        tell(encode_event(event))

    tell(msgspec.json.encode(Begun(process=os.getpid())))
    # Not before the leash is held: importing torch takes seconds.
    from demo.train import train

    trained = train(settings, directory, tell_step, [tell_event])
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(collect_evidence(trained)))


def collect_evidence(trained: Trained) -> Evidence:
    """All that a run has ended with, in parts that can be compared one by one."""
    import numpy as np
    import torch

    model, optimizer = trained.model, trained.optimizer
    state = {
        f"{name}: {key}": _digest(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    options = {
        f"group {number}: {key}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    history = trained.history
    return {
        "weights": {name: _digest(tensor) for name, tensor in model.state_dict().items()},
        "optimizer state": state | options,
        "learning-rate schedule": {key: repr(value) for key, value in trained.scheduler.state_dict().items()},
        "random generators": {
            "Python": _digest(repr(random.getstate())),
            "NumPy": _digest(
                repr([part.tolist() if isinstance(part, np.ndarray) else part for part in _numpy_state()])
            ),
            "torch": _digest(torch.get_rng_state()),
        },
        "loss log": {f"step {step}": loss.hex() for step, loss in enumerate(history.losses, 1)},
        "sample order": {f"step {step}": repr(samples) for step, samples in enumerate(history.samples, 1)},
    }


def _numpy_state() -> tuple[Any, ...]:
    import numpy as np

    return tuple(np.random.get_state())


def _digest(value: Any) -> str:
    """The SHA-256 of a tensor, with its dtype and shape, or of a text."""
    import torch

    found = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        found.update(str(value).encode())
    return found.hexdigest()


def _end_with_supervisor() -> None:
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getsid(0):
        os.killpg(0, signal.SIGKILL)  # The loader's processes with it.
    os._exit(1)


if __name__ == "__main__":
    main()
