"""Drives the rounds of a bench."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from holdfast.bench import page_cache
from holdfast.bench.disk import DiskProbe
from holdfast.bench.figures import Measured, Series, make_series
from holdfast.bench.memory import MemoryProbe, State
from holdfast.bench.plan import TrialPlan, check_trial, plan_trial
from holdfast.bench.trial import Trial
from holdfast.storage import LocalStorage
from holdfast.storage.crew import Crew
from holdfast.storage.failures import as_storage_errors

_PILOT_BYTES: Final = (4 << 20, 32 << 20, 256 << 20)
_PILOT_SECONDS: Final = 0.1
_QUICK_REPEATS: Final = 3
_PUBLISH_REPEATS: Final = 5
_MOVES_A_ROUND: Final = 9
"""How often a round writes or reads the whole trial."""


class Watcher(Protocol):
    """Is told how far the measuring has come."""

    def expect(self, total_bytes: int) -> None:
        """How many bytes there are to move in all; told once that is known."""
        ...

    def tell(self, label: str) -> None:
        """What is being done."""
        ...

    def advance(self, moved_bytes: int) -> None:
        """**Thread-safe.** How many bytes have just been moved."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured.

    Attributes:
        size_bytes: The size of the state.
        trial_bytes: How much to save in a trial; None for as much as is quickly done.
        threads: How many threads write and read.
        rounds: How many rounds to take the medians of.
    """

    size_bytes: int
    trial_bytes: int | None
    threads: int
    rounds: int


def measure(
    directory: Path, wish: Wish, watcher: Watcher, *, available_bytes: int | None, free_bytes: int | None
) -> tuple[TrialPlan, Measured]:
    """**Blocks.** Measures what saving into a directory costs.

    Args:
        directory: An empty one; its files stay in it.
        wish: What to measure.
        watcher: Told how far it is.
        available_bytes: How much memory may still be taken; None if that is not known.
        free_bytes: How much room the disk has; None if that is not known.

    Raises:
        StorageError: If the place fails, or has too little room.
        SaveFailedError: If it fails in a save.
        UsageError: If there is too little memory.
    """
    crew = Crew(wish.threads, "holdfast-bench")
    try:
        crew.start()
        disk = DiskProbe(LocalStorage(directory), crew, watcher.advance)
        watcher.tell("a first look at the disk")
        plan = _plan(disk, wish, available_bytes, free_bytes)
        return plan, _Rounds(directory, plan.size_bytes, wish, disk, crew, watcher).run()
    finally:
        crew.close()


def _plan(disk: DiskProbe, wish: Wish, available_bytes: int | None, free_bytes: int | None) -> TrialPlan:
    """Writes a little, and then more until it can be seen how fast the disk is, to find how large a trial may be."""
    if wish.trial_bytes is not None:
        check_trial(wish.trial_bytes, available_bytes=available_bytes, free_bytes=free_bytes)
    plan = TrialPlan(wish.size_bytes)
    for pilot_bytes in _PILOT_BYTES:
        if free_bytes is not None:
            pilot_bytes = min(pilot_bytes, max(free_bytes // 2, 1))
        state = State(pilot_bytes)
        for _ in state.fill():
            pass
        rate = disk.write(state.image, pilot_bytes)
        if wish.trial_bytes is not None:
            return TrialPlan(wish.trial_bytes)
        plan = plan_trial(wish.size_bytes, rate=rate, available_bytes=available_bytes, free_bytes=free_bytes)
        if plan.limited_by != "time" or pilot_bytes / rate > _PILOT_SECONDS:
            break
    check_trial(plan.size_bytes, available_bytes=available_bytes, free_bytes=free_bytes)
    return plan


class _Rounds:
    """The rounds with one state."""

    def __init__(
        self, directory: Path, trial_bytes: int, wish: Wish, disk: DiskProbe, crew: Crew, watcher: Watcher
    ) -> None:
        self._directory = directory
        self._trial_bytes = trial_bytes
        self._wish = wish
        self._disk = disk
        self._crew = crew
        self._watcher = watcher
        # The pilot's, whose file is never too small for direct writes while there is room.
        self._is_direct = disk.is_direct
        self._samples: defaultdict[str, list[float]] = defaultdict(list)

    def run(self) -> Measured:
        rounds = self._wish.rounds
        self._watcher.expect(self._trial_bytes * (2 + rounds * _MOVES_A_ROUND))
        self._watcher.tell("filling memory")
        state = State(self._trial_bytes)
        for filled_bytes in state.fill():
            self._watcher.advance(filled_bytes)
        memory = MemoryProbe(state, self._crew)
        self._note("copy_fresh", memory.copy())
        with Trial(self._directory / "run", state.arrays(), self._wish.threads) as trial:
            self._watcher.tell("first save")
            self._note("first_stall", trial.save()[0])
            self._watcher.advance(self._trial_bytes)
            for number in range(1, rounds + 1):
                self._round(f"round {number} of {rounds}", state, memory, trial)
        return self._measured()

    def _round(self, label: str, state: State, memory: MemoryProbe, trial: Trial) -> None:
        tell = self._watcher.tell
        # Otherwise the disk would hold three times the trial.
        trial.drop_spare()
        tell(f"{label}: copying")
        for _ in range(_QUICK_REPEATS):
            self._note("copy", memory.copy())
            self._note("digest", memory.digest())
        tell(f"{label}: writing")
        self._note("write", self._disk.write(state.image, state.size_bytes, keep=True))
        rewrite = self._disk.rewrite(state.image, state.size_bytes)
        if rewrite is not None:
            self._note("rewrite", rewrite)
        else:
            self._watcher.advance(self._trial_bytes)
        for _ in range(_PUBLISH_REPEATS):
            self._note("publish", self._disk.publish())
        tell(f"{label}: saving")
        stall, durable = trial.save()
        self._note("stall", stall)
        self._note("durable_new", durable)
        self._watcher.advance(self._trial_bytes)
        if trial.has_spare:
            stall, durable = trial.save()
            self._note("stall", stall)
            self._note("durable_again", durable)
        self._watcher.advance(self._trial_bytes)
        with as_storage_errors("read", "", self._directory):
            files = trial.files
            tell(f"{label}: reading cold")
            if page_cache.drop(files):
                self._note("read_cold", self._disk.read(files[0], state.image))
                tell(f"{label}: restoring cold")
                page_cache.drop(files)
                self._note("restore_cold", trial.restore())
                self._watcher.advance(self._trial_bytes)
            else:
                self._watcher.advance(2 * self._trial_bytes)
            tell(f"{label}: reading warm")
            page_cache.fill(files, self._crew)
            self._watcher.advance(self._trial_bytes)
            self._note("read_warm", self._disk.read(files[0], state.image))
        tell(f"{label}: restoring warm")
        self._note("restore_warm", trial.restore())
        self._watcher.advance(self._trial_bytes)

    def _note(self, what: str, sample: float) -> None:
        self._samples[what].append(sample)

    def _measured(self) -> Measured:
        samples = {what: Series(tuple(found)) for what, found in self._samples.items()}
        return Measured(
            trial_bytes=self._trial_bytes,
            is_direct=self._is_direct,
            copy=samples["copy"],
            copy_fresh=samples["copy_fresh"],
            digest=samples["digest"],
            write=samples["write"],
            rewrite=make_series(self._samples["rewrite"]),
            read_cold=make_series(self._samples["read_cold"]),
            read_warm=samples["read_warm"],
            publish_seconds=samples["publish"],
            first_stall_seconds=samples["first_stall"],
            stall_seconds=samples["stall"],
            durable_new_seconds=samples["durable_new"],
            durable_again_seconds=make_series(self._samples["durable_again"]),
            restore_cold_seconds=make_series(self._samples["restore_cold"]),
            restore_warm_seconds=samples["restore_warm"],
        )
