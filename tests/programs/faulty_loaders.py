"""Runs whose data or state are not restored as they were, each killed and started again in a process of its own.

Arguments: DIRECTORY CASE... Prints, for each case, the lines that the restart says about the steps that it repeats.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf
from holdfast.events import Event, WitnessAgreed, WitnessDiffers

SAMPLES = TensorDataset(torch.randn(48, 3, generator=torch.Generator().manual_seed(1)))
HIDDEN = random.Random(5)
"""What decides an order, out of reach of the loader that is saved."""


class Order(Sampler[int]):
    """An order for each epoch, from what nothing restores if `is_hidden`."""

    def __init__(self, *, is_hidden: bool) -> None:
        self.generator = random.Random(5)
        self.is_hidden = is_hidden

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(48))
        (HIDDEN if self.is_hidden else self.generator).shuffle(numbers)
        return iter(numbers)


class OwnState(DataLoader[Any]):
    """A loader with a state of its own, and a fault in restoring it."""

    def __init__(self, fault: str) -> None:
        super().__init__(SAMPLES, 4)
        self.fault, self.count, self.begin = fault, [0, 0], (0, 0)

    def __iter__(self) -> Any:
        self.count = list(self.begin)
        self.begin = (self.count[0] + 1, 0)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(self.count[0])).tolist()
        kept: list[int] = []
        for number, one in enumerate(order):
            # A buffer of twelve samples, of which four leave as soon as it is full.
            kept.append(one)
            if len(kept) == 12 and number // 4 >= self.count[1]:
                self.count[1] += 1
                yield SAMPLES[[kept.pop(0) for _ in range(4)]]

    def state_dict(self) -> dict[str, Any]:
        return {"count": list(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        epoch, taken = state["count"]
        self.begin = {"order of the first epoch": (0, taken), "position ignored": (epoch, 0)}.get(
            self.fault, (epoch, taken)
        )


def train(directory: str, case: str, *, kill_at: int) -> None:
    torch.manual_seed(1)
    is_restart = kill_at < 0
    model, criterion = nn.Linear(3, 1), nn.Linear(1, 1)
    optimizer: Any = torch.optim.Adam([*model.parameters(), *criterion.parameters()], 0.1)
    if case in ("order of the first epoch", "position ignored", "buffer"):
        loader: Any = OwnState(case)
    elif case in ("hidden generator", "own generator"):
        loader = StatefulDataLoader(SAMPLES, 4, sampler=Order(is_hidden=case == "hidden generator"))
    else:
        loader = StatefulDataLoader(SAMPLES, 4, shuffle=True)
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "rng": hf.RNG()}
    if case != "criterion":
        objects["criterion"] = criterion
    if case == "batches by hand":
        del objects["loader"]
    early = iter(loader) if case == "begun before" else None

    def say(event: Event) -> None:
        if isinstance(event, WitnessAgreed | WitnessDiffers):
            print(f"{case}: {type(event).__name__} {event}", flush=True)

    with hf.resumable(directory, **objects, save_every=hf.Steps(7), sinks=[say], quiet=True) as run:
        if case == "moments" and is_restart:
            states = [optimizer.state[one] for one in model.parameters()]
            for one in states:
                one["exp_avg"] = torch.flip(one["exp_avg"], [-1]) + 0.1
        batches = early
        while run.step < 40:
            batches = batches or iter(loader)
            for (batch,) in batches:
                if run.step == kill_at:
                    run.manager.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = criterion(model(batch)).square().mean()
                loss.backward()
                if case == "accumulation" and is_restart and run.step == 17 and not objects.get("held"):
                    objects["held"] = True
                    continue
                optimizer.step()
                optimizer.zero_grad()
                run.report(loss=loss.detach())
                run.finish_step()
                if run.step >= 40:
                    break
            batches = None


def start(directory: str, case: str, kill_at: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            train(directory, case, kill_at=kill_at)
        except BaseException as error:
            print(f"{case}: {error!r}", flush=True)
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])  # Imports 800 modules, here once for all.
    for number, case in enumerate(sys.argv[2:]):
        place = str(Path(sys.argv[1]) / str(number))
        assert start(place, case, 19) == -signal.SIGKILL
        print(f"{case}: exit {start(place, case, -1)}", flush=True)
