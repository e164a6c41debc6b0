"""Gathers, where there is a network, what a bare machine may lack: `python -m benchmarks.gpu.wheels PLACE VERSION`."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.gpu.site import PACKAGES, compile_extension

_GLIBCS: Final = ("2_28", "2_27", "2_26", "2_24", "2_17")
"""A wheel for any of these works wherever torch's own do; pip takes each by its exact name."""


def main(directory: Path, version: str) -> None:
    """Downloads wheels for a version of Python on Linux, and compiles holdfast's two modules."""
    directory.mkdir(exist_ok=True)
    processor = platform.machine()
    platforms = [f"manylinux_{glibc}_{processor}" for glibc in _GLIBCS] + [f"manylinux2014_{processor}"]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version, "--dest", str(directory)]
    for one in platforms:
        download += ["--platform", one]
    constraints = Path("constraints.txt")
    for name in PACKAGES:
        # One by one: what cannot be had is a row in the results, and no reason to bring nothing.
        for more in ([["-c", str(constraints)]] if constraints.exists() else []) + [[]]:
            done = subprocess.run([*download, *more, name], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    compiler = shutil.which("cc") or shutil.which("gcc")
    for source in ("src/holdfast/save/_moves.c", "src/holdfast/storage/_digesting.c"):
        made = directory / f"{Path(source).stem}.abi3.so"
        if compiler is None or not compile_extension(compiler, Path(source), made):
            print(f"{source}: not compiled")
    files = sorted(directory.iterdir())
    size_bytes = sum(file.stat().st_size for file in files)
    print(f"{directory}: {len(files)} files, {size_bytes / 1e6:.1f} MB, for Python {version} on {processor}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
