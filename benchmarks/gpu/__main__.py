"""Prepares the machine, and goes through the parts: `make gpu`. Needs the standard library alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.site import find_place, make_environment, make_site

TOTAL_SECONDS: Final = 525.0
"""For all parts together: what was not begun by then is left out, and `make gpu` ends within nine minutes."""

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
    notes = list(make_site(_ROOT, place, asked.wheels))
    scratch = Path(tempfile.mkdtemp(prefix="hf-"))
    run = {"place": str(place), "scratch": str(scratch), "about": about, "notes": notes, "only": asked.only}
    run["seconds"] = asked.limit - (time.monotonic() - begun_at)
    command = [sys.executable, "-m", "benchmarks.gpu.kit", json.dumps(run)]
    # In the environment of what was prepared, from which all that follows is imported.
    os.execve(sys.executable, command, make_environment(_ROOT, place, scratch))


def find_device() -> dict[str, Any]:
    """**Blocks** for seconds. What torch reports, in a process that cannot hang this one."""
    failed = {"python": sys.version.split()[0]}
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=90, check=False)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return failed | {"error": "importing torch takes longer than 90 s"}
    except (OSError, ValueError, IndexError):
        return failed | {"error": "the process that asked torch has ended without an answer"}


if __name__ == "__main__":
    sys.exit(main())
