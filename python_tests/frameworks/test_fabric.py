"""The hook and the scaler in Lightning Fabric, as in the example, compared with DDP without them."""

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch
from ranks import ROOT, look_like_torchrun, run_example, run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

pytestmark = [pytest.mark.needs("lightning", "sklearn"), pytest.mark.xdist_group("lightning")]

STEPS = 6


def train_without() -> torch.nn.Module:
    """Do what the example does, by torch alone but for the optimizer."""
    from shared import TASK, batches
    from tasks import loss

    from dltrain_ext import optim

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = TASK.model()
    model, optimizer = DistributedDataParallel(net), optim.AdamW(net.parameters(), lr=TASK.lr)
    for number, (inputs, targets) in enumerate(batches(2 * STEPS)):
        with contextlib.nullcontext() if number % 2 else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                half = loss(model(inputs), targets) / 2
            half.backward()
        if number % 2:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net


def check(rank: int, world_size: int) -> None:
    look_like_torchrun(rank, world_size)
    sys.path.insert(0, str(ROOT / "examples"))
    import with_fabric

    expected = train_without()
    start = with_fabric.TASK.model
    for codec, bound in (("raw", 1e-3), ("int8", 0.5)):
        net, state = with_fabric.train(STEPS, codec)
        assert state.steps == STEPS, "accumulated batches are not sent"
        torch.manual_seed(0)
        for mine, its, first in zip(net.parameters(), expected.parameters(), start().parameters(), strict=True):
            assert (mine - its).norm() < bound * (its - first).norm(), codec


@pytest.mark.exhaustive
def test_raw_gives_the_results_of_ddp() -> None:
    run_ranks(2, check, fresh=True)


def test_the_example(tmp_path: Path) -> None:
    said = run_example("with_fabric.py", tmp_path, "--steps", 30, fresh=True)
    accuracy = re.fullmatch(
        r"test accuracy: ([\d.]+)%\n60 backward passes, 30 of which sent 25.6% of fp32's bytes\n", said
    )
    assert accuracy and float(accuracy[1]) > 70, said
