"""What a user wants noted in the manifest: figures, and any JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError


def check_notes(
    metrics: Mapping[str, float] | None, metadata: Mapping[str, Any] | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """**Pure.** Copies of both, fit for a manifest, so that later changes to the originals are not seen.

    Raises:
        UsageError: If something in them would not come back as it is.
    """
    try:
        figures = {_encodable(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"metrics are figures by name: {error}") from error
    try:
        encoded = json.dumps(dict(metadata or {}), allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"metadata is not JSON: {error}", hint="State belongs into the Checkpoint.") from error
    return {name: value for name, value in figures.items() if math.isfinite(value)}, json.loads(encoded)


def _encodable(name: object) -> str:
    text = str(name)
    text.encode()
    return text
