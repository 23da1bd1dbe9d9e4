"""Members of a job that are killed while DiLoCo trains, and others that join, for the case local_sgd.

Each rank starts a process that trains, and another one when it has killed that.

    python -m benchmarks.local_sgd_members SETTINGS

Run so, it is such a process; it writes what happens as lines of JSON, with times of the machine's monotonic clock.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Progress
from benchmarks.local_sgd_faults import PATIENCE, Trainer, digest, tell
from benchmarks.local_sgd_sides import LR, MOMENTUM, OURS, adamw, layers_of
from dltrain_ext import elastic, local_sgd


class Kills(NamedTuple):
    """How often a member is killed, and how the members train."""

    sync_every: int
    times: int
    codec: str = "int4"

    @property
    def name(self) -> str:
        return f"{OURS}, {self.codec}"


class Changes(NamedTuple):
    """Seconds, of the member that took longest, one each time.

    Attributes:
        committed: from the kill until the first outer step without the killed member was complete.
        gaps: from the end of the last outer step with it until then.
        usual: between two outer steps before the kill.
        lost: not seconds, but how many steps of all survivors were lost.
        joined: from the call of a newcomer's first inner.step() until it was a member.
        wrong_kills, wrong_joins: what was wrong, over all times.
    """

    kills: Kills
    committed: list[float]
    gaps: list[float]
    usual: list[float]
    lost: list[int]
    joined: list[float]
    wrong_kills: list[str]
    wrong_joins: list[str]

    @classmethod
    def none(cls, kills: Kills) -> "Changes":
        return cls(kills, [], [], [], [], [], [], [])


def change_members(
    rank: int, ranks: int, kills: Kills, width: int, found: Any, progress: Progress
) -> Iterator[Changes]:
    """Kill a random member at a random moment, and let another one join, as often as is asked for, in one job."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    place = [store.port if store else 0]
    dist.broadcast_object_list(place)
    settings = {"rank": rank, "ranks": ranks, "host": host, "port": place[0], "width": width, "batch": found.batch}
    settings["kills"] = kills._asdict()
    draw, changes = random.Random(0), Changes.none(kills)
    trainer = Trainer(__name__, settings)
    try:
        for turn in range(kills.times):
            victim, moment = draw.randrange(ranks), draw.random()
            progress(f"a member is killed, {turn + 1} of {kills.times}", turn / kills.times)
            told = kill_later(trainer, ranks, moment) if rank == victim else follow(trainer, ranks - 1)
            if not judge_kill(changes, gather(told)):
                break
            progress(f"a member joins, {turn + 1} of {kills.times}", (turn + 0.5) / kills.times)
            if rank == victim:
                trainer.end()
                trainer = Trainer(__name__, settings)
            if not judge_join(changes, gather(follow(trainer, ranks))):
                break
    finally:
        trainer.end()
        dist.barrier()
    yield changes


def gather(told: dict[str, Any]) -> list[dict[str, Any]]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, told)
    return every


def follow(trainer: Trainer, members: int, times: int = 1, since: float = 0.0) -> dict[str, Any]:
    """Return what a process tells until it has taken so many outer steps with so many members since then."""
    began, taken = time.monotonic(), 0
    told: dict[str, Any] = {"commits": [], "states": [], "lost": 0}
    while time.monotonic() - began < PATIENCE:
        try:
            event = trainer.next()
        except TimeoutError as stuck:
            return {"wrong": str(stuck)}
        if event is None:
            return {"wrong": trainer.why_ended()}
        if "joined" in event:
            told |= event
        elif "lost" in event:
            told["lost"] += event["lost"]
        elif "state" in event:
            told["states"].append(event["state"])
        else:
            told["commits"].append([event["at"], event["members"]])
            taken += event["at"] >= since and event["members"] == members
            if taken == times:
                return told
    return {"wrong": f"it has taken no outer step with {members} members within {PATIENCE:.0f} s"}


def kill_later(trainer: Trainer, members: int, moment: float) -> dict[str, Any]:
    """Kill a process at a moment, 0 to 1, between two outer steps. Return when, and the seconds between these."""
    told = follow(trainer, members, times=2, since=time.monotonic())
    if "wrong" in told:
        return told
    (first, _), (second, _) = told["commits"][-2:]
    time.sleep(moment * (second - first))
    return told | {"killed": trainer.kill(), "usual": second - first}


def judge_kill(changes: Changes, every: list[dict[str, Any]]) -> bool:
    """Enter what the members have told about a kill, and return whether all went well."""
    if wrong := errors_of(every):
        changes.wrong_kills.extend(wrong)
        return False
    (victim,) = (told for told in every if "killed" in told)
    survivors = [told for told in every if told is not victim]
    after = [told["commits"][-1][0] for told in survivors]
    before = [max(at for at, members in told["commits"] if members == len(every)) for told in survivors]
    changes.committed.append(max(after) - victim["killed"])
    changes.gaps.append(max(end - begin for begin, end in zip(before, after, strict=True)))
    changes.usual.append(victim["usual"])
    changes.lost.append(sum(told["lost"] for told in survivors))
    return True


def judge_join(changes: Changes, every: list[dict[str, Any]]) -> bool:
    """Enter what the members have told about a newcomer, and return whether all went well."""
    wrong = errors_of(every)
    if not wrong:
        (newcomer,) = (told for told in every if "joined" in told)
        *_, taken, _ = newcomer["states"][0]
        if not any(newcomer["states"][0] in told["states"] for told in every if told is not newcomer):
            wrong.append(f"no other member has what the newcomer took, after outer step {taken}")
    changes.wrong_joins.extend(wrong)
    if not wrong:
        changes.joined.append(newcomer["joined"] - newcomer["began"])
    return not wrong


def errors_of(every: list[dict[str, Any]]) -> list[str]:
    wrong = [f"rank {rank}: {told['wrong']}" for rank, told in enumerate(every) if "wrong" in told]
    seen: dict[tuple[int, int], str] = {}
    for rank, told in enumerate(every if not wrong else []):
        for epoch, taken, kept in told["states"]:
            if seen.setdefault((epoch, taken), kept) != kept:
                wrong.append(f"rank {rank} has other parameters than others after outer step {taken}")
    return wrong


# The process that trains


class Standing(NamedTuple):
    """Where a member is."""

    number: int
    members: tuple[int, ...]
    epoch: int
    outer_steps: int


def main() -> None:
    settings = json.loads(sys.argv[1])
    kills, width = Kills(**settings["kills"]), settings["width"]
    torch.set_num_threads(1)
    store = dist.TCPStore(settings["host"], settings["port"], is_master=False)
    members = elastic.Membership(store, least=settings["ranks"], timeout=timedelta(seconds=PATIENCE))
    model = layers_of(width)
    weight = model[0].weight
    inner = adamw(model)
    own = torch.empty_like(weight)
    inner.register_step_post_hook(lambda *_: own.copy_(weight.detach()))  # is called before the hooks of DiLoCo
    outer = local_sgd.DiLoCo(
        model, inner, sync_every=kills.sync_every, codec=kills.codec, lr=LR, momentum=MOMENTUM, group=members
    )

    def standing() -> Standing:
        return Standing(members.number, members.members, members.epoch, outer.outer_steps)

    def tell_state() -> None:
        tell(state=[members.epoch, outer.outer_steps, digest(outer.state_dict(), "backup", "momentum")])

    def enter(*_: Any) -> None:  # is called after the hooks of DiLoCo
        nonlocal last
        if last is None:
            tell(began=began, joined=time.monotonic())
            last = standing()
            tell_state()

    inner.register_step_pre_hook(enter)
    x = torch.randn(settings["batch"], width, generator=torch.Generator().manual_seed(settings["rank"]))
    last: Standing | None = None
    since = 0  # the last outer step
    while True:
        inner.zero_grad()
        torch.autograd.backward(model(x).square().mean())
        began = time.monotonic()
        inner.step()
        at, now, since = time.monotonic(), standing(), since + 1
        assert last
        if now.epoch != last.epoch:
            was_reset = now.outer_steps == last.outer_steps and not torch.equal(own, weight)
            if was_reset or now.number != last.number:
                tell(lost=since)
            tell_state()
        if now.outer_steps > last.outer_steps:
            since = 0
            # Where a member was lost, this is an outer step that others had taken with it.
            if {*last.members} <= {*now.members}:
                tell(outer=now.outer_steps, at=at, members=len(now.members))
        last = now


if __name__ == "__main__":
    main()
