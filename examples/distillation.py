"""Knowledge distillation: a student learns from the softened outputs of a teacher with 9 times the parameters.

Only the student is in DDP with the hook when it learns; the teacher has no gradients, and every rank has a copy of it.
Run: torchrun --standalone --nproc-per-node 2 examples/distillation.py
"""

from collections.abc import Callable

import torch.nn.functional as F
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp, optim

TEMPERATURE = 2.0


def student() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(net: nn.Module, steps: int, criterion: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ddp.AllReduceState:
    """Train with a criterion of the inputs, the outputs and the targets."""
    model = DistributedDataParallel(net)
    state = ddp.register(model, codec="int8")
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        criterion(inputs, model(inputs), targets).backward()
        optimizer.step()
    return state


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--teacher-steps", type=int, default=60, help="steps of the teacher (%(default)s)")
    options.add_argument("--share", type=float, default=0.5, help="share of the teacher in the loss (%(default)s)")
    args = options.parse_args()
    start()
    teacher, small = TASK.model(), student()
    train(teacher, args.teacher_steps, lambda _, logits, targets: loss(logits, targets))
    teacher.requires_grad_(False).eval()

    def criterion(inputs: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy and the divergence from the teacher, added by their shares (Hinton et al. 2015)."""
        soft, its = (F.log_softmax(found / TEMPERATURE, -1) for found in (logits, teacher(inputs)))
        divergence = F.kl_div(soft, its, reduction="batchmean", log_target=True)
        return (1 - args.share) * loss(logits, targets) + args.share * TEMPERATURE**2 * divergence

    state = train(small, args.steps, criterion)
    sizes = [sum(p.numel() for p in net.parameters()) for net in (teacher, small)]
    finish(
        f"test accuracy of the teacher: {accuracy(teacher):.1%}, of the student: {accuracy(small):.1%}",
        f"parameters of the teacher: {sizes[0]:,}, of the student: {sizes[1]:,}",
        f"bytes sent for the student's gradients: {1 / state.stats()['ratio']:.1%} of fp32's",
    )


if __name__ == "__main__":
    main()
