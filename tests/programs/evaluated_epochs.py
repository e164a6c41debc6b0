"""Trains epochs and evaluates after each in a block of `checkpointable`; stops itself in one of the evaluations.

Its last line has the learning rate, the weights, and what each evaluation of the whole training came to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import holdfast as hf

BATCHES = 3


def main(directory: str, order: str, epochs: str, stop_in: str) -> None:
    torch.manual_seed(0)
    samples = torch.randn(4 * BATCHES, 5)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader = hf.ResumableDataLoader(samples, batch_size=4, seed=1)
    averages: Any = torch.optim.swa_utils.AveragedModel(model)
    evaluations: dict[str, float] = {}
    with hf.resumable(
        Path(directory) / "run",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        averages=averages,
        evaluations=evaluations,
        save_every=hf.Steps(1000),
    ) as run:
        for epoch in loader.epochs(int(epochs)):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                run.finish_step()
            if order == "schedule, evaluate":
                scheduler.step()
            if order == "average, evaluate":
                averages.update_parameters(model)
            with run.checkpointable():
                if epoch == int(stop_in):
                    os.kill(os.getpid(), signal.SIGTERM)
                    # The process ends here.
                    threading.Event().wait(600)
                    raise AssertionError("the process has not ended")
                with torch.no_grad():
                    loss = float(model(samples).square().mean())
            if order != "average, evaluate":
                evaluations[str(epoch)] = loss
            if order == "evaluate, schedule":
                scheduler.step()
    print(optimizer.param_groups[0]["lr"], model.weight.tolist(), averages.module.weight.tolist(), evaluations)


main(*sys.argv[1:])
