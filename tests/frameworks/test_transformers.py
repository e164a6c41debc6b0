"""The Trainer of Hugging Face goes on where it was, whatever ended it."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lives import Life, check_same, live

import holdfast as hf
import preloaded
from mounts import mounted

pytest.importorskip("transformers")

PROGRAM = "transformers_training.py"
PRELOAD = (
    *preloaded.TRAINING,
    "transformers.trainer",
    "accelerate",
    "peft",
    "holdfast.integrations.frameworks.transformers.callback",
)


def train(*options: str | Path) -> Life:
    return live(PROGRAM, *options, preload=PRELOAD)


def find_last_evaluated(life: Life) -> tuple[int, int]:
    """After how many steps the last evaluation was, and how many batches of it were evaluated."""
    step, batches = re.findall(r"evaluated (\d+)/(\d+)", life.errors)[-1]
    return int(step), int(batches)


def begin(*options: str | Path, program: str | Path = PROGRAM) -> Life:
    return Life(program, *options, preload=PRELOAD)


@pytest.mark.parametrize(
    ("options", "evaluations"),
    [(("--evaluate=steps", "--accumulate=2"), (5, 20)), (("--evaluate=steps", "--patience=2"), (20,))],
    ids=["steps", "stopping"],
)
def test_notice_in_an_evaluation_is_obeyed_at_its_next_batch(
    tmp_path: Path, options: tuple[str, ...], evaluations: tuple[int, ...]
) -> None:
    untouched = train(tmp_path / "untouched", *options)
    lives = []
    for steps in evaluations:
        lives.append(begin(tmp_path / "asked", *options, f"--leaves-in={steps}"))
        assert lives[-1].end() == 42, lives[-1].errors
        assert find_last_evaluated(lives[-1]) == (steps, 1)
    lives.append(train(tmp_path / "asked", *options))
    check_same(lives, untouched)
    steps_told = [line for life in lives for line in life.lines if line.startswith('{"step"')]
    assert len(steps_told) == len(set(steps_told))


def test_a_training_that_has_ended_trains_nothing_when_it_is_begun_again(tmp_path: Path) -> None:
    first = train(tmp_path)
    again = train(tmp_path)
    assert not [line for line in again.lines if line.startswith('{"step"')]
    assert again.lines[-1] == first.lines[-1]
    longer = train(tmp_path, "--epochs=4")
    assert "no step was added" in again.errors
    assert "no step was added" not in longer.errors
    assert longer.first_step().startswith('{"step": 43,')
    assert longer.lines[-1].startswith('{"ended": 56,')


def test_a_training_that_was_stopped_early_stays_so(tmp_path: Path) -> None:
    options = ("--patience=2", "--evaluate=steps", "--epochs=30")
    first = train(tmp_path, *options)
    assert not first.lines[-1].startswith('{"ended": 420,')
    again = train(tmp_path, *options)
    assert not [line for line in again.lines if line.startswith('{"step"')]
    assert again.lines[-1] == first.lines[-1]


def test_a_second_call_of_train_is_left_alone_with_a_warning(tmp_path: Path) -> None:
    life = train(tmp_path, "--again", "--epochs=1")
    assert life.lines[-1] == '{"again": 14}\n'
    assert "this is the second train() in this process" in life.errors


def test_a_stream_without_a_place_is_loaded_again_with_a_warning(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched", "--stream")
    killed = begin(tmp_path / "killed", "--stream")
    killed.wait_steps(20)
    killed.send(signal.SIGKILL)
    killed.end()
    after = train(tmp_path / "killed", "--stream")
    check_same([killed, after], untouched)
    assert "Stream can only be read from its beginning" in after.errors


@pytest.mark.parametrize(("evaluates", "leaves_in"), [("epoch", 14), ("steps", 10)])
def test_stream_of_unknown_length_resumes_in_its_epoch_and_ends_once(
    tmp_path: Path, evaluates: str, leaves_in: int
) -> None:
    options = ("--unsized-steps=20", "--accumulate=2", f"--evaluate={evaluates}")  # An epoch has seven steps.
    untouched = train(tmp_path / "untouched", *options)
    left = begin(tmp_path / "left", *options, f"--leaves-in={leaves_in}")
    assert left.end() == 42, left.errors
    after = train(tmp_path / "left", *options)
    check_same([left, after], untouched)
    assert json.loads(after.first_step())["step"] == leaves_in + 1
    again = train(tmp_path / "left", *options)
    assert not [line for line in again.lines if line.startswith('{"step"')]
    assert again.lines[-1] == untouched.lines[-1]
    longer = train(tmp_path / "left", *options, "--unsized-steps=24")
    assert json.loads(longer.first_step())["seen"] == [52.0]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What came of each case, and what was written to standard error."""
    life = live("transformers_cases.py", tmp_path_factory.mktemp("cases"), preload=PRELOAD)
    return {line["case"]: line["came"] for line in map(json.loads, life.lines)}, life.errors


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("kept already", "UsageError: an object named model is already saved"),
        ("DeepSpeed", "UnsupportedValueError: training with accelerate's DEEPSPEED cannot be saved"),
        ("FSDP1", "UnsupportedValueError: FSDP1 cannot be saved: each worker holds a flat piece of the parameters"),
        ("tensor parallel", "UnsupportedValueError: a parallelism_config with tp_size=2 splits the model"),
        ("batch size", "UsageError: auto_find_batch_size=True restarts the training"),
        ("two of them", "UsageError: a Trainer takes one Resumable"),
        ("changed model", "wrong shape: model/layers.0.weight: stored [8, 4], live [16, 4]"),
        ("other run", "MismatchError: step 1 does not fit the live objects (nothing was changed)"),
        ("added later", "UsageError: holdfast.transformers.Resumable was added after the Trainer was created"),
        ("loop, DeepSpeed", "UnsupportedValueError: training with accelerate's DEEPSPEED cannot be saved"),
        ("loop, FSDP1", "UnsupportedValueError: FSDP1 cannot be saved: each worker holds a flat piece"),
        ("loop, tensor parallel", "UnsupportedValueError: a parallelism_config with tp_size=2 splits the model"),
        ("loop, prepared nothing", "UsageError: the accelerator has not prepared anything yet"),
        ("loop, prepared name", "UsageError: an object named model is already saved"),
    ],
    ids=lambda value: value.split(":")[0],
)
def test_what_cannot_be_right_is_refused_in_words(outcomes: tuple[dict[str, Any], str], case: str, words: str) -> None:
    assert words in outcomes[0][case]


def test_a_trainer_that_saves_as_well_is_warned_and_left_alone(outcomes: tuple[dict[str, Any], str]) -> None:
    own, kept = outcomes[0]["both save"]
    assert own == ["checkpoint-4", "checkpoint-8"]
    assert kept[-1] == "step-000000008"
    assert outcomes[1].count("holdfast: the Trainer saves as well, to ") == 1
    assert 'Set save_strategy="no"' in outcomes[1]


def test_the_best_model_at_the_end_is_loaded_by_the_trainer(outcomes: tuple[dict[str, Any], str]) -> None:
    found = outcomes[0]["best at end"]
    assert found.pop("best step") < 8
    assert all(found.values())


def test_an_entry_of_the_log_is_read_by_one_save_alone(outcomes: tuple[dict[str, Any], str]) -> None:
    assert outcomes[0]["long log"] == {"reads": [1], "restored": [100, 200, 300], "the same": True}


def test_job_resumes_from_the_step_before_a_damaged_one(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    lives = [begin(tmp_path / "damaged")]
    lives[-1].wait_steps(20)
    lives[-1].send(signal.SIGKILL)
    lives[-1].end()
    for _ in range(2):
        newest = max((tmp_path / "damaged").glob("step-*/manifest.json")).parent
        data = next(newest.glob("data-*"))
        content = bytearray(data.read_bytes())
        content[-4096:] = bytes(each ^ 255 for each in content[-4096:])
        data.write_bytes(content)
        lives.append(train(tmp_path / "damaged"))
        assert f"step {int(newest.name[5:14])} skipped because it is damaged" in lives[-1].errors
        check_same(lives, untouched)


def test_full_disk_is_named_and_the_job_resumes_later(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as place:
        lives = [begin(place / "run")]
        lives[-1].wait_steps(10)
        with suppress(OSError), (place / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        assert lives[-1].end() == 1
        assert "No space left on device" in lives[-1].errors
        (place / "filler").unlink()
        lives.append(train(place / "run"))
        check_same(lives, untouched)


@pytest.mark.parametrize(("kind", "file"), [("model", "model"), ("adapter", "adapter_model")])
def test_a_model_is_exported_as_save_pretrained_writes_it(tmp_path: Path, kind: str, file: str) -> None:
    from safetensors.torch import load_file

    live("transformers_language.py", tmp_path, kind, preload=PRELOAD)
    hf.export_checkpoint(tmp_path / "run", tmp_path / "exported", to="transformers")
    exported, written = (load_file(tmp_path / name / f"{file}.safetensors") for name in ("exported", "written"))
    assert exported.keys() == written.keys()
    assert all(exported[name].equal(array) for name, array in written.items())
    for config in (tmp_path / "written").glob("*config.json"):
        own = json.loads((tmp_path / "exported" / config.name).read_text())
        assert own.keys() == json.loads(config.read_text()).keys()


def test_a_frozen_base_is_written_once_with_incremental(tmp_path: Path) -> None:
    live("transformers_language.py", tmp_path, "adapter", preload=PRELOAD)
    sizes = [each.stat().st_size for each in sorted((tmp_path / "run").glob("step-*/data-*"))]
    assert len(sizes) == 3
    assert max(sizes[1:]) < sizes[0] / 2


def test_a_reference_that_follows_and_a_window_of_generated_inputs_go_on(tmp_path: Path) -> None:
    untouched = live("moving_modules.py", tmp_path / "untouched", "1", "moving", preload=PRELOAD)
    lives = []
    for seed, steps in enumerate((4, 1, 3), 1):
        life = Life("moving_modules.py", tmp_path / "killed", str(seed), "moving", preload=PRELOAD)
        life.wait_steps(steps)
        life.send(signal.SIGKILL)
        life.end()
        lives.append(life)
    check_same([*lives, live("moving_modules.py", tmp_path / "killed", "9", "moving", preload=PRELOAD)], untouched)
    stored = hf.load(tmp_path / "killed" / "run")
    assert stored["moved_ref_model"]
    assert stored["moved_slowest"]
    assert not stored["moved_teacher"]


def test_run_without_the_moving_state_resumes_with_a_warning(tmp_path: Path) -> None:
    plain = Life("moving_modules.py", tmp_path, "1", "plain", preload=PRELOAD)
    plain.wait_steps(4)
    plain.send(signal.SIGKILL)
    plain.end()
    moving = live("moving_modules.py", tmp_path, "1", "moving", preload=PRELOAD)
    assert json.loads(moving.lines[0])["step"] > 1
    assert "lacks moved_ref_model, moved_teacher, moved_slowest" in moving.errors
    again = live("moving_modules.py", tmp_path, "1", "moving", preload=PRELOAD)
    assert "lacks" not in again.errors
