"""An optimizer whose state is divided among the ranks: each updates some rows of each parameter, and all gather them.

With --torch, ZeroRedundancyOptimizer around our AdamW. The LossScaler uses the gradients of all parameters, which its
param_groups contain, so ranks clip and skip alike.
Run: torchrun --standalone --nproc-per-node 2 examples/zero.py
"""

from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--torch", action="store_true", help="use ZeroRedundancyOptimizer")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    if args.torch:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=TASK.lr)
        state = ddp.register(model, codec="int8")
    else:
        optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
        state = ddp.register(model, codec="int8", shard=optimizer)
    scaler = amp.LossScaler(enabled=False)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        scaler.step(optimizer, max_norm=1.0)  # without grad_stats, since no rank updates all parameters
    moments = [entry["exp_avg"] for entry in (optimizer.optim if args.torch else optimizer).state.values()]
    kept = sum((moment.to_local() if isinstance(moment, DTensor) else moment).numel() for moment in moments)
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent for gradients: {1 / state.stats()['ratio']:.1%} of fp32's",
        f"rank 0 keeps the moments of {kept / sum(p.numel() for p in model.parameters()):.0%} of the parameters",
    )


if __name__ == "__main__":
    main()
