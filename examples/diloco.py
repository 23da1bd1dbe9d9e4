"""Sites that train on their own and average what they have moved every few steps, over links too slow for gradients.

Each rank is a site or, with --per-site 2, two ranks are, which train by DDP. With a link of 10 Mbit/s to each site:

python -m benchmarks hosts --rate 10mbit -- python examples/diloco.py
python -m benchmarks hosts --rate 10mbit --hosts 2 --per-host 2 -- python examples/diloco.py --per-site 2

Run: torchrun --standalone --nproc-per-node 2 examples/diloco.py
"""

import time

import torch
import torch.distributed as dist
from shared import finish, parser, start
from tasks import loss, python_source
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from train import warmup_cosine

from dltrain_ext import local_sgd, optim


def main() -> None:
    options = parser(__doc__, steps=120)
    options.add_argument("--per-site", type=int, default=1, help="ranks of a site (%(default)s)")
    options.add_argument("--sync-every", type=int, default=10, help="steps between averages (%(default)s)")
    options.add_argument("--fragments", type=int, default=2, help="parts that are averaged in turn (%(default)s)")
    options.add_argument("--delay", type=int, default=2, help="steps while a part is under way (%(default)s)")
    options.add_argument("--batch", type=int, default=32, help="of all ranks together (%(default)s)")
    args = options.parse_args()
    start()
    task = python_source()
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // args.per_site, args.per_site), mesh_dim_names=("sites", "ranks"))
    model = task.model()
    if args.per_site > 1:
        model = DistributedDataParallel(model, process_group=mesh.get_group("ranks"))
    inner = optim.AdamW(model.parameters(), lr=task.lr)
    schedule = LambdaLR(inner, lambda step: warmup_cosine(step, args.steps))
    outer = local_sgd.DiLoCo(
        model,
        inner,
        sync_every=args.sync_every,
        fragments=args.fragments,
        delay=args.delay,
        group=mesh.get_group("sites"),
    )
    inputs, targets = task.train
    generator = torch.Generator().manual_seed(dist.get_rank())
    began = time.monotonic()
    for _ in range(args.steps):
        batch = torch.randint(len(inputs), (max(1, args.batch // ranks),), generator=generator)
        inner.zero_grad()
        loss(model(inputs[batch]), targets[batch]).backward()
        inner.step()  # and, when it is due, the outer step
        schedule.step()
    outer.finish()
    seconds, metrics = time.monotonic() - began, outer.metrics()
    with torch.no_grad():
        score = task.score(model(task.test[0]), task.test[1]).float().mean().item()
    elements = sum(parameter.numel() for parameter in model.parameters())
    finish(
        f"{task.metric}: {score:.3f}",
        f"bytes sent a step by rank 0: {metrics['outer/wire_bytes'] / args.steps:.0f}; fp32 gradients: {4 * elements}",
        f"share of the time that was spent training: {1 - metrics['outer/waited'] / seconds:.1%}",
    )


if __name__ == "__main__":
    main()
