"""The epochs of a store whose ranks are the members of a job: they are the same during each."""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.elastic import Membership
from dltrain_ext.ps.connecting import Group, blocks_of, send_values
from dltrain_ext.ps.settings import Settings, agreed

_POLL = 0.05  # s
_NO_WAIT = 1.0  # s of grace with a quorum of all workers; it is never waited for, since nobody is left to contribute
_WORKER = "a worker"  # is missing

_log = logging.getLogger("dltrain_ext")


@dataclass(frozen=True)
class Said:
    """What a member says when an epoch begins.

    Attributes:
        shards: into how many parts the values are divided; 0 if it has not been in an epoch.
        settings: those of a worker, as text; None: it serves.
        shard: the number of the part that it serves; None if it has none.
        version: of that part.
    """

    shards: int
    settings: str | None = None
    shard: int | None = None
    version: int = 0


class Epoch:
    """One epoch of a store.

    Attributes:
        number: of the epoch.
        connection: its members, whose places are the ranks of the settings.
        settings: of the store; ``servers`` has the rank that serves each shard.
        version: of the values, of which all epochs before are a part.
    """

    def __init__(self, number: int, connection: Group, settings: Settings):
        self.number, self.connection, self.settings = number, connection, settings
        self.version = 0

    @property
    def shard(self) -> int | None:
        """The one that this rank serves."""
        rank, servers = self.connection.rank, self.settings.servers
        return servers.index(rank) if rank in servers else None

    def numbers(self, ranks: Sequence[int]) -> list[int]:
        """Returns the numbers of members."""
        return [self.connection.ranks[rank] for rank in ranks]


class Part(ABC):
    """What one member is in a store: a worker or a server."""

    @abstractmethod
    def says(self) -> Said: ...

    @abstractmethod
    def prepare(self, epoch: Epoch) -> int | None:
        """Gets ready for an epoch. Returns the version of the shard of this member, or None if it has no values."""

    @abstractmethod
    def give(self, epoch: Epoch, mailbox: "_ops.Mailbox", is_new: bool) -> None:
        """Sends or receives the first values, if no shard has any."""


class Epochs:
    """Takes a member of a job from one epoch of a store to the next.

    Args:
        membership: of the job.
        part: what this member is.
        timeout: how long a missing server, or a worker, is waited for; the membership's if None.
    """

    def __init__(self, membership: Membership, part: Part, timeout: timedelta | None):
        self.membership, self._part, self._timeout = membership, part, timeout
        self._workers: list[int] = []  # of the last epoch, by their numbers; likewise
        self._servers: list[int] = []
        self._watch = membership.watch()

    def enter(self) -> tuple[Epoch, "_ops.Mailbox"]:
        """Joins, and returns the epoch and the connections of this member when it has all it needs.

        Raises:
            ValueError: the members have other settings.
            torch.distributed.DistBackendError: a server or all workers are missing for too long, or the job has ended.
        """
        return self._connected(Group(self.membership.enter("store", "group"), self._timeout))

    def silent_servers(self) -> set[int]:
        """Returns the numbers of those that stand still, or have left, if it is asked again between two heartbeats."""
        return self.membership.silent(self._watch, self._servers)

    def renew(self, lost: Iterable[int] = ()) -> tuple[Epoch, "_ops.Mailbox"]:
        """Returns the next epoch. If it is not decided on yet, the present one is given up; ``lost``: the numbers of
        those who are to blame."""
        return self._connected(self._next(lost))

    def _next(self, lost: Iterable[int] = ()) -> Group:
        try:
            members = self.membership.changed()
        except dist.DistBackendError as error:
            _log.warning("ps: %s", error)
            members = None
        return Group(members or self.membership.recover(*lost), self._timeout)

    def _connected(self, connection: Group) -> tuple[Epoch, "_ops.Mailbox"]:
        while True:
            try:
                found = self._connect(connection)
            except dist.DistBackendError as error:
                _log.warning("ps: epoch %d of the store has failed: %s", self.membership.epoch, error)
                connection = Group(self.membership.recover(), self._timeout)
                continue
            if isinstance(found, tuple):
                self.membership.keep()
                settings = found[0].settings
                self._workers, self._servers = found[0].numbers(settings.workers), found[0].numbers(settings.servers)
                return found
            self._await_others(connection, found)
            connection = self._next()

    def _await_others(self, connection: Group, missing: str) -> None:
        _log.warning("ps: the store waits for %s", missing)
        until = time.monotonic() + connection.timeout.total_seconds()
        watch, others = self.membership.watch(), {*connection.ranks} - {self.membership.number}
        while not self.membership.is_over() and not self.membership.silent(watch, others):
            if missing == _WORKER and any(map(self.membership.has_left, self._workers)):
                self.membership.end()
            if self.membership.has_ended():
                raise dist.DistBackendError("the job has ended")
            self.membership.announce()
            if time.monotonic() > until:
                raise dist.DistBackendError(f"the store has waited for {missing} for {connection.timeout}")
            time.sleep(_POLL)

    def _connect(self, connection: Group) -> "tuple[Epoch, _ops.Mailbox] | str":
        """Returns the epoch and the connections, or who is missing."""
        said = [Said(**json.loads(text)) for text in connection.exchange(json.dumps(asdict(self._part.says())))]
        settings = _settings_of(said)
        if isinstance(settings, str):
            return settings
        epoch = Epoch(self.membership.epoch, connection, settings)
        versions = self._versions(epoch)
        epoch.version = max(version or 0 for version in versions.values())
        for shard, version in versions.items():
            if version is not None and version < epoch.version:
                _log.warning(
                    "ps: shard %d of %d goes on from version %d, and what others have made of it since, up to version "
                    "%d, is lost",
                    shard,
                    len(settings.servers),
                    version,
                    epoch.version,
                )
        is_new = epoch.version == 0
        mailbox = connection.connect(lambda mailbox: self._part.give(epoch, mailbox, is_new))
        return epoch, mailbox

    def _versions(self, epoch: Epoch) -> Mapping[int, int | None]:
        """Returns the version of each shard. Raises ValueError on a server that has no values for its shard although
        others have some, and DistBackendError on the others."""
        version, problem = None, None
        try:
            version = self._part.prepare(epoch)
        except (OSError, ValueError, RuntimeError) as error:
            problem = str(error)
        texts = epoch.connection.exchange(json.dumps([version, problem]))
        said = {server: json.loads(texts[server]) for server in epoch.settings.servers}
        if any(version for version, _ in said.values()) or self.membership.is_founded():
            for shard, (server, (version, other)) in enumerate(said.items()):
                if version is None and other is None:
                    said[server] = None, f"there is no checkpoint of shard {shard} of {len(said)}, whose server is lost"
        for server, (_, problem) in said.items():
            if problem is not None and server == epoch.connection.rank:
                raise ValueError(f"checkpoint: expected a folder with one of this store, got {problem}")
            if problem is not None:
                raise dist.DistBackendError(f"member {epoch.numbers([server])[0]} cannot serve: {problem}")
        return {shard: version for shard, (version, _) in enumerate(said.values())}


class Working(Part):
    """A worker with these settings. ``values``: those that the store begins with, if it is the first worker."""

    def __init__(self, settings: Settings, values: Mapping[str, Tensor]):
        self._settings, self._values, self._shards = settings, values, 0

    def says(self) -> Said:
        return Said(self._shards, self._settings.text())

    def prepare(self, epoch: Epoch) -> None:
        self._shards = len(epoch.settings.servers)

    def give(self, epoch: Epoch, mailbox: "_ops.Mailbox", is_new: bool) -> None:
        if is_new and epoch.connection.rank == epoch.settings.workers[0]:
            send_values(mailbox, epoch.settings, blocks_of(epoch.settings), self._values)


def _settings_of(said: Sequence[Said]) -> Settings | str:
    """Returns the settings of an epoch, or who is missing. All members compute the same."""
    workers = {rank: each.settings for rank, each in enumerate(said) if each.settings is not None}
    serving = [rank for rank, each in enumerate(said) if each.settings is None]
    shards = max(each.shards for each in said) or len(serving)
    if not workers:
        return _WORKER
    holders: dict[int, int] = {}
    for rank in sorted(serving, key=lambda rank: (-said[rank].version, rank)):
        shard = said[rank].shard
        if shard is not None:
            holders.setdefault(shard, rank)
    spare = [rank for rank in serving if rank not in holders.values()]
    for shard in range(shards):
        if shard not in holders and spare:
            holders[shard] = spare.pop(0)
    missing = [shard for shard in range(shards) if shard not in holders]
    if missing or not shards:
        return f"a server of shards {missing} out of {shards}" if shards else "a server"
    settings = agreed([*workers.values()], [*workers])
    servers = tuple(holders[shard] for shard in range(shards))
    synchronous = settings.quorum == 0
    return replace(
        settings,
        servers=servers,
        quorum=len(workers) if synchronous else min(settings.quorum, len(workers)),
        grace=_NO_WAIT if synchronous else settings.grace,
        lockstep=False,
    )
