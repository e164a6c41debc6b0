"""Kills, lost replies, conflicts, a server that dies and races, on a real S3 server: `python -m crash.bucket`.

Each kind has a count of its own. After each, what was acknowledged must be there, whole, and of one line of the run:

* writers that are killed at random moments, as by `crash.single`;
* replies to puts that are lost, and conflicts (409) that are reported for puts that met none, while runs are saved;
* the server killed in the middle of saves, and started again;
* two jobs that open one run at the same time, and save the same steps.

This process never uses the bucket itself, for it forks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bad_weather import BadWeather
from ceph import CephServer
from crash.command import WrongStateError, check_whole, run_command, show_progress
from crash.single import Tally, check_after, kill_once

KINDS: Final = ("kills", "lost", "conflicts", "server_kills", "races")
_SPAN_SECONDS: Final = 0.8
_RUNS_AT_ONCE: Final = 6
_SHARE: Final = 0.4
_PATIENCE_SECONDS: Final = 120.0


def in_child(act: Callable[..., Any], *args: Any) -> Any:
    """**Blocks.** Calls a function in a forked process and returns its result, which must be of JSON.

    Raises:
        WrongStateError: If it fails.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            answer = {"result": act(*args)}
        except BaseException as error:
            answer = {"error": f"{error!r} {error.__cause__!r}"}
        with os.fdopen(writing, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    found = json.loads(text or '{"error": "it was killed"}')
    if "error" in found:
        raise WrongStateError(f"{act.__name__}: {found['error']}")
    return found["result"]


def kill_writers(url: str, kills: int, seed: int) -> str:
    """Kills so many writers of one run, one after the other, and looks at what each has left."""
    dice, tally, newest = random.Random(seed), Tally(), 0
    in_save = 0
    for done in range(kills):
        promised, begun, count = kill_once(url, dice, _SPAN_SECONDS)
        tally.promised += count
        newest, unfinished = in_child(_check_kill, url, max(promised, newest), begun, dice.random() < 0.5)
        in_save += unfinished
        show_progress(done + 1, kills, "kills")
    return f"{kills} kills of writers: {in_save} hit an unfinished save, {tally.promised} steps were acknowledged"


def _check_kill(url: str, promised: int, begun: int, incremental: bool) -> tuple[int, int]:
    from holdfast.errors import FencedError, SaveFailedError

    tally = Tally()
    try:
        return check_after(url, promised, begun, tally, incremental=incremental), tally.in_save
    except SaveFailedError as error:
        if not isinstance(error.__cause__, FencedError):
            raise
    # The last request of the dead one, which opened a generation, has arrived after the look.
    return check_after(url, promised, begun, tally, incremental=incremental), tally.in_save


def save_in_weather(url: str, fault: str, count: int, seed: int, endpoint: str) -> str:
    """Saves several runs at once until so many puts have met the fault, and looks at what is there."""
    dice = random.Random(seed)

    def choose(method: str, _: str) -> str:
        return fault if method == "PUT" and dice.random() < _SHARE else ""

    proxy = BadWeather(endpoint, choose)
    os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
    acknowledged = [0] * _RUNS_AT_ONCE
    wrong: list[str] = []

    def train(number: int) -> None:
        try:
            acknowledged[number] = _save_until(f"{url}-{number}", lambda: proxy.made[fault] >= count)
        except BaseException as error:
            wrong.append(f"{error!r} {error.__cause__!r}")

    threads = [threading.Thread(target=train, args=(number,)) for number in range(_RUNS_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    proxy.close()
    if wrong:
        raise WrongStateError(wrong[0])
    for number, step in enumerate(acknowledged):
        _check_end(f"{url}-{number}", step)
    return f"{proxy.made[fault]} puts with {fault}: {sum(acknowledged)} saves were acknowledged, none was lost"


def _save_until(url: str, has_enough: Callable[[], bool]) -> int:
    """Saves step after step, of which some may fail. Returns the last one that was acknowledged."""
    import numpy as np

    import holdfast
    from holdfast.errors import FencedError, SaveFailedError

    array, step, acknowledged = np.zeros(1000, np.int64), 0, 0
    with holdfast.CheckpointManager(url, holdfast.Checkpoint(array=array), keep=2, cluster="alone") as manager:
        while not (has_enough() and acknowledged):
            step += 1
            array[:] = step
            try:
                manager.save(step).wait_committed(_PATIENCE_SECONDS)
                acknowledged = step
            except SaveFailedError as error:
                # No other job has opened the run.
                if isinstance(error.__cause__, FencedError):
                    raise
    return acknowledged


def _check_end(url: str, acknowledged: int) -> None:
    import numpy as np

    import holdfast
    from holdfast.catalog import StoredRun
    from holdfast.storage import open_storage

    found = np.zeros(1000, np.int64)
    with holdfast.CheckpointManager(url, holdfast.Checkpoint(array=found), cluster="alone") as manager:
        restored = manager.restore()
    step = 0 if restored is None else restored.step
    if step < acknowledged or not (found == step).all():
        raise WrongStateError(f"{url}: step {acknowledged} was acknowledged, step {step} of {found[0]} came back")
    storage = open_storage(url)
    check_whole(storage, StoredRun(storage).look())


def kill_server(url: str, server: CephServer, kills: int, seed: int) -> str:
    """Kills the server while a job saves, and starts it again."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        end = Path(directory) / "end"
        steps: list[Any] = []
        job = threading.Thread(target=lambda: steps.append(_try(in_child, _save_until, url, end.exists)))
        job.start()
        for done in range(kills):
            time.sleep(dice.random())  # A random moment of a save.
            server.kill_gateway()
            server.start_gateway()
            show_progress(done + 1, kills, "kills of the server")
        end.touch()
        job.join()
    if isinstance(steps[0], WrongStateError):
        raise steps[0]
    in_child(_check_end, url, steps[0])
    return f"{kills} kills of the server: {steps[0]} saves were acknowledged, none was lost"


def _try(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except WrongStateError as error:
        return error


def race(url: str, count: int, seed: int) -> str:
    """Lets two jobs open one run at the same time, again and again, some runs at once."""
    dice = random.Random(seed)
    wins: list[int] = []
    wrong: list[str] = []
    left = [f"{url}-{number}" for number in range(count)]

    def work() -> None:
        while not wrong:
            try:
                place = left.pop()
            except IndexError:
                return
            try:
                wins.append(_race_once(place, dice.random() * 0.4))
            except BaseException as error:
                wrong.append(f"{place}: {error!r} {error.__cause__!r}")

    threads = [threading.Thread(target=work) for _ in range(_RUNS_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise WrongStateError(wrong[0])
    return f"{count} races of two jobs: in {wins.count(1)} one was acknowledged, in {wins.count(2)} both, in turn"


def _race_once(url: str, late_seconds: float) -> int:
    """Returns how many of two jobs had all of their saves acknowledged; two only if one followed the other."""
    import numpy as np

    import holdfast
    from holdfast.errors import FencedError, HoldfastError

    # For each job, its saves that were acknowledged: the step, when it began, and when that was known.
    saved: tuple[list[tuple[int, float, float]], ...] = ([], [])
    others: list[str] = []
    unfenced: list[int] = []

    def train(job: int) -> None:
        time.sleep(job * late_seconds)
        array = np.zeros(100, np.int64)
        manager = holdfast.CheckpointManager(url, holdfast.Checkpoint(array=array), cluster="alone")
        try:
            restored = manager.restore()
            first = 1 if restored is None else restored.step + 1
            for step in range(first, first + 3):
                array[:] = step * 10 + job
                begun_at = time.monotonic()
                manager.save(step).wait_committed(_PATIENCE_SECONDS)
                saved[job].append((step, begun_at, time.monotonic()))
            manager.close()
            unfenced.append(job)
        except HoldfastError as error:
            manager.abandon()
            if not isinstance(error, FencedError) and not isinstance(error.__cause__, FencedError):
                others.append(f"{error!r} {error.__cause__!r}")

    threads = [threading.Thread(target=train, args=(job,)) for job in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = np.zeros(100, np.int64)
    with holdfast.CheckpointManager(url, holdfast.Checkpoint(array=found), cluster="alone") as manager:
        restored = manager.restore()
    if others:
        raise WrongStateError(others[0])
    # The job that opened the run last is stopped by nobody, and what it was promised is the end of the run.
    step, winner = divmod(int(found[0]), 10)
    if restored is None or restored.step != step or not (found == found[0]).all() or winner not in unfenced:
        raise WrongStateError(f"acknowledged were {saved}, {restored} of {found[0]} came back")
    if step != saved[winner][-1][0]:
        raise WrongStateError(f"acknowledged were {saved}, step {step} of job {winner} came back")
    # Once that job has saved, no save of the other one begins that is acknowledged.
    if any(begun_at > saved[winner][0][2] for _, begun_at, _ in saved[1 - winner]):
        raise WrongStateError(f"both went on, as if each were alone: {saved}")
    return len(unfenced)


def run(server: CephServer, counts: dict[str, int], seed: int) -> list[str]:
    """Makes each kind of fault so many times, and says what came of it.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    import obstore.store  # noqa: F401  Its threads begin with the first request, and not before.

    # What the children need is imported once.
    _save_until(f"memory://{uuid.uuid4().hex}", iter((False, True)).__next__)
    # It says of each fault what it was.
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    os.environ.update(server.environment)
    os.environ["HOLDFAST_TAKE_OVER"] = "1"
    url = f"s3://trial/{uuid.uuid4().hex}"
    makers: dict[str, Callable[[int], str]] = {
        "kills": lambda count: kill_writers(f"{url}/kills", count, seed),
        "lost": lambda count: in_child(save_in_weather, f"{url}/lost", "lost reply", count, seed, server.endpoint),
        "conflicts": lambda count: in_child(save_in_weather, f"{url}/409", "409", count, seed, server.endpoint),
        "server_kills": lambda count: kill_server(f"{url}/server", server, count, seed),
        "races": lambda count: in_child(race, f"{url}/race", count, seed),
    }
    return [makers[kind](count) for kind, count in counts.items() if count]


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        # The path of a socket is short.
        with tempfile.TemporaryDirectory(dir="/tmp") as place, CephServer(Path(place)) as server:
            server.make_bucket("trial")
            said = run(server, {kind: getattr(options, kind) for kind in KINDS}, options.seed)
        return "\n".join([*said, "SECONDS in all; nothing that was acknowledged is lost."])

    counts = {
        f"--{kind.replace('_', '-')}": {"type": int, "default": default}
        for kind, default in zip(KINDS, (1000, 3000, 300, 30, 300), strict=True)
    }
    run_command("bucket", __doc__, counts, play)


if __name__ == "__main__":
    main()
