"""Collectives like torch.distributed's, each group on a communicator made by its first call."""

import weakref

import torch
import torch.distributed as dist
from torch import library

from dltrain_ext.comm.communicator import Communicator, Tensors
from dltrain_ext.comm.groups import group_named, group_of
from dltrain_ext.comm.work import Work

_Communicators = weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]
_all_reducing: _Communicators = weakref.WeakKeyDictionary()
_in_one_level: _Communicators = weakref.WeakKeyDictionary()  # for all others


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

    Sums are in fp32, whatever the tensor's dtype; every rank ends with the same bits. A NaN or an infinity anywhere in
    a codec's block makes that block NaN on every rank. The first call on a group is collective: it makes the group's
    communicator.

    Args:
        tensor: float32, float16 or bfloat16 on the CPU or a CUDA device, any shape (also empty), the same on all
            ranks. With the codec ``"raw"`` and the algorithms ``"native"`` or ``"auto"`` also float64, uint8, int8,
            int32 or int64: what fp32 cannot hold is left to the backend.
        op: ``"sum"``, ``"avg"`` or the ``ReduceOp`` of that name. For an average each contribution is scaled before
            it is encoded.
        group: the default group where None.
        algorithm: one of ``comm.ALGORITHMS``; ``"butterfly"``, recursive doubling or, for long messages and lossy
            codecs, halving-doubling; ``"native"``, the backend's own, which sums as that does; or ``"auto"``: as
            :meth:`Communicator.tune` has found; without a tuning, on the CPU, by timing some plans at the first such
            call, which takes about 50 ms; on CUDA, and where ``torch.use_deterministic_algorithms`` is on, by size
            alone. ``"recursive_doubling"`` encodes more than once, so it takes ``"raw"`` alone.
        codec: one of ``codecs.CODECS``: what partial sums and results are sent as. ``"auto"``: the most accurate one
            that takes at most 10 % longer than the fastest on this group (never sign), or the backend's own all-reduce
            where compressing would lose. Without a tuning the first such call for tensors of about that size times
            codecs and plans, for about a second, and waits for all ranks to make it.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`: float32 or bfloat16 of the tensor's shape,
            this rank's own. What its encoding loses stays there, and is added to its part the next time: over the
            steps the results and all ranks' residuals sum up to what was given.
        rounding: ``"nearest"`` or ``"stochastic"``, unbiased.
        seed, step: key of the stochastic rounding, the same on all ranks or not; the ranks draw different numbers.
            Where None, step is the number of the call on this communicator.
        segments: pieces that the message is cut into, so that one is encoded while others are sent; by size where
            None.
        async_op: return a :class:`Work` at once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        torch.distributed.DistBackendError: a rank is gone or late; names the rank waited for, the algorithm, the
            round and the deadline, and then the culprit, as a rule the same on all ranks: ``the culprit is rank 3: it
            has left`` (at once), ``it does not answer`` or ``it is alive, but has not made call 7`` (two seconds after
            the first deadline at the latest). Or the ranks disagree on what to reduce: names both calls. The
            communicator is of no use afterwards; the group is, if its ranks live. On CUDA the call has returned by
            then: the tensor becomes NaN, and the next call raises.
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
    """:func:`all_reduce` for graphs, which have a group by its name."""
    all_reduce(tensor, op, group=group_named(group_name), algorithm=algorithm, codec=codec)


_all_reduce_op.register_fake(lambda *given, **options: None)  # it changes its tensor, and returns nothing


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
    """Sums or averages a tensor over the ranks of a group and gives each its share of it, like
    ``torch.distributed.reduce_scatter_single``: rank r of p gets the r-th of p equal stretches of ``input``. Or, like
    ``torch.distributed.reduce_scatter``, takes a list of p tensors, of whatever sizes, of which rank r gets the r-th.

    By ``"direct"`` every rank sends each of the others, encoded, the share that is to be theirs, and adds up what it
    gets, in fp32 and in rank order, its own share as it is: so each element is encoded once, and the sum is not encoded
    at all. By ``"ring"`` partial sums travel round, and are encoded at each hop. A rank sends (p - 1) / p of a message
    of ``input``. The first call on a group is collective: it makes a communicator.

    Args:
        output: float32, float16 or bfloat16, this rank's share: any shape. Must not lie in ``input``.
        input: of that dtype and device, p times as many elements, any shape, the same on all ranks; or a list of one
            tensor for each rank, whose sizes are the same on all ranks. Stays as it is.
        op, codec, rounding, seed, step, segments, async_op: as for :func:`all_reduce`; no codec ``"auto"``.
        algorithm: one of ``comm.COLLECTIVES["reduce_scatter"]``, or ``"auto"``: direct.
        residual: error feedback, as for :func:`all_reduce`: of the shape of ``input``; of a list, of all its elements.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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
    """Gives all ranks of a group what each has, like ``torch.distributed.all_gather_into_tensor``: the r-th of p equal
    stretches of ``output`` becomes rank r's ``input``. Or, like ``torch.distributed.all_gather``, writes to a list of p
    tensors, of whatever sizes.

    With the codec ``"raw"`` elements travel as they are, of any dtype. With another each rank encodes its part once,
    and all ranks, itself too, decode the same message: every rank ends with the same bits. Bytes sent: p - 1 messages
    of ``input``. The first call on a group is collective: it makes a communicator.

    Args:
        output: p times as many elements as ``input``, any shape; or a list of one tensor for each rank, of which the
            r-th has as many elements as rank r's ``input``. ``input`` may be where it is to go, if
            ``output`` is contiguous.
        input: this rank's part, of the dtype and the device of ``output``; with a lossy codec float32, float16 or
            bfloat16.
        algorithm: one of ``comm.COLLECTIVES["all_gather"]``, or ``"auto"``: direct.
        codec: one of ``codecs.CODECS``.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`: of the shape of ``input``.
        group, rounding, seed, step, segments, async_op: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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

    With the codec ``"raw"`` elements travel as they are, of any dtype. With another ``src`` encodes them once, and all
    ranks, itself too, decode the same message: every rank ends with the same bits. By ``"tree"`` all of it goes down a
    tree, by ``"direct"`` each rank gets one part and hands it to all others (van de Geijn's scatter and all-gather), so
    that no link carries more than twice the tensor. The first call on a group is collective: it makes a communicator.

    Args:
        tensor: on ``src`` what is sent, on the others what is written: as many elements on all ranks; with a lossy
            codec float32, float16 or bfloat16.
        src: the rank that has it, as the default group counts ranks.
        algorithm: one of ``comm.COLLECTIVES["broadcast"]``, or ``"auto"``: by size.
        codec: one of ``codecs.CODECS``.
        residual: error feedback, as for :func:`dltrain_ext.codecs.encode`: of the shape of ``tensor``; used on ``src``.
        group, rounding, seed, step, segments, async_op: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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
    What the tensors of the other ranks hold afterwards is undefined.

    Sums are in fp32, whatever the tensor's dtype. By ``"tree"`` partial sums go up a tree, each encoded once, and the
    sum is not encoded; by ``"direct"`` each rank adds up one part of it, and sends it, encoded once more, to ``dst``.
    The first call on a group is collective: it makes a communicator.

    Args:
        tensor: float32, float16 or bfloat16, any shape, the same on all ranks.
        dst: the rank that gets the sum, as the default group counts ranks.
        algorithm: one of ``comm.COLLECTIVES["reduce"]``, or ``"auto"``: by size.
        codec: one of ``codecs.CODECS``.
        op, group, residual, rounding, seed, step, segments, async_op: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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
