"""How the rest of an epoch is cut into batches, and each batch among workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Batches(msgspec.Struct, frozen=True):
    """One way to cut an epoch.

    All workers cut alike, so that each has as many batches, and each takes its own part of every batch: at least one
    sample. No sample is left out, none comes twice. What is left at the end and is too little for all workers goes with
    the batch before. Where that one has been taken already, by fewer workers, it is filled up to a sample for each with
    the first ones of the next epoch, which then goes on behind them.

    Attributes:
        length: The samples of an epoch.
        batch_size: The samples of one batch, of all workers together.
        drop_last: Whether a last batch that is not full is left out.
        rank: Which worker this is.
        world_size: How many workers there are, no more than a batch has samples.
    """

    length: int
    batch_size: int
    drop_last: bool
    rank: int = 0
    world_size: int = 1

    def count_from(self, place: int) -> int:
        """How many batches begin from a place on to the end of the epoch."""
        full, rest = divmod(self.length - place, self.batch_size)
        if self.drop_last or not rest:
            return full
        return full if full and rest < self.world_size else full + 1

    def end_of(self, place: int) -> tuple[int, int]:
        """Where the batch ends that begins at a place: how many epochs further on, and at which place of that one."""
        end = self._end_of(place)
        return (0, end) if end <= self.length else divmod(end, self.length)

    def blocks_from(self, place: int, block_samples: int) -> Iterator[tuple[int, list[range]]]:
        """The places that this worker has in each batch that begins in this epoch, some batches at a time.

        Args:
            place: Where the first of them begins.
            block_samples: About how many places come at a time.

        Returns:
            For each block how many epochs further on its places lie, and the places.
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
