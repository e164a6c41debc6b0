"""Kills a program under `holdfast run`, its spare and its supervisor, and looks at what becomes of all.

`python -m crash.restarts`. A program trains; every few steps it is saved. At random moments, early in a start too, the
program, the spare or the supervisor is killed with SIGKILL, or two of them at once. The supervisor starts the program
again by itself; after its own death the program must end by itself, and the command is given again. It must be that

* each start goes on from where the one before did, or later, and none ends in another way than by these kills,
* a supervisor has no children but the program and one spare, no zombie, and no more descriptors than before,
* a program that was forked from the spare has the same descriptors as one that was started afresh,
* at the end the state is bit-identical to that of an untouched run, all checkpoints are whole, and no process is left,
  and no file beside the run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from crash.command import WrongStateError, check_whole, run_command, show_progress
from holdfast.catalog import StoredRun
from holdfast.storage import LocalStorage

PATIENCE_SECONDS: Final = 60.0

_PROGRAM: Final = Path(__file__).parents[1] / "programs" / "killed_steps.py"
_STEP_SECONDS: Final = 0.002
_SET_CHILD_SUBREAPER: Final = 36
_STARTS: Final = ("forked", "fresh")
_MARK: Final = "HOLDFAST_CRASH_MARK"
"""A variable in the environment of all processes of one run, by which they are found."""

_VICTIMS: Final = (
    *[("program",)] * 13, *[("spare",)] * 3, ("supervisor",), ("program", "spare"), ("program", "supervisor"),
    ("spare", "supervisor"),
)  # fmt: skip
_SHARE_READY: Final = 0.8
"""Of the kills before which the spare is ready; before the others it may be importing, or not be there."""
_MOST_SPARES: Final = 3
"""So many are killed before a program was forked from one: after five, none is started any more."""
_SHARE_EARLY: Final = 0.05
"""Of the kills after which the next start is killed, too, before it has come further: the supervisor then waits."""

_LEAVES_WITH: Final = frozenset({42, -signal.SIGTERM, -signal.SIGKILL})
"""How a program may end after its supervisor has died; by the signal if it comes before the program listens to it."""

_LINE: Final = re.compile(
    r"holdfast: (killed by SIGKILL( at step \d+)?; ((trains again from step \d+, [\d.]+ s|started again [\d.]+ s) later"
    r"( \(without the spare: (it (was killed|does not answer|was not ready yet)|its imports are not recorded)\))?"
    r"|starts again in \d+ s)"
    r"|.* is new; saves .*|resumed .*|\d+ saves?; .*|.* is at step .*, saved|step \d+ is (saved|complete).*"
    r"|no progress is lost: .*|SIGTERM was sent .*)"
)
"""All that may be said."""


class Tally(msgspec.Struct):
    """What happened over all kills.

    Attributes:
        kills: How many processes were killed.
        killed: How many of each kind.
        forked: How many starts were forked from the spare.
        fresh: How many were not.
        left: How often a program left with 42 after its supervisor's death.
    """

    kills: int = 0
    killed: dict[str, int] = msgspec.field(default_factory=dict)
    forked: int = 0
    fresh: int = 0
    left: int = 0


class Told:
    """What the programs tell, in a file.

    Attributes:
        starts: The words of each start.
        steps: How many steps were told, over all starts.
        step: The newest step; -1 if there is none in this start.
        furthest: The latest step of all.
        firsts: The first step of each start.
        end: The words of the end; empty before that.
    """

    def __init__(self, path: Path) -> None:
        self.starts: list[list[str]] = []
        self.step = self.furthest = -1
        self.firsts: list[int] = []
        self.end: list[str] = []
        path.touch()
        self._file = path.open()

    def read(self) -> None:
        """Reads what is new; lines are written whole."""
        for line in self._file.read().splitlines():
            kind, *words = line.split()
            if kind == "started":
                self.starts.append(words)
                self.step = -1
            elif kind == "ended":
                self.end = words
            else:
                if self.step < 0:
                    self.firsts.append(int(words[0]))
                self.step = int(words[0])
                self.furthest = max(self.furthest, self.step)


class KilledRun:
    """One run of the program, which is started again until it has ended by itself."""

    def __init__(self, directory: Path, dice: random.Random) -> None:
        directory.mkdir(parents=True)
        self.told = Told(directory / "told")
        self.tally = Tally()
        self._directory, self._dice = directory, dice
        self._mark = f"{os.getpid()}-{dice.random()}"
        self._errors = directory / "errors"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._descriptors = self._forked = self._spares_killed = 0

    def start(self) -> None:
        """Gives the command."""
        words = [sys.executable, "-m", "holdfast", "run", str(_PROGRAM), str(self._directory / "told")]
        environment = os.environ | {"XDG_CACHE_HOME": str(self._directory / "cache"), _MARK: self._mark}
        with self._errors.open("ab") as errors:
            self._supervisor = subprocess.Popen(
                [*words, str(self._directory / "run"), "0", str(_STEP_SECONDS)],
                env=environment,
                cwd=self._directory,
                stderr=errors,
            )
        self._descriptors = 0

    def wait(self, is_true: Callable[[], bool], what: str) -> None:
        """**Blocks.** Waits until something is true.

        Raises:
            WrongStateError: If it takes too long, or the command ends before.
        """
        assert self._supervisor is not None
        end_at = time.monotonic() + PATIENCE_SECONDS
        while not is_true():
            code = self._supervisor.poll()
            if code is not None and not is_true():
                raise WrongStateError(f"holdfast run ended with {code}: {self._errors.read_text()[-2000:]}")
            if time.monotonic() > end_at:
                raise WrongStateError(f"{what} never came: {self._errors.read_text()[-2000:]}, {self.find()}")
            time.sleep(0.001)

    def find(self) -> dict[str, list[int]]:
        """Finds the processes of this run by what they are: those of each kind, and others."""
        assert self._supervisor is not None
        found: dict[str, list[int]] = {"supervisor": [self._supervisor.pid], "program": [], "spare": [], "zombie": []}
        for pid in _list_children(self._supervisor.pid):
            kind = _find_kind(pid)
            found.setdefault(kind, []).append(pid)
        return found

    def come_on(self, steps: int) -> None:
        """**Blocks.** Waits until the program is so many steps further than it ever was, and looks at all."""
        goal = self.told.furthest + steps

        def is_there() -> bool:
            self.told.read()
            return self.told.step >= goal

        self.wait(is_there, f"step {goal}")
        if self._dice.random() < _SHARE_READY:
            self.wait(lambda: all(self._is_asleep() for _ in range(10)), "a spare that is ready")
        self._look()

    def _is_asleep(self) -> bool:
        """Tells whether there is a spare that does nothing; takes a moment, as several answers say more than one."""
        time.sleep(0.001)
        spares = self.find()["spare"]
        return bool(spares) and _find_state(spares[0]) == "S"

    def _look(self) -> None:
        """Looks at the processes and their descriptors."""
        assert self._supervisor is not None
        found: dict[str, list[int]] = {}

        def is_tidy() -> bool:
            found.update(self.find())
            return len(found["program"]) == 1 and len(found["spare"]) <= 1 and not found["zombie"]

        self.wait(is_tidy, "a program and at most one spare")
        place = Path(f"/proc/{self._supervisor.pid}/fd")

        def are_few() -> bool:
            # A spare has one connection; while it comes or goes, there may be one less or more.
            count = len(list(place.iterdir())) - len(self.find()["spare"])
            self._descriptors = min(self._descriptors or count, count)
            return count <= self._descriptors + 1

        self.wait(are_few, f"no more descriptors than {self._descriptors + 1}")

    def kill(self, victims: tuple[str, ...]) -> None:
        """**Blocks.** Kills processes of these kinds; after that of the supervisor, waits until all have ended."""
        assert self._supervisor is not None
        forked = sum(how == "forked" for _, how, *_ in self.told.starts)
        if forked > self._forked or "supervisor" in victims:
            self._forked, self._spares_killed = forked, 0
        if "spare" in victims:
            if self._spares_killed == _MOST_SPARES:
                victims = ("program",)
            self._spares_killed += 1
        for victim in self._dice.sample(victims, len(victims)):
            for pid in self.find()[victim]:
                self.tally.kills += 1
                self.tally.killed[victim] = self.tally.killed.get(victim, 0) + 1
                os.kill(pid, signal.SIGKILL)
        if "supervisor" in victims:
            self._supervisor.wait()
            self._wait_alone()
            self.start()

    def _wait_alone(self) -> None:
        """**Blocks.** Waits until no process of the run is there: this process is the parent of those that are left."""
        end_at = time.monotonic() + PATIENCE_SECONDS
        codes = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid:
                codes.append(os.waitstatus_to_exitcode(status))
            elif time.monotonic() > end_at:
                raise WrongStateError(f"these are left: {_find_marked(self._mark)}")
            else:
                time.sleep(0.001)
        self.tally.left += 42 in codes
        if set(codes) - _LEAVES_WITH - {0}:
            raise WrongStateError(f"after the supervisor's death they ended with {codes}")
        if left := _find_marked(self._mark):
            raise WrongStateError(f"these are left: {left}")

    def finish(self) -> None:
        """**Blocks.** Lets the program end by itself, and looks at what is left.

        Raises:
            WrongStateError: If something is not as it must be.
        """
        assert self._supervisor is not None
        (self._directory / "enough").touch()
        if code := self._supervisor.wait(PATIENCE_SECONDS):
            raise WrongStateError(f"holdfast run ended with {code}: {self._errors.read_text()[-2000:]}")
        self._wait_alone()
        self.told.read()
        if self.told.firsts != sorted(self.told.firsts):
            raise WrongStateError(f"the starts went on from {self.told.firsts}")
        kinds = {kind: {tuple(words) for _, how, *words in self.told.starts if how == kind} for kind in _STARTS}
        self.tally.forked, self.tally.fresh = (sum(how == kind for _, how, *_ in self.told.starts) for kind in _STARTS)
        if len(kinds["fresh"]) != 1 or not kinds["forked"] <= kinds["fresh"]:
            raise WrongStateError(f"the programs had the descriptors {kinds}")
        names = sorted(path.name for path in self._directory.iterdir())
        records = [path.suffix for path in (self._directory / "cache/holdfast/imports").iterdir()]
        if names != ["cache", "enough", "errors", "run", "told"] or records != [".json"]:
            raise WrongStateError(f"there are the files {names} and {records}")
        storage = LocalStorage(self._directory / "run")
        check_whole(storage, StoredRun(storage).look())
        untouched = self._train_untouched(int(self.told.end[0]) + 1)
        if self.told.end != untouched:
            raise WrongStateError(f"the end is {self.told.end}, that of an untouched run {untouched}")
        for line in self._errors.read_text().splitlines():
            if not _LINE.fullmatch(line):
                raise WrongStateError(f"an unknown line: {line}")

    def close(self) -> None:
        """Ends what a wrong state may have left."""
        while left := _find_marked(self._mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _train_untouched(self, steps: int) -> list[str]:
        place = self._directory / "untouched"
        place.mkdir()
        words = [sys.executable, str(_PROGRAM), str(place / "told"), str(place / "run"), str(steps), "0"]
        subprocess.run(words, check=True, capture_output=True)
        told = Told(place / "told")
        told.read()
        return told.end


def _list_children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()]
    except OSError:
        return []


def _find_kind(pid: int) -> str:
    """Tells what a child of the supervisor is."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    if _find_state(pid) in "ZX":
        return "zombie"
    return "spare" if b"import spare as" in words else "program"


def _find_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _find_marked(mark: str) -> dict[int, str]:
    """Finds all processes of a run, wherever they are."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().decode().replace("\0", " ")
        except OSError:
            continue
    return found


def run(directory: Path, kills: int, seed: int, span_seconds: float) -> Tally:
    """Kills so many processes, and lets the run end.

    Args:
        directory: A new directory.
        kills: How many.
        seed: What the random moments follow from, as far as the machine lets them.
        span_seconds: Within how many seconds after the program has come further a process is killed.

    Raises:
        WrongStateError: As soon as something is not as it must be.
    """
    # Processes that lose their supervisor become children of this one, so none can be overlooked.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    dice = random.Random(seed)
    job = KilledRun(directory, dice)
    try:
        job.start()
        while job.tally.kills < kills:
            job.come_on(dice.randrange(1, 9))
            time.sleep(dice.random() * span_seconds)
            job.kill(dice.choice(_VICTIMS))
            if dice.random() < _SHARE_EARLY:
                time.sleep(dice.random() * span_seconds)
                job.kill(("program",))
            show_progress(job.tally.kills, kills, "kills")
        job.finish()
    finally:
        job.close()
    return job.tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        tally = run(directory, options.kills, options.seed, options.span)
        killed = ", ".join(f"{number} of a {kind}" for kind, number in sorted(tally.killed.items()))
        return (
            f"{tally.kills} kills in SECONDS: nothing was lost, and nothing left. {killed}. {tally.forked} starts were "
            f"forked from the spare, {tally.fresh} were not; {tally.left} times the program left by itself."
        )

    span = {"type": float, "default": 0.1, "help": "seconds within which a process is killed"}
    run_command("restarts", __doc__, {"--kills": {"type": int, "default": 100}, "--span": span}, play)


if __name__ == "__main__":
    main()
