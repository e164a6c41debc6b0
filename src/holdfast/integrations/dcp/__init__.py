"""`holdfast.dcp`: durable saves and verified loads with `torch.distributed.checkpoint`.

Example:
    ```python
    dcp.save(state, storage_writer=holdfast.dcp.StorageWriter("runs/a"))
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader("runs/a"))
    ```
"""

from typing import TYPE_CHECKING, Any, Final

from holdfast.extras import Door

if TYPE_CHECKING:
    from holdfast.integrations.dcp.reader import StorageReader
    from holdfast.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

# Older versions of async_save leave it to the writer to copy tensors of the CPU: training would change them during the
# save.
_DOOR: Final = Door(
    "dcp",
    "torch",
    "2.9",
    "dcp",
    {
        "StorageReader": "holdfast.integrations.dcp.reader",
        "StorageWriter": "holdfast.integrations.dcp.writer",
    },
)


def __getattr__(name: str) -> Any:
    return _DOOR.load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
