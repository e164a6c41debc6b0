"""The README, the quickstart and the scripts of `holdfast init` have no error of types for pyright either.

It is not among the packages of the suite, as it brings a JavaScript runtime: `pip install pyright` lets this run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.verbs.init import KINDS
from places import ROOT

TYPED = """
import typing, torch, holdfast
from torch.utils.data import DataLoader, Dataset

def read() -> typing.Iterator[float]: ...

with holdfast.resumable("runs/a", w=[1.0]) as run:
    for epoch in run.epochs(2):
        for word in run.batches(["a", "b"]):
            typing.assert_type(word, str)
        for number in run.batches(read):
            typing.assert_type(number, float)
    for pair in zip(run.steps(3), run.batches([b"a"])):
        typing.assert_type(pair, tuple[int, bytes])
"""


def test_pyright_finds_no_error_in_what_users_begin_with(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    (tmp_path / "typed.py").write_text(TYPED)
    for page in (ROOT / "README.md", ROOT / "docs" / "start" / "quickstart.md"):
        blocks = re.findall(r"^```python run\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        assert blocks
        (tmp_path / f"{page.stem.lower()}.py").write_text("\n".join(blocks))
    for kind in KINDS:
        shutil.copy(ROOT / "examples" / f"train_{kind}.py", tmp_path)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    # A framework that is not installed has no types.
    errors = [one for one in found["generalDiagnostics"] if one.get("rule") != "reportMissingImports"]
    assert [(one["file"], one["range"]["start"], one["message"]) for one in errors] == []
    assert found["summary"]["filesAnalyzed"] == 3 + len(KINDS)
