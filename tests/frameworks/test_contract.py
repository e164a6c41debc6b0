"""What each integration promises, over one table: whatever ends a training, it goes on and ends as one left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from lives import PROGRAMS, Life, check_same, compiled, interrupt, live, live_together  # noqa: F401

import holdfast as hf
import preloaded
from holdfast.catalog import StoredRun
from holdfast.events.kinds import Clocked
from holdfast.storage import open_storage

HOME = "holdfast.integrations.frameworks."
KERAS = ("numpy.random", "keras", "holdfast.manager", "holdfast.training.resumable", f"{HOME}keras.callbacks")
TORCH = ("torch", "holdfast.integrations.torch")


class Integration(NamedTuple):
    """One integration, and a program that trains with it and reports each step in a line.

    Attributes:
        needs: The module without which it is left out.
        program: The program; its first argument is a directory.
        preload: What the program imports; nothing if it cannot be forked.
        leave_at: Gives the options by which it asks itself to leave at the end of a step, for that step's number.
        in_evaluations: For each life, the options by which it asks itself to leave in an evaluation, and what it
            reports last of that; None if that depends on when the signal arrives.
        options: The arguments of every life.
        lacks: How many lines a life may lack that leaves in a step: the program reports it once it has counted.
        untouched: Further options of the life that is left alone.
        variables: The environment.
    """

    needs: str
    program: str
    preload: tuple[str, ...]
    leave_at: Callable[[Any], tuple[str, ...]]
    in_evaluations: tuple[tuple[tuple[str, ...], str | None], ...]
    options: tuple[str, ...] = ()
    lacks: int = 0
    untouched: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def begin(self, directory: Path, *options: str) -> Life:
        """Begins a life."""
        given: list[str | Path] = [directory, *self.options, *options]
        return Life(self.program, *given, preload=self.preload, variables=dict(self.variables))

    def train(self, directory: Path, *options: str) -> Life:
        """A life that ends well."""
        life = self.begin(directory, *options)
        assert life.end() == 0, life.errors
        return life


def after(number: Any) -> tuple[str, ...]:
    return (f"--leaves-after={number}",)


def make_keras(backend: str, preload: tuple[str, ...]) -> Integration:
    return Integration(
        "tensorflow" if backend == "tensorflow" else "keras",
        "keras_fit.py",
        preload,
        lambda place: ("--leave", f"step {place}"),
        ((("--leave", "test 2 1"), None), (("--leave", "test 2 1"), None), (("--leave", "test 5 3"), None)),
        untouched=("--without",),
        variables=(("KERAS_BACKEND", backend), ("TF_CPP_MIN_LOG_LEVEL", "2")),
    )


INTEGRATIONS = {
    "accelerate": Integration(
        "accelerate",
        "accelerate_training.py",
        (*preloaded.TRAINING, "accelerate", f"{HOME}accelerate.loop"),
        after,
        ((("--leaves-in=1",), None),),
        lacks=1,
    ),
    "transformers": Integration(
        "transformers",
        "transformers_training.py",
        (*preloaded.TRAINING, "transformers.trainer", "accelerate", "peft", f"{HOME}transformers.callback"),
        after,
        ((("--leaves-in=14",), "14/1"), (("--leaves-in=42",), "42/1")),
    ),
    "lightning": Integration(
        "lightning",
        "lightning_fit.py",
        (*preloaded.TRAINING, "lightning.pytorch", "torchmetrics.regression", f"{HOME}lightning.fit"),
        lambda number: ("-1", "-1", str(number)),
        ((("-1", "5"), "5/0"), (("-1", "30"), "30/0")),
        options=("callbacks",),
    ),
    "keras-torch": make_keras("torch", (*KERAS, "keras.src.backend.torch.trainer", "torch._dynamo", *TORCH)),
    "keras-jax": make_keras(
        "jax", (*KERAS, "keras.src.backend.jax.trainer", *preloaded.JAX, "holdfast.integrations.jax", *TORCH)
    ),
    "keras-tensorflow": make_keras("tensorflow", ()),
}
VARIANTS: dict[str, list[tuple[str, ...]]] = {
    "accelerate": [
        ("--workers=2", "--accumulate=2"),
        ("--accumulate=3", "--seedable"),
        ("--stream",),
        ("--dispatch", "--accumulate=2"),
        ("--stream", "--workers=1"),
        ("--row=last",),
    ],
    "transformers": [("--workers=2", "--accumulate=2", "--evaluate=steps", "--own-saves=3", "--ignore-data-skip")],
    "keras-torch": [("--case", "arrays")],
    "keras-jax": [("--case", "arrays")],
    "keras-tensorflow": [("--case", "arrays"), ("--case", "pipeline")],
}
IN_SHORT = (("accelerate", ("--workers=2", "--accumulate=2")), ("accelerate", ("--row=last",)))
"""Of accelerate `make test` has the time for these; `make test-frameworks` runs all."""


def pick(name: str, *values: object, is_long: bool = False) -> Any:
    marks = [
        pytest.mark.skipif(find_spec(INTEGRATIONS[name].needs) is None, reason=f"needs {INTEGRATIONS[name].needs}")
    ]
    return pytest.param(name, *values, marks=[*marks, pytest.mark.long] if is_long else marks)


EACH = [pick(name) for name in INTEGRATIONS]


@cache
def train_untouched(name: str, options: tuple[str, ...] = ()) -> Life:
    with TemporaryDirectory() as place:
        return INTEGRATIONS[name].train(Path(place) / "run", *options, *INTEGRATIONS[name].untouched)


def list_steps(*lives: Life) -> list[str]:
    return [line for life in lives for line in life.lines if line.startswith('{"step"')]


def check_left(framework: Integration, lives: list[Life], untouched: Life) -> None:
    """Lives that left, and the last one, have trained each step once, and all ended as if untouched."""
    steps = list_steps(*lives)
    assert len(steps) == len(set(steps)), "a step was trained again"
    expected, found = set(untouched.lines), {line for life in lives for line in life.lines}
    assert found <= expected
    assert len(expected - found) <= framework.lacks * (len(lives) - 1)
    if not framework.lacks:
        check_same(lives, untouched)
    assert lives[-1].lines[-1] == untouched.lines[-1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pick(name, (), is_long=name == "accelerate") for name in INTEGRATIONS),
        *(
            pick(name, options, is_long=name == "accelerate" and (name, options) not in IN_SHORT)
            for name, each in VARIANTS.items()
            for options in each
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_training_killed_five_times_ends_as_untouched(tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    untouched, framework = train_untouched(name, options), INTEGRATIONS[name]
    lives = interrupt(lambda: framework.begin(tmp_path / "killed", *options), [signal.SIGKILL] * 5, 1, 8)
    check_same([*lives, framework.train(tmp_path / "killed", *options)], untouched)


@pytest.mark.parametrize("name", EACH)
def test_notices_in_steps_leave_no_step_trained_twice(tmp_path: Path, name: str) -> None:
    untouched, framework = train_untouched(name), INTEGRATIONS[name]
    lives = interrupt(lambda: framework.begin(tmp_path / "asked"), [signal.SIGTERM] * 2, 3, 10)
    check_left(framework, [*lives, framework.train(tmp_path / "asked")], untouched)


@pytest.mark.parametrize("name", [pick(name, is_long=name == "accelerate") for name in INTEGRATIONS])
def test_kills_and_notices_by_turns_leave_no_trace(tmp_path: Path, name: str) -> None:
    untouched, framework = train_untouched(name), INTEGRATIONS[name]
    signals = [*[signal.SIGKILL] * 2, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM]
    lives = interrupt(lambda: framework.begin(tmp_path / "other"), signals, 2, 8)
    last = framework.train(tmp_path / "other")
    expected, found = set(untouched.lines), {line for life in (*lives, last) for line in life.lines}
    assert found <= expected
    assert len(expected - found) <= 2 * framework.lacks
    assert last.lines[-1] == untouched.lines[-1]


@pytest.mark.parametrize("name", EACH)
def test_notice_in_an_evaluation_ends_the_job_within_it(tmp_path: Path, name: str) -> None:
    untouched, framework = train_untouched(name), INTEGRATIONS[name]
    lives = []
    for options, place in framework.in_evaluations:
        lives.append(framework.begin(tmp_path / "asked", *options))
        assert lives[-1].end() == 42, lives[-1].errors
        if place is not None:
            assert re.findall(r"(?:evaluated|validated) (\S+)", lives[-1].errors)[-1] == place
    lives.append(framework.train(tmp_path / "asked"))
    check_same(lives, untouched)
    steps = list_steps(*lives)
    assert len(steps) == len(set(steps)), "a step was trained again"


@pytest.mark.parametrize("name", EACH)
def test_notice_in_the_last_step_leaves_nothing_to_train(tmp_path: Path, name: str) -> None:
    untouched, framework = train_untouched(name), INTEGRATIONS[name]
    left = framework.begin(tmp_path, *framework.leave_at(json.loads(list_steps(untouched)[-1])["step"]))
    assert left.end() == 42, left.errors
    last = framework.train(tmp_path)
    assert not list_steps(last)
    check_left(framework, [left, last], untouched)


@pytest.mark.parametrize("name", EACH)
def test_training_begun_again_after_its_end_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOLDFAST_WATCHDOG", "report")  # It is off in tests, and the times of evaluations with it.
    first = INTEGRATIONS[name].train(tmp_path)
    place = tmp_path / "run" if name == "lightning" else tmp_path
    *_, clocked = StoredRun(open_storage(place)).read_journal(Clocked)
    assert isinstance(clocked, Clocked)
    assert 0 < clocked.evaluate_seconds < clocked.at_unix_seconds - clocked.begun_at_unix_seconds
    again = INTEGRATIONS[name].train(tmp_path)
    assert not list_steps(again)
    assert again.lines[-1] == first.lines[-1]


JOINT: list[tuple[str, tuple[str, ...], bool]] = [
    ("accelerate", (), False),
    ("accelerate", ("--split",), True),
    ("accelerate", ("--dispatch", "--drop-last"), True),
    ("accelerate", ("--seedable", "--accumulate=2"), True),
    ("accelerate", ("--fsdp",), True),
    ("transformers", (), False),
    ("transformers", ("--fsdp",), False),
    ("lightning", ("ddp",), False),
    ("lightning", ("parallel",), False),
]
LEAVE_TOGETHER = {"transformers": ("--leaves-in=14",), "lightning": ("-1", "24")}


@pytest.mark.parametrize(
    ("name", "options"),
    [pick(name, options, is_long=is_long) for name, options, is_long in JOINT],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_two_workers_killed_and_asked_to_leave_end_as_untouched(
    tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    def train(directory: str, *further: str, **ends: int) -> tuple[Life, Life]:
        given = (tmp_path / directory, *options, *further)
        return live_together(INTEGRATIONS[name].program, *given, preload=INTEGRATIONS[name].preload, **ends)  # type: ignore[arg-type]

    untouched = train("untouched")
    if name != "lightning":
        states = {json.loads(life.first_step()).get("state") for life in untouched}
        assert len(states) == (2 if "--fsdp" in options else 1)
    lives = [train("killed", kill_after=10)]
    if name in LEAVE_TOGETHER:
        lives.append(train("killed", *LEAVE_TOGETHER[name], ends_with=42))
        step = 24 if name == "lightning" else 14
        places = {re.findall(r"(?:evaluated|validated) (\d+)/\d", life.errors)[-1] for life in lives[-1]}
        assert places == {str(step)}
    lives.append(train("killed"))
    for rank in range(2):
        check_same([life[rank] for life in lives], untouched[rank])
        assert all(life[rank].first_step() != untouched[rank].first_step() for life in lives[1:])


@pytest.mark.parametrize(("name", "kind"), [pick("accelerate", "accelerate"), pick("transformers", "trainer")])
def test_loss_with_parameters_that_is_not_named_is_kept(tmp_path: Path, name: str, kind: str) -> None:
    preload = INTEGRATIONS[name].preload
    untouched = live("own_loss.py", tmp_path / "untouched", kind, "1", preload=preload)
    killed = Life("own_loss.py", tmp_path / "killed", kind, "1", preload=preload)
    killed.wait_steps(4)
    killed.send(signal.SIGKILL)
    killed.end()
    check_same([killed, live("own_loss.py", tmp_path / "killed", kind, "2", preload=preload)], untouched)


@pytest.mark.parametrize("name", [pick(name) for name in ("transformers", "lightning", "keras-torch")])
def test_a_mismatch_shows_the_users_frames_alone(tmp_path: Path, name: str) -> None:
    framework = INTEGRATIONS[name]
    given = (tmp_path / "run", name.partition("-")[0])
    refused = Life("refitted.py", *given, preload=framework.preload, variables=dict(framework.variables))
    assert refused.end() == 1
    said, _, error = refused.errors.partition("Traceback (most recent call last):\n")
    assert re.search(r"\d saves?; training stopped for .* \(\d.* %\); 1 checkpoint, [\d.]+ kB\n", said), said
    frames = re.findall(r'  File "(.*?)", line', error)
    assert [Path(name).name for name in frames] == ["refitted.py"] * 2, error
    assert re.search(r"MismatchError: step \d does not fit", error)
    assert "strict=False, in Resumable(...), takes what fits" in error
    assert "Traceback" not in error


def make_run(name: str, directory: Path, **options: Any) -> None:
    """Creates what resumes a training, with these options."""
    if name == "accelerate":
        import accelerate
        import torch

        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        hf.accelerate.resumable(accelerator, directory, **options)
    else:
        getattr(hf, name.partition("-")[0]).Resumable(directory, **options)


@pytest.mark.parametrize("name", [pick(name) for name in ("accelerate", "transformers", "lightning", "keras-torch")])
def test_every_epoch_is_saved_once_before_and_after_a_kill(tmp_path: Path, name: str) -> None:
    framework = INTEGRATIONS[name]
    ends = ((-signal.SIGKILL, ("4", "4")), (-signal.SIGKILL, ("4", "8")), (0, ("4",)))
    for (ends_with, given), begins in zip(ends, ("is new", "1 complete epoch (", "2 complete epochs ("), strict=True):
        life = Life(
            "plain_epochs.py",
            tmp_path / "run",
            name.partition("-")[0],
            *given,
            preload=framework.preload,
            variables=dict(framework.variables),
        )
        assert life.end() == ends_with, life.errors
        assert "saves every epoch" in life.errors
        assert begins in life.errors
    assert [name.step for name in StoredRun(open_storage(tmp_path / "run")).look().living] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_every": "500"}, "save_every must be a policy such as holdfast.Steps"),
        ({"save_evry": hf.Steps(5)}, "save_evry"),
        ({"keep": "three"}, "keep must be a policy"),
        ({"grace": "30"}, "grace must be a number of seconds"),
        ({"preemption": "never"}, "preemption"),
    ],
    ids=["save_every", "misspelt", "keep", "grace", "preemption"],
)
@pytest.mark.parametrize("name", [pick(name) for name in ("accelerate", "transformers", "lightning", "keras-torch")])
def test_wrong_option_is_refused_at_creation(tmp_path: Path, name: str, options: dict[str, Any], words: str) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras looks at it when it is imported.
    with pytest.raises(hf.errors.UsageError, match=words):
        make_run(name, tmp_path, **options)
    assert not [*tmp_path.iterdir()]


BAD_PROGRAM, BAD_STEPS = "gone_bad_fit.py", 18
"""Its steps, without a bad one."""
BACKENDS = [name for name in INTEGRATIONS if name != "keras-tensorflow"]
GOING_BAD = [pick(name) for name in BACKENDS]


def train_until_bad(name: str, directory: Path, on_nonfinite: str, bad_step: int, ends_with: int) -> Life:
    framework = INTEGRATIONS[name]
    given = (directory, name.partition("-")[0], on_nonfinite, str(bad_step))
    life = Life(BAD_PROGRAM, *given, preload=framework.preload, variables=dict(framework.variables))
    assert life.end() == ends_with, life.errors
    return life


def read_steps(lines: Sequence[str]) -> list[tuple[int, list[int]]]:
    records = [json.loads(line) for line in lines if line.startswith('{"step"')]
    return [(record["step"], record["samples"]) for record in records]


def check_weights(lines: Sequence[str], trained: Sequence[list[int]]) -> None:
    """The weight of each sample says how often that was trained."""
    counts = Counter(chain.from_iterable(trained))
    found: list[float] = json.loads(lines[-1])["weights"]
    assert found == pytest.approx([1 - 0.95 ** counts[number] for number in range(24)], abs=2e-5)


def saved(directory: Path) -> list[int]:
    return [name.step for name in StoredRun(open_storage(directory)).look().living]


@pytest.mark.parametrize("name", GOING_BAD)
def test_a_fit_whose_weights_become_nan_warns_or_ends_as_told(tmp_path: Path, name: str) -> None:
    warned = train_until_bad(name, tmp_path / "warned", "warn", 9, 0)
    assert "step 10 is not finite: nan or infinity in " in warned.errors
    assert "metrics/" not in warned.errors or name == "keras-jax"  # Of JAX all arrays count.
    assert saved(tmp_path / "warned") == [8, BAD_STEPS]  # As LastGood and Latest keep.
    for bad_step in (9, 0):  # And so does the next start.
        raised = train_until_bad(name, tmp_path / "raised", "raise", bad_step, 1)
        assert "NotFiniteError: step 10 is not finite" in raised.errors
        assert "Step 8 is the newest good one" in raised.errors
        assert read_steps(raised.lines)[-1][0] in (10, 11)


@pytest.mark.parametrize("bad_step", [9, 11], ids=["within_an_epoch", "into_the_next_epoch"])
@pytest.mark.parametrize("name", GOING_BAD)
def test_a_fit_goes_back_and_its_next_start_trains_other_batches(tmp_path: Path, name: str, bad_step: int) -> None:
    untouched = read_steps(train_until_bad(name, tmp_path / "untouched", "rollback", 0, 0).lines)
    assert [step for step, _ in untouched] == list(range(1, BAD_STEPS + 1))
    first = train_until_bad(name, tmp_path / "run", "rollback", bad_step, 1)
    good, last = bad_step - 1, read_steps(first.lines)[-1][0]
    assert last in (bad_step + 1, bad_step + 2)
    assert "RolledBackError" in first.errors
    assert f"went back from step {last} to step {good}, without what was drawn since" in first.errors
    assert "Start the program again" in first.errors
    assert saved(tmp_path / "run")[-1] == good
    second = train_until_bad(name, tmp_path / "run", "rollback", 0, 0)
    trained = read_steps(second.lines)
    assert [step for step, _ in trained] == list(range(good + 1, good + 1 + BAD_STEPS - last))
    # What is trained is what an untouched run trains, without the batches that were left out, and in its order.
    samples = [found for _, found in (*untouched[:good], *untouched[last:])]
    assert read_steps(first.lines)[:good] == untouched[:good]
    assert [found for _, found in trained] == samples[good:]
    check_weights(second.lines, samples)
    assert "was repeated with" not in second.errors


def test_a_third_time_to_one_step_is_an_error_in_later_starts_too(tmp_path: Path) -> None:
    for _ in range(2):
        assert "went back from step 11 to step 8" in train_until_bad("accelerate", tmp_path, "rollback", 9, 1).errors
    assert "training has gone back to step 8 twice" in train_until_bad("accelerate", tmp_path, "rollback", 9, 1).errors


def supervise(name: str, directory: Path, *bad_steps: int) -> subprocess.CompletedProcess[str]:
    words: tuple[str | Path, ...] = (PROGRAMS / BAD_PROGRAM, directory, name.partition("-")[0], "rollback")
    command = [sys.executable, "-m", "holdfast", "run", *words, ",".join(map(str, bad_steps))]
    variables = dict(INTEGRATIONS[name].variables, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(directory.parent / "cache"))
    return subprocess.run(
        command, env={**os.environ, **variables}, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.mark.parametrize("name", [pick(name, is_long=True) for name in BACKENDS])
def test_a_supervised_fit_that_goes_back_twice_goes_on_by_itself(tmp_path: Path, name: str) -> None:
    done = supervise(name, tmp_path / "run", 9, 9, 0)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    trained, untouched = read_steps(lines), read_steps(supervise(name, tmp_path / "untouched", 0).stdout.splitlines())
    # Each start went on after what those before it had drawn: none trains a batch of another one.
    starts = [number for number, (step, _) in enumerate(trained) if number == 0 or step <= trained[number - 1][0]]
    assert [trained[number][0] for number in starts] == [1, 9, 9]
    assert trained[starts[2] :] == [(8 + n, found) for n, (_, found) in enumerate(untouched[starts[2] :], 1)]
    check_weights(lines, [found for _, found in (*untouched[:8], *untouched[starts[2] :])])
    assert done.stderr.count("holdfast: went back at step ") == 2
    assert "Traceback" not in done.stderr
    assert "starts again in" not in done.stderr


@pytest.mark.long
def test_a_supervised_fit_ends_at_the_third_rollback_to_one_step(tmp_path: Path) -> None:
    done = supervise("accelerate", tmp_path / "run", 9, 9, 9, 0)
    assert done.returncode == 1
    assert done.stderr.count("went back from step 11 to step 8") == 2
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("holdfast: not started again: it failed with holdfast.errors.NotFiniteError: step 10 ")
    assert "training has gone back to step 8 twice" in last


@pytest.mark.parametrize("name", [pick("accelerate"), pick("transformers"), pick("lightning")])
def test_two_workers_of_a_fit_go_back_to_the_same_step(tmp_path: Path, name: str) -> None:
    def train_both(bad_step: int, ends_with: int) -> tuple[Any, ...]:
        given = (tmp_path, name, "rollback", str(bad_step))
        return live_together(BAD_PROGRAM, *given, preload=INTEGRATIONS[name].preload, ends_with=ends_with)

    first = train_both(4, 1)
    assert all("RolledBackError" in life.errors for life in first)
    last = {read_steps(life.lines)[-1][0] for life in first}
    assert len(last) == 1
    second = train_both(0, 0)
    assert {read_steps(life.lines)[0][0] for life in second} == {saved(tmp_path)[0] + 1}
