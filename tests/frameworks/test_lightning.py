"""A fit of Lightning's Trainer goes on where it was killed, and ends as if nothing had been."""

from __future__ import annotations

import re
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lives import PROGRAMS, Life, check_same, interrupt, live, live_together

import holdfast as hf
import preloaded
from memory_engine import run_workers

pytest.importorskip("lightning")

import torch
import torch.distributed.run
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from holdfast.catalog import StoredRun
from holdfast.errors import MismatchError, SaveFailedError, StorageError, StorageFullError, UsageError
from holdfast.events import Warned
from holdfast.storage import LocalStorage

PROGRAM = "lightning_fit.py"
VARIANTS = ["plain", "accumulation", "several", "workers", "own", "reload", "callbacks", "manual", "plateau", "stream"]
VARIANTS += ["scheduled"]


PRELOAD = (
    *preloaded.TRAINING,
    "lightning.pytorch",
    "torchmetrics.regression",
    "holdfast.integrations.frameworks.lightning.fit",
)


def fit(*options: str | Path) -> Life:
    return live(PROGRAM, *options, preload=PRELOAD)


def begin(*options: str | Path) -> Life:
    return Life(PROGRAM, *options, preload=PRELOAD)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fit_that_is_killed_and_stopped_ends_as_an_untouched_one(tmp_path: Path, variant: str) -> None:
    untouched = fit(tmp_path / "untouched", variant)
    lives = interrupt(lambda: begin(tmp_path / "other", variant), [signal.SIGKILL, signal.SIGTERM], 5, 14)
    resumed = fit(tmp_path / "other", variant)
    check_same([*lives, resumed], untouched)
    assert len(lives[-1].lines) + len(resumed.lines) < len(untouched.lines) + 2


def leave_in(validation: int, directory: Path, variant: str) -> Life:
    """A fit that is asked to leave in the first batch of the validation after so many steps."""
    life = begin(directory, variant, "-1", str(validation))
    assert life.end() == 42, life.errors
    step, batch = find_last_validated(life)
    assert step == validation
    # Before training another thread ends the process, while the check goes on.
    assert batch == 0 or step == 0
    return life


def find_last_validated(life: Life) -> tuple[int, int]:
    """After how many steps the last validation was, and what batch of it was the last."""
    step, batch = re.findall(r"validated (\d+)/(\d+)", life.errors)[-1]
    return int(step), int(batch)


@pytest.mark.parametrize(("variant", "validations"), [("plateau", (9, 36)), ("shuffled", (7, 14))])
def test_notice_in_validation_is_obeyed_at_its_next_batch(
    tmp_path: Path, variant: str, validations: tuple[int, ...]
) -> None:
    untouched = fit(tmp_path / "untouched", variant)
    lives = [leave_in(validation, tmp_path / "other", variant) for validation in validations]
    check_same([*lives, fit(tmp_path / "other", variant)], untouched)
    steps = [line for life in lives for line in life.lines]
    assert len(steps) == len(set(steps)) == validations[-1]


def test_a_notice_in_the_sanity_check_ends_the_job_at_once(tmp_path: Path) -> None:
    left = leave_in(0, tmp_path, "plain")
    assert not left.lines
    assert fit(tmp_path, "plain").lines


def test_a_fit_that_torchrun_starts_again_ends_as_if_untouched(tmp_path: Path) -> None:
    program = Path(torch.distributed.run.__file__)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(PROGRAMS / PROGRAM)]
    together = [live(program, *options, tmp_path / end, "ddp", end, preload=PRELOAD) for end in ("-1", "9")]
    # Two workers write into one pipe: the end of one's line may come after the other's line.
    untouched, killed = (Counter(re.findall(r"\{[^{}]*\}", "".join(life.lines))) for life in together)
    assert killed.keys() == untouched.keys()
    assert killed != untouched  # Steps since the last save were trained twice.


class Line(LightningModule):
    """The smallest model there is."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(*callbacks: Any, epochs: int = 1, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"enable_checkpointing": False, **options}
    return Trainer(callbacks=list(callbacks), max_epochs=epochs, **quiet, **options)


def make_loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)


def test_second_fit_resumes_where_the_first_one_ended(tmp_path: Path) -> None:
    resumable = hf.lightning.Resumable(tmp_path / "run")
    model = Line()
    trainer = make_trainer(resumable)
    trainer.fit(model, make_loader())
    assert trainer.global_step == 4
    assert resumable.run is None
    again = make_trainer(hf.lightning.Resumable(tmp_path / "run"), epochs=3)
    other = Line()
    again.fit(other, make_loader())
    assert (again.global_step, again.current_epoch) == (12, 3)
    assert not torch.equal(other.layer.weight, model.layer.weight)


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    """Each would go on in its own part of another order."""

    def save(cluster: Any) -> None:
        with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(x=1), cluster=cluster) as manager:
            manager.save(3).wait_committed()

    run_workers(2, save)
    with pytest.raises(MismatchError, match="saved by 2 workers") as caught:
        make_trainer(hf.lightning.Resumable(tmp_path / "run")).fit(Line(), make_loader())
    assert "the position in the data" in caught.value.hint


def test_a_fit_that_is_done_trains_nothing_when_it_is_started_again(tmp_path: Path) -> None:
    first, second = Line(), Line()
    make_trainer(hf.lightning.Resumable(tmp_path / "run")).fit(first, make_loader())
    trainer = make_trainer(hf.lightning.Resumable(tmp_path / "run"))
    trainer.fit(second, make_loader())
    assert trainer.global_step == 4
    assert torch.equal(first.layer.weight, second.layer.weight)


AVERAGING: Any = getattr(lightning_callbacks, "EMAWeightAveraging", None)  # Older versions average no weights.


@pytest.mark.parametrize("averages", [False, pytest.param(True, marks=pytest.mark.skipif(not AVERAGING, reason="old"))])
@pytest.mark.parametrize("steps", [3, 4], ids=["within an epoch", "between epochs"])
def test_a_fit_that_has_ended_can_be_made_longer(tmp_path: Path, steps: int, averages: bool) -> None:
    dataset = TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)

    def fit_until(total: int, directory: Path) -> tuple[Any, Any]:
        torch.manual_seed(1)
        callbacks = [AVERAGING(decay=0.5)] if averages else []
        resumable = hf.lightning.Resumable(directory, save_every=hf.Steps(1000))
        trainer, model = make_trainer(resumable, *callbacks, epochs=-1, max_steps=total), Line()
        trainer.fit(model, DataLoader(dataset, batch_size=2, shuffle=True))
        assert trainer.global_step == total
        return model.layer.weight.detach(), trainer.current_epoch

    untouched = fit_until(9, tmp_path / "untouched")
    ended = fit_until(steps, tmp_path / "longer")
    assert fit_until(steps, tmp_path / "longer")[0].equal(ended[0])
    longer = fit_until(9, tmp_path / "longer")
    assert longer[0].equal(untouched[0])
    assert longer[1] == untouched[1]


def test_a_new_run_begins_at_the_step_of_the_file_that_it_is_given(tmp_path: Path) -> None:
    first = make_trainer()
    first.fit(Line(), make_loader())
    first.save_checkpoint(tmp_path / "file.ckpt")
    for epochs in (2, 3):
        trainer = make_trainer(hf.lightning.Resumable(tmp_path / "run"), epochs=epochs)
        trainer.fit(Line(), make_loader(), ckpt_path=str(tmp_path / "file.ckpt"))
        assert trainer.global_step == 4 * epochs
        assert max((tmp_path / "run").glob("step-*")).name.startswith(f"step-{4 * epochs:09d}")


def test_two_streams_that_are_cycled_are_warned_of_at_the_start(tmp_path: Path) -> None:
    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["long"], batch_idx)

    told: list[Warned] = []
    keep_warned = lambda event: told.append(event) if isinstance(event, Warned) else None  # noqa: E731
    trainer = make_trainer(hf.lightning.Resumable(tmp_path, sinks=[keep_warned]))
    trainer.fit(Both(), {"long": make_loader(), "endless": DataLoader(Ones())})
    assert any("has no length" in each.text for each in told)


class Ones(IterableDataset[Any]):
    """Two samples; it has no length."""

    def __iter__(self) -> Any:
        return iter([torch.ones(2)] * 2)


def test_statistics_of_each_worker_are_refused_where_a_model_is_divided(tmp_path: Path) -> None:
    both = live_together(PROGRAM, tmp_path, "statistics", preload=PRELOAD, ends_with=1)
    words = "net.1 is a BatchNorm1d: with ModelParallelStrategy its statistics differ between workers"
    assert all(words in life.errors for life in both)


def test_a_model_that_has_changed_is_refused_and_names_the_tensor(tmp_path: Path) -> None:
    make_trainer(hf.lightning.Resumable(tmp_path / "run")).fit(Line(), make_loader())
    with pytest.raises(MismatchError, match=r"layer\.weight"):
        make_trainer(hf.lightning.Resumable(tmp_path / "run")).fit(Line(width=2), make_loader())


def test_a_trainer_with_two_of_them_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(hf.lightning.Resumable(tmp_path / "a"), hf.lightning.Resumable(tmp_path / "b"))
    with pytest.raises(UsageError, match="one Resumable"):
        trainer.fit(Line(), make_loader())


@pytest.mark.parametrize(
    "callback", [StochasticWeightAveraging(0.1), ModelPruning("l1_unstructured"), BackboneFinetuning()]
)
def test_a_callback_that_cannot_be_kept_is_refused_by_name(tmp_path: Path, callback: Any) -> None:
    trainer = make_trainer(hf.lightning.Resumable(tmp_path), callback)
    with pytest.raises(UsageError, match=f"does not support {type(callback).__name__}"):
        trainer.fit(Line(), make_loader())


def test_the_tuner_of_lightning_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    weights = []
    for name, tunes in [("tuned", True), ("tuned", True), ("plain", False)]:
        torch.manual_seed(1)
        trainer, model = make_trainer(hf.lightning.Resumable(tmp_path / name), epochs=2), Line()
        if tunes:
            Tuner(trainer).lr_find(model, make_loader(), num_training=3, update_attr=False)
        trainer.fit(model, make_loader())
        weights.append(model.layer.weight.detach())
        assert trainer.current_epoch == 2
    assert weights[0].equal(weights[1])
    assert weights[0].equal(weights[2])


def test_a_strategy_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    resumable = hf.lightning.Resumable(tmp_path)
    trainer = make_trainer(resumable)
    trainer._accelerator_connector.strategy = FSDPStrategy()  # The Trainer itself takes it on GPUs only.
    with pytest.raises(UsageError, match="does not support FSDPStrategy"):
        resumable.setup(trainer, Line(), "fit")


def test_a_place_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(hf.lightning.Resumable(tmp_path / "file" / "run"))
    with pytest.raises(StorageError):
        trainer.fit(Line(), make_loader())
    assert trainer.global_step == 0


class Fill(Callback):
    """Counts batches; after the fourth one, no large file can be written."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        if self.batches == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def test_fit_ended_by_a_full_disk_resumes_from_its_last_save(tmp_path: Path) -> None:
    trainer = make_trainer(hf.lightning.Resumable(tmp_path, save_every=hf.Steps(1)), Fill(), epochs=3)
    try:
        with pytest.raises(SaveFailedError) as failed:
            trainer.fit(Line(width=20_000), make_loader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert isinstance(failed.value.__cause__, StorageFullError)
    counter = Fill()
    counter.batches = 100
    again = make_trainer(hf.lightning.Resumable(tmp_path), counter, epochs=3)
    again.fit(Line(width=20_000), make_loader())
    assert again.global_step == 12
    assert counter.batches - 100 in (9, 10)  # The save of the third step may be on its way when the disk is full.


def test_lightning_has_its_own_methods_back_after_a_fit(tmp_path: Path) -> None:
    trainer = make_trainer(hf.lightning.Resumable(tmp_path / "run"))
    trainer.fit(Line(), make_loader())
    loop = trainer.fit_loop
    for owner in (
        loop,
        loop.epoch_loop,
        loop.epoch_loop.val_loop,
        trainer._checkpoint_connector,
        trainer._signal_connector,
    ):
        assert not [name for name, value in vars(owner).items() if callable(value) and hasattr(type(owner), name)]


def test_a_method_of_the_program_over_a_loops_stays(tmp_path: Path) -> None:
    trainer = make_trainer(hf.lightning.Resumable(tmp_path / "run"))
    loop, calls = trainer.fit_loop.epoch_loop, Counter[str]()

    def count(name: str, original: Any) -> Any:
        return lambda *args: (calls.update([name]), original(*args))[1]

    own = loop.on_advance_end = count("before", loop.on_advance_end)
    check = loop._should_check_val_fx = loop._should_check_val_fx

    class Late(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            loop.reset = self.own = count("during", loop.reset)

    late = Late()
    trainer.callbacks.append(late)
    trainer.fit(Line(), make_loader())
    assert (loop.on_advance_end, loop._should_check_val_fx, loop.reset) == (own, check, late.own)
    assert calls == {"before": 4, "during": 1}


@pytest.mark.parametrize(("every", "batches"), [(1, 4), (4, 4), (8, 4), (100, 4), (3, 3)])
def test_a_finished_fit_that_is_started_again_repeats_nothing(tmp_path: Path, every: int, batches: int) -> None:
    class Ends(Callback):
        def __init__(self) -> None:
            self.ends: list[int] = []

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.ends.append(trainer.current_epoch)

    def start(epochs: int) -> tuple[list[int], Trainer]:
        resumable = hf.lightning.Resumable(tmp_path / "run", save_every=hf.Steps(every), preemption="off")
        chosen = ModelCheckpoint(tmp_path / "chosen", save_top_k=-1)
        callbacks = [resumable, ends := Ends(), chosen]
        trainer = make_trainer(*callbacks, epochs=epochs, enable_checkpointing=True, limit_train_batches=batches)
        trainer.fit(Line(), make_loader())
        return ends.ends, trainer

    assert start(2)[0] == [0, 1]
    names = sorted(path.name for path in (tmp_path / "chosen").iterdir())
    for _ in range(2):
        ended, trainer = start(2)
        assert (ended, trainer.current_epoch, trainer.global_step) == ([], 2, 2 * batches)
    assert sorted(path.name for path in (tmp_path / "chosen").iterdir()) == names
    assert start(3)[0] == [2]


@pytest.mark.parametrize("stops", [False, True], ids=["max_steps", "should_stop"])
@pytest.mark.parametrize("every", [1, 100])
def test_a_fit_that_ended_within_an_epoch_repeats_nothing(tmp_path: Path, every: int, stops: bool) -> None:
    class Ends(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            self.count = state_dict["count"]

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if stops and trainer.global_step == 6:
                trainer.should_stop = True

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen.append(("epoch", trainer.current_epoch))
            self.count += 1

    def start(total: int, directory: Path) -> tuple[Ends, Trainer, Any]:
        torch.manual_seed(1)
        resumable = hf.lightning.Resumable(directory, save_every=hf.Steps(every), preemption="off")
        callbacks = [resumable, ends := Ends(), ModelCheckpoint(directory.with_suffix(".chosen"), save_top_k=-1)]
        trainer = make_trainer(*callbacks, epochs=-1, max_steps=total, enable_checkpointing=True)
        trainer.fit(model := Line(), make_loader())
        return ends, trainer, model.layer.weight.detach()

    total = 8 if stops else 6
    ends, trainer, weight = start(total, tmp_path / "run")
    assert ends.seen == [("epoch", 0), ("epoch", 1)]
    names = sorted(path.name for path in (tmp_path / "run.chosen").iterdir())
    for _ in range(2):
        again, other, same = start(total, tmp_path / "run")
        assert (again.seen, again.count, other.current_epoch, other.global_step) == ([], 2, trainer.current_epoch, 6)
        assert same.equal(weight)
    assert sorted(path.name for path in (tmp_path / "run.chosen").iterdir()) == names
    if not stops:
        longer, untouched = start(10, tmp_path / "run"), start(10, tmp_path / "untouched")
        assert longer[0].seen == [("epoch", 1), ("epoch", 2)]
        assert longer[2].equal(untouched[2])
        assert longer[1].current_epoch == untouched[1].current_epoch


def test_model_checkpoint_writes_and_reads_by_the_plug_in(tmp_path: Path) -> None:
    chosen = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=2, save_last=True, every_n_epochs=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [hf.lightning.HoldfastCheckpointIO()]}
    trainer = make_trainer(chosen, epochs=3, **options)
    trainer.fit(Line(), make_loader())
    assert len([path for path in tmp_path.iterdir() if path.name != "last.ckpt"]) == 2
    loaded = hf.lightning.HoldfastCheckpointIO().load_checkpoint(chosen.best_model_path)
    assert loaded["global_step"] == 12
    steps = {path.name: StoredRun(LocalStorage(path)).look().newest for path in tmp_path.iterdir()}
    assert {name: found.step for name, found in steps.items() if found} == {
        "epoch=1-step=8.ckpt": 8,
        "epoch=2-step=12.ckpt": 12,
        "last.ckpt": 12,
    }
    again = make_trainer(ModelCheckpoint(tmp_path, save_last=True), epochs=4, **options)
    again.fit(Line(), make_loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.global_step == 16


def test_a_link_to_a_checkpoint_is_removed_and_never_followed(tmp_path: Path) -> None:
    class Linked(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "last-{epoch}"  # Lightning removes the last link itself, through the plug-in.

    plug_in = hf.lightning.HoldfastCheckpointIO()
    chosen = Linked(tmp_path, save_top_k=-1, save_last="link")
    make_trainer(chosen, epochs=3, enable_checkpointing=True, plugins=[plug_in]).fit(Line(), make_loader())
    kept = sorted(path for path in tmp_path.iterdir() if not path.is_symlink())
    assert [plug_in.load_checkpoint(path)["global_step"] for path in kept] == [4, 8, 12]
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == ["last-epoch=2.ckpt"]
    # One that is saved in the place of a link is a checkpoint of its own.
    link = tmp_path / "last-epoch=2.ckpt"
    plug_in.save_checkpoint({"global_step": 100}, link)
    plug_in.teardown()
    assert [plug_in.load_checkpoint(path)["global_step"] for path in (*kept, link)] == [4, 8, 12, 100]
    # Links within a checkpoint, and to an ordinary one.
    inner = next(path for path in kept[0].iterdir() if path.name.startswith("step-"))
    (link / inner.name.replace("0", "7")).symlink_to(inner)
    (tmp_path / "plain.ckpt").write_bytes(b"kept")
    (tmp_path / "to-plain").symlink_to("plain.ckpt")
    (tmp_path / "to-nothing").symlink_to("nothing")
    for path in (link, tmp_path / "to-plain", tmp_path / "to-nothing", tmp_path / "missing"):
        plug_in.remove_checkpoint(path)
    plug_in.teardown()
    assert [plug_in.load_checkpoint(path)["global_step"] for path in kept] == [4, 8, 12]
    assert {path.name for path in tmp_path.iterdir()} == {"plain.ckpt", *(path.name for path in kept)}


class Large(Line):
    """So large that it is still being written while the program goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(8_000_000))


@pytest.mark.parametrize("kind", ["path", "url", "memory"])
def test_a_checkpoint_of_a_finished_fit_is_there_when_the_save_returns(tmp_path: Path, kind: str) -> None:
    where: Any = {"path": tmp_path / "a.ckpt", "url": f"file://{tmp_path}/a.ckpt", "memory": f"memory://{tmp_path}/a"}[
        kind
    ]
    first = make_trainer(plugins=[hf.lightning.HoldfastCheckpointIO()])
    first.fit(Large(), make_loader())
    first.save_checkpoint(where)
    if kind == "path":
        assert list(where.glob("step-*/manifest.json"))
    second = make_trainer(plugins=[hf.lightning.HoldfastCheckpointIO()], epochs=2)
    second.fit(Large(), make_loader(), ckpt_path=where)
    assert second.global_step == 8
    second.strategy.checkpoint_io.remove_checkpoint(where)
    second.strategy.checkpoint_io.teardown()
    with pytest.raises(FileNotFoundError):
        second.strategy.checkpoint_io.load_checkpoint(where)
    assert not (tmp_path / "a.ckpt").exists()


class Saver(Callback):
    """Saves in the fit, and looks at once: whether the checkpoint is there, and what another plug-in reads."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, 0
        self.was_there = self.was_durable = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        slurm = self.path.with_name("hpc_ckpt_1.ckpt")
        trainer.save_checkpoint(slurm)
        self.was_durable = bool(list(slurm.glob("step-*/manifest.json")))
        trainer.save_checkpoint(self.path)
        self.was_there = self.path.is_dir()
        self.found = hf.lightning.HoldfastCheckpointIO().load_checkpoint(self.path)["global_step"]


def test_a_save_within_a_fit_is_waited_for_by_who_reads_it(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "a.ckpt")
    make_trainer(saver, plugins=[hf.lightning.HoldfastCheckpointIO()]).fit(Large(), make_loader())
    assert (saver.was_there, saver.was_durable, saver.found) == (True, True, 4)


def test_model_checkpoint_gives_no_name_twice(tmp_path: Path) -> None:
    names = {}
    for kind, plugins in {"own": [], "holdfast": [hf.lightning.HoldfastCheckpointIO()]}.items():
        chosen = ModelCheckpoint(
            tmp_path / kind, filename="model", save_top_k=-1, every_n_train_steps=1, monitor="loss"
        )
        make_trainer(chosen, epochs=2, enable_checkpointing=True, plugins=plugins).fit(Large(), make_loader())
        names[kind] = sorted(path.name for path in (tmp_path / kind).iterdir())
    assert names["holdfast"] == names["own"]
    assert len(names["own"]) == 8


def test_plug_in_leaves_out_hyperparameters_that_are_not_values(tmp_path: Path) -> None:
    plug_in = hf.lightning.HoldfastCheckpointIO()
    with pytest.warns(UserWarning, match="hyperparameter 'activation'"):
        plug_in.save_checkpoint(
            {"hyper_parameters": {"width": 3, "activation": torch.nn.ReLU().forward}}, tmp_path / "a"
        )
    assert plug_in.load_checkpoint(tmp_path / "a") == {"hyper_parameters": {"width": 3}}
    plug_in.teardown()
