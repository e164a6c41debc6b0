"""One of two workers, of which the second is stopped by a signal while the first waits for it in a collective."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import holdfast as hf

dist.init_process_group("gloo")
weights = torch.zeros(4)
with hf.resumable(sys.argv[1], state={"weights": weights}, save_every=hf.Steps(1000)) as run:
    for step in run.steps(20):
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(weights)
