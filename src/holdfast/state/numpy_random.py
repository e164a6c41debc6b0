"""NumPy's random generators: separate from its arrays, because NumPy imports them when they are first used."""

from __future__ import annotations

import numpy as np

from holdfast.state.adapters import StateAdapter
from holdfast.state.registry import register_adapter

register_adapter(
    np.random.Generator,
    StateAdapter(
        "numpy.generator",
        lambda obj: obj.bit_generator.state,
        lambda obj, state: setattr(obj.bit_generator, "state", state),
        last=True,
    ),
)
register_adapter(
    np.random.RandomState,
    StateAdapter(
        "numpy.random_state", lambda obj: obj.get_state(legacy=False), lambda obj, s: obj.set_state(s), last=True
    ),
)
