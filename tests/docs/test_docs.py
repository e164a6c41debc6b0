"""The documentation is true: its code runs, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import holdfast as hf
from pages import FENCE, OF_FRAMEWORKS, RUN_AS, blocks, has_runnable, run_page
from places import ROOT, TESTS

SOURCE = ROOT / "src" / "holdfast"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
PATH = re.compile(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+|(?:\w+/)*\w+\.py)`")
TEST = re.compile(r"`(test_\w+)`")


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def links(page: Path) -> list[str]:
    return LINK.findall(without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; and of what the site puts into it of docstrings."""
    found: set[str] = set(DIRECTIVE.findall(page.read_text()))
    for heading in HEADING.findall(without_code(page.read_text())):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_compiles(page: Path) -> None:
    for line, words, body in blocks(page, "python"):
        assert words in ("", *RUN_AS), f"{page}:{line}: what is {words!r}?"
        compile("\n" * (line - 1) + body, str(page), "exec")


RUNNABLE = [page for page in PAGES if has_runnable(page) and page.name not in OF_FRAMEWORKS]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_runnable_code_runs(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(linked), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_is_named_exists(page: Path) -> None:
    text = DIRECTIVE.sub("", page.read_text())  # The directives are held by `tests/docs/test_reference.py`.
    for name in set(re.findall(r"\bhf\.([A-Za-z_]\w*)", text)):
        assert name in hf.__all__, f"holdfast.{name} is not public"
    for dotted in set(re.findall(r"\bholdfast((?:\.[A-Za-z_]\w*)+)", text)):
        assert_is_there(dotted.split(".")[1:])
    for path in PATH.findall(text):
        assert (ROOT / path).exists() or (SOURCE / path).exists(), f"{path} is not there"
    tests = "".join(file.read_text() for file in TESTS.rglob("*.py"))
    for test in TEST.findall(text):
        assert f"def {test}(" in tests or any(TESTS.rglob(f"{test}.py")), f"there is no test {test}"


def assert_is_there(parts: list[str]) -> None:
    """Makes sure that a dotted name below `holdfast` is that of a module, or of something in one."""
    found: object = hf
    for depth, part in enumerate(parts):
        if not hasattr(found, part):
            importlib.import_module(".".join(["holdfast", *parts[: depth + 1]]))
        found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_has_one_title_and_short_lines_of_code(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", without_code(text), re.MULTILINE)) == 1
    for match in FENCE.finditer(text):
        assert all(len(line) <= 120 for line in match["body"].splitlines())


def in_navigation() -> list[Path]:
    """The pages in the site's navigation. That of the design records is a pattern."""
    listed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return [page for name in listed for page in ((ROOT / "docs").glob(name) if "*" in name else [ROOT / "docs" / name])]


def test_the_navigation_lists_every_page() -> None:
    assert set(in_navigation()) == set((ROOT / "docs").rglob("*.md"))


def test_every_page_can_be_reached_from_the_readme() -> None:
    """By links, and by the navigation of the docs."""
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        paths = [target.partition("#")[0] for target in links(page) if "://" not in target]
        ahead += [(page.parent / path).resolve() for path in paths if path]
        if page == ROOT / "docs" / "index.md":
            ahead += in_navigation()
    assert seen == set(PAGES)


def test_the_readme_has_the_figures_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith(("| Training stops", "| Durable"))]
    page = (ROOT / "docs" / "internals" / "benchmarks.md").read_text().partition("## All medians")[2]
    shown = ("**holdfast**", "**holdfast, overlapped**", "torch.save", "DCP async, thread, cached")
    for name in shown:
        cells = next(line.split("|") for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert f"{cells[2].split()[0]} s" in rows[0], name
        assert f"{cells[6].split()[0]} s" in rows[1] or "overlapped" in name, name


def test_messages_that_troubleshooting_explains_are_in_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\| "(.+?)" \|', page, re.MULTILINE)
    source = "".join(module.read_text() for module in SOURCE.rglob("*.py"))
    plain = re.sub(r"[{}]|\"\s*f?\"", "", source)
    assert len(quoted) > 10
    assert [text for text in quoted if text not in plain] == []


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 96
