"""Programs whose system calls are traced, or made to fail, by strace."""

from __future__ import annotations

import shutil
import subprocess

import pytest

STRACE = ("strace", "-f", "--seccomp-bpf")
"""With threads and processes; the kernel stops these at the traced calls alone, so that a Python starts as ever."""


def _can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run([*STRACE, "-qq", "true"], capture_output=True, check=False).returncode == 0


needs_strace = pytest.mark.skipif(not _can_trace(), reason="strace is not there, or may not trace")
