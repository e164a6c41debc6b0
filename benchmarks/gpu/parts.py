"""The parts, the most important first, and the time that each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

TOTAL_SECONDS: Final = 525.0
"""For all parts together: what was not begun by then is left out, and `make gpu` ends within nine minutes."""

SMALL, LARGE = 2.0, 12.0
"""The sizes of the state that is saved, in GB."""

DRY_SCALE: Final = 0.01

GOOD_PEER: Final = "DCP async, thread"
OTHER_PEERS: Final = ("torch_checkpointing", "DCP async, process", "torch.save")


@dataclass(frozen=True, slots=True)
class Part:
    """A process that finds something out.

    Attributes:
        name: What it is called in the results.
        command: What Python is to run.
        limit_seconds: It is ended after that time.
        least_seconds: It is not begun if there is less time left.
        is_tests: Whether it is a run of pytest, so that its last line says what it has found.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    least_seconds: float = 15.0
    is_tests: bool = False


def list_parts(root: Path, *, dry: bool) -> list[Part]:
    """**Pure**, but for a look at which files of tests there are."""
    tests = sorted(str(path.relative_to(root)) for path in (root / "tests").rglob("test_device_*.py"))
    # A test that hangs fails before its part is ended.
    marks = ("-m", "cuda", "-vv", "-rfE", "--tb=short", "--durations=8", "-o", "timeout=75")
    both = ("holdfast", "holdfast, overlapped")
    parts = [
        Part("device", ("-m", "benchmarks.gpu.device"), 40),
        *(_compare(peer, SMALL, 45, dry=dry) for peer in both),
        Part("tests", ("-m", "pytest", *marks, *tests), 110, 40, is_tests=True),
        _compare(GOOD_PEER, SMALL, 45, dry=dry),
        *(_compare(peer, LARGE, 100, dry=dry) for peer in both),
        _compare(GOOD_PEER, LARGE, 110, dry=dry),
        *(_compare(peer, SMALL, 40, dry=dry) for peer in OTHER_PEERS),
        *(_compare(peer, SMALL, 45, dry=dry) for peer in ("JAX: holdfast", "JAX: Orbax async")),
        *(_compare(peer, LARGE, 110, dry=dry) for peer in OTHER_PEERS),
    ]
    # Where a dry run is made, other programs run as well.
    return [replace(part, limit_seconds=4 * part.limit_seconds) for part in parts] if dry else parts


def _compare(peer: str, gigabytes: float, limit_seconds: float, *, dry: bool) -> Part:
    module = "benchmarks.gpu.jax_contender" if peer.startswith("JAX: ") else "benchmarks.gpu.contender"
    scaled = gigabytes * (DRY_SCALE if dry else 1.0)
    command = ("-m", module, "--peer", peer, "--gigabytes", f"{scaled:g}")
    return Part(f"{peer}, {gigabytes:g} GB", command, limit_seconds, 15.0 if gigabytes == SMALL else 40.0)


def choose(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """**Pure.** Those whose names contain one of some words; all if there are none."""
    return [part for part in parts if not only or any(word in part.name for word in only)]
