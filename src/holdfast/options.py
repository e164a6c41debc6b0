"""Checks of the arguments of managers and saves, before anything is done with them."""

from __future__ import annotations

import json
import math
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self

import msgspec

from holdfast.catalog import Catalog, StoredRun
from holdfast.cluster import Cluster
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import UsageError
from holdfast.events import Sink
from holdfast.format.names import MAX_STEP
from holdfast.numbers import check_seconds, check_whole
from holdfast.policies import All, RetentionPolicy, SavePolicy, read_keep, read_save_every
from holdfast.state.data.streams import BatchIterator
from holdfast.state.leaves import alias_of
from holdfast.storage import Storage

LEAST_LIVENESS_SECONDS: Final = 1.0

_NAMES_OF_BEST: Final = ("best", "keep_best", "save_best", "monitor", "metric_for_best_model")
"""The names that other libraries use for the metric by which the best checkpoint is kept."""


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a manager, checked once. `CheckpointManager` documents each."""

    save_every: SavePolicy | None = None
    keep: RetentionPolicy = msgspec.field(default_factory=All)
    when_busy: Literal["wait", "skip"] = "wait"
    failures_allowed: int = 0
    begin_anew: bool = False
    start_from: int | None = None
    incremental: bool = False
    reuse_space: bool = True
    sinks: Iterable[Sink] = ()
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    threads: int = 6
    overlap_copy: bool = False
    reserve_bytes: int | Literal["auto"] | None = None
    cluster: Cluster | Literal["auto", "alone"] = "auto"
    liveness_seconds: float = LIVENESS_SECONDS
    check_replicas: bool | Literal["first"] = "first"
    on_resize: Literal["allow", "refuse"] = "allow"

    @classmethod
    def pick(cls, given: Mapping[str, Any], **defaults: Any) -> Self:
        """Returns the options among a constructor's arguments, as `locals()` has them; `defaults` replace None."""
        options = {name: given[name] for name in cls.__struct_fields__ if name in given}
        return cls(**options | {name: value for name, value in defaults.items() if options[name] is None})

    def __post_init__(self) -> None:
        replicas: Any = self.check_replicas
        reserved: Any = self.reserve_bytes
        for name, first, second in (("when_busy", "wait", "skip"), ("on_resize", "allow", "refuse")):
            if (value := getattr(self, name)) not in (first, second):
                raise UsageError(f'{name} must be "{first}" or "{second}", got {value!r}')
        msgspec.structs.force_setattr(self, "save_every", read_save_every(self.save_every))
        msgspec.structs.force_setattr(self, "keep", read_keep(self.keep))
        check_switches(overlap_copy=self.overlap_copy, incremental=self.incremental, reuse_space=self.reuse_space)
        if replicas != "first" and not isinstance(replicas, bool):
            raise UsageError(
                f'check_replicas must be True, False or "first", got {replicas!r}',
                hint='"first" compares at the first save, and at the first one after a restore.',
            )
        if self.start_from is not None:
            check_step(self.start_from, "start_from")
            if self.begin_anew:
                raise UsageError("begin_anew and start_from contradict each other", hint="Pass one of them.")
        check_whole("failures_allowed", self.failures_allowed)
        check_timeout(self.timeout_seconds)
        check_whole("threads", self.threads, 1)
        check_liveness(self.liveness_seconds)
        if reserved is not None and not (isinstance(reserved, str) and reserved == "auto"):
            check_whole("reserve_bytes", reserved, hint='Use "auto", None or a number.')
        sinks = tuple(self.sinks) if isinstance(self.sinks, Iterable) else (self.sinks,)
        if not isinstance(self.sinks, Iterable) or not all(map(callable, sinks)):
            text = f"sinks must be a list of functions, got {reprlib.repr(self.sinks)}"
            raise UsageError(text, hint="For example: sinks=[print].")
        msgspec.structs.force_setattr(self, "sinks", sinks)


def check_step(step: int, name: str = "a step") -> int:
    """**Pure.** Returns the step, which errors call `name`, as a plain number; raises as `check_timeout` does."""
    return check_whole(name, step, 0, MAX_STEP)


def check_switches(**switches: object) -> None:
    """**Pure.** Raises `UsageError` if one is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, got {value!r}")


def check_like(like: object) -> dict[str, Any]:
    """**Pure.** Returns the trees by name that describe what to create; empty for None.

    Raises:
        UsageError: If it is not a dict with names.
    """
    if like is None:
        return {}
    if not isinstance(like, Mapping) or not like or not all(isinstance(name, str) and name for name in like):
        raise UsageError(
            f"like must be a dict of trees by the names of objects, got a {type(like).__name__}",
            hint='Write like={"params": tree}, with the names that the objects were saved under.',
        )
    return dict(like)


def check_timeout(seconds: object) -> None:
    """**Pure.** Checks the deadline of every wait; raises `OutOfRangeError`, or `UsageError` if it is not a number."""
    check_seconds("timeout_seconds", seconds, most=threading.TIMEOUT_MAX)


def check_wait(seconds: object) -> float:
    """**Pure.** Returns how long to wait: 0 to only look, infinity for no limit; raises as `check_timeout` does."""
    return check_seconds("timeout_seconds", seconds, least=0, most=math.inf)


def check_liveness(seconds: object) -> None:
    """**Pure.** Checks after how long a silent worker is taken for dead; raises as `check_timeout` does."""
    hint = "A worker gives fifteen signs of life in that time."
    most = threading.TIMEOUT_MAX
    check_seconds("liveness_seconds", seconds, least=LEAST_LIVENESS_SECONDS, most=most, hint=hint)


def check_kept_objects(objects: Mapping[str, object]) -> None:
    """**Pure.** Raises `UsageError` for an optimizer's state, or an iterator over a loader, instead of the object."""
    for name, value in objects.items():
        if isinstance(value, dict) and value.keys() == {"state", "param_groups"}:
            raise UsageError(
                f"{name} is the result of an optimizer's state_dict(): the save would not follow the optimizer, "
                "and a restart would not load it back",
                hint=f"Pass the optimizer itself, {name}={name}, without .state_dict().",
            )
        if isinstance(value, BatchIterator):
            raise UsageError(
                f"{name} is an iterator over a loader; the position is saved with the loader",
                hint=f"Pass the loader itself, {name}={name}, and take the batches from loader.stream().",
            )


def check_names(objects: Mapping[str, object], options: Mapping[str, object]) -> None:
    """**Pure.** Checks names: every unknown name counts as an object's, so a misspelled option must not become one.

    Raises `UsageError` if an option was given something that looks like an object, or an object is a policy or its name
    is too similar to an option's.
    """
    hint = "To save an object of that name, write resumable(directory, Checkpoint({}=..., ...))."
    for name, value in options.items():
        has_state = isinstance(value, Mapping) or callable(getattr(value, "state_dict", None))
        is_array = bool(getattr(value, "shape", ()))
        is_kind = isinstance(value, type) or _find_policy_option(value)
        if (has_state or is_array) and not is_kind:
            raise UsageError(
                f"{name} is an option of resumable, but got a {type(value).__name__}, which looks like an object "
                "to save",
                hint=hint.format(name),
            )
    for name, value in objects.items():
        if name == "take_over":
            raise UsageError(
                "take_over is not an option of resumable: left in a script, it would end a running job at each start",
                hint="For one start, set HOLDFAST_TAKE_OVER=1 in the environment.",
            )
        if option := _find_policy_option(value):
            raise UsageError(
                f"{name} is not an option of resumable, and a policy is not an object to save; did you mean {option}?",
                hint=f"Write {option}=...",
            )
        if option := _find_meant(name, value, ("directory", *options)):
            text = f"{name} is not an option of resumable; did you mean {option}?"
            raise UsageError(text, hint=hint.format(name))


def _find_policy_option(value: object) -> str:
    return "save_every" if hasattr(value, "decide_save") else "keep" if hasattr(value, "choose_kept") else ""


def _find_meant(name: str, value: object, options: Sequence[str]) -> str:
    """**Pure.** Returns the option that a name probably means; empty if it may well be that of an object."""
    from difflib import get_close_matches

    if isinstance(value, str) and name in _NAMES_OF_BEST:
        return f'keep=holdfast.Best("{value}")'
    if isinstance(value, int) and name == "latest":
        return f"keep=holdfast.Latest({value})"
    near = get_close_matches(name, options, 1, 0.8)
    if not near and isinstance(value, bool | int | float | str | None):
        # keep_latest=3, num_threads=4, timeout=60: a number says nothing of what it is.
        near = [
            option
            for option in options
            if name.startswith(f"{option}_") or name.endswith(f"_{option}") or option.startswith(f"{name}_")
        ]
        # As other libraries call it.
        if name.startswith(("save_", "checkpoint_", "ckpt_")) or name.rpartition("_")[2] in (
            "every",
            "interval",
            "freq",
        ):
            near.append("save_every")
    return near[0] if near else ""


def look_into(storage: Storage) -> Catalog:
    """**Blocks.** Returns the content of a run's directory, which need not exist; `UsageError` if it is a file."""
    if (place := storage.location) and os.path.lexists(place) and not os.path.isdir(place):  # noqa: PTH112
        raise UsageError(f"{storage.url} exists but is not a directory", hint="Pass the path of the run's directory.")
    return StoredRun(storage).look()


def check_notes(
    metrics: Mapping[str, float] | None, metadata: Mapping[str, Any] | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """**Pure.** Returns copies of both, fit for a manifest, so that later changes to the originals have no effect.

    Metrics that are not finite are left out; `UsageError` is raised for values that would not come back unchanged.
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
        raise UsageError(f"metadata must be JSON: {error}", hint="Put state into the Checkpoint.") from error
    return {name: value for name, value in figures.items() if math.isfinite(value)}, json.loads(encoded)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """**Pure.** Returns the metrics by name, each a number or an array with one element; the error names the wrong one.

    Values of arrays are not read: a training loop would wait for the GPU there, at every step.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            f"metrics must be numbers by name, got {reprlib.repr(metrics)}", hint='For example {"loss": 0.5}, or None.'
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
        hint="Pass an int, a float, or an array with one element, such as loss.mean().",
    )


def _encodable(name: object) -> str:
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{text!r} cannot be the name of a metric: {error}", hint="Use text that can be encoded as UTF-8."
        ) from error
    return text
