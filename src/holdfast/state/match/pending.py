"""Objects to load, and values to create, after the arrays have been read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import ApplyError
from holdfast.format.codecs import Codec
from holdfast.state.leaves import PendingArray
from holdfast.state.match.update_in_place import Finished, finish_arrays
from holdfast.state.registry import NodeParts


class MatchJob(msgspec.Struct, frozen=True):
    """The prepared loading of one object.

    Attributes:
        path: The object.
        last: True if it comes after all others.
        load: Performs it.
    """

    path: str
    last: bool
    load: Callable[[], None]


class PendingCoded(PendingArray):
    """A placeholder of a value whose codec is called after its arrays have been read."""

    def __init__(self, codec: Codec, made: Any, path: str, finished: Finished) -> None:
        self._codec, self._made, self._path, self._finished = codec, made, path, finished

    def finish(self) -> Any:
        """Calls the codec.

        Raises:
            ApplyError: If it rejects the stored value.
        """
        made = finish_arrays(self._made, self._finished)
        try:
            return self._codec.decode(made)
        except Exception as error:
            raise ApplyError(
                f"{self._path}: the codec {self._codec.tag!r} rejected the stored value: {error!r}",
                hint="See the cause above; objects before it have already been changed.",
            ) from error


class PendingNode(PendingArray):
    """A placeholder of a value that its framework rebuilds after its arrays have been read."""

    def __init__(self, like: NodeParts, values: dict[str, Any], path: str, finished: Finished) -> None:
        self._like, self._values, self._path, self._finished = like, values, path, finished

    def finish(self) -> Any:
        """Rebuilds it.

        Raises:
            ApplyError: If its class rejects the stored parts.
        """
        values = finish_arrays(self._values, self._finished)
        try:
            return self._like.join(values)
        except Exception as error:
            raise ApplyError(
                f"{self._path}: the stored tree could not be rebuilt: {error!r}",
                hint="See the cause above; objects before it have already been changed.",
            ) from error
