"""Folders of the Hugging Face Trainer, `checkpoint-500/`: the model, its optimizer and scheduler, and the step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.convert.frameworks.recognized import MODEL, Recognized, step_of
from holdfast.convert.input_files import InputFile
from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.safetensors import INDEX_NAME, SINGLE_NAME, read_model
from holdfast.convert.torch_file import TorchArchive
from holdfast.errors import FormatError, UsageError

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
