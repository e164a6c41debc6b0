"""Says how `Resumable` refuses what has no position with TensorFlow: DIRECTORY."""

from __future__ import annotations

import sys
from typing import Any

import keras_cases
import tensorflow as tf

import holdfast as hf


def refuse(model: Any, **data: Any) -> None:
    try:
        model.fit(**data, epochs=2, verbose=0, callbacks=[hf.keras.Resumable(sys.argv[1], quiet=True)])
    except ValueError as error:
        print(str(error).splitlines()[0], flush=True)


def main() -> None:
    processor = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        several = keras_cases.make_model()
    refuse(several, **keras_cases.arrays())
    refuse(keras_cases.make_model(), x=keras_cases.Rows(workers=2, max_queue_size=1))
    refuse(keras_cases.make_model(), x=keras_cases.Rows(), steps_per_epoch=4)


if __name__ == "__main__":
    main()
