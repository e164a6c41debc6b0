"""A fit that is killed and resumed by the tests: prints a digest of everything after each batch.

Run it as `python lightning_fit.py DIRECTORY VARIANT [DIES_AFTER [LEAVES_IN [LEAVES_AT]]]`: under torchrun, worker 1
kills itself after so many batches, once; the last worker is asked to leave in the validation after so many batches, or
in the one before training, if that is 0; and at the end of the batch with that number.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from telling import ask_to_leave
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, IterableDataset, random_split
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.regression import MeanSquaredError

import holdfast as hf

# Older versions average no weights.
AVERAGING: Any = getattr(lightning_callbacks, "EMAWeightAveraging", None)
SAMPLES = 60
BATCH = 4


class Samples(Dataset[Any]):
    """Each with its own number, and with noise that is drawn as it is loaded."""

    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(length, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.01 * torch.randn(4) + 0.01 * float(np.random.rand())
        return index, self.inputs[index] + noise, self.inputs[index].sum()


class Stream(IterableDataset[Any]):
    """The samples one after the other; says neither how many there are nor where it is."""

    def __iter__(self) -> Any:
        samples = Samples()
        return (samples[index] for index in range(len(samples)))


class Model(LightningModule):
    """Has dropout, batch norm, metrics, and a scheduler of each kind."""

    def __init__(self, plateau: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.error = MeanAbsoluteError()
        self.errors = MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})
        self.plateau = plateau

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.net(inputs).squeeze(-1)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, inputs, targets = batch
        outputs = self(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        self.error(outputs, targets)
        self.errors.update(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.errors.compute())
        self.errors.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self(inputs), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(LightningModule):
    """Two optimizers, one of which gathers gradients over three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, inputs, targets = batch
        first, second = self.optimizers()
        loss = nn.functional.mse_loss(self.second(self.first(inputs).relu()).squeeze(-1), targets)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()
            for scheduler in self.lr_schedulers():
                scheduler.step()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.first.parameters(), lr=0.01)
        second = torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=3, gamma=0.9) for each in (first, second)]
        return [first, second], schedulers


class Divided(LightningModule):
    """Each worker has a part of each parameter."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 7), norm, nn.Dropout(0.2), nn.ReLU(), nn.Linear(7, 1))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        for layer in (self.net[0], self.net[4], self.net):
            fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).squeeze(-1), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs).squeeze(-1), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


class Data(LightningDataModule):
    """Counts its epochs, as a curriculum would."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        drawn, _ = random_split(Samples(), [SAMPLES - 4 * self.asked, 4 * self.asked])
        return DataLoader(drawn, batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(random_split(Samples(), [8, SAMPLES - 8])[0], batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.asked = state_dict["asked"]


class Tell(Callback):
    """Prints a line for each batch, after all else has been done for it."""

    def __init__(self, dies_after: int, leaves_in: int, leaves_at: int) -> None:
        self.dies_after, self.leaves_in, self.leaves_at = dies_after, leaves_in, leaves_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        indices = batch[0] if isinstance(batch, list | tuple) else [part[0] for part in batch.values()]
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        told = [trainer.current_epoch, batch_idx, repr(indices), repr(loss), digest_of_state(trainer)]
        print(json.dumps({"step": trainer.fit_loop.total_batch_idx, "digest": digest(told)}), flush=True)
        if trainer.global_rank == 1 and trainer.fit_loop.total_batch_idx == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.fit_loop.total_batch_idx == self.leaves_at:
            self.leave(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        batches = 0 if trainer.sanity_checking else trainer.fit_loop.total_batch_idx + 1
        print(f"validated {batches}/{batch_idx}", file=sys.stderr)
        if batches == self.leaves_in and batch_idx == 0:
            self.leave(trainer)

    def leave(self, trainer: Any) -> None:
        run = next(each.run for each in trainer.callbacks if isinstance(each, hf.lightning.Resumable))
        ask_to_leave(run, gets_signal=trainer.global_rank == trainer.world_size - 1)


def digest(value: Any) -> str:
    return hashlib.sha256(show(value).encode()).hexdigest()[:16]


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return f"{value.dtype}{tuple(value.shape)}{local.detach().flatten().tolist()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"
    return repr(value)


def digest_of_state(trainer: Any) -> str:
    callbacks = {
        key: {name: part for name, part in state.items() if name not in ("dirpath",)}
        for callback in trainer.callbacks
        if (state := callback.state_dict()) and (key := callback.state_key)
    }
    averaged = [callback._average_model.state_dict() for callback in trainer.callbacks if is_average(callback)]
    return digest(
        [
            trainer.lightning_module.state_dict(),
            [optimizer.state_dict() for optimizer in trainer.optimizers],
            [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            json.dumps(show(callbacks)).replace(str(trainer.default_root_dir), ""),
            averaged,
            dict(trainer.callback_metrics),
            torch.get_rng_state(),
            trainer.precision_plugin.state_dict(),
        ]
    )


def is_average(callback: Any) -> bool:
    return AVERAGING is not None and isinstance(callback, AVERAGING)


def make(variant: str, directory: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model, and what the trainer and `fit` are given."""
    data = Samples()
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    validation = DataLoader(Samples(16), batch_size=4)
    model: LightningModule = Model(plateau=variant == "plateau")
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": False}
    callbacks: list[Any] = []
    if variant == "callbacks":
        callbacks = [
            EarlyStopping("val_loss", patience=50),
            *([AVERAGING(decay=0.9)] if AVERAGING else []),
            # What was saved after the step that a restart goes back to has the same name again.
            ModelCheckpoint(directory / "best", monitor="val_loss", save_top_k=2, enable_version_counter=False),
        ]
        options |= {"enable_checkpointing": True, "val_check_interval": 5}
    elif variant == "accumulation":
        options |= {"accumulate_grad_batches": 4, "val_check_interval": 7, "max_steps": 14, "max_epochs": -1}
        scaler = torch.amp.GradScaler("cpu", growth_interval=5)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    elif variant == "plateau":
        options |= {"limit_train_batches": 9, "limit_val_batches": 2, "precision": "bf16-mixed"}
    elif variant == "scheduled":
        # The finder trains for a trial at each start, before the fit begins.
        model.lr = 0.05
        callbacks = [LearningRateFinder(num_training_steps=5), GradientAccumulationScheduler({0: 3, 2: 1})]
    elif variant == "workers":
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(
            data, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True, generator=generator
        )
    elif variant == "shuffled":
        generator = torch.Generator().manual_seed(4)
        validation = DataLoader(Samples(16), batch_size=4, shuffle=True, generator=generator)
        options |= {"val_check_interval": 7, "limit_val_batches": 3, "num_sanity_val_steps": 0}
    elif variant == "stream":
        loader = DataLoader(Stream(), batch_size=BATCH)
    elif variant == "several":
        short = DataLoader(Samples(20), batch_size=BATCH, shuffle=True)
        model = Two()
        loader = {"long": loader, "short": short}
    elif variant == "manual":
        model = Manual()
        options["max_epochs"] = 3
    elif variant == "reload":
        options["reload_dataloaders_every_n_epochs"] = 1
        return model, {**options, "callbacks": callbacks}, {"datamodule": Data()}
    elif variant == "own":
        loader = hf.ResumableDataLoader(data, batch_size=BATCH, seed=3)
    elif variant == "ddp":
        validation = DataLoader(Samples(48), batch_size=4)
        options |= {"strategy": "ddp", "devices": 2, "val_check_interval": 4}
    elif variant in ("parallel", "statistics"):
        model = Divided(nn.BatchNorm1d(7) if variant == "statistics" else nn.LayerNorm(7))
        validation = DataLoader(Samples(48), batch_size=4)
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        options |= {"strategy": strategy, "devices": 2, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    fit = {"train_dataloaders": loader, "val_dataloaders": None if variant in ("manual", "several") else validation}
    return model, {**options, "callbacks": callbacks}, fit


class Two(Model):
    """Trains on two loaders at once."""

    def __init__(self) -> None:
        super().__init__(plateau=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = torch.cat([batch["long"][1], batch["short"][1]])
        targets = torch.cat([batch["long"][2], batch["short"][2]])
        return super().training_step([None, inputs, targets], batch_idx)


def main() -> None:
    directory, variant = Path(sys.argv[1]), sys.argv[2]
    dies_after = int(sys.argv[3]) if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" else -1
    leaves_in, leaves_at = (int(sys.argv[place]) if len(sys.argv) > place else -1 for place in (4, 5))
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seed_everything(5, verbose=False)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        hf.init_process_group("gloo")
    model, options, fit = make(variant, directory)
    callbacks = [
        hf.lightning.Resumable(directory / "run", save_every=hf.Steps(3)),
        *options.pop("callbacks"),
        Tell(dies_after, leaves_in, leaves_at),
    ]
    trainer = Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **options,
    )
    trainer.fit(model, **fit)
    print(json.dumps({"ended": trainer.global_step, "digest": digest_of_state(trainer)}), flush=True)


if __name__ == "__main__":
    main()
