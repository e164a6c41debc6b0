"""The demo's second part: two workers under torchrun, of which one is asked to leave. Both stop at the same step."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from demo.process import DemoError, make_environment
from demo.reports import PAIR_REPORTS, Evidence, PairEnded, PairHeard, PairLeft, PairReport, PairStep
from demo.show import make_comparison_table
from demo.verdict import Comparison, compare_evidence
from holdfast.numbers import time_text

WORKERS: Final = 2
_SILENCE_SECONDS: Final = 120.0
_END_SECONDS: Final = 10.0
_LOG_LINES: Final = 15


@dataclass
class PairRun:
    """What the workers of one run have told.

    Attributes:
        losses: The loss of each step, by rank; of one that was done twice, all.
        first_steps: The first step of each process.
        left: How workers have left.
        digests: What they have ended with, by rank and item.
    """

    losses: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)
    left: list[PairLeft] = field(default_factory=list)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)

    def note(self, report: PairReport) -> None:
        """Takes note of what a worker tells."""
        match report:
            case PairStep():
                self.losses.setdefault((report.rank, report.step), []).append(report.loss)
                self.first_steps.setdefault(report.process, report.step)
            case PairLeft():
                self.left.append(report)
            case PairEnded():
                self.digests[report.rank] = report.digests

    @property
    def evidence(self) -> Evidence:
        """What is compared: what each worker has ended with, and the loss of each step on the way."""
        found: Evidence = {}
        for item in next(iter(self.digests.values()), {}):
            for rank in sorted(self.digests):
                found[f"rank {rank}: {item}"] = {item: self.digests[rank][item]}
        for rank, step in sorted(self.losses):
            losses = found.setdefault(f"rank {rank}: loss of every step", {})
            losses[f"step {step}"] = ", ".join(self.losses[rank, step])
        return found


def run_pair(steps: int, seed: int, files: Path, console: Console) -> bool:
    """**Blocks.** Trains twice, once untouched, and shows how it goes.

    Args:
        steps: How many steps.
        seed: Of everything that is random.
        files: A directory for the run and for logs.
        console: Where to show it.

    Returns:
        Whether all is as it should be.

    Raises:
        DemoError: If a process fails of itself.
    """
    begun_at = time.monotonic()
    _say(console, f"\nTwo workers under torchrun train one model, {steps} steps: untouched, then one gets SIGTERM.")
    untouched, asked = PairRun(), PairRun()
    for report in _run(steps, seed, files, None):
        untouched.note(report)
    moment = steps // 2
    sent_at: float | None = None
    restarted: set[int] = set()
    # The second start is what a scheduler would do, or a shell's loop.
    starts = (_run(steps, seed, files, files / "pair", is_asked=number == 0) for number in range(2))
    for report in chain.from_iterable(starts):
        asked.note(report)
        match report:
            case PairStep(rank=1) if report.step >= moment and sent_at is None:
                sent_at = time.time()
                os.kill(report.process, signal.SIGTERM)
                _say(console, f"SIGTERM to rank 1 alone, which has done step {report.step}", "red")
            case PairHeard(rank=0) if sent_at is not None:
                later = time_text(max(report.at_unix_seconds - sent_at, 0.0))
                _say(console, f"rank 0, which got no signal, has heard of it {later} later", "green")
            case PairLeft():
                text = (
                    f"rank {report.rank} has stopped at step {report.step}, saved, and leaves with {report.exit_code}"
                )
                _say(console, text, "green" if report.exit_code == 42 else "red")
            case PairStep() if len(asked.left) == WORKERS and report.rank not in restarted:
                restarted.add(report.rank)
                _say(
                    console,
                    f"started again, rank {report.rank} goes on with step {report.step}",
                    "green",
                )
    comparisons = compare_evidence(untouched.evidence, asked.evidence)
    objections = find_objections(asked, comparisons)
    console.print()
    console.print(make_comparison_table(comparisons, "asked"))
    console.print()
    _show_verdict(console, objections, time.monotonic() - begun_at)
    return not objections


def find_objections(asked: PairRun, comparisons: list[Comparison]) -> list[str]:
    """**Pure.** What is not as it should be, in the run that was asked to leave and against the untouched one."""
    objections = []
    left = {(one.step, one.exit_code) for one in asked.left}
    if len(asked.left) != WORKERS or len(left) != 1 or {code for _, code in left} != {42}:
        objections.append(f"the workers have not left together: {asked.left}")
    elif any(first not in (1, (asked.left[0].step or 0) + 1) for first in asked.first_steps.values()):
        objections.append(f"they have not gone on where they stopped: {sorted(asked.first_steps.values())}")
    if set(asked.digests) != set(range(WORKERS)):
        objections.append(f"not all workers have come to the end: {sorted(asked.digests)}")
    objections += [str(comparison) for comparison in comparisons if not comparison.identical]
    return objections


def _show_verdict(console: Console, objections: list[str], seconds: float) -> None:
    if objections:
        _say(console, "VERDICT: no", "bold red")
        for objection in objections:
            _say(console, f"  {objection}", "red")
        return
    verdict = "VERDICT: yes. Both workers stopped at one step, and ended bit-identical to a job that nobody had asked."
    _say(console, f"{verdict} ({seconds:.0f} s)", "bold green")


def _run(steps: int, seed: int, files: Path, directory: Path | None, *, is_asked: bool = False) -> Iterator[PairReport]:
    """What the workers tell, until torchrun has ended.

    Raises:
        DemoError: If it fails, or is silent for too long.
    """
    name = "pair-untouched" if directory is None else "pair-asked"
    log = files / f"{name}.log"
    arguments = [str(steps), str(seed), *([str(directory)] if directory else [])]
    with _started(arguments, log) as process:
        assert process.stdout is not None, "it is a pipe"
        rest = b""
        while True:
            if not select.select([process.stdout], [], [], _SILENCE_SECONDS)[0]:
                raise DemoError(f"{name} has been silent for {_SILENCE_SECONDS:.0f} s{_tail(log)}")
            told = os.read(process.stdout.fileno(), 1 << 16)
            if not told:
                break
            *whole, rest = (rest + told).split(b"\n")
            yield from map(PAIR_REPORTS.decode, whole)
        code = process.wait(_SILENCE_SECONDS)
        # torchrun says 1 for workers that leave with 42.
        if code != int(is_asked):
            raise DemoError(f"{name} failed with exit code {code}{_tail(log)}")


@contextmanager
def _started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts torchrun with both workers. None of them outlives the block."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}",
        "--max-restarts=0", "--monitor-interval=0.1", "-m", "demo.pair_worker", *arguments,
    ]  # fmt: skip
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**make_environment(), "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            # Its workers are not in its process group: it ends them itself.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(["; the end of its log:", *(f"\n  {line}" for line in lines)]) if lines else ""


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style), soft_wrap=True)
