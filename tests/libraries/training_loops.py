"""Training steps with the training loops of libraries: Accelerate, the Trainer of transformers, averages of weights.

Libraries are imported by the function that needs them.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.libraries.training_steps import Program, classes, mlp, program, trained, words


@program
def accelerate__accumulation() -> Program:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(x: Any, y: Any) -> Any:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.detach()

    return Program(step, classes, model)


@program
def accelerate__bf16() -> Program:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.gather_for_metrics(loss.detach())

    return Program(step, classes, model)


@program
def transformers__trainer() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], seed=0))
    trainer.create_optimizer_and_scheduler(200)
    trainer.current_gradient_accumulation_steps = 1  # what `train` sets

    def step(tokens: Any) -> Any:
        loss = trainer.training_step(model, {"input_ids": tokens, "labels": tokens}, None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return loss

    return Program(step, lambda i: (words(i, 4, 8 + i % 7),), model)  # rows are padded to the longest


@program
def ema_pytorch__ema() -> Program:
    from ema_pytorch import EMA

    model = mlp()
    averages = EMA(model, beta=0.99, update_after_step=2, update_every=2)
    found = trained(nn.ModuleList([model, averages.ema_model]), lambda x, y: F.cross_entropy(model(x), y), classes)

    def step(x: Any, y: Any) -> Any:
        loss = found.step(x, y)
        averages.update()
        return loss

    return Program(step, classes, found.module)
