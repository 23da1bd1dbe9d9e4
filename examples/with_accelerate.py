"""Hugging Face Accelerate. Run: torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

The hook is registered on the model that prepare() returns. To unscale and clip in one pass with the step, our scaler
steps the optimizer within Accelerate's wrapper, and Accelerate's own GradScaler is disabled. Without loss scaling,
accelerator.clip_grad_norm_ and optimizer.step work as usual.
"""

from pathlib import Path

import torch
from accelerate import Accelerator, GradScalerKwargs
from shared import TASK, accuracy, batches, finish, parser
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


def register(accelerator: Accelerator, model: DistributedDataParallel, **options: object) -> ddp.AllReduceState:
    """Register the hook. save_state() and load_state() also save and load its residuals, in a file for each rank."""
    hook = ddp.register(model, **options)

    def save(models: object, weights: object, folder: str) -> None:
        torch.save(hook.state_dict(), Path(folder, f"hook-{accelerator.process_index}.pt"))

    def load(models: object, folder: str) -> None:
        hook.load_state_dict([torch.load(file) for file in sorted(Path(folder).glob("hook-*.pt"))])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return hook


def main() -> None:
    steps = parser(__doc__).parse_args().steps
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # otherwise Accelerate makes no group on the CPU
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(enabled=False)],
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TASK.model()
    model, optimizer = accelerator.prepare(model, optim.AdamW(model.parameters(), lr=TASK.lr))
    scaler = amp.LossScaler(accelerator.device.type, enabled=accelerator.mixed_precision == "fp16")
    accelerator.register_for_checkpointing(scaler)
    hook = register(accelerator, model, codec="int8", scaler=scaler)

    for images, labels in batches(2 * steps):
        with accelerator.accumulate(model):
            logits = model(images.to(accelerator.device))
            accelerator.backward(scaler.scale(loss(logits, labels.to(accelerator.device))))
            if accelerator.sync_gradients:
                scaler.step(optimizer.optimizer, max_norm=1.0, grad_stats=hook.grad_stats)
                scaler.update()
                optimizer.zero_grad()

    ratio = hook.stats()["ratio"]
    net = accelerator.unwrap_model(model).cpu()
    finish(f"{TASK.metric} {accuracy(net):.2%} after {steps} steps, with {ratio:.2f} times fewer bytes than fp32")


if __name__ == "__main__":
    main()
