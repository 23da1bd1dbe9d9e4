"""Shampoo, SOAP and schedule-free AdamW of the package pytorch_optimizer, behind the int8 hook.

They precondition each rank's copy of the averaged gradients, so the hook needs nothing of them.
Run: torchrun --standalone --nproc-per-node 2 examples/matrix_optimizers.py --optimizer soap
"""

import sys

from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp

try:
    import pytorch_optimizer
except ModuleNotFoundError:
    sys.exit("This example needs pytorch_optimizer: pip install pytorch_optimizer")

OPTIMIZERS = {
    "shampoo": lambda params: pytorch_optimizer.ScalableShampoo(
        params, lr=5e-2, start_preconditioning_step=5, preconditioning_compute_steps=10
    ),
    "soap": lambda params: pytorch_optimizer.SOAP(params, lr=3e-3, max_precondition_dim=512),
    "schedule-free": lambda params: pytorch_optimizer.ScheduleFreeAdamW(params, lr=5e-3),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--optimizer", choices=list(OPTIMIZERS), default="soap", help="(default: %(default)s)")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    state = ddp.register(model, codec="int8")
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    is_schedule_free = args.optimizer == "schedule-free"  # its weights for training are not those for evaluation
    if is_schedule_free:
        optimizer.train()
    for inputs, targets in batches(args.steps, batch_size=32):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    if is_schedule_free:
        optimizer.eval()
    finish(
        f"{args.optimizer}: {state.stats()['steps']} steps sent {1 / state.stats()['ratio']:.1%} of fp32's bytes",
        f"test accuracy: {accuracy(model):.1%}",
    )


if __name__ == "__main__":
    main()
