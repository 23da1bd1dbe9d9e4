"""What the optimizers share: the interface of torch.optim for a step that is one call for a parameter group."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.optim import sparse
from dltrain_ext.optim.metrics import metrics_of
from dltrain_ext.optim.options import (
    as_float,
    betas_of,
    check_finite,
    check_iterable,
    evaluated,
    is_on_cuda,
    seed_of,
)
from dltrain_ext.optim.rule import Rule, State
from dltrain_ext.optim.shards import Shards, any_sharded
from dltrain_ext.optim.state import codes, masters
from dltrain_ext.optim.state.layout import check, decoded, is_compact, lay_out, recode

EVERY, NONE = 0, 2**62  # a rule's flag is set for parameters of at least so many dimensions

Unscaler = Callable[[Sequence[_ops.FusedGroup]], tuple[Tensor | None, Tensor | None]]
"""Returns the divisor of the gradients of the groups, which have been read, and a number that is not zero if the step
is skipped: one-element tensors on any device, or None."""


def add_up(numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sum of one-element tensors, float64, on the device of the first."""
    total = numbers[0] if numbers else torch.zeros((), dtype=torch.float64)
    for number in numbers[1:]:
        total = total + number.to(total.device, non_blocking=True)
    return total


def grad_scale_of(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Returns the optimizer's ``grad_scale``, which a GradScaler or the user sets."""
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, Tensor | None):
        raise TypeError(f"grad_scale: expected a tensor of one number or None, got {scale!r}")
    return scale


class FusedStep(torch.optim.Optimizer):
    """The base of the optimizers, beside a class of torch.optim that provides the constructor, the groups and the
    state_dict.

    For a float16 or bfloat16 parameter the step updates a float32 master, ``state[p]["master_param"]``, and copies it
    to the parameter, unless the group's ``master_weights`` is False or "8bit"
    (``dltrain_ext/optim/state/masters.py``). In a group whose ``state_codec`` is "int8", states are stored as codes
    (``dltrain_ext/optim/state/codes.py``).
    """

    unscaler: Unscaler | None = None
    """Unscales the next step's gradients; if None, the attributes that a GradScaler sets do (``_unscale``)."""
    max_grad_norm: float | None = None
    """The 2-norm to which every step clips the gradients of all groups; None: they are not clipped."""
    _shards: Shards | None = None  # only during a step of DTensors
    _numbered: dict[int, int] = {}  # during a step, the number of each parameter, by its id, once it was asked for
    _sparse: Sequence[Sequence[Tensor]] = ()  # during a step, the parameters of each group whose gradient is sparse
    _update_sparse: Callable[[Sequence[Tensor], list[Tensor], dict[str, Any]], None] | None = None
    """Updates parameters of a group with these sparse gradients; None: the optimizer does not take any."""
    _rule: Rule
    _is_indexed = False  # whether a step depends on the indices of the elements
    _given: dict[str, Any] = {}  # options that torch's optimizer does not have

    def __init__(
        self,
        *args: Any,
        master_weights: str | bool = "auto",
        state_codec: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        check_iterable(args[0])
        given = {"master_weights": master_weights, "state_codec": state_codec, "rounding": rounding, "seed": seed}
        usual = {"master_weights": "auto", "state_codec": None, "rounding": "nearest", "seed": 0}
        self._given = {name: value for name, value in given.items() if repr(value) != repr(usual[name])}
        super().__init__(*args, **kwargs)
        self._prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = self.__dict__.get("param_groups", ())
        super().__setstate__(state)
        self._prepare()
        # Options that are missing in a group that another optimizer saved keep their values.
        for group, old in zip(self.param_groups, before, strict=False):
            for name, value in old.items():
                if name != masters.STEP:  # which belongs to the state
                    group.setdefault(name, value)
        if loading := self.__dict__.get("_loading"):
            self._load_as_saved(loading)

    def state_dict(self, *, compressed: bool = False) -> dict[str, Any]:
        """Returns the state as torch.optim's ``state_dict``, with float32 moments and masters, which any such optimizer
        loads.

        Args:
            compressed: moments that are stored as codes (``state_codec``) and masters of 8 bits stay uint8. Then this
                class continues from them with the same bits, and from a DTensor's moments only if it is sharded alike.
                Such masters are only meaningful beside the parameters that they extend.
        """
        if not isinstance(compressed, bool):
            raise TypeError(f"compressed: expected True or False, got {compressed!r}")
        before = self.state
        if not compressed and any(map(is_compact, before.values())):
            self.state = defaultdict(dict, {p: decoded(self._rule, entry, p) for p, entry in before.items()})
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self.state = before
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as in torch.optim, but moments and masters stay float32 for parameters of any dtype, or are
        stored as ``state_codec`` and ``master_weights`` say, whatever form they were saved in. Masters of 8 bits extend
        the parameters, which are to be loaded before.

        Raises:
            ValueError: it is not the state of such an optimizer, or has values that no step can produce. Then nothing
                has changed.
        """
        before = self.state, self.param_groups
        self._loading: dict[str, Any] = {}
        # This hook runs after the user's own hooks, which may change the state.
        hook = self.register_load_state_dict_pre_hook(lambda _, final: self._loading.update(final))
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                self._check_group(group)
                check_finite({"lr": as_float(group, "lr"), **self._hyper(group)})
            for p, entry in self.state.items():
                check(self._rule, entry, p, may_be_sparse=self._update_sparse is not None)
            self._recode()
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            self.state, self.param_groups = before
            raise ValueError(
                f"state_dict: expected one of {type(self).__name__} for these parameters, got one that does not fit: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            hook.remove()
            del self._loading

    def _recode(self) -> None:
        """Stores the state of all parameters as the options of their groups say."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    recode(self._rule, group, self.state[p], p)

    def _load_as_saved(self, state_dict: dict[str, Any]) -> None:
        """Restores codes, moments and masters, which torch has cast to the dtype of their parameter."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor) or key == "step":
                    continue
                if codes.are_codes(value):
                    self.state[p][key] = value.detach().to(p.device, copy=True)
                elif p.dtype != torch.float32 and value.is_floating_point():
                    self.state[p][key] = value.detach().to(p.device, torch.float32, copy=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group: expected a dict with params, got {type(param_group).__name__}")
        check_iterable(param_group["params"])
        self.defaults.update(self._given)  # nothing for the default, so that groups equal torch's
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises TypeError or ValueError that names an invalid option."""
        if group.get("differentiable"):
            name = type(self).__name__
            raise ValueError(f"differentiable: expected False, got True; torch.optim.{name} has a differentiable step")
        masters.check_group(self._rule, group, type(self).__name__)
        codes.check_group(self._rule, group, type(self).__name__)
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError("params: expected each parameter once, got one that is twice in the group")
        self._hyper(group)
        if not is_on_cuda(group["lr"]):
            as_float(group, "lr")

    def _prepare(self) -> None:
        self._fused: list[Any] = []
        self._step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        """Returns the optional states that the parameters of the group have."""
        return ()

    def _states_of(self, group: dict[str, Any]) -> list[State]:
        """Returns the states that the parameters of the group have."""
        optional = self._optional_states(group)
        return [state for state in self._rule.states if not state.optional or state.key in optional]

    def _initial(self, group: dict[str, Any]) -> Mapping[str, float]:
        """Returns the initial values of the states that start at a value of the group."""
        return {}

    def _flagged(self, group: dict[str, Any], starting: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        """Returns parameters for which the rule's flag is set, and the number of dimensions from which on it is set,
        too. ``starting`` are the parameters whose first step this is."""
        return (), NONE

    def _numbers(self, params: Sequence[Tensor]) -> list[int]:
        """Returns which of the optimizer's parameters these are."""
        if not self._numbered:
            every = (p for group in self.param_groups for p in group["params"])
            self._numbered = {id(p): number for number, p in enumerate(every)}
        return [self._numbered[id(p if self._shards is None else self._shards.whole(p))] for p in params]

    def _gather(self, fused: _ops.FusedGroup, group: dict[str, Any], starting: Sequence[Tensor] = ()) -> list[Tensor]:
        """Makes ``fused`` read the group; returns the parameters whose state is incomplete or whose gradient is sparse,
        which it has not read."""
        flagged, dimensions = self._flagged(group, starting)
        params, is_stochastic = group["params"], masters.is_stochastic(group)
        return fused.gather(
            self.state,
            params,
            masters=masters.exist(group),
            optional=list(self._optional_states(group)),
            flagged=list(flagged),
            flagged_from=dimensions,
            runs=self._shards.runs(params) if self._shards and (is_stochastic or self._is_indexed) else [],
            numbers=self._numbers(params) if is_stochastic else [],
        )

    def _complete_state(self, params: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
        """Creates the missing state of these parameters, all on one device; returns those whose first step this is."""
        plain: dict[str, Any] = {"dtype": torch.float32, "device": params[0].device}
        for name, start in self._rule.counters:
            # Each parameter has its own counter, although all are equal at first: torch's step would increment a shared
            # one once per parameter.
            fresh = torch.full((len(params),), start, **plain)
            for index, p in enumerate(params):
                count = self.state[p].get(name)
                if not isinstance(count, Tensor | int | float | None):
                    raise TypeError(f"state[{name!r}]: expected a number, got {type(count).__name__}")
                self.state[p][name] = fresh[index] if count is None else torch.as_tensor(count, **plain)
        initial = {state.key: state.initial for state in self._states_of(group)} | dict(self._initial(group))
        lay_out(self._rule, group, params, initial, self.state)
        return params

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of the step beside ``lr`` and ``maximize``; raises TypeError naming one that is none."""
        betas = dict(zip(("beta1", "beta2"), betas_of(group), strict=True)) if "beta1" in self._rule.hyper else {}
        return betas | {
            name: bool(group[name]) if isinstance(default, bool) else as_float(group, name)
            for name, default in self._rule.hyper.items()
            if name not in betas
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step.

        On a CUDA device parameters are updated on its current stream, and the host does not wait: ``found_inf`` of a
        GradScaler and a learning rate that is a CUDA tensor are read on the device. A step that creates state reads
        ``found_inf`` on the host, so that a skipped step creates none.

        Args:
            closure: a callable that computes the loss and the gradients, called with grad mode enabled; or None.

        Returns:
            The result of ``closure``, or None.
        """
        loss = evaluated(closure)
        fresh = [group for group in self.param_groups if masters.prepare(group)]
        try:
            if any(any_sharded(group["params"]) for group in self.param_groups):
                self._step_of_parts()
            else:
                self._step(self.param_groups)
        except Exception:
            for group in fresh:
                del group[masters.STEP]
            raise
        finally:
            self._numbered = {}
        for group in self.param_groups:
            masters.count(group)
        return loss

    def _step_of_parts(self) -> None:
        state = self.state
        self._shards = Shards(self.param_groups, state)
        self.state = self._shards.state
        try:
            self._step(self._shards.groups)
        finally:
            self.state = state
            self._shards.leave(state)
            self._shards = None

    def _step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        while len(self._fused) < len(param_groups):
            self._fused.append(_ops.make_group(self._rule.name))
        groups = list(zip(self._fused, param_groups, strict=False))
        before: list[tuple[Tensor, dict[str, Any] | None]] = []
        try:
            # All groups are read before anything is changed, so that an error leaves everything as it was.
            incomplete = [self._gather(fused, group) for fused, group in groups]
            hypers = [self._hyper(group) for _, group in groups]
            if any(incomplete):
                self._sparse = [[p for p in params if sparse.has_sparse_grad(p)] for params in incomplete]
                for (_, group), params in zip(groups, self._sparse, strict=True):
                    sparse.check(group, params, type(self).__name__, supported=self._update_sparse is not None)
            scaling = (self.unscaler or self._unscale)([fused for fused, _ in groups])
            arguments = [self._arguments(group, *scaling) for _, group in groups]
            divisor, found_inf = scaling
            if found_inf is not None and (found_inf.is_cpu or any(incomplete)) and found_inf.item() != 0:
                return
            for (fused, group), params in zip(groups, incomplete, strict=True):
                if params:
                    starting: list[Tensor] = []
                    before += [(p, self._entry_of(p)) for p in params]
                    for device in {p.device for p in params}:
                        starting += self._complete_state([p for p in params if p.device == device], group)
                    self._gather(fused, group, starting)
            if self._shards is not None and self._rule.norms:
                self._shards.take_norms([fused for fused, _ in groups], arguments, hypers, self._rule.norms)
        except Exception:
            for p, entry in before:
                self._put_back(p, entry)
            raise
        else:
            for (_, group), params in zip(groups, self._sparse, strict=False):
                if params and self._update_sparse:
                    self._update_sparse(params, sparse.grads_of(params, divisor), group)
            for (fused, _), given, hyper in zip(groups, arguments, hypers, strict=True):
                fused.step(given, hyper)
        finally:
            self._sparse = ()
            for fused, _ in groups:
                fused.release()

    def _entry_of(self, p: Tensor) -> dict[str, Any] | None:
        if p not in self.state:
            return None
        entry = self.state[p]
        if not isinstance(entry, dict):
            raise TypeError(f"state of a param of shape {list(p.shape)}: expected a dict, got {type(entry).__name__}")
        return dict(entry)

    def _put_back(self, p: Tensor, entry: dict[str, Any] | None) -> None:
        """Restores the state of a parameter from before the step."""
        if entry is None:
            self.state.pop(p, None)
        else:
            self.state[p].clear()
            self.state[p].update(entry)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger, a flat dict: ``optim/lr`` or, of several groups, ``optim/lr/0``, ...; what this
        rank keeps of the state, in bytes, as ``optim/state_bytes``; and ``optim/steps``, the most steps of a parameter.
        Waits for the device."""
        return metrics_of(self)

    def sum_squares(self, groups: Sequence[_ops.FusedGroup]) -> list[Tensor]:
        """Returns sums of squares of the gradients that the groups have read in this step: float64 numbers to add."""
        sums = _ops.sum_squares_of(groups) if self._shards is None else self._shards.sum_squares(groups)
        return sums + [number for params in self._sparse for number in sparse.sum_squares(params)]

    def _unscale(self, groups: Sequence[_ops.FusedGroup]) -> tuple[Tensor | None, Tensor | None]:
        """Is the unscaler if none is set: takes the attributes of a GradScaler, and clips to ``max_grad_norm``."""
        found_inf = getattr(self, "found_inf", None)
        # If there are no gradients, GradScaler sets the Python number 0.
        found_inf = found_inf if isinstance(found_inf, Tensor) else None
        scale, max_norm = grad_scale_of(self), self.max_grad_norm
        if max_norm is not None:
            scale, _, _ = _ops.unscale_and_clip(add_up(self.sum_squares(groups)), grad_scale=scale, max_norm=max_norm)
        return scale, found_inf

    def _arguments(
        self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> _ops.StepArguments:
        lr = group["lr"]
        on_device = is_on_cuda(lr)
        return _ops.StepArguments(
            lr=0.0 if on_device else as_float(group, "lr"),
            tensor_lr=lr if on_device else None,
            maximize=bool(group["maximize"]),
            grad_scale=grad_scale,
            found_inf=found_inf,
            seed=seed_of(group),
            rounding_step=group[masters.STEP] if masters.is_stochastic(group) else None,
        )
