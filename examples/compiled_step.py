"""A whole training step as one graph of torch.compile, which contains gradients, all-reduce, clipping and AdamW.

Run: torchrun --standalone --nproc-per-node 2 examples/compiled_step.py
"""

import torch
import torch.distributed as dist
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor
from torch.func import functional_call, grad_and_value

import dltrain_ext  # noqa: F401  (defines torch.ops.dltrain_ext)

ops = torch.ops.dltrain_ext


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--backend", default="inductor", help="backend of torch.compile (%(default)s)")
    args = options.parse_args()
    start()
    group_name = dist.group.WORLD.group_name
    model = TASK.model()
    params = {name: p.detach() for name, p in model.named_parameters()}
    means, squares = ([torch.zeros_like(p) for p in params.values()] for _ in range(2))
    counts = [torch.zeros(()) for _ in params]

    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        def loss_of(params: dict[str, Tensor]) -> Tensor:
            return loss(functional_call(model, params, (inputs,)), targets)

        found, value = grad_and_value(loss_of)(params)
        bucket = torch.cat([gradient.flatten() for gradient in found.values()])
        ops.all_reduce_(bucket, "avg", codec="int8", group_name=group_name)
        parts = bucket.split([p.numel() for p in params.values()])
        grads = [part.view(p.shape) for part, p in zip(parts, params.values(), strict=True)]
        divisor, norm, skip = ops.unscale_and_clip(ops.sum_squares([bucket]), max_norm=1.0)
        weights = list(params.values())
        ops.adamw_(weights, grads, means, squares, [], counts, [], lr=TASK.lr, grad_scale=divisor, found_inf=skip)
        return value, norm

    compiled = torch.compile(step, fullgraph=True, backend=args.backend)
    for inputs, targets in batches(args.steps):
        value, norm = compiled(inputs, targets)
    finish(f"test accuracy: {accuracy(model):.1%}", f"last loss {value:.3f}, norm of its gradients {norm:.3f}")


if __name__ == "__main__":
    main()
