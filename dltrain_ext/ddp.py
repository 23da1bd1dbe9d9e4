"""The DDP comm hook: buckets are averaged by our plans while backward goes on."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import _ops
from dltrain_ext.comm import Communicator

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class AllReduceState:
    """What :func:`allreduce_hook` needs: ``model.register_comm_hook(AllReduceState(), allreduce_hook)``.

    Making one is a collective call over the group.

    Args:
        process_group: the model's group; the default group where None.
        codec: one of ``codecs.CODECS``: what gradients travel as. Without error feedback so far, so what a lossy one
            loses is lost.
        algorithm: as for :func:`dltrain_ext.comm.all_reduce`; ``"auto"``: by the size of the bucket.
        timeout: how long one bucket may wait for its peers; the group's own where None.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: str = "raw",
        algorithm: str = "auto",
        timeout: timedelta | None = None,
    ):
        _ops.check_names(algorithm, codec)
        self.communicator = Communicator(process_group, timeout=timeout)
        self.codec = codec
        self.algorithm = algorithm

    def stats(self) -> dict[str, int]:
        """``buckets`` averaged and ``wire_bytes`` sent by this rank so far."""
        stats = self.communicator.stats()
        return {"buckets": stats["calls"], "wire_bytes": stats["wire_bytes"]}


def allreduce_hook(state: AllReduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients, on the CPU, over the ranks, in place. Returns at once."""
    return state.communicator.submit(bucket.buffer(), average=True, algorithm=state.algorithm, codec=state.codec)


def register(
    model: DistributedDataParallel, codec: str = "raw", algorithm: str = "auto", *, timeout: timedelta | None = None
) -> AllReduceState:
    """Registers :func:`allreduce_hook` on a DDP model and returns its state, whose arguments these are.

    Raises:
        TypeError: ``model`` is no DDP model, or a parameter is not float32, float16 or bfloat16 on the CPU; the
            parameter is named.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model: expected a DistributedDataParallel, got {type(model).__name__}")
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (parameter.dtype not in _DTYPES or parameter.device.type != "cpu"):
            raise TypeError(
                "model: expected parameters of float32, float16 or bfloat16 on the CPU, "
                f"got {name} of {parameter.dtype} on {parameter.device}"
            )
    state = AllReduceState(model.process_group, codec=codec, algorithm=algorithm, timeout=timeout)
    model.register_comm_hook(state, allreduce_hook)
    return state
