"""Runs the collectives of a torch.distributed group on connections of its own."""

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
from dltrain_ext.comm import timing, tuner
from dltrain_ext.comm.arguments import (
    IN_PLANS,
    check_devices,
    check_list,
    check_names,
    check_sent,
    check_tensors,
    check_timeout,
    checked_device,
    how_to_add,
)
from dltrain_ext.comm.connections import Connections
from dltrain_ext.comm.cost_model import Network
from dltrain_ext.comm.groups import Members, members_of
from dltrain_ext.comm.metrics import SENT, Bandwidths
from dltrain_ext.comm.selection import Selector
from dltrain_ext.comm.transports import check_transport
from dltrain_ext.comm.tuning import Tuning
from dltrain_ext.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class CallOptions(TypedDict, total=False):
    """The keyword arguments of the collectives; see :func:`dltrain_ext.comm.all_reduce`."""

    algorithm: str
    codec: str
    residual: torch.Tensor | None
    rounding: str
    seed: int
    step: int | None
    segments: int | None
    async_op: bool


_USUAL_OPTIONS: CallOptions = {
    "algorithm": "auto",
    "codec": "raw",
    "residual": None,
    "rounding": "nearest",
    "seed": 0,
    "step": None,
    "segments": None,
    "async_op": False,
}


class Communicator:
    """Runs the collectives of one group, in the order of the calls, on connections of its own.

    CPU tensors are sent over Gloo, and CUDA tensors over NCCL. Calls with CUDA tensors only enqueue work: no host
    waits, and the result is ordered with the current stream. The first call with a tensor on a device connects for that
    device.

    If there are several hosts, and several ranks on one of them, all-reduces have two levels: the ranks of a host add
    up their tensors, and each of them takes one shard of the sum between hosts, with the algorithm and the codec of the
    call. So a host's link carries what one rank would send. There are as many shards as the smallest host has ranks;
    the other ranks of larger hosts have none.

    ``torch.profiler`` shows each call like torch's own collectives: as a range ``record_param_comms`` with the name of
    the collective, the number and dtype of its elements, and the group.

    Making a communicator is a collective call: all ranks of the group make their communicators in the same order.

    Args:
        group: the process group, with any backend; the default group if None.
        timeout: how long an all-reduce, and the making itself, may wait for the peers; the group's own timeout if None.
        transport: what carries the messages. Of CUDA tensors: ``"nccl"``, an NCCL communicator of its own, whose
            messages are grouped launches on a stream of this object, also in CUDA graphs; or ``"c10d"``,
            torch.distributed's connections. Of CPU tensors: ``"shm"``, memory that the ranks of a host share, and Gloo
            between hosts; or ``"gloo"``. ``"auto"``: the environment variable ``DLTRAIN_TRANSPORT``, if it is set;
            otherwise the first of these that all ranks can use, with a warning if it is the second. What is for another
            type of device is as ``"auto"``.
        ranks_per_host: the number of consecutive ranks of the group that share a host; 1 for all-reduces in one level.
            None identifies hosts by the machine and its network namespace.
        tuning: what ``algorithm="auto"`` and ``codec="auto"`` use: a :class:`Tuning`, or the path of a saved one, for
            this number of ranks, and the same on all of them. For ``"auto"`` the environment variables
            ``DLTRAIN_TUNING`` (a path), ``DLTRAIN_ALGORITHM`` and ``DLTRAIN_SEGMENTS`` override it. Without a tuning
            the first all-reduce with ``algorithm="auto"`` on the CPU times some plans, for about 50 ms. On CUDA, and if
            ``torch.use_deterministic_algorithms`` is on, the plan is selected by size only.
        answer_timeout: the least time that a rank has, after a call has failed, to report what it waits for, which a
            thread of its own does; a rank that does not is reported as stopped. The time is longer if round trips to
            the group's store, or answers of other ranks, take long: eight times what TCP would estimate (RFC 6298).
        ranks: the global ranks, of those in the group, that communicate, this one among them; all if None. The others
            make no communicator.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: a rank did not come, or cannot use the transport; the message names it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Members | None = None,
        *,
        timeout: timedelta | None = None,
        transport: str = "auto",
        ranks_per_host: int | None = None,
        tuning: "Tuning | str | os.PathLike[str] | None" = None,
        answer_timeout: timedelta = timedelta(milliseconds=500),
        ranks: Sequence[int] | None = None,
    ):
        check_timeout(timeout, "timeout", or_none=True)
        check_timeout(answer_timeout, "answer_timeout")
        check_transport(transport, "transport")
        if transport == "auto" and (override := os.environ.get("DLTRAIN_TRANSPORT")) is not None:
            check_transport(override, "DLTRAIN_TRANSPORT")
            transport = override
        if ranks_per_host is not None and (type(ranks_per_host) is not int or ranks_per_host < 1):
            raise ValueError(f"ranks_per_host: expected an int of at least 1, or None, got {ranks_per_host!r}")
        members = members_of(group, ranks)
        timeout = members.timeout if timeout is None else timeout
        self._ranks, self._rank, self._world_size = members.ranks, members.index, len(members.ranks)
        self._selector = Selector(tuning, self._world_size)
        measures = self._selector.may_measure
        self._connections = Connections(members, timeout, transport, ranks_per_host, answer_timeout, measures)
        self._by_device: dict[torch.device, _ops.Communicator] = {}
        self._numbers = itertools.count(1)  # of the calls
        self._measuring = collections.Counter[str]()  # what stats() must not count
        self._bandwidths = Bandwidths()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._close = weakref.finalize(self, _close, self._by_device, self._connections)
        if len(set(self._connections.rendezvous.exchange(f"{transport} {self._selector.digest}"))) > 1:
            raise ValueError("transport, tuning, DLTRAIN_ALGORITHM, DLTRAIN_SEGMENTS: expected the same on all ranks")
        self._device = members.device
        self._on(self._device)

    def __del__(self) -> None:
        for communicator in getattr(self, "_by_device", {}).values():
            communicator.drain()  # the results of enqueued calls are still needed

    def drain(self) -> None:
        """Returns when the calls that were enqueued on CUDA devices are done, so that :meth:`close` spoils no result.

        Raises:
            torch.distributed.DistBackendError: a call has failed.

        :meta private:
        """
        for communicator in self._by_device.values():
            if reason := communicator.drain():
                raise dist.DistBackendError(reason)

    def check_process(self) -> None:
        """Raises RuntimeError in a child of fork(), which has none of the threads, and does not own the connections."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"communicator: expected to be used in process {self._process}, which made it, got a call in process "
                f"{os.getpid()}, forked from that; start processes by spawn, or make a group and a communicator in each"
            )

    def _on(self, device: torch.device) -> "_ops.Communicator":
        self.check_process()
        if not self._close.alive:
            raise dist.DistBackendError("the communicator was closed")
        if (connected := self._by_device.get(device)) is not None:
            return connected
        with self._lock:
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
        """Runs :func:`dltrain_ext.comm.all_reduce` on this communicator."""
        check_tensors(tensor=tensor, residual=residual)
        average, stochastic = how_to_add(op, rounding, algorithm, codec, seed, segments)
        device = checked_device(tensor)
        if codec == "auto" and residual is not None:
            raise ValueError("codec: expected one by its name where there is a residual, got 'auto'")
        nbytes, fits, chosen = 4 * tensor.numel(), tensor.dtype in IN_PLANS, None
        if codec == "auto":
            algorithm, codec = self.codec_for(nbytes, algorithm, tensor.dtype) if fits else (algorithm, "raw")
        if algorithm == "auto" and fits:
            algorithm, chosen = self._selector.plan_for(codec, nbytes)
        return self._start(
            tensor,
            device,
            async_op,
            step,
            algorithm=algorithm,
            codec=codec,
            average=average,
            residual=residual,
            stochastic=stochastic,
            seed=seed,
            segments=segments or chosen or 0,
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Tensors,
        op: "str | dist.ReduceOp" = "sum",
        **options: "Unpack[CallOptions]",
    ) -> Work | None:
        """Runs :func:`dltrain_ext.comm.reduce_scatter` on this communicator, which must have one level."""
        check_tensors(output=output)
        if not isinstance(input, list | tuple):
            return self._run("reduce_scatter", "input", input, options, op=op, shard=output)
        check_list(input, "input")
        whole = torch.cat([part.flatten() for part in input])
        return self._run("reduce_scatter", "input", whole, options, op=op, shard=output, sizes=_sizes(input))

    def all_gather(
        self, output: torch.Tensor | Tensors, input: torch.Tensor, **options: "Unpack[CallOptions]"
    ) -> Work | None:
        """Runs :func:`dltrain_ext.comm.all_gather` on this communicator, which must have one level."""
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
        torch.autograd.graph.increment_version(parts)  # now, as for a single tensor, though the copies are made later
        return work.then(share_out)

    def broadcast(self, tensor: torch.Tensor, src: int, **options: "Unpack[CallOptions]") -> Work | None:
        """Runs :func:`dltrain_ext.comm.broadcast` on this communicator, which must have one level."""
        return self._run("broadcast", "tensor", tensor, options, root=self._group_rank(src, "src"))

    def reduce(
        self, tensor: torch.Tensor, dst: int, op: "str | dist.ReduceOp" = "sum", **options: "Unpack[CallOptions]"
    ) -> Work | None:
        """Runs :func:`dltrain_ext.comm.reduce` on this communicator, which must have one level."""
        return self._run("reduce", "tensor", tensor, options, op=op, root=self._group_rank(dst, "dst"))

    def _group_rank(self, rank: int, name: str) -> int:
        if type(rank) is not int or rank not in self._ranks:
            raise ValueError(f"{name}: expected a rank of the group, one of {self._ranks}, got {rank!r}")
        return self._ranks.index(rank)

    def _run(self, collective: str, name: str, tensor: torch.Tensor, options: CallOptions, **own: Any) -> Work | None:
        """Checks what C++ does not check, and runs a collective on a tensor; ``name`` is that of its argument."""
        if unknown := options.keys() - _USUAL_OPTIONS.keys():
            raise TypeError(f"{collective}: expected the options {', '.join(_USUAL_OPTIONS)}, got {', '.join(unknown)}")
        check_tensors(**{name: tensor}, residual=options.get("residual"))
        call: dict[str, Any] = {"op": "sum", **_USUAL_OPTIONS, **own, **options}
        op, rounding, async_op, step, segments = map(call.pop, ("op", "rounding", "async_op", "step", "segments"))
        average, stochastic = how_to_add(op, rounding, call["algorithm"], call["codec"], call["seed"], segments)
        call.update(collective=collective, average=average, stochastic=stochastic, segments=segments or 0)
        return self._start(tensor, checked_device(tensor, name), async_op, step, **call)

    def _start(
        self, tensor: torch.Tensor, device: torch.device, async_op: bool, step: int | None, **options: Any
    ) -> Work | None:
        if step is None:
            step = next(self._numbers) % 2**32
        else:
            check_number(step, "step", 2**32)
        communicator = self._on(device)
        if async_op:
            return self._submit(communicator, tensor, step=step, **options)
        communicator.run(tensor, step=step, **options)
        return None

    def run_bucket(self, tensor: torch.Tensor, bucket: _ops.BucketState, **options: Any) -> None:
        """Is called by the hooks, also for other collectives than all-reduces."""
        self._on(checked_device(tensor)).run(tensor, bucket=bucket, **options)

    def submit_bucket(self, tensor: torch.Tensor, bucket: _ops.BucketState, **options: Any) -> Work:
        """Does the same in the worker's thread; on CUDA it enqueues the work on a stream of this object."""
        return self._submit(self._on(checked_device(tensor)), tensor, bucket=bucket, **options)

    def _submit(self, by: "_ops.Communicator", tensor: torch.Tensor, **options: Any) -> Work:
        return Work(by.submit(tensor, **options), by.wait, self)

    def tune(self, *, seconds: float = 10.0, codecs: Sequence[str] | None = None) -> Tuning:
        """Measures the group. From then on ``algorithm="auto"`` and ``codec="auto"`` use the result. This is a
        collective call.

        A few all-reduces are timed, and the latency, the bandwidth and the costs of messages and copies are fitted to
        them, with the model of :mod:`dltrain_ext.sim`. Codecs are timed on each rank. Then the plans and numbers of
        segments that are the fastest by the model are timed, as many as there is time for, those that are close to the
        fastest again, and the fastest are entered in a table. Times between the measured sizes are interpolated, and
        beyond them they are the model's, corrected by its error at the largest measured size. Rank 0 decides for all.

        Args:
            seconds: about how long plans may be timed; the calibration takes some more seconds.
            codecs: the codecs to time beside raw; all if None.

        Returns:
            The :class:`Tuning`, the same on all ranks, which is also the property ``tuning``. Save it with ``save``,
            and pass it to the next run.
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
            segment_bytes, levels = self._on(self._device).segment_bytes, 1 if per_host == 1 else 2
            tuning = tuner.tune(group, start, levels, names, seconds, segment_bytes)
        self._selector.use(tuning)
        return tuning

    @contextlib.contextmanager
    def _measured(self) -> Iterator[timing.Group]:
        """What is sent in this context is not counted."""
        before = self._counted()
        yield timing.Group(self._rank, self._world_size, self._device, self._try, self._connections.rendezvous.exchange)
        measured = self._counted()
        measured.subtract(before)
        self._measuring.update(measured)

    def connect(self, numel: int, dtype: torch.dtype, *, codec: str, algorithm: str, segments: int | None) -> None:
        """Connects on CUDA the ranks that such an all-reduce requires, so that the first one does not block its caller
        until all ranks make it. This is a collective call."""
        if self._device.type == "cpu":
            return  # the CPU's connections exist
        with self._measured():
            tensor = torch.zeros(numel, dtype=dtype, device=self._device)
            self.all_reduce(tensor, algorithm=algorithm, codec=codec, segments=segments)
        timing.synchronize(self._device)

    def _try(self, tensor: torch.Tensor, trial: timing.Trial) -> None:
        codec = "raw" if trial.codec == "native" else trial.codec
        self.all_reduce(tensor, algorithm=trial.algorithm, codec=codec, segments=trial.segments, step=0)

    @property
    def culprit(self) -> int | None:
        """The global rank that is responsible for the failure of the calls, as their error says: it has left, does not
        answer or has not made the call. None if there is none, or none is known."""
        found = (communicator.culprit() for communicator in self._by_device.values())
        return next((rank for rank in found if rank is not None), None)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def tuning(self) -> Tuning | None:
        """The tuning that ``"auto"`` uses; None before there is one."""
        return self._selector.tuning

    @property
    def usual_plan(self) -> str:
        """The plan for large tensors if nothing was measured and runs are to have the same bits.

        ``"direct"`` has the fewest rounds, on CUDA a fifth of the ring's launches, and adds what others have written to
        shared memory where it lies. Over Gloo the ring was a little faster on up to 8 ranks, although each of its hops
        encodes again.
        """
        if self._device.type != "cpu" or self._world_size > 8:
            return "direct"
        over_gloo = self._on(self._device).segment_bytes == 0  # only shared memory asks for segments of a size
        return "ring" if over_gloo else "direct"

    def plan_for(self, codec: str, nbytes: int) -> tuple[str, int | None]:
        """Returns what ``algorithm="auto"`` stands for, with tensors of ``nbytes`` bytes in fp32: a plan, which is
        ``"auto"`` before tuning, and the number of segments, which is None if it is not decided."""
        check_names("auto", codec)
        check_number(nbytes, "nbytes", 2**65)
        return self._selector.plan_for(codec, nbytes)

    def codec_for(self, nbytes: int, algorithm: str = "auto", dtype: torch.dtype = torch.float32) -> tuple[str, str]:
        """Returns what ``codec="auto"`` stands for, with tensors of that dtype and ``nbytes`` bytes in fp32: an
        algorithm, which is ``"native"`` if compression is slower than the backend's own all-reduce of that dtype, and a
        codec. Without a tuning the first call for tensors of about that size times codecs and plans for about a second;
        it is collective."""
        check_sent(nbytes, algorithm, dtype)
        return self._selector.codec_for(nbytes, algorithm, dtype, self._measured, warns=self._rank == 0)

    def times_for(self, nbytes: int, algorithm: str = "auto", dtype: torch.dtype = torch.float32) -> dict[str, float]:
        """Returns the seconds of an all-reduce by the codecs that ``codec="auto"`` can be, and by ``"native"``, the
        backend's own all-reduce; nothing if it can only be raw. The arguments are those of :meth:`codec_for`. Without a
        tuning the first call for tensors of about that size times codecs for about half a second; it is collective."""
        check_sent(nbytes, algorithm, dtype)
        return self._selector.times_for(nbytes, algorithm, dtype, self._measured)

    def stats(self) -> dict[str, int]:
        """Returns the number of ``calls`` completed (on CUDA: enqueued), and the bytes that this rank has sent:
        ``wire_bytes`` (in two levels: between hosts) and ``inside_bytes`` (within its host). Headers, what a backend
        sends by itself, and measurements are not counted."""
        counted = self.counted()
        return {name: int(counted[name]) for name in SENT}

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger: ``comm/calls``, ``comm/wire_bytes`` and ``comm/inside_bytes``, the entries of
        :meth:`stats`; ``comm/seconds``, in which calls were running; and ``comm/algbw`` and ``comm/busbw`` since the
        previous call, the bytes of the tensors per second of running, in 10^9 bytes per second, and the same times the
        factor by which nccl-tests make collectives and numbers of ranks comparable.

        On CUDA calls only enqueue work, so ``comm/seconds`` is 0 and there are no bandwidths; ``torch.profiler`` shows
        them."""
        return self._bandwidths.metrics(self.counted())

    def counted(self) -> "collections.Counter[str]":
        """Returns what C++ has counted, without measurements."""
        total = self._counted()
        total.subtract(self._measuring)
        return total

    def _counted(self) -> "collections.Counter[str]":
        total = collections.Counter[str](dict.fromkeys((*SENT, "seconds", "tensor_bytes", "bus_bytes"), 0))
        for communicator in self._by_device.values():
            total.update(communicator.stats())
        return total

    def close(self) -> None:
        """Fails the calls that are running and all later ones, immediately. The end of the process does the same."""
        self._close()


def _sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _close(communicators: "dict[torch.device, _ops.Communicator]", connections: Connections) -> None:
    for communicator in communicators.values():
        communicator.close()
    connections.close()
