"""`holdfast.lightning`: exact resumes and background saves for Lightning's `Trainer`.

Example:
    ```python
    trainer = Trainer(callbacks=[holdfast.lightning.Resumable("runs/a", save_every=holdfast.Steps(500))])
    trainer.fit(model)  # continues where the last process stopped
    ```
"""

from typing import TYPE_CHECKING, Any, Final

from holdfast.extras import Door

if TYPE_CHECKING:
    from holdfast.integrations.frameworks.lightning.callback import Resumable
    from holdfast.integrations.frameworks.lightning.checkpoint_io import HoldfastCheckpointIO

__all__ = ["HoldfastCheckpointIO", "Resumable"]

_DOOR: Final = Door(
    "lightning",
    "lightning",
    "2.5",
    "lightning",
    {
        "HoldfastCheckpointIO": "holdfast.integrations.frameworks.lightning.checkpoint_io",
        "Resumable": "holdfast.integrations.frameworks.lightning.callback",
    },
)


def __getattr__(name: str) -> Any:
    return _DOOR.load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
