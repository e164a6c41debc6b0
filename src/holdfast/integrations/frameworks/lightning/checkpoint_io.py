"""`HoldfastCheckpointIO`: writes the checkpoints of `ModelCheckpoint` in the background, and checks what it reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from holdfast.checkpoint import Checkpoint
from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.integrations.frameworks.fit import walk_callers
from holdfast.integrations.frameworks.lightning.state import KeptTree
from holdfast.manager import CheckpointManager
from holdfast.policies import Latest
from holdfast.storage import Storage, open_storage

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_MANIFEST = "manifest.json"
_OF_SLURM = "hpc_ckpt_"
"""The beginning of the name of a checkpoint after which Lightning ends the job."""

_saving: dict[str, Future[None]] = {}
"""By the location of a checkpoint: its save in the background, of any plug-in of this process."""


class HoldfastCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints durably in the background, and checks every byte that it reads.

    Example:
        ```python
        plugin = holdfast.lightning.HoldfastCheckpointIO()
        trainer = Trainer(plugins=[plugin], callbacks=[ModelCheckpoint(save_top_k=3)])
        trainer.fit(model, ckpt_path="last")
        ```

    Each checkpoint is a directory instead of a file, and exists when a save returns. It is durable then, too, except
    during a fit: there it is written while training continues. `ckpt_path=` reads it, and ordinary `.ckpt` files as
    before; it waits for a save of this process. A checkpoint that `ModelCheckpoint` gives up is removed once the one
    saved before that is durable. An error in the background is raised at the next save, or when the fit ends. Nothing
    in a checkpoint is executed: hyperparameters that are not plain values are left out, with a line in Lightning's log.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copies the checkpoint and returns; it is written in the background. **Blocks** until it is durable outside of
        a fit, and for the checkpoint with which Lightning leaves a job of Slurm.

        Raises:
            UsageError: If there are storage options.
            HoldfastError: If an earlier save has failed, or outside of a fit this one.
            UnsupportedValueError: If a value cannot be stored; the error has its path.
        """
        if storage_options is not None:
            raise UsageError("HoldfastCheckpointIO does not support storage_options", hint="Leave them out.")
        self._wait()  # One save at a time: the next one has the memory of this one.
        storage = open_storage(path)
        root = storage.location
        replaced = None if root is None else root.with_name(root.name + ".replaced")
        if root is not None and replaced is not None and (root.is_symlink() or root.is_file()):
            # An ordinary checkpoint, or a link to another one. It goes when the new one is durable.
            root.replace(replaced)
        manager = _open(storage, KeptTree(lambda: checkpoint))
        try:
            newest = max(manager.steps(), default=-1)
            step = checkpoint.get("global_step", newest + 1)
            # Where a fit that began anew overwrites a later checkpoint, the number still grows by one.
            step = step if step >= newest else newest + 1
            while True:
                try:
                    manager.save(step, replace=step == newest)
                    break
                except UnsupportedValueError as error:
                    checkpoint = _leave_out(checkpoint, error)
            storage.make_directory("")  # `ModelCheckpoint` finds free names by what exists.
        except BaseException:
            manager.abandon()
            raise
        _saving[_locate(storage)] = self._submit(manager.close)
        if replaced is not None and os.path.lexists(replaced):
            self._submit(lambda: _remove(replaced))
        # A Trainer that calls this during a fit calls `teardown` later, and shows errors there. No one passes it.
        trainer = next((each["self"] for each in walk_callers(Trainer.save_checkpoint)), None)
        is_in_fit = trainer is not None and trainer.training and trainer.state.status == TrainerStatus.RUNNING
        if not is_in_fit or _locate(storage).rpartition("/")[2].startswith(_OF_SLURM):
            self._wait()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """**Blocks.** Reads a checkpoint and checks every byte of it; a file is read as Lightning would.

        Raises:
            FileNotFoundError: If there is no whole checkpoint.
            HoldfastError: If it is damaged.
        """
        self._wait()
        storage = open_storage(path)
        if (save := _saving.get(_locate(storage))) is not None:
            wait([save])  # Of another plug-in, to which it raises its error.
        root = storage.location
        if root is not None and root.is_file():
            return dict(super().load_checkpoint(root, map_location, weights_only))
        tree = KeptTree(dict)
        restored = None
        if root is None or root.is_dir():
            with _open(storage, tree) as manager:
                restored = manager.restore()
        if restored is None:
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = tree.loaded
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint in the background, once all earlier saves are durable; not if one has failed."""
        self._submit(lambda: _remove(path))

    def teardown(self) -> None:
        """**Blocks.** Waits for the saves in progress.

        Raises:
            HoldfastError: If one has failed.
        """
        thread, self._thread = self._thread, None
        try:
            self._wait()
        finally:
            if thread is not None:
                thread.shutdown()

    def _submit(self, task: Callable[[], object]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-lightning")
        before = list(self._tasks)

        def run() -> None:
            # What comes after a failed save is not done: the checkpoint that would be removed may be the last one.
            if not any(each.exception() for each in before):
                task()

        self._tasks.append(self._thread.submit(run))
        return self._tasks[-1]

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def __getstate__(self) -> dict[str, Any]:
        return {"_thread": None, "_tasks": []}


def _locate(storage: Storage) -> str:
    """Returns the location of a checkpoint, the same one if it is reached by a link."""
    return storage.url if storage.location is None else os.path.realpath(storage.url)


def _open(storage: Storage, tree: KeptTree) -> CheckpointManager:
    # Only rank 0 saves, with any strategy of Lightning.
    return CheckpointManager(storage, Checkpoint(checkpoint=tree), keep=Latest(1), cluster="alone", reuse_space=False)


def _leave_out(checkpoint: dict[str, Any], error: UnsupportedValueError) -> dict[str, Any]:
    """Returns the checkpoint without the hyperparameter that cannot be stored.

    Raises:
        UnsupportedValueError: If something else cannot be stored.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    parts = str(error.path).split("/")
    for key in _HYPERPARAMETERS:
        if key in parts[:-1] and (name := parts[parts.index(key) + 1]) in checkpoint.get(key, {}):
            rank_zero_warn(f"the hyperparameter {name!r} is not a plain value and is not saved")
            return {**checkpoint, key: {each: value for each, value in checkpoint[key].items() if each != name}}
    raise error


def _remove(path: str | os.PathLike[str]) -> None:
    """Removes the manifests first, so the remains of an interrupted removal are not a checkpoint.

    A link is removed, never what it leads to: `ModelCheckpoint(save_last="link")` makes one to another checkpoint.
    """
    storage = open_storage(path)
    root = storage.location
    if root is not None and (root.is_symlink() or not root.is_dir()):
        root.unlink(missing_ok=True)
        return
    for entry in storage.list(""):
        if entry.is_directory:
            storage.delete([f"{entry.name}/{_MANIFEST}"])
    _empty(storage, "")
    if root is not None:
        root.rmdir()


def _empty(storage: Storage, directory: str) -> None:
    entries = {f"{directory}/{entry.name}".lstrip("/"): entry for entry in storage.list(directory)}
    for path, entry in entries.items():
        if entry.is_directory:
            _empty(storage, path)
    storage.delete(entries)
