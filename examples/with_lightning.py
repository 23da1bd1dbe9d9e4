"""PyTorch Lightning. Run: torchrun --standalone --nproc-per-node 2 examples/with_lightning.py

The strategy averages gradients in int8, and the plugin clips them in one pass with the step of the optimizer. With
--csv FOLDER, one of Lightning's loggers writes the metrics of the hook.
"""

import logging
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from shared import TASK, accuracy, finish, parser
from tasks import loss
from torch.utils.data import DataLoader, TensorDataset

from dltrain_ext import optim
from dltrain_ext.lightning import DDPStrategy, MixedPrecision


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TASK.model()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return loss(self.net(images), labels)

    def on_train_batch_end(self, *_: object) -> None:
        self.log_dict(self.trainer.strategy.hook_state.metrics())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optim.AdamW(self.parameters(), lr=TASK.lr)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--csv", help="the folder of a CSVLogger; none logs nothing")
    args = options.parse_args()
    steps = args.steps
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    strategy, model = DDPStrategy(codec="int8"), Digits()
    trainer = pl.Trainer(
        accelerator=device,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=strategy,
        plugins=[MixedPrecision("bf16-mixed", device)],
        gradient_clip_val=1.0,
        max_steps=steps,
        logger=CSVLogger(args.csv) if args.csv else False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(*TASK.train)
    trainer.fit(model, DataLoader(data, batch_size=TASK.batch_size // trainer.world_size, shuffle=True))
    ratio = strategy.hook_state.stats()["ratio"]
    finish(f"{TASK.metric} {accuracy(model.net):.2%} after {steps} steps, with {ratio:.2f} times fewer bytes than fp32")


if __name__ == "__main__":
    main()
