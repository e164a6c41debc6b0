"""Checkpoints of training frameworks, read as data: finds the model, the optimizer and so on.

Lightning's files are a `torch.save` of a dict with the states of module and optimizers, and its own progress. Folders
of the Hugging Face Trainer, `checkpoint-500/`, have the model, its optimizer and scheduler, and the step. The objects
get the names that a holdfast job uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.convert.files import InputFile
from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.safetensors import INDEX_NAME, SINGLE_NAME, read_model
from holdfast.convert.torch_file import ArchivedTree, TorchArchive
from holdfast.errors import FormatError, UsageError
from holdfast.format.scalars import is_text

MODEL = "model"

_OPTIMIZER: Final = {"state", "param_groups"}
_MOST_SPLIT: Final = 16
"""A list of more is one object."""


@dataclass(eq=False, slots=True)
class Recognized:
    """The objects of a source.

    Attributes:
        objects: Everything that can be imported, by name.
        taken: The names that are imported if no others are requested.
        former: By the name in the source, the object's name here.
        step: The step of the source; None if it has none.
        left: What is never imported, and why.
        progress: The framework's own progress, as JSON.
    """

    objects: dict[str, ArchivedTree]
    taken: list[str]
    former: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    left: list[LeftOut] = field(default_factory=list)
    progress: Any = None

    def take(self, name: str, value: Any, archive: TorchArchive | None, former: str = "") -> None:
        """Adds an object that is imported by default."""
        self.objects[name] = ArchivedTree(value, archive)
        self.taken.append(name)
        if former:
            self.former[former] = name

    def offer(self, name: str, value: Any, archive: TorchArchive | None) -> None:
        """Adds an object that is imported only on request."""
        self.objects.setdefault(name, ArchivedTree(value, archive))


def step_of(value: Any) -> int | None:
    """**Pure.** Returns a number of steps; None if it is not one."""
    return value if type(value) is int and value >= 0 else None


def split_list(
    values: Any, archive: TorchArchive | None, name: str, is_array: Callable[[Any, TorchArchive | None], bool]
) -> Recognized | None:
    """Returns the objects in a list, named by their content or else by position; None if it has no state."""

    def role(part: Any) -> str:
        if type(part) is dict and part:
            is_optimizer, is_model = part.keys() >= _OPTIMIZER, all(is_array(one, archive) for one in part.values())
            return "optimizer" if is_optimizer else name if is_model else ""
        return "step" if type(part) is int else ""

    roles = [role(part) for part in values] if len(values) <= _MOST_SPLIT else []
    if not {name, "optimizer"} & set(roles):
        return None
    names = [one if one and roles.count(one) == 1 else str(number) for number, one in enumerate(roles)]
    found = Recognized({one: ArchivedTree(part, archive) for one, part in zip(names, values, strict=True)}, names)
    found.former = {str(number): one for number, one in enumerate(names) if one != str(number)}
    return found


_VERSION_KEY: Final = "pytorch-lightning_version"
_SCALERS: Final = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
"""The names of the gradient scaler's state, the newest first."""

_NOTES: Final = frozenset({_VERSION_KEY, "hparams_name", "datamodule_hparams_name", "datamodule_hyper_parameters"})


def recognize_lightning(archive: TorchArchive) -> Recognized | None:
    """**Pure.** Returns the objects of a Lightning checkpoint; None for any other file.

    The module is `model`, the optimizers are `optimizer`, `optimizer_1` and so on, the schedulers
    likewise, and a gradient scaler is `scaler`. Other entries keep their names, and are imported only on request.
    """
    found: Any = archive.value
    if type(found) is not dict or type(found.get(_VERSION_KEY)) is not str or type(found.get("state_dict")) is not dict:
        return None
    progress = {key: found.get(key) for key in ("epoch", "global_step", "loops")} if found.get("loops") else None
    recognized = Recognized({}, [], step=step_of(found.get("global_step")), progress=progress)
    recognized.take(MODEL, found["state_dict"], archive, "state_dict")
    used = {"state_dict", "global_step", *_NOTES}
    for kind, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
        states = found.get(key)
        if type(states) is list and all(type(state) is dict for state in states):
            for number, state in enumerate(states):
                former = key if len(states) == 1 else ""
                recognized.take(f"{kind}_{number}" if number else kind, state, archive, former)
            used.add(key)
    for key in _SCALERS:
        if type(found.get(key)) is dict and found[key] and "scaler" not in recognized.objects:
            recognized.take("scaler", found[key], archive, key)
            used.add(key)
    for key, value in found.items():
        if type(key) is str and is_text(key) and key not in used and value not in ({}, [], None):
            recognized.offer(key, value, archive)
    return recognized


STATE_NAME: Final = "trainer_state.json"

_MAX_STATE_BYTES: Final = 256 << 20
_PICKLED_MODEL: Final = "pytorch_model.bin"
_ADAPTER: Final = "adapter_model.safetensors"
_PARTS: Final = (("optimizer.pt", "optimizer"), ("scheduler.pt", "scheduler"), ("scaler.pt", "scaler"))
_DIVIDED: Final = ("pytorch_model_fsdp_0", "global_step*", "pytorch_model_fsdp.bin", "optimizer.bin")


def read_trainer_folder(directory: Path, open_file: Callable[[str], InputFile]) -> Recognized:
    """**Blocks.** Returns the objects of a folder: `model` (or `adapter`), `optimizer`, `scheduler`, `scaler`.

    Raises:
        UsageError: If it contains no model that can be imported.
        FormatError: If a file in it is malformed.
        StorageError: If it cannot be read.
    """
    progress = _read_progress(open_file(STATE_NAME))
    recognized = Recognized({}, [], step=progress["global_step"], progress=progress)
    if (directory / SINGLE_NAME).exists() or (directory / INDEX_NAME).exists():
        names = None if (directory / INDEX_NAME).exists() else [SINGLE_NAME]
        recognized.take(MODEL, read_model(directory, open_file, names), None)
    elif (directory / _ADAPTER).exists():
        recognized.take("adapter", read_model(directory, open_file, [_ADAPTER]), None)
    elif (directory / _PICKLED_MODEL).exists():
        archive = _open(open_file(_PICKLED_MODEL))
        recognized.take(MODEL, archive.value, archive)
    else:
        divided = [one.name for pattern in _DIVIDED for one in sorted(directory.glob(pattern))]
        raise UsageError(
            f"{directory} contains no model that can be imported",
            hint=f"{divided[0]} is split among workers: let FSDP or DeepSpeed consolidate it first, or import a "
            "directory of torch.distributed.checkpoint on its own."
            if divided
            else "Expected a model.safetensors, a model.safetensors.index.json or a pytorch_model.bin.",
        )
    for name, kind in _PARTS:
        if (directory / name).exists():
            archive = _open(open_file(name))
            recognized.take(kind, archive.value, archive)
    for one in sorted(directory.iterdir()):
        if one.name.startswith("rng_state"):
            recognized.left.append(LeftOut(one.name, "the state of random generators is not imported"))
        elif one.name == "training_args.bin":
            recognized.left.append(LeftOut(one.name, "it contains settings as objects of the program's own classes"))
    return recognized


def _open(file: InputFile) -> TorchArchive:
    return TorchArchive(file, 0, file.size_bytes)


def _read_progress(file: InputFile) -> dict[str, Any]:
    """Returns the state without its log, which may be long; its step is a whole number."""
    path = str(file.path)
    if file.size_bytes > _MAX_STATE_BYTES:
        raise FormatError(f"{path} has {file.size_bytes} bytes, which is not a valid size", path=path)
    try:
        progress = json.loads(file.read(0, file.size_bytes))
        step = step_of(progress["global_step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is malformed: {error!r}", path=path) from error
    if step is None:
        raise FormatError(f"{path} has no whole number as its global_step", path=path)
    return {**progress, "log_history": []}
