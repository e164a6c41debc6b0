"""What a user sees of an error: his own frames and the error, at most one frame of holdfast, and at most one cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.errors import ApplyError, HoldfastError, SaveFailedError, StorageError, UnsupportedValueError
from patience import PATIENCE_SECONDS

SOURCE = str(Path(hf.__file__).parent)


class Fickle:
    """An object of the user's whose methods raise."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    def state_dict(self) -> dict[str, int]:
        if self._reads:
            return {"x": 1}
        return self._fail()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._fail()

    def _fail(self) -> dict[str, int]:
        raise ValueError("of the user's own")


def run_of(directory: Path, **objects: Any) -> hf.Run:
    return hf.resumable(directory, **objects, preemption="off")


def frames_of(error: BaseException) -> tuple[list[str], list[str]]:
    """The functions of an error's traceback that are holdfast's, and the others."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.name for frame in frames if frame.filename.startswith(SOURCE)]
    return own, [frame.name for frame in frames if not frame.filename.startswith(SOURCE)]


def test_errors_show_the_users_frames(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with run_of(kept, w=np.zeros(3), x=Fickle(reads=True)) as run:
        list(run.steps(2))

    def enter(**objects: Any) -> None:
        with run_of(kept, **objects) as run:
            list(run.steps(4))

    def save(obj: object) -> None:
        with run_of(tmp_path / "never", w=obj) as run:
            for _ in run.steps(1):
                run.save()

    def wait() -> None:
        (tmp_path / "file").touch()
        with hf.CheckpointManager(tmp_path / "file" / "run", hf.Checkpoint(w=1)) as manager:
            manager.save(1).wait_committed()

    def count() -> None:
        with run_of(tmp_path / "counted", w=1) as run:
            run.steps(-1)

    def handle(*, loops: bool) -> None:
        with (
            hf.CheckpointManager(tmp_path / "handled", hf.Checkpoint(w=1)) as manager,
            hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler,
        ):
            if loops:
                for _ in handler.steps(2):
                    handler.run(print)
            else:
                next(handler.steps(2))
                handler.close()
                handler.run(print)

    def back_up() -> None:
        with hf.WorkerTrainingState(tmp_path / "state", hf.Checkpoint(w=1), preemption="off") as state:
            state.back_up(-1)

    cases: list[Callable[[], object]] = [
        lambda: hf.resumable(kept),
        lambda: hf.resumable(kept, w=1, threads={"a": 1}),  # type: ignore[arg-type]
        lambda: hf.Checkpoint(**{"a/b": print}),
        lambda: hf.TerminationConfig(exit_code=-1),
        lambda: hf.Steps(0),
        lambda: hf.Latest(-1),
        lambda: hf.CheckpointManager(kept, hf.Checkpoint(w=1)).restore(77),
        lambda: hf.export_checkpoint(tmp_path / "nowhere", tmp_path / "out", to="torch"),
        lambda: hf.import_checkpoint(tmp_path / "nowhere", tmp_path / "out"),
        lambda: enter(w=np.zeros(4), x=Fickle(reads=True)),
        lambda: enter(w=np.zeros(3), x=Fickle(reads=True)),
        lambda: save(Fickle(reads=False)),
        lambda: save([print]),
        wait,
        count,
        lambda: handle(loops=True),
        lambda: handle(loops=False),
        back_up,
    ]
    found: list[tuple[HoldfastError, str]] = []
    for case in cases:
        with pytest.raises(HoldfastError) as caught:
            case()
        error = caught.value
        own, users = frames_of(error)
        text = "".join(traceback.format_exception(error))
        assert own == ["call"], text
        assert users[0] == "test_errors_show_the_users_frames"
        assert text.count("was the direct cause") + text.count("another exception occurred") <= 1, text
        assert error.__cause__ is None or not frames_of(error.__cause__)[0], text
        # pytest hides that one too.
        assert not str(caught.traceback.filter(caught)[-1].path).startswith(SOURCE)
        found.append((error, text))
    # What the user's objects have raised is seen where they have raised it.
    for kind in (ApplyError, UnsupportedValueError):
        error = next(error for error, _ in found if isinstance(error, kind) and error.__cause__ is not None)
        assert frames_of(error.__cause__)[1][-1] == "_fail"  # type: ignore[arg-type]
    # A cause stays what it is, and says what it came of.
    error, text = next((error, text) for error, text in found if isinstance(error, SaveFailedError))
    assert isinstance(error.__cause__, StorageError)
    assert "Caused by FileExistsError: [Errno 17]" in text or "Caused by NotADirectoryError: [Errno 20]" in text


def test_an_error_that_ends_a_program_is_short_unless_all_is_asked_for(tmp_path: Path) -> None:
    program = """
        import sys, numpy as np, holdfast as hf
        with hf.resumable(sys.argv[1], w=np.zeros(3), save_every=hf.Steps(1)) as run:
            for step in run.steps(3):
                pass
    """
    (tmp_path / "file").touch()
    lengths, causes = [], []
    for variables in ({}, {"HOLDFAST_TRACEBACK": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "file" / "run")],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 1
        assert "in <module>" in done.stderr
        lengths.append(done.stderr.count(SOURCE))
        causes.append("direct cause" in done.stderr)
    assert lengths[0] == 0
    assert lengths[1] > 5
    assert causes == [False, True]  # The cause only repeats what the error says.


def test_what_the_users_object_raised_is_printed_where_it_did(tmp_path: Path) -> None:
    program = """
        import sys, holdfast as hf
        class Fickle:
            def state_dict(self):
                if sys.argv[2] == "fails":
                    raise ValueError("of the user's own")
                return {}
            def load_state_dict(self, state):
                raise ValueError("of the user's own")
        with hf.resumable(sys.argv[1], x=Fickle(), save_every=hf.Steps(1)) as run:
            for step in run.steps(3):
                pass
    """
    printed = []
    for way in ("fails", "saves", "restores"):
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run"), way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        printed.append((done.returncode, done.stderr.count("ValueError: of the user's own\n"), SOURCE in done.stderr))
        assert done.returncode == 0 or re.search(r"line \d+, in (load_)?state_dict", done.stderr), done.stderr
    assert printed == [(1, 1, False), (0, 0, False), (1, 1, False)]


def test_an_interrupt_before_the_first_step_shows_one_frame_of_holdfast(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, hf.resumable(tmp_path, w=np.zeros(3)):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert frames_of(caught.value)[0] == ["_handle"]
