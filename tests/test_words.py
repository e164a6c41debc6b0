"""The docs speak plain English: none of the words that only their authors understood."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from private_words import BRITISH, PRIVATE_WORDS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "design"),
]

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
