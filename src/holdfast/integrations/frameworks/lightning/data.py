"""The data of one fit of Lightning: the loaders that the program makes, the position in each, and their generators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from torch.utils.data import DataLoader

from holdfast.errors import UsageError
from holdfast.integrations.torch.draws import (
    has_state,
    note_parts,
    read_generators,
    read_parts,
    write_generators,
    write_parts,
)
from holdfast.integrations.torch.loader import describe_loader
from holdfast.integrations.torch.places import DataPlace
from holdfast.state.data.sampler import ResumableSampler

OF_DATA: Final = ("loaders", "made_with", "ahead", "reloaded_at", "validation_reloaded_at", "validation")
"""The names in what `FitData.read` returns."""


class FitData:
    """The loaders of one fit, and how far training is in each."""

    def __init__(self, trainer: Any, warn: Callable[[str], None]) -> None:
        self._trainer, self._warn = trainer, warn
        self._see: Callable[[Any], None] | None = None
        self._places: list[DataPlace | None] = []
        # The generators before the program made its loaders: of those in use, and of those that it is to make again.
        self._made_with: dict[str, Any] = {}
        self._to_make_with: dict[str, Any] = {}

    def follow_program(self, replace: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Replaces the methods by which the program makes its loaders, and by which batches come to the model."""
        loop, validation = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        replace(self._trainer.precision_plugin, "convert_input", self._see_batch)
        replace(validation, "setup_data", self._note_validation)
        replace(loop._data_source, "dataloader", partial(self._make_loaders, "training"))
        replace(validation._data_source, "dataloader", partial(self._make_loaders, "validation"))

    def restore(self, made_with: dict[str, Any]) -> None:
        """Has the program make its loaders with the random draws of the process before."""
        self._made_with, self._to_make_with = dict(made_with), dict(made_with)

    def follow_loaders(self, stored: list[Any] | None, *, is_in_epoch: bool) -> int | None:
        """Follows the loaders that training begins with.

        Args:
            stored: Their restored positions; None for none.
            is_in_epoch: True if these are within an epoch.

        Returns:
            How many batches of the present size are trained in the epoch, if that size has changed; else None.
        """
        combined, taken = self._trainer.fit_loop._combined_loader, None
        self.close()
        combined.flattened = [_copy_plain(loader) for loader in combined.flattened]
        if len(combined.flattened) > 1 and combined._mode == "max_size_cycle" and _has_no_length(combined):
            self._warn(
                "one of several loaders has no length, and Lightning restarts the shorter loaders until all have "
                "ended. After a restart within an epoch, that loader may give more batches than it would have. "
                "Give its dataset a __len__, or set limit_train_batches"
            )
        self._places = [self._follow(loader, combined) for loader in combined.flattened]
        for loader, place, state in zip(combined.flattened, self._places, stored or (), strict=False):
            if place is not None and state is not None:
                place.load_state_dict(state if is_in_epoch else {**state, "begin": None})
                if place.remark:
                    self._warn(place.remark)
                    taken = place.outline()["taken"]
            elif state is not None and has_state(loader):
                loader.load_state_dict(state)
        return taken

    def begin_epochs_again(self, stored: list[Any]) -> None:
        """Restores positions between two epochs once more: Lightning may have begun one to look at it."""
        for place, state in zip(self._places, stored, strict=False):
            if place is not None and state is not None:
                place.load_state_dict({**state, "begin": None})

    def close(self) -> None:
        """Ends the persistent workers of the loaders."""
        for place in self._places:
            if place is not None:
                place.close()

    def read(self, *, is_in_epoch: bool) -> dict[str, Any]:
        """Returns the positions, and all that the loaders are made with."""
        loop = self._trainer.fit_loop
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        places = [
            (place or loader).state_dict() if place or has_state(loader) else None
            for loader, place in zip(loaders, self._places, strict=False)
        ]
        ahead = getattr(loop._data_fetcher, "batches", ()) if is_in_epoch and None not in places else ()
        return {
            "loaders": places,
            "made_with": self._made_with,
            "ahead": list(ahead) if any(map(has_state, loaders)) else [],
            "reloaded_at": _write_epoch(loop._last_train_dl_reload_epoch),
            "validation_reloaded_at": _write_epoch(loop.epoch_loop.val_loop._last_val_dl_reload_epoch),
            "validation": [read_parts(loader) for loader in self._list_validation()],
        }

    def follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object]:
        """Sets a function to call with each training batch, from any loader; returns what ends that."""
        self._see = see
        return lambda: setattr(self, "_see", None)

    def describe(self) -> object:
        """Returns what decides which batches come."""
        combined = self._trainer.fit_loop._combined_loader
        return self._trainer.accumulate_grad_batches, [describe_loader(loader) for loader in combined.flattened]

    def _see_batch(self, original: Callable[[Any], Any], batch: Any) -> Any:
        if self._see is not None and self._trainer.training:
            self._see(batch)
        return original(batch)

    def _make_loaders(self, kind: str, original: Callable[[], Any]) -> Any:
        """Lets the program create its loaders; for those that a resume continues, with the same random draws."""
        present, before = read_generators(), self._to_make_with.pop(kind, None)
        self._made_with[kind] = before or present
        if before is None:
            return original()
        write_generators(before)
        try:
            return original()
        finally:
            write_generators(present)

    def _follow(self, loader: Any, combined: Any) -> DataPlace | None:
        """Returns an object that saves the position of a loader; None if the loader does so itself, or cannot."""
        if has_state(loader):
            return None
        if not isinstance(loader, DataLoader):
            self._warn(
                f"{type(loader).__name__} has no state_dict and load_state_dict, so its position cannot be saved: "
                "after a restart within an epoch, its data starts from the beginning. Use a DataLoader"
            )
            return None
        # Lightning takes a batch ahead where it does not know how many there are. If a loader has a state of its own,
        # that batch is kept.
        is_ahead = _has_no_length(combined) and not any(map(has_state, combined.flattened))
        place = DataPlace(loader, combined, int(is_ahead))
        if place.caveat:
            self._warn(place.caveat)
        return place

    def _list_validation(self) -> list[Any]:
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if combined is None else combined.flattened

    def _note_validation(self, original: Callable[[], None]) -> None:
        original()
        for loader in self._list_validation():
            note_parts(loader)

    def load_validation(self, own: dict[str, Any]) -> None:
        """Creates the validation loaders if they existed, and restores their generators and their samplers' counts."""
        if "validation" not in own["made_with"]:
            return
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
        loop._last_val_dl_reload_epoch = read_epoch(own["validation_reloaded_at"])
        for loader, states in zip(self._list_validation(), own["validation"], strict=False):
            write_parts(loader, states)


def _write_epoch(number: float) -> float | None:
    """Returns an epoch as it is stored: None for Lightning's infinity, which means none yet."""
    return None if number == float("-inf") else number


def read_epoch(stored: float | None) -> float:
    """Returns an epoch in Lightning's form."""
    return float("-inf") if stored is None else stored


def _has_no_length(combined: Any) -> bool:
    """Returns True if the number of batches of an epoch is not known before its end."""
    return sized_len(_SUPPORTED_MODES[combined._mode]["iterator"](combined.flattened, combined.limits)) is None


def _copy_plain(loader: Any) -> Any:
    """Returns a copy of a plain loader, because following changes a loader; other loaders are returned unchanged.

    Raises:
        UsageError: If its sampler counts epochs itself.
    """
    if not isinstance(loader, DataLoader) or has_state(loader):
        return loader
    if isinstance(loader.batch_sampler, ResumableSampler):
        raise UsageError(
            "a DataLoader with a ResumableSampler counts its epochs itself, and so does Lightning's Trainer",
            hint="Pass a plain DataLoader, which Resumable makes resumable, or a ResumableDataLoader.",
        )
    return copy.copy(loader)
