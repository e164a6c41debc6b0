"""JAX: the processes of a job that `jax.distributed` has started."""
