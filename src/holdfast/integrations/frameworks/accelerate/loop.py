"""A run that saves everything that an `Accelerator` has prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

import holdfast.training.resumable
from holdfast.checkpoint import Checkpoint
from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.events import Warned
from holdfast.integrations.frameworks.fit import Directory, Replaced, split_options
from holdfast.integrations.torch.module_walks import find_trained_beside
from holdfast.integrations.torch.places import DataPlace
from holdfast.state import RNG, PerWorker
from holdfast.training.run import Run

_SUPPORTED: Final = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP"}
_OTHER_DIVISIONS: Final = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
"""The ways besides `dp_shard_size` in which a `ParallelismConfig` may split the job."""

_SKIPPED: Final = (
    "the checkpoint is in the middle of one loader's epoch, and the loop began with a batch of another loader: the "
    "rest of that epoch is not trained. If an epoch trains on several loaders one after the other, begin at the "
    "`iteration` of the last one, and take only the loaders whose `iteration` is that epoch"
)

_FILLED: Final = (
    "with dispatch_batches, accelerate fills the last batch of an epoch with samples of the first batch, and after a "
    "restart in that epoch with samples of the first batch since then. Pass drop_last=True to the loader"
)


def resumable(accelerator: Any, directory: Directory, **options: Any) -> Run:
    """Creates a run, like `holdfast.resumable`, that saves everything the accelerator has prepared.

    Call it after everything is prepared, and call `run.finish_step()` at the end of each batch: it counts a step when
    the gradients are synchronized, so not while `accelerator.accumulate` accumulates them. A prepared loader gives the
    rest of its epoch; `loader.iteration`, accelerate's own counter, is the epoch in which training resumes.

    Example:
        ```python
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with holdfast.accelerate.resumable(accelerator, "runs/a", save_every=holdfast.Steps(500)) as run:
            for epoch in range(loader.iteration, epochs):
                for batch in loader:
                    train_step(batch)
                    run.finish_step()
        ```

    Args:
        accelerator: The accelerator that prepared models, optimizers, schedulers and loaders.
        directory: The run's directory, a URL, or an open storage.
        **options: Options of `holdfast.resumable`, and further objects to save, by name.

    Raises:
        UnsupportedValueError: If the accelerator splits the job in a way that cannot be saved, as DeepSpeed does.
        UsageError: If an argument is wrong, or nothing is prepared.
    """
    check_strategy(accelerator)
    kept, places = _list_objects(accelerator), _follow_loaders(accelerator)
    if not kept:
        raise UsageError(
            "the accelerator has not prepared anything yet", hint="Call accelerator.prepare(...) before resumable(...)."
        )
    settings = split_options(directory, {"on_resize": "refuse", **options}, kept)
    kept |= settings.others
    # Such as a loss with parameters, which is seldom prepared.
    kept |= find_trained_beside(accelerator._optimizers, kept.values())
    progress = _Progress(accelerator, places)
    kept["accelerator"] = PerWorker(progress)
    kept["rng"] = RNG()
    run = holdfast.training.resumable.resumable(directory, Checkpoint(**kept), **settings.options)
    run.manager.lineage.restored_by = "holdfast.accelerate.resumable(...)"
    run.completes_step = lambda: progress.end_batch(run)
    run.go_on_by_restart(progress.hold_place)
    if places:
        count = lambda: places[0].source.iteration + bool(places[0].outline().get("ended"))  # noqa: E731
        run.manager.lineage.count_epochs = count
        run.manager.follow_epochs(count)
    for place in places:
        # The loop goes on where it was by the loader: it need not ask for the step.
        place.on_resume = lambda: progress.begin_where_it_was(run)
        number = places.index(place)
        facts = lambda place=place: (accelerator.gradient_accumulation_steps, place.describe())  # noqa: E731
        run.manager.witness.follow(f"prepared loader {number}", place.follow_batches, facts)
    _see_losses(accelerator, run)
    for text in {place.caveat for place in places if place.caveat}:
        run.manager.emit(Warned(text=text))
    return run


def _see_losses(accelerator: Any, run: Run) -> None:
    replaced: Replaced = vars(accelerator).setdefault("_replaced_by_holdfast", Replaced())
    replaced.undo()  # By a run before this one.

    def backward(original: Callable[..., None], loss: Any, **options: Any) -> None:
        run.manager.witness.note_loss(loss)
        original(loss, **options)

    replaced.method(accelerator, "backward", backward)


def check_strategy(accelerator: Any) -> None:
    """Checks that the job is split in a way that can be saved.

    Raises:
        UnsupportedValueError: If it is not.
    """
    kind = accelerator.distributed_type
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == DistributedType.FSDP and getattr(plugin, "fsdp_version", 1) != 2:
        raise UnsupportedValueError(
            "FSDP1 cannot be saved: each worker holds a flat piece of the parameters",
            path="accelerator",
            hint="Use fsdp_version=2: its shards record where they belong.",
        )
    if kind.name not in _SUPPORTED:
        raise UnsupportedValueError(
            f"training with accelerate's {kind.name} cannot be saved",
            path="accelerator",
            hint="Use one process, several with DDP, or FSDP with fsdp_version=2; or that framework's own checkpoints.",
        )
    config = getattr(accelerator, "parallelism_config", None)
    divisions = {name: getattr(config, name, None) or 1 for name in _OTHER_DIVISIONS}
    if found := ", ".join(f"{name}={size}" for name, size in divisions.items() if size > 1):
        raise UnsupportedValueError(
            f"a parallelism_config with {found} splits the model in a way that cannot be saved",
            path="accelerator",
            hint="Use DDP, or FSDP with fsdp_version=2 and dp_shard_size alone; or that framework's own checkpoints.",
        )


def follow(loader: Any) -> DataPlace:
    """Follows the position of a loader, which accelerate may have prepared.

    Raises:
        UsageError: If it is not a torch loader, or iterates in its own way.
    """
    inner = getattr(loader, "base_dataloader", loader)
    place: DataPlace | None = getattr(inner, "__dict__", {}).get("_place")
    if place is not None:
        return place
    if not hasattr(inner, "worker_init_fn"):
        raise UsageError(
            f"{type(loader).__name__} is not a torch DataLoader, so its position in the data cannot be saved",
            hint="Pass a plain DataLoader(dataset, shuffle=True); it needs nothing else to be resumable.",
        )
    if inner is loader:
        return DataPlace(loader)
    # What accelerate prepares says that it is of torch's class.
    if issubclass(type(loader), DataLoaderDispatcher):
        lookahead = 1 if loader.split_batches else loader.state.num_processes
        followed = type("FollowedDispatcher", (_FollowedDispatcher, type(loader)), {})
        # It says that it is of torch's class, and can be given no other in the usual way.
        vars(object)["__class__"].__set__(loader, followed)
        place = DataPlace(inner, loader, lookahead, is_dispatched=True)
        cut, size = inner.batch_sampler, getattr(inner.batch_sampler, "batch_size", None)
        if size is not None and not getattr(cut, "drop_last", False) and hasattr(inner.dataset, "__len__"):
            is_filled = len(inner.dataset) % (size * lookahead) % loader.state.num_processes
            place.caveat = _FILLED if is_filled else place.caveat
        return place
    return DataPlace(inner, loader, 1)


class _FollowedDispatcher:
    """A dispatcher that gives nothing when its epoch has no batch left, instead of raising an error."""

    base_dataloader: Any

    def __iter__(self) -> Iterator[Any]:
        place: DataPlace = self.base_dataloader._place
        return iter(()) if place.try_pass() else super().__iter__()  # type: ignore[misc]


def unwrap(obj: Any) -> Any:
    """Returns the optimizer or scheduler inside accelerate's wrapper; or the object, if it has no wrapper."""
    if isinstance(obj, AcceleratedOptimizer):
        return obj.optimizer
    return obj.scheduler if isinstance(obj, AcceleratedScheduler) else obj


def _follow_loaders(accelerator: Any) -> list[DataPlace]:
    return [follow(loader) for loader in accelerator._dataloaders]


def _list_objects(accelerator: Any) -> dict[str, Any]:
    """Returns what is prepared and registered, by names that are the same in the next process."""
    groups = {
        "model": accelerator._models,
        "optimizer": [unwrap(each) for each in accelerator._optimizers],
        "scheduler": [unwrap(each) for each in accelerator._schedulers],
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        "registered": accelerator._custom_objects,
    }
    return {
        name if number == 0 else f"{name}_{number}": obj
        for name, group in groups.items()
        for number, obj in enumerate(group)
    }


class _Progress:
    """The progress of the accelerator's accumulation, and the positions of its loaders."""

    def __init__(self, accelerator: Any, places: list[DataPlace]) -> None:
        self._accelerator, self._places = accelerator, places
        self._is_restored = False
        self._held: dict[str, Any] | None = None

    def hold_place(self) -> Callable[[], object]:
        """See `Run.go_on_by_restart`."""
        now = self.state_dict()

        def hold() -> None:
            self._held = now

        return hold

    def begin_where_it_was(self, run: Run) -> None:
        """Called when the loop takes the rest of a loader's epoch."""
        self._is_restored = False
        for text in {place.remark for place in self._places if place.remark}:
            run.warn(text)
        for place in self._places:
            place.remark = ""

    def end_batch(self, run: Run) -> bool:
        """Called when a batch is trained. Returns True if a step ends with it."""
        for place in self._places:
            place.forget_left()
        if self._is_restored:
            self._is_restored = False
            if any(place.resumes for place in self._places):
                run.warn(_SKIPPED, is_error=True)
        return bool(self._accelerator.sync_gradients)

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return self._held
        accelerator = self._accelerator
        places = [place.state_dict() for place in self._places]
        return {"step": accelerator.step, "accumulated": accelerator.gradient_accumulation_steps, "places": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A save is at the end of an accumulation: with another number of batches the next one begins at 0.
        present = self._accelerator.gradient_accumulation_steps
        self._accelerator.step = state["step"] if state.get("accumulated", present) == present else 0
        self._is_restored = True
        for place, stored in zip(self._places, state["places"], strict=True):
            place.load_state_dict(stored)
