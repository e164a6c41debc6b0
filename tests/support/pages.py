"""The programs on the pages of the docs, and how they are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import preloaded
from places import PROGRAMS

FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)

FRESH = ("quickstart.md", *(("several-workers.md",) if "HOLDFAST_LONG" in os.environ else ()))
"""Pages whose programs are run as their readers run them. To import torch takes longer than those of other pages."""

SHORTER = {"README.md": ("run.epochs(100)", "run.epochs(3)")}
"""What is replaced in the programs of a page: the reader is to have a minute for killing them, but a test has not."""

RUN_AS = ("torchrun", "run")
"""What stands behind the language of a block that is run; on one page these programs come one after the other."""

OF_FRAMEWORKS = ("lightning.md", "hf-trainer.md", "keras.md")
"""Pages whose programs need a framework: `tests/frameworks/test_pages.py` runs them."""

LEAVE = "import os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"
"""Ends a worker. Where Python makes an end by itself, gloo may hang."""


def blocks(page: Path, language: str) -> list[tuple[int, str, str]]:
    """The first line, the words behind the language, and the text of each block of code."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        words = match["info"].split()
        if words[:1] == [language]:
            line = text.count("\n", 0, match.start("body")) + 1
            found.append((line, " ".join(words[1:]), match["body"]))
    return found


def has_runnable(page: Path) -> bool:
    return any(words in RUN_AS for _, words, _ in blocks(page, "python"))


def launched(program: Path, words: str, *, is_fresh: bool) -> list[str | Path]:
    """How the program of a page is run."""
    if words == "run":
        return [sys.executable, program]
    if not is_fresh:
        return [sys.executable, PROGRAMS / "elastic.py", program, "2", "0"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]


def run_page(page: Path, tmp_path: Path) -> None:
    """All runnable blocks of a page are one program, or one for each way to run it; its line numbers are the page's."""
    for way in RUN_AS:
        lines: list[str] = []
        for line, words, body in blocks(page, "python"):
            if words == way:
                lines += [""] * (line - 1 - len(lines)) + body.splitlines()
        if not lines:
            continue
        program = tmp_path / f"{page.stem}_{way}.py"
        is_fresh = page.name in FRESH
        text = "\n".join([*lines, LEAVE if is_fresh and way == "torchrun" else ""])
        program.write_text(text.replace(*SHORTER.get(page.name, ("", ""))))
        run: Any = subprocess.run if is_fresh else partial(preloaded.run, preload=preloaded.TRAINING)
        ended = run(
            launched(program, way, is_fresh=is_fresh),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
