"""The site that `make docs` has built: its links and anchors lead somewhere, and the API that it shows is the true one.

It is run by `make docs`, in an environment that has no torch.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe
import pytest

import holdfast as hf

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


class Page(HTMLParser):
    """The anchors of a page, and where its links and pictures lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is None:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            if (tag, name) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
                self.targets.add(value)


@cache
def read(path: Path) -> Page:
    return Page(path)


def test_every_link_anchor_and_picture_is_there() -> None:
    broken = []
    for path in PAGES:
        for target in read(path).targets:
            if "://" in target or target.startswith(("data:", "mailto:", "/")):
                continue
            file, _, anchor = unquote(target).partition("#")
            linked = (path.parent / file).resolve() if file else path
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.exists() or (anchor and anchor not in read(linked).anchors):
                broken.append(f"{path.relative_to(SITE)}: {target}")
    assert len(PAGES) > 40
    assert broken == []


def test_code_in_tables_has_no_backslash_before_a_bar() -> None:
    cells = [cell for path in PAGES for cell in re.findall(r"<td[^>]*><code>.*?</td>", read(path).text)]
    assert [cell for cell in cells if "\\|" in cell] == []
    assert any("holdfast.Latest(1) | holdfast.Best" in cell for cell in cells)


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """It can be read where there is no network."""
    for path in PAGES:
        assert not re.findall(
            r'<(?:script|link rel="stylesheet"|img)[^>]+(?:src|href)="https?://[^"]+', read(path).text
        )


def directives() -> Iterator[str]:
    for page in sorted((ROOT / "docs" / "reference" / "python").glob("*.md")):
        yield from DIRECTIVE.findall(page.read_text())


def test_all_that_the_api_pages_name_is_shown() -> None:
    shown = set().union(*(read(path).anchors for path in (SITE / "reference" / "python").glob("*.html")))
    assert set(directives()) <= shown
    private = [anchor for anchor in shown if re.search(r"^holdfast\..*\._|\.mark_", anchor)]
    assert private == []


@cache
def loaded() -> Any:
    extensions = griffe.load_extensions(str(ROOT / "docs" / "_site" / "constants.py"))
    return griffe.load("holdfast", search_paths=[ROOT / "src"], extensions=extensions)


def functions() -> Iterator[tuple[Any, Any]]:
    """What is shown of each function: as griffe reads it, and as Python does."""
    for path in directives():
        module, _, name = path.rpartition(".")
        try:
            thing = getattr(importlib.import_module(module), name)
        except ImportError:
            continue  # Its framework is not installed here.
        shown = loaded()[path.removeprefix("holdfast.")]
        if isinstance(shown, griffe.Function):
            yield shown, thing
        else:
            for method, found in shown.members.items():
                if isinstance(found, griffe.Function) and (method == "__init__" or method[0] != "_"):
                    yield found, inspect.getattr_static(thing, method, None)


def test_shown_signatures_are_the_true_ones_and_defaults_are_values() -> None:
    compared = 0
    for shown, thing in functions():
        if not inspect.isfunction(thing):
            continue
        module = vars(sys.modules[inspect.unwrap(thing).__module__])
        true = inspect.signature(thing).parameters
        assert [one.name.lstrip("*") for one in shown.parameters] == list(true), shown.path
        for one in shown.parameters:
            default = true[one.name.lstrip("*")].default
            assert (one.default is None or "VAR" in true[one.name.lstrip("*")].kind.name) == (
                default is inspect.Parameter.empty
            ), f"{shown.path}: {one.name}"
            if default is inspect.Parameter.empty or one.default is None or "factory" in repr(default):
                continue
            text = str(one.default)
            assert not re.fullmatch(r"_?[A-Z][A-Z_]+", text), (
                f"{shown.path}: {one.name}={text} is not shown by its value"
            )
            assert eval(ast.unparse(ast.parse(text, mode="eval")), module) == default, f"{shown.path}: {one.name}"
            compared += 1
    assert compared > 100, compared


def test_a_deadline_is_shown_by_its_seconds() -> None:
    """What a reader wants to know is how long, not what the constant is called."""
    text = re.sub(r"<[^>]+>", "", read(SITE / "reference" / "python" / "manager.html").text)
    (default,) = {
        one.default
        for name, one in inspect.signature(hf.CheckpointManager).parameters.items()
        if name == "liveness_seconds"
    }
    assert re.search(rf"liveness_seconds:\s*float\s*=\s*{re.escape(str(default))}", text)


if not PAGES:
    pytest.fail("build the site first: make docs", pytrace=False)


def test_the_search_finds_a_method_on_the_pages_that_call_it() -> None:
    """Readers look for `finish_step`, and pages write `run.finish_step()`."""
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    separator = index["config"]["separator"]
    found = {
        entry["location"].partition("#")[0]
        for entry in index["docs"]
        if "finish_step" in re.split(separator, re.sub(r"<[^>]+>", " ", entry["text"]))
    }
    assert "guides/training-loops.html" in found
