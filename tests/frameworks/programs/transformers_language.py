"""Trains a small language model, or an adapter of it, and writes it with `save_pretrained`."""

from __future__ import annotations

import sys
from typing import Any

import peft
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import holdfast as hf


class Words(Dataset[Any]):
    """Sequences of numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": numbers, "labels": numbers}


def main(directory: str, kind: str) -> None:
    """Trains."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    if kind == "adapter":
        adapter = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
    arguments = TrainingArguments(
        f"{directory}/out", max_steps=12, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    callback = hf.transformers.Resumable(f"{directory}/run", save_every=hf.Steps(4), incremental=True)
    Trainer(model, arguments, train_dataset=Words(), callbacks=[callback]).train()
    model.save_pretrained(f"{directory}/written")


if __name__ == "__main__":
    main(*sys.argv[1:])
