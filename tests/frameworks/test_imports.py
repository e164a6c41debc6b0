"""Checkpoints that frameworks wrote: imported by the command line, a plain loop of holdfast goes on from them."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from command_line import call, call_json
from holdfast import errors

torch = pytest.importorskip("torch")


class Calls:
    """Is pickled as a call of `os.system`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(part, other[key]) for key, part in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return bool(one == other)


def test_plain_loop_resumes_from_a_lightning_file(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, settings: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    at_six: dict[str, Any] = {}

    class SaveAtSix(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
                at_six.update(copy.deepcopy(states_of(trainer, module)))

    def states_of(trainer: Any, module: Any) -> dict[str, Any]:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        states = {"model": module, "optimizer": trainer.optimizers[0], "scheduler": scheduler}
        return {name: one.state_dict() for name, one in states.items()}

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=7, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        callbacks=[SaveAtSix()],
    )  # fmt: skip
    # A setting of a class of the program, as users have them, is no hindrance.
    module = Module(Path("a"))
    trainer.fit(module, data)

    document = call_json("import", tmp_path / "last.ckpt", tmp_path / "run")
    assert (document["format"], document["step"]) == ("lightning", 6)
    assert document["objects"] == ["model", "optimizer", "scheduler"]
    assert "loops" in [one["path"] for one in document["left_out"]]
    fresh = Module(None)
    parts = fresh.configure_optimizers()
    objects = {"model": fresh, "optimizer": parts["optimizer"], "scheduler": parts["lr_scheduler"]["scheduler"]}
    with hf.resumable(tmp_path / "run", **objects) as run:
        assert run.step == 6
        assert all(equal_states(one.state_dict(), at_six[name]) for name, one in objects.items())
        # The seventh step, which is the third of an epoch, as Lightning took it.
        fresh.training_step(list(data)[2], 2).backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
        run.finish_step()
    after = states_of(trainer, module)
    assert not equal_states(after["model"], at_six["model"])
    assert all(equal_states(one.state_dict(), after[name]) for name, one in objects.items())

    # Lightning's own Trainer goes on from it as from the file itself, and then from its own saves.
    ended = {}
    for name, path in {"file": tmp_path / "last.ckpt", "import": None}.items():
        assert path or call("import", tmp_path / "last.ckpt", tmp_path / "door").exit_code == 0
        for steps in (9, 12):
            other = lightning.Trainer(
                max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
                callbacks=[hf.lightning.Resumable(tmp_path / ("door" if path is None else name), preemption="off")],
            )  # fmt: skip
            torch.manual_seed(1)
            other.fit(again := Module(None), data, ckpt_path=path, weights_only=False)
            assert (other.global_step, other.current_epoch) == (steps, (steps - 1) // 4 + 1), name
        ended[name] = states_of(other, again)
    assert equal_states(ended["file"], ended["import"])
    assert call_json("list", tmp_path / "door")["newest_step"] == 12
    # Weights alone begin a training; a file of another program has no progress that Lightning could go on with.
    torch.save({"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, tmp_path / "own.pt")
    for step, run_name in ((5, "stepped"), (0, "weights")):
        hf.import_checkpoint(tmp_path / "own.pt", tmp_path / run_name, step=step)
        other = lightning.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
            callbacks=[hf.lightning.Resumable(tmp_path / run_name, preemption="off")],
        )  # fmt: skip
        with pytest.raises(errors.UsageError, match="step 5") if step else nullcontext():
            other.fit(again := Module(None), data)
    assert other.global_step == 2

    # The network without the module around it, and the optimizer alone, under other names.
    renamed = ("--strip-prefix", "net.", "--rename", "state_dict=net", "--only", "net", "--only", "optimizer")
    assert call("import", tmp_path / "last.ckpt", tmp_path / "bare", *renamed).exit_code == 0
    bare = Module(None)
    optimizer = torch.optim.AdamW(bare.net.parameters())
    with hf.resumable(tmp_path / "bare", net=bare.net, optimizer=optimizer) as run:
        assert equal_states(bare.state_dict(), at_six["model"])
        assert equal_states(optimizer.state_dict(), at_six["optimizer"])


def test_plain_loop_resumes_from_a_trainer_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    batches: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        batches.append(transformers.default_data_collator(rows))
        return dict(batches[-1])

    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(8)]
    options = transformers.TrainingArguments(
        tmp_path / "out", max_steps=3, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), options, collate, train_dataset=rows)
    trainer.train()

    source = tmp_path / "out" / "checkpoint-2"
    document = call_json("import", source, tmp_path / "run")
    assert (document["format"], document["step"]) == ("transformers", 2)
    assert document["objects"] == ["model", "optimizer", "scheduler"]
    assert {"rng_state.pth", "training_args.bin"} <= {one["path"] for one in document["left_out"]}
    other = transformers.Trainer(transformers.GPT2LMHeadModel(config), options, train_dataset=rows)
    other.create_optimizer_and_scheduler(3)
    model, optimizer, scheduler = other.model, other.optimizer, other.lr_scheduler
    with hf.resumable(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler) as run:
        assert run.step == 2
        kept = torch.load(source / "optimizer.pt", weights_only=True)
        assert equal_states(optimizer.state_dict()["state"], kept["state"])
        assert scheduler.last_epoch == 2
        # The third step, as the Trainer took it.
        (batch,), items = other.get_batch_samples(iter(batches[2:3]), 1, torch.device("cpu"))
        other.training_step(model, batch, items)
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        scheduler.step()
        run.finish_step()
    assert equal_states(model.state_dict(), trainer.model.state_dict())
    assert equal_states(optimizer.state_dict()["state"], trainer.optimizer.state_dict()["state"])
    assert scheduler.state_dict() == trainer.lr_scheduler.state_dict()

    # The Trainer itself goes on from the import as from the folder, and then from its own saves.
    ended = {}
    for name in ("folder", "import"):
        assert name == "folder" or call("import", source, tmp_path / name).exit_code == 0
        for steps in (3, 5):
            again = transformers.TrainingArguments(
                tmp_path / "again", max_steps=steps, save_strategy="no", per_device_train_batch_size=2, report_to=[],
                use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
            )  # fmt: skip
            kept = hf.transformers.Resumable(tmp_path / name, preemption="off")
            last = transformers.Trainer(
                transformers.GPT2LMHeadModel(config), again, train_dataset=rows, callbacks=[kept]
            )
            last.train(resume_from_checkpoint=str(source) if name == "folder" and steps == 3 else None)
            assert last.state.global_step == steps
        ended[name] = {"model": last.model.state_dict(), "optimizer": last.optimizer.state_dict()["state"]}
    assert equal_states(ended["folder"], ended["import"])

    # A large model is written in several files.
    (source / "model.safetensors").unlink()
    trainer.model.save_pretrained(source, max_shard_size="2KB")
    assert call_json("import", source, tmp_path / "large")["objects"] == ["model", "optimizer", "scheduler"]
    fresh = transformers.GPT2LMHeadModel(config)
    with hf.CheckpointManager(tmp_path / "large", hf.Checkpoint(model=fresh)) as manager:
        manager.restore(only="model")
    assert equal_states(fresh.state_dict(), trainer.model.state_dict())


def test_an_adapter_of_a_trainer_folder_goes_into_a_new_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    options = transformers.TrainingArguments(
        tmp_path / "out", max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(8)]

    def make_trainer() -> Any:
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
        return transformers.Trainer(model, options, train_dataset=rows)

    trainer, other = make_trainer(), make_trainer()
    trainer.train()
    document = call_json("import", tmp_path / "out" / "checkpoint-2", tmp_path / "run")
    assert document["objects"] == ["adapter", "optimizer", "scheduler"]
    other.create_optimizer_and_scheduler(2)
    adapter = peft.get_peft_model_state_dict(other.model)
    with hf.resumable(
        tmp_path / "run", adapter=adapter, optimizer=other.optimizer, scheduler=other.lr_scheduler
    ) as run:
        assert run.step == 2
    assert equal_states(peft.get_peft_model_state_dict(other.model), peft.get_peft_model_state_dict(trainer.model))
    assert equal_states(other.optimizer.state_dict()["state"], trainer.optimizer.state_dict()["state"])


def test_arrays_of_an_orbax_manager_come_back(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    orbax = pytest.importorskip("orbax.checkpoint")
    params = {"dense": {"kernel": jax.numpy.arange(12.0).reshape(3, 4), "bias": jax.numpy.ones(4, "bfloat16")}}
    tree = {"params": params, "moments": [params, params], "epoch": 3}
    with orbax.CheckpointManager(tmp_path / "old") as manager:
        for step in (3, 7):
            manager.save(step, args=orbax.args.StandardSave(tree))
        manager.wait_until_finished()

    document = call_json("import", tmp_path / "old", tmp_path / "run")
    assert (document["format"], document["step"]) == ("orbax", 7)
    assert sorted(document["objects"]) == ["epoch", "moments", "params"]
    zeros = jax.tree.map(jax.numpy.zeros_like, params)
    with hf.resumable(tmp_path / "run", params=zeros, moments=[zeros, zeros], epoch=0) as run:
        found = {name: run.checkpoint[name] for name in ("params", "moments", "epoch")}
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (jax.numpy.asarray(one) == jax.numpy.asarray(other)).all()


def test_state_of_optax_in_orbax_fills_tuples_of_the_program(tmp_path: Path) -> None:
    """Orbax writes lists for tuples and dicts for named tuples; the state that the program makes says which are."""
    jax = pytest.importorskip("jax")
    orbax = pytest.importorskip("orbax.checkpoint")
    optax = pytest.importorskip("optax")
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 9)))

    def step(params: Any, state: Any) -> Any:
        updates, state = transformation.update(jax.tree.map(jax.numpy.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"kernel": jax.numpy.arange(6.0).reshape(2, 3), "bias": jax.numpy.ones(3)}
    state = transformation.init(params)
    for _ in range(3):
        params, state = step(params, state)
    with orbax.CheckpointManager(tmp_path / "old") as manager:
        manager.save(3, args=orbax.args.StandardSave({"params": params, "state": state, "shape": [2, 3]}))
        manager.wait_until_finished()

    assert call_json("import", tmp_path / "old", tmp_path / "run")["objects"] == ["params", "shape", "state"]
    fresh = jax.tree.map(jax.numpy.zeros_like, params)
    # Another transformation has other fields: that is said, and nothing is put together wrongly.
    with pytest.raises(errors.MismatchError, match="state/0"):
        with hf.resumable(tmp_path / "run", params=fresh, state=optax.sgd(0.1, 0.9).init(fresh), shape=[0]):
            pass
    for _ in range(2):
        # The second time it comes from a step that holdfast has saved.
        start = {"params": fresh, "state": transformation.init(fresh), "shape": [0]}
        with hf.resumable(tmp_path / "run", **start) as run:
            found = {name: run.checkpoint[name] for name in start}
            expected = {"params": params, "state": state, "shape": [2, 3]}
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            assert all(map(jax.numpy.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))
            run.checkpoint["params"], run.checkpoint["state"] = step(found["params"], found["state"])
            run.finish_step()
        params, state = step(params, state)


def test_objects_of_flax_in_orbax_fill_those_of_the_program(tmp_path: Path) -> None:
    """A `TrainState` of Linen, and a module of NNX with its optimizer and its streams of random numbers."""
    jax = pytest.importorskip("jax")
    orbax = pytest.importorskip("orbax.checkpoint")
    optax = pytest.importorskip("optax")
    nnx = pytest.importorskip("flax.nnx")
    from flax.training.train_state import TrainState

    adamw = optax.adamw(0.1)

    def make_state(start: float) -> Any:
        return TrainState.create(apply_fn=len, params={"w": jax.numpy.full(3, start)}, tx=adamw)

    def make_module(seed: int) -> tuple[Any, Any]:
        rngs = nnx.Rngs(seed)
        layers = [nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)]
        module = nnx.Sequential(*layers)
        return module, nnx.Optimizer(module, adamw, wrt=nnx.Param)

    def step(state: Any, module: Any, optimizer: Any) -> Any:
        inputs = jax.numpy.arange(8.0).reshape(4, 2)
        optimizer.update(module, nnx.grad(lambda module: (module(inputs) ** 2).mean())(module))
        return state.apply_gradients(grads=jax.tree.map(jax.numpy.cos, state.params))

    state, (module, optimizer) = make_state(1.0), make_module(1)
    state = step(state, module, optimizer)
    items = {"state": state, "module": nnx.state(module), "optimizer": nnx.state(optimizer)}
    with orbax.CheckpointManager(tmp_path / "items") as manager:
        saved = {name: orbax.args.StandardSave(item) for name, item in items.items()}
        manager.save(1, args=orbax.args.Composite(**saved))
        manager.wait_until_finished()
    with orbax.CheckpointManager(tmp_path / "one") as manager:
        manager.save(1, args=orbax.args.StandardSave(state))
        manager.wait_until_finished()

    assert call_json("import", tmp_path / "one", tmp_path / "run")["objects"] == ["step", "params", "opt_state"]
    whole = call_json("import", tmp_path / "one", tmp_path / "whole", "--rename", ".=state")
    assert whole["objects"] == ["state"]
    with hf.resumable(tmp_path / "whole", state=make_state(0.0)) as run:
        assert all(map(jax.numpy.array_equal, jax.tree.leaves(run.checkpoint.state), jax.tree.leaves(state)))
    assert sorted(call_json("import", tmp_path / "items", tmp_path / "all")["objects"]) == sorted(items)
    other, (another, steps) = make_state(0.0), make_module(2)
    with hf.resumable(tmp_path / "all", state=other, module=another, optimizer=steps) as run:
        assert run.step == 1
        other = run.checkpoint.state = step(run.checkpoint.state, another, steps)
    state = step(state, module, optimizer)
    assert jax.tree.structure(other) == jax.tree.structure(state)
    found = jax.tree.leaves([other, nnx.state(another), nnx.state(steps)])
    expected = jax.tree.leaves([state, nnx.state(module), nnx.state(optimizer)])
    assert len(found) == len(expected)
    assert all(map(same_array, found, expected))


def same_array(one: Any, other: Any) -> bool:
    import jax

    if isinstance(one, jax.Array) and jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return bool(jax.numpy.array_equal(one, other))


def test_nothing_in_a_hostile_lightning_file_is_called(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    plain = {"pytorch-lightning_version": "2.6", "global_step": 1, "optimizer_states": [], "lr_schedulers": []}
    torch.save({**plain, "state_dict": {"w": torch.ones(2)}, "callbacks": Calls(mark)}, tmp_path / "beside.ckpt")
    assert hf.import_checkpoint(tmp_path / "beside.ckpt", tmp_path / "run").objects == ("model",)
    torch.save({**plain, "state_dict": {"w": torch.ones(2), "x": Calls(mark)}}, tmp_path / "within.ckpt")
    with pytest.raises(errors.FormatError, match=r"model/x is a (posix|nt)\.system"):
        hf.import_checkpoint(tmp_path / "within.ckpt", tmp_path / "other")
    assert not mark.exists()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("state", ["{", "[]", '{"global_step": -1}', '{"global_step": "4"}', '{"global_step": 1e9}'])
def test_a_malformed_state_of_a_trainer_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trainer_state.json").write_text(state)
    with pytest.raises(errors.FormatError, match="trainer_state"):
        hf.import_checkpoint(tmp_path / "old", tmp_path / "run")


def test_a_hostile_optimizer_of_a_trainer_is_not_executed(tmp_path: Path) -> None:
    import zipfile

    from safetensors.numpy import save_file

    old = tmp_path / "old"
    old.mkdir()
    (old / "trainer_state.json").write_text('{"global_step": 4}')
    save_file({"w": torch.ones(2).numpy()}, old / "model.safetensors")
    with zipfile.ZipFile(old / "optimizer.pt", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"state": Calls(tmp_path / "mark")}, protocol=2))
    with pytest.raises(errors.FormatError, match="not supported"):
        hf.import_checkpoint(old, tmp_path / "run")
    assert not (tmp_path / "mark").exists()


def test_an_orbax_directory_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (tmp_path / "secret").write_text("secret")
    leaf = '{"key_metadata": [{"key": "../secret", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}'
    (old / "_METADATA").write_text(f'{{"tree_metadata": {{"a": {leaf}}}, "use_ocdbt": false}}')
    pytest.importorskip("tensorstore")
    with pytest.raises(errors.FormatError, match="is not the name of a folder in it"):
        hf.import_checkpoint(old, tmp_path / "run")
    (old / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(errors.FormatError, match="not a regular file"):
        hf.import_checkpoint(old, tmp_path / "run")
