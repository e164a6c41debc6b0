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

from holdfast.demo.pair_reports import PAIR_REPORTS, PairEnded, PairLeft, PairReport, PairStep
from holdfast.demo.process import DemoError

WORKERS: Final = 2
_SILENCE_SECONDS: Final = 120.0
_END_SECONDS: Final = 10.0
_LOG_LINES: Final = 15
_DIGEST_CELLS: Final = 16


@dataclass
class PairRun:
    """What the workers of one run have told.

    Attributes:
        losses: The loss of each step, by rank; of one that was done twice, all.
        first_steps: The first step of each process.
        left: How workers have left.
        digests: What they have ended with, by rank.
    """

    losses: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    first_steps: dict[int, int] = field(default_factory=dict)
    left: list[PairLeft] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)

    def note(self, report: PairReport) -> None:
        """Takes note of what a worker tells."""
        match report:
            case PairStep():
                self.losses.setdefault((report.rank, report.step), []).append(report.loss)
                self.first_steps.setdefault(report.process, report.step)
            case PairLeft():
                self.left.append(report)
            case PairEnded():
                self.digests[report.rank] = report.digest


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
    is_sent = False
    restarted: set[int] = set()
    # The second start is what a scheduler would do, or a shell's loop.
    starts = (_run(steps, seed, files, files / "pair", is_asked=number == 0) for number in range(2))
    for report in chain.from_iterable(starts):
        asked.note(report)
        match report:
            case PairStep(rank=1) if report.step >= moment and not is_sent:
                is_sent = True
                os.kill(report.process, signal.SIGTERM)
                _say(console, f"SIGTERM to rank 1 alone, which has done step {report.step}", "red")
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
    objections = find_objections(untouched, asked)
    _show_verdict(console, untouched, asked, objections, time.monotonic() - begun_at)
    return not objections


def find_objections(untouched: PairRun, asked: PairRun) -> list[str]:
    """**Pure.** What is not as it should be."""
    objections = []
    left = {(one.step, one.exit_code) for one in asked.left}
    if len(asked.left) != WORKERS or len(left) != 1 or {code for _, code in left} != {42}:
        objections.append(f"the workers have not left together: {asked.left}")
    elif any(first not in (1, (asked.left[0].step or 0) + 1) for first in asked.first_steps.values()):
        objections.append(f"they have not gone on where they stopped: {sorted(asked.first_steps.values())}")
    if set(untouched.digests) != set(range(WORKERS)) or untouched.digests != asked.digests:
        objections.append("what they have ended with is not the same")
    if untouched.losses != asked.losses:
        objections.append("not every step on the way was the same, or was done once")
    return objections


def _show_verdict(console: Console, untouched: PairRun, asked: PairRun, objections: list[str], seconds: float) -> None:
    for rank in sorted(asked.digests):
        pair = (untouched.digests.get(rank, ""), asked.digests[rank])
        word, style = ("identical", "green") if pair[0] == pair[1] else ("DIFFERS", "bold red")
        line = Text(f"rank {rank}: {pair[0][:_DIGEST_CELLS]}  {pair[1][:_DIGEST_CELLS]}  ")
        console.print(line.append(word, style), soft_wrap=True)
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
        "--max-restarts=0", "--monitor-interval=0.1", "-m", "holdfast.demo.pair_worker", *arguments,
    ]  # fmt: skip
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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
