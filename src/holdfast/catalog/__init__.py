"""The steps of a run: which exist, which are committed, which count; and the generations that wrote them."""

from __future__ import annotations

from holdfast.catalog.named_step import Asked, find_step, split_place
from holdfast.catalog.openers import RunLock, find_owner, is_own
from holdfast.catalog.stored_run import Catalog, StoredRun, describe_lost, describe_steps, make_lost_error
from holdfast.catalog.stored_step import StoredStep

__all__ = [
    "Asked",
    "Catalog",
    "RunLock",
    "StoredRun",
    "StoredStep",
    "describe_lost",
    "describe_steps",
    "find_owner",
    "find_step",
    "is_own",
    "make_lost_error",
    "split_place",
]
