"""The sides of the case local_sgd: ours, torch's averager and DDP, torchft and hivemind, each with a model of its own."""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp, local_sgd, optim
from dltrain_ext.local_sgd.fragments import divide

LAYERS = 10
LR, MOMENTUM, MIX = 0.7, 0.9, 0.5  # of the outer optimizer
PATIENCE = 600.0  # s
ALONE, OURS, DDP = "no averaging", "DiLoCo", "DDP"
AVERAGER, TORCHFT, HIVEMIND = "torch PeriodicModelAverager", "torchft DiLoCo", "hivemind averager"
INSTALL = {TORCHFT: "torchft", HIVEMIND: "hivemind"}


class Side(NamedTuple):
    """`codec` is "raw" for peers. A peer with `fragments` or `delay` is one that has them."""

    kind: str
    codec: str = "raw"
    fragments: int = 1
    delay: int = 0
    ours: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind]
        if self.ours or self.kind == DDP:
            parts.append(self.codec if self.ours else "fp32")
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.delay:
            parts.append(f"delay {self.delay}")
        return ", ".join(parts)


class Schedule(NamedTuple):
    sync_every: int
    fragments: int
    delay: int

    @property
    def interval(self) -> int:
        return self.sync_every // self.fragments


def why_not(side: Side) -> str:
    """Return why a peer cannot be a side; "" if it can."""
    package = INSTALL.get(side.kind)
    if package and not importlib.util.find_spec(package):
        return f"not installed: pip install {package}, in an environment of its own"
    return ""


def layers_of(width: int) -> nn.Sequential:
    """Return the model: layers of the same size, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are in proportion to the gradients, for checks."""
    return torch.optim.SGD(model.parameters(), lr=1e-2)


Inner = Callable[[nn.Module], torch.optim.Optimizer]


class Runner:
    """A side in training, and that of no averaging. It averages "nothing", "gradients", "parameters", or "moves"."""

    averages = "nothing"
    failures = 0  # averages that did not succeed, without an exception
    lead = 0  # steps before a turn, at the end of which nothing is under way
    outer: local_sgd.DiLoCo | None = None

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        self.side, self.model, self.schedule = side, model, schedule
        self.wrapped: nn.Module = model
        self.inner = inner(model)
        self.count = 0

    def train(self, x: Tensor) -> None:
        self.inner.zero_grad()
        torch.autograd.backward(self.wrapped(x).square().mean())
        self.step()

    def give(self, grads: Callable[[list[nn.Parameter]], None]) -> None:
        """Take a step with given gradients."""
        grads(list(self.model.parameters()))
        self.step()

    def step(self) -> None:
        self.inner.step()

    def departs(self, step: int) -> bool:
        return step % self.schedule.interval == 0

    def lands(self, step: int) -> bool:
        return self.departs(step)

    def same(self) -> list[Tensor]:
        """Return what has the same bits on all ranks."""
        return [] if self.averages == "nothing" else [p.detach() for p in self.model.parameters()]

    @property
    def waited(self) -> float:
        """Return the seconds in which it stood still; 0 where this is not known."""
        return 0.0

    def close(self) -> None:
        """Release what it holds."""


class Ours(Runner):
    averages = "moves"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.outer = local_sgd.DiLoCo(
            model,
            self.inner,
            sync_every=schedule.sync_every,
            fragments=schedule.fragments,
            delay=schedule.delay,
            codec=side.codec,
            error_feedback=side.codec != "raw",
            lr=LR,
            momentum=MOMENTUM,
            mix=MIX,
        )
        self.lead = schedule.delay

    def lands(self, step: int) -> bool:
        return step > self.schedule.delay and (step - self.schedule.delay) % self.schedule.interval == 0

    def same(self) -> list[Tensor]:
        assert self.outer
        return list(self.outer.state_dict()["backup"].values())

    @property
    def waited(self) -> float:
        assert self.outer
        return self.outer.metrics()["outer/waited"]

    def close(self) -> None:
        assert self.outer
        self.outer.finish()
        self.outer.close()


class DataParallel(Runner):
    averages = "gradients"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self.state = ddp.register(self.wrapped, side.codec) if side.ours else None

    def give(self, grads: Callable[[list[nn.Parameter]], None]) -> None:
        kept = [nn.Parameter(p.detach()) for p in self.model.parameters()]
        grads(kept)
        given = [p.grad for p in kept]
        self.inner.zero_grad()
        forward, self.model.forward = self.model.forward, self.products  # type: ignore[method-assign]
        self.given = given
        try:
            torch.autograd.backward(self.wrapped(torch.zeros(())))
        finally:
            self.model.forward = forward  # type: ignore[method-assign]
        self.step()

    def products(self, _: Tensor) -> Tensor:
        """Return a sum of which the gradients are those that were given."""
        return torch.stack([(p * g).sum() for p, g in zip(self.model.parameters(), self.given, strict=True)]).sum()


class Averager(Runner):
    """torch's averager, which averages after the first step, and then periodically."""

    averages = "parameters"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.averager = averagers.PeriodicModelAverager(period=schedule.sync_every)
        self.waiting = 0.0

    def step(self) -> None:
        self.inner.step()
        began = time.perf_counter()
        self.averager.average_parameters(self.model.parameters())
        self.waiting += time.perf_counter() - began

    def departs(self, step: int) -> bool:
        return (step - 1) % self.schedule.interval == 0

    @property
    def waited(self) -> float:
        return self.waiting

    def same(self) -> list[Tensor]:
        return []  # the check ends in other steps than those that average


def own_address() -> str:
    """Return the address of this rank's host."""
    if (first := os.environ.get("MASTER_ADDR", "127.0.0.1")) == "127.0.0.1":
        return first
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((first, 9))
        return probe.getsockname()[0]


class Torchft(Runner):
    """torchft's DiLoCo: each rank is a replica group of one rank; rank 0 has the lighthouse."""

    averages = "moves"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        os.environ.setdefault("RUST_LOG", "error")  # it writes to the standard output
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        super().__init__(side, model, schedule, inner)
        for name in ("torchft", "torchft.local_sgd", "torchft.manager", "torchft.process_group"):
            logging.getLogger(name).setLevel(logging.ERROR)
        patience, here, ranks = timedelta(seconds=PATIENCE), own_address(), dist.get_world_size()
        self.lighthouse = None
        if dist.get_rank() == 0:
            self.lighthouse = LighthouseServer("[::]:0", ranks, join_timeout_ms=60000, quorum_tick_ms=100)
        port = [self.lighthouse.address().rpartition(":")[2] if self.lighthouse else "", here]
        dist.broadcast_object_list(port)
        self.store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=patience)
        self.manager = Manager(
            pg=self.group,
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=ranks,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self.store.port,
            lighthouse_addr=f"http://{port[1]}:{port[0]}",
            replica_id=f"rank_{dist.get_rank()}",
            hostname=here,
            init_sync=False,
        )
        layers = list(model)
        parts = divide([p.numel() for p in model.parameters()], schedule.fragments)
        fragments = [nn.Sequential(*(layers[i] for i in part)) for part in parts]
        outers = [torch.optim.SGD(f.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True) for f in fragments]
        self.diloco = DiLoCo(
            self.manager,
            fragments,
            self.inner,
            outers,
            sync_every=schedule.sync_every,
            fragment_sync_delay=schedule.delay,
            fragment_update_alpha=MIX if schedule.delay else 0.0,
        )
        self.diloco.__enter__()

    def departs(self, step: int) -> bool:
        return (step + self.schedule.delay) % self.schedule.interval == 0

    def lands(self, step: int) -> bool:
        return step % self.schedule.interval == 0

    def same(self) -> list[Tensor]:
        return [each for f in self.diloco._fragments for each in f.original_parameters.values()]

    def close(self) -> None:
        dist.barrier()
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        self.group.shutdown()
        dist.barrier()
        if self.lighthouse:
            self.lighthouse.shutdown()


class Hivemind(Runner):
    """hivemind's averager of parameters, without compression, which all ranks call after as many steps."""

    averages = "parameters"
    made = 0

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        import hivemind

        multiprocessing.set_start_method("fork", force=True)  # its processes cannot be pickled
        super().__init__(side, model, schedule, inner)
        self.waiting, here, rank = 0.0, own_address(), dist.get_rank()
        options: dict[str, Any] = {"host_maddrs": [f"/ip4/{here}/tcp/0"], "start": True, "use_ipfs": False}
        first: list[Any] = [None]
        if rank == 0:
            self.dht = hivemind.DHT(**options)
            first = [[str(address) for address in self.dht.get_visible_maddrs()]]
        dist.broadcast_object_list(first)
        if rank:
            self.dht = hivemind.DHT(initial_peers=first[0], **options)
        Hivemind.made += 1
        ranks = dist.get_world_size()
        self.averager = hivemind.DecentralizedAverager(
            [p.detach().clone() for p in model.parameters()],
            self.dht,
            start=True,
            prefix=f"local_sgd{Hivemind.made}",
            target_group_size=ranks,
            min_group_size=ranks,
            min_matchmaking_time=5.0,
            request_timeout=3.0,
        )
        dist.barrier()

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        place = self.count % self.schedule.sync_every
        if place == self.schedule.sync_every // 2:  # so that it finds the others while this rank trains
            self.control = self.averager.step(wait=False, require_trigger=True, timeout=PATIENCE)
        if place:
            return
        began = time.perf_counter()
        with self.averager.get_tensors() as tensors:
            for tensor, p in zip(tensors, self.model.parameters(), strict=True):
                tensor.copy_(p)
        self.control.allow_allreduce()
        self.failures += not self.control.result(PATIENCE)
        with self.averager.get_tensors() as tensors:
            for tensor, p in zip(tensors, self.model.parameters(), strict=True):
                p.copy_(tensor)
        self.waiting += time.perf_counter() - began

    @property
    def waited(self) -> float:
        return self.waiting

    def same(self) -> list[Tensor]:
        return []  # ranks add up what they get in the order in which it comes

    def close(self) -> None:
        dist.barrier()
        self.averager.shutdown()
        self.dht.shutdown()


RUNNERS: dict[str, type[Runner]] = {
    ALONE: Runner,
    OURS: Ours,
    DDP: DataParallel,
    AVERAGER: Averager,
    TORCHFT: Torchft,
    HIVEMIND: Hivemind,
}


def make_runner(side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner = adamw) -> Runner:
    return RUNNERS[side.kind](side, model, schedule, inner)
