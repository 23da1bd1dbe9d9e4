"""The preconditioner: when factors are taken and inverted, and what becomes of the gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext._arguments import as_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.comm import Owners
from dltrain_ext.comm.groups import ranks_of
from dltrain_ext.kfac import checkpoint
from dltrain_ext.kfac.batches import Batches
from dltrain_ext.kfac.cholesky import cost
from dltrain_ext.kfac.inverses import Inverses
from dltrain_ext.kfac.layers import APPROXIMATIONS, Hook, Layer
from dltrain_ext.kfac.selection import select

Number = float | Callable[[], float]


class KFAC:
    """Preconditions the gradients of Linear and Conv2d layers by K-FAC, in front of any optimizer::

        preconditioner = kfac.KFAC(model, lr=lambda: optimizer.param_groups[0]["lr"])
        loss.backward()
        preconditioner.step()
        optimizer.step()

    ``step`` replaces the gradient V of a layer's weights (as a matrix, with the bias as its last column) by
    ``nu (G + sqrt(damping) / pi I)^-1 V (A + pi sqrt(damping) I)^-1``, where A and G are the running means of the
    layer's Kronecker factors, of the second moments of its inputs and of the gradients of its outputs for the loss of
    one example (``dltrain_ext/kfac/layers.py`` has the formulas), pi is the square root of the quotient of the mean
    diagonals of A and G (Martens & Grosse 2015, arXiv:1503.05671, 6.3), and
    ``nu = min(1, sqrt(kl_clip / (lr^2 sum of V * preconditioned V)))`` limits the change of all layers together
    (Ba, Grosse & Martens 2017).

    **Ranks.** Gradients are those of DistributedDataParallel, with the hook of :mod:`dltrain_ext.ddp` or without. Each
    rank keeps running means of its own. When inverses are made, each layer's means go to its owner
    (:class:`dltrain_ext.comm.Owners`), as triangles in ``codec``; the owner inverts them, and sends the inverses to
    ``grad_worker_fraction`` of the ranks. With less than 1, the gradients of layers that other ranks have
    preconditioned travel at every step, in ``gradient_codec``. All ranks use what was decoded, also the owner, so all
    compute with the same bits; their gradients have the same bits if their products do, as on processors of one kind
    with as many threads. Without a process group it works in one process.

    The host waits for the device only when inverses are made. A factor leaves out the batches for which it is not
    finite.

    **Which passes count.** All backward passes through layers in training mode, while factors are taken, also those of
    ``torch.autograd.grad``. Call ``eval()`` for passes that are no part of the training.

    Args:
        model: the module, or a DistributedDataParallel of it. Linear and Conv2d layers with groups=1 whose weight is a
            parameter that requires a gradient are preconditioned. All other parameters are left as they are;
            ``print(preconditioner)`` lists the layers. A layer that is called several times in a step counts each call
            as a batch.
        damping: what is added to the Fisher matrix, > 0: a number, or a function that returns it when inverses are
            made, the same on all ranks.
        factor_decay: by what the sums of the earlier batches are multiplied at each update of the factors, 0 to 1.
        factor_update_steps: the factors are updated at every such step.
        inv_update_steps: inverses are made at every such step; the first time at the first one.
        kl_clip: the largest change, by the quadratic model; None for no limit.
        lr: the learning rate of the optimizer, for ``kl_clip``: a number, or a function that returns it.
        grad_worker_fraction: the fraction of the ranks that precondition a layer's gradients. 1 sends only inverses, 0
            (one rank) only gradients, and what is between both. Times the number of ranks, rounded, and at least 1, it
            must be a divisor of the number of ranks.
        codec: one of ``codecs.CODECS``, in which factors and inverses are sent. They are divided by the mean of their
            diagonals before. Codes with fewer bits than fp16 are too coarse for a small damping.
        gradient_codec: one of ``codecs.CODECS``.
        approximation: ``"expand"`` or ``"reduce"``, how weights that positions share are treated.
        accumulation_steps: the number by which the loss of each of several backward passes of one step is divided.
        skip_layers: regular expressions; layers whose name or class matches one are left as they are.
        scaler: the GradScaler that scales the loss. ``step`` comes before ``scaler.unscale_`` and ``scaler.step``.
        group: the process group that averages the gradients; the default group if None.

    Attributes:
        layers: the names of the layers.
        owners: who inverts the factors of which layer.
        retries: how many times the damping of some factor was multiplied by 10, because its Cholesky factorization had
            failed; on all ranks together.

    Raises:
        TypeError, ValueError: an argument is invalid, or a layer's weight is used by another module too, is not
            initialized or is a DTensor; the message names it, the expected and the actual value.
    """

    def __init__(
        self,
        model: nn.Module,
        damping: Number = 1e-3,
        factor_decay: float = 0.95,
        factor_update_steps: int = 10,
        inv_update_steps: int = 100,
        kl_clip: float | None = 1e-3,
        lr: Number = 0.1,
        grad_worker_fraction: float = 1.0,
        codec: str = "fp16",
        *,
        gradient_codec: str = "raw",
        approximation: str = "expand",
        accumulation_steps: int = 1,
        skip_layers: Sequence[str] = (),
        scaler: GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        _check_numbers(damping=damping, lr=lr, kl_clip=kl_clip)
        for name, share in (("factor_decay", factor_decay), ("grad_worker_fraction", grad_worker_fraction)):
            if not 0 <= as_number(share, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {share!r}")
        for name, steps in (
            ("factor_update_steps", factor_update_steps),
            ("inv_update_steps", inv_update_steps),
            ("accumulation_steps", accumulation_steps),
        ):
            if type(steps) is not int or steps < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {steps!r}")
        for name, some in (("codec", codec), ("gradient_codec", gradient_codec)):
            if not isinstance(some, str) or some not in CODECS:
                raise ValueError(f"{name}: expected one of {', '.join(CODECS)}, got {some!r}")
        if not isinstance(approximation, str) or approximation not in APPROXIMATIONS:
            raise ValueError(f"approximation: expected one of {', '.join(APPROXIMATIONS)}, got {approximation!r}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(scaler, GradScaler | None):
            raise TypeError(f"scaler: expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        self.damping, self.lr, self.kl_clip = damping, lr, kl_clip
        self.factor_update_steps, self.inv_update_steps = factor_update_steps, inv_update_steps
        self._gradient_codec = gradient_codec
        self._batches = Batches(factor_decay, accumulation_steps, scaler)
        found = select(model, skip_layers)
        self._layers = {name: Layer(layer, approximation, self._batches) for name, layer in found.items()}
        moments = [moment for layer in self._layers.values() for moment in layer.moments]
        self._batches.sums += [number for moment in moments for number in (moment.sum, moment.weight)]
        self.layers = list(self._layers)
        costs = {name: sum(map(cost, layer.shape)) for name, layer in self._layers.items()}
        device = next(iter(self._layers.values())).inputs.sum.device
        self.owners = Owners(costs, workers=_workers(grad_worker_fraction, group), group=group, device=device)
        self._inverses = Inverses(self._layers, self.owners, codec)
        self._steps, self._is_loaded = 0, False
        self._hooks = [
            layer.module.register_forward_hook(Hook(layer), with_kwargs=True) for layer in self._layers.values()
        ]

    def __str__(self) -> str:
        return f"KFAC of {len(self.layers)} layers; factors and inverses: {self.owners}"

    @property
    def retries(self) -> int:
        return self._inverses.retries

    @torch.no_grad()
    def step(self) -> None:
        """Preconditions the gradients, in place. All ranks call it once a step, when the gradients have been averaged,
        and before the step of the optimizer.

        Raises:
            RuntimeError: inverses are to be made, and there was no forward and backward pass; or the scaler has
                unscaled gradients.
            ArithmeticError: the factors of a layer cannot be inverted; on all ranks.
            torch.distributed.DistBackendError: a rank is lost or late, as for :func:`dltrain_ext.comm.all_reduce`.
        """
        self._batches.check_stage()
        if self._steps % self.inv_update_steps == 0 or self._inverses.lacks_some or self._is_loaded:
            self._inverses.update(_value("damping", self.damping))
            self._is_loaded = False
        self._precondition()
        self._steps += 1
        self._batches.end(self._next_are_taken())

    def _next_are_taken(self) -> bool:
        return self._steps % self.factor_update_steps == 0 or self._inverses.lacks_some

    def _precondition(self) -> None:
        found = {name: self._layers[name].gradient() for name in self._inverses.names}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if not gradients:
            return
        worked = {
            name: self._inverses.precondition(name, gradients[name])
            for name in self.owners.worked_on
            if name in gradients
        }
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        preconditioned = self.owners.gather(worked, shapes, self._gradient_codec)
        factor = self._limit(gradients, preconditioned)
        for name, gradient in preconditioned.items():
            self._layers[name].set_gradient(gradient if factor is None else gradient.mul_(factor))

    def _limit(self, gradients: dict[str, Tensor], preconditioned: dict[str, Tensor]) -> Tensor | None:
        """Returns by what the preconditioned gradients are multiplied. It is NaN if one of them is not finite, so a
        scaler sees that in all gradients."""
        if self.kl_clip is None:
            return None
        products = [torch.dot(gradients[name].flatten(), some.flatten()) for name, some in preconditioned.items()]
        change = torch.stack(products).sum().abs() * _value("lr", self.lr) ** 2 / self._batches.loss_scale() ** 2
        return torch.where(change.isfinite(), (self.kl_clip / change).sqrt().clamp(max=1), torch.nan)

    def state_dict(self) -> dict[str, Any]:
        """Returns the means of the factors over all ranks, in fp32 on the CPU, their weights, and the number of steps.
        It is the same on all ranks, and any number of ranks can load it. This is a collective call: all ranks make it,
        also those that do not save the result."""
        return {"steps": self._steps, "layers": checkpoint.collect(self._layers, self.owners)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` has returned on any number of ranks. The next step makes inverses.

        Raises:
            TypeError, ValueError: it is not the state of a KFAC of such layers. Nothing has changed.
        """
        self._steps = checkpoint.load(state_dict, self._layers)
        self._inverses.reset()
        self._is_loaded = self._steps > 0
        self._batches.are_taken = self._is_loaded  # as the last step of the run that was saved
        self._batches.end(self._next_are_taken())

    def close(self) -> None:
        """Removes the hooks from the model, and closes the connections."""
        for hook in self._hooks:
            hook.remove()
        self.owners.close()


def _workers(fraction: float, group: dist.ProcessGroup | None) -> int:
    ranks = len(ranks_of(group))
    workers = max(1, round(fraction * ranks))
    if ranks % workers:
        valid = ", ".join(f"{some}/{ranks}" for some in range(1, ranks + 1) if ranks % some == 0)
        raise ValueError(f"grad_worker_fraction: expected one of {valid} on {ranks} ranks, got {fraction!r}")
    return workers


def _value(name: str, number: Number) -> float:
    value = number() if callable(number) else number
    _check_numbers(**{name: value})
    return float(value)


def _check_numbers(**given: Any) -> None:
    for name, value in given.items():
        if callable(value) or (name == "kl_clip" and value is None):
            continue
        least = 0.0 if name == "lr" else math.ulp(0.0)
        if not least <= as_number(value, name) < math.inf:
            raise ValueError(f"{name}: expected a finite number {'>= 0' if name == 'lr' else '> 0'}, got {value!r}")
