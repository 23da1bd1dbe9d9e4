"""Connects the ranks of a store, and gives the servers its first values."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.codecs import error_bound
from dltrain_ext.comm.groups import Members, members_of
from dltrain_ext.comm.rendezvous import Rendezvous
from dltrain_ext.comm.transports import Site
from dltrain_ext.ps.layout import Block, lay_out
from dltrain_ext.ps.serving import Shard, needs_norms
from dltrain_ext.ps.settings import Settings, agreed

GRACE = 5.0  # s in which the peers receive the last messages


class Group:
    """The ranks of a process group, or the members of a job, which rendezvous to make a store."""

    def __init__(self, group: dist.ProcessGroup | Members | None, timeout: timedelta | None):
        members = members_of(group)
        self.ranks, self.rank = members.ranks, members.index
        self.timeout = members.timeout if timeout is None else timeout
        self._site = Site.of(members, self.timeout)
        rendezvous = dist.PrefixStore("rendezvous", self._site.store)
        self._rendezvous = Rendezvous(rendezvous, self.ranks, self.rank, self.timeout, members.beats)

    def exchange(self, text: str) -> list[str]:
        """Returns what all ranks say."""
        return self._rendezvous.exchange(text)

    def agree(self, text: str) -> Settings:
        """Returns the settings of the store, of which this rank says what it has."""
        return agreed(self.exchange(text), range(len(self.ranks)))

    def connect(self, give: Callable[["_ops.Mailbox"], None]) -> "_ops.Mailbox":
        """Connects all ranks. ``give(mailbox)`` then brings the first values to the servers, before any rank goes
        on."""
        with self._rendezvous.at_work() as work:
            part = work.part("mailbox")
            try:
                mailbox = _ops.Mailbox(self._site.gloo(part, threads=0))
            except RuntimeError as error:  # of Gloo, or of its store
                raise dist.DistBackendError(f"ranks {self.ranks} could not connect: {error}") from error
            give(mailbox)
            part.agree("connected")
        self._site.close()
        return mailbox


def send_values(mailbox: "_ops.Mailbox", settings: Settings, blocks: list[Block], values: Mapping[str, Tensor]) -> None:
    """Sends each server the first values of its blocks, as float32."""
    flat = [values[key.name].detach().to("cpu", torch.float32).reshape(-1) for key in settings.keys]
    for number, server in enumerate(settings.servers):
        own = [flat[b.key][b.first : b.first + b.numel].contiguous() for b in blocks if b.server == number]
        if own and not mailbox.send(server, own):
            raise dist.DistBackendError(f"the server of rank {server} does not take the first values")


def receive_values(mailbox: "_ops.Mailbox", shard: Shard, timeout: timedelta) -> None:
    """Receives what :func:`send_values` has sent to this server."""
    if not shard.blocks:
        return
    received = mailbox.receive(timeout.total_seconds())
    if received is None or not isinstance(received[1], Tensor):
        raise dist.DistBackendError("the first values have not come: their worker is lost, or does not send")
    flat, at = received[1].view(torch.float32), 0
    for values in shard.values:
        values.copy_(flat[at : at + values.numel()])
        at += values.numel()


def make_node(
    mailbox: "_ops.Mailbox",
    rank: int,
    settings: Settings,
    blocks: list[Block],
    shard: Shard | None,
    *,
    error_feedback: bool = False,
    is_first: bool = True,
    replayed: "list[_ops.Handled]" = [],  # noqa: B006
) -> "tuple[_ops.StoreNode, dict[tuple[int, int], Tensor]]":
    """Returns the node of a rank, and the residuals of its gradients by key and first element."""
    server = None if shard is None else shard.settings(settings, is_first=is_first)
    residuals: dict[tuple[int, int], Tensor] = {}
    client = None
    if rank in settings.workers:
        client = []
        holds = is_lossy(settings.pull_codec)
        for block in blocks:
            extra: dict[str, Any] = {}
            if error_feedback:
                extra["residual"] = residuals[block.key, block.first] = torch.zeros(block.numel)
            if holds:
                extra["base"] = torch.zeros(block.numel)
            client.append(
                _ops.ClientBlock(key=block.key, first=block.first, server=block.server, numel=block.numel, **extra)
            )
    node = _ops.StoreNode(
        mailbox,
        workers=list(settings.workers),
        servers=list(settings.servers),
        push_codec=settings.push_codec,
        pull_codec=settings.pull_codec,
        server=server,
        client=client,
        together=not settings.lockstep,
        replayed=replayed,
    )
    return node, residuals


def make_nodes_here(
    settings: Settings,
    blocks: list[Block],
    shards: Sequence[Shard | None],
    *,
    error_feedback: bool = False,
    replayed: "Mapping[int, list[_ops.Handled]]" = {},  # noqa: B006
) -> "list[_ops.StoreNode]":
    """Returns the nodes of all ranks, which are in this process."""
    mailboxes = _ops.in_process_mailboxes(len(shards))
    return [
        make_node(
            mailbox,
            rank,
            settings,
            blocks,
            shard,
            error_feedback=error_feedback,
            replayed=replayed.get(rank, []),
        )[0]
        for rank, (mailbox, shard) in enumerate(zip(mailboxes, shards, strict=True))
    ]


def is_lossy(codec: str) -> bool:
    return error_bound(codec).max > 0


def blocks_of(settings: Settings) -> list[Block]:
    whole = [needs_norms(settings.optimizer)] * len(settings.groups)
    return lay_out(settings.keys, len(settings.servers), whole)


def shard_of(rank: int, settings: Settings, blocks: list[Block]) -> Shard | None:
    """Returns the blocks that a rank serves, or None if it is no server."""
    if rank not in settings.servers:
        return None
    own = [block for block in blocks if block.server == settings.servers.index(rank)]
    return Shard(settings.keys, own, settings.optimizer, settings.groups)
