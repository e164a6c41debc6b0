"""`save` and `load`: one tree of arrays and values, without a training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from holdfast.catalog import Asked, StoredRun, find_step, split_place
from holdfast.catalog.named_step import EXAMPLES
from holdfast.checkpoint import Checkpoint
from holdfast.cluster import Cluster
from holdfast.errors import MismatchError, NoCheckpointError, StepExistsError, UsageError
from holdfast.format.encoding import escape
from holdfast.manager import CheckpointManager
from holdfast.options import check_switches
from holdfast.policies import Latest
from holdfast.restore.verify import list_objects
from holdfast.state.match.matching import PLAIN
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import short_traceback

_TREE: Final = "tree"


@short_traceback
def save(
    path: str | os.PathLike[str] | Storage,
    tree: Any,
    *,
    overwrite: bool = False,
    cluster: Cluster | Literal["auto", "alone"] = "auto",
) -> None:
    """**Blocks.** Saves one tree: dicts, lists, tuples, dataclasses and modules of arrays and plain values.

    The tree is durable when this returns. In a job of several workers all call it; sharded arrays are written by all.

    Args:
        path: A directory, created if needed, a URL, or an open storage. `holdfast list`, `show` and `verify` read it.
        tree: The tree. It may contain arrays of NumPy, JAX and torch, and anything else that a checkpoint may contain.
        overwrite: True to replace an existing tree, which is removed once this one is durable.
        cluster: The workers of the job: "auto" to find them, "alone" for a worker that saves on its own, or a cluster.

    Raises:
        StepExistsError: If there is already a tree.
        UsageError: If the directory contains a run, or an argument is wrong.
        UnsupportedValueError: If a value cannot be stored; the error has its path.
        SaveFailedError: If it could not be written.
        StorageError: If the storage fails.
    """
    check_switches(overwrite=overwrite)
    storage = open_storage(path)
    newest, names = _look(storage)
    if newest is not None and names != [_TREE]:
        raise UsageError(
            f"{storage.url} contains a run ({', '.join(sorted(names))}), so no tree is saved there",
            hint="Save to another directory.",
        )
    if newest is not None and not overwrite:
        raise StepExistsError(f"{storage.url} already contains a tree", hint="overwrite=True replaces it.")
    with CheckpointManager(storage, Checkpoint(tree=tree), keep=Latest(1), cluster=cluster) as manager:
        manager.save(0 if newest is None else newest + 1).wait_committed()


@short_traceback
def load(
    path: str | os.PathLike[str] | Storage,
    like: Any = None,
    *,
    cluster: Cluster | Literal["auto", "alone"] = "auto",
) -> Any:
    """**Blocks.** Loads the tree that `save` saved; every byte that is read is checked.

    The run of a training loop is loaded as a dict of the objects in its newest checkpoint, by name; or in another one,
    as in `"runs/gpt@500"`, `"runs/gpt@best:val_loss"` or `"runs/gpt@max:accuracy"`.

    Args:
        path: The directory, with or without a step; a URL, or an open storage.
        like: A tree of the same structure, which is left unchanged. Each array is created like the one in this tree: of
            the same library, on the same device, with the same sharding. A `jax.ShapeDtypeStruct`, with or without a
            sharding, is enough. For a run, a dict with some of its objects. None for NumPy arrays in plain containers.
        cluster: As in `save`. In a job of several workers all call this.

    Returns:
        The tree. Objects with state in `like`, such as torch or Flax NNX modules, are filled and are part of it.

    Raises:
        NoCheckpointError: If there is none.
        MismatchError: If `like` has another structure, or an array has another shape or dtype; the error names each.
        DamageError: If the records are damaged.
        NoWholeCheckpointError: If the checkpoint is damaged.
        StorageError: If the storage fails.
    """
    storage, _, asked = split_place(path)
    newest, names = _look(storage, asked)
    if newest is None:
        hint = f"A step is written as {EXAMPLES}." if "@" in storage.url and asked is None else ""
        raise NoCheckpointError(f"{storage.url} contains no checkpoint", hint=hint)
    wanted: Any = like
    is_tree = names == [_TREE]
    if is_tree:
        wanted = {_TREE: PLAIN if like is None else like}
    elif like is None:
        wanted = dict.fromkeys(names, PLAIN)
    elif not isinstance(like, Mapping) or not like or not like.keys() <= set(names):
        raise UsageError(
            f"{storage.url} contains a run: `like` must be a dict of some of its objects: {', '.join(sorted(names))}"
        )
    with CheckpointManager(storage, Checkpoint(), cluster=cluster) as manager:
        try:
            manager.restore(newest if is_tree or asked is not None else None, only=map(escape, wanted), like=wanted)
        except MismatchError as error:
            hint = "`like` must have the structure of all that is stored there; without it, all comes as NumPy arrays."
            raise MismatchError(error.message, differences=error.differences, hint=hint) from None
        found = manager.checkpoint.objects
        return found[_TREE] if is_tree else {name: found[name] for name in wanted}


def _look(storage: Storage, asked: Asked = None) -> tuple[int | None, list[str]]:
    """**Blocks.** Returns the step that was asked for, or the newest one, and the names of its objects in order."""
    run = StoredRun(storage)
    if not (catalog := run.look()).living:
        return None, []
    name = find_step(run, catalog, asked)
    return name.step, list_objects(storage, name)
