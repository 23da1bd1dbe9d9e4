"""A torch optimizer whose step runs on the servers of a store."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import optim
from dltrain_ext._arguments import as_number
from dltrain_ext.amp import note_skipped
from dltrain_ext.ps.replaying import Record
from dltrain_ext.ps.store import Store
from dltrain_ext.ps.work import Versions


class Optimizer(torch.optim.Optimizer):
    """Pushes gradients to the servers of a :class:`Store`, which update the parameters, and pulls the parameters.

    Making one is a collective call; afterwards all workers have the parameters of the first one. A step pushes the
    gradients and returns when the parameters contain them, and the gradients of the other workers as far as
    ``staleness`` requires. In synchronous mode (``quorum="all"``, ``staleness=0``) and with ``codec="raw"`` this has
    the bits of an all-reduce of the gradients (average, algorithm ``direct``) and a local step.

    Args:
        named_parameters: ``(name, parameter)`` pairs, as ``model.named_parameters()`` gives them, or groups of them:
            dicts with ``params`` and options. Parameters are float32, float16 or bfloat16, on any device; the servers
            have them in float32, so half-precision parameters need no masters.
        optimizer: a class of ``dltrain_ext.optim`` except SGLD; its options are ``options``.
        group, servers, quorum, staleness, codec, pull_codec, error_feedback, delay_compensation, timeout, window,
        record: as in :class:`Store`.
        scaler: the GradScaler or LossScaler of the training, which then also learns of the steps that were skipped
            because of another worker's gradients.

    ``param_groups`` have the options of ``optimizer``. Only ``lr`` may change later: every push has the rate that its
    worker has then, so a schedule of the global version is ``group["lr"] = f(optimizer.version)``. A parameter without
    a gradient is pushed as zeros. With a GradScaler, ``unscale_`` and clipping of the worker's own gradient work as
    always; a step whose gradients are not finite is pushed without them.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between the workers.
        torch.distributed.DistBackendError: a rank did not come.
    """

    def __init__(
        self,
        named_parameters: Iterable[Any],
        optimizer: type = optim.AdamW,
        *,
        group: dist.ProcessGroup | None = None,
        servers: Sequence[int] | None = None,
        quorum: str | int = "all",
        staleness: int | None = 0,
        codec: str = "raw",
        pull_codec: str | None = None,
        error_feedback: bool = True,
        delay_compensation: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        window: int = 64,
        record: bool = False,
        **options: Any,
    ):
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise TypeError(f"scaler: expected a GradScaler or None, got {type(scaler).__name__}")
        self.store = Store(
            group,
            servers,
            optimizer=optimizer,
            quorum=quorum,
            staleness=staleness,
            codec=codec,
            pull_codec=pull_codec,
            error_feedback=error_feedback,
            delay_compensation=delay_compensation,
            timeout=timeout,
            window=window,
            record=record,
            **options,
        )
        self._scaler = scaler
        self._read = Versions(0, 0, False)
        super().__init__(named_parameters, {"lr": None, **options})
        self._step_supports_amp_scaling = True  # a GradScaler then calls step() also where it would be skipped
        groups = []
        self._parameters: dict[str, Tensor] = {}
        for each in self.param_groups:
            names = each.get("param_names")
            if names is None:
                raise TypeError("named_parameters: expected (name, parameter) pairs, got parameters without names")
            given = {key: value for key, value in each.items() if key not in ("params", "param_names")}
            groups.append(({key: value for key, value in given.items() if value is not None}, names))
            self._parameters.update(zip(names, each["params"], strict=True))
        self.store.init(self._parameters, groups)
        for each, options_of in zip(self.param_groups, self.store.options, strict=True):
            each.update(options_of)

    @property
    def version(self) -> int:
        """The lowest version of the parameters that the last step has read."""
        return self._read.lowest

    @property
    def versions(self) -> Versions:
        """What the last step has read."""
        return self._read

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients and pulls the parameters. Returns the result of ``closure``, or None.

        Raises:
            torch.distributed.DistBackendError: a rank that it needs is lost or late; the message names it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = [as_number(each["lr"], "lr") for each in self.param_groups]
        gradients, finite = self._gradients()
        self.store.push(gradients, rates=rates, finite=finite)
        pull = self.store.pull(self._parameters)
        pull.wait()
        self._read = pull.versions
        if self._read.skipped and self._scaler is not None:
            note_skipped(self._scaler, self)
        return loss

    def _gradients(self) -> tuple[dict[str, Tensor], bool]:
        """Returns the unscaled gradients, and whether they are finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        gradients = {}
        for name, parameter in self._parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.is_sparse:
                raise TypeError(f"{name}: expected a dense gradient, got a sparse one")
            gradients[name] = gradient if scale is None else gradient.float() / scale.to(gradient.device)
        if found is not None:
            return gradients, not bool(found)
        return gradients, all(bool(gradient.isfinite().all()) for gradient in gradients.values())

    def record(self) -> Record:
        """Returns :meth:`Store.record`."""
        return self.store.record()

    def close(self, timeout: timedelta | None = None) -> None:
        """Ends the store, as :meth:`Store.close`."""
        self.store.close(timeout)
