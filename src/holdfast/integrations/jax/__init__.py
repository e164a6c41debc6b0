"""Integration of JAX: its arrays, trees, and the processes of `jax.distributed`."""
