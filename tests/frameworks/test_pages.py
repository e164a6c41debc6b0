"""The programs on the pages about frameworks run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import OF_FRAMEWORKS, run_page
from places import ROOT

NEEDS = {"lightning.md": "lightning", "hf-trainer.md": "transformers", "keras.md": "keras"}


@pytest.mark.parametrize("name", OF_FRAMEWORKS)
def test_the_program_of_a_page_runs(name: str, tmp_path: Path) -> None:
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    run_page(ROOT / "docs" / "coming-from" / name, tmp_path)
    assert (tmp_path / "runs" / "a").is_dir()
