"""A checkpoint is untrusted input: whatever it holds, the answer is the right state or a clean error."""

from __future__ import annotations

import contextlib
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.catalog.deletion import clear_run
from holdfast.cli.main import holdfast
from holdfast.errors import HoldfastError, NoWholeCheckpointError, UnsupportedValueError
from holdfast.format.digests import SealedRecord, digest, seal
from holdfast.format.index import Index, LeafRecord
from holdfast.format.index_checks import decode_index
from holdfast.format.records import decode_manifest
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage

STEP = "step-000000007.g0001"
MANIFEST = f"{STEP}/manifest.json"
INDEX = f"{STEP}/index-00000-of-00001.json"
DATA = f"{STEP}/data-00000-of-00001.safetensors"
MEMORY_LIMIT_BYTES = 64 << 20

slow_files = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_objects() -> dict[str, Any]:
    return {
        "model": {"w": np.zeros((40, 30)), "b": np.zeros(5, np.float32), "empty": np.zeros((0, 3))},
        "notes": {"list": [0, None], "tuple": (0.0,)},
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("hostile") / "run"
    objects = make_objects()
    objects["model"]["w"][:] = 3.5
    objects["notes"]["list"] = [1, "x", float("inf")]
    with hf.CheckpointManager(run, hf.Checkpoint(**objects)) as manager:
        manager.save(7)
    (run / "events.jsonl").unlink()
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "run"
    shutil.copytree(original, copy)
    yield copy
    shutil.rmtree(copy, ignore_errors=True)


def restore(run: Path) -> None:
    """Restores into fresh objects; passes if that gives the right state, or fails cleanly within the memory limit."""
    objects = make_objects()
    tracemalloc.start()
    try:
        restored = hf.CheckpointManager(run, hf.Checkpoint(**objects)).restore()
        if restored is not None:
            assert (objects["model"]["w"] == 3.5).all()
            assert objects["notes"] == {"list": [1, "x", float("inf")], "tuple": (0.0,)}
    except HoldfastError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < MEMORY_LIMIT_BYTES


def reset(original: Path, run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(original, run)


def rewrite(run: Path, index: bytes, data_bytes: int | None = None) -> None:
    """Puts another index in place, with a manifest that vouches for it."""
    (run / INDEX).write_bytes(index)
    manifest = decode_manifest((run / MANIFEST).read_bytes(), path=MANIFEST, expected=None)
    worker = msgspec.structs.replace(
        manifest.workers[0],
        index_bytes=len(index),
        index_digest=digest(index),
        data_bytes=manifest.workers[0].data_bytes if data_bytes is None else data_bytes,
    )
    (run / MANIFEST).write_bytes(seal(msgspec.structs.replace(manifest, workers=(worker,))))


@slow_files
@given(data=st.data())
def test_a_changed_byte_anywhere_gives_the_right_state_or_a_clean_error(
    data: st.DataObject, original: Path, run: Path
) -> None:
    reset(original, run)
    path = run / data.draw(st.sampled_from(sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    restore(run)
    in_arrays = path.name.startswith("data-") and position >= 4096
    if in_arrays:
        with pytest.raises(NoWholeCheckpointError):
            hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()
    if path.name.startswith("data-"):
        storage = LocalStorage(run)
        damages = verify_data(storage, open_step(storage, STEP, None))
        assert len(damages) == 1
        assert damages[0].path == DATA
        assert damages[0].tensor == ("" if position < 4096 else damages[0].tensor or "?")


@slow_files
@given(data=st.data())
def test_a_cut_or_lengthened_file_is_found(data: st.DataObject, original: Path, run: Path) -> None:
    reset(original, run)
    path = run / data.draw(st.sampled_from([MANIFEST, INDEX, DATA]))
    size_bytes = path.stat().st_size
    os.truncate(path, data.draw(st.integers(0, size_bytes + 10_000).filter(lambda size: size != size_bytes)))
    with pytest.raises(NoWholeCheckpointError):
        hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()


HUGE = st.sampled_from([-(1 << 63), -1, 0, 1, 7, 4096, 1 << 31, 1 << 40, 1 << 53, (1 << 63) - 1])
TAGS = ["tuple", "bytes", "int", "float", "set", "deque", "range", "slice", "Decimal", "dict", "Counter", "array", "?"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("$") | st.just("v"), inner, max_size=3)
        | st.fixed_dictionaries({"$": st.sampled_from(TAGS), "v": inner})
        | st.fixed_dictionaries({"$": st.just("array"), "v": st.sampled_from(["model/w", "nope"]), "k": inner})
    ),
    max_leaves=12,
)


@slow_files
@given(data=st.data())
def test_index_with_false_sealed_fields_is_a_clean_error(data: st.DataObject, original: Path, run: Path) -> None:
    reset(original, run)
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    field = data.draw(
        st.sampled_from(["step", "rank", "world_size", "data_bytes", "header_bytes", "span_bytes", "leaf"])
    )
    if field == "leaf":
        leaf = data.draw(st.sampled_from(index.leaves))
        change: dict[str, Any] = data.draw(
            st.fixed_dictionaries({"begin": HUGE})
            | st.fixed_dictionaries({"end": HUGE})
            | st.fixed_dictionaries({"shape": st.lists(HUGE, max_size=3).map(tuple)})
            | st.fixed_dictionaries({"dtype": st.sampled_from(["F64", "U8", "object", "C64", ""])})
            | st.fixed_dictionaries({"name": st.sampled_from(["../../x", "model/b", "", "__metadata__", "\0"])})
            | st.fixed_dictionaries({"spans": st.sampled_from(["", "0" * 32, "0" * 64, "x" * 32])})
        )
        leaves = tuple(msgspec.structs.replace(leaf, **change) if other is leaf else other for other in index.leaves)
        forged = msgspec.structs.replace(index, leaves=leaves)
    else:
        forged = msgspec.structs.replace(index, **{field: data.draw(HUGE)})
    try:
        encoded = seal(forged)
    except (msgspec.MsgspecError, OverflowError):
        return
    rewrite(run, encoded, forged.data_bytes if data.draw(st.booleans()) else None)
    restore(run)


@slow_files
@given(forged=JSON, whole=st.booleans())
def test_sealed_state_of_any_form_is_a_clean_error(forged: Any, whole: bool, original: Path, run: Path) -> None:
    reset(original, run)
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    objects = {"model": forged, "notes": forged} if whole else {**index.objects, "notes": forged}
    rewrite(run, seal(msgspec.structs.replace(index, objects=objects)))
    with contextlib.suppress(HoldfastError):
        hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore(strict=False)


def nest(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = {"$": "tuple", "v": [nested]}
    return nested


def test_deeply_nested_values_that_were_stored_can_be_read(tmp_path: Path) -> None:
    value: Any = [b"x"]
    depth = 1
    with pytest.raises(UnsupportedValueError):  # noqa: PT012
        while True:
            with hf.CheckpointManager(tmp_path / str(depth), hf.Checkpoint(value=value)) as manager:
                manager.save(1)
                manager.restore()
            value = [value]
            depth += 1
    assert depth > 60


def test_deeply_nested_state_is_a_clean_error(run: Path) -> None:
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    for depth in (200, 400):
        rewrite(run, seal(msgspec.structs.replace(index, objects={**index.objects, "notes": nest(depth)})))
        with pytest.raises(HoldfastError):
            hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()


def test_an_index_that_claims_a_huge_array_takes_no_memory(run: Path) -> None:
    begin, size_bytes = 4096, 1 << 40
    forged = Index(
        step=7,
        generation=1,
        attempt=1,
        rank=0,
        world_size=1,
        data_bytes=begin + size_bytes,
        header_bytes=begin,
        header_digest="0" * 32,
        span_bytes=1 << 50,
        leaves=(LeafRecord("model/w", "U8", (size_bytes,), begin, begin + size_bytes, "0" * 32),),
        objects={"model": {"w": {"$": "array", "v": "model/w", "k": "numpy"}}},
    )
    rewrite(run, seal(forged), forged.data_bytes)
    tracemalloc.start()
    with pytest.raises(NoWholeCheckpointError):
        hf.CheckpointManager(run, hf.Checkpoint(model={})).restore()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < MEMORY_LIMIT_BYTES
    # Where the file does have that size (a sparse one costs nothing), the answer is clean all the same.
    os.truncate(run / DATA, forged.data_bytes)
    with pytest.raises(HoldfastError):
        hf.CheckpointManager(run, hf.Checkpoint(model={})).restore()


REPLACEMENTS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, elsewhere: path.symlink_to(elsewhere),
    "link to nothing": lambda path, elsewhere: path.symlink_to(elsewhere / "no"),
    "directory": lambda path, elsewhere: path.mkdir(),
    "fifo": lambda path, elsewhere: os.mkfifo(path),
    "nothing": lambda path, elsewhere: None,
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
@pytest.mark.parametrize("name", [MANIFEST, INDEX, DATA, "generations/0001.json", "generations/0001.base.json"])
def test_record_that_is_not_a_plain_file_is_not_read(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = run / name
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    REPLACEMENTS[kind](path, elsewhere)
    restore(run)
    if name.startswith("generations/"):
        # Only which step follows which is told there: the step is whole, and whoever begins anew asks for nothing.
        restored = hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()
        assert restored is not None
        assert restored.step == 7
        with hf.CheckpointManager(run, hf.Checkpoint(**make_objects()), begin_anew=True) as manager:
            manager.save(1)
        assert manager.steps() == (1,)
    if name in (INDEX, DATA):
        with pytest.raises(NoWholeCheckpointError):
            hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "directory", "fifo"])
def test_journal_that_is_not_a_plain_file_is_not_written(
    run: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    REPLACEMENTS[kind](run / "events.jsonl", elsewhere)
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects())) as manager:
        manager.restore()
        for step in (8, 9):
            manager.save(step).wait_committed()
    assert manager.steps() == (7, 8, 9)
    assert sorted(tmp_path.iterdir()) == [elsewhere, run]
    assert elsewhere.read_text() == "mine"
    (told,) = (record for record in caplog.records if "events.jsonl" in record.getMessage())
    assert told.levelname == "WARNING"
    assert told.exc_info is None


def test_linked_step_directory_is_ignored_and_never_emptied(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (run / STEP).rename(outside)
    (run / STEP).symlink_to(outside)
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects()), keep=hf.Latest(1)) as manager:
        assert manager.restore() is None
        manager.save(8)
    assert len(list(outside.iterdir())) == 4


def _prune(run: Path, *options: str) -> None:
    outcome = CliRunner().invoke(holdfast, ["prune", str(run), "--yes", "--json", *options])
    assert outcome.exit_code in (0, 1), outcome.output


def _save_again(run: Path) -> None:
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects()), keep=hf.Latest(1)) as manager:
        manager.save(20)


REMOVERS: dict[str, Callable[[Path], object]] = {
    "retention": _save_again,
    "delete_backup": lambda run: clear_run(StoredRun(LocalStorage(run)), 100),
    "prune --keep": lambda run: _prune(run, "--keep", "1"),
    "prune --steps": lambda run: _prune(run, "--steps", "8"),
    "prune --unfinished --lost": lambda run: _prune(run, "--unfinished", "--lost", "--job-is-dead"),
}


@pytest.mark.parametrize("remover", REMOVERS)
def test_removal_never_follows_a_link(original: Path, tmp_path: Path, remover: str) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    for place, last in ((real, 10), (other, 9)):
        shutil.copytree(original, place)
        with hf.CheckpointManager(place, hf.Checkpoint(**make_objects()), keep=hf.All()) as manager:
            for step in range(8, last + 1):
                manager.save(step)
    run = tmp_path / "run"
    run.symlink_to(real)  # The run itself may be reached by a link.
    # Each kind of thing that is removed, as a link to another run's: a step, a finished, an unfinished and a lost one;
    # the trash, the spare, and what lies in a step's directory.
    (real / "step-000000006.g0001").symlink_to(other / STEP)
    (real / "step-000000011.g0002").symlink_to(other / "step-000000008.g0002")
    (real / ".trash-0123456789abcdef-step").symlink_to(other / "step-000000008.g0002")
    (real / ".holdfast-spare").symlink_to(other / DATA)
    for directory in ("step-000000008.g0002", "step-000000009.g0002"):
        (real / directory / "data-00000-of-00001.safetensors").unlink()
        (real / directory / "data-00000-of-00001.safetensors").symlink_to(other / DATA)
        (real / directory / "index-00001-of-00002.json").symlink_to(other / STEP)
    (real / "step-000000009.g0002" / "manifest.json").unlink()
    (real / "step-000000009.g0002" / "manifest.json").symlink_to(other / MANIFEST)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    names = set(real.rglob("*"))
    with contextlib.suppress(HoldfastError):
        REMOVERS[remover](run)
    assert names - set(real.rglob("*"))
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert run.is_symlink()


def test_a_step_renamed_to_another_is_not_taken_for_it(run: Path) -> None:
    (run / STEP).rename(run / "step-000000009.g0001")
    with pytest.raises(NoWholeCheckpointError, match="not to this directory"):
        hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()


def test_a_data_file_of_another_step_is_found(run: Path) -> None:
    objects = make_objects()
    with hf.CheckpointManager(run, hf.Checkpoint(**objects)) as manager:
        manager.restore()
        objects["model"]["w"][:] = 4.5
        manager.save(8)
    newer = run / "step-000000008.g0002"
    shutil.copy(run / DATA, newer / "data-00000-of-00001.safetensors")
    restored = hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()
    assert restored is not None
    assert (restored.step, len(restored.passed_over)) == (7, 1)


class Odd(SealedRecord, frozen=True):
    kind: ClassVar[str] = "manifest"
    step: int


def test_a_record_of_the_wrong_kind_is_refused(run: Path) -> None:
    shutil.copy(run / "generations/0001.json", run / MANIFEST)
    restore(run)
    (run / MANIFEST).write_bytes(seal(Odd(7)))
    with pytest.raises(NoWholeCheckpointError):
        hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore()
