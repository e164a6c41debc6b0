"""With TensorFlow: the position of `fit` in its `tf.data` pipeline, which TensorFlow itself stores and restores.

All data reach the model through such a pipeline. The state of its iterator includes what shuffles and prefetches hold,
so nothing is loaded again. A shuffle draws a seed for each pass, so the passes are counted, and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from holdfast.errors import UsageError
from holdfast.integrations.frameworks.keras.data import DataSource, PyDatasetSource, read_again
from holdfast.state.data.replay import Way

_IGNORE, _FAIL = 1, 2
"""Policies for operations with a state of their own, when TensorFlow stores an iterator."""

_OWN_STATE: Final = (
    "the tf.data pipeline draws random numbers or calls Python: a resumed run goes on with the same elements, but the "
    "random numbers of these operations begin again. Use stateless ones (tf.image.stateless_random_crop, for example)"
)
_TWO_SHUFFLES: Final = (
    "the tf.data pipeline shuffles twice (files and samples, for example): a run resumed within an epoch goes on "
    "with the same elements, but shuffles later epochs in another order than without the restart"
)
_OTHER_DATA: Final = (
    "the data is not that of the checkpoint, which was saved within an epoch: as many batches as were trained are read "
    "and discarded. Resume with the same pipeline and batch size to go on with the same samples"
)


class Pipeline(DataSource):
    """A `tf.data` pipeline; also one that Keras has made, of arrays or Python data."""

    def __init__(self, iterator: Any) -> None:
        adapter = iterator.data_adapter
        super().__init__(adapter)
        self._dataset = iterator._distributed_dataset
        # One that repeats itself draws its seeds within a pass that has no end.
        self._is_kept = bool(iterator.steps_per_epoch)
        # Of arrays it is known: an order for the epoch is state of the iterator, one drawn for each batch is not.
        # TensorFlow stores none that reads from Python, though at its end it says otherwise.
        is_array, self._is_known = isinstance(adapter, ArrayDataAdapter), not isinstance(adapter, TFDatasetAdapter)
        is_stored = adapter._shuffle != "batch" if is_array else not self._is_known
        if not is_array and self._is_known:
            self.remark = read_again(adapter)
        parts = list(_list_parts(self._dataset))
        # Where it is restored into another pipeline, TensorFlow may give wrong elements, or fail in a later step.
        names = [f"{type(part).__name__}{getattr(part, '_buffer_size', '')}" for part in parts]
        self._kind = f"{adapter.num_batches} batches of {self._dataset.element_spec} from {', '.join(names)}"
        caches = [part for part in parts if type(part).__name__ == "CacheDataset"]
        self._shuffles = sum(type(part).__name__ == "_ShuffleDataset" for part in parts)
        if any(getattr(cache, "_filename", None) is not None and cache._filename.numpy() for cache in caches):
            # TensorFlow ends the process if it restores a reader of a cache file that is gone.
            is_stored = False
        self.way = Way.STATE if is_stored else Way.READING
        self._iterator: Any = None
        # The state of a pass that was taken up, as it was at its beginning.
        self._begun: bytes | None = None
        # How many passes have begun, and how many of an earlier process are to be begun again.
        self._passes = self._missed = 0
        self._pending: Any = None
        self._data: DataSource | None = None
        if isinstance(adapter, PyDatasetAdapter):
            if adapter.enqueuer is not None or iterator.steps_per_epoch:
                raise UsageError(
                    "with TensorFlow, the position of a PyDataset with workers or steps_per_epoch cannot be saved",
                    hint="Leave out steps_per_epoch, and give the PyDataset workers=0; or use a tf.data.Dataset, which "
                    "loads in parallel.",
                )
            self._data = PyDatasetSource(adapter)

    def build(self, model: Any) -> None:
        """See `DataSource`: with TensorFlow alone, Keras leaves this to the first step."""
        if type(model).call is keras.Model.call:
            # One that has a `train_step` of its own and nothing else: its parts are complete, or there is no telling.
            model.built = model.built or all(layer.built for layer in model._flatten_layers(include_self=False))
            super().build(model)
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            return
        batch = keras.tree.map_structure(
            lambda one: keras.KerasTensor(tuple(one.shape), one.dtype.name), self._dataset.element_spec
        )
        try:
            model._symbolic_build(data_batch=batch)
        except Exception as error:
            raise UsageError(
                f"the variables of {type(model).__name__} could not be created before training",
                hint="See the cause above; or call the model on a batch of data before fit.",
            ) from error
        super().build(model)

    def open(self, batches: Any) -> Any:
        """See `DataSource`: begins a pass."""
        if self._begun is not None:
            # A shuffle that had read all its input draws one more seed when it is restored: this pass would differ. Not
            # before: this empties a cache in memory, from which the pass that was taken up may read.
            begun, self._begun = self._begun, None
            _restore(iter(batches), begun)
        for _ in range(self._missed):
            iter(batches)
        self._passes, self._missed = self._passes + self._missed + 1, 0
        self._iterator = iter(batches)
        return self._iterator

    def look(self) -> None:
        """See `DataSource`: finds out what TensorFlow can store, which it says only of an iterator that has begun."""
        if self._is_known or self.remark:
            return
        if self.way is Way.READING or (self._try_store(_FAIL) is None and self._try_store(_IGNORE) is None):
            self.way, self.remark = Way.READING, read_again(self._adapter)
        elif self._try_store(_FAIL) is None:
            self.remark = _OWN_STATE
        elif self._shuffles > 1:
            self.remark = _TWO_SHUFFLES

    def _try_store(self, policy: int) -> bytes | None:
        handle = self._iterator._iterator_resource
        try:
            variant = tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=policy)
        except tf.errors.OpError:
            return None
        stored: bytes = tf.io.serialize_tensor(variant).numpy()
        return stored

    def read(self) -> dict[str, Any]:
        """See `DataSource`."""
        state: dict[str, Any] = {"passes": self._passes, "kind": self._kind}
        if self._iterator is not None and self.way is Way.STATE:
            stored = self._try_store(_IGNORE)
            state |= {} if stored is None else {"iterator": np.frombuffer(stored, np.uint8)}
        if self._data is not None:
            state["data"] = self._data.read()
        return state

    def write(self, state: dict[str, Any]) -> None:
        """See `DataSource`."""
        if self._data is not None:
            self._data.write(state["data"])
        if self._iterator is None:
            self._missed, self._pending = state["passes"], state

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `DataSource`."""
        state, self._pending = self._pending, None
        self._missed -= 1  # The last one is the one that is taken up.
        if state["kind"] != self._kind:
            self.remark = _OTHER_DATA
        if "iterator" not in state or self.way is Way.READING or self.remark == _OTHER_DATA:
            return super().take_up(make, taken, draw)
        batches = make()
        self._begun = None if self._is_kept else self._try_store(_IGNORE)
        draw()
        try:
            _restore(batches, np.asarray(state["iterator"]).tobytes())
        except tf.errors.OpError:
            self.remark, self._begun = _OTHER_DATA, None
            return super().take_up(make, taken, draw)
        return batches


def _list_parts(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it reads from."""
    yield dataset
    for part in dataset._inputs() if hasattr(dataset, "_inputs") else ():
        yield from _list_parts(part)


def _restore(iterator: Any, stored: bytes) -> None:
    variant = tf.io.parse_tensor(stored, tf.variant)
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=variant)
