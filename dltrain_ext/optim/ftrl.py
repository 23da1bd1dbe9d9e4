"""FTRL-Proximal whose step updates a whole parameter group in one call."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import as_float, check_nonnegative, is_on_cuda
from dltrain_ext.optim.rule import RULES


class FTRL(FusedStep):
    """FTRL-Proximal, "follow the regularized leader", in one pass over all parameters of a group.

    With z and n from 0 on, s = (sqrt(n + g^2) - sqrt(n)) / lr, z <- z + g - s p, n <- n + g^2; then p is 0 where
    abs(z) <= lambda_1, and else -(z - sign(z) lambda_1) / ((beta + sqrt(n)) / lr + lambda_2) (McMahan et al. 2013,
    Algorithm 1). It gives sparse parameters, and is used for linear models. The parameter follows from z and n alone:
    one that starts at another value than 0 keeps that value only until the first step.

    Args:
        params: parameters, or groups with options of their own.
        lr: alpha in the paper; a number > 0, or a one-element tensor.
        beta: a number >= 0, which keeps the first steps small.
        lambda_1, lambda_2: numbers >= 0; the strengths of the L1 and L2 regularization.
        maximize: ascend.
        master_weights, dtypes, devices: as in :class:`AdamW`. The states, ``state[p]["z"]`` and ``state[p]["n"]``, are
            float32.

    With a GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a
    whole.

    Raises:
        ValueError: an argument out of its range, by name.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["ftrl"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        beta: float = 1.0,
        lambda_1: float = 0.0,
        lambda_2: float = 0.0,
        *,
        maximize: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        defaults = {"lr": lr, "beta": beta, "lambda_1": lambda_1, "lambda_2": lambda_2, "maximize": maximize}
        super().__init__(params, defaults, master_weights=master_weights)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_nonnegative(group, "beta", "lambda_1", "lambda_2")
        super()._check_group(group)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        lr = group["lr"]
        if not is_on_cuda(lr) and as_float(group, "lr") == 0:
            raise ValueError(f"lr: expected a number > 0, since FTRL divides by it, got {lr!r}")
        return super()._hyper(group)
