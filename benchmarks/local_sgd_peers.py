"""The sides of the case local_sgd that are other packages: torchft and hivemind."""

import contextlib
import logging
import multiprocessing
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.local_sgd_sides import (
    ALONE,
    AVERAGER,
    DDP,
    HIVEMIND,
    LR,
    MIX,
    MOMENTUM,
    OURS,
    TORCHFT,
    Averager,
    DataParallel,
    Inner,
    Ours,
    Runner,
    Schedule,
    Side,
    adamw,
)
from dltrain_ext.local_sgd.fragments import divide

PATIENCE = 600.0  # s
FINDING = 60.0  # s, in which hivemind must find the other ranks


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
        if self.count % self.schedule.sync_every:
            return
        began = time.perf_counter()
        with self.averager.get_tensors() as tensors:
            for tensor, p in zip(tensors, self.model.parameters(), strict=True):
                tensor.copy_(p)
        self.failures += not self.averager.step(timeout=FINDING, allow_retries=False)
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
