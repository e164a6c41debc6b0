"""Fits a line with NumPy alone. Kill it at any moment and start it again: it resumes where it was.

python examples/train_numpy.py
"""

from __future__ import annotations

import sys

import numpy as np

import holdfast

STEPS = 50_000


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    # Replace these by your own arrays: a line through noisy points, by gradient descent with momentum.
    model = {"slope": np.zeros(1), "offset": np.zeros(1)}
    momentum = {name: np.zeros(1) for name in model}
    noise = np.random.default_rng(0)

    # The newest three are kept, and the one with the lowest loss: RUN@best on the command line.
    keep = holdfast.Latest(3) | holdfast.Best("loss")
    with holdfast.resumable(directory, model=model, momentum=momentum, noise=noise, save_every=500, keep=keep) as run:
        for step in run.steps(STEPS):  # the steps that remain
            x = noise.uniform(-1, 1, 10_000)
            error = model["slope"] * x + model["offset"] - (3 * x - 2 + noise.normal(0, 0.1, x.size))
            for name, gradient in (("slope", (error * x).mean()), ("offset", error.mean())):
                momentum[name] *= 0.9
                momentum[name] += gradient
                model[name] -= 0.1 * momentum[name]
            if step % 100 == 99:
                loss = float((error**2).mean())
                run.report(loss=loss)  # stored with the next checkpoint; `holdfast list` shows it
                print(f"step {step + 1}: loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/numpy")
