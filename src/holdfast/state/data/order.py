"""The order of an epoch's samples, and how it is cut into batches and divided among workers. Pure.

A shuffle is a formula: the place of any one sample, of any length, in constant memory.

What comes n-th in an epoch follows from seed, epoch, length and n alone, so a job can go on in the middle of an
epoch without having kept the order, and no random generator of a library, which may change between versions,
takes part. The formula is part of the format of a checkpoint: a change to it is a new version.

**Version 1.** All numbers are unsigned, of 64 bits, and wrap around.

`mix(x)` is the finalizer of splitmix64: `x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27;
x *= 0x94d049bb133111eb; x ^= x >> 31`.

`derive(a, b, ...)` folds numbers into one: `h = 0`, then for each number `h = mix(h + a + 0x9e3779b97f4a7c15)`.

The permutation of the numbers below `length`, for a `key` from `derive(seed, epoch)`: a Feistel network over as
many `bits` as `length - 1` has, but at least 6 (below, two halves are too small to mix well), of which the lower
half is `low`, of `bits // 2` bits, and the rest is `high`. Twelve rounds, `r = 0..11`, with the round key
`k = derive(key, r)`: where r is even, `high ^= mix(low + k) >> (64 - bits of high)`, and where r is odd,
`low ^= mix(high + k) >> (64 - bits of low)`. A result that is not below `length` goes through the network again until
it is (cycle walking); from 33 on that happens to less than half of the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from holdfast.format.digests import MIX_FIRST, MIX_SECOND, derive

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[numpy.uint64]
else:
    Words = Any

VERSION: Final = 1
"""The version of the formula."""

MAX_LENGTH: Final = 1 << 62
"""The longest permutation."""

_ROUNDS: Final = 12
_MIN_BITS: Final = 6


class Permutation:
    """**Thread-safe.** One order of the numbers below a length.

    Args:
        length: How many there are.
        key: Which order it is, a 64-bit number.
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        bits = max((length - 1).bit_length(), _MIN_BITS)
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._round_keys = tuple(derive(key, number) for number in range(_ROUNDS))

    def places(self, start: int, stop: int) -> Words:
        """Returns the numbers at the places from `start` up to `stop`, exclusive.

        Args:
            start: The first place, from 0.
            stop: The end, at most the length.
        """
        import numpy as np

        return self._values(np.arange(start, stop, dtype=np.uint64))

    def of(self, ranges: Sequence[range]) -> list[int]:
        """Returns the numbers at the places of some ranges, one after the other."""
        import numpy as np

        if not ranges:
            return []
        places = [np.arange(own.start, own.stop, dtype=np.uint64) for own in _joined(ranges)]
        indices: list[int] = self._values(np.concatenate(places)).tolist()
        return indices

    def _values(self, places: Words) -> Words:
        import numpy as np

        values = self._permute(places)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            walked = self._permute(values[outside])
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.length)]
        return values

    def _permute(self, values: Words) -> Words:
        """Applies the Feistel network, which is a bijection of all numbers of its bits."""
        import numpy as np

        low = values & np.uint64((1 << self._low_bits) - 1)
        high = values >> np.uint64(self._low_bits)
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                high ^= _mix_top_bits(low, key, self._high_bits)
            else:
                low ^= _mix_top_bits(high, key, self._low_bits)
        return (high << np.uint64(self._low_bits)) | low


def _joined(ranges: Sequence[range]) -> Iterator[range]:
    """Joins ranges that follow each other."""
    begin, end = ranges[0].start, ranges[0].start
    for own in ranges:
        if own.start != end:
            yield range(begin, end)
            begin = own.start
        end = own.stop
    yield range(begin, end)


def _mix_top_bits(words: Words, key: int, bits: int) -> Words:
    import numpy as np

    mixed = words + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(MIX_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(MIX_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed >> np.uint64(64 - bits)


class Batches(msgspec.Struct, frozen=True):
    """One way to split an epoch into batches.

    All workers split it the same way, so each has the same number of batches, and takes its own part of every batch: at
    least one sample. No sample is skipped or repeated. Samples at the end that are too few for all workers join the
    batch before. If that batch was already taken, by fewer workers, they are filled up to one sample per worker with
    the first ones of the next epoch, which then continues after those.

    Attributes:
        length: The samples of an epoch.
        batch_size: The samples of one batch, of all workers together.
        drop_last: True to skip an incomplete last batch.
        rank: The rank of this worker.
        world_size: The number of workers, at most the number of samples in a batch.
    """

    length: int
    batch_size: int
    drop_last: bool
    rank: int = 0
    world_size: int = 1

    def count_from(self, place: int) -> int:
        """Returns how many batches begin from a place to the end of the epoch."""
        full, rest = divmod(self.length - place, self.batch_size)
        if self.drop_last or not rest:
            return full
        return full if full and rest < self.world_size else full + 1

    def end_of(self, place: int) -> tuple[int, int]:
        """Returns where the batch ends that begins at a place: how many epochs later, and at which place there."""
        end = self._end_of(place)
        return (0, end) if end <= self.length else divmod(end, self.length)

    def move(self, epoch: int, place: int, batches: int) -> tuple[int, int]:
        """Returns the epoch and the place after so many batches from a place on; the same if an epoch has no batch."""
        if not (whole := self.count_from(0)):
            return epoch, place
        while batches > (left := self.count_from(place)):
            if place == 0:
                # Each epoch that begins at its first sample ends with its last one.
                epochs = (batches - 1) // whole
                epoch, batches = epoch + epochs, batches - epochs * whole
                continue
            further, place = self.end_of(place + (left - 1) * self.batch_size) if left else (1, 0)
            epoch, batches = epoch + further, batches - left
        if batches:
            further, place = self.end_of(place + (batches - 1) * self.batch_size)
            epoch += further
        return epoch, place

    def blocks_from(self, place: int, block_samples: int) -> Iterator[tuple[int, list[range]]]:
        """Yields this worker's places in each batch that begins in this epoch, several batches at a time.

        Args:
            place: Where the first of them begins.
            block_samples: About how many places to yield at a time.

        Returns:
            For each block how many epochs later its places are, and the places.
        """
        block: list[range] = []
        samples = 0
        for _ in range(self.count_from(place)):
            end = self._end_of(place)
            own = self._own(place, end)
            place = end
            if own.start >= self.length:
                # Only the last batch goes on into the next epoch, and of that one each worker has a single sample.
                if block:
                    yield 0, block
                further, first = divmod(own.start, self.length)
                block, samples = [], 0
                yield further, [range(first, first + 1)]
                continue
            block.append(own)
            samples += len(own)
            if samples >= block_samples:
                yield 0, block
                block, samples = [], 0
        if block:
            yield 0, block

    def _end_of(self, place: int) -> int:
        is_last = self.count_from(place) == 1 and not self.drop_last
        end = self.length if is_last else min(place + self.batch_size, self.length)
        return max(end, place + self.world_size)

    def _own(self, begin: int, end: int) -> range:
        samples = end - begin
        first = begin + samples * self.rank // self.world_size
        return range(first, begin + samples * (self.rank + 1) // self.world_size)
