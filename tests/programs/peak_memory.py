"""Prints how much memory saves or a restore take at their peak, as a share of the state; arguments: directory, mode."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import holdfast as hf


def read_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(directory: str, mode: str) -> None:
    count, size = (8, 3_000_001) if "neighbours" in mode else (12, 2_000_000)
    state = {f"a{number}": np.full(size, float(number)) for number in range(count)}
    state_bytes = sum(array.nbytes for array in state.values())
    changed = range(count // 2, count) if "neighbours" in mode else range(1, count, 2)
    checkpoint = hf.Checkpoint(state=state)
    manager = hf.CheckpointManager(directory, checkpoint, keep=hf.Latest(1), incremental="incrementally" in mode)
    if mode != "restore":
        reset_peak()
        before_bytes = read_peak_bytes()
        for step in range(1, 6):
            for number in changed:
                state[f"a{number}"][:] = step
            manager.save(step)
        manager.close()
    else:
        manager.save(1)
        manager.close()
        del manager
        manager = hf.CheckpointManager(directory, hf.Checkpoint(state=state))
        reset_peak()
        before_bytes = read_peak_bytes()
        manager.restore()
    print((read_peak_bytes() - before_bytes) / state_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
