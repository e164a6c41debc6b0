"""The same without a framework, with NumPy alone: `python examples/train_numpy.py runs/example`, and the same again."""

from __future__ import annotations

import sys

import numpy as np

import holdfast

TOTAL_STEPS = 2000


def main(directory: str) -> None:
    """Fits a line through noisy points by gradient descent with momentum."""
    model = {"slope": np.zeros(1), "offset": np.zeros(1)}
    momentum = {name: np.zeros(1) for name in model}
    noise = np.random.default_rng(0)

    with holdfast.resumable(
        directory, model=model, momentum=momentum, noise=noise, save_every=holdfast.Steps(100), keep=holdfast.Latest(3)
    ) as run:
        print(f"beginning with step {run.step}", flush=True)
        for step in run.steps(TOTAL_STEPS):
            x = noise.uniform(-1, 1, 50)
            error = model["slope"] * x + model["offset"] - (3 * x - 2 + noise.normal(0, 0.1, 50))
            for name, gradient in (("slope", (error * x).mean()), ("offset", error.mean())):
                momentum[name] *= 0.9
                momentum[name] += gradient
                model[name] -= 0.1 * momentum[name]
            run.report(loss=float((error**2).mean()))
            print(f"step {step}: loss {(error**2).mean():.6g}", flush=True)

    print("weights", *(float(array[0]) for array in model.values()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
