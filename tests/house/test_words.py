"""The docs, the docstrings and the messages are in plain English, without words that only their authors understood."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import ROOT, TESTS
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


ANY = re.compile("|".join(f"(?:{pattern})" for pattern, _ in (*PRIVATE_WORDS, *BRITISH)), re.IGNORECASE)
"""Most texts have none, which one pass shows."""


def find_private_words(text: str) -> Iterator[str]:
    """Each offence with its line, and what to write instead."""
    plain = CODE.sub(lambda code: re.sub(r"[^\n]+", " ", code[0]), text)
    if not ANY.search(plain):
        return
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


# Where the words are still found.

LEFT = TESTS / "house" / "private_words_left.txt"
"""How many private words a design record or a file of the benchmarks may have, and which names may hold one.

`PYTHONPATH=tests/support python tests/house/test_words.py` removes what is gone. Nothing is ever added.
"""


def read_names(module: Path) -> set[str]:
    """The names that a module gives to its functions, classes, arguments, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def has_private_word(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").strip()
    return any(find_private_words(words))


def count_left() -> Counter[str]:
    """The names that hold private words, by the folder that they are in, and the private words of other files."""
    found: Counter[str] = Counter()
    for folder in ("src", "tests", "benchmarks", "examples"):
        modules = (module for module in (ROOT / folder).rglob("*.py") if (TESTS / "data") not in module.parents)
        names = set().union(*map(read_names, modules))
        found.update(f"{folder} {name}" for name in names if has_private_word(name))
    for module in sorted((ROOT / "benchmarks").rglob("*.py")):
        found[str(module.relative_to(ROOT))] += sum(
            len([*find_private_words(text)]) for _, text, _ in read_texts(module)
        )
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        found[str(page.relative_to(ROOT))] += len([*find_private_words(page.read_text())])
    return +found


def read_left() -> Counter[str]:
    lines = (line.rpartition(": ") for line in LEFT.read_text().splitlines())
    return Counter({place: int(count) for place, _, count in lines})


def test_names_design_records_and_benchmarks_have_no_more_private_words() -> None:
    assert dict(count_left() - read_left()) == {}


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


if __name__ == "__main__":
    left = count_left() & read_left() if LEFT.exists() else count_left()
    LEFT.write_text("".join(f"{place}: {count}\n" for place, count in sorted(left.items())))
