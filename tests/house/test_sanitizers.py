"""The compiled parts under sanitizers, and for other processors than this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import holdfast
from places import ROOT, TESTS

PACKAGE: Final = Path(holdfast.__file__).parent
INCLUDE: Final = sysconfig.get_path("include")
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
STRICT: Final = ("-Wall", "-Wextra", "-Werror", "-std=c11")
CROSS_GCC: Final = "aarch64-linux-gnu-gcc"
ZIG: Final = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu")

COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None or not Path(INCLUDE, "Python.h").exists(),
    reason="this machine has no compiler, or not Python's header",
)

RUN: Final = """
import sys
from importlib import import_module
import pytest

place, modules, *arguments = sys.argv[1:]
for name in modules.split(","):
    assert import_module(name).__file__.startswith(place), name
sys.exit(pytest.main(arguments))
"""


def list_extensions() -> dict[str, Path]:
    """The compiled modules, each with its source."""
    sources = ROOT.glob("src/holdfast/**/*.c")
    modules = {".".join(source.relative_to(ROOT / "src").with_suffix("").parts): source for source in sources}
    text = (ROOT / "setup.py").read_text()
    assert modules
    assert all(f'"{name}"' in text for name in modules), f"setup.py builds others than {sorted(modules)}"
    return modules


def compile_extension(source: Path, target: Path, *options: str, compiler: tuple[str, ...] = ("cc",)) -> None:
    command = [*compiler, "-shared", "-fPIC", "-g", "-O1", *STRICT, *options, f"-I{INCLUDE}", str(source)]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def find_runtime(name: str) -> str:
    """The path of a sanitizer's library; empty if the compiler has none."""
    command = ["cc", f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else ""


@COMPILER
@pytest.mark.long
def test_compiled_modules_pass_their_property_tests_under_sanitizers(tmp_path: Path) -> None:
    runtimes = [find_runtime("libasan.so"), find_runtime("libubsan.so")]
    if not all(runtimes):
        pytest.skip("the compiler has no sanitizers")
    shutil.copytree(PACKAGE, tmp_path / "holdfast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name, source in list_extensions().items():
        compile_extension(source, tmp_path / f"{name.replace('.', '/')}.abi3.so", *SANITIZERS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": " ".join(runtimes),
        # Python keeps memory until it ends, and tests ask for more than there is.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    tests = [str(TESTS / name) for name in ("save/test_moves.py", "storage/test_digesting.py")]
    # Not those that start programs of their own.
    chosen = "byte_comes or early or device or refuses or share_out"
    command = [sys.executable, "-c", RUN, str(tmp_path), ",".join(list_extensions()), *tests, "-q", "-k", chosen]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "skipped" not in done.stdout


@COMPILER
def test_sanitizers_find_a_write_beyond_an_array(tmp_path: Path) -> None:
    """So that the test above is known to see what it looks for."""
    runtime = find_runtime("libasan.so")
    if not runtime:
        pytest.skip("the compiler has no sanitizers")
    source = tmp_path / "wrong.c"
    source.write_text("#include <stdlib.h>\nvoid write_at(char *to, long at) { to[at] = 1; }\n")
    compile_extension(source, tmp_path / "wrong.so", "-fsanitize=address")
    program = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.malloc.restype = ctypes.c_void_p; "
        "library.write_at(ctypes.c_void_p(library.malloc(8)), ctypes.c_long(int(sys.argv[2])))"
    )
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    for place, is_right in (("7", True), ("8", False)):
        command = [sys.executable, "-c", program, str(tmp_path / "wrong.so"), place]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == is_right, done.stderr[-2000:]
        assert is_right or "heap-buffer-overflow" in done.stderr


@COMPILER
@pytest.mark.parametrize("name", list_extensions())
def test_compiled_modules_need_nothing_of_x86(name: str, tmp_path: Path) -> None:
    """As a processor without its vector instructions sees them."""
    compile_extension(list_extensions()[name], tmp_path / "module.so", "-U__SSE2__")


@pytest.mark.parametrize("name", list_extensions())
def test_compiled_modules_compile_for_aarch64(name: str, tmp_path: Path) -> None:
    if shutil.which(CROSS_GCC) is None and find_spec("ziglang") is None:
        # It takes 400 MB: too much to be installed for this alone.
        pytest.skip(f"there is no {CROSS_GCC}; `pip install ziglang` brings a compiler that does it as well")
    compiler = ZIG if shutil.which(CROSS_GCC) is None else (CROSS_GCC,)
    compile_extension(list_extensions()[name], tmp_path / "module.so", compiler=compiler)
    # The machine of an ELF file: 183 is aarch64.
    assert int.from_bytes((tmp_path / "module.so").read_bytes()[18:20], "little") == 183
