"""Prepares what a bare machine lacks: packages from wheels that came along, and holdfast itself.

Nothing is downloaded and nothing outside of one directory is written. Python finds that directory by `PYTHONPATH`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "click": "click",
    "execnet": "execnet",
    "hypothesis": "hypothesis",
    "iniconfig": "iniconfig",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "pygments": "pygments",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "rich": "rich",
    "safetensors": "safetensors",
    "sortedcontainers": "sortedcontainers",
    "torch_checkpointing": "torch_checkpointing",
    "xxhash": "xxhash",
}
"""The needs of holdfast, its tests and the peers besides torch: by pip's name, the module that each one brings."""

_EXTENSIONS: Final = ("save/_moves", "storage/_digesting")


def find_place(wanted: Path) -> Path:
    """The directory for all that is written: the one that was wanted, or one below the place for temporary files."""
    for place in (wanted, Path(tempfile.gettempdir()) / "holdfast-gpu"):
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / "trial").write_text("")
            (place / "trial").unlink()
        except OSError:
            continue
        return place.resolve()
    raise SystemExit(f"neither {wanted} nor {tempfile.gettempdir()} can be written: give another --out")


def make_site(root: Path, place: Path, wheels: Path) -> Iterator[str]:
    """**Blocks.** Fills `place / "site"`; yields what it has done, in lines for the results."""
    site = place / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    missing = [name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    brought = [name for name in missing if _unpack(name, wheels, site)]
    if brought:
        yield f"brought along: {', '.join(brought)}"
    if lacking := [name for name in missing if name not in brought]:
        yield f"not here, and no wheel that fits in {wheels.name}: {', '.join(lacking)}"
    shutil.copytree(
        root / "src" / "holdfast", site / "holdfast", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    )
    for name in _EXTENSIONS:
        yield f"{name.rpartition('/')[2]}: {_make_extension(site / 'holdfast' / name, wheels)}"


def make_environment(root: Path, place: Path, scratch: Path) -> dict[str, str]:
    """The variables of each part. All that is cached goes to `scratch`: a home may be missing, or read-only.

    Its path has to be short, since Python's processes speak to each other by sockets there.
    """
    tests = root / "tests"
    paths = [place / "site", root, tests, tests / "support", tests / "programs", root / "examples"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE")}
    env |= {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [env.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(scratch),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # There may be no network but the machine itself.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HYPOTHESIS_STORAGE_DIRECTORY"):
        env[name] = str(scratch / name.lower())
    if not os.access(Path.home(), os.W_OK):
        env["HOME"] = str(scratch)
    return env


def _unpack(name: str, wheels: Path, site: Path) -> bool:
    """True if there was a wheel of that package for this Python. A wheel is an archive of what is to be imported."""
    for wheel in sorted(wheels.glob("*.whl"), reverse=True):
        if _normalized(wheel.name.partition("-")[0]) == _normalized(name) and fits(wheel.name):
            with suppress(OSError, zipfile.BadZipFile):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(site)
                return True
    return False


def fits(wheel: str) -> bool:
    """True if a wheel is for this Python and this kind of processor, by its name."""
    python, abi, platform = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    is_python = any(
        tag in (own, "py3", f"py3{sys.version_info.minor}")
        or (abi == "abi3" and tag.startswith("cp3") and int(tag[3:]) <= sys.version_info.minor)
        for tag in python.split(".")
    )
    return is_python and (platform == "any" or platform.endswith(sysconfig.get_platform().rpartition("-")[2]))


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _make_extension(path: Path, wheels: Path) -> str:
    """Compiles a part of holdfast that is in C, or takes one that came along; says which."""
    made, source = path.with_suffix(".abi3.so"), path.with_suffix(".c")
    for compiler in filter(None, (shutil.which(name) for name in ("cc", "gcc", "clang"))):
        if compile_extension(compiler, source, made) and _loads(made):
            return f"compiled by {Path(compiler).name}"
    brought = wheels / f"{path.name}.abi3.so"
    if brought.exists():
        shutil.copy(brought, made)
        if _loads(made):
            return "brought along compiled"
    made.unlink(missing_ok=True)
    return "NOT COMPILED, so Python does what it would do: figures of holdfast are slower than they need be"


def compile_extension(compiler: str, source: Path, made: Path) -> bool:
    """**Blocks.** True if a compiler has made a module of it."""
    includes = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    flags = ["-O3", "-shared", "-fPIC", "-DNDEBUG", *(f"-I{include}" for include in sorted(includes) if include)]
    return _succeeds([compiler, *flags, str(source), "-o", str(made)])


def _loads(module: Path) -> bool:
    name = module.name.partition(".")[0]
    text = (
        "import importlib.util as u, sys; s = u.spec_from_file_location(sys.argv[1], sys.argv[2]); "
        "s.loader.exec_module(u.module_from_spec(s))"
    )
    return _succeeds([sys.executable, "-c", text, name, str(module)])


def _succeeds(command: Iterable[str]) -> bool:
    try:
        done = subprocess.run([*command], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
