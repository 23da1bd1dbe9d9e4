"""A rank that only serves: that of a process group, or a member of a job with a checkpoint of its shard."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.arguments import check_timeout
from dltrain_ext.elastic import Membership
from dltrain_ext.ps.connecting import GRACE, Group, blocks_of, make_node, receive_values, shard_of
from dltrain_ext.ps.epochs import Epoch, Epochs, Part, Said
from dltrain_ext.ps.replaying import Record
from dltrain_ext.ps.serving import Shard
from dltrain_ext.ps.settings import SERVES, Settings

_POLL = 0.2  # s


@overload
def serve(group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None) -> Record: ...


@overload
def serve(
    group: Membership,
    *,
    timeout: timedelta | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: timedelta = timedelta(minutes=1),
) -> None: ...


def serve(
    group: dist.ProcessGroup | Membership | None = None,
    *,
    timeout: timedelta | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: timedelta = timedelta(minutes=1),
) -> Record | None:
    """Serves a store on this rank, which is no worker of it, until all its workers have closed it or are lost.

    It is a collective call with :meth:`Store.init` of the workers, which name this rank among their ``servers``.

    With a membership it serves until no worker is left, of which at least one has closed its store; when all are lost,
    it waits for another one. The values are divided among those that serve in the beginning. One that comes later takes
    the place of one that is lost, or waits until there is one. It takes the shard from its checkpoint, and a warning
    says how many versions are lost. A job whose servers all find a checkpoint goes on from there.

    Args:
        group: that of the store.
        timeout: how long the other ranks are waited for in the beginning; the group's own timeout if None. With a
            membership also how long a lost server, or a worker, is waited for.
        checkpoint: with a membership, the folder in which this server writes the values and the optimizer's state of
            its shard, and from which it takes them; servers on several hosts may share it. None: it writes none, and
            cannot take the place of another one.
        checkpoint_every: after how much time it writes it again; also at the end of an epoch.

    Returns:
        The order in which it has handled messages; it is empty without ``record=True`` of the workers. With a
        membership None.

    Raises:
        TypeError: checkpoint is no path.
        ValueError: this rank is not among the servers, or the checkpoint is not that of this store, or there is none
            although the others have values.
        torch.distributed.DistBackendError: a rank did not come.
    """
    if not isinstance(checkpoint, str | os.PathLike | None):
        raise TypeError(f"checkpoint: expected a path or None, got {checkpoint!r}")
    if isinstance(group, Membership):
        check_timeout(timeout, "timeout", or_none=True)
        check_timeout(checkpoint_every, "checkpoint_every")
        folder = None if checkpoint is None else Path(checkpoint)
        _serve_members(group, timeout, folder, checkpoint_every)
        return None
    if checkpoint is not None:
        raise ValueError(f"checkpoint: expected None without a membership, got {checkpoint!r}")
    connection = Group(group, timeout)
    settings = connection.agree(SERVES)
    blocks = blocks_of(settings)
    shard = shard_of(connection.rank, settings, blocks)
    assert shard is not None

    def give(mailbox: "_ops.Mailbox") -> None:
        receive_values(mailbox, shard, connection.timeout)

    mailbox = connection.connect(give)
    node, _ = make_node(mailbox, connection.rank, settings, blocks, shard)
    node.start()
    try:
        node.finish(None)
        return Record.of(node, connection.rank, settings)
    finally:
        node.close(GRACE)


class Serving(Part):
    """Serves one shard, or none as long as all have servers.

    Args:
        folder: of the checkpoints, or None.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._shards = folder, 0
        self._number: int | None = None
        self._shard: Shard | None = None
        self._version: int | None = None

    def says(self) -> Said:
        return Said(self._shards, shard=self._number, version=self._version or 0)

    def prepare(self, epoch: Epoch) -> int | None:
        self._shards = len(epoch.settings.servers)
        if epoch.shard != self._number:
            self._number, self._version = epoch.shard, None
            self._shard = shard_of(epoch.connection.rank, epoch.settings, blocks_of(epoch.settings))
            if self._shard is not None and (path := self._path()) is not None and path.exists():
                self._version = _load(path, self._shard, _identity(epoch.settings, self._number))
        return self._version

    def give(self, epoch: Epoch, mailbox: "_ops.Mailbox", is_new: bool) -> None:
        if is_new and self._shard is not None:
            receive_values(mailbox, self._shard, epoch.connection.timeout)

    def node(self, epoch: Epoch, mailbox: "_ops.Mailbox") -> "_ops.StoreNode":
        """Returns the node of this server, which goes on from where that of the epoch before was."""
        assert self._shard is not None
        self._epoch, self._version = epoch, epoch.version
        rank, settings = epoch.connection.rank, epoch.settings
        is_first = not self._shard.is_updated()
        node, _ = make_node(mailbox, rank, settings, blocks_of(settings), self._shard, is_first=is_first)
        node.start()
        return node

    def save(self, node: "_ops.StoreNode", membership: Membership) -> None:
        """Notes the version that a node has, and writes a checkpoint, or leaves the one before as it is."""
        versions, numbers = node.state()
        self._version = self._epoch.version + min(versions, default=0)
        path = self._path()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{membership.number}.new")
        torch.save(_identity(self._epoch.settings, self._number) | {"version": self._version, "numbers": numbers}, new)
        if membership.is_left_out():  # another server may have written it since
            new.unlink()
        else:
            os.replace(new, path)

    def _path(self) -> Path | None:
        return None if self._folder is None else self._folder / f"shard-{self._number}-of-{self._shards}.pt"


def _identity(settings: Settings, number: int | None) -> dict[str, Any]:
    """Returns what a checkpoint and a store must have in common."""
    keys = [[key.name, list(key.shape), key.group] for key in settings.keys]
    return {"shard": number, "shards": len(settings.servers), "optimizer": settings.optimizer, "keys": keys}


def _load(path: Path, shard: Shard, identity: dict[str, Any]) -> int:
    """Returns the version of a checkpoint, when the shard has its numbers. Raises ValueError if it is another one's."""
    saved = torch.load(path, weights_only=True)
    for name, expected in identity.items():
        if saved.get(name) != expected:
            raise ValueError(f"{path}, whose {name} is another one")
    tensors = list(shard.tensors())
    numbers = saved["numbers"].split([each.numel() for each in tensors])
    for own, loaded in zip(tensors, numbers, strict=True):
        own.copy_(loaded)
    return int(saved["version"])


def _serve_members(membership: Membership, timeout: timedelta | None, folder: Path | None, every: timedelta) -> None:
    """Serves from one epoch to the next, until no worker of one is left and one of them has closed its store."""
    part = Serving(folder)
    epochs = Epochs(membership, part, timeout)
    try:
        epoch, mailbox = epochs.enter()
        while not _serve(membership, part, epoch, mailbox, every.total_seconds()):
            epoch, mailbox = epochs.renew()
        membership.end()
    except dist.DistBackendError:
        if not membership.has_ended():
            raise
    finally:
        membership.leave()


def _serve(membership: Membership, part: Serving, epoch: Epoch, mailbox: "_ops.Mailbox", every: float) -> bool:
    """Serves until no worker of this epoch is left. Returns whether the job has ended."""
    workers, servers = epoch.numbers(epoch.settings.workers), epoch.numbers(epoch.settings.servers)
    watch = membership.watch()
    if epoch.shard is None:
        while not membership.has_ended() and not membership.is_over():
            time.sleep(_POLL)
            if membership.silent(watch, servers) >= {*servers}:
                break
        mailbox.close(0.0)
        return membership.has_ended()
    node = part.node(epoch, mailbox)
    try:
        saved = time.monotonic()
        while not node.finish(_POLL):
            gone = epoch.numbers(node.gone())
            # The others may wait for them; not for one that has left, which closes its store next.
            if silent := membership.silent(watch, {*workers} - {*gone}, may_leave=True):
                membership.give_up(*silent)
                break
            if not membership.is_over():
                membership.announce(among=servers, lost=gone)
            if time.monotonic() - saved > every:
                part.save(node, membership)
                saved = time.monotonic()
    finally:
        node.close(GRACE)  # first, since what workers push until then is a part of the version
        part.save(node, membership)
    have_left = [*map(membership.has_left, workers)]
    # Those that have closed their store only for the next epoch go on.
    return all(have_left) or (any(have_left) and not membership.is_over())
