"""Logs what the hook, the loss scaler and the optimizer tell, to JSON lines, TensorBoard or MLflow, over all ranks.

Run: torchrun --standalone --nproc-per-node 2 examples/monitoring.py --to jsonl,tensorboard,mlflow --folder logs
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shared import TASK, batches, finish, parser, rank_and_size, start
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, monitor, optim

Log = Callable[[Mapping[str, float], int], None]


@contextlib.contextmanager
def jsonl(folder: Path) -> Iterator[Log]:
    with monitor.JSONLines(folder / "metrics.jsonl") as lines:
        yield lines.write


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(folder / "tensorboard") as writer:
        yield log


@contextlib.contextmanager
def mlflow(folder: Path) -> Iterator[Log]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    with mlflow.start_run():
        yield lambda metrics, step: mlflow.log_metrics(dict(metrics), step=step)


LOGGERS = {"jsonl": jsonl, "tensorboard": tensorboard, "mlflow": mlflow}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--to", default="jsonl", help=f"names out of {', '.join(LOGGERS)} (%(default)s)")
    options.add_argument("--folder", type=Path, default=Path("logs"), help="where the files are (%(default)s)")
    options.add_argument("--every", type=int, default=10, help="steps between two entries (%(default)s)")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler("cpu")
    state = ddp.register(model, codec="int8", scaler=scaler, watch=True)
    writes = rank_and_size()[0] == 0  # as users of these loggers do: one rank writes what all have found
    args.folder.mkdir(parents=True, exist_ok=True)
    metrics: dict[str, float] = {}
    findings = []
    with contextlib.ExitStack() as open_files:
        logs = [open_files.enter_context(LOGGERS[name](args.folder)) for name in args.to.split(",") if writes]
        for step, (inputs, targets) in enumerate(batches(args.steps), 1):
            optimizer.zero_grad()
            error = loss(model(inputs), targets)
            scaler.scale(error).backward()
            scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
            scaler.update()
            if step % args.every == 0:
                own = {"loss": error.item()} | state.metrics() | scaler.metrics() | optimizer.metrics()
                metrics = monitor.over_ranks(own)  # collective, so all ranks call it
                findings += state.findings()
                for log in logs:
                    log(metrics, step)
    late = ""
    if "late/rank" in metrics:
        late = f"; rank {metrics['late/rank']:.0f} was the last one, by {1e3 * metrics['late/seconds']:.1f} ms"
    finish(
        f"{len(metrics)} numbers every {args.every} steps{late}",
        *(f"{found.kind} of {found.parameter} on rank {found.rank} in step {found.step}" for found in findings),
    )


if __name__ == "__main__":
    main()
