"""ZeroRedundancyOptimizer around our AdamW: every rank keeps only the state of its part of the parameters.

The LossScaler uses the gradients of all parameters, which ZeRO's param_groups contain, so ranks clip and skip alike.
Run: torchrun --standalone --nproc-per-node 2 examples/zero.py
"""

from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


def main() -> None:
    args = parser(__doc__).parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=TASK.lr)
    scaler = amp.LossScaler(enabled=False)
    state = ddp.register(model, codec="int8")
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        scaler.step(optimizer, max_norm=1.0)  # without grad_stats, which ZeRO's step cannot use
    kept = sum(moments["exp_avg"].numel() for moments in optimizer.optim.state.values())
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent for gradients: {1 / state.stats()['ratio']:.1%} of fp32's",
        f"rank 0 keeps the moments of {kept / sum(p.numel() for p in model.parameters()):.0%} of the parameters",
    )


if __name__ == "__main__":
    main()
