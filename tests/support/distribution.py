"""Builds the wheel and the sdist, and tries them as a user would: `make dist`.

The wheel is installed into an empty environment of each Python that is given, and an example is trained there, killed
with SIGKILL in the middle, and started again: it must end as a run that was never killed. The first environment has
PyTorch too: the README's program and the script of `holdfast init` are run, killed and resumed there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import holdfast as hf
from pages import blocks
from places import EXAMPLES, ROOT

KILLED_AT = "step 2000:"
SHORT_TESTS = (
    "tests/format/test_format.py",
    "tests/policies/test_policies.py",
    "tests/save/test_manager.py",
    "tests/cli/test_cli.py",
)
_SECONDS = 900


def run(command: Sequence[str | Path], *, where: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output; raises with all of it if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=where,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def copy_sources(place: Path) -> Path:
    """Copies what git has of the repository: what is built is built from that, and nothing is left in the checkout."""
    names = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def build_wheel(sources: Path, out: Path, *, isolated: bool, environment: dict[str, str] | None = None) -> Path:
    """Builds a wheel of a directory or of an sdist."""
    before = set(out.glob("*.whl"))
    options = [] if isolated else ["--no-build-isolation"]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *options,
        "-w",
        out,
        sources,
    ]
    run(command, where=out, environment=environment)
    (wheel,) = set(out.glob("*.whl")) - before
    return wheel


def build_sdist(sources: Path, out: Path) -> Path:
    """Builds the sdist of a directory."""
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    name = run([sys.executable, "-c", program, out], where=sources).splitlines()[-1]
    return out / name


def find_wheel_problems(wheel: Path, *, compiled: bool = True) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    problems = [] if "-cp311-abi3-" in wheel.name else [f"{wheel.name} is not tagged cp311-abi3"]
    problems += [f"{name} does not belong into a wheel" for name in names if name.endswith((".c", ".pyc"))]
    problems += [f"{name} is not of holdfast" for name in names if not name.startswith("holdfast")]
    libraries = [name for name in names if name.endswith(".so")]
    if len(libraries) != (2 if compiled else 0):
        problems.append(f"the compiled modules are {libraries}")
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    templates = {f"holdfast/cli/templates/{path.name}" for path in EXAMPLES.glob("train_*.py")}
    wanted_files = sources | templates | {"holdfast/py.typed"}
    problems += [f"{name} is lacking" for name in sorted(wanted_files - set(names))]
    wanted = ("Author: ", "Classifier: ", "# holdfast", f"\nVersion: {hf.__version__}\n")
    problems += [f"{line!r} is lacking" for line in wanted if line not in metadata]
    problems += [] if any(name.endswith("/LICENSE") for name in names) else ["the license is lacking"]
    return problems


def find_sdist_problems(sdist: Path, sources: Path) -> list[str]:
    """What of the repository an sdist lacks, and what it has in addition."""
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    # setuptools writes these, and leaves the records of its own builds in the sources.
    made = {"PKG-INFO", "setup.cfg"}
    wanted, packed = (
        {name for name in names if not name.startswith(("build/", "src/holdfast.egg-info/"))}
        for names in (wanted, packed - made)
    )
    problems = [f"{name} is lacking" for name in sorted(wanted - packed)]
    return problems + [f"{name} is not of the repository" for name in sorted(packed - wanted)]


def make_environment(python: str, place: Path, *requirements: str | Path) -> Path:
    """Makes an empty environment with what is required, and returns its Python."""
    run([python, "-m", "venv", place])
    inner = place / "bin" / "python"
    run([inner, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], where=place)
    return inner


def train_killed_and_resumed(python: Path, program: Path, place: Path) -> str:
    """Runs a program, kills it, and starts it again; it must end as one that was not killed. Returns how it went."""
    name = program.name
    untouched, killed = place / "untouched", place / "killed"
    untouched.mkdir(parents=True)
    killed.mkdir()
    # In another directory, so that the installed package is taken.
    whole = run([python, program], where=untouched).splitlines()
    job = subprocess.Popen([python, program], cwd=killed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    with job:
        for line in job.stdout:
            if line.startswith(KILLED_AT):
                with suppress(ProcessLookupError):
                    job.send_signal(signal.SIGKILL)
                break
    if job.returncode != -signal.SIGKILL:
        raise RuntimeError(f"{name} ended with {job.returncode} before it could be killed")
    resumed = run([python, program], where=killed).splitlines()
    begun = [line for line in resumed if line.startswith("holdfast: resumed runs/")]
    if not begun:
        raise RuntimeError(f"{name} began anew after it was killed")
    last, expected = ([line for line in lines if line.startswith("step ")][-1] for lines in (resumed, whole))
    if last != expected:
        raise RuntimeError(f"{name} ended with {last!r}, and with {expected!r} if it is not killed")
    return f"killed, {begun[0].partition(', ')[0].removeprefix('holdfast: ')}, {last}"


def main() -> None:
    """Builds and checks everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel and the sdist go")
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="the Pythons to install them into")
    parser.add_argument(
        "--light", action="store_true", help="leave out what needs PyTorch, which the first of them has"
    )
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as made:
        work = Path(made)
        sources = copy_sources(work / "sources")
        sdist = build_sdist(sources, options.out)
        wheel = build_wheel(sdist, options.out, isolated=True)
        problems = find_sdist_problems(sdist, copy_sources(work / "again")) + find_wheel_problems(wheel)
        if problems:
            raise SystemExit("\n".join(problems))
        print(run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel]).strip())
        for python in options.python:
            _try_wheel(python, wheel, work, with_torch=not options.light and python == options.python[0])
        _try_without_compiler(options.python[0], sdist, work)
        _try_tests(options.python[0], sdist, wheel, work)
    print(f"{wheel.name} and {sdist.name} are in {options.out}")


def _try_wheel(python: str, wheel: Path, work: Path, *, with_torch: bool) -> None:
    place = work / f"wheel-{Path(python).parent.parent.name}-{Path(python).name}"
    inner = make_environment(python, place, wheel, *(["torch"] if with_torch else []))
    found = dict(line.split(None, 1) for line in run([place / "bin" / "holdfast", "doctor"]).splitlines())
    if found["compiled_code"] != "in use" or str(place) not in found["holdfast"]:
        raise RuntimeError(f"doctor says {found}")
    programs = [EXAMPLES / "train_numpy.py"]
    if with_torch:
        (_, _, program), *_ = blocks(ROOT / "README.md", "python")
        (place / "README.py").write_text(program)
        programs += [place / "README.py"]
        run([place / "bin" / "holdfast", "init", "--output", place / "train.py"])
        programs += [place / "train.py"]
    for path in programs:
        done = train_killed_and_resumed(inner, path, place / path.stem)
        print(f"Python {found['python']}: {path.name}: {done}", flush=True)
    run_directory = place / "train_numpy" / "killed" / "runs" / "numpy"
    verified = run([place / "bin" / "holdfast", "verify", "--all", run_directory])
    print(f"Python {found['python']}: {verified.splitlines()[-1]}", flush=True)


def _try_without_compiler(python: str, sdist: Path, work: Path) -> None:
    out = work / "uncompiled"
    out.mkdir()
    wheel = build_wheel(sdist, out, isolated=True, environment={"CC": "/bin/false"})
    if problems := find_wheel_problems(wheel, compiled=False):
        raise RuntimeError("\n".join(problems))
    inner = make_environment(python, out / "venv", wheel)
    said = run([out / "venv" / "bin" / "holdfast", "doctor"])
    if "the slow path is in use for copying and digests" not in " ".join(said.split()):
        raise RuntimeError(f"doctor says nothing of the slow path: {said}")
    print(f"sdist without a compiler: {train_killed_and_resumed(inner, EXAMPLES / 'train_numpy.py', out)}", flush=True)


def _try_tests(python: str, sdist: Path, wheel: Path, work: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (place,) = (work / "unpacked").iterdir()
    needed = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors")
    inner = make_environment(python, work / "tests", wheel, *needed)
    # The sources that were unpacked hold no compiled code: the installed package is what is tested.
    print(f"tests of the sdist: {run([inner, '-m', 'pytest', *SHORT_TESTS], where=place).splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
