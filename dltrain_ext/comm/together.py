"""Broadcasts many tensors of any dtypes."""

from collections.abc import Sequence

import torch

from dltrain_ext.comm.communicator import Communicator

_SMALL = 1 << 16  # bytes; smaller tensors travel together


def broadcast_all(communicator: Communicator, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Gives all ranks the tensors of the global rank ``source``, in place and as they are."""
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    sent = []
    for tensor in (tensor.detach() for tensor in tensors):
        if tensor.nbytes < _SMALL:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            sent.append(([tensor], tensor.contiguous()))
    sent += [(some, torch.cat([tensor.flatten() for tensor in some])) for some in small.values()]
    works = [communicator.broadcast(message, source, async_op=True) for _, message in sent]
    for work, (some, message) in zip(works, sent, strict=True):
        assert work is not None
        work.wait()
        if message is not some[0]:
            parts = torch.split(message.flatten(), [tensor.numel() for tensor in some])
            for tensor, part in zip(some, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
