"""Decodes stored state to NumPy arrays and plain containers, for a program without objects to restore into."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import UnsupportedValueError
from holdfast.format.codecs import Codec
from holdfast.format.decoding import UNFILLED, SubclassNode, find_tags, malformed
from holdfast.state.match.compare import Comparison, find_codec
from holdfast.state.registry import backend_named

_OF_CLASSES: Final = frozenset({"namedtuple", "dataclass"})


class PlainForm:
    """A placeholder of an object of which only the name is known."""


PLAIN: Final = PlainForm()


class PlainDecoder(Comparison):
    """The decoder of objects without live ones: it needs no type of the program."""

    def __init__(self, beside: Comparison) -> None:
        """Collects the results where another comparison does."""
        super().__init__({}, beside.stored_arrays, None)
        self.claims, self.differences = beside.claims, beside.differences
        self._find_codec = lambda tag: find_codec(tag) or Codec(object, tag, _same, _same)

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        """Returns a NumPy array."""
        spec = self.stored_arrays.get(leaf)
        if spec is None:
            raise malformed(path, f"there is no array {leaf!r}")
        if spec.quantizer is not None:
            raise UnsupportedValueError(
                f"{path}: NumPy cannot represent a quantized array",
                path=path,
                hint="Read it into the program's own tree, with `like`.",
            )
        return self.claims.new(leaf, spec, backend_named("numpy"))

    def _new_arrays(self, leaves: Sequence[str], libraries: Collection[str]) -> Sequence[Any] | None:
        """Returns None: NumPy makes each of them, those of all libraries."""
        return None

    def stateful(self, kind: str, state: Any, live: Any, path: str, depth: int) -> Any:
        """Returns only the state."""
        return self.decode(state, UNFILLED, path, depth)

    def coded(self, codec: Codec, payload: Any, live: Any, path: str, depth: int) -> Any:
        """Returns the value; if it contains arrays, the input of its codec."""
        if any(tag in ("array", "tensor_subclass") for tag, _ in find_tags(payload)):
            return self.decode(payload, UNFILLED, path, depth)
        return super().coded(codec, payload, live, path, depth)

    def node(self, name: str, parts: Mapping[str, Any] | None, live: Any, path: str, depth: int) -> Any:
        """Returns the parts by name; None for a value of the program itself."""
        return None if parts is None else self.mapping(parts, UNFILLED, path, depth)

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        """Returns the tensors of which it is made, by name."""
        return self.mapping(stored.tensors, UNFILLED, path, depth)

    def _tagged(self, node: Any, live: Any, path: str, depth: int) -> Any:
        tag, payload = node["$"], node.get("v")
        if tag in _OF_CLASSES and type(payload) is dict and "$" not in payload:
            return self.mapping(payload, UNFILLED, path, depth)
        if tag in ("enum", "flag") and node.keys() == {"$", "k", "v"}:
            return self.decode(payload, UNFILLED, path, depth)
        return super()._tagged(node, live, path, depth)


def _same(value: Any) -> Any:
    return value
