"""CuPy's memcpy and NCCL bindings, as peers on a GPU. Written from CuPy's documentation; this has not been run yet."""

import importlib.util

import torch
import torch.distributed as dist

NOT_RUN = "cupy: the authors of this benchmark have not run this side; its result is checked like the others"


def why_not() -> str:
    """Return why CuPy cannot be used; empty if it can."""
    return "" if importlib.util.find_spec("cupy") else "not installed: pip install cupy-cuda13x"


def copy(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copy with cudaMemcpyAsync on torch's current stream."""
    from cupy.cuda import runtime

    stream = torch.cuda.current_stream().cuda_stream
    runtime.memcpyAsync(to.data_ptr(), source.data_ptr(), source.nbytes, runtime.memcpyDeviceToDevice, stream)


class Nccl:
    """A communicator of all ranks, on the current GPU of each."""

    def __init__(self, rank: int, ranks: int) -> None:
        from cupy.cuda import nccl

        ident = [nccl.get_unique_id() if rank == 0 else None]
        dist.broadcast_object_list(ident, 0)
        self.nccl, self.communicator = nccl, nccl.NcclCommunicator(ranks, ident[0], rank)

    def all_reduce(self, message: torch.Tensor) -> None:
        """Sum fp32 elements in place, on torch's current stream."""
        at, stream = message.data_ptr(), torch.cuda.current_stream().cuda_stream
        self.communicator.allReduce(at, at, message.numel(), self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM, stream)
