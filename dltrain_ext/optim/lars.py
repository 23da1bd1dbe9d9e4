"""Layer-wise adaptive rate scaling for large batches, whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dltrain_ext.optim.fused import EVERY, NONE, FusedStep
from dltrain_ext.optim.options import adapt_of, as_float, check_nonnegative, preset_of
from dltrain_ext.optim.rule import RULES


class Preset(NamedTuple):
    """The options in which forms of LARS differ."""

    trust_coefficient: float
    eps: float
    lr_inside: bool  # the momentum buffer contains the learning rate
    clip: bool  # the trust ratio becomes min(ratio / lr, 1)
    decays_excluded: bool  # weight decay also applies to parameters without a trust ratio
    decays_at_zero_norm: bool  # weight decay also applies if a norm is zero


PRESETS = {
    "paper": Preset(1e-3, 0.0, True, False, True, True),
    "tensorflow": Preset(1e-3, 0.0, True, False, False, True),
    "larc": Preset(2e-2, 1e-8, False, True, True, False),
}


class LARS(FusedStep):
    """SGD with momentum whose learning rate is adapted to each tensor by a trust ratio, in two passes over memory.

    With ``ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, or 1 if a norm is zero, a step is b <-
    momentum * b + lr * ratio * (g + weight_decay * w) and w <- w - b (You, Gitman & Ginsburg 2017, Algorithm 1). Forms
    of LARS differ as soon as the learning rate changes, so the form is selected by name:

    ============  =================  ====  ===========================  =============================================
    preset        trust_coefficient  eps   learning rate                weight decay without a trust ratio
    ============  =================  ====  ===========================  =============================================
    paper         0.001              0     in the momentum buffer       is applied
    tensorflow    0.001              0     in the momentum buffer       is not applied where excluded (its skip list)
    larc          0.02               1e-8  outside, min(ratio / lr, 1)  is applied, but not if a norm is 0
    ============  =================  ====  ===========================  =============================================

    tensorflow is the optimizer of TensorFlow and MLPerf, and larc is apex's LARC over SGD.

    Args:
        params: parameters, or groups with options of their own.
        lr: a number >= 0, or a one-element tensor.
        momentum, weight_decay: numbers >= 0.
        trust_coefficient, eps: numbers >= 0; None uses the preset's.
        nesterov: use Nesterov momentum, which needs momentum > 0.
        preset: ``"paper"``, ``"tensorflow"`` or ``"larc"``.
        adapt: with ``"auto"`` parameters of at most one dimension, such as biases and norms, have no trust ratio. With
            True all have one. With False none has, and the momentum buffer does not contain the learning rate: this is
            ``torch.optim.SGD`` (in the preset tensorflow without weight decay).
        maximize: maximize the objective.
        master_weights, dtypes, devices: as in :class:`AdamW`; norms are those of the masters. The momentum buffer,
            ``state[p]["momentum_buffer"]``, is float32.

    Norms are computed in double, with the same bits for any number of threads. Those of DTensors are norms of the whole
    tensors: a step has an all-reduce of two numbers for each parameter, over the ranks that share them. With a
    GradScaler the gradients are unscaled in the same passes, and a step with ``found_inf != 0`` is skipped.

    Raises:
        ValueError: an argument is out of its range; the message names it.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor is invalid. The message has its
            index in the group, and no parameter has been changed.
    """

    _rule = RULES["lars"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float | None = None,
        eps: float | None = None,
        nesterov: bool = False,
        preset: str = "paper",
        adapt: str | bool = "auto",
        maximize: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "preset": preset,
            "adapt": adapt,
            "maximize": maximize,
        }
        super().__init__(params, defaults, master_weights=master_weights)

    def _check_group(self, group: dict[str, Any]) -> None:
        preset_of(group, PRESETS)
        adapt_of(group)
        given = [name for name in ("trust_coefficient", "eps") if group[name] is not None]
        check_nonnegative(group, "momentum", "weight_decay", *given)
        super()._check_group(group)
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov: expected False without momentum, got True")

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        return ["momentum_buffer"] * (as_float(group, "momentum") != 0)

    def _flagged(self, group: dict[str, Any], starting: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        return (), {"auto": 2, True: EVERY, False: NONE}[adapt_of(group)]

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        preset = preset_of(group, PRESETS)
        given: dict[str, Any] = {
            name: as_float(group, name) for name in ("trust_coefficient", "eps") if group[name] is not None
        }
        if not group["adapt"]:
            given["lr_inside"] = False
        return {
            "momentum": as_float(group, "momentum"),
            "weight_decay": as_float(group, "weight_decay"),
            "nesterov": bool(group["nesterov"]),
            **preset._replace(**given)._asdict(),
        }
