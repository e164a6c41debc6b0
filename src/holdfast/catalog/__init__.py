"""The steps of a run: which exist, which are committed, which count; and the generations that wrote them."""

from __future__ import annotations

from holdfast.catalog.late_metrics import add_late_metrics
from holdfast.catalog.listing import (
    Catalog,
    History,
    check_fence,
    check_in_place,
    check_unpassed,
    describe_lost,
    describe_steps,
    exists,
    is_committed,
    make_lost_error,
    open_generation,
    read_catalog,
    read_generations,
    read_index,
    read_manifest,
    read_opening,
    read_references,
    record_base,
    try_summary,
)
from holdfast.catalog.lost import check_nothing_lost, find_journaled, find_lost
from holdfast.catalog.openers import RunLock, find_owner, is_own

__all__ = [
    "Catalog",
    "History",
    "RunLock",
    "add_late_metrics",
    "check_fence",
    "check_in_place",
    "check_nothing_lost",
    "check_unpassed",
    "describe_lost",
    "describe_steps",
    "exists",
    "find_journaled",
    "find_lost",
    "find_owner",
    "is_committed",
    "is_own",
    "make_lost_error",
    "open_generation",
    "read_catalog",
    "read_generations",
    "read_index",
    "read_manifest",
    "read_opening",
    "read_references",
    "record_base",
    "try_summary",
]
