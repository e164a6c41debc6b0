"""The parts of the comparison of one process with its peers: saves, restores, training, and what many saves leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Final

from benchmarks.harness import page_cache
from benchmarks.harness.contender import Contender, ContenderError
from benchmarks.harness.results import LIMITS, Changing, Results, Shape
from benchmarks.harness.summary import Spread, spread
from benchmarks.harness.turns import Bench, MakeOrder, make_cold, open_values
from benchmarks.peers import PEERS
from benchmarks.states.values import Values
from benchmarks.states.workloads import make_workload, place_tensors, state_bytes, state_shapes, trained_names

COUNTED: Final = (2, 50, 100, 200)
"""After which of many saves it is counted what is held; the results use these numbers for rounds."""

_DUTIES: Final = "benchmarks.one_process.duties"
_PATIENCE_SECONDS: Final = 60.0
_INTERVAL_STEPS: Final = 10
_PAIRS: Final = 3
_FROZEN: Final = "mostly-frozen"
_FROZEN_SAVES: Final = 10
_MANY: Final = "many-saves"
_MANY_KEPT: Final = 3


def compare_saves(bench: Bench, workload: str, contenders: Sequence[str], rounds: int) -> None:
    """Measures stall, time until durable, restores and memory, and the machine's limits.

    All contenders save the same tensors in one piece of shared memory. Each round changes them; after each restore they
    are compared with what was saved.
    """
    with open_values(bench, make_workload(workload, bench.results.scale)) as (values, memory):
        # All at once would not fit in memory.
        for _, group in groupby(contenders, key=lambda name: PEERS[name].group):
            names = [LIMITS, *group]
            start, make = start_on_values(bench, workload, memory, lambda name: 1 if "holdfast" in name else None)
            with bench.started(workload, names, start, make) as stretch:
                stretch.go_rounds(
                    rounds,
                    lambda name, number, live=stretch.live: _measure_one(live[name], number, values),  # type: ignore[misc]
                    begin=values.change,
                    patience_seconds=_PATIENCE_SECONDS,
                )


def compare_training(bench: Bench, contenders: Sequence[str], rounds: int) -> None:
    """Measures what a save takes from a training loop."""
    workload = "training"

    def make(name: str) -> MakeOrder:
        place = str(bench.place(workload, name))
        return f"{_DUTIES}:TrainingDuties", {"peer": name, "scale": bench.results.scale, "directory": place}

    with bench.started(workload, contenders, lambda name: bench.start(workload, name), make) as stretch:

        def train(name: str, number: int) -> dict[str, float]:
            # To warm up takes the saves, not the steps between them.
            steps = _INTERVAL_STEPS if number > 0 else 1
            first = number * 2 * _PAIRS + 1
            figures = stretch.live[name].order("train", first_step=first, pairs=_PAIRS, interval_steps=steps)
            size_bytes = int(figures.pop("size_bytes"))
            bench.results.shapes[workload] = Shape(
                title=f"a model in training, a save every {_INTERVAL_STEPS} steps", size_bytes=size_bytes, tensors=0
            )
            return figures

        stretch.go_rounds(rounds, train)


def compare_frozen(bench: Bench, contenders: Sequence[str]) -> None:
    """Measures ten saves of each contender that keeps them all. The first one's figures are those of round 0.

    One contender after the other: the disk need not have room for all of them.
    """
    workload = make_workload(_FROZEN, bench.results.scale)
    names = trained_names(workload)
    trained = [place for place in place_tensors(state_shapes(workload))[0] if place.name in names]
    bench.results.changing = Changing(saves=_FROZEN_SAVES, changed_bytes=state_bytes(trained))
    with open_values(bench, workload) as (values, memory):
        start, make = start_on_values(bench, _FROZEN, memory)
        for name in contenders:
            with bench.started(_FROZEN, [LIMITS, name], start, make) as stretch:
                live = stretch.live

                def save(name: str, number: int, live: dict[str, Contender] = live) -> dict[str, float]:
                    if name == LIMITS:
                        return live[name].order("measure")
                    if number > 0:
                        values.change(trained)
                    saved = live[name].order("save", step=number + 1)
                    figures = {key: saved[key] for key in ("stall", "durable")}
                    figures["disk_bytes"] = float(page_cache.count_bytes(live[name].directory))
                    if number == _FROZEN_SAVES - 1:
                        figures["restore_cold"] = _restore(live[name], number + 1, values, "cold")["restore"]
                    return figures

                stretch.attempt(LIMITS, 0, save)
                for number in range(_FROZEN_SAVES):
                    if name in live:
                        stretch.attempt(name, number, save)


@dataclass(frozen=True, slots=True)
class Growth:
    """The results of ten saves of one contender.

    Attributes:
        bytes_ratio: The bytes on the disk, over one full state and the changed part for each later save.
        first_seconds: Until the first save was durable.
        later: The same of the later ones.
        seconds_share: A later save's time over the first one's.
        changed_share: The changed part over the full state.
        restore_seconds: A cold restore of the last save.
    """

    bytes_ratio: float
    first_seconds: float
    later: Spread
    seconds_share: float
    changed_share: float
    restore_seconds: float


def growth_of(results: Results, name: str) -> Growth | None:
    """**Pure.** The growth by a contender's saves, or None if it has not made them all."""
    rounds = {e.number: e.figures for e in results.rounds if e.workload == _FROZEN and e.contender == name}
    changing = results.changing
    if changing is None or len(rounds) < changing.saves:
        return None
    full_bytes = results.shapes[_FROZEN].size_bytes
    later = spread([rounds[number]["durable"] for number in range(1, changing.saves)])
    last = rounds[changing.saves - 1]
    return Growth(
        last["disk_bytes"] / (full_bytes + (changing.saves - 1) * changing.changed_bytes),
        rounds[0]["durable"],
        later,
        later.median / rounds[0]["durable"],
        changing.changed_bytes / full_bytes,
        last["restore_cold"],
    )


def compare_many_saves(bench: Bench, contenders: Sequence[str], counted: Sequence[int] = COUNTED) -> None:
    """Measures what is held after some of many saves of a small state, beyond what was held before the first."""
    with open_values(bench, make_workload(_MANY, bench.results.scale)) as (values, memory):
        start, make = start_on_values(bench, _MANY, memory, lambda _: _MANY_KEPT)
        for name in contenders:
            with bench.started(_MANY, [name], start, make) as stretch:
                live = stretch.live

                def save_up_to(name: str, number: int, live: dict[str, Contender] = live) -> dict[str, float]:
                    before = max((count for count in counted if count < number), default=0)
                    most_bytes = 0.0
                    for step in range(before + 1, number + 1):
                        values.change()
                        most_bytes = live[name].order("save", step=step)["extra_bytes"]
                        live[name].order("retain", step=step)
                    held = live[name].count_held()
                    return {
                        "save_extra_bytes": most_bytes,
                        "held_bytes": float(held.size_bytes),
                        "descriptors": float(held.descriptors),
                        "threads": float(held.threads),
                    }

                for number in counted:
                    if name in live:
                        stretch.attempt(name, number, save_up_to)


def measure_small(bench: Bench, rounds: int) -> None:
    """Measures the figures of holdfast that have no peers."""
    part = "small"
    bench.results.shapes[part] = Shape(title="small figures", size_bytes=0, tensors=0)

    def make(name: str) -> MakeOrder:
        return f"{_DUTIES}:SmallDuties", {"directory": str(bench.place(part, name))}

    with bench.started(part, ["holdfast"], lambda name: bench.start(part, name), make) as stretch:

        def measure(name: str, number: int) -> dict[str, float]:
            figures = stretch.live[name].order("measure")
            figures.pop("extra_bytes")
            return figures

        stretch.go_rounds(rounds, measure)


def start_on_values(
    bench: Bench, workload: str, memory: int, keep: Callable[[str], int | None] = lambda _: None
) -> tuple[Callable[[str], Contender], Callable[[str], MakeOrder]]:
    """Starts contenders that save values in shared memory, and gives what their duties are made with."""

    def start(name: str) -> Contender:
        return bench.start(workload, name, passed=[memory])

    def make(name: str) -> MakeOrder:
        place = str(bench.place(workload, name))
        shared = {"workload": workload, "scale": bench.results.scale, "directory": place, "memory": memory}
        if name == LIMITS:
            return f"{_DUTIES}:LimitDuties", shared
        return f"{_DUTIES}:PeerDuties", {"peer": name, "keep": keep(name), **shared}

    return start, make


def _measure_one(contender: Contender, number: int, values: Values) -> dict[str, float]:
    """One contender's part of one round; the one that warms up has no restore."""
    if contender.name == LIMITS:
        return contender.order("measure")
    step = number * 10 + 1
    # Two bare copies for each save, under the same conditions: in the same process, of tensors that were just read, one
    # right before it, into memory that was last touched a round ago as the save's was, and one right after it. The pace
    # of the memory changes from second to second, and one alone would say little.
    contender.order("touch")
    before = contender.order("copy")
    saved = contender.order("save", step=step)
    after = contender.order("copy")
    if number == 0:
        for again in range(1, int(saved["settling_saves"])):
            contender.order("remove", step=step)
            step += again
            contender.order("save", step=step)
    figures = {key: saved[key] for key in ("stall", "held", "durable")}
    figures["copy"] = fmean([before["copy"], after["copy"]])
    figures["save_extra_bytes"] = saved["extra_bytes"]
    figures["disk_bytes"] = float(page_cache.count_bytes(contender.directory))
    same_reader = bool(PEERS[contender.name].reads_as)
    if same_reader and number == 1:
        _restore(contender, step, values, "warm")
    if not same_reader and number > 0:
        for warmth in ("cold", "warm"):
            restored = _restore(contender, step, values, warmth)
            figures[f"restore_{warmth}"] = restored.pop("restore")
            figures["restore_extra_bytes"] = max(figures.get("restore_extra_bytes", 0.0), restored.pop("extra_bytes"))
            figures |= {f"{part}_{warmth}": seconds for part, seconds in restored.items()}
    contender.order("remove", step=step)
    return figures


def _restore(contender: Contender, step: int, values: Values, warmth: str) -> dict[str, float]:
    """One restore, cold or warm, of what is in the contender's directory; checks what came back."""
    (make_cold if warmth == "cold" else page_cache.fill)(contender.directory)
    values.wipe()
    figures = contender.order("restore", step=step)
    if not values.are_back():
        raise ContenderError("what was restored is not what was saved")
    return figures
