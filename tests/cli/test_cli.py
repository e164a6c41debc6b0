"""The command `holdfast`: its help, its errors, and what it shows of real runs, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import holdfast as hf
from command_line import (
    DATA,
    FIRST_300,
    INDEX,
    NEWEST,
    PROGRAM,
    call,
    call_json,
    complaint,
    flip_bit,
    lines_of,
    make_objects,
    run_program,
)
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import VERBS, Verbs
from holdfast.errors import DamageError
from holdfast.format.digests import seal
from holdfast.format.records import decode_manifest

# The command as a whole.


def test_help_shows_every_verb_and_imports_little() -> None:
    result = run_program("--help")
    assert result.returncode == 0
    assert all(f"\n  {verb} " in result.stdout for verb in VERBS)
    program = (
        "import sys; sys.argv = ['holdfast', '--help']\n"
        "from holdfast.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'numpy', 'torch', 'rich', 'holdfast.cli.verbs'} & set(sys.modules)), file=sys.stderr)"
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert asked.stderr == "[]\n"


def test_version() -> None:
    assert run_program("--version").stdout == f"holdfast {hf.__version__}\n"


def test_a_shell_can_complete_verbs_and_options() -> None:
    def complete(words: str) -> list[str]:
        place = str(len(words.split()) - 1)
        asked = {"COMP_WORDS": words, "COMP_CWORD": place, "_HOLDFAST_COMPLETE": "bash_complete"}
        return run_program(env={**os.environ, **asked}).stdout.split()

    assert complete("holdfast d") == ["plain,diff", "plain,doctor"]
    assert complete("holdfast prune --k") == ["plain,--keep"]


def test_python_can_run_it_as_a_module(tmp_path: Path) -> None:
    arguments = ["list", str(tmp_path / "none")]
    command = [sys.executable, "-m", "holdfast", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    program = run_program(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (program.returncode, program.stdout, program.stderr)
    assert result.stderr.startswith("holdfast: ")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    result = call(verb, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: holdfast {verb}")


@pytest.mark.parametrize(
    "arguments", [("show",), ("lst", "x"), ("show", "x", "--depth", "-1"), ("verify", "--fast", "x")]
)
def test_wrong_arguments_are_a_usage_error(arguments: tuple[str, ...]) -> None:
    code, text = complaint(*arguments)
    assert code == ExitCode.USAGE
    assert "Usage: holdfast" in text


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (
            DamageError("a file is bad", hint="Mend it."),
            ExitCode.DAMAGED,
            "holdfast: a file is bad\n  hint: Mend it.\n",
        ),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "holdfast: interrupted\n"),
        (ZeroDivisionError("by zero"), ExitCode.BUG, "holdfast: ZeroDivisionError: by zero\n"),
        (RecursionError(), ExitCode.DAMAGED, "holdfast: the checkpoint holds a value that is nested too deep"),
        (OSError(28, "No space left on device"), ExitCode.FAILED, "cannot write the output: No space left on device"),
    ],
)
def test_however_a_verb_ends_there_is_a_line_and_a_code(raised: BaseException, code: int, text: str) -> None:
    @click.command()
    def fails() -> None:
        raise raised

    class OneVerb(Verbs):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return fails

    result = CliRunner().invoke(OneVerb("holdfast"), ["fails"])
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_list_into_a_closed_pipe_prints_no_error(run: Path) -> None:
    listing = subprocess.Popen([PROGRAM, "list", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    listing.stdout.close()
    assert listing.stderr is not None
    text = listing.stderr.read().decode()
    listing.stderr.close()
    assert listing.wait(60) == ExitCode.BROKEN_PIPE
    assert "rror" not in text


def test_closed_output_is_a_line_and_a_code(run: Path) -> None:
    command = ["sh", "-c", '"$@" >&-', "sh", str(PROGRAM), "list", str(run)]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=60)
    assert ended.returncode == ExitCode.FAILED
    first, *rest = ended.stderr.decode().splitlines()
    assert first == "holdfast: cannot write the output: it is closed"
    assert rest == ["  hint: Send it to /dev/null if it is not wanted."]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_an_error(run: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([PROGRAM, "show", run], stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert ended.returncode == ExitCode.FAILED
    assert b"cannot write the output: No space left on device" in ended.stderr


# What a place may be.


def test_a_place_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name, text in {
        "missing": "there is no directory",
        "missing@5": "there is no directory",
        "empty": "is empty",
        "file": "is not a directory",
        "other": "is not a run",
    }.items():
        for verb in ("list", "show", "verify"):
            code, said = complaint(verb, tmp_path / name)
            assert code == ExitCode.NOTHING_THERE
            assert text in said
            assert "hint: " in said
        listed = call("list", tmp_path / name, "--json")
        assert listed.exit_code == ExitCode.NOTHING_THERE
        document = json.loads(listed.stdout)
        assert (document["steps"], document["newest_step"], document["generation"]) == ([], None, 0)
        assert text in document["error"]["message"]
        assert "one step" not in document["error"]["hint"], "which it would refuse"


def test_a_step_that_is_not_there(run: Path) -> None:
    code, said = complaint("show", f"{run}@7")
    assert code == ExitCode.NOTHING_THERE
    assert f"no checkpoint of step 7 in {run}" in said
    assert "Steps that exist: 100, 200, 250, 300." in said
    code, said = complaint("show", f"{run}@newest")
    assert code == ExitCode.NOTHING_THERE
    assert "@500, @latest, @best, @best:val_loss" in said
    (run / "step-000000900.g0002").mkdir()
    code, said = complaint("verify", f"{run}@900")
    assert code == ExitCode.NOTHING_THERE
    assert "step 900" in said
    assert "is not a checkpoint: it has no manifest.json" in said


def test_a_run_whose_name_has_an_at_sign(run: Path) -> None:
    with_at = run.rename(run.with_name("gpt@300"))
    assert call_json("show", with_at)["step"] == 300
    assert call_json("show", f"{with_at}@100")["step"] == 100
    assert call("list", with_at).exit_code == 0
    # A directory that exists goes before a step; with a slash, the step is meant.
    other = Path(shutil.copytree(with_at, with_at.with_name("gpt")))
    assert call_json("show", f"{other}@300")["place"] == str(with_at)
    assert call_json("show", f"{other}/@250")["place"] == str(other)


def test_verbs_for_a_run_refuse_a_step(run: Path) -> None:
    for place in (f"{run}@300", f"{run / NEWEST}"):
        for verb in ("list", "prune"):
            code, said = complaint(verb, place)
            assert code == ExitCode.USAGE
            assert "of a run" in said or "a run is expected" in said
    assert complaint("show", f"{run / NEWEST}@300")[0] == ExitCode.USAGE


# list


def test_list_in_a_pipe_is_a_table_that_can_be_split(run: Path) -> None:
    result = call("list", run)
    assert result.exit_code == 0
    heading, *rows = lines_of(result.stdout)
    assert heading == [
        *("STEP", "GENERATION", "STATE", "COMMITTED", "BYTES", "WORKERS", "DIRECTORY", "MARKS"),
        *("val_loss", "accuracy"),
    ]
    assert [row[0] for row in rows] == ["100", "200", "250", "300"]
    assert {len(row) for row in rows} == {len(heading)}
    assert rows[0][7:] == ["highest:val_loss", "2.5", "-"]
    assert rows[3][7:] == ["newest,lowest:val_loss,highest:accuracy", "1.75", "0.3"]
    assert "\x1b" not in result.stdout
    assert result.stderr == "not shown: 1 step off the current lineage (--all shows them)\n"


def test_list_all_shows_what_is_off_the_line_and_what_is_unfinished(run: Path) -> None:
    (run / "step-000000260.g0001").mkdir()
    (run / "step-000000400.g0002").mkdir()
    (run / "step-000000400.g0002" / DATA).write_bytes(b"12345")
    (run / ".trash-ab-step").mkdir()
    result = call("list", run)
    assert len(lines_of(result.stdout)) == 5
    assert (
        result.stderr == "not shown: 1 step off the current lineage, 2 unfinished, 1 being removed (--all shows them)\n"
    )
    result = call("list", run, "--all")
    states = {row[6]: (row[2], row[4], row[7]) for row in lines_of(result.stdout)[1:]}
    assert states[FIRST_300][0] == "off_line"
    assert states["step-000000260.g0001"] == ("unfinished", "0", "-")
    assert states["step-000000400.g0002"] == ("unfinished", "5", "may_be_in_progress")
    assert states[".trash-ab-step"] == ("set_aside", "0", "-")
    assert result.stderr == ""


def test_list_json_holds_everything(run: Path) -> None:
    (run / "step-000000400.g0002").mkdir()
    document = call_json("list", run)
    assert document == call_json("list", run, "--all")
    assert (document["holdfast"], document["version"]) == ("list", 1)
    assert document["run"] == str(run)
    assert document["newest_step"] == 300
    assert document["generation"] == 2
    assert document["opened"]["process"] == os.getpid()
    assert [step["step"] for step in document["steps"]] == [100, 200, 250, 300]
    assert document["extremes"]["val_loss"] == {"lowest_step": 300, "highest_step": 100}
    newest = document["steps"][-1]
    assert newest["metrics"] == {"val_loss": 1.75, "accuracy": 0.3}
    assert newest["size_bytes"] == sum((run / NEWEST / name).stat().st_size for name in (DATA, INDEX))
    assert newest["committed_at"].startswith("20")
    assert newest["committed_at_unix_seconds"] > 1e9
    assert newest["damages"] == []
    assert document["steps"][0]["metadata"] == {"note": "after 100", "git": {"dirty": True}}
    assert [step["directory"] for step in document["off_line"]] == [FIRST_300]
    assert [step["may_be_in_progress"] for step in document["unfinished"]] == [True]
    assert document["set_aside"] == document["damaged_records"] == []


def test_list_shows_damage_that_can_be_seen_without_reading_all(run: Path) -> None:
    flip_bit(run / NEWEST / "manifest.json", 200)
    os.truncate(run / "step-000000250.g0002" / DATA, 5000)
    (run / "step-000000100.g0001" / INDEX).unlink()
    flip_bit(run / "generations" / "0002.base.json", 60)
    result = call("list", run)
    assert result.exit_code == 0
    marks = {row[0]: row[7] for row in lines_of(result.stdout)[1:]}
    assert marks["100"].startswith("damaged")
    assert marks["250"].startswith("damaged")
    assert marks["300"] == "newest,damaged"
    assert f"{NEWEST}/manifest.json" in result.stderr
    assert f"{DATA} has 5000 bytes" in result.stderr
    assert f"step-000000100.g0001/{INDEX} is missing" in result.stderr
    assert "generations/0002.base.json" in result.stderr
    document = call_json("list", run)
    assert [bool(step["damages"]) for step in document["steps"]] == [True, False, True, True]
    assert document["steps"][-1]["metrics"] is None
    assert len(document["damaged_records"]) == 1


def test_list_names_the_first_of_very_many_damages(run: Path) -> None:
    """As when the directory of a step of many workers is lost, or its manifest is made up."""
    path = run / "step-000000100.g0001" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), path=str(path), expected=None)
    many = msgspec.structs.replace(manifest, workers=manifest.workers * 5000, features=("shards",))
    path.write_bytes(seal(many))
    result = call("list", run)
    assert result.stderr.count("is missing") == 10
    assert "damaged and 9990 more places (--json names them all)" in result.stderr
    assert len(call_json("list", run)["steps"][0]["damages"]) == 10_000


def test_list_of_a_run_without_a_checkpoint(run: Path) -> None:
    for directory in run.glob("step-*"):
        for file in directory.iterdir():
            file.unlink()
    code, said = complaint("list", run)
    assert code == ExitCode.NOTHING_THERE
    assert "has no checkpoint, only 5 unfinished" in said
    assert call("list", run, "--all").stdout.count("unfinished") == 5
    assert call_json("list", run, exit_code=ExitCode.NOTHING_THERE)["steps"] == []
    for directory in run.glob("step-*"):
        shutil.rmtree(directory)
    assert "has no checkpoint yet" in complaint("list", run)[1]


def test_list_of_a_run_that_was_started_from_scratch(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(x=1)) as manager:
        manager.save(10)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(x=1), begin_anew=True) as manager:
        manager.save(5)
    shutil.rmtree(tmp_path / "run" / "step-000000005.g0002")
    code, said = complaint("list", tmp_path / "run")
    assert code == ExitCode.NOTHING_THERE
    assert "no checkpoint in its current lineage, only 1 elsewhere" in said


# show


def test_show_says_what_a_checkpoint_is_and_where_its_bytes_are(run: Path) -> None:
    result = call("show", run)
    assert result.exit_code == 0
    heading, rest = result.stdout.split("\n\n", 1)
    assert heading.splitlines()[0] == f"{run}  step 300  newest"
    assert f"directory   {run / NEWEST}" in heading
    assert "metrics     val_loss = 1.75, accuracy = 0.3" in heading
    assert f"holdfast {hf.__version__}" in heading
    tree = {line.split()[0]: line.split()[1:3] for line in rest.split("\n\n")[0].splitlines()}
    assert tree["model"] == ["13", str(12 * 8000 + 12000)]
    assert tree["layers"] == ["12", "96000"]
    assert tree["embedding"] == ["1", "12000"]
    assert tree["10.weight"] == ["1", "8000"]
    assert tree["optimizer"] == ["2", "40"]
    assert ["10.weight", "1", "8000", "7%", "F64", "[40,25]"] in lines_of(rest)
    assert ["epoch", "-", "-", "-", "-", "-", "=", "1"] in lines_of(rest)
    assert "LARGEST" not in rest
    largest = call("show", run, "--depth", "0", "--largest", "2").stdout.split("\n\n")[2]
    assert lines_of(largest)[0][:3] == ["LARGEST", "OF", "15"]
    assert [row[0] for row in lines_of(largest)[1:]] == ["model/embedding", "model/layers.0.weight"]
    assert "10.weight" not in call("show", run, "--depth", "1").stdout.split("\n\n")[1]


def test_show_one_step(run: Path) -> None:
    assert '{"note": "after 100", "git": {"dirty": true}}' in call("show", f"{run}@100").stdout
    assert call_json("show", f"{run}@300")["generation"] == 2
    assert call_json("show", run / FIRST_300)["generation"] == 1


def test_show_a_step_that_was_copied_away(run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run / FIRST_300, tmp_path / "a copy")
    result = call("show", copied)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{copied}  step 300\n")
    document = call_json("show", copied)
    assert (document["directory"], document["state"], document["is_newest"]) == (None, None, None)
    (Path(copied) / "manifest.json").unlink()
    code, said = complaint("show", copied)
    assert code == ExitCode.DAMAGED
    assert "was committed, and its manifest is gone" in said
    (Path(copied) / "committed").unlink()
    code, said = complaint("show", copied)
    assert code == ExitCode.NOTHING_THERE
    assert "is not a checkpoint: it has no manifest.json" in said


def test_show_leaves_and_values_by_name(run: Path) -> None:
    result = call("show", run, "model/layers.1*.weight", "optimizer", "epoch")
    assert result.exit_code == 0
    leaves, values = result.stdout.split("\n\n")
    rows = lines_of(leaves)
    assert rows[0] == ["LEAF", "DTYPE", "SHAPE", "BYTES", "OFFSET", "FILE"]
    assert {row[0] for row in rows[1:]} == {
        *("model/layers.1.weight", "model/layers.10.weight", "model/layers.11.weight"),
        *("optimizer/moments/0", "optimizer/moments/1"),
    }
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["optimizer/moments/1"][:3] == ["F64", "[2,0]", "0"]
    name, dtype, shape, size, offset, file = rows[1]
    assert (dtype, shape, size, file) == ("F64", "[40,25]", "8000", DATA)
    stored = np.fromfile(run / NEWEST / file, np.float64, 1000, offset=int(offset)).reshape(40, 25)
    np.testing.assert_array_equal(stored, make_objects(1)["model"][name.removeprefix("model/")])
    assert lines_of(values)[1:] == [["optimizer/lr", "0.001"], ["optimizer/betas", "(0.9,", "0.99)"], ["epoch", "1"]]


def test_show_a_name_that_is_not_there(run: Path) -> None:
    code, said = complaint("show", run, "model", "modle", "epoch/*")
    assert code == ExitCode.USAGE
    assert "nothing named 'modle', 'epoch/*'" in said
    assert "'model', 'optimizer', 'epoch'" in said


def test_show_json(run: Path) -> None:
    document = call_json("show", run)
    assert (document["holdfast"], document["version"]) == ("show", 1)
    assert (document["step"], document["state"], document["is_newest"]) == (300, "living", True)
    assert [entry["name"] for entry in document["objects"]] == ["model", "optimizer", "epoch"]
    assert document["objects"][1] == {"name": "optimizer", "leaves": 2, "size_bytes": 40, "values": 3}
    assert len(document["leaves"]) == 15
    assert document["files"][0]["data_bytes"] == (run / NEWEST / DATA).stat().st_size
    assert document["values"]["epoch"] == 1
    chosen = call_json("show", run, "optimizer/betas", "model/embedding")
    assert chosen["values"] == {
        "optimizer/betas": {"$": "tuple", "v": [0.9, 0.99]},
        "model/embedding": {"$": "array", "k": "numpy", "v": "model/embedding"},
    }
    (leaf,) = chosen["leaves"]
    assert (leaf["name"], leaf["shape"], leaf["size_bytes"], leaf["rank"]) == ("model/embedding", [300, 10], 12000, 0)


def test_show_with_a_damaged_index_still_shows_the_manifest(run: Path) -> None:
    flip_bit(run / NEWEST / INDEX, 300)
    result = call("show", run)
    assert result.exit_code == ExitCode.DAMAGED
    assert "step 300  newest" in result.stdout
    assert f"holdfast: {NEWEST}/{INDEX} does not match the digest in the manifest" in result.stderr


def test_shared_arrays_are_shown_once_with_all_their_names(tmp_path: Path) -> None:
    shared = np.arange(6.0)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(a={"w": shared}, b={"w": shared})) as manager:
        manager.save(1)
    result = call("show", tmp_path / "run", "b")
    assert lines_of(result.stdout) == [["VALUE"], ["b/w", "the", "array", "a/w"]]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("rm", "Use 'holdfast prune': Remove checkpoints that you no longer want"),
        ("Compare", "Use 'holdfast diff': Show what changed"),
        ("cp", "Use 'holdfast copy': Copy a run"),
        ("inspect", "Use 'holdfast show': Show what one checkpoint holds."),
        ("check", "Use 'holdfast verify': Read every byte"),
        ("resume", "A job resumes by itself: 'holdfast run TRAIN.PY' starts it."),
        ("verifi", "Did you mean 'verify'?"),
    ],
)
def test_words_for_a_verb_of_another_name_are_answered(run: Path, word: str, answer: str) -> None:
    code, said = complaint(word, run)
    assert code == ExitCode.USAGE
    assert f"No such command '{word}'. {answer}" in " ".join(said.split())
