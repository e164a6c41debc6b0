"""The benchmarks of several workers run, at a tiny size, and the page shows what they measured."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.__main__ import RESULTS_NAME, main
from benchmarks.harness.contender import Contender, ContenderError
from benchmarks.harness.guard import open_scratch
from benchmarks.harness.machine import Machine, describe_machine
from benchmarks.harness.results import LIMITS, Results, Round, Shape, read_results, write_results
from benchmarks.harness.turns import Bench
from benchmarks.several_workers import (
    DCP,
    DCP_SYNC,
    HOLDFAST,
    JOBS,
    OVERLAPPED,
    TORCH_CHECKPOINTING,
    TRAINING,
    TRAINING_JOBS,
    list_setups,
    name_restore,
)
from benchmarks.several_workers.comparison import WorkersPlan, compare_workers, compare_workers_training
from benchmarks.several_workers.page import (
    DOCS,
    NAME,
    find_goals,
    is_whole,
    publish,
    render,
    render_page,
    render_workers_picture,
)
from click.testing import CliRunner
from msgspec.structs import replace

TINY = 0.0005
MACHINE = Machine(
    processor="a processor", cores=2, memory_bytes=1 << 34, file_system="ext4", system="Linux 6", versions={}
)


def _run(directory: Path, names: list[str], plan: WorkersPlan, *, trains: bool = False) -> Results:
    with open_scratch(directory) as (place, guard):
        results = Results(machine=describe_machine(directory), scale=TINY)
        compare = compare_workers_training if trains else compare_workers
        compare(Bench(results, place, guard, print), names, plan)
        assert list(place.iterdir()) == [] or not plan.has_others
    assert list(directory.iterdir()) == []
    return results


@pytest.mark.long
def test_two_workers_are_measured_with_the_bare_limits(tmp_path: Path) -> None:
    plan = WorkersPlan(rounds=1, setups=["fsdp-2-small"], has_others=False)
    results = _run(tmp_path, [HOLDFAST, TORCH_CHECKPOINTING], plan)
    failed = {name for _, name, _ in results.failures}
    # It needs a package that not every environment has.
    assert failed | set(results.missing) <= {TORCH_CHECKPOINTING}
    seen = {(entry.contender, entry.number): entry.figures for entry in results.rounds}
    assert seen.keys() >= {(name, number) for name in (LIMITS, HOLDFAST) for number in (0, 1)}
    assert seen[LIMITS, 1].keys() == {"copy", "write", "rewrite", "read_cold"}
    assert seen[HOLDFAST, 1].keys() == {
        *("stall", "durable", "stall_apart", "durable_apart", "restore_cold", "restore_warm")
    }
    assert min(min(figures.values()) for figures in seen.values()) > 0
    page = render_page(results, "picture.svg")
    assert "## FSDP2, 2 workers, many small tensors" in page
    assert "quick look" in page
    assert ElementTree.fromstring(render_workers_picture(results)).tag.endswith("svg")


@pytest.mark.long
@pytest.mark.parametrize("setup", ["fsdp-2", "ddp-2"])
def test_all_contenders_restore_what_they_saved(tmp_path: Path, setup: str) -> None:
    names = [name for some in JOBS.values() for name in some if name != LIMITS]
    results = _run(tmp_path, names, WorkersPlan(rounds=1, setups=[setup]))
    assert {name for _, name, _ in results.failures} <= {TORCH_CHECKPOINTING}
    seen = {(entry.workload, entry.contender) for entry in results.rounds}
    measured = {(setup, name) for name in (LIMITS, HOLDFAST, DCP, DCP_SYNC)}
    assert seen >= measured | {(f"{setup}-by-4", name) for name in (LIMITS, HOLDFAST, DCP)}


@pytest.mark.long
def test_training_time_lost_is_measured_with_two_workers(tmp_path: Path) -> None:
    names = [name for some in TRAINING_JOBS.values() for name in some]
    results = _run(tmp_path, names, WorkersPlan(rounds=1, interval_steps=2), trains=True)
    assert results.failures == []
    assert {entry.contender for entry in results.rounds} >= {HOLDFAST, OVERLAPPED, DCP}


@pytest.mark.slow
def test_an_order_that_fails_ends_the_job_and_names_the_rank(tmp_path: Path) -> None:
    with open_scratch(tmp_path) as (place, guard):
        (place / "taken").touch()
        (setup,) = [one for one in list_setups(TINY) if one.name == "fsdp-2-small"]
        job = Contender("bare", place / "job", guard, workers=2)
        try:
            job.wait_started()
            job.order("make", place="benchmarks.several_workers.duties:WorkersDuties", setup=setup)
            with pytest.raises(ContenderError, match=r"rank [01]: FileExistsError"):
                job.order("open_way", way=LIMITS, directory=str(place / "taken"))
            assert job.has_ended
        finally:
            job.kill()
        job = Contender("bare", place / "job", guard, workers=2)
        try:
            job.wait_started()
            replies = job.order_each("make", place="benchmarks.harness.worker:Duties")
            os.kill(replies[1].pid, signal.SIGKILL)
            # Its torchrun ends the other one as well.
            with pytest.raises(ContenderError, match="has ended"):
                job.order("open")
            assert job.has_ended
        finally:
            job.kill()


def test_the_page_says_who_failed_and_who_is_missing() -> None:
    results = _made_up()
    results.failures.append(("fsdp-2", DCP, "rank 1: OSError: no room"))
    results.failures.append(("fsdp-2-by-4", TORCH_CHECKPOINTING, "it cannot"))
    results.missing[TORCH_CHECKPOINTING] = "not installed: torch_checkpointing"
    page = render_page(results, "picture.svg")
    assert "| DCP async, thread, cached | failed: rank 1: OSError: no room |" in page
    assert "| torch_checkpointing | not installed: torch_checkpointing |" in page
    saves = "120 ms, 1.20 x | 100 ms, 1.00 x | 500 ms, 1.00 x"
    assert f"| **holdfast** | {saves} | 2.00 s, 2.00 x | 3.00 s, 3.00 x |" in page
    assert "| bare limit | 100 ms | 100 ms | 500 ms (400 ms) | 1.00 s | 1.00 s |" in page
    assert "The stall of the first save of a job: holdfast 4.00 s." in page


def test_goals_of_several_workers_are_held_against_medians() -> None:
    goals = {goal.figure: goal for goal in find_goals(_made_up())}
    stall = goals["FSDP2, 2 workers: stall of a save right after another"]
    assert (stall.reached, stall.holds) == ("1.20 (1.20 to 1.20) x; 120 ms", False)
    # The bare write into the file that is there is the quicker one.
    durable = goals["FSDP2, 2 workers: until a save is durable"]
    assert (durable.reached, durable.holds) == ("1.25 (1.25 to 1.25) x; 500 ms", False)
    assert goals["DDP, 4 workers: restore"].reached == "not measured"
    leaf = goals["FSDP2, 2 workers, many small tensors: stall"]
    assert (leaf.reached, leaf.holds) == ("4.0 us a tensor; 12 ms", True)
    once = _made_up()
    once.rounds[:] = [entry for entry in once.rounds if entry.number < 2]
    goals = {goal.figure: goal for goal in find_goals(once)}
    # One round has no range.
    assert goals["FSDP2, 2 workers: stall of a save right after another"].reached == "1.20 x; 120 ms"


def test_a_page_of_nothing_says_so_and_is_not_whole() -> None:
    nothing = Results(machine=MACHINE, scale=1.0)
    assert "Not measured yet." in render_page(nothing, "picture.svg")
    assert not is_whole(nothing)
    assert "Nothing that bars could show" in render_workers_picture(nothing)
    some = _made_up()
    assert not is_whole(some)
    wanted = [(setup.name, name) for setup in list_setups(1.0) for ways in JOBS.values() for name in ways]
    wanted += [(TRAINING, name) for ways in TRAINING_JOBS.values() for name in ways]
    some.failures += [(workload, name, "no room") for workload, name in wanted]
    assert is_whole(some)
    assert not is_whole(replace(some, scale=0.5))


def test_the_page_of_the_docs_is_made_of_the_figures_beside_it(tmp_path: Path) -> None:
    for ending in ("json", "md", "svg"):
        shutil.copy(DOCS / f"{NAME}.{ending}", tmp_path)
    written = [(DOCS / f"{NAME}.{ending}").read_text() for ending in ("md", "svg")]
    page = render(tmp_path)
    assert [page.read_text(), page.with_suffix(".svg").read_text()] == written, "python -m benchmarks.several_workers"


def test_only_figures_of_several_workers_are_published(tmp_path: Path) -> None:
    results = _made_up()
    results.rounds.append(Round(workload="model", contender=HOLDFAST, number=1, figures={"stall": 1.0}))
    results.rounds[0].figures["write"] = 0.123456789
    page = publish(results, tmp_path, None)
    assert page.parent == tmp_path
    kept = read_results(page.with_suffix(".json"))
    assert {entry.workload for entry in kept.rounds} == {"fsdp-2", "fsdp-2-by-4", "fsdp-2-small"}
    assert kept.rounds[0].figures["write"] == 0.1235


def test_the_page_of_one_process_stays_when_several_were_measured(tmp_path: Path) -> None:
    write_results(replace(_made_up(), missing={"torch_checkpointing": "not installed"}), tmp_path / RESULTS_NAME)
    (tmp_path / "benchmarks.md").write_text("as it was")
    outcome = CliRunner().invoke(main, ["--render", "--out", str(tmp_path), "--docs", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "benchmarks.md").read_text() == "as it was"
    assert "| torch_checkpointing | not installed |" in (tmp_path / f"{NAME}.md").read_text()


def test_ddp_and_fsdp_hold_as_much_over_all_workers() -> None:
    setups = {setup.name: setup for setup in list_setups(1.0)}
    assert len(setups) == 8
    assert name_restore(setups["fsdp-4"]) == "fsdp-4-by-2"
    for workers in (2, 4):
        divided, replicated = setups[f"fsdp-{workers}"].model, setups[f"ddp-{workers}"].model
        assert divided is not None
        assert replicated is not None
        ratio = divided.vocabulary * divided.width / (replicated.vocabulary * replicated.width)
        assert ratio == pytest.approx(workers, rel=0.05)


def _made_up() -> Results:
    results = Results(machine=MACHINE, scale=1.0)
    results.shapes["fsdp-2"] = Shape(title="FSDP2, 2 workers", size_bytes=10**9, tensors=448)
    results.shapes["fsdp-2-small"] = Shape(title="small", size_bytes=10**6, tensors=3000)
    limits = {"copy": 0.1, "write": 0.5, "rewrite": 0.4, "read_cold": 1.0}
    own = {"stall": 0.12, "durable": 0.5, "stall_apart": 0.1, "durable_apart": 0.5, "restore_cold": 2.0}

    def add(workload: str, contender: str, number: int, figures: dict[str, float]) -> None:
        results.rounds.append(Round(workload=workload, contender=contender, number=number, slice=1, figures=figures))

    for number in range(3):
        add("fsdp-2", LIMITS, number, limits)
        add("fsdp-2", HOLDFAST, number, own if number else {"stall": 4.0, "durable": 5.0})
        add("fsdp-2-by-4", LIMITS, number, {"read_cold": 1.0})
        add("fsdp-2-by-4", HOLDFAST, number, {"restore_cold": 3.0})
        add("fsdp-2-small", HOLDFAST, number, {"stall": 0.012, "restore_warm": 0.3})
    return results
