"""Trainings on a device that are killed, are asked to leave, are sharded or compiled: MODE DEVICE DIRECTORY [MORE]."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Before CUDA starts: otherwise its matrix products may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

import holdfast as hf

TOTAL, SAVE_EVERY, LENGTH, WORDS = 14, 3, 24, 50


class Text(Dataset[torch.Tensor]):
    """Sentences of made-up words."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(LENGTH) * (index + 3) + torch.randint(0, 5, (LENGTH,))) % WORDS


class Gpt(nn.Module):
    """Two blocks, with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.2, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = functional.linear(x[:, :-1], self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def digest_of(*objects: Any) -> str:
    found = hashlib.sha256()
    for obj in objects:
        for name, value in sorted(flatten(obj.state_dict()), key=lambda pair: pair[0]):
            found.update(name.encode())
            data = value.detach().cpu().contiguous() if isinstance(value, torch.Tensor) else None
            found.update(repr(value).encode() if data is None else data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in flatten(part, f"{path}/{key}")]
    if isinstance(value, list | tuple):
        return [leaf for number, part in enumerate(value) for leaf in flatten(part, f"{path}/{number}")]
    return [(path, value)]


def train_gpt(device: str, directory: str, kill_at: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A run that goes on has to overcome what it was seeded with.
    torch.manual_seed(os.getpid() if Path(directory).exists() else 0)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**60, growth_interval=3)
    loader = hf.ResumableDataLoader(Text(), batch_size=4, seed=1, pin_memory=device == "cuda")
    batches = loader.stream()
    objects: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "loader": loader,
    }
    options: dict[str, Any] = {"save_every": hf.Steps(SAVE_EVERY), "overlap_copy": True, "quiet": True}
    with hf.resumable(directory, rng=hf.RNG(), **options, **objects) as run, sdpa_kernel(SDPBackend.MATH):
        print("begun", run.step, flush=True)
        for step in run.steps(TOTAL):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = model(next(batches).to(device, non_blocking=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if str(step) == kill_at:
                run.manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    print("digest", digest_of(model, optimizer, scaler), float(torch.rand((), device=device)))


def leave(device: str, directory: str) -> None:
    """SIGTERM comes while the device is at work; what was asked of it by then is in the checkpoint."""
    weight = nn.Parameter(torch.zeros(1 << 16, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with hf.resumable(directory, weights={"w": weight}, optimizer=optimizer, overlap_copy=True, quiet=True) as run:
        for step in run.steps(100):
            if step == 4:
                event = None
                if device == "cuda":
                    torch.cuda._sleep(1_000_000_000)
                    event = torch.cuda.Event()
                    event.record()
                os.kill(os.getpid(), signal.SIGTERM)
                print("running", event is None or not event.query(), flush=True)
            weight.grad = torch.ones_like(weight)
            optimizer.step()


def shard(device: str, directory: str) -> None:
    """FSDP2 on one worker, with the collectives that the device has."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Gpt().to(device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model((torch.arange(4 * LENGTH, device=device) % WORDS).view(4, LENGTH)).backward()
        optimizer.step()

    def read(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = [value for _, value in flatten([model.state_dict(), optimizer.state_dict()["state"]])]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert any(isinstance(tensor, DTensor) for tensor in tensors)
        return [(one.full_tensor() if isinstance(one, DTensor) else one).clone() for one in tensors]

    model, optimizer = build()
    step(model, optimizer)
    expected = {}
    with hf.CheckpointManager(directory, hf.Checkpoint(model=model, optimizer=optimizer), overlap_copy=True) as manager:
        for number in (1, 2, 3):
            expected[number] = read(model, optimizer)
            manager.save(number)
            step(model, optimizer)
    for has_stepped in (True, False):
        again, fresh = build()
        if has_stepped:
            step(again, fresh)
        with hf.CheckpointManager(directory, hf.Checkpoint(model=again, optimizer=fresh)) as manager:
            for number, values in expected.items():
                manager.restore(number)
                assert all(map(torch.equal, read(again, fresh), values)), number
    dist.destroy_process_group()
    print("same")


def compile_it(device: str, directory: str) -> None:
    """What is compiled, and on a GPU replayed as graphs, takes part in overlapped saves as what is not."""
    modes = ["default", "reduce-overhead"] if device == "cuda" else [None]
    for mode in modes:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        forward: Any = torch.compile(model, mode=mode) if mode else torch.compile(model, backend="aot_eager")
        batch = torch.ones(8, 64, device=device)
        expected = {}
        checkpoint = hf.Checkpoint(model=model, optimizer=optimizer)
        place = f"{directory}/{mode}"
        with hf.CheckpointManager(place, checkpoint, overlap_copy=True) as manager:
            for number in range(1, 7):
                optimizer.zero_grad()
                forward(batch).square().sum().backward()
                optimizer.step()
                expected[number] = {name: value.clone() for name, value in model.state_dict().items()}
                manager.save(number)
            manager.wait()
            for number, values in expected.items():
                manager.restore(number)
                # In place, so that what is compiled sees it.
                assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items()), number
    print("same")


def donate(device: str, directory: str) -> None:
    """Arrays of JAX that are donated right after the save."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if device == "cuda" and jax.default_backend() != "gpu":
        print("JAX computes on", jax.default_backend())
        return

    def double(tree: Any) -> Any:
        return jax.tree.map(lambda array: (array * 2 + 1).astype(array.dtype), tree)

    step: Any = jax.jit(double, donate_argnums=0)
    state = {
        "w": jnp.arange(1 << 20, dtype=jnp.float32).reshape(1 << 10, -1),
        "half": jnp.ones((300, 7), jnp.bfloat16),
        "count": jnp.zeros((), jnp.int32),
    }
    checkpoint = hf.Checkpoint(state=state)
    expected = {}
    with hf.CheckpointManager(directory, checkpoint) as manager:
        for number in (1, 2, 3):
            expected[number] = jax.tree.map(lambda array: np.array(array, copy=True), state)
            manager.save(number)
            state = checkpoint["state"] = step(state)
        manager.wait()
        for number, values in expected.items():
            manager.restore(number)
            found = checkpoint["state"]
            assert all(np.array_equal(np.asarray(found[name]), values[name]) for name in values), number
            assert {array.devices() == state["w"].devices() for array in found.values()} == {True}
    print("same")


MODES: dict[str, Any] = {"gpt": train_gpt, "leave": leave, "shard": shard, "compile": compile_it, "jax": donate}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:])
