"""What a user wants noted in the manifest: figures, and any JSON. Pure."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError
from holdfast.state.leaves import alias_of


def check_notes(
    metrics: Mapping[str, float] | None, metadata: Mapping[str, Any] | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """**Pure.** Copies of both, fit for a manifest, so that later changes to the originals are not seen.

    A figure that is not finite is left out.

    Raises:
        UsageError: If something in them would not come back as it is.
    """
    figures = {}
    for name, value in check_metrics(metrics).items():
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _not_a_number(name, value) from error
    try:
        encoded = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata is not JSON: {error}", hint="State belongs into the Checkpoint.") from error
    return {name: value for name, value in figures.items() if math.isfinite(value)}, json.loads(encoded)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """**Pure.** The metrics by name, each a number or an array with one element.

    Values of arrays are not read: a training loop would wait there for a GPU, at every step.

    Raises:
        UsageError: If one is something else; the error names it.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            f"metrics must be numbers by name, got {reprlib.repr(metrics)}", hint='Such as {"loss": 0.5}, or None.'
        )
    return {_encodable(name): _check_metric(name, value) for name, value in (metrics or {}).items()}


def _check_metric(name: object, value: Any) -> Any:
    shape = getattr(value, "shape", ())
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise _not_a_number(name, value)
    try:
        if math.prod(shape) != 1:
            raise _not_a_number(name, value)
        if isinstance(value, int):
            float(value)
    except (TypeError, OverflowError) as error:
        raise _not_a_number(name, value) from error
    return alias_of(value)  # Nor is what autograd needs of it kept until it is saved.


def _not_a_number(name: object, value: object) -> UsageError:
    shape = getattr(value, "shape", None)
    what = reprlib.repr(value) if not shape else f"a {type(value).__name__} of shape {tuple(shape)}"
    return UsageError(
        f"metric {str(name)!r} must be a number, got {what}",
        hint="Give an int, a float, or an array with one element, such as loss.mean().",
    )


def _encodable(name: object) -> str:
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text!r} cannot name a metric: {error}", hint="Use text that UTF-8 can hold.") from error
    return text
