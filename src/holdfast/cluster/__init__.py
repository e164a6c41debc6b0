"""Coordination of a job's workers: a small key-value store, with deadlines, and what is built on it."""

from holdfast.cluster.discover import AloneCluster, open_cluster
from holdfast.cluster.protocol import Cluster

__all__ = ["AloneCluster", "Cluster", "open_cluster"]
