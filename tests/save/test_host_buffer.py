"""Host memory that is used again: what was touched is kept, and what is pinned is unpinned before it goes."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.save.image import HostBuffer

_SMALL_BYTES, _LARGE_BYTES = 8 << 20, 9 << 20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is looked up in /proc")


class Device:
    """Notes what memory is pinned, and whether it was still there when it was unpinned."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.was_there: list[bool] = []

    def pin(self, image: memoryview) -> Callable[[], None]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(image))
        self.pinned.append(address)

        def unpin() -> None:
            self.pinned.remove(address)
            self.was_there.append(_is_mapped(address))

        return unpin


def _is_mapped(address: int) -> bool:
    places = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in places)


@on_linux
def test_memory_that_grows_keeps_the_pages_that_were_touched() -> None:
    buffer = HostBuffer()
    view = buffer.take(_SMALL_BYTES)
    view[:4], view[-4:] = b"head", b"tail"
    view.release()
    grown = buffer.take(_LARGE_BYTES)
    assert len(grown) == _LARGE_BYTES
    assert bytes(grown[:4]) == b"head"
    assert bytes(grown[_SMALL_BYTES - 4 : _SMALL_BYTES + 4]) == b"tail" + bytes(4)


def test_memory_with_a_live_view_is_not_moved() -> None:
    buffer = HostBuffer()
    view = buffer.take(_SMALL_BYTES)
    view[:4] = b"mine"
    buffer.take(_LARGE_BYTES)[:4] = b"next"
    assert bytes(view[:4]) == b"mine"


@on_linux
@pytest.mark.parametrize("way", ["released", "dropped", "outgrown"])
def test_memory_is_unpinned_before_it_goes_and_not_while_it_is_looked_at(way: str) -> None:
    buffer, device = HostBuffer(), Device()
    view = buffer.take(_SMALL_BYTES)
    buffer.pin(device.pin)
    buffer.pin(device.pin)
    assert len(device.pinned) == 1
    if way == "released":
        buffer.release()
    elif way == "dropped":
        del buffer
    else:
        buffer.take(_LARGE_BYTES)
    gc.collect()
    assert len(device.pinned) == 1
    view.release()
    gc.collect()
    assert not device.pinned
    assert device.was_there == [True]


@on_linux
def test_pinned_memory_does_not_move() -> None:
    buffer, device = HostBuffer(), Device()
    buffer.take(_SMALL_BYTES).release()
    buffer.pin(device.pin)
    buffer.take(_LARGE_BYTES).release()
    assert not device.pinned
    assert device.was_there == [True]
    buffer.pin(device.pin)
    assert len(device.pinned) == 1
