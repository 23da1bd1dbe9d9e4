"""A torch.distributed group on connections of its own, over which it runs its collectives."""

import collections
import contextlib
import itertools
import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext._arguments import check_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.codecs.arguments import is_stochastic
from dltrain_ext.comm import timing, tuner
from dltrain_ext.comm.arguments import (
    IN_PLANS,
    check_devices,
    check_list,
    check_names,
    check_options,
    check_tensors,
    checked_device,
    is_average,
)
from dltrain_ext.comm.connections import Connections
from dltrain_ext.comm.cost_model import Network
from dltrain_ext.comm.groups import device_of, group_of
from dltrain_ext.comm.selection import Selector
from dltrain_ext.comm.transports import TRANSPORTS
from dltrain_ext.comm.tuning import Tuning
from dltrain_ext.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class CallOptions(TypedDict, total=False):
    """What the collectives take by name; see :func:`dltrain_ext.comm.all_reduce`."""

    algorithm: str
    codec: str
    residual: torch.Tensor | None
    rounding: str
    seed: int
    step: int | None
    segments: int | None
    async_op: bool


_CALL_OPTIONS = CallOptions.__annotations__.keys()


class Communicator:
    """Runs the collectives of one group, in the order of the calls, on connections of its own.

    CPU tensors go over Gloo. CUDA tensors go over NCCL: their calls enqueue, no host waits, and the result is there in
    the order of the current stream; connections for a device are made by the first call with a tensor on it.

    Where there are several hosts, and several ranks on one of them, all-reduces go in two levels: the ranks of a host
    add up their parts, and each takes one share of the sum across the hosts, by the algorithm and the codec of the
    call. So a host's link carries what one rank would send. There are as many shares as the smallest host has ranks;
    the other ranks of a larger one have none.

    ``torch.profiler`` shows each call as it shows torch's own collectives: a range ``record_param_comms`` with the
    collective's name, its elements, their dtype, and the group.

    Making one is a collective call: every rank of the group makes its communicators in the same order.

    Args:
        group: the ranks; the default group where None. Its own backend may be any.
        timeout: how long one all-reduce, and the making itself, may wait for the peers; the group's own where None.
        transport: what carries messages of CUDA tensors: ``"nccl"``, a communicator of NCCL's own, whose messages are
            grouped launches on a stream of this object, also in CUDA graphs; ``"c10d"``, torch.distributed's
            connections; ``"auto"``: the first where all ranks have it, else the second, with a warning.
        ranks_per_host: so many neighbouring ranks of the group share a host: 1 for all-reduces in one level. Where
            None, hosts are told apart by the machine and its network namespace.
        tuning: what ``algorithm="auto"`` and ``codec="auto"`` go by: a :class:`Tuning`, or the path of a saved one, of
            this many ranks and the same on all of them. The environment variables ``DLTRAIN_TUNING``, a path,
            ``DLTRAIN_ALGORITHM`` and ``DLTRAIN_SEGMENTS`` stand above it, for ``"auto"`` alone. Without one, the first
            all-reduce on the CPU by ``algorithm="auto"`` times some plans, for about 50 ms; not so where
            ``torch.use_deterministic_algorithms`` is on, and on CUDA: there the plan goes by size alone.
        answer_timeout: how long a rank may at least take, when a call has failed, to answer what it is waiting for,
            which a thread of its own does: one that has not is taken for stopped. Where the way to the group's store
            and back, or other ranks' answers, take long it is more: eight times what TCP would estimate (RFC 6298).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        torch.distributed.DistBackendError: a rank did not come, or the transport cannot be had on a rank; names it.
    """

    _made: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]" = weakref.WeakKeyDictionary()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        transport: str = "auto",
        ranks_per_host: int | None = None,
        tuning: "Tuning | str | os.PathLike[str] | None" = None,
        answer_timeout: timedelta = timedelta(milliseconds=500),
    ):
        group = group_of(group)
        timeout = timedelta(seconds=_ops.timeout_of(group)) if timeout is None else timeout
        if not _is_timeout(timeout):
            raise ValueError(f"timeout: expected a datetime.timedelta of 1 ms to 365 days, or None, got {timeout!r}")
        if not _is_timeout(answer_timeout):
            raise ValueError(
                f"answer_timeout: expected a datetime.timedelta of 1 ms to 365 days, got {answer_timeout!r}"
            )
        if not isinstance(transport, str) or transport not in TRANSPORTS:
            raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if ranks_per_host is not None and (type(ranks_per_host) is not int or ranks_per_host < 1):
            raise ValueError(f"ranks_per_host: expected an int of at least 1, or None, got {ranks_per_host!r}")
        ranks = dist.get_process_group_ranks(group)
        self._selector = Selector(tuning, len(ranks))
        self._ranks, self._rank, self._world_size = ranks, ranks.index(dist.get_rank()), len(ranks)
        number = next(self._made.setdefault(group, itertools.count()))
        store = dist.PrefixStore(f"dltrain_ext/{group.group_name}/{number}", group.get_group_store())
        members = _ops.Ranks(group.group_name, group.group_desc, ranks, self._rank)
        measures = self._selector.may_measure
        self._connections = Connections(store, members, timeout, transport, ranks_per_host, answer_timeout, measures)
        self._by_device: dict[torch.device, _ops.Communicator] = {}
        self._numbers = itertools.count(1)  # of the calls
        self._measuring = collections.Counter[str]()  # what stats() would count of it
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._close = weakref.finalize(self, _close, self._by_device, self._connections)
        if len(set(self._connections.rendezvous.exchange(self._selector.digest))) > 1:
            raise ValueError(
                "tuning, DLTRAIN_TUNING, DLTRAIN_ALGORITHM, DLTRAIN_SEGMENTS: expected the same on all ranks"
            )
        self._device = device_of(group)
        self._on(self._device)

    def __del__(self) -> None:
        for communicator in getattr(self, "_by_device", {}).values():
            communicator.drain()  # what is enqueued is somebody's result

    def check_process(self) -> None:
        """Raises RuntimeError in a child of fork(), which has none of the threads, and whose connections are not its
        own."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"communicator: expected to be used in process {self._process}, which made it, got a call in process "
                f"{os.getpid()}, forked from that; start processes by spawn, or make a group and a communicator in each"
            )

    def _on(self, device: torch.device) -> "_ops.Communicator":
        self.check_process()
        with self._lock:
            if not self._close.alive:
                raise dist.DistBackendError("the communicator was closed")
            if device not in self._by_device:
                self._by_device[device] = self._connections.connect(device)
            return self._by_device[device]

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "str | dist.ReduceOp" = "sum",
        *,
        algorithm: str = "auto",
        codec: str = "raw",
        residual: torch.Tensor | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        step: int | None = None,
        segments: int | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """:func:`dltrain_ext.comm.all_reduce` on this communicator."""
        check_tensors(tensor=tensor, residual=residual)
        check_options(algorithm, codec, seed, step, segments)
        device = checked_device(tensor)
        if codec == "auto" and residual is not None:
            raise ValueError("codec: expected one by its name where there is a residual, got 'auto'")
        nbytes, fits, chosen = 4 * tensor.numel(), tensor.dtype in IN_PLANS, None
        if codec == "auto":
            algorithm, codec = self.codec_for(nbytes, algorithm, tensor.dtype) if fits else (algorithm, "raw")
        if algorithm == "auto" and fits:
            algorithm, chosen = self.plan_for(codec, nbytes)
        return self._start(
            tensor,
            device,
            op=op,
            algorithm=algorithm,
            codec=codec,
            residual=residual,
            rounding=rounding,
            seed=seed,
            step=step,
            segments=segments or chosen,
            async_op=async_op,
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Tensors,
        op: "str | dist.ReduceOp" = "sum",
        **options: "Unpack[CallOptions]",
    ) -> Work | None:
        """:func:`dltrain_ext.comm.reduce_scatter` on this communicator, which must not be in two levels."""
        check_tensors(output=output)
        if not isinstance(input, list | tuple):
            return self._run("reduce_scatter", "input", input, options, op=op, shard=output)
        check_list(input, "input")
        whole = torch.cat([part.flatten() for part in input])
        return self._run("reduce_scatter", "input", whole, options, op=op, shard=output, sizes=_sizes(input))

    def all_gather(
        self, output: torch.Tensor | Tensors, input: torch.Tensor, **options: "Unpack[CallOptions]"
    ) -> Work | None:
        """:func:`dltrain_ext.comm.all_gather` on this communicator, which must not be in two levels."""
        check_tensors(input=input)
        if not isinstance(output, list | tuple):
            return self._run("all_gather", "output", output, options, shard=input)
        check_list(output, "output")
        check_devices(output, "output")
        parts, sizes = output, _sizes(output)
        whole = parts[0].new_empty(sum(sizes))

        def share_out() -> Tensors:
            for part, found in zip(parts, torch.split(whole, sizes), strict=True):
                if part.is_cuda:
                    part.record_stream(torch.cuda.current_stream(part.device))
                part.detach().copy_(found.view(part.shape))
            return list(parts)

        work = self._run("all_gather", "output", whole, options, shard=input, sizes=sizes)
        if work is None:
            share_out()
            return None
        torch.autograd.graph.increment_version(parts)  # now, as for a single tensor: the copies come when they come
        return work.then(share_out)

    def broadcast(self, tensor: torch.Tensor, src: int, **options: "Unpack[CallOptions]") -> Work | None:
        """:func:`dltrain_ext.comm.broadcast` on this communicator, which must not be in two levels."""
        return self._run("broadcast", "tensor", tensor, options, root=self._group_rank(src, "src"))

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: "str | dist.ReduceOp" = "sum", **options: "Unpack[CallOptions]"
    ) -> Work | None:
        """:func:`dltrain_ext.comm.reduce` on this communicator, which must not be in two levels."""
        return self._run("reduce", "tensor", tensor, options, op=op, root=self._group_rank(dst, "dst"))

    def _group_rank(self, rank: int, name: str) -> int:
        if type(rank) is not int or rank not in self._ranks:
            raise ValueError(f"{name}: expected a rank of the group, one of {self._ranks}, got {rank!r}")
        return self._ranks.index(rank)

    def _run(self, collective: str, name: str, tensor: torch.Tensor, options: CallOptions, **own: Any) -> Work | None:
        """Of a tensor that is called so, and checks what is not checked in C++."""
        get: Any = options.get
        if unknown := options.keys() - _CALL_OPTIONS:
            raise TypeError(f"{collective}: expected the options {', '.join(_CALL_OPTIONS)}, got {', '.join(unknown)}")
        check_tensors(**{name: tensor}, residual=get("residual"))
        check_options(get("algorithm", "auto"), get("codec", "raw"), get("seed", 0), get("step"), get("segments"))
        return self._start(tensor, checked_device(tensor, name), collective=collective, **own, **options)

    def _start(
        self,
        tensor: torch.Tensor,
        place: torch.device,
        *,
        op: "str | dist.ReduceOp" = "sum",
        rounding: str = "nearest",
        step: int | None = None,
        segments: int | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> Work | None:
        options["step"] = next(self._numbers) % 2**32 if step is None else step
        options.update(average=is_average(op), stochastic=is_stochastic(rounding), segments=segments or 0)
        communicator = self._on(place)
        if async_op:
            return self._submit(communicator, tensor, **options)
        communicator.run(tensor, **options)
        return None

    def reduce_bucket(self, tensor: torch.Tensor, bucket: _ops.BucketState, **options: Any) -> Work:
        """What the hooks call: hands the tensor to the worker, or enqueues."""
        return self._submit(self._on(checked_device(tensor)), tensor, bucket=bucket, **options)

    def _submit(self, by: "_ops.Communicator", tensor: torch.Tensor, **options: Any) -> Work:
        return Work(by.submit(tensor, **options), by.wait, self)

    def tune(self, *, seconds: float = 10.0, codecs: Sequence[str] | None = None) -> Tuning:
        """Measures the group, and from then on lets ``algorithm="auto"`` and ``codec="auto"`` go by it. Collective.

        A few all-reduces are timed, and the latency, the bandwidth and the costs of messages and copies with which the
        model of :mod:`dltrain_ext.sim` comes closest to them; codecs are timed on each rank. Of all plans and numbers
        of segments those that the model takes for the fastest are then timed, as many as there is time for, and the
        fastest makes the table. Between the sizes that were timed it draws a line; beyond them the model speaks,
        corrected by how far it was off at the largest. Rank 0 decides for all.

        Args:
            seconds: about how long it may try out plans; some more go to the calibration.
            codecs: those to look at beside raw; all where None.

        Returns:
            The same on all ranks, and kept as ``tuning``; print it, ``save`` it, and give it to the next run.
        """
        self.check_process()
        if not isinstance(codecs, Sequence | None):
            raise TypeError(f"codecs: expected a sequence of names or None, got {codecs!r}")
        for codec in codecs or ():
            check_names("auto", codec)
        names = [codec for codec in (CODECS if codecs is None else codecs) if codec != "raw"]
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds: expected a number of at least 0, got {seconds!r}")
        per_host = self._connections.ranks_per_host
        start = Network(latency=1e-4, bandwidth=1e9, overhead=1e-5, copy=1e-10, ranks_per_host=per_host)
        with self._measured() as group, self._connections.rendezvous.at_work():
            self._selector.tuning = tuner.tune(group, start, 1 if per_host == 1 else 2, names, seconds)
        return self._selector.tuning

    @contextlib.contextmanager
    def _measured(self) -> Iterator[timing.Group]:
        """What is sent meanwhile does not count."""
        before = self._counted()
        yield timing.Group(self._rank, self._world_size, self._device, self._try, self._connections.rendezvous.exchange)
        self._measuring.update(self._counted() - before)

    def connect(self, numel: int, dtype: torch.dtype, *, codec: str, algorithm: str, segments: int | None) -> None:
        """Has those connect, on CUDA, that such an all-reduce needs, so that the first one does not keep its caller
        until all ranks have come to theirs. Collective."""
        if self._device.type == "cpu":
            return  # whose connections are there
        with self._measured():
            tensor = torch.zeros(numel, dtype=dtype, device=self._device)
            self.all_reduce(tensor, algorithm=algorithm, codec=codec, segments=segments)
        timing.synchronize(self._device)

    def _try(self, tensor: torch.Tensor, trial: timing.Trial) -> None:
        codec = "raw" if trial.codec == "native" else trial.codec
        self.all_reduce(tensor, algorithm=trial.algorithm, codec=codec, segments=trial.segments, step=0)

    @property
    def tuning(self) -> Tuning | None:
        """What ``"auto"`` goes by; None before there is one."""
        return self._selector.tuning

    @property
    def usual_plan(self) -> str:
        """For large tensors, where nothing was measured and runs are to have the same bits.

        ``"direct"`` has the fewest rounds, and on CUDA a fifth of the ring's launches. On the CPU the ring was a little
        faster on up to 8 ranks; each of its hops encodes once more.
        """
        return "ring" if self._device.type == "cpu" and self._world_size <= 8 else "direct"

    def plan_for(self, codec: str, nbytes: int) -> tuple[str, int | None]:
        """What ``algorithm="auto"`` stands for, with tensors of so many bytes in fp32: a plan, and the number of
        segments where that is decided; ``"auto"`` before tuning."""
        check_names("auto", codec)
        check_number(nbytes, "nbytes", 2**65)
        return self._selector.plan_for(codec, nbytes)

    def codec_for(self, nbytes: int, algorithm: str = "auto", dtype: torch.dtype = torch.float32) -> tuple[str, str]:
        """What ``codec="auto"`` stands for, with tensors of so many bytes in fp32 that are in that dtype, behind the
        algorithm to go with it: ``"native"`` where compressing would lose against the backend's own all-reduce of that
        dtype. Without a tuning the first call for tensors of about that size times the codecs, and plans, for about a
        second: collective."""
        check_names(algorithm, "raw")
        check_number(nbytes, "nbytes", 2**65)
        if not isinstance(dtype, torch.dtype) or dtype not in IN_PLANS:
            raise ValueError(f"dtype: expected torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}")
        return self._selector.codec_for(nbytes, algorithm, dtype, self._measured, tells=self._rank == 0)

    def stats(self) -> dict[str, int]:
        """``calls`` completed (on CUDA: enqueued) and ``wire_bytes`` sent by this rank, in two levels across the hosts;
        ``inside_bytes`` are those inside its host. Headers, what a backend sends by itself, and measuring are not
        counted."""
        total = self._counted()
        total.subtract(self._measuring)
        return dict(total)

    def _counted(self) -> "collections.Counter[str]":
        total = collections.Counter(calls=0, wire_bytes=0, inside_bytes=0)
        for communicator in self._by_device.values():
            total.update(communicator.stats())
        return total

    def close(self) -> None:
        """Fails what is under way and every later call, at once. Leaving the process does the same."""
        self._close()


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _is_timeout(value: object) -> bool:
    return isinstance(value, timedelta) and timedelta(milliseconds=1) <= value <= timedelta(days=365)


def _close(communicators: "dict[torch.device, _ops.Communicator]", connections: Connections) -> None:
    for communicator in communicators.values():
        communicator.close()
    connections.close()
