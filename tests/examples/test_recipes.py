"""The recipes: what starts training ends as it should, and training that was asked to leave is started again."""

from __future__ import annotations

import inspect
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.testing.processes import Workers
from places import EXAMPLES, PROGRAMS, ROOT

RECIPES = EXAMPLES / "recipes"
PATIENCE_SECONDS = 120.0
LEFT = hf.TerminationConfig().exit_code
"""The exit code of a job that has saved and left."""


def make_place(directory: Path, program: Path) -> dict[str, str]:
    """A folder as a recipe expects it, with a `training.py`; gives the variables under which recipes run there."""
    (directory / "runs").mkdir()
    shutil.copy(program, directory / "training.py")
    commands = directory / "commands"
    commands.mkdir()
    for name in ("srun", "scontrol", "squeue"):
        (commands / name).write_text(f"#!{sys.executable}\n{(PROGRAMS / 'fake_slurm.py').read_text()}")
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "OMP_NUM_THREADS": "1"}


def slurm(tasks: int) -> dict[str, str]:
    """The variables of a job of Slurm with one node; its number makes the port."""
    with socket.socket() as probe:
        for job in range(1000 + os.getpid() % 5000, 10_000):
            try:
                probe.bind(("127.0.0.1", 20_000 + job))
            except OSError:
                continue
            break
    return {
        "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "node[1]", "SLURM_NNODES": "1", "SLURM_NTASKS": str(tasks),
        "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip


def start(workers: Workers, directory: Path, environment: dict[str, str], *command: str) -> int:
    """Starts a command in the folder, as a scheduler does."""

    def popen(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(arguments, cwd=directory, **options)

    return workers.start(command, environment, popen)


def requeued(directory: Path) -> list[str]:
    file = directory / "requeued"
    return file.read_text().split() if file.exists() else []


def processes_below(parent: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    found, ahead = [], [parent]
    while ahead:
        above = ahead.pop()
        children = [pid for pid, other in parents.items() if other == above]
        found += children
        ahead += children
    return found


def send_to_steps(shell: int, number: int) -> None:
    """Sends a signal to each process of a job's steps as `--signal` of Slurm does: not to the shell, nor to `srun`."""
    (srun,) = [pid for pid in processes_below(shell) if b"/srun" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for process in processes_below(srun):
        os.kill(process, number)


@pytest.mark.parametrize("script", sorted(RECIPES.glob("*.sh")), ids=lambda script: script.name)
def test_script_of_recipe_is_read_by_bash_without_complaint(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=True)
    assert checked.stderr == ""


def test_slurm_job_asked_to_leave_is_requeued_and_failed_one_is_not(tmp_path: Path) -> None:
    environment = make_place(tmp_path, PROGRAMS / "recipe_training.py") | slurm(1)
    job = environment["SLURM_JOB_ID"]
    with Workers(tmp_path) as workers:
        asked = start(workers, tmp_path, environment, "bash", str(RECIPES / "slurm.sh"))
        workers.wait_line(asked, "step 20", PATIENCE_SECONDS)
        # One that reaches the shell of the job too does not end it.
        workers.kill(asked, signal.SIGTERM)
        send_to_steps(workers.pid(asked), signal.SIGUSR1)
        assert workers.wait(PATIENCE_SECONDS, [asked]) == [LEFT], workers.report(asked)
        assert requeued(tmp_path) == [job]
        # What the file `code` says is how training fails: nothing is queued again.
        for code in (1, 74):
            (tmp_path / "code").write_text(str(code))
            failed = start(workers, tmp_path, environment, "bash", str(RECIPES / "slurm.sh"))
            assert workers.wait(PATIENCE_SECONDS, [failed]) == [code], workers.report(failed)
        (tmp_path / "code").unlink()
        again = start(workers, tmp_path, environment, "bash", str(RECIPES / "slurm.sh"))
        assert workers.wait(PATIENCE_SECONDS, [again]) == [0], workers.report(again)
        assert requeued(tmp_path) == [job]
        assert_went_on(workers, asked, again)


def test_canceled_slurm_job_saves_and_stays_ended(tmp_path: Path) -> None:
    environment = make_place(tmp_path, PROGRAMS / "recipe_training.py") | slurm(1)
    with Workers(tmp_path) as workers:
        asked = start(workers, tmp_path, environment, "bash", str(RECIPES / "slurm.sh"))
        workers.wait_line(asked, "step 20", PATIENCE_SECONDS)
        (tmp_path / "cancelled").touch()
        workers.kill(asked, signal.SIGTERM)
        send_to_steps(workers.pid(asked), signal.SIGTERM)
        assert workers.wait(PATIENCE_SECONDS, [asked]) == [LEFT], workers.report(asked)
        assert requeued(tmp_path) == []


def assert_went_on(workers: Workers, asked: int, again: int) -> None:
    """Each step was taken once: the second life began with the step that the first one has saved."""
    left = re.search(rf"step (\d+) is saved; leaving with exit code {LEFT}", workers.errors(asked))
    ended = re.search(r"began with step (\d+), ended with total (\d+)", workers.text(again))
    assert left is not None, workers.report(asked)
    assert ended is not None, workers.report(again)
    step = int(left[1])
    assert (int(ended[1]), int(ended[2])) == (step, (step + 40) * (step + 39) // 2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("script", ["slurm.sh", "torchrun.sh", "slurm_torchrun.sh"])
def test_two_workers_asked_by_what_started_them_go_on_there(tmp_path: Path, script: str) -> None:
    """The program is the one beside the recipes, as a person tries it first."""
    pytest.importorskip("torch")
    environment = make_place(tmp_path, RECIPES / "training.py")
    if script != "torchrun.sh":
        environment |= slurm(2 if script == "slurm.sh" else 1)
    with Workers(tmp_path) as workers:
        asked = start(workers, tmp_path, environment, "bash", str(RECIPES / script))
        workers.wait_line(asked, "step 19:", PATIENCE_SECONDS)
        if script == "torchrun.sh":
            workers.kill(asked, signal.SIGTERM)
        else:
            send_to_steps(workers.pid(asked), signal.SIGUSR1 if script == "slurm.sh" else signal.SIGTERM)
        (code,) = workers.wait(PATIENCE_SECONDS, [asked])
        assert code == (1 if script == "slurm_torchrun.sh" else LEFT), workers.report(asked)
        assert requeued(tmp_path) == ([] if script == "torchrun.sh" else [environment["SLURM_JOB_ID"]])
        left = re.findall(r"step (\d+) is saved; calling exit_fn", workers.errors(asked))
        assert len(left) == 2, workers.report(asked)
        again = start(workers, tmp_path, environment, "bash", str(RECIPES / script))
        assert workers.wait(PATIENCE_SECONDS, [again]) == [0], workers.report(again)
        begun = re.findall(r"^worker \d of 2, process \d+, begins with step (\d+)$", workers.text(again), re.MULTILINE)
        assert begun == left
        assert re.search(r"^step 999: loss", workers.text(again), re.MULTILINE)
        assert len(requeued(tmp_path)) <= 1


def action_for(code: int, rules: list[dict[str, Any]]) -> str:
    """What Kubernetes does with a pod whose container has ended so: the first rule that fits."""
    for rule in rules:
        asked = rule.get("onExitCodes")
        if asked is not None and (code in asked["values"]) == (asked["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def test_pod_asked_to_leave_is_started_again_without_counting(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    claim, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    policy = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # What the interface asks for where there is a policy for failures.
    assert pod["restartPolicy"] == "Never"
    assert {rule["onExitCodes"]["containerName"] for rule in policy if "onExitCodes" in rule} == {container["name"]}
    assert [rule["action"] for rule in policy if "onPodConditions" in rule] == ["Ignore"]
    # 0 may stand in no rule: the pod has succeeded then.
    assert {code: action_for(code, policy) for code in (LEFT, 1, 74, 130, 137)} == {
        LEFT: "Ignore", 1: "Count", 74: "Count", 130: "Count", 137: "Count",
    }  # fmt: skip
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], f"{container['workingDir']}/runs")

    environment = make_place(tmp_path, PROGRAMS / "recipe_training.py")
    with Workers(tmp_path) as workers:
        asked = start(workers, tmp_path, environment, *container["command"])
        workers.wait_line(asked, "step 20", PATIENCE_SECONDS)
        workers.kill(asked, signal.SIGTERM)
        # It is killed if it has not ended by then.
        (code,) = workers.wait(pod["terminationGracePeriodSeconds"], [asked])
        assert action_for(code, policy) == "Ignore"
        again = start(workers, tmp_path, environment, *container["command"])
        assert workers.wait(PATIENCE_SECONDS, [again]) == [0], workers.report(again)
        assert_went_on(workers, asked, again)


LOGGED = """
import os, signal, sys

os.chdir(sys.argv[1])
log = CSVLog("log.csv")
with holdfast.resumable("run", log=log, save_every=holdfast.Steps(5), quiet=True) as run:
    if run.restored is None:
        log.cut(0)
    for step in run.steps(20):
        log.write(step=step, loss=1 / (step + 1))
        if step == int(sys.argv[2]):
            run.manager.wait()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_log_of_ones_own_has_each_row_once_after_kills(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes" / "tracking.md").read_text()
    (recipe,) = re.findall(r"^(import csv\n.*?)\nlog = CSVLog", page, re.DOTALL | re.MULTILINE)
    for kill_in in (3, 7, 12, -1):
        command = [sys.executable, "-c", recipe + LOGGED, str(tmp_path), str(kill_in)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
        assert done.returncode == (0 if kill_in < 0 else -signal.SIGKILL), done.stderr
    rows = [f"{step},{1 / (step + 1)}" for step in range(20)]
    assert (tmp_path / "log.csv").read_text().splitlines() == ["step,loss", *rows]


def test_bars_begin_at_the_resumed_step(tmp_path: Path) -> None:
    tqdm, track = pytest.importorskip("tqdm").tqdm, pytest.importorskip("rich.progress").track
    seen = []
    for end in (3, 5, 8):
        with hf.resumable(tmp_path, state=[1.0], quiet=True, preemption="off") as run:
            if end == 8 and "completed" in inspect.signature(track).parameters:  # Not in older versions of rich.
                seen += list(track(run.steps(end), total=end, completed=run.step, disable=True))
                continue
            bar = tqdm(run.steps(end), total=end, initial=run.step, file=io.StringIO())
            assert (bar.n, bar.total) == (run.step, end)
            seen += list(bar)
            assert bar.n == end
    assert seen == list(range(8))
