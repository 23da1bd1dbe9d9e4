"""A layer's weights as a matrix, and what its Kronecker factors are made of."""

import weakref
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltrain_ext.kfac.batches import Batches

APPROXIMATIONS = ("expand", "reduce")


class Moment:
    """A running mean of second moments, ``sum / weight``: every decay makes the earlier batches count less.

    The mean over ranks is the quotient of what their sums and their weights add up to. So ranks need not exchange
    anything before they need the mean.

    Attributes:
        size: the number of rows and of columns.
        sum: a float32 tensor (size, size), of which the lower triangle counts.
        weight: a float32 number on the same device.
    """

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.sum = torch.zeros(size, size, device=device)
        self.weight = torch.zeros((), device=device)

    def add(self, moment: Tensor) -> None:
        """Adds the second moment of a batch (size, size). One that is not finite is left out, without a host sync."""
        finite = moment.trace().isfinite()  # no other element is larger than those on the diagonal
        self.sum += torch.where(finite, moment, 0)
        self.weight += finite


class Layer:
    """A Linear or a Conv2d without groups.

    Its weights form a matrix (outputs, inputs): those of a convolution with an input for each channel and position of
    the kernel, and a bias as one more input that is 1. For the losses of N examples, whose mean is differentiated, the
    block of the Fisher matrix is approximated by the Kronecker product of two factors (Martens & Grosse 2015,
    arXiv:1503.05671), of the inputs a and of the gradients g of an example's loss with respect to the outputs::

        A = mean of a a^T,   G = mean of g g^T

    Where weights are shared by R positions, those of an image or a sequence (Eschenhagen et al. 2023,
    arXiv:2311.00636):

    - ``"expand"``: A is the mean over all positions of all examples. G is the sum over the positions for a convolution
      (Grosse & Martens 2016, arXiv:1602.01407). For a Linear each position counts as an example: the loss is the mean
      over the positions, too, as that of a language model.
    - ``"reduce"``: a is the mean, and g the sum over the positions of an example.

    The gradients are those of the given targets: it is the empirical Fisher matrix.
    """

    def __init__(self, module: nn.Linear | nn.Conv2d, approximation: str, batches: Batches):
        self.module, self._reduces, self.batches = module, approximation == "reduce", batches
        self.has_bias = module.bias is not None and module.bias.requires_grad
        outputs = module.weight.shape[0]
        self.shape = outputs, module.weight.numel() // outputs + self.has_bias
        self.inputs, self.gradients = (Moment(size, module.weight.device) for size in reversed(self.shape))
        self.calls = 0  # since the inverses were made

    def take(self, output: Tensor, inputs: Tensor) -> None:
        """Takes the moments of a call when its gradient comes."""
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            moment, shape = self._input_moment(inputs), output.shape

        def take_gradient(gradient: Tensor) -> None:
            if self.batches.are_taken:
                self.batches.begin()
                with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
                    self.inputs.add(moment)
                    self.gradients.add(self._gradient_moment(gradient.reshape(shape)))
                self.calls += 1

        # An operation in place on a view, such as a Linear's output for a sequence, replaces the view's own node.
        base = output._base
        watched = output if base is None or base.numel() != output.numel() else base
        watched.register_hook(take_gradient)  # type: ignore[no-untyped-call]

    def _input_moment(self, inputs: Tensor) -> Tensor:
        by_position = patches(inputs, self.module) if isinstance(self.module, nn.Conv2d) else sequences(inputs)
        width = self.module.weight[0].numel()
        if self._reduces:
            by_position = by_position.float().mean((1, 2))
        rows = by_position.reshape(-1, width).float()
        moment = rows.new_empty(self.shape[1], self.shape[1])
        moment[:width, :width] = rows.t() @ rows
        if self.has_bias:
            moment[width, :width] = moment[:width, width] = rows.sum(0)
            moment[width, width] = len(rows)
        return moment.div_(len(rows))

    def _gradient_moment(self, gradient: Tensor) -> Tensor:
        convolution = isinstance(self.module, nn.Conv2d)
        by_position = batched(gradient, 4).movedim(1, 3) if convolution else sequences(gradient)
        examples = len(by_position)
        if self._reduces:
            by_position = by_position.float().sum((1, 2))
        rows = by_position.reshape(-1, by_position.shape[-1]).float() / self.batches.scale()
        return (rows.t() @ rows).mul_(examples if convolution else len(rows))

    @property
    def moments(self) -> tuple[Moment, Moment]:
        return self.inputs, self.gradients

    def figures(self) -> Tensor:
        """Returns the traces of both sums, their weights, and the number of calls since the inverses were made."""
        return torch.stack(
            [
                *(moment.sum.trace() for moment in self.moments),
                *(moment.weight for moment in self.moments),
                self.inputs.weight.new_tensor(self.calls),
            ]
        )

    def gradient(self) -> Tensor | None:
        """Returns the gradient as a float32 matrix, or None if there is none."""
        weight, bias = self._gradients()
        if weight is None:
            return None
        matrix = weight.flatten(1).float()
        if not self.has_bias:
            return matrix
        column = matrix.new_zeros(len(matrix)) if bias is None else bias.float()
        return torch.cat([matrix, column.unsqueeze(1)], 1)

    def set_gradient(self, matrix: Tensor) -> None:
        weight, bias = self._gradients()
        assert weight is not None
        weight.copy_(matrix[:, : weight[0].numel()].view_as(weight))
        if bias is not None:
            bias.copy_(matrix[:, -1])

    def _gradients(self) -> tuple[Tensor | None, Tensor | None]:
        bias = self.module.bias if self.has_bias else None
        return self.module.weight.grad, None if bias is None else bias.grad


def batched(tensor: Tensor, dims: int) -> Tensor:
    """Returns a tensor of a batch, which has one example if there was no batch."""
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor


def sequences(tensor: Tensor) -> Tensor:
    """Returns (examples, positions, 1, features) of (examples, ..., features)."""
    return batched(tensor, 2).unsqueeze(1).flatten(1, -2).unsqueeze(2)


def patches(images: Tensor, module: nn.Conv2d) -> Tensor:
    """Returns a view (examples, rows, columns, channels, kernel rows, kernel columns) of what a convolution sees."""
    images = batched(images, 4)
    if any(padding := module._reversed_padding_repeated_twice):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        images = F.pad(images, padding, mode)
    for dim, kernel, stride, dilation in zip((2, 3), module.kernel_size, module.stride, module.dilation, strict=True):
        images = images.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return images.permute(0, 2, 3, 1, 4, 5)


class Hook:
    """A forward hook of a layer's module. A copy of the module, or one that was saved and loaded, has one that does
    nothing."""

    def __init__(self, layer: Layer | None = None):
        # Not as a decorator: that would import the compiler together with this file.
        self._take = None if layer is None else torch.compiler.disable(partial(_take, weakref.ref(layer)))  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        if self._take is not None:
            self._take(module, given, named, output)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


def _take(
    reference: "weakref.ref[Layer]",
    module: nn.Module,
    given: tuple[Tensor, ...],
    named: dict[str, Tensor],
    output: Tensor,
) -> None:
    layer = reference()
    if layer is None or not (module.training and torch.is_grad_enabled() and layer.batches.are_taken):
        return
    if output.requires_grad and output.numel():
        layer.take(output, given[0] if given else named["input"])
