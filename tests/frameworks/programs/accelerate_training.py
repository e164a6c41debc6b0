"""Trains a small model in a loop that accelerate prepares, and tells all that there is to tell of each step."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from telling import ask_to_leave, digest, digest_generators, tell
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast as hf


class Samples(Dataset[Any]):
    """Samples that are augmented with all three generators."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4) + random.random() + 0.1 * np.random.rand() + 0.1 * index, index


class Stream(IterableDataset[Any]):
    """Samples in a row; it says how many it has given, and goes on there."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        while self.given < 52:
            self.given += 1
            yield Samples()[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes there."""
        self.given = state["given"]


class Average:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.loss = 0.0

    def state_dict(self) -> dict[str, float]:
        """Its state."""
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Puts it back."""
        self.loss = state["loss"]


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--row", choices=["last", "first"])
    parser.add_argument("--leaves-after", type=int, default=-1)
    parser.add_argument("--leaves-in", type=int, default=-1)
    given = parser.parse_args()
    if "RANK" in os.environ:
        hf.init_process_group("gloo")
    configuration = DataLoaderConfiguration(
        dispatch_batches=given.dispatch or None,
        split_batches=given.split,
        use_seedable_sampler=given.seedable,
    )
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=given.accumulate, dataloader_config=configuration
    )
    if given.fsdp:
        # On processors alone accelerate heeds no plugin.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    # Each worker has generators of its own.
    rank = accelerator.process_index
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    data = Stream() if given.stream else Samples()
    loader: Any = DataLoader(
        data, batch_size=4, shuffle=not given.stream, num_workers=given.workers, drop_last=given.drop_last
    )
    model, optimizer, scheduler, loader = accelerator.prepare(layers, optimizer, scheduler, loader)
    average = Average()
    accelerator.register_for_checkpointing(average)
    # An epoch may train on a second loader after the first one; the third one is for short evaluations.
    second, third = accelerator.prepare(DataLoader(Samples(), 8, shuffle=True), DataLoader(Samples(), 4))
    loaders = [loader, second] if given.row else [loader]
    with hf.accelerate.resumable(accelerator, given.directory, save_every=hf.Steps(3)) as run:
        for epoch in range(loaders[0 if given.row == "first" else -1].iteration, 3):
            for samples, indices in itertools.chain(*(each for each in loaders if each.iteration == epoch)):
                with accelerator.accumulate(model):
                    loss = model(samples).pow(2).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                average.loss = 0.9 * average.loss + 0.1 * loss.item()
                evaluated = [part.tolist() for _, part in itertools.islice(third, 2)] if given.row else []
                if run.step + 1 == given.leaves_after:
                    ask_to_leave(run)
                run.finish_step()
                if accelerator.sync_gradients:
                    momenta = [value for each in optimizer.optimizer.state.values() for value in each.values()]
                    tell(
                        step=run.step,
                        epoch=epoch,
                        worker=rank,
                        loss=loss.item(),
                        average=average.loss,
                        seen=indices.tolist(),
                        evaluated=evaluated,
                        rate=scheduler.get_last_lr(),
                        state=digest(*layers.parameters(), *momenta),
                        generators=digest_generators(),
                    )
            tell(epoch=epoch, worker=rank, drawn=torch.rand(1).item())
            with run.checkpointable():
                # As long as an evaluation may take.
                if epoch == given.leaves_in:
                    ask_to_leave(run)
                    threading.Event().wait()
    tell(ended=run.step, worker=rank)


if __name__ == "__main__":
    main()
