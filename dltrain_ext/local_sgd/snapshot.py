"""A copy of the parameters that are under way, in memory of the CPU that is kept from one average to the next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dltrain_ext.local_sgd.fragments import Fragment

_ALIGNMENT = 64  # bytes


class Snapshot:
    """Memory for one fragment at a time, the largest one; pinned if the parameters are on CUDA."""

    def __init__(self, fragments: Sequence[Fragment], from_cuda: bool):
        self._from_cuda = from_cuda
        # A master is fp32, whatever the type of its parameter.
        most = max(sum(_aligned(4 * each.numel) for each in fragment.trained) for fragment in fragments)
        self._memory = torch.empty(most, dtype=torch.uint8, pin_memory=from_cuda)

    def take(self, fragment: Fragment, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of the values of a fragment's parameters, which overwrite those of the fragment before."""
        copies, first = [], 0
        for each, value in zip(fragment.trained, values, strict=True):
            flat = self._memory[first : first + each.numel * value.element_size()].view(value.dtype)
            copies.append(each.view(flat, 0).copy_(value, non_blocking=self._from_cuda))
            first += _aligned(flat.nbytes)
        if self._from_cuda:
            torch.cuda.current_stream(values[0].device).synchronize()
        return copies


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
