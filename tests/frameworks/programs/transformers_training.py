"""Trains a small model with the Trainer of Hugging Face, and tells all that there is to tell of each step."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from telling import ask_to_leave, digest, digest_generators, tell
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import holdfast as hf


class Samples(Dataset[Any]):
    """Samples that are augmented with all three generators."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = random.random() + 0.1 * np.random.rand()
        return {"x": torch.randn(4) + noise + 0.01 * index, "labels": torch.tensor(float(index))}


class Stream(IterableDataset[Any]):
    """Samples in a row; it tells nothing of its place."""

    def __iter__(self) -> Any:
        return (Samples()[index] for index in range(53))

    def __len__(self) -> int:
        return 53


class Unsized(IterableDataset[Any]):
    """Samples in a row; it does not say how many."""

    def __iter__(self) -> Any:
        return iter(Stream())


class Model(torch.nn.Module):
    """Two layers, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the Trainer expects it."""
        found = self.layers(x)[:, 0]
        self.seen = labels.tolist() if self.training else self.seen
        return {"loss": 0.01 * (found - labels).pow(2).mean(), "logits": found}


class ShardingTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """One whose accelerator shards the model; on processors alone it heeds no plugin."""

    def create_accelerator_and_postprocess(self) -> None:
        """Sets what accelerate sets on GPUs."""
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        self.is_fsdp_enabled = True


class Teller(TrainerCallback):  # type: ignore[misc]
    """Writes a line for each step and for each log."""

    def __init__(self, stopping: EarlyStoppingCallback, leaves_in: int, leaves_after: int) -> None:
        self.stopping, self.leaves_in, self.leaves_after = stopping, leaves_in, leaves_after
        self.trainer: Any = None
        self.evaluated = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Tells of the state."""
        model, optimizer, scheduler = named["model"], named["optimizer"], named["lr_scheduler"]
        momenta = [value for each in optimizer.state.values() for value in each.values()]
        tell(
            step=state.global_step,
            epoch=state.epoch,
            worker=args.process_index,
            seen=model.seen,
            state=digest(*model.state_dict().values()),
            optimizer=digest(*momenta, *(group["lr"] for group in optimizer.param_groups)),
            scheduler=digest(scheduler.last_epoch, scheduler.get_last_lr()),
            generators=digest_generators(),
            patience=self.stopping.early_stopping_patience_counter,
            best=state.best_metric,
            logged=len(state.log_history),
        )
        if state.global_step == self.leaves_after:
            self.leave(args)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks the job to leave, in the first batch of the evaluation after so many steps."""
        self.evaluated += 1
        sys.stderr.write(f"evaluated {state.global_step}/{self.evaluated}\n")
        if state.global_step == self.leaves_in and self.evaluated == 1:
            self.leave(args)

    def leave(self, args: Any) -> None:
        """Asks the job to leave."""
        run = next(each.run for each in self.trainer.callback_handler.callbacks if hasattr(each, "run"))
        ask_to_leave(run, gets_signal=args.process_index == args.world_size - 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts anew."""
        self.evaluated = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Tells of what was logged, without times."""
        kept = {name: value for name, value in logs.items() if "runtime" not in name and "per_second" not in name}
        tell(log=state.global_step, worker=args.process_index, **kept)


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--evaluate", default="epoch")
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--unsized-steps", type=int, default=-1)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--own-saves", type=int, default=0)
    parser.add_argument("--ignore-data-skip", action="store_true")
    parser.add_argument("--leaves-in", type=int, default=-1)
    parser.add_argument("--leaves-after", type=int, default=-1)
    given = parser.parse_args()
    if "RANK" in os.environ:
        hf.init_process_group("gloo")
    # What the program draws besides the Trainer is to be the same in each life.
    random.seed(1)
    stopping = EarlyStoppingCallback(given.patience)
    arguments = TrainingArguments(
        str(given.directory / "out"),
        num_train_epochs=given.epochs,
        max_steps=given.unsized_steps,
        per_device_train_batch_size=4,
        save_strategy="steps" if given.own_saves else "no",
        save_steps=given.own_saves or 500,
        save_total_limit=2,
        ignore_data_skip=given.ignore_data_skip,
        eval_strategy=given.evaluate,
        eval_steps=5,
        logging_steps=5,
        report_to=[],
        dataloader_num_workers=given.workers,
        gradient_accumulation_steps=given.accumulate,
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        learning_rate=0.01,
        metric_for_best_model="eval_loss",
        load_best_model_at_end=False,
        include_num_input_tokens_seen="no",
        ddp_find_unused_parameters=False,
    )
    stopping.on_train_begin = lambda *_, **__: None
    torch.manual_seed(1)
    resumable = hf.transformers.Resumable(given.directory, save_every=hf.Steps(4))
    teller = Teller(stopping, given.leaves_in, given.leaves_after)
    trainer = (ShardingTrainer if given.fsdp else Trainer)(
        Model(),
        arguments,
        train_dataset=Unsized() if given.unsized_steps > 0 else Stream() if given.stream else Samples(),
        eval_dataset=Samples(),
        callbacks=[stopping, teller, resumable],
    )
    teller.trainer = trainer
    result = trainer.train()
    tell(
        ended=result.global_step, worker=arguments.process_index, loss=result.training_loss, drawn=torch.rand(1).item()
    )
    if given.again:
        trainer.train()
        tell(again=trainer.state.global_step)


if __name__ == "__main__":
    main()
