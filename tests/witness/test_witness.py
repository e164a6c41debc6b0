"""What a restart repeats is compared with what the process before it did."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.cli.main import holdfast
from holdfast.events import Event, WitnessAgreed, WitnessDiffers
from holdfast.storage import LocalStorage
from holdfast.witness.batches import digest_batch
from holdfast.witness.ring import SLOTS, Ring, StepRecord, decode, read_ring
from mounts import fill, mounted
from places import PROGRAMS

PROGRAM = PROGRAMS / "witnessed.py"
SAME = "WitnessAgreed steps 21 to 39 were repeated with the same data and the same loss"
FAULTY = PROGRAM.with_name("faulty_loaders.py")
PAGE = ' (see "If repeated steps differ" in docs/guides/restoring.md)'

CASES = {
    "steps": [SAME, "exit 0"],
    "handler": ["WitnessAgreed steps 21 to 39 were repeated with the same data", "exit 0"],
    "silent": ["WitnessAgreed steps 21 to 39 were repeated with the same data", "exit 0"],
    "alone": ["WitnessAgreed steps 21 to 39 were repeated with the same loss", "exit 0"],
    "steps:order": [f"WitnessDiffers step 26 was repeated with other data of sampler than before the restart{PAGE}"],
    "own:more": [
        f"WitnessDiffers step 31 was repeated with 2 of the batches of sampler; before the restart it took 1{PAGE}"
    ],
    "steps:hidden": ["WitnessDiffers step 21 was repeated with the same data, but the loss "],
    "alone:hidden": ["WitnessDiffers step 21 was repeated with the loss "],
    "strict:hidden": [
        "WitnessDiffers step 21 was repeated with the same data, but the loss ",
        "ResumeDiffersError 21 loss",
        "exit 1",
    ],
    # What was announced is not compared.
    "steps:batch_size": ["exit 0"],
    "steps:begin_anew": ["exit 0"],
}


def test_killed_runs_say_whether_they_repeat_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, *CASES], capture_output=True, text=True, timeout=240, check=True
    )
    for case, expected in CASES.items():
        lines = [line.removeprefix(f"{case}: ") for line in done.stdout.splitlines() if line.startswith(f"{case}: ")]
        wanted = expected if expected[-1].startswith("exit") else [*expected, "exit 0"]
        assert len(lines) == len(wanted), (case, lines, done.stderr)
        assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True)), (case, lines)


ANOTHER_ORDER = f"WitnessDiffers step 15 was repeated with other data of loader than before the restart{PAGE}"
FAULTS = {
    "none": "WitnessAgreed steps 15 to 19 were repeated with the same data and the same loss",
    "begun before": "WitnessAgreed steps 15 to 19 were repeated with the same data and the same loss",
    "order of the first epoch": ANOTHER_ORDER,
    "buffer": ANOTHER_ORDER,
    "hidden generator": ANOTHER_ORDER,
    "accumulation": "WitnessDiffers step 18 was repeated with 2 of the batches of loader; before the restart it took 1",
    "batches by hand": "WitnessDiffers step 15 was repeated with the loss ",
    "criterion": "WitnessDiffers step 15 was repeated with the same data, but the loss ",
    "moments": "WitnessDiffers step 16 was repeated with the same data, but the loss ",
}
"""Of each fault the only line: the first step that differs, in what, and which loader gave it."""


def test_each_kind_of_fault_in_data_and_state_is_reported_once(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    command: list[Any] = [sys.executable, "-W", "ignore", FAULTY, tmp_path, *FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    for case, line in FAULTS.items():
        lines = [one.removeprefix(f"{case}: ") for one in done.stdout.splitlines() if one.startswith(f"{case}: ")]
        assert len(lines) == 2, (case, lines, done.stderr)
        assert lines[0].startswith(line), case
        assert lines[1] == "exit 0", case


class Batches:
    """The numbers of the samples."""

    def __init__(self, sampler: hf.ResumableSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return map(np.array, self.sampler)


def train(
    directory: Path,
    steps: int,
    *,
    events: list[Event] | None = None,
    first: float = 0.0,
    hidden: float = 0.0,
    batch_size: int = 4,
    **options: Any,
) -> None:
    """Trains, in this process, and leaves the run with an error after so many steps."""
    weights = np.zeros(3) + first
    seen: list[Event] = [] if events is None else events
    sampler = hf.ResumableSampler(400, batch_size=batch_size, seed=1)
    objects: dict[str, Any] = {"weights": weights, **({"sampler": sampler} if "quiet" in options else {})}
    batches = sampler.stream(Batches(sampler))
    try:
        with hf.resumable(
            directory, **objects, save_every=hf.Steps(5), sinks=[seen.append], **{"quiet": True, **options}
        ) as run:
            for step in run.steps(100):
                weights += next(batches).mean() if "sampler" in objects else 1
                run.report(loss=float(weights.sum() + hidden))
                if step % 5 == 1:
                    run.manager.wait()
                if step == steps:
                    raise KeyError(step)
    except KeyError:
        pass


def compared(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, WitnessAgreed | WitnessDiffers)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spoil(ring: Path) -> list[tuple[str, bytes]]:
    whole = ring.read_bytes()
    middle = 64 * 12
    return [
        ("torn", whole[:middle] + whole[middle : middle + 20] + bytes(44) + whole[middle + 64 :]),
        ("short", whole[: middle + 10]),
        ("empty", b""),
        ("garbage", os.urandom(len(whole))),
        ("longer", whole + whole),
        ("shifted", bytes(64) + whole[:-64]),
    ]


def test_a_damaged_file_of_records_costs_no_more_than_its_records(tmp_path: Path) -> None:
    train(tmp_path / "run", 17)
    ring = tmp_path / "run" / "witness" / "00000.ring"
    assert sorted(decode(ring.read_bytes())) == list(range(min(decode(ring.read_bytes())), 18))
    for name, data in spoil(ring):
        ring.write_bytes(data)
        events: list[Event] = []
        train(tmp_path / "run", 18, events=events)
        assert not any(isinstance(event, WitnessDiffers) for event in compared(events)), name
        assert ring.stat().st_size >= SLOTS * 64, name


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "directory"])
def test_path_that_is_not_a_file_of_records_is_left_alone(tmp_path: Path, cache: Path, kind: str) -> None:
    folder = tmp_path / "run" / "witness"
    folder.mkdir(parents=True)
    ring, other = folder / "00000.ring", tmp_path / "other"
    other.write_text("mine")
    if kind == "file":
        folder.rmdir()
        folder.write_text("mine")
    elif kind == "link":
        ring.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(ring)
    else:
        ring.mkdir()
    train(tmp_path / "run", 17)
    events: list[Event] = []
    train(tmp_path / "run", 40, events=events)
    assert [str(event) for event in compared(events)] == ["steps 16 to 17 were repeated with the same loss"]
    assert other.read_text() == "mine"
    assert len(list(cache.glob("holdfast/witness/*.ring"))) == 1


def test_a_full_or_read_only_disk_ends_the_witness_alone(tmp_path: Path) -> None:
    record = StepRecord(7, 1, 2, 3, 4, 3, 1, 5, 0.5)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        storage = LocalStorage(disk / "run")
        ring = Ring(storage, 0)
        ring.write(record)
        assert not (disk / "run").exists(), "no run has begun there yet"
        (disk / "run").mkdir()
        fill(disk)
        ring.write(record)
        ring.close()
        assert not any((disk / "run" / "witness").iterdir())
        assert read_ring(storage, 0) == {7: record}
        (disk / "filler").unlink()
        train(disk / "run", 7)
        events: list[Event] = []
        train(disk / "run", 9, events=events)
        assert [str(event) for event in compared(events)] == ["steps 6 to 7 were repeated with the same loss"]
    # The file is written on, though its file system is no longer mounted here.
    train(tmp_path / "disk" / "run", 7)


def test_the_records_go_with_the_run(tmp_path: Path) -> None:
    train(tmp_path / "run", 17)
    assert StoredRun(LocalStorage(tmp_path / "run")).look().newest is not None
    # A fresh start repeats nothing, though it counts the same steps.
    events: list[Event] = []
    train(tmp_path / "run", 17, events=events, begin_anew=True)
    assert compared(events) == []
    # Nor does what is restored of it compare with what lies beyond, of the first start.
    train(tmp_path / "run", 12, begin_anew=True)
    train(tmp_path / "run", 40, events=events)
    assert [str(event) for event in compared(events)] == ["steps 11 to 12 were repeated with the same loss"]


COMPARED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "steps 16 to 17 were repeated with the same data and the same loss"),
    "batch": (
        {"batch_size": 5, "strict": False},
        "steps that were repeated are not compared: the number of workers, the batch size, the length or the seed of "
        "the data has changed",
    ),
    "threads": (
        {"OMP_NUM_THREADS": "63"},
        "steps 16 to 17 were repeated with the same data; losses are not compared: the software, the machine or what "
        "is restored has changed",
    ),
    "kept": (
        {"keep_current": "weights"},
        "steps 16 to 17 were repeated with the same data; losses are not compared: the software, the machine or what "
        "is restored has changed",
    ),
}


@pytest.mark.parametrize("change", COMPARED)
def test_a_line_says_why_repeated_steps_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    options, line = dict(COMPARED[change][0]), COMPARED[change][1]
    train(tmp_path / "run", 17, quiet=False)
    if "OMP_NUM_THREADS" in options:
        monkeypatch.setenv("OMP_NUM_THREADS", options.pop("OMP_NUM_THREADS"))
    with caplog.at_level("INFO", "holdfast"):
        train(tmp_path / "run", 40, quiet=False, **options)
    assert [one.message for one in caplog.records if "were repeated" in one.message] == [line]


def test_a_start_from_the_beginning_says_that_it_compares_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", 7, quiet=False)
    for step in (tmp_path / "run").glob("step-*"):
        shutil.rmtree(step)
    with caplog.at_level("INFO", "holdfast"):
        train(tmp_path / "run", 7, quiet=False)
    (begun,) = (text for text in caplog.messages if "is new" in text)
    assert begun.endswith("; the steps of an earlier start, up to step 7, are trained again and not compared")


def test_a_strict_restart_fails_at_each_start_and_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", 17)
    for _ in range(3):
        events: list[Event] = []
        with (
            caplog.at_level("INFO", "holdfast"),
            pytest.raises(hf.errors.ResumeDiffersError, match="step 16 was repeated with the loss"),
        ):
            train(tmp_path / "run", 40, events=events, hidden=1, strict_resume=True)
        assert len(compared(events)) == 1
        assert not [record for record in caplog.records if "was repeated" in record.message]
    train(tmp_path / "run", 40, hidden=1)
    assert len([record for record in caplog.records if "was repeated" in record.message]) == 1


class Odd:
    def __init__(self, values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return {"values": self.values}


def batches() -> list[Any]:
    images = np.arange(64 * 3 * 40 * 40, dtype=np.float32).reshape(64, 3, 40, 40)
    return [
        np.arange(6),
        np.arange(6, dtype=np.int32),
        np.arange(6).reshape(2, 3),
        (np.arange(6), np.arange(2)),
        [np.arange(6), np.arange(2)],
        {"x": np.arange(6)},
        {"y": np.arange(6)},
        ["a", "b"],
        ["a", "c"],
        [1, 2.0, None],
        [np.float32(1)],
        [np.float32(2)],
        Odd(np.arange(3)),
        Odd(np.arange(4)),
        images,
        images[::-1],
        images.transpose(0, 2, 3, 1),
        np.array(["a", None], dtype=object),
        np.array(["b", None], dtype=object),
        list(range(500)),
    ]


def test_digests_of_batches_differ_between_them_and_are_stable() -> None:
    digests = [digest_batch(batch) for batch in batches()]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_batch(batch) for batch in batches()]
    assert not any(digest & 1 for digest in digests)
    # Of a large array some bytes of every sample count.
    large = np.zeros((300, 3, 40, 40), np.float32)
    for sample in range(300):
        changed = large.copy()
        changed[sample] += 1
        assert digest_batch(changed) != digest_batch(large)


def test_batches_of_torch_and_jax_are_seen_without_a_copy() -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    values = np.arange(6, dtype=np.float32)
    assert digest_batch(torch.from_numpy(values)) == digest_batch(values) == digest_batch(jnp.asarray(values))
    brain = torch.arange(6, dtype=torch.bfloat16)
    assert digest_batch(brain) == digest_batch(brain.clone()) != digest_batch(brain + 1)
    assert digest_batch(torch.ones(3, requires_grad=True)) & 1 == 0
    for unseen in (torch.ones(3, device="meta"), torch.ones(2, 2).to_sparse()):
        assert digest_batch(unseen) & 1 == 1


def test_show_and_diff_say_what_the_records_of_runs_have(tmp_path: Path) -> None:
    def ask(*words: object) -> Any:
        found = CliRunner().invoke(holdfast, [*map(str, words)])
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout) if "--json" in words else found.stdout

    train(tmp_path / "a", 17)
    train(tmp_path / "a", 23)
    train(tmp_path / "b", 23, first=3.0)
    train(tmp_path / "c", 23)
    witness = ask("show", tmp_path / "a", "--json")["witness"]
    assert witness["last_step"] == 23
    assert witness["first_step"] <= 6
    assert witness["last_comparison"]["text"] == "steps 16 to 17 were repeated with the same loss"
    assert "last restart: steps 16 to 17 were repeated" in ask("show", tmp_path / "a")
    for other, at in (("b", "first_step"), ("c", None)):
        found = ask("diff", tmp_path / "a", tmp_path / other, "--json")["witness"]
        assert found.keys() == {"loss"}
        assert found["loss"]["last_step"] == 23
        assert found["loss"]["differs_at"] == (None if at is None else found["loss"][at])
    assert "to 23: is the same\n" in ask("diff", tmp_path / "a", tmp_path / "c")
    assert ask("diff", f"{tmp_path}/a@10", f"{tmp_path}/a@15", "--json")["witness"] is None
