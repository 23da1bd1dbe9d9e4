"""Training techniques in one process, each against a plain step: time, saved activations, bytes of state."""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Keep, Progress, Row, Table, at_least, interleave
from dltrain_ext import amp, kfac, optim

OVERVIEW = ["--layers", "2", "--width", "64", "-n", "5"]
HEADS, SEQUENCE, BATCH, MICRO_BATCHES, LR = 4, 64, 16, 4, 1e-3
EXACT, HALF = 1e-4, 0.1  # relative tolerances of a loss
COMPARED, OTHERS = 2, 6  # losses that are checked, the first one before any update
SECONDS = 120.0  # after three rounds, none begins later
NOTES = [
    f"a sample is one optimizer step over the same {BATCH} sequences of {SEQUENCE}; the sides, each with its own model "
    "and optimizer, are timed alternately; peer/ours is the time of plain over that of the side",
    "the loss is the mean square of the output of pre-norm TransformerEncoderLayers; the optimizer is ours, AdamW; "
    f"accumulation: {MICRO_BATCHES} backward passes; 16-bit sides are slower than plain where the CPU has no such "
    "arithmetic",
    "distillation: a teacher of twice the layers without autograd, and the mean square of the difference from it",
    "K-FAC: factors at each step, inverses at every tenth; of linear1 and linear2, since the projections of torch's "
    "attention are no modules that are called",
    f"#wrong: 1 if the loss does not decrease, or if the first {COMPARED} losses are not plain's: within {EXACT:g} "
    f"for checkpointing and accumulation, {HALF:g} for 16 bits; distillation and K-FAC change the steps: theirs are "
    f"to be finite, and smaller after {OTHERS - 1} steps; loss error: the largest, relative",
    "saved MB: of the distinct storages that autograd saves in a forward pass of one micro-batch, without parameters",
    "state B/param: the optimizer's state (with masters, without the count of steps), per parameter of the model; "
    "model B/param: its parameters; K-FAC's matrices and the teacher are not counted",
]


class Job(NamedTuple):
    layers: int
    width: int
    device: str


def make_layers(number: int, job: Job) -> nn.ModuleList:
    """Return pre-norm layers: after a last LayerNorm the mean square would always be 1."""
    return nn.ModuleList(
        nn.TransformerEncoderLayer(
            job.width,
            HEADS,
            dim_feedforward=4 * job.width,
            dropout=0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            device=job.device,
        )
        for _ in range(number)
    )


def apply(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Side:
    """A plain step, with a model and an optimizer of its own. `rtol`: of its losses to plain's; None if they differ."""

    rtol: float | None = EXACT
    micro_batches = 1
    dtype = torch.float32

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.device = job.device
        self.model = make_layers(job.layers, job).to(self.dtype)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=LR)
        batch = torch.randn(BATCH, SEQUENCE, job.width, generator=torch.Generator().manual_seed(1))
        batch = batch.to(job.device, self.dtype)
        self.batches = [x.clone() for x in batch.chunk(self.micro_batches)]  # storages of their own

    def output(self, x: Tensor) -> Tensor:
        return apply(self.model, x)

    def loss(self, x: Tensor) -> Tensor:
        return self.output(x).float().square().mean()

    def step(self) -> Tensor:
        """Return the loss before the update."""
        total = torch.zeros((), device=self.device)
        for x in self.batches:
            loss = self.loss(x) / len(self.batches)
            self.backward(loss)
            total += loss.detach()
        self.update()
        self.optimizer.zero_grad()
        return total

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()


class Checkpointed(Side):
    reentrant = False

    def output(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(self.reentrant)  # else it would compute no gradients of the first layer
        for layer in self.model:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class Accumulated(Side):
    micro_batches = MICRO_BATCHES


class Autocast(Side):
    rtol = HALF
    lower = torch.bfloat16

    def output(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, self.lower):
            return super().output(x)


class Scaled(Autocast):
    lower = torch.float16

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.scaler = amp.LossScaler(job.device)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer, max_norm=1.0)
        self.scaler.update()


class Masters(Side):
    rtol = HALF
    dtype = torch.bfloat16


class Distilled(Side):
    rtol = None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.teacher = make_layers(2 * job.layers, job)

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = apply(self.teacher, x)
        output = self.output(x)
        return output.square().mean() + nn.functional.mse_loss(output, target)


class Preconditioned(Side):
    rtol = None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.preconditioner = kfac.KFAC(self.model, factor_update_steps=1, inv_update_steps=10, lr=LR)

    def update(self) -> None:
        self.preconditioner.step()
        super().update()


PLAIN = "plain"
SIDES: dict[str, type[Side]] = {
    PLAIN: Side,
    "checkpointing, not reentrant": Checkpointed,
    "checkpointing, reentrant": Reentrant,
    f"accumulation, {MICRO_BATCHES} micro-batches": Accumulated,
    "autocast bf16": Autocast,
    "fp16 with LossScaler": Scaled,
    "bf16 model with masters": Masters,
    "distillation": Distilled,
    "K-FAC": Preconditioned,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=at_least(1), help="number of layers (default: 4, --quick: 2)")
    parser.add_argument(
        "--width", type=at_least(4), help=f"width, a multiple of {HEADS}: the heads (default: 256, --quick: 64)"
    )
    parser.add_argument(
        "-n",
        "--iters",
        type=at_least(1),
        help=f"timed steps (default: 10, --quick: 3); after three, none begins later than {SECONDS:g} s",
    )


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    width = (options.width or (64 if options.quick else 256)) // HEADS * HEADS
    job = Job(options.layers or (2 if options.quick else 4), width, options.device)
    rounds = options.iters or (3 if options.quick else 10)
    where = torch.cuda.get_device_name(0) if job.device == "cuda" else f"{torch.get_num_threads()} threads"
    table = Table(f"Training techniques, one process, {where}", notes=list(NOTES), check_heading="#wrong")
    keep(table)
    rows, sides = verify(job, lambda name, done: progress(f"{name}: verifying", done / 3))
    right = {name: side.step for name, side in sides.items() if rows[name].correct}
    samples = interleave(
        right,
        rounds=(min(rounds, 3), rounds),
        warmup=0,  # verifying was one
        seconds=SECONDS,
        device=job.device,
        progress=lambda done: progress("steps", (1 + 2 * done) / 3),
    )
    for name, row in rows.items():
        row.samples = samples.get(name, [])
        if row.ours:
            row.compare_with(rows[PLAIN])
    table.rows += rows.values()


def verify(job: Job, advance: Progress) -> tuple[dict[str, Row], dict[str, Side]]:
    """Return the untimed row and the side of each name."""
    rows, sides = {}, {}
    plain: list[float] = []
    for index, (name, kind) in enumerate(SIDES.items()):
        advance(name, index / len(SIDES))
        side = sides[name] = kind(job)
        losses = [side.step().item() for _ in range(OTHERS if side.rtol is None else COMPARED)]
        plain = plain or losses
        rtol = side.rtol
        error = None if rtol is None else error_of(losses, plain)
        close = rtol is None or error_of(losses, plain) <= rtol
        correct = is_finite(losses) and losses[-1] < losses[0] and close
        rows[name] = Row(f"{job.layers} layers of {job.width}", name, name != PLAIN, correct, str(int(not correct)))
        rows[name].figures = {"loss error": error, **(memory(side) if correct else {})}
    return rows, sides


def is_finite(losses: list[float]) -> bool:
    return bool(torch.tensor(losses).isfinite().all())


def error_of(losses: list[float], expected: list[float]) -> float:
    return max(abs(loss - one) / one for loss, one in zip(losses, expected, strict=True))


def memory(side: Side) -> dict[str, float | None]:
    params = list(side.model.parameters())
    numel = sum(p.numel() for p in params)
    state = [
        value
        for of_param in side.optimizer.state.values()
        for key, value in of_param.items()
        if isinstance(value, Tensor) and key != "step"
    ]
    return {
        "saved MB": 1e-6 * saved_bytes(side),
        "state B/param": sum(value.nbytes for value in state) / numel,
        "model B/param": sum(p.nbytes for p in params) / numel,
    }


def saved_bytes(side: Side) -> int:
    """Return the bytes of the distinct storages that autograd saves in a forward pass, without the parameters."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor  # the graph keeps it, so no other storage gets its address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = side.loss(side.batches[0])
    for p in side.model.parameters():
        found.pop(p.untyped_storage().data_ptr(), None)
    del loss
    return sum(found.values())
