"""Files of Lightning: a `torch.save` of a dict with the states of module and optimizers, and its own progress."""

from __future__ import annotations

from typing import Any, Final

from holdfast.convert.frameworks.recognized import MODEL, Recognized, step_of
from holdfast.convert.torch_file import TorchArchive
from holdfast.format.scalars import is_text

VERSION_KEY: Final = "pytorch-lightning_version"

_SCALERS: Final = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
"""The names of the gradient scaler's state, the newest first."""

_NOTES: Final = frozenset({VERSION_KEY, "hparams_name", "datamodule_hparams_name", "datamodule_hyper_parameters"})


def recognize_lightning(archive: TorchArchive) -> Recognized | None:
    """**Pure.** Returns the objects of a Lightning checkpoint; None for any other file.

    The module is `model`, the optimizers are `optimizer`, `optimizer_1` and so on, the schedulers
    likewise, and a gradient scaler is `scaler`. Other entries keep their names, and are imported only on request.
    """
    found: Any = archive.value
    if type(found) is not dict or type(found.get(VERSION_KEY)) is not str or type(found.get("state_dict")) is not dict:
        return None
    progress = {key: found.get(key) for key in ("epoch", "global_step", "loops")} if found.get("loops") else None
    recognized = Recognized({}, [], step=step_of(found.get("global_step")), progress=progress)
    recognized.take(MODEL, found["state_dict"], archive, "state_dict")
    used = {"state_dict", "global_step", *_NOTES}
    for kind, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
        states = found.get(key)
        if type(states) is list and all(type(state) is dict for state in states):
            recognized.take_each(kind, states, archive, key)
            used.add(key)
    for key in _SCALERS:
        if type(found.get(key)) is dict and found[key] and "scaler" not in recognized.objects:
            recognized.take("scaler", found[key], archive, key)
            used.add(key)
    for key, value in found.items():
        if type(key) is str and is_text(key) and key not in used and value not in ({}, [], None):
            recognized.offer(key, value, archive)
    return recognized
