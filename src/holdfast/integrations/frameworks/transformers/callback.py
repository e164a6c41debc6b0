"""`Resumable`: makes the Hugging Face Trainer continue where the last process stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module

from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.integrations.frameworks.accelerate.loop import check_strategy
from holdfast.integrations.frameworks.fit import Directory, check_single, split_options, walk_callers
from holdfast.integrations.frameworks.transformers.fit import BeginAgain, TrainerFit, find_start
from holdfast.policies import RetentionPolicy, SavePolicy


class Resumable(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves a `Trainer` in the background, and makes `trainer.train()` continue where the last process stopped.

    Example:
        ```python
        trainer = Trainer(
            model,
            TrainingArguments("out", save_strategy="no"),
            train_dataset=dataset,
            callbacks=[holdfast.transformers.Resumable("runs/a", save_every=holdfast.Steps(500))],
        )
        trainer.train()
        ```

    A step is one of the Trainer's: `state.global_step`. Metrics that `trainer.log` reports are stored with the
    checkpoint, for `holdfast.Best("eval_loss")`. Your own objects are saved by name, as in `holdfast.resumable`:
    `Resumable("runs/a", average=average)`; and so are callbacks that have `state_dict` and `load_state_dict`, and
    modules with parameters that the optimizer trains beside the model's, as `trained_0`. Other modules that the
    Trainer or a callback has as attributes are saved once they change, as `moved_ref_model`.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        save_every: SavePolicy | int | str | None = None,
        keep: RetentionPolicy | int | str | None = None,
        **options: Any,
    ) -> None:
        """Stores the settings; nothing is read before `trainer.train()`.

        Args:
            directory: The run's directory, a URL, or an open storage.
            save_every: When to save: a policy, a number of steps such as 500, or text such as "10min" or "1 epoch";
                None for `holdfast.Auto()`, which measures the cost of a save.
            keep: Which checkpoints to keep: a policy, or how many of the newest; None for `holdfast.Latest(3)`.
            **options: Other options of `holdfast.resumable`, and further objects to save. `on_resize` is "refuse" here.

        Raises:
            UsageError: If an argument is wrong.
        """
        given = {"save_every": save_every, "keep": keep, "on_resize": "refuse", **options}
        self._settings = split_options(directory, given)
        self._trainer: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finds the Trainer that is being created.

        Raises:
            UnsupportedValueError: If it trains in a way that cannot be saved.
            UsageError: If its arguments contradict this callback.
        """
        trainer = self._trainer = _find_trainer(self)
        _check_trainer(trainer)
        begin = trainer._inner_training_loop
        is_used = False

        def train(*positional: Any, **named: Any) -> Any:
            nonlocal is_used
            if is_used:
                trainer_module.logger.warning(
                    "holdfast: this is the second train() in this process; holdfast does not save it"
                )
                return begin(*positional, **named)
            result = self._train(begin, *positional, **named)
            is_used = True
            return result

        trainer._inner_training_loop = train

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuses a callback that was added to a Trainer that already existed.

        Raises:
            UsageError: If it was.
        """
        if self._trainer is None:
            raise UsageError(
                "holdfast.transformers.Resumable was added after the Trainer was created",
                hint="Write Trainer(..., callbacks=[holdfast.transformers.Resumable(...)]).",
            )

    def _train(self, begin: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        given = named.pop("resume_from_checkpoint", None)
        again: BeginAgain | None = None
        while True:
            start = find_start(self._trainer, self._settings, again)
            with TrainerFit(self._trainer, self._settings, start) as fit:
                try:
                    return begin(*positional, resume_from_checkpoint=fit.prepare(given), **named)
                except BeginAgain as found:
                    again = found


def _find_trainer(callback: TrainerCallback) -> Any:
    """Returns the Trainer that is calling its callbacks. It is not passed to them, so the callers' frames have it."""
    for variables in walk_callers():
        found = variables.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
    raise UsageError(
        "holdfast.transformers.Resumable cannot find its Trainer",
        hint="Write Trainer(..., callbacks=[Resumable(...)]).",
    )


def _check_trainer(trainer: Any) -> None:
    """Checks that the Trainer trains in a way that can be saved."""
    args = trainer.args
    check_single(Resumable, trainer.callback_handler.callbacks, "a Trainer")
    check_strategy(trainer.accelerator)
    if getattr(trainer, "is_fsdp_xla_enabled", False) or args.parallel_mode.value in (
        "tpu",
        "sagemaker_model_parallel",
    ):
        raise UnsupportedValueError(
            f"training with parallel mode {args.parallel_mode.value} cannot be saved",
            path="trainer",
            hint="Use one process, or DDP.",
        )
    if args.auto_find_batch_size:
        raise UsageError(
            "auto_find_batch_size=True restarts the training with another batch size, so step numbers have no meaning",
            hint="Find the batch size once, and set it.",
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise UsageError(
            "enable_jit_checkpoint=True also handles SIGTERM, and saves in its own way",
            hint="Remove it: Resumable handles SIGTERM, saves and exits.",
        )
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.load_best_model_at_end:
        trainer_module.logger.warning(
            f"holdfast: the Trainer saves as well, to {args.output_dir}, and blocks training meanwhile "
            f'(save_strategy="{getattr(args.save_strategy, "value", args.save_strategy)}"). Set '
            'save_strategy="no" to save with Resumable alone'
        )
