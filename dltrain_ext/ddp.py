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
        timeout, transport, ranks_per_host: as for :class:`dltrain_ext.comm.Communicator`; each bucket has the whole
            timeout.

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
        transport: str = "auto",
        ranks_per_host: int | None = None,
    ):
        _ops.check_names(algorithm, codec)
        self.communicator = Communicator(
            process_group, timeout=timeout, transport=transport, ranks_per_host=ranks_per_host
        )
        self.codec = codec
        self.algorithm = algorithm

    def stats(self) -> dict[str, int]:
        """``buckets`` averaged, and ``wire_bytes`` and ``inside_bytes`` sent by this rank so far, as its communicator
        counts them."""
        stats = self.communicator.stats()
        return {"buckets": stats.pop("calls"), **stats}


def allreduce_hook(state: AllReduceState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over the ranks, in place. Returns at once; on CUDA nothing waits on the host."""
    return state.communicator.submit(bucket.buffer(), average=True, algorithm=state.algorithm, codec=state.codec)


def register(
    model: DistributedDataParallel,
    codec: str = "raw",
    algorithm: str = "auto",
    *,
    timeout: timedelta | None = None,
    transport: str = "auto",
    ranks_per_host: int | None = None,
) -> AllReduceState:
    """Registers :func:`allreduce_hook` on a DDP model and returns its state, whose arguments these are.

    Raises:
        TypeError: ``model`` is no DDP model, or a parameter is not float32, float16 or bfloat16 on the CPU or, in a
            build for CUDA, on a CUDA device; the parameter is named.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model: expected a DistributedDataParallel, got {type(model).__name__}")
    devices = {"cpu": "the CPU", "cuda": "a CUDA device"} if _ops.built_with_cuda else {"cpu": "the CPU"}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and (parameter.dtype not in _DTYPES or parameter.device.type not in devices):
            raise TypeError(
                f"model: expected parameters of float32, float16 or bfloat16 on {' or '.join(devices.values())}, "
                f"got {name} of {parameter.dtype} on {parameter.device}"
            )
    state = AllReduceState(
        model.process_group,
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
        transport=transport,
        ranks_per_host=ranks_per_host,
    )
    model.register_comm_hook(state, allreduce_hook)
    return state
