"""Sites that come and go while they train, without a process group. Run: python examples/membership.py

This process has the store, and starts the sites. Three of them found a job; one of these is killed while it trains, and
later another site joins, which takes what the others have. Nobody tells the sites about the kill: they agree by
themselves on who the members are. Their warnings say whom they have lost.

The exit status is 1 if the members do not have the same parameters at the end, bit for bit, or if the accuracy is less
than --least.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from shared import TASK, accuracy, batches, parser
from tasks import loss
from torch import nn

from dltrain_ext import elastic, local_sgd, optim

HOST = "127.0.0.1"
# The sites share one import of these modules; the first optimizer of a process imports torch._dynamo.
PRELOADED = ["dltrain_ext.local_sgd", "sklearn.datasets", "torch._dynamo"]


def train(place: int, port: int, args: argparse.Namespace) -> None:
    """Train a site until the job is over."""
    torch.set_num_threads(1)
    torch.manual_seed(place)  # all take the parameters of one of them
    store = dist.TCPStore(HOST, port, is_master=False)
    members = elastic.Membership(store, least=args.sites, timeout=timedelta(minutes=2))
    model = TASK.model()
    inner = optim.AdamW(model.parameters(), lr=TASK.lr)
    outer = local_sgd.DiLoCo(model, inner, sync_every=args.sync_every, group=members)
    if place == args.sites:  # its process has started with the others, since a start takes longer than the training
        store.wait(["join"], timedelta(days=1))
    places, taken = args.sites + 1, 0
    for inputs, targets in batches(sys.maxsize, args.batch * places, (place, places)):
        inner.zero_grad()
        loss(model(inputs), targets).backward()
        inner.step()  # the first one waits until this site is a member
        if outer.outer_steps > taken:
            taken = outer.outer_steps
            store.set(f"members {taken}", json.dumps(members.members))
            if is_last(taken, store):
                break
    outer.close()  # leaves the job when the others have taken this outer step, too
    store.set(f"result {place}", json.dumps([digest(model), accuracy(model)]))


def is_last(taken: int, store: dist.Store) -> bool:
    """Return whether all stop after this outer step.

    The first site that sees that it should stop decides on the next one, which no other can have taken without it.
    """
    return store.check(["stop"]) and taken >= int(store.compare_set("last", "", str(taken + 1)))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:16]


def follow(store: dist.Store, sites: Sequence[BaseProcess], first: int, times: int) -> int:
    """Print the members after each outer step, until as many as these sites have taken some. Return the next one."""
    for step in count(first):
        members = json.loads(store.get(f"members {step}"))
        print(f"outer step {step}: members {', '.join(map(str, members))}", flush=True)
        if any(site.exitcode for site in sites):
            sys.exit("A site has failed.")
        times -= len(members) == len(sites)
        if times == 0:
            break
    return step + 1


def main() -> None:
    options = parser(__doc__, steps=80)
    options.add_argument("--sites", type=int, default=3, help="how many found the job, at least 2 (%(default)s)")
    options.add_argument("--sync-every", type=int, default=10, help="steps between averages (%(default)s)")
    options.add_argument("--batch", type=int, default=16, help="of a site (%(default)s)")
    options.add_argument("--least", type=float, default=0.9, help="accuracy (%(default)s)")
    args = options.parse_args()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    victim, *others, late = sites = [
        context.Process(target=train, args=(place, store.port, args), daemon=True) for place in range(args.sites + 1)
    ]
    for site in sites:
        site.start()

    times = -(-args.steps // args.sync_every)  # with the same members
    step = follow(store, [victim, *others], 1, times)
    victim.kill()
    print("a site is killed")
    step = follow(store, others, step, times)
    store.set("join", "")
    print("another site joins")
    follow(store, [*others, late], step, times)
    store.set("stop", "")
    for site in sites:
        site.join()
    if any(site.exitcode for site in [*others, late]):
        sys.exit("A site has failed.")

    results = [json.loads(store.get(f"result {place}")) for place in range(1, args.sites + 1)]
    digests, accuracies = zip(*results, strict=True)
    print(f"{TASK.metric}: {accuracies[0]:.1%}; parameters of the members: {', '.join(digests)}")
    if len(set(digests)) > 1:
        sys.exit("The members do not have the same parameters.")
    if min(accuracies) < args.least:
        sys.exit(f"The {TASK.metric} is less than {args.least:.1%}.")


if __name__ == "__main__":
    main()
