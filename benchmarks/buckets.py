"""`python -m benchmarks.buckets`: saves and restores in a bucket, beside obstore's own puts and gets of the same bytes.

Without a URL it starts Ceph's gateway on this machine, as `make test-objects` does. Client and server then share its
processors, so take the ratios. The server keeps in memory what was removed, so larger states fill that. obstore checks
nothing; holdfast digests each byte on both ways, and its save ends when the checkpoint is committed.
torch.distributed.checkpoint takes part where s3fs is installed (`pip install s3fs`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np

import holdfast
from benchmarks.harness.tables import draw_table

_PUTS: Final = ((8, 12), (16, 8), (32, 4))
"""What is tried for obstore's uploads: the size of a part in MiB, and how many at once."""
_GETS: Final = ((8, 8), (8, 16), (16, 8))


@click.command()
@click.argument("url", default="")
@click.option("--size-mib", default=256, show_default=True, help="The size of the state.")
@click.option("--rounds", default=5, show_default=True, help="How many rounds count; one more comes before them.")
def main(url: str, size_mib: int, rounds: int) -> None:
    """Measures by turns, and prints a table of medians."""
    with ExitStack() as stack:
        if not url:
            sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
            from ceph import CephServer

            # The path of a socket has at most 107 characters.
            server = stack.enter_context(CephServer(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            server.make_bucket("bench")
            os.environ.update(server.environment)
            url = "s3://bench"
        place = f"{url.rstrip('/')}/{uuid.uuid4().hex}"
        values = np.random.default_rng(0).integers(0, 255, size_mib << 20, dtype=np.uint8)
        steps = dict(_list_raw(place, values))
        close = _add_holdfast(steps, place, values)
        if url.startswith("s3://") and find_spec("s3fs") and find_spec("torch"):
            steps |= _list_dcp(place, values)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds + 1):
            for name, step in steps.items():
                taken = step()
                if number:
                    seconds[name].append(taken)
                print(f"\r{number}/{rounds} {name}: {taken:.2f} s".ljust(78), end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        close()
    print(_render({name: median(taken) for name, taken in seconds.items()}, seconds, size_mib))


def _timed(work: Callable[[], object]) -> float:
    begun_at = time.perf_counter()
    work()
    return time.perf_counter() - begun_at


def _list_raw(place: str, values: np.ndarray) -> Iterator[tuple[str, Callable[[], float]]]:
    import obstore

    storage: Any = holdfast.open_storage(f"{place}/raw")
    store = storage._store  # With the options that holdfast uses.
    into, size_bytes = np.empty_like(values), values.nbytes
    into[:] = 0  # Touched, as a model is.

    def put(part_bytes: int, at_once: int) -> None:
        obstore.put(store, "file", values.data, chunk_size=part_bytes, max_concurrency=at_once)

    def get(part_bytes: int, at_once: int) -> None:
        def take(begin: int) -> None:
            length = min(part_bytes, size_bytes - begin)
            into[begin : begin + length] = memoryview(obstore.get_range(store, "file", start=begin, length=length))

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(take, range(0, size_bytes, part_bytes)))

    for part_mib, at_once in _PUTS:
        yield f"obstore put, {at_once} x {part_mib} MiB", partial(_timed, partial(put, part_mib << 20, at_once))
    for part_mib, at_once in _GETS:
        yield f"obstore get, {at_once} x {part_mib} MiB", partial(_timed, partial(get, part_mib << 20, at_once))


def _add_holdfast(steps: dict[str, Callable[[], float]], place: str, values: np.ndarray) -> Callable[[], None]:
    """Adds holdfast's own; returns what ends it."""
    manager, reader = (
        holdfast.CheckpointManager(
            f"{place}/run", holdfast.Checkpoint(values=values), cluster="alone", keep=holdfast.Latest(1)
        )
        for _ in range(2)
    )
    numbers = iter(range(1, 1000))
    stalls: list[float] = []

    def save() -> float:
        begun_at = time.perf_counter()
        handle = manager.save(next(numbers))
        stalls.append(time.perf_counter() - begun_at)
        handle.wait_committed()
        taken = time.perf_counter() - begun_at
        manager.wait()  # The removal of the step before is not counted, and disturbs nothing that is.
        return taken

    steps["holdfast save, committed"] = save
    steps["holdfast save, stall"] = lambda: stalls[-1]
    steps["holdfast restore, checked"] = partial(_timed, reader.restore)
    return manager.close


def _list_dcp(place: str, values: np.ndarray) -> Iterator[tuple[str, Callable[[], float]]]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state: dict[str, Any] = {"values": torch.from_numpy(values)}
    options: dict[str, Any] = {"endpoint_url": os.environ.get("AWS_ENDPOINT_URL")}

    def save() -> None:
        dcp.save(state, storage_writer=FsspecWriter(f"{place}/dcp", **options), no_dist=True)

    def load() -> None:
        dcp.load(state, storage_reader=FsspecReader(f"{place}/dcp", **options), no_dist=True)

    yield "DCP with s3fs, save", partial(_timed, save)
    yield "DCP with s3fs, load", partial(_timed, load)


def _render(medians: dict[str, float], seconds: dict[str, list[float]], size_mib: int) -> str:
    limits = {
        verb: min(taken for name, taken in medians.items() if name.startswith(f"obstore {verb}"))
        for verb in ("put", "get")
    }
    rows = []
    for name, taken in medians.items():
        limit = limits["put" if "save" in name or "put" in name else "get"]
        spread = f"{taken:.2f} ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})"
        rows.append((name, spread, f"{size_mib / 1024 / taken:.2f}", f"{taken / limit:.2f}"))
    return "\n".join(draw_table((f"{size_mib} MiB", "seconds", "GiB/s", "times the best of obstore"), rows))


if __name__ == "__main__":
    main()
