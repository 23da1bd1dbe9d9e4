"""amp.LossScaler on a CUDA device: the host does not wait, and a whole scaled step can be captured."""

import pytest
import torch
from optimizers import KINDS, SHAPES, assert_same, give_grads, make_params, telling

from dltrain_ext import amp

pytestmark = pytest.mark.gpu


def started(kind):
    """Return parameters, optimizer and scaler after one step, which makes the state."""
    params = make_params(SHAPES, "cuda")
    optimizer, scaler = kind(params, lr=0.1, **telling(kind)), amp.LossScaler("cuda", init_scale=8.0, hysteresis=2)
    scaler.scale(torch.zeros((), device="cuda"))
    give_grads(params, 0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return params, optimizer, scaler


@pytest.mark.parametrize("kind", KINDS)
def test_no_host_waits(kind):
    params, optimizer, scaler = started(kind)
    give_grads(params, 1)
    params[0].grad[0, 0] = float("inf")
    before = [p.detach().clone() for p in params]
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        skipped, norm = scaler.skipped_steps, scaler.total_norm
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(params, before)
    assert skipped == 1 and norm.isinf()


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step(kind):
    """Replays read gradients and scale, skip steps, and count."""
    results = []
    for captured in (False, True):
        params, optimizer, scaler = started(kind)

        def step(optimizer=optimizer, scaler=scaler):
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()

        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for seed in range(1, 6):
            for p, new in zip(params, make_params(SHAPES, "cuda", seed), strict=True):
                p.grad.copy_(new.detach() * (float("nan") if seed in (2, 3) else 1.0))
            step()
        states = [value for p in params for value in optimizer.state[p].values()]
        results.append([*params, *states, scaler.skipped_steps, scaler._scale])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-2] == 2 and results[0][-1] == 4.0
