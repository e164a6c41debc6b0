"""One of the processes of a job of JAX's distributed service, which trains and may be killed at any moment.

It prints a line for each step: the number, and a digest of all that the step left.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast as hf


def divide(values: Any, *axes: str | None) -> Any:
    placing = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, placing, lambda index: values[index])


@jax.jit
def update(state: dict[str, Any]) -> dict[str, Any]:
    key, own = jax.random.split(state["key"])
    noise = jax.random.normal(own, state["w"].shape)
    gradient = jnp.sin(state["w"]) + noise * jnp.mean(state["w"])
    moment = 0.9 * state["moment"] + gradient
    return {"w": state["w"] - 0.1 * moment, "moment": moment, "key": key, "count": state["count"] + 1}


def digest(state: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])}):
        for shard in leaf.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    return digest.hexdigest()


def main(address: str, rank: str, count: str, total: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=int(count), process_id=int(rank))
    start = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec())
    state = {
        "w": divide(start, "a"),
        "moment": divide(np.zeros_like(start), "a"),
        "key": jax.jit(lambda: jax.random.key(5), out_shardings=everywhere)(),
        "count": jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=everywhere)(),
    }
    with hf.resumable(directory, state=state, save_every=hf.Steps(3), quiet=True) as run:
        state = run.checkpoint.state
        for number, step in enumerate(run.steps(int(total))):
            state = run.checkpoint.state = update(state)
            print(f"{step} {digest(state)}\nafter {number} of this process", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
