"""Goes through the parts: `make gpu`, or `python -m benchmarks.gpu`. Needs the standard library alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import process
from benchmarks.gpu.findings import FILES, RESULTS, Findings, read_lines
from benchmarks.gpu.parts import TOTAL_SECONDS, Part, choose, list_parts
from benchmarks.gpu.site import find_place, make_environment, make_site

_ROOT: Final = Path(__file__).resolve().parents[2]
_PROBE: Final = """
import json, sys
about = {"python": sys.version.split()[0]}
try:
    import torch
    about["torch"] = torch.__version__
    if torch.cuda.is_available():
        about["device"] = torch.cuda.get_device_name(0)
        about["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB"
except BaseException as error:
    about["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(about))
"""


def main() -> int:
    """**Blocks.** 0 if all parts have ended well, or there is no device; 1 if not."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the processor, at a hundredth of the size")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "gpu", help="where the results go")
    parser.add_argument("--wheels", type=Path, default=_ROOT / ".gpu-wheels", help="what `make gpu-wheels` gathered")
    parser.add_argument("--only", action="append", default=[], help="parts whose names contain this; may come again")
    parser.add_argument("--limit", type=float, default=TOTAL_SECONDS, help="seconds for all parts together")
    asked = parser.parse_args()
    begun_at = time.monotonic()
    about = find_device()
    if not asked.dry and "device" not in about:
        why = about.get("error") or f"torch {about.get('torch')} sees none"
        print(f"no CUDA device: {why} (Python {about['python']}, {sys.executable}). Nothing was measured.")
        print("On a machine that has one, PYTHON=... names the Python that has torch. DRY=1 tries the kit without one.")
        return 0
    if "error" in about:
        print(f"torch cannot be imported: {about['error']}")
        return 1
    if asked.dry:
        about |= {"device": "the processor", "dry": "yes"}
    place = find_place(asked.out)
    parts = choose(list_parts(_ROOT, dry=asked.dry), asked.only)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    return Kit(place, about, begun_at + asked.limit).run(parts, asked.wheels, jobs=2 if asked.dry else 1)


def find_device() -> dict[str, Any]:
    """**Blocks** for seconds. What torch says of itself, in a process that cannot hang this one."""
    failed = {"python": sys.version.split()[0]}
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=90, check=False)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return failed | {"error": "importing torch takes longer than 90 s"}
    except (OSError, ValueError, IndexError):
        return failed | {"error": "the process that asked torch has ended without an answer"}


def _has_xdist(site: Path) -> bool:
    return importlib.util.find_spec("xdist") is not None or (site / "xdist").exists()


def _leave(number: int, _: object) -> None:
    process.end_all()
    # What was found is in the files already.
    os._exit(128 + number)


class Kit:
    """One run."""

    def __init__(self, place: Path, about: dict[str, Any], end_at: float) -> None:
        self._place = place
        self._end_at = end_at
        self._findings = Findings(place, about)
        self._env: dict[str, str] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="hf-"))
        self._is_well = True
        self._is_dry = "dry" in about

    def run(self, parts: list[Part], wheels: Path, jobs: int) -> int:
        """**Blocks.** Runs all parts; results are written after each."""
        begun_at = time.monotonic()
        said = [{"say": line} for line in make_site(_ROOT, self._place, wheels)]
        self._env = make_environment(_ROOT, self._place, self._scratch)
        if jobs > 1:
            # Threads that wait for each other would take the processor from the other parts.
            self._env["OMP_NUM_THREADS"] = "1"
        self._note("site", {"state": "done", "seconds": time.monotonic() - begun_at, "text": ""}, said)
        (self._place / "gpu.log").write_bytes(b"")
        with ThreadPoolExecutor(jobs) as pool:
            for _ in pool.map(self._run_part, enumerate(parts)):
                pass
        for left in (self._scratch, self._place / "files", self._place / "site"):
            shutil.rmtree(left, ignore_errors=True)
        print((self._place / "gpu.md").read_text())
        print(f"results: {self._place / 'gpu.json'} and {self._place / 'gpu.md'}, output: {self._place / 'gpu.log'}")
        return 0 if self._is_well else 1

    def _run_part(self, numbered: tuple[int, Part]) -> None:
        number, part = numbered
        left_seconds = self._end_at - time.monotonic()
        if left_seconds < part.least_seconds:
            self._note(part.name, {"state": "no time left", "seconds": 0.0, "text": ""}, [])
            return
        lines, log = self._place / f"part-{number}.jsonl", self._place / f"part-{number}.log"
        lines.unlink(missing_ok=True)
        files = self._place / "files" / f"part-{number}"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        env = self._env | {RESULTS: str(lines), FILES: str(files), "MASTER_PORT": str(29600 + number)}
        command = [sys.executable, *part.command]
        if part.is_tests:
            command += ["--basetemp", str(files / "pytest")]
            if not self._is_dry and _has_xdist(self._place / "site"):
                # A test that ends its process, as an error of CUDA may, takes no others with it.
                command += ["-n", "4", "--dist", "worksteal"]
        limit_seconds = min(part.limit_seconds, left_seconds)
        try:
            ended = process.run(command, env, _ROOT, limit_seconds, log)
        except OSError as error:
            ended = process.Ended("failed", 0.0, f"it could not be started: {error}")
        found = read_lines(lines)
        if part.is_tests:
            last = next((line for line in reversed(ended.text.splitlines()) if line.strip()), "nothing")
            found.append({"say": f"tests marked cuda: {last.strip('= ')}"})
        self._note(part.name, {"state": ended.state, "seconds": ended.seconds, "text": ended.text}, found)
        with (self._place / "gpu.log").open("a") as output:
            output.write(f"\n==== {part.name}: {ended.state}\n{ended.text}\n")
        for left in (lines, log):
            left.unlink(missing_ok=True)
        shutil.rmtree(files, ignore_errors=True)

    def _note(self, name: str, ended: dict[str, Any], found: list[dict[str, Any]]) -> None:
        self._findings.add(name, ended, found)
        self._is_well &= ended["state"] in ("done", "no time left")
        print(f"{name}: {ended['state']} after {ended['seconds']:.0f} s", flush=True)
        for one in found:
            print(f"    {one.get('say') or json.dumps(one)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
