"""Lion whose step updates a whole parameter group in one call."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import check_nonnegative
from dltrain_ext.optim.rule import RULES


class Lion(FusedStep):
    """Lion, whose update is the sign of an interpolated momentum, in one pass over all parameters of a group.

    p <- p (1 - lr weight_decay) - lr sign(b1 m + (1 - b1) g) and m <- b2 m + (1 - b2) g (Chen et al. 2023, Algorithm
    2). Every element moves by ``lr``, so that the paper takes a learning rate 3 to 10 times smaller than AdamW's, and a
    weight decay that is larger by the same factor. Names are those of the package lion-pytorch.

    Args:
        params: parameters, or groups with options of their own.
        lr: a number >= 0, or a one-element tensor.
        betas: two numbers >= 0 and < 1: of the interpolation, and of the momentum.
        weight_decay: a number >= 0, decoupled from the gradient and multiplied by the learning rate.
        maximize: ascend.
        master_weights, state_codec, rounding, seed, dtypes, devices: as in :class:`AdamW`. The momentum is
            ``state[p]["exp_avg"]``.

    With a GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a
    whole.

    Raises:
        ValueError: an argument out of its range, by name.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["lion"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master_weights: str | bool = "auto",
        state_codec: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params, defaults, master_weights=master_weights, state_codec=state_codec, rounding=rounding, seed=seed
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        check_nonnegative(group, "lr", "weight_decay")
        super()._check_group(group)
