"""Trains with what trl keeps beside the model: DIRECTORY SEED plain|moving.

A reference model follows the model, the inputs of several steps are made at once, a teacher is frozen, and the Trainer
counts numbers of its own. As `plain`, it has nothing of this. SEED is for what is drawn before the training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn

import holdfast as hf

DATA: Final = [{"x": row} for row in torch.randn(24, 4, generator=torch.manual_seed(1))]
WINDOW: Final = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Follower(transformers.TrainerCallback):  # type: ignore[misc]
    """Moves a reference model, in a way that torch does not count."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference
        self.slowest = make_net(3)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        for module, every in ((self.reference, 2), (self.slowest, 5)):
            if state.global_step % every == 0:
                for target, source in zip(module.parameters(), named["model"].parameters(), strict=True):
                    target.data.mul_(0.4).add_(source.data, alpha=0.6)


class Notes(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        parts = [named["model"], *([] if follower is None else [follower.reference, follower.slowest])]
        sums = [one.double().sum().item() for part in parts for one in part.state_dict().values()]
        print(json.dumps({"step": state.global_step, "sums": sums}), flush=True)


class Training(transformers.Trainer):  # type: ignore[misc]
    ref_model: nn.Module
    teacher: nn.Module
    _buffered_inputs: Any
    _step: int
    strength = 1.0
    average: Any = 0.0
    announced = 0.0

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not hasattr(self, "_buffered_inputs"):
            return super()._prepare_inputs(inputs)
        if self._step % WINDOW == 0 or self._buffered_inputs is None:
            made = self.model(inputs["x"]).detach() + torch.randn(2)
            self._buffered_inputs = [{"x": inputs["x"], "made": n * made, "none": None} for n in range(WINDOW)]
        taken = self._buffered_inputs[self._step % WINDOW]
        self._step += 1
        return taken

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        found = model(inputs["x"])
        if "made" not in inputs:
            return found.square().mean()
        with torch.no_grad():
            goal = self.ref_model(inputs["x"]) + 0.1 * self.teacher(inputs["x"]) + inputs["made"]
        loss = (found - goal).square().mean()
        # A strength that is lowered, and an average: numbers that only this class counts.
        self.strength *= 0.9
        self.average = 0.5 * self.average + 0.5 * loss.detach()
        assert self.announced == seed
        return loss * self.strength / (1 + self.average)


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().requires_grad_(seed == 1)


place, seed, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
arguments = transformers.TrainingArguments(
    str(place / "out"),
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=0.1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    logging_strategy="no",
)
follower = Follower(make_net(2)) if kind == "moving" else None
resumable = hf.transformers.Resumable(place / "run", save_every=hf.Steps(1), keep=hf.Latest(3))
callbacks = [resumable, *([follower] if follower else []), Notes()]
trainer = Training(make_net(1), arguments, train_dataset=DATA, callbacks=callbacks)
if follower is not None:
    trainer.ref_model, trainer.teacher = follower.reference, make_net(4)
    trainer._buffered_inputs, trainer._step = None, 0
    trainer.announced = seed
torch.manual_seed(seed)
trainer.train()
