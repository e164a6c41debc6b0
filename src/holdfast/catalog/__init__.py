"""The steps of a run: which exist, which are committed, which count; and the generations that wrote them."""

from __future__ import annotations

from holdfast.catalog.openers import RunLock, find_owner, is_own
from holdfast.catalog.stored_run import Catalog, StoredRun, describe_lost, describe_steps, make_lost_error
from holdfast.catalog.stored_step import StoredStep

__all__ = [
    "Catalog",
    "RunLock",
    "StoredRun",
    "StoredStep",
    "describe_lost",
    "describe_steps",
    "find_owner",
    "is_own",
    "make_lost_error",
]
