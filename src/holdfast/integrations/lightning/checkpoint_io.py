"""`HoldfastCheckpointIO`: writes the checkpoints of `ModelCheckpoint` in the background, and checks what it reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from holdfast.checkpoint import Checkpoint
from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.integrations.lightning.trees import KeptTree
from holdfast.manager import CheckpointManager
from holdfast.policies import Latest
from holdfast.storage import open_storage

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_MANIFEST = "manifest.json"


class HoldfastCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints durably in the background, and checks every byte that it reads.

    Example:
        ```python
        trainer = Trainer(plugins=[hf.lightning.HoldfastCheckpointIO()], callbacks=[ModelCheckpoint(save_top_k=3)])
        trainer.fit(model, ckpt_path="last")
        ```

    Each checkpoint is a directory instead of a file. `ckpt_path=` reads it, and ordinary `.ckpt` files as before. A
    checkpoint that `ModelCheckpoint` gives up is removed once the one saved before that is durable. An error in the
    background is raised at the next save, or when the fit ends. Nothing in a checkpoint is executed: hyperparameters
    that are not plain values are left out, with a line in Lightning's log.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copies the checkpoint and returns; it is written in the background.

        Raises:
            UsageError: If there are storage options, or `path` is a file.
            HoldfastError: If an earlier save has failed.
            UnsupportedValueError: If a value cannot be stored; the error has its path.
        """
        if storage_options is not None:
            raise UsageError("HoldfastCheckpointIO does not support storage_options", hint="Leave them out.")
        self._wait()  # One save at a time: the next one has the memory of this one.
        replaced = Path(path).with_name(Path(path).name + ".replaced")
        if Path(path).is_symlink() or Path(path).is_file():
            # An ordinary checkpoint, or a link to another one. It goes when the new one is durable.
            Path(path).replace(replaced)
        manager = _open(path, KeptTree(lambda: checkpoint))
        try:
            step = max(manager.steps(), default=-1) + 1
            while True:
                try:
                    manager.save(step)
                    break
                except UnsupportedValueError as error:
                    checkpoint = _leave_out(checkpoint, error)
        except BaseException:
            manager.abandon()
            raise
        self._submit(manager.close)
        if os.path.lexists(replaced):
            self._submit(lambda: _remove(replaced))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """**Blocks.** Reads a checkpoint and checks every byte of it; a file is read as Lightning would.

        Raises:
            FileNotFoundError: If there is no whole checkpoint.
            HoldfastError: If it is damaged.
        """
        self._wait()
        if Path(path).is_file():
            plain: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return plain
        tree = KeptTree(dict)
        restored = None
        if Path(path).is_dir():
            with _open(path, tree) as manager:
                restored = manager.restore()
        if restored is None:
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = tree.loaded
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint in the background, once all earlier saves are durable; not if one has failed."""
        self._submit(lambda: _remove(Path(path)))

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

    def _submit(self, task: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-lightning")
        before = list(self._tasks)

        def run() -> None:
            # What comes after a failed save is not done: the checkpoint that would be removed may be the last one.
            if not any(each.exception() for each in before):
                task()

        self._tasks.append(self._thread.submit(run))

    def _wait(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def __getstate__(self) -> dict[str, Any]:
        return {"_thread": None, "_tasks": []}


def _open(path: str | os.PathLike[str], tree: KeptTree) -> CheckpointManager:
    # Only rank 0 saves, with any strategy of Lightning.
    return CheckpointManager(path, Checkpoint(checkpoint=tree), keep=Latest(1), cluster="alone", reuse_space=False)


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


def _remove(path: Path) -> None:
    """Removes the manifests first, so the remains of an interrupted removal are not a checkpoint.

    A link is removed, never what it leads to: `ModelCheckpoint(save_last="link")` makes one to another checkpoint.
    """
    if path.is_dir() and not path.is_symlink():
        storage = open_storage(path)
        for entry in storage.list(""):
            if entry.is_directory:
                storage.remove(f"{entry.name}/{_MANIFEST}")
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
