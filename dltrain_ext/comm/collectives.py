"""Collectives like those of torch.distributed. The first call on a group makes its communicator."""

import weakref

import torch
import torch.distributed as dist
from torch import library

from dltrain_ext.comm.communicator import Communicator, Tensors
from dltrain_ext.comm.groups import group_named, group_of
from dltrain_ext.comm.work import Work

_Communicators = weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]
_all_reducing: _Communicators = weakref.WeakKeyDictionary()
_in_one_level: _Communicators = weakref.WeakKeyDictionary()  # for all other collectives


def all_reduce(
    tensor: torch.Tensor,
    op: "str | dist.ReduceOp" = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sums or averages a tensor over the ranks of a group, in place, like ``torch.distributed.all_reduce``.

    Sums are computed in fp32, whatever the tensor's dtype, and every rank gets the same bits. A NaN or an infinity
    anywhere in a codec's block makes that block NaN on every rank. The first call on a group is collective: it makes
    the group's communicator.

    Args:
        tensor: float32, float16 or bfloat16 on the CPU or a CUDA device, of any shape (also empty), the same on all
            ranks. With the codec ``"raw"`` and the algorithms ``"native"`` or ``"auto"`` also float64, uint8, int8,
            int32 or int64, which fp32 cannot represent, and which the backend reduces.
        op: ``"sum"``, ``"avg"`` or the ``ReduceOp`` of that name. For an average each contribution is scaled before it
            is encoded.
        group: the process group; the default group if None.
        algorithm: one of ``comm.ALGORITHMS``; ``"butterfly"``, which is recursive doubling or, for long messages and
            lossy codecs, halving-doubling; ``"native"``, the backend's own all-reduce and arithmetic; or ``"auto"``,
            which uses the result of :meth:`Communicator.tune`. Without a tuning ``"auto"`` on the CPU times some plans
            in the first such call, for about 50 ms; on CUDA, and if ``torch.use_deterministic_algorithms`` is on, it
            selects by size only. ``"recursive_doubling"`` encodes more than once, so it accepts only ``"raw"``.
        codec: one of ``codecs.CODECS``, in which partial sums and results are sent, or ``"auto"``: the most accurate
            one that takes at most 10 % longer than the fastest on this group (never sign), or the backend's own
            all-reduce if compression is slower. Without a tuning the first such call for tensors of about that size
            times codecs and plans for about a second, and waits for all ranks to make it.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`: this rank's own tensor, float32 or bfloat16
            of the tensor's shape. It receives the error of this rank's encoding, which the next call adds. Over the
            steps the results and the residuals of all ranks add up to what was passed.
        rounding: ``"nearest"``, or ``"stochastic"``, which is unbiased.
        seed, step: key of the stochastic rounding, which may differ between ranks; the ranks draw different numbers in
            any case. If None, step is the number of the call on this communicator.
        segments: the number of segments of the tensor, of which one is encoded while others are sent; by size if None.
        async_op: return a :class:`Work` immediately.

    Returns:
        A :class:`Work` with ``async_op``, else None.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: a rank is lost or late. The message names the rank that was waited for, the
            algorithm, the round, the deadline, and then the culprit, usually the same on all ranks: ``the culprit is
            rank 3: it has left`` (immediately), ``it does not answer`` or ``it is alive, but has not made call 7`` (at
            most two seconds after the first deadline). Or the ranks disagree on what to reduce, and the message names
            both calls. The communicator cannot be used afterwards; the group can, if its ranks are alive. On CUDA the
            call has returned by then: the tensor becomes NaN, and the next call raises.
    """
    communicator = _communicator(group, _all_reducing)
    return communicator.all_reduce(
        tensor,
        op,
        algorithm=algorithm,
        codec=codec,
        residual=residual,
        rounding=rounding,
        seed=seed,
        step=step,
        segments=segments,
        async_op=async_op,
    )


@library.custom_op("dltrain_ext::all_reduce_", mutates_args=["tensor"])
def _all_reduce_op(
    tensor: torch.Tensor, op: str = "sum", *, algorithm: str = "auto", codec: str = "raw", group_name: str
) -> None:
    """Calls :func:`all_reduce` in graphs, which contain the name of a group."""
    all_reduce(tensor, op, group=group_named(group_name), algorithm=algorithm, codec=codec)


_all_reduce_op.register_fake(lambda *given, **options: None)  # the op returns nothing


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor | Tensors,
    op: "str | dist.ReduceOp" = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sums or averages a tensor over the ranks of a group and gives each rank its shard of the result, like
    ``torch.distributed.reduce_scatter_single``: rank r of p gets the r-th of p equal parts of ``input``. ``input``
    may also be a list of p tensors of any sizes, as in ``torch.distributed.reduce_scatter``; rank r gets the r-th one.

    With ``"direct"`` every rank sends each other rank its encoded shard, and adds the shards that it receives and its
    own one, which is not encoded, in fp32 and in rank order: each element is encoded once, and the sum is not encoded.
    With ``"ring"`` partial sums are passed from rank to rank, and are encoded at each hop. A rank sends (p - 1) / p of
    a message of ``input``. The first call on a group is collective: it makes a communicator.

    Args:
        output: this rank's shard, float32, float16 or bfloat16 of any shape. It must not overlap ``input``.
        input: a tensor of that dtype and device with p times as many elements, of any shape, the same on all ranks; or
            a list of one tensor per rank, whose sizes are the same on all ranks. It is not changed.
        op, group, codec, rounding, seed, step, segments, async_op: as for :func:`all_reduce`, without the codec
            ``"auto"``.
        algorithm: one of ``comm.COLLECTIVES["reduce_scatter"]``, or ``"auto"``, which is direct.
        residual: error feedback, as for :func:`all_reduce`, of the shape of ``input``; for a list, of all its elements.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: as for :func:`all_reduce`.
    """
    return _communicator(group, _in_one_level, ranks_per_host=1).reduce_scatter(
        output,
        input,
        op,
        algorithm=algorithm,
        codec=codec,
        residual=residual,
        rounding=rounding,
        seed=seed,
        step=step,
        segments=segments,
        async_op=async_op,
    )


def all_gather(
    output: torch.Tensor | Tensors,
    input: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives all ranks of a group the tensors of all ranks, like ``torch.distributed.all_gather_into_tensor``: the r-th
    of p equal parts of ``output`` becomes rank r's ``input``. ``output`` may also be a list of p tensors of
    any sizes, as in ``torch.distributed.all_gather``; then the r-th tensor becomes rank r's ``input``.

    With the codec ``"raw"`` elements of any dtype are sent as they are. With another codec each rank encodes its input
    once, and all ranks, including itself, decode the same message, so every rank gets the same bits. A rank sends p - 1
    messages of ``input``. The first call on a group is collective: it makes a communicator.

    Args:
        output: a tensor of p times as many elements as ``input``, of any shape; or a list of one tensor per rank, of
            which the r-th has as many elements as rank r's ``input``. If ``output`` is contiguous, ``input`` may be
            this rank's part of it.
        input: this rank's contribution, of the dtype and the device of ``output``; with a lossy codec float32, float16
            or bfloat16.
        algorithm: one of ``comm.COLLECTIVES["all_gather"]``, or ``"auto"``, which is the ring for more than two
            ranks and outputs of 4 MiB in fp32 or more, and else direct.
        codec: one of ``codecs.CODECS``.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`, of the shape of ``input``.
        group, rounding, seed, step, segments, async_op: as for :func:`all_reduce`, which also describes the result.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: as for :func:`all_reduce`.
    """
    return _communicator(group, _in_one_level, ranks_per_host=1).all_gather(
        output,
        input,
        algorithm=algorithm,
        codec=codec,
        residual=residual,
        rounding=rounding,
        seed=seed,
        step=step,
        segments=segments,
        async_op=async_op,
    )


def broadcast(
    tensor: torch.Tensor,
    src: int,
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Gives all ranks of a group one rank's tensor, in place, like ``torch.distributed.broadcast``.

    With the codec ``"raw"`` elements of any dtype are sent as they are. With another codec ``src`` encodes them once,
    and all ranks, including itself, decode the same message, so every rank gets the same bits. With ``"tree"`` the
    whole tensor is sent down a tree. With ``"direct"`` each rank receives one part and sends it to all others (van de
    Geijn's scatter and all-gather), so no link carries more than twice the tensor. The first call on a group is
    collective: it makes a communicator.

    Args:
        tensor: the source on ``src``, and the destination on the other ranks, with as many elements on all ranks; with
            a lossy codec float32, float16 or bfloat16.
        src: the rank in the default group that has the source.
        algorithm: one of ``comm.COLLECTIVES["broadcast"]``, or ``"auto"``, which selects by size.
        codec: one of ``codecs.CODECS``.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`, of the shape of ``tensor``; used on ``src``.
        group, rounding, seed, step, segments, async_op: as for :func:`all_reduce`, which also describes the result.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: as for :func:`all_reduce`.
    """
    return _communicator(group, _in_one_level, ranks_per_host=1).broadcast(
        tensor,
        src,
        algorithm=algorithm,
        codec=codec,
        residual=residual,
        rounding=rounding,
        seed=seed,
        step=step,
        segments=segments,
        async_op=async_op,
    )


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: "str | dist.ReduceOp" = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sums or averages a tensor over the ranks of a group for one of them, in place, like ``torch.distributed.reduce``.
    The contents of the other ranks' tensors are undefined afterwards.

    Sums are computed in fp32, whatever the tensor's dtype. With ``"tree"`` partial sums are sent up a tree, each
    encoded once, and the sum is not encoded. With ``"direct"`` each rank adds up one part of the sum, encodes it once
    more, and sends it to ``dst``. The first call on a group is collective: it makes a communicator.

    Args:
        tensor: float32, float16 or bfloat16, of any shape, the same on all ranks.
        dst: the rank in the default group that gets the sum.
        algorithm: one of ``comm.COLLECTIVES["reduce"]``, or ``"auto"``, which selects by size.
        codec: one of ``codecs.CODECS``.
        op, group, residual, rounding, seed, step, segments, async_op: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: as for :func:`all_reduce`.
    """
    return _communicator(group, _in_one_level, ranks_per_host=1).reduce(
        tensor,
        dst,
        op,
        algorithm=algorithm,
        codec=codec,
        residual=residual,
        rounding=rounding,
        seed=seed,
        step=step,
        segments=segments,
        async_op=async_op,
    )


def _communicator(
    group: dist.ProcessGroup | None, made: _Communicators, ranks_per_host: int | None = None
) -> Communicator:
    group = group_of(group)
    communicator = made.get(group)
    if communicator is None:
        communicator = made[group] = Communicator(group, ranks_per_host=ranks_per_host)
    return communicator
