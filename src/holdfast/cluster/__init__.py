"""How the workers of one job agree: a small key-value store, with deadlines, and what is built on it."""

from holdfast.cluster.discover import open_cluster
from holdfast.cluster.protocol import Cluster
from holdfast.cluster.single import AloneCluster

__all__ = ["AloneCluster", "Cluster", "open_cluster"]
