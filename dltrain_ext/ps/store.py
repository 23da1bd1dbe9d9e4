"""A key-value store of tensors that is divided among servers."""

import hashlib
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext._arguments import as_number, check_dense, check_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.elastic import Membership
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.ps.checkpoint import Whole, assemble, divide, local_optimizer
from dltrain_ext.ps.connecting import (
    GRACE,
    Group,
    blocks_of,
    is_lossy,
    make_node,
    receive_values,
    send_values,
    shard_of,
)
from dltrain_ext.ps.epochs import Epoch, Epochs, Working
from dltrain_ext.ps.layout import Key
from dltrain_ext.ps.replaying import Record
from dltrain_ext.ps.serving import PLAIN, PLAIN_OPTIONS, Shard, completed, optimizer_named
from dltrain_ext.ps.settings import Settings
from dltrain_ext.ps.weights import check_grace, factors
from dltrain_ext.ps.work import Work, waited

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger("dltrain_ext")


class Store:
    """A sharded key-value store with clocks. Keys are names, values are tensors, and servers have them in float32.

    A version of a key is made when ``quorum`` contributions are in: they are averaged, and the optimizer updates the
    key with the average, on the server. Every worker has a clock for each key, the number of its own pushes. A pull
    waits until the key contains the worker's own pushes and, with a staleness s, all pushes of other workers whose
    clock is below the worker's minus s (stale synchronous parallel; Ho et al. 2013):

    ===================  ========  =========  =====================================================================
    mode                 quorum    staleness  a pull at clock c reads
    ===================  ========  =========  =====================================================================
    synchronous          "all"     0          version c, made of the pushes of clock c - 1 of all workers
    bounded staleness    1         s          all pushes of clocks below c - s, and perhaps later ones
    asynchronous         1         None       what is there
    ===================  ========  =========  =====================================================================

    With a quorum between 1 and all, or with a ``grace``, a push may be in no version for a while; a pull then waits
    until the servers have the pushes, and with ``applied=True`` until they are applied.

    With a ``grace`` a version is made of at least ``quorum`` contributions, and of all others whose push has come by
    the end of the grace. It is their weighted mean, sum(w v) / sum(w), where w is the ``weight`` of a push.

    Large tensors are divided, so each server has about as many bytes. All ranks of the group that do not call
    :func:`serve` make the store, in the same order and with the same arguments.

    Args:
        group: the process group, with any backend; the default group if None. Messages travel over Gloo. With a
            :class:`dltrain_ext.elastic.Membership` workers and servers come and go, see :meth:`renew`.
        servers: the ranks in the group that serve; None: all of them. A rank that serves may be a worker, too; one that
            calls :func:`serve` is none. With a membership those that call :func:`serve`, and no others.
        optimizer: a class of ``dltrain_ext.optim`` except SGLD, which updates the values with the pushed gradients; its
            options are ``options``. None: what is pushed is added to the values, averaged over the quorum.
        quorum: ``"all"``, or how many contributions make a version.
        grace: how long the servers wait for more contributions to a version once a quorum of them is in. It ends when
            all workers that are left have contributed. None: they do not wait. Not with quorum ``"all"``, and not with
            delay compensation.
        codec: the codec of pushes and, where ``pull_codec`` is None, of pulls. With a codec that is not exact, pulls
            send the difference to what the worker holds, which its server knows bit for bit, so what one pull loses is
            in the next one. Gradients have error feedback.
        pull_codec: the codec of pulls.
        error_feedback: keep what encoding loses of a push, and add it to the next one.
        delay_compensation: the factor lambda of delay-compensated SGD (Zheng et al. 2017, Eq. 10), with quorum 1. The
            server adds lambda g^2 (w - w_bak) to a gradient g, where w_bak is what the worker that sent it holds.
        timeout: how long a call waits; the group's own timeout if None.
        window: how many pushes of a worker a server keeps before it refuses them.
        record: keep the order in which the servers handle messages, for :meth:`record` and :func:`replay`.

    A server keeps its values and the optimizer's state; with a ``pull_codec`` that is not exact, or with delay
    compensation, also one copy of its values for each worker (one for all workers in synchronous mode). A worker keeps
    one copy of the values if the ``pull_codec`` is not exact, and one with error feedback.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Membership | None = None,
        servers: Sequence[int] | None = None,
        *,
        optimizer: type | None = None,
        quorum: str | int = "all",
        grace: timedelta | None = None,
        staleness: int | None = 0,
        codec: str = "raw",
        pull_codec: str | None = None,
        error_feedback: bool = True,
        delay_compensation: float = 0.0,
        timeout: timedelta | None = None,
        window: int = 64,
        record: bool = False,
        **options: Any,
    ):
        self._given = {name: value for name, value in locals().items() if name not in ("self", "options")} | options
        self._name = PLAIN if optimizer is None else _name_of(optimizer)
        self._options = {**PLAIN_OPTIONS, **options} if optimizer is None else options
        self._group, self._servers, self._timeout = group, servers, timeout
        pull_codec = codec if pull_codec is None else pull_codec
        for argument, value in (("codec", codec), ("pull_codec", pull_codec)):
            if value not in CODECS:
                raise ValueError(f"{argument}: expected one of {', '.join(CODECS)}, got {value!r}")
        if quorum != "all" and (type(quorum) is not int or quorum < 1):
            raise ValueError(f"quorum: expected 'all' or an int of at least 1, got {quorum!r}")
        _check_staleness(staleness)
        if not as_number(delay_compensation, "delay_compensation") >= 0:
            raise ValueError(f"delay_compensation: expected a number >= 0, got {delay_compensation!r}")
        if delay_compensation and quorum != 1:
            raise ValueError(f"delay_compensation: expected 0 with quorum {quorum!r}, got {delay_compensation!r}")
        self._grace = check_grace(grace, quorum, delay_compensation)
        check_number(window, "window", 2**20)
        self._quorum = 0 if quorum == "all" else int(quorum)
        self._staleness, self._codec, self._pull_codec = staleness, codec, pull_codec
        self._error_feedback = error_feedback and is_lossy(codec)
        if self._error_feedback:
            _ops.check_feedback(codec, False, "error_feedback: expected False")
        if is_lossy(pull_codec):
            _ops.check_feedback(pull_codec, False, "pull_codec: expected another one")
        self._delay_compensation, self._window, self._records = float(delay_compensation), window, record
        self._node: _ops.StoreNode | None = None
        self._residuals: dict[tuple[int, int], Tensor] = {}
        self._membership = group if isinstance(group, Membership) else None
        self._epochs: Epochs | None = None  # with a membership, once there are keys
        # Workers that come and go are a quorum of all, which falls when one leaves; so a pull says what it waits for.
        self._pulls_applied = self._membership is not None and quorum == "all"
        self._version_before = 0
        self._is_closing = False
        if self._membership is not None and servers is not None:
            raise ValueError(f"servers: expected None with a membership, whose servers call serve, got {servers!r}")
        if self._membership is not None and record:
            raise ValueError(f"record: expected False with a membership, got {record!r}")

    def with_options(self, **options: Any) -> "Store":
        """Returns a store of the same ranks, which has these options, where this one has the defaults.

        :meta private:
        """
        if self._node is not None:
            raise ValueError("store: expected one without keys, got one on which init was called")
        if self._membership is not None:
            raise ValueError("store: expected one of a process group, got one of a membership")
        defaults = {each.name: each.default for each in inspect.signature(Store).parameters.values()}
        for name in options:
            if self._given.get(name, defaults.get(name)) != defaults.get(name):
                raise ValueError(f"store: expected one with the default {name}, got {self._given[name]!r}")
        return Store(**{**self._given, **options})

    def init(
        self, values: Mapping[str, Tensor], groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]] | None = None
    ) -> None:
        """Makes the keys. It is a collective call; afterwards ``values`` are those of the first worker on all workers.

        Args:
            values: the tensors by name: dense, of float32, float16 or bfloat16, in any shape and on any device. All
                workers have the same names and shapes, in the same order.
            groups: options of the optimizer, and the names of the keys for which they replace the store's; None: one
                group of all keys.

        Raises:
            TypeError, ValueError: an argument is invalid, or differs between the workers.
            torch.distributed.DistBackendError: a rank did not come.
        """
        if self._node is not None:
            raise RuntimeError("init: expected to be called once, the store has keys")
        check_values(values, "values")
        given = [({}, list(values))] if groups is None else groups
        group_of = {name: number for number, (_, names) in enumerate(given) for name in names}
        if group_of.keys() != values.keys():
            raise ValueError(f"groups: expected each key of values once, got {sorted(group_of)}")
        keys = tuple(Key(name, tuple(value.shape), group_of[name]) for name, value in values.items())
        own = Settings(
            servers=(),
            workers=(),
            keys=keys,
            optimizer=self._name,
            groups=tuple(completed(self._name, {**self._options, **options}) for options, _ in given),
            staleness=self._staleness,
            quorum=self._quorum,
            lockstep=self._quorum == 0 and self._staleness == 0,
            push_codec=self._codec,
            pull_codec=self._pull_codec,
            delay_compensation=self._delay_compensation,
            window=self._window,
            records=self._records,
            grace=self._grace,
        )
        if isinstance(self._group, Membership):
            self._join(self._group, own, values)
            return
        self._connection = connection = Group(self._group, self._timeout)
        ranks = range(len(connection.ranks))
        servers = tuple(ranks if self._servers is None else self._servers)
        if not servers or len(set(servers)) < len(servers) or not set(servers) <= set(ranks):
            raise ValueError(f"servers: expected different ranks below {len(ranks)}, got {self._servers!r}")
        self._settings = settings = connection.agree(replace(own, servers=servers).text())
        if self._quorum > len(settings.workers):
            raise ValueError(f"quorum: expected at most the {len(settings.workers)} workers, got {self._quorum}")
        self._blocks = blocks = blocks_of(settings)
        self._shard = shard = shard_of(connection.rank, settings, blocks)
        first = settings.workers[0]

        def give(mailbox: "_ops.Mailbox") -> None:
            if connection.rank == first:
                send_values(mailbox, settings, blocks, values)
            if shard is not None:
                receive_values(mailbox, shard, connection.timeout)

        self._begin(connection.connect(give), shard)
        self.pull(values).wait()

    def _join(self, membership: Membership, settings: Settings, values: Mapping[str, Tensor]) -> None:
        membership.check_alike(hashlib.sha256(settings.text().encode()).hexdigest(), "values and options of the store")
        self._values = values
        self._epochs = epochs = Epochs(membership, Working(settings, values), self._timeout)
        try:
            self._take_part(epochs, *epochs.enter())
        except BaseException:
            membership.leave()
            raise

    def _take_part(self, epochs: Epochs, epoch: Epoch, mailbox: "_ops.Mailbox") -> None:
        """Takes part in an epoch, or in the next one that does not fail before this worker has the values."""
        while True:
            self._connection, self._settings = epoch.connection, epoch.settings
            self._blocks = blocks_of(epoch.settings)
            self._version_before = epoch.version
            before = self._residuals
            self._begin(mailbox, None)
            for key, residual in self._residuals.items():
                if key in before:
                    residual.copy_(before[key])
            try:
                self.pull(self._values).wait()
                return
            except dist.DistBackendError as error:
                _log.warning("ps: the values of epoch %d have not come: %s", epoch.number, error)
            epoch, mailbox = epochs.renew(self._end(epochs, failed=True))

    def renew(self, *, failed: bool = False) -> bool:
        """With a membership, takes part in the next epoch if the members have changed, or if a call has failed.

        A worker calls it between a pull and the next push, when nothing that it has sent is under way. The
        ``values`` that were given to :meth:`init` are then pulled, and all clocks are 0 again. Those that leave are not
        waited for, and what they have sent counts. After a failure it may be in the values of some servers only.

        Args:
            failed: whether a call has raised DistBackendError.

        Returns:
            Whether an epoch has begun. Without a membership there is no other.

        Raises:
            torch.distributed.DistBackendError: a server is missing for longer than the timeout, or the job has ended.
        """
        self._made()
        if self._epochs is None or not (failed or self._epochs.membership.is_over()):
            return False
        lost = self._end(self._epochs, failed)
        self._take_part(self._epochs, *self._epochs.renew(lost))
        return True

    def _end(self, epochs: Epochs, failed: bool) -> set[int]:
        """Ends an epoch, and returns the numbers of the servers that are lost."""
        node = self._made()
        if not failed:
            failed = not waited(node.finish, self._wait.total_seconds(), self._is_in_vain)
        lost = {self._connection.ranks[rank] for rank in node.gone()} | epochs.silent_servers()
        if failed:  # before the servers miss this worker, and may think that the job has ended
            epochs.membership.give_up(*lost)
        self._finalizer.detach()
        node.close(0.0 if failed else GRACE)
        return lost

    @property
    def version_before(self) -> int:
        """The version that the values had when the present epoch began; 0 without a membership.

        :meta private:
        """
        return self._version_before

    @property
    def workers(self) -> int:
        """The number of workers."""
        self._made()
        return len(self._settings.workers)

    @property
    def worker(self) -> int:
        """The number of this worker, from 0 on."""
        self._made()
        return self._settings.workers.index(self._connection.rank)

    @property
    def quorum(self) -> int:
        """How many contributions make a version; 0 for those of all workers."""
        return self._quorum

    @property
    def grace(self) -> timedelta | None:
        """How long a quorum waits for more contributions; None if it does not."""
        return timedelta(seconds=self._grace) if self._grace else None

    @property
    def options(self) -> tuple[Mapping[str, Any], ...]:
        """The options of the optimizer for each group of keys."""
        self._made()
        return self._settings.groups

    def _is_in_vain(self) -> bool:
        """Returns whether a wait is for a server that stands still, and that another one can replace."""
        return self._epochs is not None and bool(self._epochs.silent_servers())

    def _gives_up(self, waited: float) -> bool:
        """Returns whether a call fails that has waited so long for a server which takes no message."""
        return waited > self._wait.total_seconds() or self._is_in_vain()

    def _work(self, what: str, ticket: "_ops.StoreTicket", write: Callable[[], None] | None = None) -> Work:
        return Work(what, self._made(), [ticket], self._wait, self._is_in_vain, write)

    def _begin(self, mailbox: "_ops.Mailbox", shard: Shard | None) -> None:
        rank, timeout = self._connection.rank, self._connection.timeout
        self._node, self._residuals = node, _ = make_node(
            mailbox, rank, self._settings, self._blocks, shard, error_feedback=self._error_feedback
        )
        self._numbers = {key.name: number for number, key in enumerate(self._settings.keys)}
        self._clocks = dict.fromkeys(self._numbers, 0)
        self._rates = [float(group["lr"]) for group in self._settings.groups]
        self._wait = timeout
        self._finalizer = weakref.finalize(self, node.close, 0.0)
        gives_up = weakref.WeakMethod(self._gives_up)
        node.start(lambda waited: (method := gives_up()) is None or method(waited))

    def push(
        self,
        values: Mapping[str, Tensor],
        clock: int | None = None,
        *,
        rates: Sequence[float] | None = None,
        weight: float | None = None,
        finite: bool = True,
    ) -> Work:
        """Sends gradients, or what is to be added, to their servers. When it returns, ``values`` may change.

        Args:
            values: tensors by name, with the shapes of the keys.
            clock: how often this worker has pushed these keys before; None: it is counted.
            rates: the learning rate of each group for the versions to which this push contributes; None: as before. If
                a version is made of several pushes, the last one's count.
            weight: the factor of this contribution; None: one over the number of contributions of a version. With a
                ``grace``: its weight in the mean, a finite number > 0; None: 1. The values are multiplied by it before
                they are encoded, so with codec ``"fp16"`` they overflow where the product is above 65504.
            finite: False: the values are not finite, and are not read. A version of which one contribution is not
                finite changes nothing, and the workers learn it from their next pull.

        Returns:
            A :class:`Work` that is complete when all servers have the push.
        """
        node = self._made()
        numbers, clock = self._named(values, "values", clock)
        factor, weight = factors(self._settings, weight)
        self._set_rates(rates)
        tensors = [_plain(value) for value in values.values()]
        self._clocks |= dict.fromkeys(values, clock + 1)  # before, since Ctrl-C may end this when all is sent
        try:
            ticket = node.push(
                clock, numbers, tensors, factor=factor, rates=self._rates, skips=not finite, weight=weight
            )
        except Exception:
            self._clocks |= dict.fromkeys(values, clock)
            raise
        return self._work(f"push of clock {clock}", ticket)

    def _set_rates(self, rates: Sequence[float] | None) -> None:
        if rates is None:
            return
        if len(rates) != len(self._rates):
            raise ValueError(f"rates: expected {len(self._rates)}, got {rates!r}")
        self._rates = [as_number(rate, "rates") for rate in rates]

    def pull(
        self,
        into: Mapping[str, Tensor],
        clock: int | None = None,
        staleness: int | str | None = "store",
        *,
        applied: bool = False,
    ) -> Work:
        """Reads values from their servers.

        Args:
            into: the tensors that are written, by name, with the shapes of the keys.
            clock: how many of this worker's pushes the values must contain; None: all of them.
            staleness: how many clocks other workers may be behind; None: any number. By default the store's.
            applied: True: with a quorum between 1 and all, or with a ``grace``, wait until this worker's own pushes
                are applied, which is so in all other modes anyway. That may take as long as other workers do not
                complete the version, and they may wait alike at another key. So the caller should have other work to
                do, such as its next push, and ask ``Work.is_completed`` now and then. If other workers leave, the
                quorum is at most those that are left.

        Returns:
            A :class:`Work`. When ``wait`` returns, the tensors are written, and ``versions`` says what was read.
        """
        return self._pull(into, clock, staleness, applied=applied)

    def push_pull(
        self,
        values: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        *,
        rates: Sequence[float] | None = None,
        weight: float | None = None,
        finite: bool = True,
    ) -> Work:
        """Pushes, and reads what the values are afterwards.

        In synchronous mode this is faster than :meth:`push` and :meth:`pull`, because a server answers with a part of
        the values as soon as it has all contributions to that part.

        Args:
            values, rates, weight, finite: as for :meth:`push`.
            into: as for :meth:`pull`, for the same keys.

        Returns:
            A :class:`Work` that is complete when ``into`` is written.
        """
        if values.keys() != into.keys():
            raise ValueError(f"into: expected the keys of values, {sorted(values)}, got {sorted(into)}")
        self._made()
        _, clock = self._named(values, "values", None)  # before anything is asked for
        self._set_rates(rates)
        asks_first = self._settings.lockstep
        work = self._pull(into, clock + 1, coming=1) if asks_first else None
        self.push(values, weight=weight, finite=finite)
        return work or self._pull(into, clock + 1)

    def _pull(
        self,
        into: Mapping[str, Tensor],
        clock: int | None,
        staleness: int | str | None = "store",
        *,
        coming: int = 0,
        applied: bool = False,
    ) -> Work:
        """coming: how many pushes follow that the clock already counts."""
        node = self._made()
        allowed = self._staleness if isinstance(staleness, str) else staleness
        _check_staleness(allowed)
        numbers, clock = self._named(into, "into", clock, pulls=True, coming=coming)
        targets = [(value, _target(value)) for value in into.values()]
        # Else its pushes are applied when they come.
        applied = self._pulls_applied or (bool(applied) and (self._quorum > 1 or self._grace > 0))
        ticket = node.pull(clock, allowed, numbers, [target for _, target in targets], applied=applied)

        def write() -> None:
            with torch.no_grad():
                for value, target in targets:
                    if target.data_ptr() != value.data_ptr():
                        value.copy_(target)
                    else:
                        torch.autograd.graph.increment_version(value)

        return self._work(f"pull of clock {clock}", ticket, write)

    def _named(
        self, values: Mapping[str, Tensor], argument: str, clock: int | None, pulls: bool = False, coming: int = 0
    ) -> tuple[list[int], int]:
        """Returns the numbers of the keys, and their clock."""
        check_values(values, argument)
        keys = self._settings.keys
        for name, value in values.items():
            if name not in self._numbers:
                raise ValueError(f"{argument}: expected keys of the store, got {name!r}")
            expected = keys[self._numbers[name]].shape
            if tuple(value.shape) != expected:
                raise ValueError(f"{argument}[{name!r}]: expected shape {list(expected)}, got {list(value.shape)}")
        clocks = {self._clocks[name] for name in values}
        if clock is None:
            if len(clocks) > 1:
                raise ValueError(f"clock: expected one where keys have been pushed {sorted(clocks)} times, got None")
            (clock,) = clocks
        check_number(clock, "clock", 2**62)
        if not pulls and clocks != {clock}:
            raise ValueError(f"clock: expected the number of earlier pushes, {sorted(clocks)}, got {clock}")
        if pulls and any(clock > earlier + coming for earlier in clocks):
            raise ValueError(f"clock: expected at most the number of pushes, {min(clocks)}, got {clock}")
        return [self._numbers[name] for name in values], clock

    def _made(self) -> "_ops.StoreNode":
        if self._node is None:
            raise RuntimeError("store: expected one with keys, call init first")
        if self._is_closing or not self._finalizer.alive:
            raise dist.DistBackendError("the store is closed")
        return self._node

    def save(self, *, with_data: bool = True) -> "Whole | None":
        """Returns what all servers have, at one moment: all workers call this, and none of them pushes meanwhile. What
        is in no version yet is not part of it. Without data it only waits for the other workers.

        :meta private:
        """
        node = self._made()
        ticket = node.save(with_data)
        self._work("save", ticket).wait()
        return assemble(self._settings, self._blocks, ticket.states()) if with_data else None

    def restore(self, optimizer: FusedStep, params: Mapping[str, Tensor], *, updated: bool) -> None:
        """Gives the servers the values and the state of an optimizer that ``local_optimizer`` of this store has made,
        before anything was pushed. All workers call this, with the same numbers.

        :meta private:
        """
        node = self._made()
        if self._membership is not None:
            raise RuntimeError("load_state_dict: expected a store without membership, whose servers load theirs")
        if any(self._clocks.values()):
            raise RuntimeError("load_state_dict: expected an optimizer that has made no step yet")
        if self._connection.rank == self._settings.workers[0]:
            for server, numbers in enumerate(divide(self._settings, self._blocks, optimizer, params)):
                node.restore(server, updated, numbers)
        self.save(with_data=False)

    def local_optimizer(self, values: Mapping[str, Tensor]) -> tuple[FusedStep, dict[str, Any]]:
        """Returns an optimizer like that of the servers, with parameters of its own that have these values.

        :meta private:
        """
        self._made()
        return local_optimizer(self._settings, values)

    def residuals(self) -> dict[str, Tensor]:
        """Returns what encoding has lost of this worker's pushes: memory of the store, in pieces by key.

        :meta private:
        """
        return {f"{self._settings.keys[key].name}/{first}": lost for (key, first), lost in self._residuals.items()}

    def stats(self) -> dict[str, Any]:
        """Returns what this rank's part of the store has done and holds.

        Returns:
            ``bytes``: the memory of its server (values, the optimizer's state, sums, what workers hold, and pushes that
            wait for others) and of its worker (residuals, and what it holds), without that of messages on their way.
            ``pushes``: for each worker's rank, how many of its pushes are in all values of this rank's server; with
            quorum 1 their ratio is the worker's share in the result. It is empty on a rank that does not serve.
        """
        node = self._made()
        return {"bytes": node.bytes(), "pushes": dict(zip(self._settings.workers, node.applied(), strict=False))}

    def record(self) -> Record:
        """Returns the order in which this rank's server has handled messages, also after :meth:`close`.

        It is empty without ``record=True``, and on a rank that does not serve. :meth:`Record.gather` collects those of
        all ranks.
        """
        if self._node is None:
            raise RuntimeError("record: expected a store with keys, call init first")
        return Record.of(self._node, self._connection.rank, self._settings)

    def close(self, timeout: timedelta | None = None) -> None:
        """Ends the store in good order: it returns when all workers have closed theirs, if this rank serves.

        Raises:
            torch.distributed.DistBackendError: a worker has not closed in time; the connections are closed anyway.
        """
        if self._node is None:
            return
        self._is_closing = True
        if self._membership is not None:
            self._membership.leave()
        if not self._finalizer.alive:
            return
        seconds = (self._wait if timeout is None else timeout).total_seconds()
        done = self._node.finish(seconds)
        self._finalizer.detach()
        self._node.close(GRACE)
        if not done:
            raise dist.DistBackendError(f"close: a worker has not closed its store in {seconds:g} s")


def check_values(values: Any, argument: str) -> None:
    """Raises TypeError or ValueError that names the value which is no dense tensor of floats."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{argument}: expected a dict of tensors, got {type(values).__name__}")
    if not values:
        raise ValueError(f"{argument}: expected at least one tensor, got none")
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected names as keys, got {name!r}")
        if not isinstance(value, Tensor):
            raise TypeError(f"{argument}[{name!r}]: expected a tensor, got {type(value).__name__}")
        check_dense(value, f"{argument}[{name!r}]")
        if value.dtype not in _FLOATS:
            raise TypeError(f"{argument}[{name!r}]: expected float32, float16 or bfloat16, got {value.dtype}")


def _name_of(optimizer: Any) -> str:
    if not isinstance(optimizer, type):
        raise TypeError(f"optimizer: expected a class of dltrain_ext.optim or None, got {optimizer!r}")
    return optimizer_named(optimizer.__name__).__name__


def _check_staleness(staleness: Any) -> None:
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ValueError(f"staleness: expected an int of at least 0, or None, got {staleness!r}")


def _plain(value: Tensor) -> Tensor:
    return value.detach().to("cpu").contiguous()


def _target(value: Tensor) -> Tensor:
    """Returns the tensor itself, if it can be written in place, or memory for it."""
    value = value.detach()
    in_place = value.is_cpu and value.is_contiguous()
    return value if in_place else torch.empty(value.shape, dtype=value.dtype)
