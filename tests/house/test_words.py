"""The docs, the docstrings and the messages are in plain English, without words that only their authors understood."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import ROOT
from private_words import BRITISH, PRIVATE_WORDS

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "design"),
]

SOURCE = ROOT / "src" / "holdfast"

QUESTION = re.compile(
    r"(?:\*\*[A-Z][a-z-]+\.\*\* )*(?:What|Whether|Who|Whose|Whom|Which|How (?!many|long|much|often))\b"
)
"""A docstring says what something is or returns; it does not pose the question."""

CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)


def find_private_words(text: str) -> Iterator[str]:
    """Each offence with its line, and what to write instead."""
    plain = CODE.sub(lambda code: re.sub(r"[^\n]+", " ", code[0]), text)
    for pattern, better in (*PRIVATE_WORDS, *BRITISH):
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            yield f"line {plain.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write: {better}"


def test_the_docs_use_no_private_words() -> None:
    found = [
        f"{page.relative_to(ROOT)}, {offence}" for page in PAGES for offence in find_private_words(page.read_text())
    ]
    assert found == []


def read_texts(module: Path) -> Iterator[tuple[int, str, bool]]:
    """Each string of a module that has several words: its line, the text, and True for a docstring."""
    tree = ast.parse(module.read_text())
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(parts), False
            continue
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in within:
            continue
        if " " in node.value.strip() or id(node) in docstrings:
            yield node.lineno, node.value, id(node) in docstrings


def test_docstrings_and_messages_use_no_private_words() -> None:
    found = [
        f"{module.relative_to(SOURCE)}:{line}: {offence.partition(': ')[2]}"
        for module in sorted(SOURCE.rglob("*.py"))
        for line, text, _ in read_texts(module)
        for offence in find_private_words(text)
    ]
    assert found == []


def test_no_docstring_begins_with_a_question() -> None:
    found = [
        f"{module.relative_to(SOURCE)}:{line}: {text.partition(chr(10))[0]}"
        for module in sorted(SOURCE.rglob("*.py"))
        for line, text, is_docstring in read_texts(module)
        if is_docstring and QUESTION.match(text)
    ]
    assert found == []


@pytest.mark.parametrize(("pattern", "better"), [*PRIVATE_WORDS, *BRITISH])
def test_each_pattern_is_one_and_names_what_is_better(pattern: str, better: str) -> None:
    assert better
    assert not re.search(pattern, better.replace("-", " "), re.IGNORECASE)


@pytest.mark.parametrize(
    "text",
    [
        "If a worker dies, that is told.",
        "Whoever reads it soever.",
        "It comes of the order.",
        "keep=3 is no policy.",
        "The behaviour of the optimiser.",
    ],
)
def test_private_words_are_found(text: str) -> None:
    assert list(find_private_words(text))


def test_code_and_common_words_are_left_alone() -> None:
    assert not list(find_private_words("There is no checkpoint. `whoever` is standard.\n\n```sh\nwhoever\n```\n"))
