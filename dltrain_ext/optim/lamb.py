"""LAMB for large batches, whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dltrain_ext.optim.fused import EVERY, NONE, FusedStep
from dltrain_ext.optim.options import adapt_of, as_float, check_nonnegative, preset_of
from dltrain_ext.optim.rule import RULES


class Preset(NamedTuple):
    """The options in which forms of LAMB differ."""

    max_grad_norm: float | None
    adapts_without_decay: bool  # whether tensors without weight decay have a trust ratio, too


PRESETS = {
    "paper": Preset(None, True),
    "apex": Preset(1.0, False),
    "nvlamb": Preset(1.0, True),
}


class LAMB(FusedStep):
    """AdamW whose step is as long, relative to the gradient's direction, as the tensor is large; in two passes.

    With u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p, from Adam's moments m and v, a step is
    p <- p - lr r u, and the trust ratio r is norm(p) / norm(u), or 1 if a norm is zero (You et al. 2020, Algorithm 2).
    Forms of LAMB differ, so the form is selected by name:

    ============  =============  ================================================
    preset        max_grad_norm  trust ratio
    ============  =============  ================================================
    paper         None           all tensors
    apex          1              tensors of groups with weight decay; others 1
    nvlamb        1              all tensors
    ============  =============  ================================================

    apex: NVIDIA apex's FusedLAMB; nvlamb: the same with ``use_nvlamb=True``.

    Args:
        params: parameters, or groups with options of their own.
        lr: a number >= 0, or a one-element tensor.
        betas: two numbers >= 0 and < 1.
        eps, weight_decay: numbers >= 0. Weight decay is a part of the direction u, as in the paper.
        preset: paper, apex or nvlamb.
        adapt: "auto": as the preset has it; True: all tensors of the group have a trust ratio; False: none has.
        max_grad_norm: gradients of all parameters of the optimizer are clipped to this 2-norm before the step, as by
            ``torch.nn.utils.clip_grad_norm_``; None: they are not; "auto": the preset's. The same for all groups. With
            a ``max_norm`` of ``LossScaler.step`` the smaller one counts.
        maximize: ascend.
        master_weights, state_codec, rounding, seed, dtypes, devices: as in :class:`AdamW`; norms are those of the
            masters. The moments are ``state[p]["exp_avg"]`` and ``state[p]["exp_avg_sq"]``.

    Norms are sums in double, the same for any number of threads. Those of DTensors are norms of the whole tensors: a
    step has an all-reduce of two numbers for each parameter, over the ranks that share them. With a GradScaler the
    gradients are unscaled in the same passes, and a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: an argument out of its range, by name.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["lamb"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        preset: str = "apex",
        adapt: str | bool = "auto",
        max_grad_norm: float | str | None = "auto",
        maximize: bool = False,
        master_weights: str | bool = "auto",
        state_codec: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "preset": preset,
            "adapt": adapt,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
        }
        super().__init__(
            params, defaults, master_weights=master_weights, state_codec=state_codec, rounding=rounding, seed=seed
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        _max_grad_norm_of(group)
        adapt_of(group)
        check_nonnegative(group, "eps", "weight_decay")
        super()._check_group(group)

    @property
    def max_grad_norm(self) -> float | None:  # type: ignore[override]
        """The norm to which a step clips the gradients; raises ValueError if the groups differ in it."""
        found = {_max_grad_norm_of(group) for group in self.param_groups}
        if len(found) > 1:
            raise ValueError(f"max_grad_norm: expected the same for all groups, got {sorted(found, key=str)}")
        return found.pop() if found else None

    def _flagged(self, group: dict[str, Any], starting: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        adapt = adapt_of(group)
        if adapt == "auto":
            adapt = as_float(group, "weight_decay") != 0 or preset_of(group, PRESETS).adapts_without_decay
        return (), EVERY if adapt else NONE


def _max_grad_norm_of(group: dict[str, Any]) -> float | None:
    preset, given = preset_of(group, PRESETS), group["max_grad_norm"]
    max_norm: float | None = preset.max_grad_norm if isinstance(given, str) and given == "auto" else given
    if max_norm is not None and not (type(max_norm) in (int, float) and max_norm > 0):
        raise ValueError(f"max_grad_norm: expected 'auto', None or a number > 0, got {given!r}")
    return max_norm
