"""The kind of tree that a stored node or a live value is: how the two are held against each other, and described."""

from __future__ import annotations

import collections
from typing import Any, Final

from holdfast.format.codecs import is_namedtuple, is_plain_dataclass, is_tensor_subclass, name_of
from holdfast.format.decoding import ABSENT, UNFILLED
from holdfast.format.scalars import ENCODERS, tagged
from holdfast.state.registry import adapter_of, is_array_type, node_parts

_STATE_DICTS: Final = frozenset({"torch.module", "torch.optimizer", "state_dict", "flax.nnx"})
"""Kinds of objects whose state may be a plain dict."""

_NUMBERS: Final = frozenset({"numpy", "int", "float", "complex"})

NO_FORM: Final = frozenset({*ENCODERS, type(UNFILLED)})

_FORMS = {
    "array": "array",
    "tensor_subclass": "subclass",
    "object": "object",
    "tuple": "sequence",
    "deque": "sequence",
    "dict": "mapping",
    "OrderedDict": "mapping",
    "defaultdict": "mapping",
    "Counter": "mapping",
    "namedtuple": "fields",
    "dataclass": "fields",
    "pytree": "fields",
}


def as_state(node: Any, live: Any) -> Any:
    """Converts the result of `state_dict()`, stored as a plain dict, to the state of the object that is to load it."""
    if type(live) in ENCODERS or live_form(live) != "object":
        return node
    adapter = adapter_of(live)
    kind = adapter.kind if adapter is not None else ""
    return {"$": "object", "k": kind, "v": node} if kind in _STATE_DICTS else node


def as_tuple(node: Any, live: tuple[Any, ...]) -> Any:
    """Converts a list to the program's tuple, and a dict of its fields to its named tuple."""
    cls: Any = type(live)
    if cls is tuple:
        return {"$": "tuple", "v": node} if type(node) is list else node
    if not is_namedtuple(cls):
        return node
    if node is None and not cls._fields:
        node = {}
    if type(node) is not dict or node.keys() != set(cls._fields):
        return node
    return {"$": "namedtuple", "k": name_of(cls), "v": node}


def as_node(node: Any, live: Any) -> Any:
    """Converts a dict of its parts to the program's node, such as a `TrainState`."""
    if type(node) is not dict or "$" in node or isinstance(live, dict):
        return node
    own = node_parts(live)
    return node if own is None or own.parts.keys() != node.keys() else tagged("pytree", node, name_of(type(live)))


def live_form(live: Any) -> str:
    """Returns the kind of tree that a live value is: empty for plain values."""
    if type(live) in NO_FORM:
        return ""
    if is_array_type(type(live)):
        return "array"
    if adapter_of(live) is not None:
        return "object"
    if isinstance(live, dict):
        return "mapping"
    if isinstance(live, (list, tuple, collections.deque)):
        return "fields" if is_namedtuple(type(live)) else "sequence"
    if is_tensor_subclass(type(live)):
        return "subclass"
    return "fields" if is_plain_dataclass(type(live)) or node_parts(live) is not None else ""


def is_nothing(live: Any) -> bool:
    """**Pure.** Returns True if there is no live value."""
    return live is None or live is ABSENT or live is UNFILLED


def form_of(node: Any) -> str:
    """**Pure.** Returns the kind of tree that a node is: empty for plain values."""
    if type(node) is list:
        return "sequence"
    if type(node) is not dict:
        return ""
    tag = node.get("$")
    return _FORMS.get(tag, "") if type(tag) is str else "mapping"


def is_number(node: Any) -> bool:
    """**Pure.** Returns True for the node of a number."""
    return type(node) in (bool, int, float) or (type(node) is dict and node.get("$") in _NUMBERS)


def describe(node: Any) -> str:
    """**Pure.** Returns what a node is, for people."""
    form = form_of(node)
    if form == "object":
        return f"the state of an object ({node.get('k')})"
    if form == "subclass":
        return f"a tensor of type {str(node.get('k')).rpartition(':')[2]}"
    return {"array": "an array", "sequence": "a sequence", "mapping": "a dict", "fields": "a record"}.get(
        form, "None" if node is None else "a plain value"
    )


def describe_live(live: Any) -> str:
    """**Pure.** Returns what a live value is, for people."""
    return "None" if live is None else f"a {type(live).__qualname__}"
