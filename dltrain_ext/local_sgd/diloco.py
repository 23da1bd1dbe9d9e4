"""Outer optimizers: the sites of a run train on their own, and from time to time average what they have moved."""

import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dltrain_ext import ps
from dltrain_ext.elastic import Membership
from dltrain_ext.local_sgd.averaging import Averaging
from dltrain_ext.local_sgd.decoupled import Decoupled
from dltrain_ext.local_sgd.exchange import Exchange
from dltrain_ext.local_sgd.settings import Settings
from dltrain_ext.local_sgd.sites import check_alone
from dltrain_ext.local_sgd.trained import trained


class DiLoCo:
    """Averages the models of several sites every ``sync_every`` steps of their own optimizers (Douillard et al. 2023,
    arXiv 2311.08105).

    It hooks on ``inner.step()``, so that the training loop does not change. After ``sync_every`` steps the mean over
    the sites of how far each has moved is the gradient of an outer optimizer, stochastic gradient descent with
    momentum, whose result becomes the parameters of all sites. What a site sends is encoded. The state of the inner
    optimizer and buffers of the model, such as those of batch normalization, stay at each site.

    With ``fragments`` the model is averaged in as many parts, one after another, so that links carry a part of the
    bytes at a time; with ``delay`` they do so while the sites go on training (Streaming DiLoCo, Douillard et al. 2025,
    arXiv 2501.18512)::

        outer = local_sgd.DiLoCo(model, inner, sync_every=100, fragments=4, delay=20)

    A site may have several ranks, by DDP or FSDP2. Then ``group`` has the ranks with the same place at all sites::

        mesh = init_device_mesh("cpu", (sites, ranks_per_site), mesh_dim_names=("sites", "ranks"))
        model = DistributedDataParallel(module, process_group=mesh.get_group("ranks"))
        outer = local_sgd.DiLoCo(model, inner, group=mesh.get_group("sites"))

    Ranks of a site that have the same parameters share the work, so a site sends as much as one rank would. After each
    outer step all sites have the same bits. A digest of them goes with the next average, which fails if they differ.

    Making it is a collective call over the group. If the parameters of the sites differ at the first step, those of the
    group's first rank are sent to all, unless a state was loaded. It has two copies of the parameters in fp32, in the
    CPU's memory also if they are on CUDA, one without momentum, and one more with ``error_feedback``; while a part is
    under way, with ``delay`` or on CUDA, also a copy of that part. Messages go over Gloo, whatever the backend of the
    group. Before a part is sent from CUDA the host waits for the device once.

    Args:
        model: the module, or the DDP or FSDP2 model.
        inner: its optimizer, any of torch's interface. A loss scaler may skip its steps; sites then reach the next
            average later.
        sync_every: the number of steps between two averages of a parameter; a multiple of ``fragments``.
        lr, momentum, nesterov: of the outer optimizer.
        fragments: the number of parts of the model.
        delay: the number of steps that the sites go on while a part is under way, less than ``sync_every /
            fragments``.
        mix: with ``delay``, the share of a site's own parameters in the new ones, the rest is the outer optimizer's.
        codec: one of ``codecs.CODECS``. Parameters of at most one dimension, and those of fewer than
            ``min_compress_numel`` elements, are sent as fp32 in the same messages.
        error_feedback: add what encoding loses to the next average, as in :class:`dltrain_ext.ddp.AllReduceState`.
        group: a rank of each site; the default group if None. Or the :class:`dltrain_ext.elastic.Membership` of a job
            whose sites, of one rank each, come and go. It begins with the first step, which waits until this site is a
            member; one that joins takes what all sites have, bit for bit, and its first gradients are not used. When a
            site is lost the others go on by themselves.
        timeout: how long an average may wait for the other sites; the group's own timeout if None.
        allow_public: send over public addresses, although nothing is encrypted or authenticated (docs/security.md).
        store: one without keys, whose servers average what the sites have moved, and take the outer steps. Then no site
            waits for others, see ``quorum``. The sites, of one rank each, are the workers of the store; ``group``,
            ``timeout``, ``min_compress_numel`` and ``allow_public`` are for sites without a store. The first step is a
            collective call of all sites and of the ranks that serve.
        quorum: with a store, how many sites' movements make a version of a fragment, or ``"all"``. A site that has sent
            a fragment takes the version which that is a part of at the end of ``delay``, or goes on and takes it after
            a later step if it is not there yet; it sends that fragment again only then.
        grace: with a store, how long a version of ``quorum`` movements waits for more. The mean is then weighted by
            steps. A site waits as long for its version. None: not at all.
        weight: with a grace, the weight of this site's steps in the mean, such as its batch size over those of others.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between the sites.
        PermissionError: a rank would be reached at a public address.
        torch.distributed.DistBackendError: a site did not come.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        *,
        sync_every: int = 100,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        codec: str = "int4",
        error_feedback: bool = True,
        group: dist.ProcessGroup | Membership | None = None,
        timeout: timedelta | None = None,
        min_compress_numel: int = 1024,
        allow_public: bool = False,
        store: ps.Store | None = None,
        quorum: str | int = "all",
        grace: timedelta | None = None,
        weight: float = 1.0,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(inner, Optimizer):
            raise TypeError(f"inner: expected a torch.optim.Optimizer, got {type(inner).__name__}")
        if not isinstance(allow_public, bool):
            raise TypeError(f"allow_public: expected a bool, got {allow_public!r}")
        settings = Settings(
            sync_every, lr, momentum, nesterov, fragments, delay, mix, codec, error_feedback, min_compress_numel
        )
        parameters = trained(model)
        if fragments > len(parameters):
            raise ValueError(
                f"fragments: expected at most the number of trained parameters, {len(parameters)}, got {fragments}"
            )
        self._exchange: Exchange
        if store is None:
            _expect_defaults("without a store", quorum=quorum, grace=grace, weight=weight)
            self._exchange = Averaging(model, parameters, inner, settings, group, timeout, allow_public)
        else:
            if not isinstance(store, ps.Store):
                raise TypeError(f"store: expected a dltrain_ext.ps.Store, got {type(store).__name__}")
            _expect_defaults(
                "with a store",
                group=group,
                timeout=timeout,
                min_compress_numel=min_compress_numel,
                allow_public=allow_public,
            )
            check_alone(model, parameters)
            self._exchange = Decoupled(parameters, inner, settings, store, quorum, grace, weight)
        self._hooks = [
            inner.register_step_pre_hook(self._exchange.begin),
            inner.register_step_post_hook(self._exchange.stepped),
        ]

    @property
    def steps(self) -> int:
        """The steps of the inner optimizer."""
        return self._exchange.steps

    @property
    def outer_steps(self) -> int:
        """The outer steps of all fragments together."""
        return self._exchange.outer_steps

    def finish(self) -> None:
        """Waits for the average that is under way, if there is one, and takes its outer step at once."""
        self._exchange.finish()

    @property
    def store(self) -> ps.Store | None:
        """The store on which the outer optimizer runs, with keys from the first step on; None without one."""
        return self._exchange.store if isinstance(self._exchange, Decoupled) else None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group that has a rank of each site; None if they are members of a job."""
        return self._exchange.group

    @property
    def lost(self) -> int | None:
        """The global rank that is responsible for the failure of an average; None if there is none, or it is not
        known."""
        return self._exchange.lost

    def recover(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the sites that are left when one has been lost, after an average has raised an error::

            try:
                inner.step()
            except dist.DistBackendError:
                outer.recover()

        No site loses a step: the parameters stay as they are. The average that failed is taken again after the next
        step of the inner optimizer. Sites that had the mean before the error pass its outer step on to those that had
        not. What error feedback holds for the fragment that was under way is lost. It is a collective call of the sites
        that are left.

        Args:
            group: a rank of each of them. None: a new one of the ranks of ``group`` without ``lost``, which needs the
                store of the default group.

        Raises:
            RuntimeError: no rank is known to be lost, and no group was given; or a site has several ranks; or the sites
                are members of a job, who go on by themselves.
        """
        self._exchange.recover(group)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain tensors and numbers, for ``torch.save`` on every rank: counts, what all sites had after the
        last outer step, its momentum, and the residuals of this rank.

        An average that is under way is finished first, see :meth:`finish`; all sites should save after the same step.
        """
        return self._exchange.save()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a checkpoint, on all ranks. The parameters are those of the model's own checkpoint, loaded
        before or after.

        Args:
            state_dict: that of this rank if there are as many sites, else a list of those of all sites, whose residuals
                are added up.

        Raises:
            TypeError, ValueError: the state is invalid; nothing has changed.
            RuntimeError: an average is under way, which would write to what is loaded; :meth:`finish` waits for it.
        """
        self._exchange.load(state_dict)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger: ``outer/steps``; ``outer/waited``, the seconds in which training stood still
        for averages; ``outer/nonfinite``, the outer steps whose mean was not finite everywhere; and
        ``outer/wire_bytes``, what this rank has sent, or with a store has pushed."""
        return {
            "outer/steps": self.outer_steps,
            "outer/waited": self._exchange.waited,
            "outer/nonfinite": self._exchange.nonfinite,
            "outer/wire_bytes": self._exchange.wire_bytes,
        }

    def close(self) -> None:
        """Ends the averaging. An average that is under way is given up, and a member leaves its job."""
        for hook in self._hooks:
            hook.remove()
        self._exchange.close()


def _expect_defaults(where: str, **options: Any) -> None:
    for name, value in options.items():
        default = inspect.signature(DiLoCo).parameters[name].default
        if value != default:
            raise ValueError(f"{name}: expected {default!r} {where}, got {value!r}")


class LocalSGD(DiLoCo):
    """Sets the parameters of all sites to their mean every ``sync_every`` steps (Stich 2018, arXiv 1805.09767): a
    :class:`DiLoCo` with ``lr=1``, ``momentum=0`` and, by default, exact messages."""

    def __init__(self, model: nn.Module, inner: Optimizer, *, sync_every: int = 10, codec: str = "raw", **options: Any):
        if own := {"lr", "momentum", "nesterov"} & options.keys():
            raise TypeError(f"{', '.join(sorted(own))}: expected none, since LocalSGD averages; DiLoCo has them")
        super().__init__(
            model, inner, sync_every=sync_every, codec=codec, lr=1.0, momentum=0.0, nesterov=False, **options
        )
