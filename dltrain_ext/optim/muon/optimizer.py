"""Muon whose matrices are orthogonalized with fewer products and, if there are several ranks, each by one of them."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dltrain_ext._arguments import as_number, check_dense, check_number, check_numbers
from dltrain_ext.codecs import CODECS
from dltrain_ext.comm import Owners
from dltrain_ext.optim.metrics import metrics_of
from dltrain_ext.optim.muon.orthogonal import LONGEST, Coefficients, cost, orthogonalized, usual_dtype
from dltrain_ext.optim.options import as_float, check_iterable, evaluated

MOMENTUM = "momentum_buffer"
WAVE = 2**22  # elements that a rank sends at once: larger temporary tensors take long to allocate
ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` with fewer products for matrices that are not square, whose work ranks can share.

    Arguments, behaviour and ``state_dict`` are torch's (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/;
    ``adjust_lr_fn="match_rms_adamw"``: Liu et al. 2025, arXiv:2502.16982), and the results differ by rounding. The
    parameters are matrices of hidden layers; embeddings, vectors and the last layer need another optimizer. Where the
    sides of a matrix differ by more than half of the shorter one, iterations work on its Gram matrix, which is as small
    as that side.

    **Ranks.** With ``group=`` one rank orthogonalizes a matrix (:class:`dltrain_ext.comm.Owners`), and sends the result
    to the others in ``codec``. All ranks use what was decoded, so parameters that were equal stay equal, bit for bit.
    Gradients have to be averaged before, as by DistributedDataParallel. Every rank has the whole momentum, so the
    checkpoint of one rank is complete, and any number of ranks can load it.

    Args:
        params: matrices of real numbers, on one device; or groups of them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.
        dtype: that of the products: ``torch.bfloat16``, as in torch, or ``torch.float32``. If None, bfloat16, but
            float32 where that is faster: on processors without instructions for products of bfloat16, and for small
            matrices on the others.
        group: the process group whose ranks share the work, for example ``torch.distributed.group.WORLD``. If None,
            this process does all of it, as in torch.
        codec: one of ``codecs.CODECS``, in which orthogonalized matrices are sent. "bf16" loses nothing if the products
            are in bfloat16.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """

    _dtype: torch.dtype | None = None
    _group: dist.ProcessGroup | None = None
    _codec = "bf16"
    _owners: Owners | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        codec: str = "bf16",
    ) -> None:
        check_iterable(params)
        check_numbers(lr=lr, weight_decay=weight_decay, momentum=momentum)
        if not isinstance(adjust_lr_fn, str | None):  # torch looks it up in a list
            raise TypeError(f"adjust_lr_fn: expected one of {ADJUSTMENTS}, got {adjust_lr_fn!r}")
        if not isinstance(dtype, torch.dtype | None) or dtype not in (None, *LONGEST):
            raise ValueError(f"dtype: expected torch.float32, torch.bfloat16 or None, got {dtype!r}")
        if not isinstance(group, dist.ProcessGroup | None):
            raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {group!r}")
        if not isinstance(codec, str) or codec not in CODECS:
            raise ValueError(f"codec: expected one of {', '.join(CODECS)}, got {codec!r}")
        self._dtype, self._group, self._codec = dtype, group, codec
        given: Any = lr  # torch declares it as a float, and takes a tensor
        super().__init__(params, given, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group: expected a dict with params, got {type(param_group).__name__}")
        check_iterable(param_group["params"])
        super().add_param_group(param_group)
        try:
            _options_of(self.param_groups[-1])
            for p in self.param_groups[-1]["params"]:
                _check_matrix(p)
        except Exception:
            self.param_groups.pop()
            raise
        self.close()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step. With ``group=`` all of its ranks call it, and the same parameters have
        gradients on all of them; the first step connects the ranks.

        Args:
            closure: a callable that computes the loss and the gradients, called with grad mode enabled; or None.

        Returns:
            The result of ``closure``, or None.

        Raises:
            TypeError, ValueError: a parameter, a gradient, the state or an option is invalid. Nothing has changed.
            torch.distributed.DistBackendError: a rank is lost or late, as for :func:`dltrain_ext.comm.all_reduce`. Some
                of the parameters may have been updated: the ranks that are left have to load a checkpoint, or the
                parameters and the state of one of them.
        """
        loss = evaluated(closure)
        jobs = self._jobs()
        if self._group is not None and jobs:
            self._step_of_ranks(jobs, self._group)
        else:
            for job in jobs:
                self._advance(job)
                job.update(job.direction(job.momentum, self._dtype_of(job.p)))
        return loss

    def _step_of_ranks(self, jobs: Sequence["_Job"], group: dist.ProcessGroup) -> None:
        if self._owners is None:
            params = [(p, options["ns_steps"]) for options in self.param_groups for p in options["params"]]
            costs = {str(index): cost(p, steps, self._dtype_of(p)) for index, (p, steps) in enumerate(params)}
            self._owners = Owners(costs, group=group, device=jobs[0].p.device)
        for wave in _waves(jobs, self._owners.owner):
            owned = [job for job in wave if job.name in self._owners.owned]
            directions = {job.name: job.direction(job.advanced(), self._dtype_of(job.p)).float() for job in owned}
            directions = self._owners.gather(directions, {job.name: job.p.shape for job in wave}, self._codec)
            for job in wave:
                self._advance(job)
                job.update(directions[job.name])

    def _jobs(self) -> list["_Job"]:
        """Returns what there is to do, of which everything has been checked."""
        jobs, index = [], 0
        for group in self.param_groups:
            options = _options_of(group)
            for p in group["params"]:
                _check_matrix(p)
                if p.grad is not None:
                    check_dense(p.grad, f"grad of a param of shape {list(p.shape)}")
                    jobs.append(_Job(str(index), p, p.grad, self._momentum_of(p, p.grad), options))
                index += 1
        devices = list(dict.fromkeys(job.p.device for job in jobs))
        if self._group is not None and len(devices) > 1:
            raise ValueError(f"params: expected all on one device with group=, got {devices[0]} and {devices[1]}")
        return jobs

    def _momentum_of(self, p: Tensor, grad: Tensor) -> Tensor:
        entry = self.state.get(p, {})
        if not isinstance(entry, dict):
            raise TypeError(f"state of a param of shape {list(p.shape)}: expected a dict, got {type(entry).__name__}")
        momentum = entry.get(MOMENTUM)
        if momentum is None:
            return torch.zeros_like(grad)
        if not isinstance(momentum, Tensor):
            raise TypeError(f"{MOMENTUM}: expected a tensor, got {type(momentum).__name__}")
        check_dense(momentum, MOMENTUM)
        for what in ("shape", "dtype", "device"):
            expected, got = getattr(grad, what), getattr(momentum, what)
            if got != expected:
                raise ValueError(f"{MOMENTUM}: expected the {what} of the gradient, {expected}, got {got}")
        return momentum

    def _advance(self, job: "_Job") -> None:
        self.state[job.p][MOMENTUM] = job.momentum.lerp_(job.grad, 1 - job.options.momentum)

    def _dtype_of(self, p: Tensor) -> torch.dtype:
        return self._dtype or usual_dtype(p)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger, a flat dict: ``optim/lr`` or, of several groups, ``optim/lr/0``, ...; and the
        bytes of the state, ``optim/state_bytes``."""
        return metrics_of(self)

    def close(self) -> None:
        """Closes the connections to the other ranks; the next step makes new ones."""
        if self._owners is not None:
            self._owners.close()
            self._owners = None


class _Options(NamedTuple):
    """The options of a parameter group."""

    lr: float
    weight_decay: float
    momentum: float
    eps: float
    nesterov: bool
    coefficients: Coefficients
    steps: int
    adjustment: str | None


class _Job(NamedTuple):
    """A parameter and what its step needs. The momentum is that before the step."""

    name: str
    p: Tensor
    grad: Tensor
    momentum: Tensor
    options: _Options

    def advanced(self) -> Tensor:
        return self.momentum.lerp(self.grad, 1 - self.options.momentum)

    def direction(self, momentum: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns what is subtracted from the parameter, with this momentum of after the step."""
        mean = self.grad.lerp(momentum, self.options.momentum) if self.options.nesterov else momentum
        return orthogonalized(mean, self.options.coefficients, self.options.steps, self.options.eps, dtype)

    def update(self, direction: Tensor) -> None:
        rows, columns = self.p.shape
        if self.options.adjustment == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1, rows / columns))
        self.p.mul_(1 - self.options.lr * self.options.weight_decay)
        self.p.add_(direction, alpha=-self.options.lr * ratio)


def _waves(jobs: Sequence[_Job], owner: Mapping[str, int]) -> list[list[_Job]]:
    """Divides the jobs, alike on all ranks, so that each owner has about ``WAVE`` elements in each part."""
    waves: defaultdict[int, list[_Job]] = defaultdict(list)
    before: Counter[int] = Counter()
    for job in jobs:
        rank = owner[job.name]
        waves[before[rank] // WAVE].append(job)
        before[rank] += job.p.numel()
    return [waves[index] for index in sorted(waves)]


def _options_of(group: dict[str, Any]) -> _Options:
    """Raises TypeError or ValueError that names an invalid option."""
    numbers = {name: as_float(group, name) for name in ("lr", "weight_decay", "momentum", "eps")}
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name}: expected a finite number >= 0, got {number}")
    coefficients, adjustment = group.get("ns_coefficients"), group.get("adjust_lr_fn")
    if not isinstance(coefficients, list | tuple) or len(coefficients) != 3:
        raise ValueError(f"ns_coefficients: expected three numbers, got {coefficients!r}")
    a, b, c = (as_number(number, "ns_coefficients") for number in coefficients)
    steps: Any = group.get("ns_steps")
    check_number(steps, "ns_steps", 100)
    if not isinstance(adjustment, str | None) or adjustment not in ADJUSTMENTS:
        raise ValueError(f"adjust_lr_fn: expected one of {ADJUSTMENTS}, got {adjustment!r}")
    return _Options(
        **numbers, nesterov=bool(group.get("nesterov")), coefficients=(a, b, c), steps=steps, adjustment=adjustment
    )


def _check_matrix(p: Any) -> None:
    if not isinstance(p, Tensor) or isinstance(p, DTensor):
        raise TypeError(f"params: expected plain tensors, got a {type(p).__name__}")
    check_dense(p, "params")
    if p.ndim != 2 or not p.is_floating_point():
        raise ValueError(f"params: expected matrices of real numbers, got {p.dtype} of shape {list(p.shape)}")
