"""Modules of Flax NNX, its optimizers, metrics and random streams: the values of their variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from holdfast.errors import MissingPackageError
from holdfast.format.scalars import tagged
from holdfast.state.adapters import MADE_ANEW, Adapter, CaptureContext, Loading
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import register_adapter


class NNXAdapter(Adapter):
    """Reads the values of an object's variables and puts them back; the object's structure stays."""

    kind = "flax.nnx"

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the value of each variable, by the attributes, keys and indices on the way to it."""
        return nnx.to_pure_dict(nnx.state(obj))

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Prepares new values for the variables."""
        live = nnx.to_pure_dict(nnx.state(obj))
        values = loading.value(_fit(stored, live), live, rules=MADE_ANEW)

        def load() -> None:
            nnx.update(obj, loading.complete(values))

        return load


def _fit(stored: Skeleton, live: Any) -> Skeleton:
    """Converts state from Orbax, where a variable is a dict with its value, to the form used here."""
    if not isinstance(live, dict):
        return stored["value"] if type(stored) is dict and stored.keys() == {"value"} else stored
    if type(stored) is not dict or "$" in stored:
        return stored
    keys = {name: int(name) if name.isdecimal() and int(name) in live else name for name in stored}
    parts = {name: _fit(part, live.get(keys[name])) for name, part in stored.items()}
    return parts if keys.keys() == set(keys.values()) else tagged("dict", [[keys[name], parts[name]] for name in parts])


if not hasattr(nnx, "Pytree"):
    raise MissingPackageError("Flax NNX modules need flax 0.12 or newer", hint="pip install -U flax")
register_adapter(nnx.Pytree, NNXAdapter())
