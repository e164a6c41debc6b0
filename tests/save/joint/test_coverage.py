"""Shards that were made by hand: what all workers hold together is looked at before a step is committed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster import Cluster
from holdfast.errors import PeerError, SaveFailedError, UsageError
from holdfast.storage import LocalStorage
from memory_engine import run_workers
from whole_runs import check_whole

PATIENCE_SECONDS = 30.0

Rows = Callable[[int], tuple[int, int]]


class CountingStorage(LocalStorage):
    """Counts how often an index is read."""

    reads = 0

    def read(self, path: str, limit_bytes: int) -> bytes:
        self.reads += "/index-" in path
        return super().read(path, limit_bytes)


def shard(begin: int, end: int, length: int, holders: Any = None, value: float = 1.0) -> hf.Shard:
    return hf.Shard(np.full((end - begin, 3), value), (length, 3), (begin, 0), holders=holders)


def save(directory: Path, world_size: int, states: Callable[[int], dict[str, Any]], steps: int = 1) -> list[Any]:
    """What comes of the saves of all workers: None, or the causes of their failure, by rank; and what was read."""

    def work(cluster: Cluster) -> Any:
        storage = CountingStorage(directory)
        checkpoint = hf.Checkpoint(whole=np.ones(4), **states(cluster.rank))
        causes = []
        with hf.CheckpointManager(storage, checkpoint, cluster=cluster, failures_allowed=99) as manager:
            for step in range(1, steps + 1):
                try:
                    manager.save(step).wait_committed(PATIENCE_SECONDS)
                except SaveFailedError as error:
                    causes.append(error.__cause__)
        return causes, storage.reads

    return run_workers(world_size, work)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        # The fifth row is nobody's.
        (lambda rank: (0, 4) if rank == 0 else (5, 9), r"is incomplete: the workers have 24 of its 27 elements"),
        # The first one.
        (lambda rank: (1, 4) if rank == 0 else (4, 9), r"is incomplete: the workers have 24 of its 27 elements"),
        # As many as there are, but not each of them once.
        (lambda rank: [(0, 3), (3, 6), (3, 6)][rank], r"is incomplete: the workers have 18 of its 27 elements"),
        (lambda rank: (0, 5) if rank == 0 else (4, 9), r"overlaps: rank 0 has .*, rank 1 has "),
    ],
)
def test_a_gap_ends_the_save_of_all_and_the_leaf_is_named(tmp_path: Path, rows: Rows, text: str) -> None:
    def states(rank: int) -> dict[str, Any]:
        return {"table": shard(*rows(rank), 9), "other": shard(2 * rank, 2 * rank + 2, 2 * world_size)}

    world_size = 3 if "18" in text else 2
    (causes, _), *others = save(tmp_path, world_size, states)
    (cause,) = causes
    assert isinstance(cause, UsageError)
    cause_text = cause.message
    assert cause_text.startswith("'table', named by rank 0, ")
    assert "offsets" in cause.hint
    assert re.search(text, cause_text)
    for (other,), _ in others:
        assert isinstance(other, PeerError)
        assert (other.rank, other.kind, other.text) == (0, "UsageError", cause_text)
    assert check_whole(tmp_path) == []


def test_the_same_box_with_other_values_ends_the_save(tmp_path: Path) -> None:
    def states(rank: int) -> dict[str, Any]:
        return {"table": shard(*((0, 4), (4, 9), (4, 9))[rank], 9, value=float(rank))}

    ((cause,), _), *_ = save(tmp_path, 3, states)
    assert isinstance(cause, UsageError)
    assert "ranks 1 and 2 have different values" in cause.message


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        # All is written twice, with other values.
        (lambda rank: shard(0, 4, 4, value=float(rank)), "different values"),
        # Each has what it takes for the whole.
        (lambda rank: shard(0, 4 + 4 * rank, 4 + 4 * rank), r"\[4, 3\] on rank 0, but F64 \[8, 3\] on rank 1"),
        (lambda rank: hf.Shard(np.ones(4, f"f{4 + 4 * rank}"), (4,), (0,)), "F32 .* on rank 0, but F64"),
        # Nobody has anything of it.
        (lambda rank: shard(0, 0, 4), "is incomplete: the workers have 0 of its 12 elements"),
        (lambda rank: shard(0, 4 if rank == 0 else 0, 4 + rank), r"\[4, 3\] on rank 0, but F64 \[5, 3\] on rank 1"),
    ],
)
def test_what_verify_would_call_damaged_is_not_committed(
    tmp_path: Path, shards: Callable[[int], hf.Shard], text: str
) -> None:
    ((cause,), _), *_ = save(tmp_path, 2, lambda rank: {"head": shards(rank)})
    assert isinstance(cause, UsageError)
    assert re.search(text, cause.message), cause.message
    assert check_whole(tmp_path) == []


def test_shards_that_change_are_looked_at_again(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> Any:
        checkpoint = hf.Checkpoint(table=shard(4 * cluster.rank, 4 * cluster.rank + 4, 8))
        with hf.CheckpointManager(tmp_path, checkpoint, cluster=cluster, failures_allowed=99) as manager:
            manager.save(1).wait_committed(PATIENCE_SECONDS)
            manager.checkpoint["table"] = shard(5 * cluster.rank, 5 * cluster.rank + 4, 9)
            with pytest.raises(SaveFailedError):
                manager.save(2).wait_committed(PATIENCE_SECONDS)

    run_workers(2, work)
    assert check_whole(tmp_path) == [1]


def test_what_is_covered_is_saved_and_indexes_are_read_for_it_once(tmp_path: Path) -> None:
    def states(rank: int) -> dict[str, Any]:
        pair = rank // 2
        return {
            "table": shard(2 * rank, 2 * rank + 2, 8),
            "columns": hf.Shard(np.ones((5, 1)), (5, 4), (0, rank)),
            "pairs": shard(4 * pair, 4 * pair + 4, 8, holders=(2 * pair, 2 * pair + 1)),
            "empty": shard(0, 0, 0),
            "scalar": hf.Shard(np.array(1.0), (), (), holders=range(4)),
            "one": shard(0, 7 if rank == 0 else 0, 7),
        }

    assert [causes for causes, _ in save(tmp_path / "run", 4, states, steps=2)] == [[]] * 4
    plain = save(tmp_path / "plain", 4, lambda rank: {}, steps=2)
    (_, first), *others = save(tmp_path / "again", 4, states, steps=2)
    assert [first - 4, *(reads for _, reads in others)] == [reads for _, reads in plain], "by the leader, once"
    assert check_whole(tmp_path / "run") == [1, 2]


def test_same_box_twice_with_equal_values_is_not_a_gap(tmp_path: Path) -> None:
    def states(rank: int) -> dict[str, Any]:
        return {"table": shard(*((0, 4), (4, 9), (4, 9))[rank], 9)}

    (causes, reads), *_ = save(tmp_path / "run", 3, states, steps=2)
    _, plain = save(tmp_path / "plain", 3, lambda rank: {}, steps=2)[0]
    assert causes == []
    assert reads - plain == 3, "the index of each worker, once"
    assert check_whole(tmp_path / "run") == [1, 2]


def test_values_that_part_later_end_the_save(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> Any:
        values = np.ones((4, 3))
        checkpoint = hf.Checkpoint(table=hf.Shard(values, (8, 3), (4 * (cluster.rank // 2), 0)))
        with hf.CheckpointManager(tmp_path, checkpoint, cluster=cluster, failures_allowed=99) as manager:
            for step in (1, 2):
                values += 1
                manager.save(step).wait_committed(PATIENCE_SECONDS)
            values[0, 0] += cluster.rank == 2
            text = r"'table': ranks 2 and 3 have different values for \[4:8"
            with pytest.raises(SaveFailedError, match=text) as caught:
                manager.save(3).wait_committed(PATIENCE_SECONDS)
            assert "pipeline stages" in caught.value.hint
            values[0, 0] -= cluster.rank == 2
            manager.save(4).wait_committed(PATIENCE_SECONDS)

    run_workers(4, work)
    assert check_whole(tmp_path) == [1, 2, 4]


def test_boxes_shared_by_workers_are_checked_each_time(tmp_path: Path) -> None:
    def states(rank: int) -> dict[str, Any]:
        return {"table": shard(0, 4, 4), "other": shard(3 * rank, 3 * rank + 3, 6)}

    (causes, reads), _ = save(tmp_path / "run", 2, states, steps=2)
    _, plain = save(tmp_path / "plain", 2, lambda rank: {}, steps=2)[0]
    assert causes == []
    assert reads - plain == 2 * 2
    assert check_whole(tmp_path / "run") == [1, 2]
