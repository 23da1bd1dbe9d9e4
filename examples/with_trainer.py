"""The Trainer of Hugging Face Transformers. Run: torchrun --standalone --nproc-per-node 2 examples/with_trainer.py

It trains a small GPT-2 on the bytes of Python's library. A callback registers the hook on the model that the Trainer
has wrapped, and saves the residuals of each rank with the checkpoints. With --folder a run continues from its last one.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from shared import finish, parser
from tasks import CONTEXT, python_source
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from dltrain_ext import ddp, optim


class Hook(TrainerCallback):
    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.options = trainer, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrapped, scaler = self.trainer.model_wrapped, self.trainer.accelerator.scaler
        self.state = ddp.register(wrapped, scaler=scaler, **self.options)
        if state.global_step > 0:
            files = sorted(Path(args.output_dir, f"checkpoint-{state.global_step}").glob("hook-*.pt"))
            self.state.load_state_dict([torch.load(file) for file in files])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        torch.save(self.state.state_dict(), folder / f"hook-{args.process_index}.pt")


def trainer_of(folder: str, steps: int, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    set_seed(0)
    task = python_source()
    train, test = (
        [{"input_ids": row, "labels": row} for row in text[:4096].long()] for text in (task.train[0], task.test[0])
    )
    size = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**size, bos_token_id=None, eos_token_id=None)
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **options,
    )
    model = GPT2LMHeadModel(config)
    optimizer = optim.AdamW(model.parameters(), lr=4e-3)
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, optimizers=(optimizer, None))
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="folder for checkpoints, one every 30 steps (none)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        folder, saving = (options.folder, "steps") if options.folder else (nowhere, "no")
        last = get_last_checkpoint(folder) if options.folder and options.folder.exists() else None
        trainer = trainer_of(str(folder), options.steps, save_strategy=saving, save_steps=30)
        hook = Hook(trainer, codec="int8")
        trainer.add_callback(hook)
        trainer.train(resume_from_checkpoint=last)
        bits, ratio = trainer.evaluate()["eval_loss"] / math.log(2), hook.state.stats()["ratio"]
    finish(f"test bits per byte {bits:.2f} after {options.steps} steps, with {ratio:.2f} times fewer bytes than fp32")


if __name__ == "__main__":
    main()
