"""Saves of JAX arrays: `python -m benchmarks.gpu.jax_contender --peer "JAX: holdfast" --gigabytes SIZE`."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.findings import FILES, report
from benchmarks.harness.page_cache import drop
from benchmarks.harness.timing import timed
from benchmarks.peers import find_missing

_WIDTH: Final = 4096
_SAVES: Final = 4


class Arrays:
    """Weights in bfloat16 and moments in float32, made anew by each step as JAX does."""

    def __init__(self, gigabytes: float) -> None:
        import jax
        import jax.numpy as jnp

        count = max(1, round(gigabytes * 1e9 / (10 * _WIDTH * 1024)))
        keys = jax.random.split(jax.random.key(0), count)
        self.arrays: dict[str, Any] = {}
        for number, key in enumerate(keys):
            self.arrays[f"weight-{number}"] = jax.random.normal(key, (1024, _WIDTH), jnp.bfloat16)
            for kind in ("exp_avg", "exp_avg_sq"):
                self.arrays[f"{kind}-{number}"] = jax.random.normal(key, (1024, _WIDTH), jnp.float32)
        jax.block_until_ready(self.arrays)

    def take(self) -> None:
        """Makes new arrays, as a step does."""
        import jax

        self.arrays = {name: array * 1.5 for name, array in self.arrays.items()}
        jax.block_until_ready(self.arrays)

    def checksums(self) -> dict[str, int]:
        """Sums over all bits."""
        import jax

        kinds = {2: "uint16", 4: "uint32"}
        return {
            name: int(jax.lax.bitcast_convert_type(array, kinds[array.dtype.itemsize]).sum(dtype="uint32"))
            for name, array in self.arrays.items()
        }

    def shapes(self) -> dict[str, Any]:
        """What they are like."""
        import jax

        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in self.arrays.items()}


class HoldfastJax:
    """holdfast, on a dict of arrays."""

    def open(self, directory: Path, state: Arrays, keep: int | None) -> None:
        """Makes the manager."""
        import holdfast as hf

        self._directory, self.state = directory, state
        self._checkpoint = hf.Checkpoint(arrays=state.arrays)
        self._manager = hf.CheckpointManager(directory, self._checkpoint, keep=hf.Latest(keep or 1))

    def save(self, step: int) -> None:
        """Returns when the arrays may be donated."""
        self._checkpoint["arrays"] = self.state.arrays
        self._manager.save(step)

    def wait_durable(self) -> None:
        """Waits for the commit."""
        self._manager.wait()

    def restore(self, step: int) -> None:
        """Makes new arrays."""
        import holdfast as hf

        with hf.CheckpointManager(self._directory, self._checkpoint) as manager:
            manager.restore(step)
        self.state.arrays = self._checkpoint["arrays"]

    def close(self) -> None:
        """Ends the threads."""
        self._manager.close()


def main() -> None:
    """Measures, and reports each figure as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--gigabytes", required=True, type=float)
    asked = parser.parse_args()
    name, size = asked.peer, asked.gigabytes
    needs = ["jax"] if name == "JAX: holdfast" else ["jax", "orbax-checkpoint"]
    if missing := find_missing(needs):
        report(peer=name, size=size, note=f"not installed: {', '.join(missing)}")
        return
    place = Path(tempfile.mkdtemp(prefix="contender-", dir=os.environ.get(FILES)))
    try:
        measure(name, size, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measure(name: str, size: float, place: Path) -> None:
    """**Blocks.** All figures of one peer."""
    import jax

    report(say=f"JAX {jax.__version__} computes on {jax.devices()[0]}", device=jax.default_backend())
    state = Arrays(size)
    peer: Any
    if name == "JAX: holdfast":
        peer = HoldfastJax()
    else:
        from benchmarks.peers.orbax_manager import OrbaxUncompressed

        peer = OrbaxUncompressed()
    peer.open(place, state, keep=1)
    returned, durable = [], []
    for step in range(1, _SAVES + 1):
        state.take()
        begun_at = time.perf_counter()
        peer.save(step)
        returned.append(time.perf_counter() - begun_at)
        peer.wait_durable()
        durable.append(time.perf_counter() - begun_at)
    seconds = statistics.median(returned[1:])
    report(
        peer=name,
        size=size,
        returns_seconds=seconds,
        free_seconds=seconds,
        first_seconds=returned[0],
        durable_seconds=statistics.median(durable[1:]),
    )
    expected = state.checksums()
    drop(place)
    restored = timed(lambda: (peer.restore(_SAVES), jax.block_until_ready(state.arrays)))
    found = state.checksums()
    report(peer=name, size=size, restore_seconds=restored)
    peer.close()
    if found != expected:
        report(peer=name, size=size, note="WRONG VALUES after the restore")
        raise SystemExit("wrong values")


if __name__ == "__main__":
    main()
