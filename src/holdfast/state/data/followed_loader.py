"""One loader of `run.batches`, and the progress of training in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class LoaderPlace(Protocol):
    """The progress of training in one loader.

    Attributes:
        caveat: What a restart has to do, or cannot; empty if there is no such thing.
        remark: What a restore has found changed since the save; empty if nothing has.
        resumes: True if the next pass begins at the restored batch.
        lookahead: How many of the batches that were taken are not trained yet.
    """

    caveat: str
    remark: str
    resumes: bool
    lookahead: int

    def start(self) -> Iterator[Any]:
        """Begins a pass, or continues in the restored one."""

    def forget(self) -> None:
        """Leaves the pass in progress: the next one is whole."""

    def outline(self) -> Mapping[str, Any]:
        """Returns `taken`, the batches of this pass that were trained, and `total`; None if that is not known."""

    def describe(self) -> Any:
        """Returns what decides which batches come, as a row of plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the place as plain values; `begin` is None if no pass is in progress."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores the place for the next pass that begins."""


class FollowedLoader:
    """A loader that is followed.

    Attributes:
        loader: The loader.
        place: The progress in its pass.
        facts: What it is recognized by after a restart.
        passes: How many of its passes are over: in this epoch, or outside of epochs since the beginning.
        spent: How many of these a restored epoch has still to repeat, without a batch.
        taken: The batches that were taken in this process.
        done: Those of its pass in progress, including those before a restart.
        total: How many a pass has; None if that is not known.
        used: The last epoch in which it was used, -1 for none; and as which of its loaders.
        trains: True if a step was counted in one of its passes. Others only evaluate.
        current: Its pass in progress; None for none.
        is_left: True if the program has left the pass by `break`.
        is_remade: True if the program creates it again for each epoch.
        lead: How many batches its loop takes before the step that trains them begins.
        ahead: These batches, of the step to come.
    """

    def __init__(self, loader: Any, place: LoaderPlace) -> None:
        kinds = [getattr(one, "__name__", type(one).__name__) for one in (loader, getattr(loader, "dataset", None))]
        self.loader, self.place = loader, place
        self.facts = [*(kind.removeprefix("Followed") for kind in kinds), *place.describe()]
        self.passes = self.spent = self.taken = self.done = self.lead = 0
        self.total: int | None = None
        self.used = (-1, 0)
        self.trains = self.is_left = self.is_remade = False
        self.current: Any = None
        self.ahead: deque[Any] = deque()

    def is_at_end(self, *, is_between: bool) -> bool:
        """Returns True if the last batch of the pass is taken, those of a step to come left out."""
        return self.done - (self.lead if is_between else 0) == self.total

    def read(self, *, is_within: bool, is_over: bool, is_between: bool) -> dict[str, Any]:
        """Returns the state to store: of the middle of a pass, or else of the next epoch if the present one is over."""
        lookahead, self.place.lookahead = self.place.lookahead, self.lead if is_between else 0
        try:
            state = self.place.state_dict()
        finally:
            self.place.lookahead = lookahead
        passes = 0 if is_over else self.passes + (self.is_left and not is_within)
        place = state if is_within else None if self.is_remade else {**state, "begin": None}
        kept = {"facts": self.facts, "passes": passes, "trains": self.trains, "within": is_within, "place": place}
        ended = is_within and self.is_at_end(is_between=is_between)
        return {**kept, "ended": ended, "outside": self.is_outside}

    @property
    def is_outside(self) -> bool:
        """True if it is used outside of epochs now, or was never used in one."""
        return self.used[0] < 0 or isinstance(self.current, Iterator)

    def load(self, state: Mapping[str, Any], *, is_in_epochs: bool) -> None:
        """Continues at a stored state."""
        self.passes, self.trains = state["passes"], state["trains"]
        self.total = self.place.outline()["total"]
        self.spent = self.passes if is_in_epochs else 0
        if state["place"] is not None:
            self.place.load_state_dict(state["place"])
        self.done = self.place.outline()["taken"] if self.place.resumes else 0

    def begin_pass(self, number: int) -> None:
        """Called before a pass of the epoch of that number begins."""
        batches = getattr(self.loader, "batch_sampler", None)
        parts = [getattr(self.loader, name, None) for name in ("sampler", "dataset")]
        for part in {
            id(one): one for one in (self.loader, batches, getattr(batches, "sampler", None), *parts)
        }.values():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(number)
        outline = self.place.outline()
        self.done, self.total = outline["taken"] if self.place.resumes else 0, outline["total"]

    def end_pass(self) -> None:
        """Called when a pass is over."""
        self.passes += 1
        self.drop_pass()

    def drop_pass(self) -> None:
        """Forgets the pass in progress."""
        self.current, self.is_left, self.done = None, False, 0
        self.place.forget()
