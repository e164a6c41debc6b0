from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

import holdfast as hf  # noqa: E402
from holdfast.errors import MismatchError, UnsupportedValueError, UsageError  # noqa: E402
from holdfast.integrations.torch.loader import ResumableDataLoader  # noqa: E402
from holdfast.state.capture import capture_objects  # noqa: E402
from holdfast.state.data.sampler import ResumableSampler  # noqa: E402
from holdfast.state.match.matching import match_objects  # noqa: E402
from holdfast.state.rng import RNG  # noqa: E402
from loader_trips import draws, plain, run, through_checkpoint  # noqa: E402

LENGTH = 11
BATCH = 3


class Augmented(Dataset[Any]):
    """Each sample is its index and a draw from every generator that an augmentation may use."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class ManyAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class WhichWorker(Augmented):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return -1 if info is None else info.id


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(itertools.count())


def masking_collate(samples: list[Any]) -> tuple[list[Any], float]:
    """Draws as well, as one that masks tokens does."""
    return samples, float(torch.rand(()))


def indices(loader: Any, epochs: int) -> list[int]:
    return [index for _ in loader.epochs(epochs) for batch in loader for index in batch[0].tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_batch_can_be_taken_up_again(num_workers: int, drop_last: bool) -> None:
    def fresh() -> ResumableDataLoader:
        return ResumableDataLoader(
            Augmented(), batch_size=BATCH, seed=4, drop_last=drop_last, num_workers=num_workers, prefetch_factor=None
        )

    whole = run(fresh(), 2)
    for epoch in range(2):
        seen = [index for of, batch in whole if of == epoch for index in batch[0]]
        assert len(seen) == len(set(seen)) == (LENGTH // BATCH * BATCH if drop_last else LENGTH)
    for taken in range(len(whole) + 1):
        before = fresh()
        head = run(before, 2, taken)
        after = fresh()
        through_checkpoint({"data": before}, {"data": after})
        # Augmentations are those of the run that was not stopped, too.
        assert head + run(after, 2) == whole


def test_workers_make_no_difference() -> None:
    whole = run(ResumableDataLoader(Augmented(), batch_size=BATCH), 2)
    for options in (
        {"num_workers": 1},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ):
        before = ResumableDataLoader(Augmented(), batch_size=BATCH, **options)
        head = run(before, 2, 2)
        after = ResumableDataLoader(Augmented(), batch_size=BATCH)
        after.load_state_dict(before.state_dict())
        assert head + run(after, 2) == whole
        if "multiprocessing_context" not in options:  # A process of that kind takes seconds to begin.
            assert run(before, 2) == whole[2:]


def test_workers_are_used() -> None:
    loader = ResumableDataLoader(WhichWorker(), batch_size=BATCH, num_workers=2)
    assert {worker for _, batch in run(loader, 1) for worker in batch} == {0, 1}


def test_augmentations_differ_between_samples_and_epochs() -> None:
    batches = run(ResumableDataLoader(Augmented(), batch_size=BATCH), 2)
    for generator in (1, 2, 3):
        drawn = [value for _, batch in batches for value in batch[generator]]
        assert len(set(drawn)) == 2 * LENGTH
    together = [value for _, batch in batches for generator in (1, 2, 3) for value in batch[generator]]
    assert len(set(together)) == 6 * LENGTH


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_loads_many_at_once_and_a_collate_that_draws(num_workers: int) -> None:
    def fresh() -> ResumableDataLoader:
        return ResumableDataLoader(
            ManyAtOnce(), batch_size=BATCH, collate_fn=masking_collate, num_workers=num_workers, seed=8
        )

    whole = run(fresh(), 1)
    before = fresh()
    head = run(before, 1, 2)
    after = fresh()
    after.load_state_dict(before.state_dict())
    assert head + run(after, 1) == whole
    assert len({batch[1] for _, batch in whole}) == len(whole)


@pytest.mark.parametrize(("num_workers", "fails"), [(0, False), (0, True), (2, False)])
def test_loading_does_not_disturb_the_training_process(num_workers: int, fails: bool) -> None:
    class Failing(Augmented):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            if fails:
                raise OSError("cannot read")
            return sample

    rng = RNG()
    state = rng.state_dict()
    expected = draws()
    rng.load_state_dict(state)
    loader = ResumableDataLoader(Failing(), batch_size=BATCH, num_workers=num_workers)
    if fails:
        with pytest.raises(OSError, match="cannot read"):
            run(loader, 1)
        assert loader.state_dict()["position_samples"] == 0
    else:
        run(loader, 2)
    assert draws() == expected


def test_without_seeding_samples_draw_from_the_process() -> None:
    torch.manual_seed(3)
    expected = [float(torch.rand(())) for _ in range(LENGTH)]
    torch.manual_seed(3)
    loader = ResumableDataLoader(Augmented(), batch_size=BATCH, seed_samples=False)
    assert [value for _, batch in run(loader, 1) for value in batch[3]] == pytest.approx(expected)


def test_a_stream_over_epochs() -> None:
    loader = ResumableDataLoader(Augmented(), batch_size=BATCH, seed=2)
    seen = [plain(batch) for batch in itertools.islice(loader.stream(), 2 * len(loader))]
    whole = run(ResumableDataLoader(Augmented(), batch_size=BATCH, seed=2), 2)
    assert seen == [batch for _, batch in whole]
    assert (loader.epoch, loader.sampler.position_samples) == (1, LENGTH)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_done_starts_the_count_of_enumerate_at_the_position(num_workers: int) -> None:
    def fresh() -> ResumableDataLoader:
        return ResumableDataLoader(Augmented(), batch_size=BATCH, seed=3, num_workers=num_workers)

    loader, resumed = fresh(), fresh()
    assert [i for i, _ in enumerate(loader, start=loader.batches_done)] == [0, 1, 2, 3]
    for i, _ in enumerate(loader, start=loader.batches_done):
        if i == 1:
            break
    resumed.load_state_dict(loader.state_dict())
    assert resumed.batches_done == 2
    assert [i for i, _ in enumerate(resumed, start=resumed.batches_done)] == [2, 3]
    assert resumed.batches_done == 0


def test_what_it_shows() -> None:
    dataset = Augmented()
    loader = ResumableDataLoader(dataset, batch_size=BATCH)
    assert loader.dataset is dataset
    assert len(loader) == 4
    loader.set_epoch(3)
    assert loader.epoch == 3


def test_another_length_is_refused() -> None:
    state = ResumableDataLoader(TensorDataset(torch.arange(5)), batch_size=2).state_dict()
    with pytest.raises(MismatchError):
        ResumableDataLoader(TensorDataset(torch.arange(6)), batch_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [{"batch_sampler": [[1]]}, {"generator": None}, {"in_order": False, "num_workers": 1}],
    ids=str,
)
def test_options_that_would_change_the_order_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ResumableDataLoader(Augmented(), batch_size=BATCH, **options)


def test_a_dataset_that_can_only_be_iterated_is_refused() -> None:
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        ResumableDataLoader(Endless(), batch_size=BATCH)


class TestPlainDataLoader:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_over_a_resumable_sampler_every_batch_can_be_taken_up_again(self, num_workers: int) -> None:
        def fresh() -> tuple[DataLoader[Any], ResumableSampler]:
            sampler = ResumableSampler(LENGTH, batch_size=BATCH, seed=6)
            dataset = TensorDataset(torch.arange(LENGTH))
            return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers), sampler

        def loop(loader: DataLoader[Any], sampler: ResumableSampler) -> Iterator[list[int]]:
            for _ in sampler.epochs(2):
                for (batch,) in sampler.batches(loader):
                    yield batch.tolist()

        whole = list(loop(*fresh()))
        assert sorted(itertools.chain(*whole[:4])) == sorted(itertools.chain(*whole[4:])) == list(range(LENGTH))
        for taken in range(len(whole) + 1):
            before, after = fresh(), fresh()
            head = list(itertools.islice(loop(*before), taken))
            through_checkpoint({"data": before[0]}, {"data": after[0]})
            assert head + list(loop(*after)) == whole

    def test_its_state_fits_the_sampler_and_the_resumable_loader(self) -> None:
        sampler = ResumableSampler(LENGTH, batch_size=BATCH, seed=6)
        loader = DataLoader(Augmented(), batch_sampler=sampler)
        next(sampler.batches(loader))
        others = ResumableSampler(LENGTH, batch_size=2), ResumableDataLoader(Augmented(), batch_size=2)
        for other in others:
            through_checkpoint({"data": loader}, {"data": other})
            assert other.state_dict() == sampler.state_dict()

    def test_without_one_it_cannot_be_saved(self) -> None:
        with pytest.raises(UnsupportedValueError, match="how far the training loop has got") as caught:
            capture_objects({"inputs": {"train": DataLoader(Augmented(), shuffle=True)}})
        assert caught.value.path == "inputs/train"
        assert "ResumableDataLoader" in caught.value.hint
        assert "StatefulDataLoader" in caught.value.hint

    def test_iterated_directly_it_cannot_be_saved(self) -> None:
        loader = DataLoader(Augmented(), batch_sampler=ResumableSampler(LENGTH, batch_size=BATCH))
        next(iter(loader))
        with pytest.raises(UsageError, match="iterated directly"):
            capture_objects({"data": loader})

    def test_epoch_begin_leaves_generators_alone_and_workers_differ(self) -> None:
        sampler = ResumableSampler(LENGTH, batch_size=BATCH, shuffle=False)
        loader = DataLoader(Augmented(), batch_sampler=sampler, num_workers=1)
        rng = RNG()
        state = rng.state_dict()
        expected = draws()
        rng.load_state_dict(state)
        epochs = [[plain(batch)[3] for batch in sampler.batches(loader)] for _ in sampler.epochs(2)]
        assert draws() == expected
        assert epochs[0] != epochs[1]

    def test_a_loader_out_of_order_is_refused(self) -> None:
        sampler = ResumableSampler(LENGTH, batch_size=BATCH)
        loader = DataLoader(Augmented(), batch_sampler=sampler, num_workers=1, in_order=False)
        with pytest.raises(UsageError, match="in_order"):
            sampler.batches(loader)


class Prepared:
    """What accelerate makes of a loader: it says that it is one, and has a state that may not be there."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    @property
    def __class__(self) -> type:
        return type(self._loader)

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise AssertionError("it stays what it is")

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("dl_state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


class TestPreparedLoaders:
    def test_what_wraps_a_loader_is_refused_with_a_way_out(self) -> None:
        loader = DataLoader(Augmented(), batch_sampler=ResumableSampler(LENGTH, batch_size=BATCH))
        with pytest.raises(UnsupportedValueError, match="data/train: Prepared wraps a DataLoader") as refused:
            capture_objects({"data": {"train": Prepared(loader)}})
        assert "ResumableDataLoader" in refused.value.hint

    def test_a_handler_refuses_it_by_name_before_the_first_step(self, tmp_path: Path) -> None:
        prepared = Prepared(DataLoader(Augmented(), batch_size=BATCH))
        taken: list[int] = []
        manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(data=prepared))
        with (
            manager,
            hf.PreemptionCheckpointHandler(manager, termination_config=hf.TerminationConfig(sources=[])) as handler,
            pytest.raises(UnsupportedValueError, match=r"^data: Prepared wraps a DataLoader"),
        ):
            handler.run(taken.append, 1)
        assert taken == []

    @pytest.mark.parametrize("is_stateful", [False, True])
    def test_those_of_accelerate(self, is_stateful: bool) -> None:
        accelerate = pytest.importorskip("accelerate")
        configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
        with pytest.raises(UnsupportedValueError, match="DataLoaderShard wraps a DataLoader"):
            capture_objects({"data": accelerator.prepare(DataLoader(Augmented(), shuffle=True))})
        own = ResumableDataLoader(Augmented(), batch_size=BATCH)
        assert accelerator.prepare(own) is own


class TestStatefulDataLoader:
    """torchdata's loader, which keeps its own position."""

    @pytest.fixture
    def stateful(self) -> Any:
        return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_goes_through_a_checkpoint_in_the_middle_of_an_epoch(self, stateful: Any, num_workers: int) -> None:
        def fresh() -> Any:
            torch.manual_seed(5)
            dataset = TensorDataset(torch.arange(LENGTH))
            return stateful(dataset, batch_size=BATCH, shuffle=True, num_workers=num_workers)

        def loop(loader: Any, epochs: int) -> Iterator[Any]:
            """A step draws as dropout does, so that a draw of the loader's own would show."""
            for _ in range(epochs):
                for (batch,) in loader:
                    yield batch.tolist(), float(torch.rand(()))

        whole = list(loop(fresh(), 2))
        assert sorted(itertools.chain(*(batch for batch, _ in whole[:4]))) == list(range(LENGTH))
        for taken in range(1, 8):
            after, before = fresh(), fresh()
            unfinished = loop(before, 2)
            head = list(itertools.islice(unfinished, taken))
            through_checkpoint({"data": before, "rng": RNG()}, {"data": after, "rng": RNG()})
            assert head + list(loop(after, 2 if taken <= 4 else 1)) == whole

    def test_a_batch_of_it_that_is_taken_between_steps_is_refused(self, stateful: Any, tmp_path: Path) -> None:
        loaders = [stateful(TensorDataset(torch.arange(LENGTH)), batch_size=BATCH) for _ in range(2)]
        checkpoint = hf.Checkpoint(train=loaders[0], other=loaders[1])
        with hf.CheckpointManager(tmp_path, checkpoint) as manager:
            with hf.PreemptionCheckpointHandler(manager) as handler:
                batches = iter(loaders[0])
                for _ in range(3):
                    handler.run(next, batches)
                assert loaders[1]._iterator is None, "its state is not asked for, which would start it"
            handler = hf.PreemptionCheckpointHandler(manager)
            batches = iter(loaders[0])
            handler.run(print, *next(batches))
            left = next(batches)
            with pytest.raises(UsageError, match="train gave a batch between two steps"):
                handler.run(print, *left)
            handler.close()

    def test_over_a_resumable_sampler_it_is_refused(self, stateful: Any) -> None:
        sampler = ResumableSampler(LENGTH, batch_size=BATCH)
        loader = stateful(Augmented(), batch_sampler=sampler)
        with pytest.raises(UnsupportedValueError, match="both save a position"):
            capture_objects({"data": loader})
        with pytest.raises(UsageError, match="its own position"):
            sampler.batches(loader)

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_over_a_resumable_sampler_its_own_state_is_refused_too(self, stateful: Any, num_workers: int) -> None:
        loader = stateful(
            Augmented(), batch_sampler=ResumableSampler(LENGTH, batch_size=BATCH), num_workers=num_workers
        )
        with pytest.raises(UsageError, match="StatefulDataLoader"):
            [loader.state_dict() for _ in loader]

    def test_the_position_of_a_resumable_loader_does_not_fit(self, stateful: Any) -> None:
        stored = capture_objects({"data": ResumableDataLoader(Augmented(), batch_size=BATCH)})
        matching = match_objects({"data": stateful(Augmented(), batch_size=BATCH)}, stored.objects, {})
        assert len(matching.differences.wrong_kind) == 1
        other = capture_objects({"data": stateful(Augmented(), batch_size=BATCH)})
        specs = dict(zip(other.names, other.specs, strict=True))
        matching = match_objects({"data": ResumableDataLoader(Augmented(), batch_size=BATCH)}, other.objects, specs)
        assert len(matching.differences.wrong_kind) == 1


class Shuffled:
    """A sampler as people write it for torchdata.nodes, with a generator of its own, from which each epoch draws."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.place = 0
        self.goes_on = False

    def __iter__(self) -> Iterator[int]:
        if not self.goes_on:
            self.order, self.place = torch.randperm(LENGTH, generator=self.generator).tolist(), 0
        self.goes_on = False
        while self.place < LENGTH:
            self.place += 1
            yield self.order[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place, self.goes_on = list(state["order"]), state["place"], True
        self.generator.set_state(state["generator"])


class TestNodesLoader:
    """torchdata.nodes.Loader, which begins an epoch, and draws its order, when it is asked for its state."""

    def fresh(self) -> Any:
        nodes = pytest.importorskip("torchdata.nodes")
        return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(Shuffled(seed=3)), BATCH, drop_last=False))

    def loop(self, loader: Any) -> Iterator[Any]:
        for _ in range(3):
            yield from loader

    def test_it_resumes_where_it_was(self, tmp_path: Path) -> None:
        whole = list(self.loop(self.fresh()))
        a_pass = -(-LENGTH // BATCH)
        for taken in (1, a_pass + 2):
            before, after, directory = self.fresh(), self.fresh(), tmp_path / str(taken)
            head = list(itertools.islice(self.loop(before), taken))
            # As a program does it that makes memory ready for its first save, and marks what is its worker's own.
            with hf.CheckpointManager(directory, hf.Checkpoint(data=hf.PerWorker(before))) as manager:
                manager.save(taken)
            checkpoint = hf.Checkpoint(data=hf.PerWorker(after))
            with hf.CheckpointManager(directory, checkpoint, reserve_bytes="auto") as manager:
                assert manager.restore() is not None
                # A save before the first batch has the position that was restored.
                manager.save(taken + 1)
            rest = list(itertools.chain.from_iterable(after for _ in range(3)))
            assert head + rest[: len(whole) - taken] == whole


class Asked:
    """Counts how often it is asked for its state."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.times_asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.times_asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class AskedData(Asked):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_a_restore_asks_no_object_for_its_state_that_can_be_loaded_without() -> None:
    state: dict[str, Any] = {"epoch": 3, "seen": {1, 2}, "notes": [("a", None, 0.5)]}
    plain_one, data = Asked(epoch=0), AskedData()
    through_checkpoint(
        {"a": Asked(**state), "tree": [AskedData(**state, order=torch.arange(3))]}, {"a": plain_one, "tree": [data]}
    )
    assert plain_one.state == state
    assert data.state.pop("order").tolist() == [0, 1, 2]
    assert data.state == state
    assert (plain_one.times_asked, data.times_asked) == (0, 0)
    # Where an average of weights belongs, only the live one tells.
    average = Asked(shadow=torch.zeros(3))
    through_checkpoint({"a": Asked(shadow=torch.ones(3))}, {"a": average})
    assert average.times_asked == 1
    assert average.state["shadow"].tolist() == [1, 1, 1]


def test_batch_size_is_positional_and_one_by_default_as_in_torch() -> None:
    assert [len(batch) for batch in ResumableDataLoader(range(5), 2)] == [2, 2, 1]
    assert [len(batch) for batch in ResumableDataLoader(range(3))] == [1, 1, 1]
    with pytest.raises(UsageError, match="comes from seed=") as refused:
        ResumableDataLoader(range(5), 2, generator=torch.Generator())
    assert refused.value.hint == "Pass seed=1."
