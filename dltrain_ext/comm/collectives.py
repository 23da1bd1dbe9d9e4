"""All-reduce and reduce-scatter like torch.distributed's, each group on a communicator made by its first call."""

import weakref

import torch
import torch.distributed as dist
from torch import library

from dltrain_ext.comm.communicator import Communicator, Work
from dltrain_ext.comm.groups import group_named, group_of

_Communicators = weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]
_all_reducing: _Communicators = weakref.WeakKeyDictionary()
_scattering: _Communicators = weakref.WeakKeyDictionary()  # in one level


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
    input: torch.Tensor,
    op: "str | dist.ReduceOp" = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    codec: str = "raw",
    residual: torch.Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int | None = None,
    segments: int | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sums or averages a tensor over the ranks of a group and gives each its share of it, like
    ``torch.distributed.reduce_scatter_single``: rank r of p gets the r-th of p equal stretches of ``input``.

    Every rank sends each of the others, encoded, the share that is to be theirs, and adds up what it gets, in fp32 and
    in rank order, its own share as it is: so each element is encoded once, and the sum is not encoded at all. Bytes
    sent: (p - 1) / p of a message of ``input``. The first call on a group is collective: it makes a communicator.

    Args:
        output: float32, float16 or bfloat16, this rank's share: any shape. Must not lie in ``input``.
        input: of that dtype and device, p times as many elements, any shape, the same on all ranks. Stays as it is.
        op, codec, rounding, seed, step, segments, async_op: as for :func:`all_reduce`; no codec ``"auto"``.
        residual: error feedback, as for :func:`all_reduce`: of the shape of ``input``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        torch.distributed.DistBackendError: as for :func:`all_reduce`.
    """
    return _communicator(group, _scattering, ranks_per_host=1).reduce_scatter(
        output,
        input,
        op,
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
