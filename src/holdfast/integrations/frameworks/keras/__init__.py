"""`holdfast.keras`: resumable training with Keras 3. Using it imports Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from holdfast.extras import Door

if TYPE_CHECKING:
    from holdfast.integrations.frameworks.keras.callbacks import BackupAndRestore, Resumable

__all__ = ["BackupAndRestore", "Resumable"]

_DOOR: Final = Door(
    "keras", "keras", "3.10", "keras", dict.fromkeys(__all__, "holdfast.integrations.frameworks.keras.callbacks")
)


def __getattr__(name: str) -> Any:
    return _DOOR.load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
