"""Loss scaling whose unscaling, clipping and check for overflows are part of the optimizer's one pass."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from dltrain_ext import _ops
from dltrain_ext._arguments import as_number, check_number, check_numbers, is_dense
from dltrain_ext.optim.fused import FusedStep, add_up, grad_scale_of
from dltrain_ext.optim.shards import whole


class GradStats(NamedTuple):
    """What is known about all gradients that an optimizer is about to use, as they are in ``.grad``.

    Attributes:
        sum_squares: their sum of squares, a one-element float64 tensor. It is finite exactly if all gradients are.
        found_inf: a one-element tensor that is not zero if a gradient is not finite; if None, the sum decides.
    """

    sum_squares: Tensor
    found_inf: Tensor | None = None


class LossScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for any optimizer. With those of ``dltrain_ext.optim`` a step is fused, without a host
    sync.

    Dynamic loss scaling (Micikevicius et al. 2018): ``scale(loss)`` multiplies the loss, and so the gradients, by the
    scale. A step whose gradients are not all finite is skipped, and the scale decreases; it increases after
    ``growth_interval`` consecutive steps whose gradients are finite.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: the range in which ``update()`` keeps the scale; a scale set by hand may be outside of it.
        hysteresis: the number of consecutive steps that must overflow before the scale decreases; it then decreases at
            each further one. With 1, the behaviour is torch's.

    ``state_dict`` has torch's entries and a few more: a GradScaler can load it, and this class that of a GradScaler.

    Raises:
        TypeError, ValueError: an argument is not a number, or is out of its range.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        _check_bounds(min_scale, max_scale, hysteresis)
        init_scale = as_number(init_scale, "init_scale")
        growth_factor = as_number(growth_factor, "growth_factor")
        backoff_factor = as_number(backoff_factor, "backoff_factor")
        check_number(growth_interval, "growth_interval", 2**31)
        if not isinstance(device, str):
            raise TypeError(f"device: expected a str, got {device!r}")
        if enabled and not min_scale <= init_scale <= max_scale:
            raise ValueError(f"init_scale: expected {min_scale} to {max_scale}, got {init_scale}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale, self.max_scale, self.hysteresis = min_scale, max_scale, hysteresis
        # Like torch's scale, these are numbers until the device is known, and then tensors on it.
        self._init_skipped = self._init_overflows = 0
        self._skipped: Tensor | None = None
        self._overflows: Tensor | None = None  # consecutive ones
        self._total_norm: Tensor | None = None

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._skipped = torch.tensor(self._init_skipped, device=dev)
        self._overflows = torch.tensor(self._init_overflows, device=dev)

    @property
    def skipped_steps(self) -> Tensor:
        """The number of calls of ``step`` that have changed nothing: an int64 number on the scale's device."""
        return torch.tensor(self._init_skipped) if self._skipped is None else self._skipped.clone()

    @property
    def total_norm(self) -> Tensor:
        """The 2-norm of all gradients of the last ``step``, unscaled and before clipping: a one-element float32 tensor
        on their device. It is NaN before the first step, and after a step without ``max_norm`` if the optimizer is
        torch's, the gradients had been unscaled before, or the scaler is disabled."""
        return torch.tensor(math.nan) if self._total_norm is None else self._total_norm

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger, a flat dict: ``amp/scale``, ``amp/skipped_steps`` and, where it is known,
        ``amp/norm``, which is ``total_norm``. Waits for the device."""
        found = {"amp/scale": float(self.get_scale()), "amp/skipped_steps": float(self.skipped_steps)}
        norm = float(self.total_norm)
        return found if math.isnan(norm) and self._total_norm is None else found | {"amp/norm": norm}

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        grad_stats: GradStats | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps the optimizer unless a gradient is not finite.

        With the optimizers of ``dltrain_ext.optim`` the gradients are read once for the norm and the check, or not at
        all if ``grad_stats`` is given, and once more by the step. They are not written. The scale, the clip factor and
        the result of the check stay on the device. For other optimizers this calls ``unscale_``, ``clip_grad_norm_``
        and torch's own ``step``, and does not use ``grad_stats``. With ``enabled=False`` nothing is scaled and no step
        is skipped; clipping is still part of the step.

        Args:
            optimizer: the optimizer.
            max_norm: the 2-norm to which the unscaled gradients of all its parameters are clipped, as by
                ``torch.nn.utils.clip_grad_norm_``; None does not clip.
            grad_stats: what was found while the gradients were reduced. It must be None if ``.grad`` has changed since.

        Returns:
            The result of ``optimizer.step(**kwargs)``.

        Raises:
            TypeError, ValueError: ``max_norm`` is not a number >= 0, ``grad_stats`` does not consist of one-element
                tensors with a float64 sum, or ``optimizer`` is not an optimizer.
            RuntimeError: this is the second call since ``update()``, or a closure is given, as in torch.
        """
        if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm >= 0):
            raise ValueError(f"max_norm: expected a number >= 0 or None, got {max_norm!r}")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer: expected an optimizer, got {type(optimizer).__name__}")
        _check_stats(grad_stats)
        self._total_norm = None
        if isinstance(optimizer, FusedStep):
            return self._fused_step(optimizer, max_norm, grad_stats, **kwargs)
        if max_norm is not None:
            self._clip(optimizer, max_norm, **kwargs)
        result = super().step(optimizer, **kwargs)
        if self._enabled:
            self._count(_any(_flags(self._per_optimizer_states[id(optimizer)])))
        return result

    def _fused_step(
        self, optimizer: FusedStep, max_norm: float | None, grad_stats: GradStats | None, **kwargs: Any
    ) -> Any:
        """Does for fused optimizers what torch's step does for others; the unscaler replaces its pass over the
        gradients."""
        if self._enabled and "closure" in kwargs:
            raise RuntimeError("closure: cannot be passed while enabled=True, since gradients are unscaled only once")
        state = self._state_of(optimizer) if self._enabled else None
        optimizer.unscaler = partial(self._unscale_and_clip, optimizer, state, max_norm, grad_stats)
        try:
            result = optimizer.step(**kwargs)
        finally:
            optimizer.unscaler = None
        if state is not None:
            state["stage"] = OptState.STEPPED
            # As in torch, a scale that the user has set is used once.
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
        return result

    def _clip(self, optimizer: torch.optim.Optimizer, max_norm: float, closure: Any = None, **kwargs: Any) -> None:
        """Clips the gradients before the step of an optimizer that is not a FusedStep."""
        if closure is not None:
            raise RuntimeError("max_norm: expected None with a closure, since gradients are there only after it")
        if self._enabled and self._state_of(optimizer)["stage"] is OptState.READY:
            self.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._total_norm = whole(torch.nn.utils.clip_grad_norm_(params, max_norm))

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns torch's state of an optimizer; raises RuntimeError if it has stepped since the last update()."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        return state

    def _unscale_and_clip(
        self,
        optimizer: FusedStep,
        state: dict[str, Any] | None,
        max_norm: float | None,
        grad_stats: GradStats | None,
        groups: Sequence[_ops.FusedGroup],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the divisor of the groups' gradients, and a number that is not zero if the step is skipped."""
        flags = [] if state is None else _flags(state)
        ready = state is not None and state["stage"] is OptState.READY
        divisor = grad_scale_of(optimizer)
        max_norm = min((norm for norm in (max_norm, optimizer.max_grad_norm) if norm is not None), default=None)
        if ready:
            scale, _ = self._check_scale_growth_tracker("step")
            divisor = scale if divisor is None else scale * divisor
        if ready or max_norm is not None:
            if grad_stats is None:
                total = add_up(optimizer.sum_squares(groups))
            else:
                total = grad_stats.sum_squares
                flags += [] if grad_stats.found_inf is None else [grad_stats.found_inf]
            divisor, self._total_norm, found_inf = _ops.unscale_and_clip(
                total,
                grad_scale=divisor,
                found_inf=_any(flags) if len(flags) > 1 else next(iter(flags), None),
                max_norm=max_norm,
            )
        else:
            found_inf = _any(flags).float()
        if state is None:
            return divisor, None
        self._count(found_inf.bool())
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        return divisor, found_inf

    def _count(self, skipped: Tensor) -> None:
        assert self._skipped is not None
        self._skipped.add_(skipped.to(self._skipped.device, non_blocking=True))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Sets the scale for the next iteration, as in torch, within ``min_scale`` and ``max_scale`` and with
        ``hysteresis``. It must be called once per iteration, after all steps. ``new_scale``, a number or a one-element
        tensor, sets the scale by hand, without limits. Raises TypeError if ``new_scale`` is neither."""
        if not self._enabled or new_scale is not None:
            if not isinstance(new_scale, int | float | Tensor | None) or (
                isinstance(new_scale, Tensor) and not (is_dense(new_scale) and new_scale.numel() == 1)
            ):
                raise TypeError(f"new_scale: expected a number or a tensor of one, got {type(new_scale).__name__}")
            if isinstance(new_scale, Tensor):
                return super().update(new_scale.reshape(()))
            return super().update(float(new_scale) if isinstance(new_scale, int) else new_scale)
        scale, _ = self._check_scale_growth_tracker("update")
        if self.hysteresis == 1:
            super().update()
        else:
            assert self._overflows is not None
            before = scale.clone()
            flags = [flag for state in self._per_optimizer_states.values() for flag in _flags(state)]
            overflow = _any(flags).to(scale.device, non_blocking=True)
            super().update()
            self._overflows.add_(1).mul_(overflow)
            scale.copy_(torch.where(overflow & (self._overflows < self.hysteresis), before, scale))
        scale.clamp_(self.min_scale, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's entries, ``min_scale``, ``max_scale``, ``hysteresis``, ``skipped_steps`` and ``_overflows``,
        or an empty dict with ``enabled=False``. The values are Python numbers, so this waits for the device."""
        if not self._enabled:
            return {}
        ours = {name: getattr(self, name) for name in ("min_scale", "max_scale", "hysteresis")}
        return {**super().state_dict(), **ours, **self._counted()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a LossScaler or a GradScaler. Entries that are missing in it keep their values.

        Raises:
            TypeError, ValueError: it is the state of neither, or has values that no step can produce. Nothing has
                changed.
        """
        ours = {name: getattr(self, name) for name in ("min_scale", "max_scale", "hysteresis")}
        if self._enabled:
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"state_dict: expected that of a LossScaler, got {type(state_dict).__name__}")
            ours = {name: state_dict.get(name, value) for name, value in ours.items()}
            _check_bounds(**ours)
            _check_saved(state_dict)
        super().load_state_dict(state_dict)
        for name, value in ours.items():
            setattr(self, name, value)
        counted = {**self._counted(), **state_dict}
        self._init_skipped, self._init_overflows = counted["skipped_steps"], counted["_overflows"]
        if self._skipped is not None and self._overflows is not None:
            self._skipped.fill_(self._init_skipped)
            self._overflows.fill_(self._init_overflows)

    def _counted(self) -> dict[str, int]:
        overflows = self._init_overflows if self._overflows is None else int(self._overflows.item())
        return {"skipped_steps": int(self.skipped_steps.item()), "_overflows": overflows}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        counted = self._counted()
        state.update(_init_skipped=counted["skipped_steps"], _init_overflows=counted["_overflows"])
        return {**state, "_skipped": None, "_overflows": None, "_total_norm": None}


def note_skipped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Has the scaler's next ``update()`` see that this optimizer's step was skipped, whatever its own gradients are."""
    if scaler.is_enabled():
        for flag in _flags(scaler._per_optimizer_states[id(optimizer)]):
            flag.fill_(1)


def _check_bounds(min_scale: float, max_scale: float, hysteresis: int) -> None:
    if not all(isinstance(number, int | float) for number in (min_scale, max_scale)):
        raise TypeError(f"min_scale, max_scale: expected numbers, got {min_scale!r}, {max_scale!r}")
    if not 0 < min_scale <= max_scale < math.inf:
        raise ValueError(f"min_scale, max_scale: expected 0 < min_scale <= max_scale, got {min_scale}, {max_scale}")
    if isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 1:
        raise ValueError(f"hysteresis: expected a whole number >= 1, got {hysteresis!r}")


def _check_saved(state_dict: Mapping[str, Any]) -> None:
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        value = state_dict.get(name)
        if not isinstance(value, float) and not (isinstance(value, int) and -(2**63) <= value < 2**63):
            raise ValueError(f"state_dict: expected a number as its {name}, got {value!r}")
    largest = torch.finfo(torch.float32).max
    if not 0 < state_dict["scale"] <= largest:
        raise ValueError(f"state_dict: expected 0 < scale <= {largest}, got {state_dict['scale']!r}")
    for name, least, bound in (("growth_factor", 1, math.inf), ("backoff_factor", 0, 1)):
        if not least < state_dict[name] < bound:
            raise ValueError(f"state_dict: expected {least} < {name} < {bound}, got {state_dict[name]!r}")
    for name in ("growth_interval", "_growth_tracker", "skipped_steps", "_overflows"):
        value = state_dict.get(name, 0)
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"state_dict: expected a whole number >= 0 as its {name}, got {value!r}")


def _check_stats(stats: GradStats | None) -> None:
    if stats is None:
        return
    numbers = {name: getattr(stats, name, None) for name in GradStats._fields}
    if not isinstance(numbers["sum_squares"], Tensor) or not isinstance(numbers["found_inf"], Tensor | None):
        raise TypeError(f"grad_stats: expected a GradStats of tensors, got {type(stats).__name__}")
    given = {f"grad_stats.{name}": number for name, number in numbers.items() if number is not None}
    check_numbers(**given)
    for name, number in given.items():
        if number.is_meta:
            raise ValueError(f"{name}: expected a tensor that has data, got one on meta")
        if number.numel() != 1:
            raise ValueError(f"{name}: expected a tensor of one number, got shape {list(number.shape)}")


def _flags(state: dict[str, Any]) -> list[Tensor]:
    """Returns what was found in the gradients of an optimizer since the last update(), one tensor per device."""
    return list(state["found_inf_per_device"].values())


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Returns whether one of the numbers is not zero, on the device of the first one."""
    result = flags[0] != 0 if flags else torch.zeros((), dtype=torch.bool)
    for flag in flags[1:]:
        result = result | (flag.to(result.device, non_blocking=True) != 0)
    return result
