"""The members of the jobs of the case membership: sites that train by DiLoCo, and workers and servers of a store."""

import hashlib
import logging
import os
import re
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.local_sgd_sides import LR, MOMENTUM, adamw, layers_of
from benchmarks.machine import processes
from dltrain_ext import elastic, local_sgd, optim, ps

LOOPBACK = "127.0.0.1"
PATIENCE = 300.0  # s, after which a process counts as stuck
BATCH = 8
SYNC_EVERY, CODEC = 10, "int4"  # of DiLoCo
CHECKPOINT_EVERY = 1.0  # s
LOST = re.compile(r"goes on from version (\d+), .* up to version (\d+), is lost")


class Settings(NamedTuple):
    """Where a member finds the others, and what it does."""

    host: str
    port: int
    key: str  # that is set when it is to begin
    place: int
    founders: int
    width: int
    folder: str  # of checkpoints


class Step(NamedTuple):
    """A step of a worker, or an outer step of a site; the first one of a process is its joining.

    Attributes:
        began, ended: by the machine's monotonic clock.
        epoch: in which the step was taken.
        version: how many steps the job has taken.
        digest: of what all members have alike.
        lost: inner steps of this site, or versions of a shard.
    """

    began: float
    ended: float
    epoch: int
    version: int
    digest: str
    lost: int

    @property
    def state(self) -> tuple[int, int]:
        return self.epoch, self.version


class Losses(logging.Handler):
    """Adds up the versions that are lost according to the log, which it keeps from the standard error."""

    versions = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := LOST.search(record.getMessage()):
            self.versions += int(found[2]) - int(found[1])

    def take(self) -> int:
        versions, self.versions = self.versions, 0
        return versions


def join(settings: Settings) -> tuple[elastic.Membership, Losses]:
    """Report that all is ready, and wait until this process is to begin."""
    if settings.host == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    losses = Losses()
    logging.getLogger("dltrain_ext").addHandler(losses)
    patience = timedelta(seconds=PATIENCE)
    store = dist.TCPStore(settings.host, settings.port, is_master=False, timeout=patience)
    processes.report(None)
    store.wait([settings.key])
    return elastic.Membership(store, least=settings.founders, timeout=patience), losses


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]


def inputs(settings: Settings) -> Tensor:
    return torch.randn(BATCH, settings.width, generator=torch.Generator().manual_seed(settings.place))


def compute_gradients(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    torch.autograd.backward(model(x).square().mean())


def serve(settings: Settings) -> None:
    members, _ = join(settings)
    ps.serve(members, checkpoint=settings.folder, checkpoint_every=timedelta(seconds=CHECKPOINT_EVERY))


def work(settings: Settings) -> None:
    model, x = layers_of(settings.width), inputs(settings)
    members, losses = join(settings)
    began = time.monotonic()
    optimizer = ps.Optimizer(model.named_parameters(), optim.AdamW, lr=1e-4, group=members)
    while True:
        compute_gradients(model, x)
        optimizer.step()
        ended = time.monotonic()
        kept = digest(*model.parameters())
        processes.report(Step(began, ended, members.epoch, optimizer.version, kept, losses.take()))
        began = time.monotonic()


class Standing(NamedTuple):
    """Where a site is."""

    number: int
    members: tuple[int, ...]
    epoch: int
    outer_steps: int


def train(settings: Settings) -> None:
    model, x = layers_of(settings.width), inputs(settings)
    weight = model[0].weight
    inner = adamw(model)
    own = torch.empty_like(weight)
    inner.register_step_post_hook(lambda *_: own.copy_(weight.detach()))  # is called before the hooks of DiLoCo
    members, _ = join(settings)
    outer = local_sgd.DiLoCo(model, inner, sync_every=SYNC_EVERY, codec=CODEC, lr=LR, momentum=MOMENTUM, group=members)
    last: Standing | None = None
    since = lost = 0  # inner steps: since the last outer step, and those of them that are lost

    def standing() -> Standing:
        return Standing(members.number, members.members, members.epoch, outer.outer_steps)

    def report(epoch: int) -> None:
        state = outer.state_dict()
        kept = digest(*(each for name in ("backup", "momentum") for each in state[name].values()))
        processes.report(Step(began, ended, epoch, outer.outer_steps, kept, lost))

    def enter(*_: Any) -> None:  # is called after the hooks of DiLoCo
        nonlocal last, ended
        if last is None:
            last, ended = standing(), time.monotonic()
            report(last.epoch)

    inner.register_step_pre_hook(enter)
    while True:
        compute_gradients(model, x)
        began = time.monotonic()
        inner.step()
        ended, now, since = time.monotonic(), standing(), since + 1
        assert last
        was_reset = now.outer_steps == last.outer_steps and not torch.equal(own, weight)
        if now.number != last.number or (now.epoch != last.epoch and was_reset):
            lost, since = lost + since, 0
        if now.outer_steps > last.outer_steps:
            # Where a member was lost, this is an outer step that others had taken with it.
            report(now.epoch if {*last.members} <= {*now.members} else last.epoch)
            since = lost = 0
        last = now
