"""The command `holdfast` on steps that are named otherwise than by their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from command_line import call, call_json, complaint
from holdfast.cli.exit_codes import ExitCode

LOSSES, HITS = (3.0, 1.0, 2.0, 1.0, 5.0), (0.1, 0.5, 0.3, 0.2, 0.2)


def save(place: Path, keep: holdfast.policies.RetentionPolicy | int) -> None:
    state = {"step": 0}
    with holdfast.CheckpointManager(place, holdfast.Checkpoint(state=state), keep=keep) as manager:
        for step, (loss, hit) in enumerate(zip(LOSSES, HITS, strict=True), 1):
            state["step"] = step
            manager.save(step, metrics={"val_loss": loss, "hit@5": hit})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with one metric to compare, with none, and with two."""
    place = tmp_path_factory.mktemp("runs")
    save(place / "one", holdfast.Latest(9) | holdfast.Best("val_loss"))
    save(place / "none", 9)
    save(place / "two", holdfast.All() | holdfast.Best("val_loss") | holdfast.Best("hit@5", "max"))
    return place


@pytest.mark.parametrize(
    ("named", "step"),
    [
        *(("one@latest", 5), ("one@2", 2), ("one@best", 4), ("one@best:val_loss", 4)),
        *(("one@max:val_loss", 5), ("one@max:hit@5", 2), ("none@min:hit@5", 1), ("two@best:hit@5", 2)),
    ],
)
def test_step_is_found_by_its_name_in_every_verb_and_by_load(runs: Path, tmp_path: Path, named: str, step: int) -> None:
    place = str(runs / named)
    assert holdfast.load(place) == {"state": {"step": step}}
    assert call_json("show", place)["step"] == step
    assert call_json("diff", place, place)["a"]["step"] == step
    assert [one["step"] for one in call_json("verify", place)["steps"]] == [step]
    assert call_json("export", place, tmp_path / "x.pt", "--to", "torch")["step"] == step
    assert holdfast.export_checkpoint(place, tmp_path / "y.pt", to="torch").step == step


def test_best_step_becomes_the_newest_by_rollback(tmp_path: Path) -> None:
    save(tmp_path / "run", holdfast.Latest(9) | holdfast.Best("val_loss"))
    assert call_json("rollback", f"{tmp_path}/run@best")["step"] == 4
    assert call_json("show", tmp_path / "run")["step"] == 4
    assert call_json("show", f"{tmp_path}/run@best")["step"] == 4, "the opening of a rollback has no policy"


@pytest.mark.parametrize(
    ("named", "code", "text", "hint"),
    [
        ("one@min:acc", ExitCode.NOTHING_THERE, "has the metric 'acc'", "The metrics are: hit@5, val_loss."),
        ("one@best:hit@5", ExitCode.USAGE, "whether a low or a high hit@5 is", "Write @min:hit@5 or @max:hit@5."),
        ("none@best", ExitCode.USAGE, "does not record one metric", "Write @min:hit@5 or @max:hit@5."),
        ("two@best", ExitCode.USAGE, "does not record one metric", "Write @best:val_loss or @best:hit@5."),
        ("one@first", ExitCode.NOTHING_THERE, "there is no directory", "'first' is not a step. Write "),
        ("one@9", ExitCode.NOTHING_THERE, "no checkpoint of step 9", "Steps that exist: 1, 2, 3, 4, 5."),
    ],
)
def test_step_that_nothing_is_known_of_is_refused_with_what_is(
    runs: Path, named: str, code: ExitCode, text: str, hint: str
) -> None:
    found, said = complaint("show", runs / named)
    assert found == code
    assert text in said
    assert hint in said
    with pytest.raises(holdfast.errors.HoldfastError):
        holdfast.load(runs / named)


@pytest.mark.parametrize("verb", ["show", "list", "verify", "prune"])
@pytest.mark.parametrize(
    ("named", "hint"),
    [
        ("tow", "Did you mean {runs}/two?"),
        ("nowhere/two", "Did you mean {runs}/two?"),
        ("gpt", "Check the path. Runs nearby: {runs}/none, {runs}/one, {runs}/two"),
    ],
)
def test_a_missing_run_is_answered_with_those_nearby(runs: Path, verb: str, named: str, hint: str) -> None:
    code, said = complaint(verb, runs / named)
    assert code == ExitCode.NOTHING_THERE
    assert hint.format(runs=runs) in said


def test_two_steps_for_one_export_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.UsageError, match="names a step, and step=3 another"):
        holdfast.export_checkpoint(f"{runs}/one@latest", tmp_path / "x.pt", to="torch", step=3)


def test_directory_with_the_name_of_a_step_is_taken_by_its_name(tmp_path: Path) -> None:
    save(tmp_path / "one@best", 1)
    for place in (f"{tmp_path}/one@best", f"{tmp_path}/one@best@latest"):
        assert call("show", place).stdout.startswith(f"{tmp_path}/one@best  step 5  newest\n")


def test_prune_keeps_a_number_of_steps_or_those_newer_than_a_time(runs: Path) -> None:
    def list_removed(keep: str) -> list[int]:
        plan = call_json("prune", runs / "none", "--keep", keep, "--dry-run")
        return [one["step"] for one in plan["remove"]]

    assert list_removed("3") == [1, 2]
    assert list_removed("7 days") == []
    assert list_removed("1ms") == [1, 2, 3, 4]
    for wrong in ("0", "7x", "3 steps"):
        code, said = complaint("prune", runs / "none", "--keep", wrong, "--dry-run")
        assert code == ExitCode.USAGE
        assert f"--keep {wrong!r} is neither a number from 1 nor a time" in said


@pytest.mark.parametrize("form", ["{0}//one/", "{0}/two//../one", "{0}/./one//"])
def test_paths_are_shown_without_superfluous_parts(runs: Path, form: str) -> None:
    plain, text = f"{runs}/one", form.format(runs)
    assert call("show", text).stdout == call("show", plain).stdout
    assert complaint("show", f"{text}@9") == complaint("show", f"{plain}@9")
    assert f"hint: {plain} exists, but 'first' is not" in complaint("show", f"{text}@first")[1]
    with pytest.raises(holdfast.errors.NoCheckpointError) as raised:
        holdfast.load(f"{text}@9")
    assert f"in {plain}" in str(raised.value)


def test_a_path_past_a_link_or_a_missing_directory_stays_as_it_is(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(runs / "two")
    assert f"{tmp_path}/link/../one " in call("show", f"{tmp_path}/link//../one/").stdout
    code, said = complaint("show", f"{runs}/gone/../one")
    assert code == ExitCode.NOTHING_THERE
    assert f"there is no directory {runs}/gone/../one" in said
