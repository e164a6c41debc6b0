"""`Resumable`: a callback that makes `trainer.fit` continue where the last process stopped."""

from __future__ import annotations

from typing import Any, Final, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from holdfast.errors import UsageError
from holdfast.integrations.frameworks.fit import Directory, check_single, split_options
from holdfast.integrations.frameworks.lightning.fit import LightningFit
from holdfast.policies import RetentionPolicy, SavePolicy
from holdfast.tracebacks import short_traceback
from holdfast.training.run import Run

_STRATEGIES: Final = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
_CHANGING: Final[dict[type, tuple[str, str]]] = {
    StochasticWeightAveraging: (
        "changes the scheduler during training",
        "Average the weights with EMAWeightAveraging or WeightAveraging, which Lightning has since 2.6.",
    ),
    ModelPruning: (
        "gives the model other parameters during training",
        "Set what is pruned to zero in a hook of the module's own, and keep the mask as a buffer.",
    ),
    BaseFinetuning: (
        "adds groups of parameters to the optimizer during training",
        "Give the optimizer all parameters at first, and set requires_grad by trainer.current_epoch.",
    ),
}
"""Callbacks after which a new process has another model, optimizer or scheduler than the checkpoint."""


@short_traceback
class Resumable(Callback):
    """Saves a fit in the background, and continues it where the last process stopped, even in the middle of an epoch.

    Example:
        ```python
        keep = holdfast.Latest(3) | holdfast.Best("val_loss")
        resumable = holdfast.lightning.Resumable("runs/a", save_every=holdfast.Steps(500), keep=keep)
        trainer = Trainer(max_epochs=10, callbacks=[resumable])
        trainer.fit(model)
        ```

    It saves the model, optimizers, schedulers, precision plugin, callbacks, progress of all loops, logged metrics,
    torchmetrics, random generators and the position in the data. A step is one that `trainer.global_step` counts; with
    manual optimization, a step is one batch. It handles preemption notices like `holdfast.resumable`, instead of
    Lightning's own signal handling, and exits with the same codes.

    It supports the single-device strategy, DDP and `ModelParallelStrategy`.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        save_every: SavePolicy | int | str | None = None,
        keep: RetentionPolicy | int | str | None = None,
        strict: bool = True,
        preemption: Literal["auto", "off"] | Any = "auto",
        **options: Any,
    ) -> None:
        """Checks the arguments. Nothing is read or written before `fit`.

        Args:
            directory: The run's directory, a URL, or an open storage.
            save_every: When to save: a policy, a number of steps such as 500, or text such as "10min" or "1 epoch";
                None for `Auto()`, which measures the cost of a save.
            keep: Which checkpoints to keep: a policy, or how many of the newest; None for `Latest(3)`. `Best` compares
                the metrics that validation logs.
            strict: False to restore everything that fits, if the model has changed since the save.
            preemption: How to notice a preemption: "auto", "off", or a `TerminationConfig`.
            **options: Other options of `holdfast.resumable`. `on_resize` is "refuse" here.

        Raises:
            UsageError: If an argument is wrong.
        """
        super().__init__()
        given = {"save_every": save_every, "keep": keep, "strict": strict, "preemption": preemption}
        self._settings = split_options(directory, {**given, "on_resize": "refuse", **options})
        for name in self._settings.others:
            raise UsageError(
                f"{name} is not an option of Resumable",
                hint="It takes the directory and the options of holdfast.resumable.",
            )
        self._fit: LightningFit | None = None

    def __repr__(self) -> str:
        return f"<Resumable in {self._settings.directory!r}>"

    @property
    def run(self) -> Run | None:
        """The run while a fit is in progress; None before and after. Its `report` adds metrics to the next save."""
        return None if self._fit is None else self._fit.run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called by Lightning. Checks that the fit can be saved.

        Raises:
            UsageError: If it cannot.
        """
        if stage != "fit":
            return
        _check_trainer(trainer)
        if trainer.fast_dev_run:
            return
        if self._fit is not None:
            self._fit.replaced.undo()
        self._fit = LightningFit(trainer, self._settings)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called by Lightning."""
        if self._fit is not None:
            self._fit.see_loss(outputs)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called by Lightning. Exits if the job was asked to stop.

        Raises:
            SystemExit: When the job exits.
        """
        if self._fit is not None:
            self._fit.begin_validation_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by Lightning."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.has_validated = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called by Lightning when a fit has succeeded."""
        if stage == "fit":
            self._end(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called by Lightning, also when the job exits after a notice."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fit": None}


def _check_trainer(trainer: Any) -> None:
    """Checks that a fit of this trainer can be saved.

    Raises:
        UsageError: If it cannot.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"Resumable needs a lightning.pytorch.Trainer, got one of {type(trainer).__module__}",
            hint="Import Trainer and LightningModule from lightning.pytorch; pytorch_lightning is a different package.",
        )
    strategy = trainer.strategy
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if not isinstance(strategy, _STRATEGIES) or any("XLA" in kind for kind in kinds):
        raise UsageError(
            f"Resumable does not support {type(strategy).__name__}",
            hint='Use one device, strategy="ddp", or ModelParallelStrategy with fully_shard.',
        )
    check_single(Resumable, trainer.callbacks, "a Trainer")
    for kind, (reason, hint) in _CHANGING.items():
        for callback in trainer.callbacks:
            if isinstance(callback, kind):
                raise UsageError(f"Resumable does not support {type(callback).__name__}, which {reason}", hint=hint)
