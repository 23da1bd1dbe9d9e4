"""A torch optimizer whose step runs on the servers of a store."""

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops, optim
from dltrain_ext._arguments import as_number
from dltrain_ext.amp import note_skipped
from dltrain_ext.comm.groups import group_of
from dltrain_ext.elastic import Membership
from dltrain_ext.optim.options import evaluated
from dltrain_ext.optim.state.masters import MASTER
from dltrain_ext.ps.checkpoint import complete
from dltrain_ext.ps.gradients import are_finite
from dltrain_ext.ps.hosts import Host
from dltrain_ext.ps.replaying import Record
from dltrain_ext.ps.serving import completed
from dltrain_ext.ps.store import Store
from dltrain_ext.ps.work import Versions

_log = logging.getLogger("dltrain_ext")


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
        group, servers, quorum, grace, staleness, codec, pull_codec, error_feedback, delay_compensation, timeout,
        window, record: as in :class:`Store`.
        ranks_per_host: how many consecutive ranks of the group share a host. The first of them adds up their gradients,
            pushes the sum, pulls, and gives the others the parameters. Then all hosts' first ranks serve, and a
            ``state_dict`` is made and loaded by them alone.
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
        group: dist.ProcessGroup | Membership | None = None,
        servers: Sequence[int] | None = None,
        quorum: str | int = "all",
        grace: timedelta | None = None,
        staleness: int | None = 0,
        codec: str = "raw",
        pull_codec: str | None = None,
        error_feedback: bool = True,
        delay_compensation: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        window: int = 64,
        record: bool = False,
        ranks_per_host: int = 1,
        **options: Any,
    ):
        if not isinstance(scaler, torch.amp.GradScaler | None):
            raise TypeError(f"scaler: expected a GradScaler or None, got {type(scaler).__name__}")
        self._host: Host | None = None
        if type(ranks_per_host) is not int or ranks_per_host < 1:
            raise ValueError(f"ranks_per_host: expected an int of at least 1, got {ranks_per_host!r}")
        if ranks_per_host > 1:
            if isinstance(group, Membership):
                raise ValueError(f"ranks_per_host: expected 1 with a membership, got {ranks_per_host}")
            if servers is not None:
                raise ValueError(f"servers: expected None with ranks_per_host of {ranks_per_host}, got {servers!r}")
            whole = group_of(group)
            wait = timedelta(seconds=_ops.timeout_of(whole)) if timeout is None else timeout
            self._host = Host(whole, ranks_per_host, wait)
            group = self._host.leaders
        self.store = Store(
            group,
            servers,
            optimizer=optimizer,
            quorum=quorum,
            grace=grace,
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
            groups.append(({key: value for key, value in given.items() if key != "lr" or value is not None}, names))
            self._parameters.update(zip(names, each["params"], strict=True))
        self._before = 0  # versions before those of the store
        if self._is_worker:
            self.store.init(self._parameters, groups)
        for each, options_of in zip(self.param_groups, groups, strict=True):
            each.update(completed(optimizer.__name__, options_of[0]))
        self._share_parameters()

    @property
    def version(self) -> int:
        """The lowest version of the parameters that the last step has read."""
        return self._before + self.store.version_before + self._read.lowest

    @property
    def versions(self) -> Versions:
        """What the last step has read."""
        return self._read

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients and pulls the parameters. Returns the result of ``closure``, or None.

        Raises:
            TypeError: ``closure`` is not callable.
            torch.distributed.DistBackendError: a rank that it needs is lost or late; the message names it.
        """
        loss = evaluated(closure)
        rates = [as_number(each["lr"], "lr") for each in self.param_groups]
        gradients, finite = self._gradients()
        if self._host is not None:
            gradients = self._host.reduce(gradients)
            finite = are_finite(gradients.values())
        if self._is_worker:
            weight = None
            if self._host is not None and self.store.grace is not None:
                weight = self._host.share
            elif self._host is not None and not self.store.quorum:
                weight = self._host.share / self.store.workers
            if self.store.renew():
                self._read = Versions(0, 0, False)
            try:
                pull = self.store.push_pull(gradients, self._parameters, rates=rates, weight=weight, finite=finite)
                pull.wait()
                self._read = pull.versions
            except dist.DistBackendError as error:
                if not self.store.renew(failed=True):
                    raise
                _log.warning("ps: a step was given up, and is a part of the values of some servers at most: %s", error)
                self._read = Versions(0, 0, False)
        self._share_parameters()
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
        return gradients, are_finite(gradients.values())

    @property
    def _is_worker(self) -> bool:
        return self._host is None or self._host.is_leader

    def _share_parameters(self) -> None:
        """Gives the parameters of the leader, and what it has read, to the other ranks of the host."""
        if self._host is not None:
            read = torch.tensor(self._read, dtype=torch.int64)
            self._host.broadcast([*self._parameters.values(), read])
            lowest, highest, skipped = read.tolist()
            self._read = Versions(lowest, highest, bool(skipped))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the servers in the form of the optimizer's own ``state_dict``, which can load it, and
        which this class can load: with float32 masters of half-precision parameters. It is a collective call of all
        workers, and the state is one version. The entry ``"ps"`` has the ``version``, the servers' float32 ``values``,
        the number of workers, and what encoding has lost of this worker's pushes."""
        whole = self.store.save()
        assert whole is not None
        number = self._before + whole.versions[0]
        local, params = self.store.local_optimizer(whole.values)
        if number:
            entries = {name: entry for name, entry in whole.entries.items() if self._parameters[name].numel()}
            for name, entry in entries.items():
                masters = {} if self._parameters[name].dtype == torch.float32 else {MASTER: whole.values[name].clone()}
                local.state[params[name]] = {**entry, **masters}
        state: dict[str, Any] = local.state_dict()
        for own, saved in zip(self.param_groups, state["param_groups"], strict=True):
            saved.update({key: value for key, value in own.items() if key != "params"})
        lost = {key: residual.clone() for key, residual in self.store.residuals().items()}
        state["ps"] = {"version": number, "values": whole.values, "workers": self.store.workers, "residuals": lost}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of the optimizer that runs on the servers. It is a collective call of all
        workers, before the first step, each with its own state: what encoding has lost is a worker's own. With another
        number of workers that starts from zero.

        Raises:
            ValueError: it is not the state of such an optimizer, or has other options than this one, except for ``lr``.
                Nothing has changed.
        """
        ours = state_dict.get("ps", {}) if isinstance(state_dict, dict) else {}
        values = ours.get("values", self._parameters)
        if values.keys() != self._parameters.keys():
            raise ValueError(f"state_dict: expected values of {sorted(self._parameters)}, got {sorted(values)}")
        local, params = self.store.local_optimizer(values)
        local.load_state_dict({key: value for key, value in state_dict.items() if key != "ps"})
        for own, loaded in zip(self.param_groups, local.param_groups, strict=True):
            for name in own.keys() & loaded.keys() - {"params", "param_names", "lr", "initial_lr"}:
                if own[name] != loaded[name]:
                    raise ValueError(f"state_dict: expected {name} of {own[name]!r}, got {loaded[name]!r}")
        updated = bool(local.state)
        complete(local)
        self.store.restore(local, params, updated=updated)
        lost = ours.get("residuals", {}) if ours.get("workers") == self.store.workers else {}
        for key, residual in self.store.residuals().items():
            residual.copy_(lost[key]) if key in lost else residual.zero_()
        for own, loaded in zip(self.param_groups, local.param_groups, strict=True):
            own.update({key: value for key, value in loaded.items() if key not in ("params", "param_names")})
        self._before = int(ours.get("version", 0))
        self.store.pull(self._parameters).wait()

    def record(self) -> Record:
        """Returns :meth:`Store.record`."""
        return self.store.record()

    def close(self, timeout: timedelta | None = None) -> None:
        """Ends the store, as :meth:`Store.close`."""
        if self._is_worker:
            self.store.close(timeout)
        if self._host is not None:
            self._host.close()
