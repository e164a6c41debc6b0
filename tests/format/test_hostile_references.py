"""References are untrusted input as all records are: whatever they say, the right state comes back or a clean error."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.catalog.survey import survey_run
from holdfast.errors import FormatError, HoldfastError, NoWholeCheckpointError
from holdfast.format.digests import SPAN_BYTES, digest, seal
from holdfast.format.index import MAX_SOURCES, Index, LeafRecord, ReferredRecord, Source
from holdfast.format.index_checks import decode_index
from holdfast.format.names import MAX_ATTEMPT, MAX_STEP, StepName
from holdfast.format.records import (
    REFERENCES,
    Manifest,
    Reference,
    WorkerRecord,
    decode_manifest,
)
from holdfast.storage import LocalStorage

STEP = "step-000000008.g0001"
MANIFEST = f"{STEP}/manifest.json"
INDEX = f"{STEP}/index-00000-of-00001.json"
MEMORY_LIMIT_BYTES = 64 << 20

SOURCES = (Source(3, 1, 1, 0, 1, 5000), Source(5, 1, 1, 0, 1, 8192))
REFERRED = (
    ReferredRecord("b", "F64", (2,), 4096, 4112, "b" * 32, 0),
    ReferredRecord("c", "F32", (4,), 4500, 4516, "c" * 32, 0),
    ReferredRecord("d", "U8", (4096,), 4096, 8192, "d" * 32, 1),
)


def make_index(**changes: Any) -> Index:
    index = Index(
        step=8,
        generation=1,
        attempt=1,
        rank=0,
        world_size=1,
        data_bytes=4112,
        header_bytes=4096,
        header_digest="0" * 32,
        span_bytes=SPAN_BYTES,
        leaves=(LeafRecord("a", "F64", (2,), 4096, 4112, "a" * 32),),
        objects={},
        sources=SOURCES,
        referred=REFERRED,
    )
    return msgspec.structs.replace(index, **changes)


def source(**changes: Any) -> tuple[Source, ...]:
    return (SOURCES[0], msgspec.structs.replace(SOURCES[1], **changes))


def referred(place: int, **changes: Any) -> tuple[ReferredRecord, ...]:
    return tuple(
        msgspec.structs.replace(record, **changes) if number == place else record
        for number, record in enumerate(REFERRED)
    )


def test_an_index_with_references_comes_back() -> None:
    index = make_index()
    assert decode_index(seal(index), path="i") == index
    assert [leaf.name for leaf in index.all_leaves()] == ["a", "b", "c", "d"]
    assert index.refers_to() == {StepName(3, 1): (2, 32), StepName(5, 1): (1, 4096)}


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": ()},
        {"referred": ()},
        {"sources": SOURCES[:1]},
        {"sources": (*SOURCES, Source(6, 1, 1, 0, 1, 10))},
        {"sources": SOURCES[::-1]},
        {"sources": (SOURCES[0], SOURCES[0])},
        {"sources": (SOURCES[0], msgspec.structs.replace(SOURCES[0], data_bytes=9999))},
        {"sources": source(step=8)},
        {"sources": source(step=9)},
        {"sources": source(step=-1)},
        {"sources": source(step=MAX_STEP + 1)},
        {"sources": source(generation=2)},
        {"sources": source(generation=0)},
        {"sources": source(attempt=0)},
        {"sources": source(attempt=MAX_ATTEMPT + 1)},
        {"sources": source(step=8, attempt=2)},
        {"sources": source(rank=1)},
        {"sources": source(rank=-1)},
        {"sources": source(world_size=0)},
        {"sources": source(world_size=1 << 40)},
        {"sources": source(data_bytes=8191)},
        {"sources": source(data_bytes=-1)},
        {"referred": REFERRED[::-1]},
        {"referred": (REFERRED[1], REFERRED[0], REFERRED[2])},
        {"referred": (*REFERRED, REFERRED[0])},
        {"referred": referred(0, source=1)},
        {"referred": referred(0, source=-1)},
        {"referred": referred(2, source=2)},
        {"referred": referred(2, source=1 << 62)},
        {"referred": referred(0, name="a")},
        {"referred": referred(0, name="c")},
        {"referred": referred(0, begin=4501, end=4517)},
        {"referred": referred(0, begin=-16, end=0)},
        {"referred": referred(2, begin=4097, end=8193)},
        {"referred": referred(2, begin=1 << 60, end=(1 << 60) + 4096)},
        {"referred": referred(0, end=4111)},
        {"referred": referred(0, shape=(3,))},
        {"referred": referred(0, shape=(-2,))},
        {"referred": referred(0, dtype="object")},
        {"referred": referred(0, spans="b" * 31)},
        {"referred": referred(0, spans="B" * 32)},
        {"referred": referred(0, shape=(1,) * 100)},
        {
            "sources": tuple(Source(1, 1, attempt, 0, 1, 10) for attempt in range(1, MAX_SOURCES + 2)),
            "referred": tuple(
                ReferredRecord(f"x{number}", "U8", (1,), 0, 1, "0" * 32, number) for number in range(MAX_SOURCES + 1)
            ),
        },
    ],
)
def test_references_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        decode_index(seal(make_index(**changes)), path="i")


def test_a_step_refers_to_earlier_ones_only() -> None:
    """Also across generations and attempts; so no two steps can refer to each other."""
    for name, earlier in (((8, 2, 1), (8, 1, 7)), ((8, 1, 2), (8, 1, 1)), ((8, 2, 1), (3, 1, 1))):
        index = make_index(
            **dict(zip(("step", "generation", "attempt"), name, strict=True)),
            sources=(Source(*earlier, 0, 1, 5000),),
            referred=REFERRED[:2],
        )
        assert decode_index(seal(index), path="i") == index
        turned = make_index(
            **dict(zip(("step", "generation", "attempt"), earlier, strict=True)),
            sources=(Source(*name, 0, 1, 5000),),
            referred=REFERRED[:2],
        )
        with pytest.raises(FormatError, match="is not older than"):
            decode_index(seal(turned), path="i")


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        step=8,
        generation=1,
        attempt=1,
        token="t",
        committed_at_unix_seconds=1.5,
        workers=(WorkerRecord(10, "0" * 32, 20),),
        metrics={},
        metadata={},
        versions={},
        features=(REFERENCES,),
        references=(Reference(3, 1, 1, 2, 32), Reference(5, 1, 1, 1, 4096)),
    )
    return msgspec.structs.replace(manifest, **changes)


def test_a_manifest_with_references_comes_back() -> None:
    data = seal(make_manifest())
    assert decode_manifest(data, path="m", expected=StepName(8, 1)) == make_manifest()
    assert [one.name for one in make_manifest().references] == [StepName(3, 1), StepName(5, 1)]
    assert make_manifest().referred_bytes == 4128


@pytest.mark.parametrize(
    "changes",
    [
        {"features": ()},
        {"references": (Reference(5, 1, 1, 1, 1), Reference(3, 1, 1, 1, 1))},
        {"references": (Reference(3, 1, 1, 1, 1),) * 2},
        {"references": (Reference(8, 1, 1, 1, 1),)},
        {"references": (Reference(9, 1, 1, 1, 1),)},
        {"references": (Reference(3, 2, 1, 1, 1),)},
        {"references": (Reference(3, 0, 1, 1, 1),)},
        {"references": (Reference(3, 1, 0, 1, 1),)},
        {"references": (Reference(3, 1, 1, 0, 1),)},
        {"references": (Reference(3, 1, 1, 1, -1),)},
        {"references": tuple(Reference(1, 1, attempt, 1, 1) for attempt in range(1, MAX_SOURCES + 2))},
    ],
)
def test_references_of_a_manifest_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    data = seal(make_manifest(**changes))
    for is_read in (True, False):
        with pytest.raises(FormatError):
            decode_manifest(data, path="m", expected=StepName(8, 1), is_read=is_read)


def test_a_feature_that_is_not_known_is_refused_and_named() -> None:
    data = seal(make_manifest(features=(REFERENCES, "new")))
    with pytest.raises(FormatError) as refused:
        decode_manifest(data, path="m", expected=None)
    assert refused.value.message == "m: needs a reader that supports 'new'"
    assert "newer" in refused.value.hint
    assert decode_manifest(data, path="m", expected=None, is_read=False).references == make_manifest().references


# Whole runs.


def make_objects() -> dict[str, Any]:
    return {"frozen": {"w": np.zeros((40, 30)), "b": np.zeros(5, np.float32)}, "trained": np.zeros(20)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 8 refers to steps 6 and 7."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    objects = make_objects()
    with hf.CheckpointManager(run, hf.Checkpoint(**objects), incremental=True) as manager:
        objects["frozen"]["w"][:] = 3.5
        manager.save(6)
        objects["frozen"]["b"][:] = 2.5
        manager.save(7)
        objects["trained"][:] = 8
        manager.save(8)
    (run / "events.jsonl").unlink()
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "run"
    shutil.copytree(original, copy)
    yield copy
    shutil.rmtree(copy, ignore_errors=True)


def rewrite(run: Path, index: Index | None = None, manifest: Manifest | None = None) -> None:
    """Puts other records in place, the manifest vouching for the index and, if it is not given, for its references."""
    known = decode_manifest((run / MANIFEST).read_bytes(), path=MANIFEST, expected=None)
    if index is not None:
        data = seal(index)
        (run / INDEX).write_bytes(data)
        worker = WorkerRecord(len(data), digest(data), index.data_bytes)
        known = msgspec.structs.replace(known, workers=(worker,))
        references = []
        for name, (leaves, size_bytes) in sorted(count_references(index).items()):
            references.append(Reference(name.step, name.generation, name.attempt, leaves, size_bytes))
        known = msgspec.structs.replace(known, references=tuple(references))
    (run / MANIFEST).write_bytes(seal(manifest or known))


def count_references(index: Index) -> dict[StepName, tuple[int, int]]:
    try:
        return index.refers_to()
    except (IndexError, TypeError):
        return {}


def restore(run: Path) -> int | None:
    """Restores into fresh objects: gives the step if the state is right, None if that fails cleanly."""
    objects = make_objects()
    tracemalloc.start()
    try:
        restored = hf.CheckpointManager(run, hf.Checkpoint(**objects)).restore()
        assert restored is not None
        assert (objects["frozen"]["w"] == 3.5).all()
        assert (objects["frozen"]["b"] == (2.5 if restored.step > 6 else 0)).all()
        assert (objects["trained"] == (8 if restored.step == 8 else 0)).all()
        return restored.step
    except HoldfastError:
        return None
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < MEMORY_LIMIT_BYTES


HUGE = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 6, 7, 8, 4096, 4097, 1 << 31, 1 << 53, (1 << 63) - 1])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_false_references_give_the_right_state_or_a_clean_error(data: st.DataObject, original: Path, run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(original, run)
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    sources, records = list(index.sources), list(index.referred)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(sources) - 1))
            name = data.draw(st.sampled_from(Source.__struct_fields__))
            sources[place] = msgspec.structs.replace(sources[place], **{name: data.draw(HUGE)})
        else:
            place = data.draw(st.integers(0, len(records) - 1))
            name = data.draw(st.sampled_from(("begin", "end", "source", "name", "shape")))
            value = data.draw({"name": st.text(max_size=3), "shape": st.tuples(HUGE)}.get(name, HUGE))
            records[place] = msgspec.structs.replace(records[place], **{name: value})
    rewrite(run, msgspec.structs.replace(index, sources=tuple(sources), referred=tuple(records)))
    assert restore(run) in (None, 6, 7, 8)
    survey_run(LocalStorage(run))
    with hf.CheckpointManager(run, hf.Checkpoint(**make_objects()), keep=hf.Latest(1), incremental=True) as manager:
        manager.save(9)
    assert StoredRun(LocalStorage(run)).look().newest == StepName(9, 2)


def test_an_index_that_refers_elsewhere_than_its_manifest_says_is_refused(run: Path) -> None:
    manifest = decode_manifest((run / MANIFEST).read_bytes(), path=MANIFEST, expected=None)
    assert len(manifest.references) == 2
    for references in ((), manifest.references[:1], (Reference(6, 1, 1, 1, 1), manifest.references[1])):
        rewrite(run, manifest=msgspec.structs.replace(manifest, references=references))
        with pytest.raises(NoWholeCheckpointError, match="its references differ from those of the indexes"):
            hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore(8)
        assert restore(run) == 7


def test_bytes_of_another_place_in_a_source_do_not_pass(run: Path) -> None:
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    number = next(number for number, leaf in enumerate(index.referred) if leaf.name == "frozen/w")
    leaf = index.referred[number]
    moved = msgspec.structs.replace(leaf, begin=leaf.begin - 8, end=leaf.end - 8)
    records = tuple(moved if other is leaf else other for other in index.referred)
    rewrite(run, msgspec.structs.replace(index, referred=records))
    with pytest.raises(NoWholeCheckpointError, match="do not match their digest; they belong to 'frozen/w'"):
        hf.CheckpointManager(run, hf.Checkpoint(**make_objects())).restore(8)


def test_a_reference_to_a_huge_array_takes_no_memory(run: Path) -> None:
    size_bytes = 1 << 40
    index = decode_index((run / INDEX).read_bytes(), path=INDEX)
    forged = msgspec.structs.replace(
        index,
        span_bytes=1 << 50,
        leaves=(),
        data_bytes=index.header_bytes,
        sources=(Source(6, 1, 1, 0, 1, size_bytes),),
        referred=(ReferredRecord("frozen/w", "U8", (size_bytes,), 0, size_bytes, "0" * 32, 0),),
        objects={"frozen": {"w": {"$": "array", "v": "frozen/w", "k": "numpy"}}},
    )
    rewrite(run, forged)
    os.truncate(run / STEP / "data-00000-of-00001.safetensors", index.header_bytes)
    tracemalloc.start()
    with pytest.raises(NoWholeCheckpointError, match=f"{size_bytes} were written"):
        hf.CheckpointManager(run, hf.Checkpoint(frozen={})).restore(8)
    assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT_BYTES
    tracemalloc.stop()
    # Where the file does have that size (a sparse one costs nothing), the answer is clean all the same.
    os.truncate(run / "step-000000006.g0001" / "data-00000-of-00001.safetensors", size_bytes)
    with pytest.raises(HoldfastError):
        hf.CheckpointManager(run, hf.Checkpoint(frozen={})).restore(8)
