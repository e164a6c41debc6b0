"""The states that are saved and restored: names, shapes and where each tensor is in memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.frameworks.sizes import TRAINED as TRAINED_FIT

ITEM_BYTES: Final = 4
"""All tensors are float32."""

_PAGE_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_MAPPED_BYTES: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model of the GPT-2 kind.

    Attributes:
        vocabulary: How many tokens there are.
        context: The longest sequence.
        width: The length of an embedding.
        layers: How many blocks.
    """

    vocabulary: int
    context: int
    width: int
    layers: int

    def scaled(self, scale: float) -> ModelSize:
        """A model with about that part of the parameters, and as many tensors."""
        side = math.sqrt(scale)
        return ModelSize(
            max(16, round(self.vocabulary * side)),
            self.context,
            max(16, round(self.width * side / 16) * 16),
            self.layers,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The state that one comparison saves.

    Attributes:
        name: A short name.
        title: What it is, for people.
        model: The model, with AdamW's state for each parameter that is trained; None for loose tensors.
        adapter_rank: If not 0, the model is frozen, and low-rank adapters for two parts of each layer are trained.
        shapes: The loose tensors by name.
    """

    name: str
    title: str
    model: ModelSize | None = None
    adapter_rank: int = 0
    shapes: Sequence[tuple[str, tuple[int, ...]]] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor is in the memory that all processes share."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_workload(name: str, scale: float) -> Workload:
    """**Pure.** The workload of that name, made smaller by `scale`."""
    if name == "model":
        return Workload(name, "a GPT-2-small with AdamW state, float32", model=GPT2_SMALL.scaled(scale))
    if name == "mostly-frozen":
        rank = max(1, round(_ADAPTER_RANK * math.sqrt(scale)))
        title = "a frozen model, and adapters that are trained with AdamW, float32"
        return Workload(name, title, model=FROZEN.scaled(scale), adapter_rank=rank)
    if name == "many-saves":
        return Workload(name, "a GPT-2-like model with AdamW state, float32", model=GPT2_SMALL.scaled(scale / 20))
    if name == "small-tensors":
        count = max(4, round(20_000 * scale))
        # Whole KiB, each size as often as its double. The seed is fixed: each process makes the same.
        sizes = random.Random(0)
        shapes = [(f"group{i % 100}.tensor{i}", (256 * round(4 * 16 ** sizes.random()),)) for i in range(count)]
        return Workload(name, "loose tensors of 4 to 64 KiB", shapes=shapes)
    if name == "fit":
        return Workload(
            name, "the model of a framework's fit with AdamW state", shapes=TRAINED_FIT.scaled(scale).shapes()
        )
    raise ValueError(f"there is no workload {name!r}")


GPT2_SMALL: Final = ModelSize(vocabulary=50_257, context=1024, width=768, layers=12)
TRAINED: Final = ModelSize(vocabulary=20_000, context=32, width=512, layers=8)
"""The model of the training loop: 0.43 GB with its optimizer's state."""
FROZEN: Final = ModelSize(vocabulary=50_257, context=1024, width=1024, layers=20)
"""1.2 GB."""
_ADAPTER_RANK: Final = 28
"""Makes 20 MB of adapters for the frozen model."""


def model_shapes(size: ModelSize) -> list[tuple[str, tuple[int, ...]]]:
    """**Pure.** The parameters of a model, in the order in which it has them."""
    width = size.width
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("tokens.weight", (size.vocabulary, width)),
        ("positions.weight", (size.context, width)),
    ]
    for layer in range(size.layers):
        block = f"blocks.{layer}."
        for part, rows, columns in (("attend", 3 * width, width), ("project", width, width)):
            shapes += [(f"{block}{part}.weight", (rows, columns)), (f"{block}{part}.bias", (rows,))]
        shapes += [(f"{block}widen.weight", (4 * width, width)), (f"{block}widen.bias", (4 * width,))]
        shapes += [(f"{block}narrow.weight", (width, 4 * width)), (f"{block}narrow.bias", (width,))]
        for norm in ("norm1", "norm2"):
            shapes += [(f"{block}{norm}.weight", (width,)), (f"{block}{norm}.bias", (width,))]
    return [*shapes, ("norm.weight", (width,)), ("norm.bias", (width,))]


def adapter_shapes(size: ModelSize, rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """**Pure.** The parameters of the adapters of a model."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for layer in range(size.layers):
        for part, factor in (("attend", 3), ("widen", 4)):
            name = f"adapters.{layer}.{part}"
            shapes += [(f"{name}.down", (rank, size.width)), (f"{name}.up", (factor * size.width, rank))]
    return shapes


def state_shapes(workload: Workload) -> list[tuple[str, tuple[int, ...]]]:
    """**Pure.** All tensors of a workload; those of an optimizer are named by parameter."""
    if workload.model is None:
        return list(workload.shapes)
    frozen = []
    parameters = model_shapes(workload.model)
    if workload.adapter_rank:
        frozen, parameters = parameters, adapter_shapes(workload.model, workload.adapter_rank)
    moments = [(f"{kind}/{name}", shape) for name, shape in parameters for kind in ("exp_avg", "exp_avg_sq")]
    steps: list[tuple[str, tuple[int, ...]]] = [(f"step/{name}", ()) for name, _ in parameters]
    return [*frozen, *parameters, *moments, *steps]


def trained_names(workload: Workload) -> set[str]:
    """**Pure.** The names of the tensors that change in training."""
    names = [name for name, _ in state_shapes(workload)]
    return {name for name in names if not workload.adapter_rank or "adapters." in name}


def place_tensors(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[list[Place], int]:
    """**Pure.** Lays tensors into one piece of memory as an allocator would, and says how long it is.

    Large tensors of a real process are mapped one by one and begin 64 bytes into a page. To lay them on whole pages
    would flatter those who read straight into them.
    """
    places = []
    offset = 0
    for name, shape in shapes:
        size_bytes = ITEM_BYTES * math.prod(shape)
        if size_bytes >= _MAPPED_BYTES:
            offset = -(-offset // _PAGE_BYTES) * _PAGE_BYTES + _LINE_BYTES
        else:
            offset = -(-offset // _LINE_BYTES) * _LINE_BYTES
        places.append(Place(name, shape, offset, offset + size_bytes))
        offset += size_bytes
    return places, -(-offset // _PAGE_BYTES) * _PAGE_BYTES


def state_bytes(places: Sequence[Place]) -> int:
    """**Pure.** The bytes of all tensors, without the gaps between them."""
    return sum(place.end - place.begin for place in places)
