"""Two levels: the ranks of a host add up their gradients, and one of them pushes."""

import pytest
import torch
import torch.distributed as dist
from optimizers import SHAPES, give_grads, make_params
from ranks import FAR, run_ranks

from dltrain_ext import optim, ps

STEPS = 3


def hosts_train_as_one(rank, world_size, per_host, dtype):
    params = [torch.nn.Parameter((p + rank).to(dtype)) for p in make_params(SHAPES)]
    reference = [torch.nn.Parameter(p.detach().clone().float()) for p in make_params(SHAPES)]
    local = optim.AdamW(reference, lr=0.01)
    optimizer = ps.Optimizer(
        [(f"p{number}", p) for number, p in enumerate(params)],
        lr=0.01,
        ranks_per_host=per_host,
        timeout=FAR,
    )
    for step in range(STEPS):
        give_grads(reference, 100 * step + rank)
        for p, master in zip(params, reference, strict=True):
            p.grad = master.grad.to(dtype)
            master.grad = p.grad.float()
            dist.all_reduce(master.grad)
            master.grad /= world_size
        if step == 1 and rank == world_size - 1:
            params[0].grad.fill_(torch.inf)
        optimizer.step()
        assert optimizer.versions == (step + 1, step + 1, step == 1)
        if step != 1:
            local.step()
        for p, master in zip(params, reference, strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(p.float(), master, rtol=tolerance, atol=tolerance)
    optimizer.close()
    return [p.detach().float() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "per_host"), [(4, 2), (3, 2), (2, 2)])
def test_hosts_train_as_one(ranks, per_host, dtype):
    first, *others = run_ranks(ranks, hosts_train_as_one, per_host, dtype)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


def is_refused(rank, world_size):
    p = torch.nn.Parameter(torch.ones(2))
    for given, text in (
        ({"ranks_per_host": 0}, "ranks_per_host: expected"),
        ({"ranks_per_host": 2, "servers": [0]}, "servers: expected"),
    ):
        with pytest.raises(ValueError, match=text):
            ps.Optimizer([("p", p)], **given)


def test_wrong_arguments_are_named():
    run_ranks(1, is_refused)
