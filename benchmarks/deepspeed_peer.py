"""DeepSpeed's all-reduce in memory that the ranks of a host share, as a peer on the CPU; compiled on first use."""

import os
from importlib.util import find_spec

import torch
import torch.distributed as dist


def why_not() -> str:
    """Return why it cannot be used; empty if it can."""
    if not find_spec("deepspeed"):
        return "not installed: pip install deepspeed"
    try:
        _load()
    except Exception as error:  # of any kind: its compiler's, its own
        return f"cannot be compiled: {str(error).splitlines()[-1][:60]}"
    return ""


def _load():
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    return ShareMemCommBuilder().load(verbose=False)


class SharedMemory:
    """The memory of all ranks, which are processes of one host."""

    def __init__(self, rank: int, ranks: int) -> None:
        os.environ["LOCAL_SIZE"] = str(ranks)  # without it, the memory is not used
        _load().initialize(ranks, rank)
        dist.barrier()

    def all_reduce(self, message: torch.Tensor) -> None:
        """Sum in place."""
        torch.ops.deepspeed.inference_all_reduce_(message)
