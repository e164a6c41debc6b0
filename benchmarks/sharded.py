"""`python -m benchmarks.sharded`: what each leaf costs where very many small ones are divided over several workers.

Started by hand it starts the workers itself, with torchrun; each saves and restores a dict of tensors on a mesh, and
then a module of FSDP2 with its optimizer. The times are those of the slowest worker, medians of some rounds, with one
save at a time.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

import holdfast as hf
from benchmarks.timing import timed
from holdfast.format.records import Worker
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.state import CaptureCache, capture_objects

SIDE: Final = 32
"""The length of both dimensions of each tensor."""

PHASES: Final = ("capture", "stage", "save", "overlapped save", "restore")

_KINDS: Final = ("dict", "fsdp")
_LAUNCH_SECONDS: Final = 900.0


def make_state(kind: str, leaves: int) -> dict[str, Any]:
    """**Collective.** About as many tensors, divided over all workers: in a dict, or as those of a job of FSDP2."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    if kind == "dict":
        values = (torch.full((SIDE, SIDE), float(number)) for number in range(leaves))
        return {"tensors": {f"t{n}": distribute_tensor(one, mesh, [Shard(0)]) for n, one in enumerate(values)}}
    # Each parameter comes with two moments and a count of its steps.
    linears = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(max(leaves // 4, 1))]
    module: Any = nn.Sequential(*(nn.Sequential(*linears[first : first + 8]) for first in range(0, len(linears), 8)))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": module, "optimizer": optimizer}


def count_leaves(state: Mapping[str, Any]) -> int:
    """How many arrays a worker has a part of."""
    captured = capture_objects(state, worker=_this_worker())
    return len(captured.names)


def _this_worker() -> Worker:
    import torch.distributed as dist

    return Worker(dist.get_rank(), dist.get_world_size())


def measure(
    state: Mapping[str, Any], directory: Path, rounds: int, wait: Callable[[], object]
) -> dict[str, list[float]]:
    """**Collective.** **Blocks.** The seconds of each phase in each round, after one that does not count."""
    worker = _this_worker()
    captures, stager = CaptureCache(), Stager(HostBuffer())
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def stage(step: int) -> None:
        captured: Any = None

        def capture() -> None:
            nonlocal captured
            captured = capture_objects(state, captures, worker=worker)

        found["capture"].append(timed(capture))
        found["stage"].append(timed(lambda: stager.stage(captured, step)))

    for step in range(rounds + 1):
        wait()
        stage(step)
    for phase, overlaps in (("save", False), ("overlapped save", True)):
        checkpoint = hf.Checkpoint(**state)
        with hf.CheckpointManager(directory / phase, checkpoint, keep=hf.Latest(2), overlap_copy=overlaps) as manager:
            for step in range(1, rounds + 2):
                wait()
                found[phase].append(timed(lambda: manager.save(step)))  # noqa: B023  It is called at once.
                manager.wait()
            for _ in range(rounds + 1 if overlaps else 0):
                wait()
                found["restore"].append(timed(manager.restore))
    return {phase: seconds[1:] for phase, seconds in found.items()}


def run_worker(leaves: int, rounds: int, directory: Path, profiled: str) -> None:
    """**Collective.** One worker's part; the first one prints what was found, as one line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LAUNCH_SECONDS))
    results = {}
    for kind in _KINDS:
        state = make_state(kind, leaves)
        own = measure(state, directory / kind, rounds, dist.barrier)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        slowest = {phase: median(map(max, zip(*(one[phase] for one in gathered), strict=True))) for phase in PHASES}
        results[kind] = {"leaves": count_leaves(state), **slowest}
        if profiled:
            _profile(profiled, state, directory / f"{kind}-profiled", dist.barrier)
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def _profile(phase: str, state: Mapping[str, Any], directory: Path, wait: Callable[[], object]) -> None:
    """Tells where one more round of a phase spends the time of the thread that trains."""
    profile = cProfile.Profile()
    overlaps = phase == "overlapped save"
    with hf.CheckpointManager(directory, hf.Checkpoint(**state), keep=hf.Latest(2), overlap_copy=overlaps) as manager:
        calls = 4
        for step in range(1, calls):
            wait()
            if step == calls - 1 and phase != "restore":
                profile.runcall(manager.save, step)
            else:
                manager.save(step)
            manager.wait()
        if phase == "restore":
            manager.restore()
            wait()
            profile.runcall(manager.restore)
    if _this_worker().rank == 0:
        stats = pstats.Stats(profile, stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(30)
        stats.sort_stats("cumtime").print_stats(60)


def launch(workers: int, leaves: int, rounds: int, directory: Path, profiled: str = "") -> dict[str, dict[str, float]]:
    """**Blocks.** Measures with as many workers, each a process of its own."""
    own = ["--leaves", str(leaves), "--rounds", str(rounds), "--profiled", profiled, "--directory", str(directory)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "-m", "benchmarks.sharded", *own],
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LAUNCH_SECONDS,
    )
    if ended.returncode:
        raise click.ClickException(f"the workers ended with {ended.returncode}")
    lines = (line for line in ended.stdout.splitlines() if line.startswith("{"))
    found: dict[str, dict[str, float]] = json.loads(next(lines))
    return found


def render(results: Mapping[str, Mapping[str, float]]) -> str:
    """**Pure.** A table: for each phase the whole, and what each leaf takes of it."""
    lines = [f"{'':18}" + "".join(f"{kind:>28}" for kind in results)]
    for phase in PHASES:
        cells = [
            f"{one[phase] * 1e3:12.1f} ms {one[phase] / one['leaves'] * 1e6:8.1f} us/leaf" for one in results.values()
        ]
        lines.append(f"{phase:18}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


@click.command()
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="How many.")
@click.option("--leaves", default=3000, show_default=True, type=click.IntRange(1), help="About how many tensors.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Medians of so many.")
@click.option("--profiled", default="", type=click.Choice(["", "save", "overlapped save", "restore"]), help="A phase.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to write; a temporary place by default.")
def main(workers: int, leaves: int, rounds: int, profiled: str, directory: Path | None) -> None:
    """Measures saves and restores of many small tensors that are divided over several workers."""
    if directory is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        run_worker(leaves, rounds, directory, profiled)
        return
    with tempfile.TemporaryDirectory(prefix="sharded-", dir=directory) as place:
        click.echo(render(launch(workers, leaves, rounds, Path(place), profiled)))


if __name__ == "__main__":
    main()
