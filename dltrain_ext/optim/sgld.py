"""Stochastic gradient Langevin dynamics whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import check_nonnegative
from dltrain_ext.optim.rule import RULES


class SGLD(FusedStep):
    """Stochastic gradient Langevin dynamics: SGD with noise, whose parameters sample from a posterior distribution.

    p <- p - lr / 2 (g + weight_decay p) + temperature sqrt(lr) z with standard normal z (Welling & Teh 2011, equation
    4). Here g is the gradient of the negative log likelihood of the whole data, and weight_decay the precision of a
    normal prior; with the mean loss of a batch, multiply the loss by the number of examples. The noise is drawn in the
    same pass over memory. It is a function of the seed, the step, the number of the parameter and the index of the
    element in memory, so that a run that is resumed, and a run on another device, has the same noise. In a DTensor the
    index is that of the contiguous whole tensor: the noise does not depend on how it is sharded. Where that cuts the
    tensor in many runs of adjacent elements, as ``Shard(1)`` cuts every row, each run costs as much as a small tensor.

    Args:
        params: parameters, or groups with options of their own.
        lr: the step size; a number >= 0, or a one-element tensor. The paper lets it decrease polynomially.
        weight_decay: a number >= 0.
        temperature: a number >= 0, by which the noise is multiplied; 0: SGD with half the learning rate.
        seed: a whole number from 0 to 2^53 - 1; give ranks that sample on their own different seeds.
        maximize: ascend.
        master_weights, dtypes, devices: as in :class:`AdamW`.

    The state of a parameter is its step count and its number, in the order of the parameters when it first steps:
    ``state[p]["step"]`` and ``state[p]["number"]``. With a GradScaler the gradients are unscaled in the same pass, and
    a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: an argument out of its range, by name.
        TypeError, ValueError (from ``step``): a parameter or gradient that does not fit, by index in its group; then no
            parameter has been changed.
    """

    _rule = RULES["sgld"]
    _is_indexed = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        maximize: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "temperature": temperature,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master_weights=master_weights)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_nonnegative(group, "weight_decay", "temperature")
        super()._check_group(group)

    def _complete_state(self, params: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
        known = {p for p in params if "number" in self.state[p]}
        super()._complete_state(params, group)
        for p, number in zip(params, self._numbers(params), strict=True):
            if p not in known:
                self.state[p]["number"].fill_(number)
        return params
