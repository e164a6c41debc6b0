"""How the rest of an epoch is cut into batches, and each batch among workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Batches(msgspec.Struct, frozen=True):
    """One way to cut an epoch.

    All workers cut alike, and each takes its own part of every batch. No sample is left out, none comes twice, and as
    long as there are as many samples as workers, every worker has a part of each batch: what is left at the end and is
    too little for that goes with the batch before.

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
        """How many batches this worker has from a place on to the end of the epoch."""
        count = self._cuts_from(place)
        # So few may be left only where a job goes on with more workers, or has fewer samples than workers.
        return 0 if count == 1 and not self._own(place, self.end_of(place)) else count

    def end_of(self, place: int) -> int:
        """Where the batch ends that begins at a place."""
        is_last = self._cuts_from(place) == 1 and not self.drop_last
        return self.length if is_last else min(place + self.batch_size, self.length)

    def blocks_from(self, place: int, block_samples: int) -> Iterator[list[range]]:
        """The places that this worker has in each batch, from a place on; some batches at a time.

        Args:
            place: Where the first of them begins.
            block_samples: About how many places come at a time.
        """
        block: list[range] = []
        samples = 0
        for _ in range(self.count_from(place)):
            end = self.end_of(place)
            own = self._own(place, end)
            place = end
            block.append(own)
            samples += len(own)
            if samples >= block_samples:
                yield block
                block, samples = [], 0
        if block:
            yield block

    def _cuts_from(self, place: int) -> int:
        full, rest = divmod(self.length - place, self.batch_size)
        if self.drop_last or not rest:
            return full
        return full if full and rest < self.world_size else full + 1

    def _own(self, begin: int, end: int) -> range:
        samples = end - begin
        first = begin + samples * self.rank // self.world_size
        return range(first, begin + samples * (self.rank + 1) // self.world_size)
