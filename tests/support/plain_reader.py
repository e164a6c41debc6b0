"""Reads what a checkpoint holds as the law of the format says, and without holdfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash


def open_record(path: Path, kind: str) -> dict[str, Any]:
    """The body of a record of version 1, whose digest is right."""
    text = path.read_bytes()
    record = json.loads(text)
    assert list(record) == ["holdfast", "version", "digest", "body"]
    assert (record["holdfast"], record["version"]) == (kind, 1)
    body = text[text.index(b'"body":') + len(b'"body":') : -1]
    assert digest(body) == record["digest"]
    assert json.loads(body) == record["body"]
    return dict(record["body"])


def digests(data: bytes, span_bytes: int) -> str:
    """The digests of all spans, in a row."""
    return "".join(digest(data[begin : begin + span_bytes]) for begin in range(0, len(data), span_bytes))


def digest(data: bytes) -> str:
    return xxhash.xxh3_128(data, seed=0).hexdigest()
