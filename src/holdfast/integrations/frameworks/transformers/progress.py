"""The progress of a Trainer: what its own checkpoint stores as JSON, and what that leaves out."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from holdfast.integrations.torch.places import DataPlace

_OF_A_WORKER: Final = ("log_history", "is_local_process_zero", "is_world_process_zero")
_APPLIED: Final = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""The part of the state that training changes; the rest follows from the program's arguments."""

_COUNTERS: Final = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")

_OF_A_WINDOW: Final = ("_step", "_buffered_inputs")
"""The attributes of trl's trainers that generate once for several steps."""

_OF_TRL: Final = ("_total_train_tokens", "_last_world_entropy")
"""Numbers that trl's trainers count; attributes of such names are looked at like public ones."""

_OF_THE_TRAINER: Final = frozenset(
    each.argval
    for cls in Trainer.__mro__
    for method in map(inspect.unwrap, filter(inspect.isfunction, vars(cls).values()))
    for each in dis.get_instructions(method)
    if each.opname == "STORE_ATTR"
)
"""The attributes that the Trainer itself sets: they are stored by name, or belong to the process."""


class Begin(NamedTuple):
    """Where the Trainer begins.

    Attributes:
        step: The step by which it finds the epoch, and how many of its steps to skip: it divides by those of an epoch.
        taken: How many batches of the epoch it takes for trained, in whole steps; None if that follows from the step.
        left: How many batches of the epoch are left then.
        max_steps: The steps of the whole training.
    """

    step: int
    taken: int | None
    left: int
    max_steps: int


class TrainerProgress:
    """The state that all workers share: the Trainer's, that of callbacks, and the files that describe the model.

    Attributes:
        fields: The fields of `TrainerState`.
        unfinished: While the step ends with an evaluation, what a restart needs to end it; else None.
        place: The position in the data; None before the loader is created.
    """

    def __init__(self, trainer: Any = None) -> None:
        """Creates it for a Trainer, or for none: then it can only be read."""
        self._trainer = trainer
        self._stored: dict[str, Any] = {}
        self._files = {} if trainer is None else describe_model(trainer.model)
        self.fields: dict[str, Any] = {}
        self.unfinished: dict[str, Any] | None = None
        self.place: DataPlace | None = None
        # How many epochs are over, and how many steps were complete when the last one of them was.
        self._epochs = self._steps_before = 0
        self._held: dict[str, Any] | None = None

    @property
    def global_step(self) -> int:
        """How many steps were complete when it was saved."""
        return int(self.fields["global_step"])

    def is_finished(self, max_steps: int) -> bool:
        """Returns True if that many steps are done, or a callback ended the training early."""
        has_stopped = bool(self._stored["control"]["args"]["should_training_stop"])
        return self.global_step >= max_steps or (has_stopped and self.global_step < int(self.fields["max_steps"]))

    def guess_steps(self, args: Any) -> int:
        """Returns how many steps the Trainer will have, as far as that is known before it has its loader."""
        if args.max_steps > 0:
            return int(args.max_steps)
        return int(self.fields["max_steps"] * math.ceil(args.num_train_epochs) // self.fields["num_train_epochs"])

    def plan_begin(self, place: DataPlace, args: Any, epoch_steps: int, max_steps: int) -> Begin:
        """Returns where the Trainer begins, if the batches or their number in a step may be others than at the save.

        Args:
            place: The position in the data, which is not restored yet.
            args: The Trainer's arguments.
            epoch_steps: The steps of an epoch; `max_steps` where that is not known.
            max_steps: The steps of the training, if all of them were as they are now.
        """
        epochs, outline = self._stored.get("epochs"), self._stored.get("place")
        if epochs is None:
            return Begin(self.global_step, None, 0, max_steps)
        over, before = epochs
        if (self.unfinished or {}).get("ends_epoch"):
            over, before = over + 1, self.global_step
        done = self.global_step - before
        accumulated = args.gradient_accumulation_steps
        total = place.outline()["total"]
        if outline is None or total is None:
            return Begin(over * epoch_steps + done, None, 0, max_steps)
        present = place.fit(outline)[0]
        taken = present["taken"] - present["taken"] % accumulated
        left = total - present["taken"]
        is_within = done and not present.get("ended")
        begin = (over + bool(done)) * epoch_steps - (math.ceil(left / accumulated) if is_within else 0)
        if args.max_steps <= 0:
            max_steps = self.global_step + max_steps - begin
        return Begin(begin, taken if is_within else None, left, max_steps)

    def count_restored_epochs(self) -> int:
        """Returns how many epochs were over at the save that was restored; 0 for a new run, or if it is not known."""
        over = (self._stored.get("epochs") or (0,))[0]
        return int(over + bool((self.unfinished or {}).get("ends_epoch")))

    @property
    def epochs(self) -> int:
        """How many epochs are over."""
        return self._epochs

    def end_epoch(self) -> None:
        """Counts an epoch."""
        self._epochs, self._steps_before = self._epochs + 1, int(self._trainer.state.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as JSON, whose numbers are read as they were written."""
        if self._held is not None:
            return self._held
        trainer = self._trainer
        fields = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in _OF_A_WORKER
        }
        fields["stateful_callbacks"] = _read_callbacks(trainer)
        progress = {
            "fields": fields,
            "control": trainer.control.state(),
            "counters": {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)},
            "unfinished": self.unfinished,
            "epochs": [self._epochs, self._steps_before],
            "place": None if self.place is None else self.place.outline(),
        }
        return {"progress": dump(progress), "files": self._files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores it; `apply` puts it into the Trainer."""
        self._stored = json.loads(state["progress"])
        self.fields = self._stored["fields"]
        self.unfinished = self._stored.get("unfinished")

    def begin_evaluation(self, unfinished: dict[str, Any]) -> None:
        """Begins an evaluation at the end of a step: until it is over, saves store the present state."""
        self.unfinished = unfinished
        self._held = self.state_dict()

    def end_evaluation(self) -> None:
        """Ends the evaluation."""
        self.unfinished = self._held = None

    def hold_place(self, left: Mapping[str, Any]) -> None:
        """Has saves store what was restored, with the place in the data at which training was left."""
        there = json.loads(left["progress"])
        fields, (over, before) = there["fields"], there["epochs"]
        # As many steps of the epoch are done as were there: some are left out.
        moved = {
            **self._stored,
            **{name: there[name] for name in ("control", "unfinished", "place")},
            "fields": {**self.fields, "epoch": fields["epoch"]},
            "epochs": [over, self.global_step - (fields["global_step"] - before)],
        }
        self._held = {"progress": dump(moved), "files": self._files}

    def apply(self, trainer: Any) -> None:
        """Puts it into the Trainer, whose loop is about to begin."""
        for name in _APPLIED:
            if name in self.fields:
                setattr(trainer.state, name, self.fields[name])
        for name, value in self._stored["counters"].items():
            setattr(trainer, name, value)
        self._epochs, self._steps_before = self._stored.get("epochs") or (0, 0)
        left = {
            name: each if isinstance(each, list) else [each] for name, each in self.fields["stateful_callbacks"].items()
        }
        for callback in _list_exportable(trainer):
            states = left.get(type(callback).__name__)
            if states:
                for name, value in states.pop(0)["attributes"].items():
                    setattr(callback, name, value)
        # A save of the Trainer's own expects each callback of this process there, and the control.
        trainer.state.stateful_callbacks = _read_callbacks(trainer)

    def apply_control(self, trainer: Any) -> None:
        """Makes the Trainer do what it was about to do when it began the evaluation."""
        for name, value in self._stored["control"]["args"].items():
            setattr(trainer.control, name, value)


class TrainerWorker:
    """The state of each worker: its position in the data, its part of the loss, the log with its times.

    Attributes:
        loss: After a restart, the loss that is not logged yet, if the Trainer itself has no place for it.
        place: The position in the data; None before the loader is created.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stored: Mapping[str, Any] | None = None
        self._seen_loss: Any = None
        self._log = _Log()
        self._held: dict[str, Any] | None = None
        self._numbers = _read_numbers(trainer)
        self.loss: Any = None
        self.place: DataPlace | None = None

    def see_loss(self, loss: Any) -> None:
        """Records the loss that is logged next: version 4 of the Trainer has it in its loop only."""
        self._seen_loss = loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of this worker."""
        if self._held is not None:
            return self._held
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", self._seen_loss)
        began, numbers = self._numbers, _read_numbers(trainer)
        return {
            "loss": 0.0 if loss is None else float(loss),
            "flos": float(trainer.current_flos),
            "log": self._log.write(trainer.state.log_history),
            "place": None if self.place is None else self.place.state_dict(),
            "window": {name: getattr(trainer, name) for name in _OF_A_WINDOW if hasattr(trainer, "_buffered_inputs")},
            # Not those that the program alone sets, perhaps to other values now.
            "numbers": {name: one for name, one in numbers.items() if name not in began or bool(one != began[name])},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores it; the position in the data is that of the next epoch."""
        self._stored = state
        if self.place is not None and state["place"] is not None:
            self.place.load_state_dict(state["place"])

    def begin_evaluation(self) -> None:
        """Begins an evaluation at the end of a step: until it is over, saves store the present state."""
        self._held = self.state_dict()

    def end_evaluation(self) -> None:
        """Ends the evaluation."""
        self._held = None

    def hold_place(self, left: Mapping[str, Any]) -> None:
        """Has saves store what was restored, with the place in the data at which training was left."""
        self._held = {**(self._stored or left), "place": left["place"], "window": left["window"]}

    def apply(self) -> None:
        """Puts it into the Trainer, whose loop is about to begin."""
        trainer, state = self._trainer, self._stored
        if state is None:
            return  # The number of workers has changed.
        trainer.state.log_history = self._log.read(state["log"])
        trainer.current_flos = state["flos"]
        for name, value in {**state.get("window", {}), **state.get("numbers", {})}.items():
            setattr(trainer, name, send_to_device(value, trainer.args.device))
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss.fill_(state["loss"])
        else:
            self.loss = torch.tensor(state["loss"])

    def add_loss(self, loss: Any) -> Any:
        """Returns what a step has returned; for the first one, with the loss that was not logged before.

        The loop of version 4 begins with 0 and adds what each step returns.
        """
        before, self.loss = self.loss, None
        return loss if before is None else before.to(loss.device) + loss

    def end_loss(self) -> None:
        """Adds that loss to the sum of all, if the loop of version 4 ends at once."""
        if self.loss is not None:
            self._trainer._total_loss_scalar += self.loss.item()
            self.loss = None


class _Log:
    """The log as lines of JSON, of which a save encodes only the new ones: a log of days takes a second to encode."""

    def __init__(self) -> None:
        self._begin(np.empty(0, np.uint8), [])

    def _begin(self, lines: np.ndarray[Any, Any], history: list[Any]) -> None:
        self._lines, self._end = lines, len(lines)
        self._count, self._newest = len(history), history[-1] if history else None

    def write(self, history: list[Any]) -> np.ndarray[Any, Any]:
        """Returns the lines of all entries."""
        if len(history) < self._count or (self._count and history[self._count - 1] is not self._newest):
            self._begin(np.empty(0, np.uint8), [])  # It is another log.
        new = "".join(f"{dump(entry)}\n" for entry in history[self._count :]).encode()
        begin, end = self._end, self._end + len(new)
        if end > len(self._lines):
            self._lines = np.concatenate([self._lines[:begin], np.zeros(2 * end - begin, np.uint8)])
        self._lines[begin:end] = np.frombuffer(new, np.uint8)
        self._end, self._count, self._newest = end, len(history), history[-1] if history else None
        return self._lines[:end]

    def read(self, lines: np.ndarray[Any, Any]) -> list[Any]:
        """Returns the entries."""
        history = [json.loads(line) for line in lines.tobytes().splitlines()]
        self._begin(lines, history)
        return history


def describe_model(model: Any) -> dict[str, str]:
    """Returns the files next to the weights in a folder of `save_pretrained`, by name: they define the model."""
    files: dict[str, str] = {}
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and hasattr(model, "get_base_model"):
        for name, adapter in adapters.items():
            folder = "" if name == "default" else f"{name}/"
            settings = {**adapter.to_dict(), "inference_mode": True}
            files[f"{folder}adapter_config.json"] = json.dumps(settings, default=_plain, indent=2, sort_keys=True)
        return files
    for attribute, file in (("config", "config.json"), ("generation_config", "generation_config.json")):
        config = getattr(model, attribute, None)
        write = getattr(config, "to_json_string", None)
        if callable(write):
            files[file] = write()
    if "config.json" in files:
        # `save_pretrained` adds these two.
        added = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
        settings = {**json.loads(files["config.json"]), **added}
        files["config.json"] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    return files


def dump(value: object) -> str:
    """Encodes JSON; a metric that is a number of NumPy or torch becomes a plain number."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return str(value)


def _read_numbers(trainer: Any) -> dict[str, Any]:
    """Returns the numbers, also tensors of one, that are attributes of a subclass: it may count or average by them."""
    found = {}
    for name, value in vars(trainer).items():
        is_own = name in _OF_TRL or not (name.startswith("_") or name in _OF_THE_TRAINER)
        is_tensor = type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad
        if is_own and (is_tensor or type(value) in (bool, int, float)):
            found[name] = value.clone() if is_tensor else value
    return found


def _read_callbacks(trainer: Any) -> dict[str, Any]:
    """The states by the name of the class, as the Trainer keeps them; a list where several have one class."""
    states: dict[str, list[Any]] = {}
    for one in (*_list_exportable(trainer), trainer.control):
        states.setdefault(type(one).__name__, []).append(one.state())
    return {name: each[0] if len(each) == 1 else each for name, each in states.items()}


def _list_exportable(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
