"""What our optimizers share: torch's manners around a step that one call makes for a whole parameter group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # elements: a cache line


class FusedStep(torch.optim.Optimizer):
    """Mixed into an optimizer of torch.optim, which brings the constructor, the groups and the state_dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["differentiable"]:
                name = type(self).__name__
                raise ValueError(
                    f"differentiable: expected False, got True; torch.optim.{name} has a differentiable step"
                )
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError("params: expected each parameter once, got one that is twice in the group")
        except ValueError:
            self.param_groups.pop()
            raise

    def _prepare(self) -> None:
        self._fused: list[Any] = []
        self._step_supports_amp_scaling = True  # asks GradScaler to hand grad_scale and found_inf to step()

    def _make_fused(self) -> Any:
        """The compiled part of one parameter group."""
        raise NotImplementedError

    def _gather(self, fused: Any, group: dict[str, Any], completed: Sequence[Tensor] = ()) -> list[Tensor]:
        """Has ``fused`` read the group; returns the parameters whose state is incomplete. ``completed``: those whose
        state has been made for this very step.
        """
        raise NotImplementedError

    def _complete_state(self, params: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Gives these parameters, all on one device, what their state lacks."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of the step beside ``lr`` and ``maximize``."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returned, or None.

        Parameters on a CUDA device are updated on its current stream, and no host waits: a GradScaler's verdict and a
        learning rate that is a CUDA tensor are read on the device. The step that first creates state asks the verdict
        of the host, so that a skipped one leaves no state behind.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.is_cpu and found_inf.item() != 0:
            return loss

        while len(self._fused) < len(self.param_groups):
            self._fused.append(self._make_fused())
        groups = list(zip(self._fused, self.param_groups, strict=False))
        try:
            # All groups are read before anything is changed, so that an error leaves everything as it was.
            incomplete = [self._gather(fused, group) for fused, group in groups]
            arguments = [self._arguments(group) for _, group in groups]
            if any(incomplete) and found_inf is not None and found_inf.item() != 0:
                return loss
            for (fused, group), params in zip(groups, incomplete, strict=True):
                if params:
                    for device in {p.device for p in params}:
                        self._complete_state([p for p in params if p.device == device], group)
                    self._gather(fused, group, completed=params)
            for (fused, _), given in zip(groups, arguments, strict=True):
                fused.step(**given)
        finally:
            for fused, _ in groups:
                fused.release()
        return loss

    def _arguments(self, group: dict[str, Any]) -> dict[str, Any]:
        lr = group["lr"]
        on_device = isinstance(lr, Tensor) and lr.is_cuda
        return {
            **self._hyper(group),
            "lr": 0.0 if on_device else float(lr),
            "tensor_lr": lr if on_device else None,
            "maximize": bool(group["maximize"]),
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }

    def _lay_out(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """Gives each parameter the zeroed state tensors of these names that it lacks: views of one flat tensor, since
        thousands of small ones would lie all over memory, and large ones of equal alignment get in each other's way in
        the cache.
        """
        for p in params:
            for name in names:
                if name in self.state[p] and not isinstance(self.state[p][name], Tensor):
                    kind, shape = type(self.state[p][name]).__name__, list(p.shape)
                    raise TypeError(f"state[{name!r}] of a parameter of shape {shape}: expected a tensor, got {kind}")
        places, total = [], 0
        for p in params:
            places.append(total)
            total += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        arena = torch.zeros(len(names) * total, dtype=torch.float32, device=params[0].device)
        for p, place in zip(params, places, strict=True):
            dense = torch.empty_like(p, device="meta", dtype=torch.float32)  # p's strides, if they leave no holes
            for index, name in enumerate(names):
                if name not in self.state[p]:
                    self.state[p][name] = arena.as_strided(p.shape, dense.stride(), index * total + place)
