"""A run in tiers whose farther one is a disk that is really full."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.events import Copied
from holdfast.storage import LocalStorage
from mounts import fill, mounted
from tier_jobs import Job, started, steps_in, wait_until

ROOM = ("-t", "tmpfs", "-o", "size=192k", "tmpfs")
"""Each step takes 52 kB: three of them fit, with their records."""


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", *ROOM) as disk:
        yield disk / "run"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    with started() as start:
        yield start


def free(far: Path) -> None:
    (far.parent / "filler").unlink()


def generations_in(place: Path) -> list[int]:
    return StoredRun(LocalStorage(place)).list_generations()


def test_a_full_tier_gives_up_old_steps_for_new_ones(near: Path, far: Path, start: Callable[..., Job]) -> None:
    """It has room for three, and its policy keeps three: the oldest goes before the next one comes."""
    job = start(near, hf.Tier(far, keep=3))
    job.save_all(*range(1, 9))
    job.manager.close()
    assert steps_in(far) == [6, 7, 8]
    assert job.texts() == []


def test_a_full_tier_never_gives_up_its_newest_step(near: Path, far: Path, start: Callable[..., Job]) -> None:
    job = start(near, hf.Tier(far, keep=1))
    job.save_all(1)
    fill(far.parent)
    job.save_all(2, tier=None)
    wait_until(lambda: any("is full" in text for text in job.texts()))
    assert steps_in(far) == [1]
    free(far)
    job.manager.close()
    assert steps_in(far) == [2]


def test_a_new_policy_frees_a_full_tier_at_the_next_start(near: Path, far: Path, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1, 2, 3)
    first.manager.close()
    fill(far.parent)
    second = start(near, hf.Tier(far, keep=2))
    assert second.restore() == 3
    second.save_all(4)
    second.manager.close()
    assert steps_in(far) == [3, 4]
    assert generations_in(far) == generations_in(near)


def test_saves_go_on_beside_a_full_tier_and_all_is_copied_later(
    near: Path, far: Path, start: Callable[..., Job]
) -> None:
    first = start(near, far)
    first.save_all(1)
    fill(far.parent)
    first.save_all(2, 3, tier=None)
    wait_until(lambda: any("is full" in text for text in first.texts()))
    first.manager.close()
    told = [text for text in first.texts() if "is full" in text]
    assert len(told) == 1
    assert f"{far} is full, so new checkpoints stay in {near} until there is room: cannot " in told[0]
    assert any(f"the newest steps are not in {far} yet" in text for text in first.texts())
    second = start(near, far)
    assert second.restore() == 3
    second.save_all(4, tier=None)
    assert steps_in(far) == [1]
    free(far)
    second.manager.close()
    assert steps_in(far) == [2, 3, 4] if 1 not in steps_in(far) else [1, 2, 3, 4]
    assert generations_in(far) == generations_in(near)


def test_a_full_tier_is_read_from_by_a_new_machine(near: Path, far: Path, start: Callable[..., Job]) -> None:
    first = start(near, far)
    first.save_all(1)
    first.manager.close()
    fill(far.parent)
    shutil.rmtree(near)
    second = start(near, far)
    assert second.restore() == 1
    assert second.manager.save(2).wait_committed()
    assert generations_in(far) == [1]
    (_, unseen) = generations_in(near)
    assert unseen > 1000, "no other job would have taken this number meanwhile"
    free(far)
    second.manager.close()
    assert steps_in(far) == [1, 2]
    assert generations_in(far) == [1, unseen]
    assert any(isinstance(event, Copied) and event.step == 2 for event in second.events)


def test_a_full_tier_does_not_hide_that_another_job_went_on(
    tmp_path: Path, near: Path, far: Path, start: Callable[..., Job]
) -> None:
    first = start(near, far)
    first.save_all(1)
    first.die()
    other = start(tmp_path / "there", far)
    other.restore()
    other.save_all(2)
    other.die()
    fill(far.parent)
    again = start(near, far)
    assert again.restore() == 2
    again.save_all(3, tier=None)
    assert again.manager.steps() == (1, 2, 3)
