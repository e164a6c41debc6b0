"""Ordinary mistakes with the Trainer of Hugging Face and with accelerate; prints the result of each.

python transformers_cases.py DIRECTORY: a line of JSON for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer, TrainingArguments
from transformers_training import Model, Samples

import holdfast as hf
from holdfast.integrations.frameworks.transformers.progress import TrainerWorker


class DividedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """One whose accelerator has been told how to divide the job, which it heeds on several GPUs only."""

    kind = "FSDP"

    def create_accelerator_and_postprocess(self) -> None:
        """Divides the job."""
        super().create_accelerator_and_postprocess()
        divide(self.accelerator, self.kind)


class DeepSpeedTrainer(DividedTrainer):
    """One that has handed its model to DeepSpeed."""

    kind = "DEEPSPEED"


class TensorParallelTrainer(DividedTrainer):
    """One that divides the tensors of its model."""

    kind = "TENSORS"


def divide(accelerator: Any, kind: str) -> None:
    """Says of an accelerator what it says itself on several GPUs."""
    if kind == "TENSORS":
        accelerator.state.parallelism_config = accelerate.ParallelismConfig(tp_size=2)
        return
    accelerator.state.distributed_type = DistributedType[kind]
    if kind == "FSDP":
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)


def make(directory: Path, cls: Any = Trainer, model: Any = None, callback: Any = None, **options: Any) -> Any:
    """A Trainer that saves each second step."""
    given = {"max_steps": 8, "save_strategy": "no", "learning_rate": 0.1, **options}
    arguments = TrainingArguments(
        str(directory / "out"), report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=2, **given
    )
    torch.manual_seed(1)
    callback = callback or hf.transformers.Resumable(directory / "run", save_every=hf.Steps(2))
    callbacks = callback if isinstance(callback, list) else [callback]
    return cls(model or Model(), arguments, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)


def wider() -> Any:
    """A model whose layers are not those of `Model`."""
    model = Model()
    model.layers[0], model.layers[2] = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
    return model


def changed_model(directory: Path) -> None:
    """Goes on with a model that is not the one that was saved."""
    make(directory).train()
    make(directory, model=wider(), max_steps=9).train()


def other_run(directory: Path) -> None:
    """Takes the directory of a loop that no Trainer has run."""
    model = Model()
    with hf.resumable(directory / "run", model=model) as run:
        run.finish_step()
    make(directory).train()


def added_later(directory: Path) -> None:
    """Adds the callback to a Trainer that is there."""
    trainer = make(directory, callback=hf.transformers.Resumable(directory / "unused"))
    trainer.pop_callback(hf.transformers.Resumable)
    trainer.add_callback(hf.transformers.Resumable(directory / "run"))
    trainer.train()


def both_save(directory: Path) -> Any:
    """Has the Trainer save as well."""
    make(directory, save_strategy="steps", save_steps=4).train()
    return sorted(path.name for path in (directory / "out").iterdir()), sorted(
        path.name[:14] for path in (directory / "run").glob("step-*")
    )


def best_at_end(directory: Path) -> Any:
    """Has the Trainer come back to its best model; then begins the training again that has ended."""
    options = {
        **{"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 8},
        # The highest loss is the best here, which is that of an early step on every machine.
        **{"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True},
    }
    trainer = make(directory, **options)
    trainer.train()
    best = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    kept = Model()
    with hf.CheckpointManager(directory / "run", hf.Checkpoint(model=kept)) as manager:
        manager.restore(only="model")
    last = torch.cat([each.detach().flatten() for each in kept.parameters()])
    again = make(directory, **options)
    again.train()
    found = torch.cat([each.detach().flatten() for each in again.model.parameters()])
    return {
        "best step": trainer.state.best_global_step,
        "the checkpoint is of the last step": not last.equal(best),
        "begun again it comes back to the best": found.equal(best),
    }


class Figure:
    """A metric that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def tolist(self) -> float:
        """Its number."""
        self.reads += 1
        return 0.5


def long_log(directory: Path) -> Any:
    """Has the state read at three saves, while the log grows, and puts it into another Trainer."""
    trainer, again = make(directory), make(directory)
    figures = [Figure() for _ in range(300)]
    worker = TrainerWorker(trainer)
    for end in (100, 200, 300):
        trainer.state.log_history.extend({"loss": each, "step": end} for each in figures[end - 100 : end])
        state = worker.state_dict()
    other = TrainerWorker(again)
    again._total_loss_scalar = 0.0  # As its loop begins.
    other.load_state_dict(state)
    other.apply()
    own = other.state_dict()["log"]
    return {
        "reads": sorted({each.reads for each in figures}),
        "restored": [each["step"] for each in again.state.log_history[99:202:51]],
        "the same": bool(own.tobytes() == state["log"].tobytes()),
    }


def divided_loop(directory: Path, kind: str) -> None:
    """Enters a run with an accelerator that has divided the job."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    divide(accelerator, kind)
    hf.accelerate.resumable(accelerator, directory, average=model)


def prepared_nothing(directory: Path) -> None:
    """Enters a run too early."""
    hf.accelerate.resumable(accelerate.Accelerator(cpu=True), directory)


def prepared_name(directory: Path) -> None:
    """Gives an object by the name of one that is kept already."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    hf.accelerate.resumable(accelerator, directory, model=model)


CASES: Final[dict[str, Callable[[Path], Any]]] = {
    "kept already": lambda place: make(place, callback=hf.transformers.Resumable(place, model=Model())).train(),
    "DeepSpeed": lambda place: make(place, DeepSpeedTrainer),
    "FSDP1": lambda place: make(place, DividedTrainer),
    "tensor parallel": lambda place: make(place, TensorParallelTrainer),
    "batch size": lambda place: make(place, auto_find_batch_size=True),
    "two of them": lambda place: make(place, callback=[hf.transformers.Resumable(place / name) for name in "ab"]),
    "changed model": changed_model,
    "other run": other_run,
    "added later": added_later,
    "both save": both_save,
    "best at end": best_at_end,
    "long log": long_log,
    "loop, DeepSpeed": lambda place: divided_loop(place, "DEEPSPEED"),
    "loop, FSDP1": lambda place: divided_loop(place, "FSDP"),
    "loop, tensor parallel": lambda place: divided_loop(place, "TENSORS"),
    "loop, prepared nothing": prepared_nothing,
    "loop, prepared name": prepared_name,
}


def main(directory: Path) -> None:
    """Tries each case."""
    for name, case in CASES.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            came = case(directory / name)
        except hf.errors.HoldfastError as error:
            came = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps({"case": name, "came": came}, default=repr) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
