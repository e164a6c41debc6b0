"""`holdfast.accelerate.resumable`: resumable loops with accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.extras import Door

if TYPE_CHECKING:
    from holdfast.integrations.frameworks.accelerate.loop import resumable

__all__ = ["resumable"]

_DOOR: Final = Door(
    "accelerate",
    "accelerate",
    "1.10",
    "transformers",
    dict.fromkeys(__all__, "holdfast.integrations.frameworks.accelerate.loop"),
)


def __getattr__(name: str) -> Any:
    return _DOOR.load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
