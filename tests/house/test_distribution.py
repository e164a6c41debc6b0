"""The wheel and the sdist hold what they must; `make dist` also installs them, and trains with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from distribution import build_sdist, build_wheel, copy_sources, find_sdist_problems, find_wheel_problems
from places import ROOT

needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no checkout of git"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources"))


@needs_git
def test_the_wheel_is_for_every_python_and_holds_no_sources_in_c(sources: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sources, tmp_path, isolated=False)
    compiled = shutil.which("cc") is not None
    assert find_wheel_problems(wheel, compiled=compiled) == []


@needs_git
def test_the_sdist_is_the_repository_and_builds_without_a_compiler(sources: Path, tmp_path: Path) -> None:
    sdist = build_sdist(sources, tmp_path)
    assert find_sdist_problems(sdist, copy_sources(tmp_path / "again")) == []
    wheel = build_wheel(sdist, tmp_path, isolated=False, environment={"CC": "/bin/false"})
    assert find_wheel_problems(wheel, compiled=False) == []


@needs_git
def test_a_release_has_the_address_of_the_project(sources: Path, tmp_path: Path) -> None:
    import zipfile

    address = {"HOLDFAST_PROJECT_URL": "https://example.org/holdfast", "CC": "/bin/false"}
    wheel = build_wheel(sources, tmp_path, isolated=False, environment=address)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert "Project-URL: Source, https://example.org/holdfast\n" in metadata
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    assert links
    assert all(link.startswith(("https://", "http://", "#")) for link in links)


def test_the_workflow_covers_every_python_and_both_processors() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "build.yml").read_text())
    jobs = workflow["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == classifiers
    assert any("arm" in runner for runner in matrix["runner"])
    assert jobs["publish"]["needs"] == ["check", "test", "wheels", "sdist"]
    assert "tags/v" in jobs["publish"]["if"]
    for job in jobs.values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@"), "an action has a version"
            for target in re.findall(r"make ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
