"""The code that every rank of the case store runs: the sides of each workload, the check of each, and the timing."""

import contextlib
import importlib.util
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from benchmarks.harness import Progress, interleave
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import given_rank, over_ranks
from dltrain_ext import codecs, comm, optim, ps
from dltrain_ext.ps.connecting import blocks_of, make_nodes_here, shard_of
from dltrain_ext.ps.layout import Key
from dltrain_ext.ps.settings import Settings
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike

DEADLINE = 120.0
CHECKED = 3  # calls before the check
RPC, TORCHFT, ALONE, SYNCHRONOUS = "torch RPC", "torchft", "AdamW alone", "synchronous"
SERVER = 0  # the rank that serves where one does
LR = 1e-2
FEW = 3  # calls that consist of many steps
TURNS = 4  # of sides that are apart
STRAGGLERS, LONGER = 0.1, 5  # so many steps take so many times as long
STALENESS = {SYNCHRONOUS: 0, "staleness 4": 4, "staleness 8": 8, "asynchronous": None}


class Workload(NamedTuple):
    """One of `KINDS`; a tensor or, with several shapes, tensors."""

    kind: str
    shapes: list[tuple[int, ...]] = [(1000,)]

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))


class Job(NamedTuple):
    workloads: list[Workload]
    codecs: list[str]
    rounds: int
    warmup: int
    steps: int  # with stragglers: those of one call
    seconds: float  # and the time of a step


class Side:
    """A side of a workload, on one rank. What a side on another rank does is `call` of this class: nothing."""

    ours = True
    against = ""  # the side with which it is compared
    wire_bytes: int | None = None  # in one direction, at the rank that has most
    samples: list[float] | None = None  # if not the time of a call

    def before(self) -> None:
        """Prepare a call."""

    def call(self) -> None:
        """Do what is timed."""

    def count_wrong(self) -> int:
        """Count the wrong elements after `CHECKED` calls."""
        return 0

    def close(self) -> None:
        """Release what others wait for."""


class Result(NamedTuple):
    """A side of a workload; `samples` is empty if it is wrong. `line`: bytes per second of the link."""

    workload: Workload
    side: str
    ours: bool
    against: str
    wrong: int
    wire_bytes: int | None
    samples: list[float]
    line: float | None

    def joined(self, later: "Result") -> "Result":
        """Return the result of both turns."""
        return later._replace(wrong=max(self.wrong, later.wrong), samples=self.samples + later.samples)


# Steps: gradients are averaged over all ranks, and AdamW updates the parameters.


def gradient_of(numel: int, rank: int, step: int) -> Tensor:
    """Elements of magnitudes from 1 to 2, with the same sign on all ranks, so that small errors have small effects."""
    signs = torch.randn(numel, generator=torch.Generator().manual_seed(7)).sign()
    magnitudes = 1 + torch.rand(numel, generator=torch.Generator().manual_seed(100 * step + rank))
    return signs * magnitudes


class Step(Side):
    """Parameters whose gradients are parts of one tensor."""

    def __init__(self, shapes: list[tuple[int, ...]], codec: str):
        self.shapes, self.codec, self.count = shapes, codec, 0
        self.numel = sum(map(math.prod, shapes))
        self.gradient = torch.zeros(self.numel)
        self.given = [gradient_of(self.numel, dist.get_rank(), step) for step in range(CHECKED)]
        self.parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        for parameter, part in zip(self.parameters, self.gradient.split([*map(math.prod, shapes)]), strict=True):
            parameter.grad = part.view(parameter.shape)

    def before(self) -> None:
        self.gradient.copy_(self.given[self.count % CHECKED])
        self.count += 1

    def values(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def count_wrong(self) -> int:
        """Compare with torch's AdamW on the exact average, and the ranks with each other."""
        expected = nn.Parameter(torch.ones(self.numel))
        optimizer = torch.optim.AdamW([expected], lr=LR)
        for step in range(CHECKED):
            ranks = range(dist.get_world_size())
            expected.grad = torch.stack([gradient_of(self.numel, rank, step) for rank in ranks]).mean(0)
            optimizer.step()
        # A gradient is at least half the largest one, and the quotient of AdamW has at most the error of both terms.
        lost = 1e-6 + LR * CHECKED * 8 * codecs.error_bound(self.codec).max
        return count_wrong(self.values(), expected.detach(), lost, first_if_unlike(self.values()))


class ReducedStep(Step):
    """An all-reduce, and a step on each rank."""

    ours = False

    def __init__(self, shapes: list[tuple[int, ...]], codec: str, communicator: comm.Communicator):
        super().__init__(shapes, codec)
        self.optimizer, self.communicator = optim.AdamW(self.parameters, lr=LR), communicator
        self.residual = None if codec == "raw" else torch.zeros(self.numel)

    def call(self) -> None:
        self.communicator.all_reduce(self.gradient, "avg", algorithm="direct", codec=self.codec, residual=self.residual)
        self.optimizer.step()


class ServedStep(Step):
    """ps.Optimizer, for which all ranks serve; raw it has the bits of the all-reduce."""

    def __init__(self, shapes: list[tuple[int, ...]], codec: str, reduced: ReducedStep, name: str):
        super().__init__(shapes, codec)
        self.reduced, self.against = reduced, name
        named = [(str(number), parameter) for number, parameter in enumerate(self.parameters)]
        self.optimizer = ps.Optimizer(named, optim.AdamW, codec=codec, lr=LR)

    def call(self) -> None:
        self.optimizer.step()

    def count_wrong(self) -> int:
        unlike = int((self.values() != self.reduced.values()).sum()) if self.codec == "raw" else 0
        return super().count_wrong() + unlike

    def close(self) -> None:
        self.optimizer.close()


@contextlib.contextmanager
def steps(workload: Workload, job: Job) -> Iterator[dict[str, Side]]:
    communicator = comm.Communicator(timeout=timedelta(seconds=DEADLINE / 2), ranks_per_host=1)
    found: dict[str, Side] = {}
    for codec in job.codecs:
        name = f"all-reduce and AdamW, {codec}"
        found[name] = reduced = ReducedStep(workload.shapes, codec, communicator)
        found[f"ps.Optimizer, {codec}"] = ServedStep(workload.shapes, codec, reduced, name)
    with closing(found):
        yield found
    communicator.close()


# Exchanges: one rank serves; each other one pushes what is added to the values, and pulls them.


class Exchange(Side):
    """A store of one rank's. Whole numbers are added, so that raw sums are exact."""

    ours, against = True, RPC

    def __init__(self, numel: int, codec: str):
        self.rank, self.workers, self.codec = dist.get_rank(), dist.get_world_size() - 1, codec
        self.wire_bytes = codecs.nbytes(codec, numel) * self.workers
        self.values = torch.zeros(numel)
        self.given = (torch.arange(numel) * 7 + 13 * self.rank).remainder(251).float() - 125

    @property
    def is_server(self) -> bool:
        return self.rank == SERVER

    def count_wrong(self) -> int:
        if self.is_server:
            return 0
        numbers = torch.arange(self.values.numel()) * 7
        shares = [(numbers + 13 * rank).remainder(251).float() - 125 for rank in range(1, self.workers + 1)]
        largest = CHECKED * 125.0
        lost = 0.0 if self.codec == "raw" else 3 * codecs.error_bound(self.codec).max * largest
        return count_wrong(self.values, CHECKED * torch.stack(shares).mean(0), lost)


class OurExchange(Exchange):
    def __init__(self, numel: int, codec: str):
        super().__init__(numel, codec)
        self.serving: threading.Thread | None = None
        if self.is_server:
            self.serving = threading.Thread(target=ps.serve)
            self.serving.start()
        else:
            self.store = ps.Store(servers=[SERVER], codec=codec)
            self.store.init({"values": self.values})
        dist.barrier()

    def call(self) -> None:
        if not self.is_server:
            self.store.push_pull({"values": self.given}, {"values": self.values}).wait()

    def close(self) -> None:
        self.serving.join() if self.serving else self.store.close()


class BatchServer:
    """The server of torch's tutorial on batch RPC processing: an update when all workers have sent their gradients."""

    here: "BatchServer"  # that of this process

    def __init__(self, numel: int, workers: int):
        self.lock, self.workers, self.count = threading.Lock(), workers, 0
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.parameters = [nn.Parameter(torch.zeros(numel))]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, maximize=True)
        for p in self.parameters:
            p.grad = torch.zeros_like(p)

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def update(gradients: list[Tensor]) -> "torch.futures.Future[list[Tensor]]":
        return BatchServer.here.add(gradients)

    def add(self, gradients: list[Tensor]) -> "torch.futures.Future[list[Tensor]]":
        with self.lock:
            self.count += 1
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.grad += gradient
            future = self.future
            if self.count >= self.workers:
                for p in self.parameters:
                    p.grad /= self.count
                self.count = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result([p.detach() for p in self.parameters])
                self.future = torch.futures.Future()
        return future


class RPCExchange(Exchange):
    ours, against = False, ""

    def __init__(self, numel: int):
        super().__init__(numel, "raw")
        self.wire_bytes = None
        if self.is_server:
            BatchServer.here = BatchServer(numel, self.workers)
        dist.barrier()

    def call(self) -> None:
        if not self.is_server:
            (self.values,) = rpc.rpc_sync("0", BatchServer.update, args=([self.given],))


class TorchftExchange(Exchange):
    """torchft's server: a process group of two for each worker, and a thread for each on the server."""

    ours, against = False, "ps.Store, raw"

    def __init__(self, numel: int):
        from torchft.parameter_server import ParameterServer
        from torchft.process_group import ProcessGroupGloo

        super().__init__(numel, "raw")
        self.wire_bytes, batch = None, BatchServer(numel, self.workers)

        class Server(ParameterServer):  # type: ignore[misc]
            @classmethod
            def new_process_group(cls) -> Any:
                return ProcessGroupGloo()

            def forward(self, session_id: str, pg: Any) -> None:
                gradient = torch.zeros(numel)
                with contextlib.suppress(RuntimeError):  # the worker has left
                    while True:
                        pg.recv([gradient], 1, tag=0).wait()
                        pg.send(batch.add([gradient]).wait(), 1, tag=0).wait()

        self.server = Server(port=0) if self.is_server else None
        if self.server:  # it writes to a connection that it has closed, and to the terminal
            self.server._server.handle_error = lambda *_: None
            self.server._server.RequestHandlerClass.log_message = lambda *_: None
        address = [self.server.address() if self.server else ""]
        dist.broadcast_object_list(address)
        self.pg = None if self.is_server else Server.new_session(address[0])
        dist.barrier()

    def call(self) -> None:
        if self.pg:
            self.pg.send([self.given], 0, tag=0).wait()
            self.pg.recv([self.values], 0, tag=0).wait()

    def close(self) -> None:
        if self.pg:
            self.pg.shutdown()


def why_not_torchft() -> str:
    """Return why torchft's server cannot be a side; "" if it can."""
    if given_rank():
        return "it connects by the names of hosts, which emulated ones share"
    return "" if importlib.util.find_spec("torchft") else "not installed: pip install torchft"


@contextlib.contextmanager
def remote_calls() -> Iterator[None]:
    """Connect all ranks by torch RPC, over the interface that Gloo has."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    host, place = os.environ.get("MASTER_ADDR", "127.0.0.1"), [""]
    if dist.get_rank() == SERVER:
        with socket.socket() as free:
            free.bind((host, 0))
            place = [f"tcp://{host}:{free.getsockname()[1]}"]
    dist.broadcast_object_list(place)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Emulated hosts share memory, which would be faster than their links.
    links = {"_transports": ["uv"], "_channels": ["basic"]} if os.environ.get("LOCAL_WORLD_SIZE") == "1" else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=place[0], rpc_timeout=DEADLINE / 2, **links)
    rpc.init_rpc(str(rank), rank=rank, world_size=ranks, rpc_backend_options=options)
    yield
    rpc.shutdown()


@contextlib.contextmanager
def remote_exchanges(workload: Workload, job: Job) -> Iterator[dict[str, Side]]:
    with remote_calls():
        yield {RPC: RPCExchange(workload.numel)}


@contextlib.contextmanager
def exchanges(workload: Workload, job: Job) -> Iterator[dict[str, Side]]:
    found: dict[str, Side] = {}
    if not why_not_torchft():
        found[TORCHFT] = TorchftExchange(workload.numel)
    for codec in job.codecs:
        found[f"ps.Store, {codec}"] = OurExchange(workload.numel, codec)
    with closing(found):
        yield found


# Updates: what a push costs its server, in one process.


class Update(Side):
    """AdamW, without a server."""

    ours = False

    def __init__(self, numel: int):
        self.count, self.codec = 0, "raw"
        self.given = [gradient_of(numel, 0, step) for step in range(CHECKED)]
        self.parameter = nn.Parameter(torch.ones(numel))
        self.parameter.grad = torch.zeros(numel)
        self.optimizer = optim.AdamW([self.parameter], lr=LR)

    def next(self) -> Tensor:
        self.count += 1
        return self.given[(self.count - 1) % CHECKED]

    def before(self) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(self.next())

    def call(self) -> None:
        self.optimizer.step()

    def values(self) -> Tensor:
        return self.parameter.detach()

    def count_wrong(self) -> int:
        """Compare with torch's AdamW on the decoded gradients, up to rounding."""
        expected = nn.Parameter(torch.ones(self.parameter.numel()))
        optimizer = torch.optim.AdamW([expected], lr=LR)
        for given in self.given:
            expected.grad = codecs.decode(codecs.encode(given, self.codec))
            optimizer.step()
        return count_wrong(self.values(), expected.detach(), 1e-6)


class ServedUpdate(Update):
    """A server that finds a worker's push in its mailbox: it decodes the push, and updates its values."""

    ours, against = True, ALONE

    def __init__(self, numel: int, codec: str):
        super().__init__(numel)
        self.codec = codec
        settings = Settings(
            servers=(0,),
            workers=(1,),
            keys=(Key("values", (numel,), 0),),
            optimizer="AdamW",
            groups=({"lr": LR},),
            staleness=None,
            quorum=1,
            lockstep=False,
            push_codec=codec,
            pull_codec="raw",
            delay_compensation=0.0,
            window=64,
            records=False,
        )
        blocks = blocks_of(settings)
        self.shard = shard_of(0, settings, blocks)
        assert self.shard is not None
        for value in self.shard.values:
            value.fill_(1.0)
        self.server, self.worker = make_nodes_here(settings, blocks, [self.shard, None])

    def before(self) -> None:
        self.worker.poll()
        clock = self.count
        self.worker.push(clock, [0], [self.next()], factor=1.0, rates=[LR], skips=False)

    def call(self) -> None:
        self.server.poll()

    def values(self) -> Tensor:
        assert self.shard is not None
        return torch.cat(self.shard.values)

    def close(self) -> None:
        for node in (self.worker, self.server):
            node.close(0.0)


@contextlib.contextmanager
def updates(workload: Workload, job: Job) -> Iterator[dict[str, Side]]:
    names = [ALONE, *(f"push and AdamW, {codec}" for codec in job.codecs)]
    if dist.get_rank() != 0:
        yield {name: Side() for name in names}
        return
    sides = [Update(workload.numel), *(ServedUpdate(workload.numel, codec) for codec in job.codecs)]
    found: dict[str, Side] = dict(zip(names, sides, strict=True))
    with closing(found):
        yield found


# Stragglers: steps that take longer at random, and what waits for them.


def mean_step(ends: Tensor) -> float:
    """Return the mean time of a step while all ranks make steps, from the times (ranks, steps) at which steps ended."""
    begin, end = float(ends[:, ends.shape[1] // 4].max()), float(ends[:, -1].min())
    if begin >= end:  # a rank had hardly begun when another one ended, so that the beginning counts, too
        begin = 0.0
    return len(ends) * (end - begin) / int(((ends > begin) & (ends <= end)).sum())


class Straggling(Side):
    """A call is many steps; its sample is the mean time of one, while no rank has ended and none has just begun."""

    def __init__(self, name: str, numel: int, job: Job):
        self.against = "" if name == SYNCHRONOUS else SYNCHRONOUS
        self.ours = name != SYNCHRONOUS
        self.samples = []
        self.calls, self.values, self.given = 0, torch.zeros(numel), torch.ones(numel)
        longer = torch.rand(job.steps, generator=torch.Generator().manual_seed(dist.get_rank())) < STRAGGLERS
        self.sleeps = [job.seconds * (LONGER if long else 1) for long in longer.tolist()]
        staleness = STALENESS[name]
        self.store = ps.Store(quorum="all" if staleness == 0 else 1, staleness=staleness)
        self.store.init({"values": self.values})

    def call(self) -> None:
        ends, began = [], time.perf_counter()
        for sleep in self.sleeps:
            time.sleep(sleep)
            self.store.push({"values": self.given}, weight=1.0)
            self.store.pull({"values": self.values}).wait()
            ends.append(time.perf_counter() - began)
        self.calls += 1
        rank, ranks = dist.get_rank(), dist.get_world_size()
        of_all = torch.zeros(ranks, len(ends), dtype=torch.float64)
        of_all[rank] = torch.tensor(ends, dtype=torch.float64)
        dist.all_reduce(of_all)
        assert self.samples is not None
        self.samples.append(mean_step(of_all))

    def count_wrong(self) -> int:
        """Pull after all ranks have ended, and compare with the number of all steps."""
        dist.barrier()
        self.store.pull({"values": self.values}).wait()
        steps = self.calls * len(self.sleeps) * dist.get_world_size()
        return count_wrong(self.values, torch.full_like(self.values, steps), 0.0, first_if_unlike(self.values))

    def close(self) -> None:
        self.store.close()


@contextlib.contextmanager
def stragglers(workload: Workload, job: Job) -> Iterator[dict[str, Side]]:
    found: dict[str, Side] = {name: Straggling(name, workload.numel, job) for name in STALENESS}
    with closing(found):
        yield found


@contextlib.contextmanager
def closing(sides: Mapping[str, Side]) -> Iterator[None]:
    yield  # after an error the processes end
    for side in sides.values():
        side.close()


Sides = Callable[[Workload, Job], contextlib.AbstractContextManager[dict[str, Side]]]
# Sides that disturb others are apart from them, and measured in turns: torch RPC keeps a core of each rank busy.
KINDS: dict[str, list[Sides]] = {
    "step": [steps],
    "exchange": [remote_exchanges, exchanges],
    "update": [updates],
    "stragglers": [stragglers],
}


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one workload after the other, the same on all ranks."""
    for index, workload in enumerate(job.workloads):

        def advance(done: float, index: int = index, workload: Workload = workload) -> None:
            progress(f"{workload.kind}, {ranks} ranks", (index + done) / len(job.workloads))

        yield measure_in_turns(rank, ranks, workload, job, advance)


def measure_in_turns(
    rank: int, ranks: int, workload: Workload, job: Job, advance: Callable[[float], None]
) -> list[Result]:
    apart = KINDS[workload.kind]
    turns = apart * (min(TURNS, job.rounds) if len(apart) > 1 else 1)
    part = job._replace(rounds=-(-job.rounds * len(apart) // len(turns)))
    results: dict[str, Result] = {}
    for turn, make_sides in enumerate(turns):

        def advance_turn(done: float, turn: int = turn) -> None:
            advance((turn + done) / len(turns))

        with make_sides(workload, part) as sides:
            for result in measure(rank, ranks, workload, sides, part, advance_turn):
                earlier = results.get(result.side)
                results[result.side] = earlier.joined(result) if earlier else result
    return [*results.values()]


def measure(
    rank: int, ranks: int, workload: Workload, sides: Mapping[str, Side], job: Job, advance: Callable[[float], None]
) -> list[Result]:
    """Check and time all sides."""
    counts = []
    for side in sides.values():
        for _ in range(1 if side.samples is not None else CHECKED):
            advance(0.0)
            side.before()
            dist.barrier()
            side.call()
        counts.append(side.count_wrong())
    wrong = dict(zip(sides, map(int, over_ranks(counts, "sum")), strict=True))
    right = {name: side for name, side in sides.items() if not wrong[name]}

    def before(name: str) -> None:
        if name in right:
            right[name].before()
        dist.barrier()

    rounds, warmup = (FEW, 0) if any(side.samples is not None for side in right.values()) else (job.rounds, job.warmup)
    timed = interleave(
        {name: side.call for name, side in right.items()} | link_probe.sides(rank, ranks, "cpu"),
        rounds=(rounds, rounds),
        warmup=warmup,
        before=before,
        progress=advance,
    )
    own = {name: side.samples[-rounds:] for name, side in right.items() if side.samples is not None}
    slowest = {name: over_ranks(samples, "max") for name, samples in (timed | own).items()}
    line = link_probe.rate(slowest.get(link_probe.SIDE, []))
    return [
        Result(workload, name, side.ours, side.against, wrong[name], side.wire_bytes, slowest.get(name, []), line)
        for name, side in sides.items()
    ]
