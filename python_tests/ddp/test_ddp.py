"""The DDP comm hook compared with plain DDP, over Gloo."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, codecs, comm, ddp, optim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.head = nn.Linear(64, 1)
        self.spare = nn.Linear(64, 64)  # only some batches use it

    def forward(self, x, spare=False):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.spare(x) if spare else x)


def make(rank, **options):
    torch.manual_seed(0)
    # 16 KiB buckets contain one layer each.
    return DistributedDataParallel(Net(), bucket_cap_mb=16 / 1024, **options)


def train(model, rank, steps=4, spare=lambda step: True, optimizer=optim.AdamW):
    """Return the averaged gradients of each step, and the final parameters."""
    torch.manual_seed(100 + rank)
    optimizer = optimizer(model.parameters(), lr=0.01)
    grads = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 64), spare(step)).square().mean().backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return grads, [p.detach().clone() for p in model.parameters()]


def assert_close(ours, theirs):
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-6)


def check_against_plain(rank, world_size, algorithm, options):
    plain = train(make(rank, **options), rank)
    model = make(rank, **options)
    state = ddp.register(model, codec="raw", algorithm=algorithm)
    ours = train(model, rank)
    assert_close(ours, plain)
    stats = state.stats()
    assert stats["buckets"] > 4 * 4  # several per step
    plan = comm.plan("direct" if algorithm == "auto" else algorithm, rank, world_size)
    chunks = sum(step.chunks[1] - step.chunks[0] for steps in plan.rounds for step in steps if "send" in step.op)
    expected = 4 * 4 * sum(p.numel() for p in model.parameters()) * chunks / plan.chunks
    sent = torch.tensor([stats["wire_bytes"], expected])
    dist.all_reduce(sent)  # small parameters are not divided, so ranks may send different numbers of bytes
    assert sent[0].item() == pytest.approx(sent[1].item(), rel=0.02)
    return ours[1]


OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_like_plain_ddp(world_size, algorithm):
    first, *others = run_ranks(world_size, check_against_plain, algorithm, {})
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_like_plain_ddp_with(options):
    run_ranks(2, check_against_plain, "auto", options)


def check_unused(rank, world_size):
    def spare(step):
        return step % 2 == 0

    options = {"find_unused_parameters": True}
    plain = train(make(rank, **options), rank, spare=spare)
    model = make(rank, **options)
    ddp.register(model, codec="raw")
    assert_close(train(model, rank, spare=spare), plain)


def test_unused_parameters():
    run_ranks(2, check_unused)


def check_accumulation(rank, world_size):
    results = []
    for ours in (False, True):
        model = make(rank)
        state = ddp.register(model, codec="raw") if ours else None
        torch.manual_seed(rank)
        with model.no_sync():
            model(torch.randn(5, 64), True).mean().backward()
        assert not ours or state.stats()["buckets"] == 0
        model(torch.randn(5, 64), True).mean().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_gradient_accumulation():
    run_ranks(2, check_accumulation)


def check_conventional_form(rank, world_size):
    plain = train(make(rank), rank)
    model = make(rank)
    model.register_comm_hook(ddp.AllReduceState(algorithm="ring", codec="raw"), ddp.allreduce_hook)
    assert_close(train(model, rank), plain)


def test_conventional_form():
    run_ranks(2, check_conventional_form)


def check_subgroup(rank, world_size):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    state = ddp.register(model, codec="raw")
    x = torch.full((1, 4), float(rank))
    model(x).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(4, 4))  # the mean of 0 and 2
    assert state.stats()["buckets"] == 1


def test_a_group_of_some_ranks():
    run_ranks(3, check_subgroup)


class Pause(torch.autograd.Function):
    """Pauses backward for a second, and records how many buckets have been reduced after it."""

    @staticmethod
    def forward(ctx, x, state, notes):
        ctx.state, ctx.notes = state, notes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(1)
        ctx.notes.append(ctx.state.stats()["buckets"])
        return grad, None, None


def reduced_in_the_middle_of_backward(rank, world_size):
    model = make(rank)
    state = ddp.register(model, codec="raw")
    train(model, rank, steps=2)  # now the buckets have their final form
    forward, notes, before = model.module.layers[3].forward, [], state.stats()["buckets"]
    model.module.layers[3].forward = lambda x: forward(Pause.apply(x, state, notes))
    model(torch.randn(5, 64), True).mean().backward()
    return notes[0] - before


def test_buckets_are_reduced_while_backward_runs():
    assert all(buckets >= 3 for buckets in run_ranks(2, reduced_in_the_middle_of_backward))


def averaged_with_codecs(rank, world_size):
    plain = train(make(rank), rank, steps=1)[0][0]
    results = []
    for codec in ("fp16", "int8"):
        model = make(rank)
        state = ddp.register(model, codec=codec)
        results.append(train(model, rank, steps=1)[0][0])
        bound = 3 * codecs.error_bound(codec).max * world_size
        for ours, theirs in zip(results[-1], plain, strict=True):
            if theirs is not None:  # a bucket is a layer, so its blocks are not those of one parameter
                assert (ours - theirs).abs().max() <= bound * max(p.abs().max() for p in plain if p is not None)
        assert state.stats()["wire_bytes"] < 0.55 * 4 * sum(p.numel() for p in model.parameters()) * world_size
    half = DistributedDataParallel(nn.Linear(64, 64).to(torch.bfloat16))
    ddp.register(half, codec="int8")
    half(torch.randn(5, 64).to(torch.bfloat16)).sum().backward()
    return [[grad for grad in grads if grad is not None] for grads in (*results, [half.module.weight.grad])]


def test_gradients_are_sent_in_any_codec():
    first, second = run_ranks(2, averaged_with_codecs)
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_the_error_without_a_group_says_to_initialize_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = "model: expected a DistributedDataParallel, got Linear; call torch.distributed.init_process_group and"
    with pytest.raises(TypeError, match=expected):
        ddp.register(nn.Linear(2, 2))


@pytest.mark.parametrize("codec", ["int8", "auto"])
def test_a_single_rank_has_grad_stats_only(codec):
    model, scaler = nn.Linear(3, 2), amp.LossScaler("cpu", init_scale=4.0)
    state = ddp.register(model, codec=codec, scaler=scaler)
    with pytest.raises(RuntimeError, match="grad_stats: expected a backward pass first"):
        _ = state.grad_stats
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(5, 3)).sum()).backward()
    assert state.grad_stats.sum_squares.item() == 20**2 * 8  # of weight and bias, 4 times too large
    scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
    assert scaler.total_norm.item() == pytest.approx(5 * 8**0.5)
    model.bias.grad.fill_(torch.inf)
    assert state.grad_stats.sum_squares.isinf()
    assert state.stats()["wire_bytes"] == 0
    with pytest.raises(ValueError, match="codec: expected one of raw, fp16"):
        ddp.register(model, codec="int3")


def go_on(rank, world_size, saved):
    state = ddp.register(make(rank))
    state.load_state_dict(saved)
    return state.state_dict()


def test_checkpoints_of_several_processes_are_loaded_by_one_and_back():
    residuals = {name: torch.ones_like(p) for name, p in Net().named_parameters()}
    several = [
        {"version": 1, "steps": 3, "world_size": 2, "feedback": {f"rank {rank} of 2": residuals}} for rank in range(2)
    ]
    alone = ddp.register(Net())
    alone.load_state_dict(several)
    for rank, state in enumerate(run_ranks(2, go_on, alone.state_dict())):
        assert state["steps"] == 3
        for lost in state["feedback"][f"rank {rank} of 2"].values():
            assert torch.equal(lost, torch.full_like(lost, 2.0 * (rank == 0)))  # the sum of the residuals of both ranks


def check_errors(rank, world_size):
    with pytest.raises(
        TypeError, match=r"got Linear; wrap it in one first; in a Trainer .* trainer.model_wrapped, and"
    ):
        ddp.register(nn.Linear(2, 2))
    double = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    with pytest.raises(TypeError, match=r"model: expected parameters of .*, got 1.weight of torch.float64 on cpu"):
        ddp.register(double)
    with pytest.raises(ValueError, match="algorithm: expected one of ring, tree.*, got 'rign'"):
        ddp.register(make(rank), codec="raw", algorithm="rign")
    with pytest.raises(ValueError, match="codec: expected one of raw, fp16.*, got 'int3'"):
        ddp.AllReduceState(codec="int3")
    with pytest.raises(ValueError, match="timeout: expected a datetime.timedelta"):
        ddp.register(make(rank), timeout=timedelta(0))
    with pytest.raises(TypeError):
        copy.deepcopy(ddp.AllReduceState())


def test_bad_input_names_the_argument():
    run_ranks(2, check_errors)
