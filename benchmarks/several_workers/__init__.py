"""The costs of saves and restores in jobs of several workers.

`comparison` starts a job for each contender with torchrun, and lets the contenders take turns. The workers carry out
orders (`duties`): they make the same state (`state`) and save it in several ways (`ways`), or only copy, write and read
the same bytes. `page` shows what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.harness.results import LIMITS
from benchmarks.peers import PEERS
from benchmarks.states.workloads import ModelSize

HOLDFAST: Final = "holdfast"
OVERLAPPED: Final = "holdfast, overlapped"
DCP: Final = "DCP async, thread, cached"
DCP_SYNC: Final = "DCP sync"
TORCH_CHECKPOINTING: Final = "torch_checkpointing"

JOBS: Final = {
    LIMITS: (LIMITS,),
    HOLDFAST: (HOLDFAST,),
    "DCP": (DCP, DCP_SYNC),
    TORCH_CHECKPOINTING: (TORCH_CHECKPOINTING,),
}
"""The contenders of each job. Contenders of one job share its state, since that of one more would not fit in memory."""

ALSO: Final = {HOLDFAST: (OVERLAPPED,)}
"""The contenders of these jobs that are measured only if they are asked for by name."""

TRAINING_JOBS: Final = {
    HOLDFAST: (HOLDFAST, OVERLAPPED),
    "DCP": (DCP,),
    TORCH_CHECKPOINTING: (TORCH_CHECKPOINTING,),
}
"""The same where they train."""

NEEDS: Final = {name: PEERS[name].needs for name in (HOLDFAST, OVERLAPPED, DCP, DCP_SYNC, TORCH_CHECKPOINTING)}
"""The packages that are not installed everywhere."""

STAYING: Final = {
    TORCH_CHECKPOINTING: "what another number of workers needs, it gathers on CUDA devices alone",
}
"""The contenders whose checkpoints another number of workers cannot restore, and why."""

TRAINED: Final = ModelSize(vocabulary=20_000, context=32, width=384, layers=6)
"""The model that is trained: 0.22 GB with its optimizer's state."""
TRAINING_WORKERS: Final = 2
TRAINING: Final = "fsdp-training"
"""The training of several workers in the results."""
SIDE: Final = 64
"""The length of both dimensions of each small tensor."""

_LEAVES: Final = 3000
_MODEL: Final = ModelSize(vocabulary=50_257, context=1024, width=768, layers=9)


@dataclass(frozen=True, slots=True)
class Setup:
    """The state that the workers of a job save.

    Attributes:
        name: Its name in the results.
        title: Its name, for people.
        workers: How many workers save it.
        is_replicated: Whether each worker holds all of it (DDP) or its own part (FSDP2).
        model: The model, which comes with AdamW's state; None for many small tensors.
        leaves: About how many small tensors there are, if there is no model.
    """

    name: str
    title: str
    workers: int
    is_replicated: bool
    model: ModelSize | None = None
    leaves: int = 0


def list_setups(scale: float) -> list[Setup]:
    """**Pure.** All that is saved, at `scale` of its size."""
    return [
        _make_setup(scale, workers, is_replicated=is_replicated, has_model=has_model)
        for workers in (2, 4)
        for has_model in (True, False)
        for is_replicated in (False, True)
    ]


def _make_setup(scale: float, workers: int, *, is_replicated: bool, has_model: bool) -> Setup:
    kind, title = ("ddp", "DDP") if is_replicated else ("fsdp", "FSDP2")
    small, small_title = ("", "") if has_model else ("-small", ", many small tensors")
    return Setup(
        name=f"{kind}-{workers}{small}",
        title=f"{title}, {workers} workers{small_title}",
        workers=workers,
        is_replicated=is_replicated,
        # What is replicated is as large on all workers together as what is divided.
        model=_MODEL.scaled(scale / (workers if is_replicated else 1)) if has_model else None,
        leaves=0 if has_model else max(8, round(_LEAVES * scale)),
    )


def other_number(workers: int) -> int:
    """**Pure.** The number of workers that restores what so many have saved."""
    return 4 if workers == 2 else 2


def name_restore(setup: Setup) -> str:
    """**Pure.** The name of the restores of a setup by another number of workers, in the results."""
    return f"{setup.name}-by-{other_number(setup.workers)}"
