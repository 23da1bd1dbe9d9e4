"""The runs of test_lightning.py. Only its ranks import this, as Lightning's import takes longer than most tests."""

import os
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from ranks import look_like_torchrun
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dltrain_ext import optim
from dltrain_ext.lightning import DDPStrategy, MixedPrecision

STEPS = 4  # an epoch, as in test_lightning.py
ADAMW = partial(optim.AdamW, lr=0.01)


class Module(pl.LightningModule):
    """A module that records the loss of each batch."""

    def __init__(self, optimizer, overflow_at=None, manual_clip=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
        self.optimizer, self.overflow_at, self.manual_clip = optimizer, overflow_at, manual_clip
        self.automatic_optimization = manual_clip is None
        self.found = {"losses": []}

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.found["losses"].append(loss.item())
        if batch_idx == self.overflow_at and self.global_rank == 1:
            loss = loss * torch.inf
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=self.manual_clip, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def on_train_start(self):
        if isinstance(self.trainer.strategy, DDPStrategy):
            self.found["feedback at start"] = feedback_of(self.trainer.strategy)


def feedback_of(strategy):
    (feedback,) = strategy.hook_state.state_dict()["feedback"].values()
    return feedback


def fit(
    strategy,
    plugin=None,
    *,
    optimizer=ADAMW,
    epochs=1,
    accumulate=1,
    folder=None,
    resume=None,
    module=(),
    **options,
):
    """Train, and return the results to compare."""
    generator = torch.Generator().manual_seed(0)
    batches = STEPS * accumulate
    data = TensorDataset(
        torch.randn(12 * batches, 32, generator=generator), torch.randint(8, (12 * batches,), generator=generator)
    )
    model = Module(optimizer, **dict(module))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=plugin,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else None,
        enable_checkpointing=folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(data, batch_size=12 // trainer.world_size), ckpt_path=resume)
    found = {**model.found, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}
    if isinstance(strategy, DDPStrategy):
        found["seed"] = strategy.hook_state.seed
        found["hook"], found["stats"] = strategy.hook_state.state_dict(), strategy.hook_state.stats()
    if plugin is not None:
        found["scaler"] = plugin.state_dict()
    return found


def ours(**options):
    return MixedPrecision("16-mixed", "cpu", init_scale=2.0**10, growth_interval=3, **options)


def theirs():
    return LightningMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3))


def train(rank, world_size, folder):
    look_like_torchrun(rank, world_size)
    plain, raw = LightningDDPStrategy, partial(DDPStrategy, "raw")
    # The norm of the gradients hardly affects AdamW, so this uses SGD.
    sgd, torchs = ({"optimizer": partial(room.SGD, lr=0.5)} for room in (optim, torch.optim))
    norm = {"gradient_clip_val": 0.1, "accumulate": 2}
    value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    saved = {"epochs": 2, "gradient_clip_val": 0.1}
    return {
        "plain": fit(plain(), **norm),
        "raw": fit(raw(), **norm),
        "int8": fit(DDPStrategy(seed=7, find_unused_parameters=True), **norm),
        "plain, fp16, norm": fit(plain(), theirs(), **torchs, **norm),
        "raw, fp16, norm": fit(raw(), ours(), **sgd, **norm),
        "torch's, fp16, norm": fit(raw(), ours(), **torchs, **norm),
        "plain, fp16, value": fit(plain(), theirs(), **torchs, **value),
        "raw, fp16, value": fit(raw(), ours(), **sgd, **value),
        "torch's, fp16, value": fit(raw(), ours(), **torchs, **value),
        "plain, bf16, norm": fit(plain(), LightningMixedPrecision("bf16-mixed", "cpu"), **torchs, **norm),
        "raw, bf16, norm": fit(raw(), MixedPrecision("bf16-mixed", "cpu"), **sgd, **norm),
        "automatic": fit(raw(), ours(), **sgd, gradient_clip_val=0.1),
        "manual": fit(raw(), ours(), **sgd, module={"manual_clip": 0.1}),
        "unclipped": fit(raw(), ours(), **sgd),
        "overflow": fit(DDPStrategy(), ours(), module={"overflow_at": 1}, gradient_clip_val=0.1),
        "whole": fit(DDPStrategy(), ours(), folder=folder, **saved),
        "resumed": fit(DDPStrategy(), ours(), resume=f"{folder}/epoch=0.ckpt", **saved),
        "whole raw": fit(raw(), ours(), folder=f"{folder}/raw"),
    }


def go_on(rank, world_size, checkpoint):
    look_like_torchrun(rank, world_size)
    return fit(DDPStrategy(), ours(), resume=checkpoint, epochs=2)
