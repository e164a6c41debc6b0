"""`holdfast.transformers.Resumable`: resumable training with the Hugging Face Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.extras import Door

if TYPE_CHECKING:
    from holdfast.integrations.frameworks.transformers.callback import Resumable

__all__ = ["Resumable"]

_DOOR: Final = Door(
    "transformers",
    "transformers",
    "4.57",
    "transformers",
    dict.fromkeys(__all__, "holdfast.integrations.frameworks.transformers.callback"),
)


def __getattr__(name: str) -> Any:
    return _DOOR.load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
