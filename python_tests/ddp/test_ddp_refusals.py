"""Errors for unsupported combinations, which name the supported ones."""

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dltrain_ext import ddp, optim
from dltrain_ext.amp import LossScaler


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def stepped_in_backward():
    net = nn.Linear(4, 4)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    return DistributedDataParallel(net)


def with_hook(hook):
    model = DistributedDataParallel(nn.Linear(4, 4))
    hook(model)
    return model


def on_meta():
    return DistributedDataParallel(nn.Linear(4, 4, device="meta"), init_sync=False)


REGISTER = {
    "a hook of ours": (lambda: with_hook(ddp.register), RuntimeError, "wrap model.module anew for another one"),
    "a hook of torch's": (
        lambda: with_hook(lambda model: model.register_comm_hook(None, fp16_compress_hook)),
        RuntimeError,
        "use torch.autocast instead of mixed_precision=, which is one too",
    ),
    "stepped in backward": (stepped_in_backward, TypeError, "expected parameters that are stepped after backward"),
    "FSDP2": (lambda: fully_shard(nn.Linear(4, 4)), TypeError, "for fully_shard there is dltrain_ext.fsdp.register"),
    "FSDP1": (
        lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        TypeError,
        "use fully_shard and dltrain_ext.fsdp.register",
    ),
    "DataParallel": (lambda: DataParallel(nn.Linear(4, 4)), TypeError, "use a process for each device"),
    "compiled": (
        lambda: torch.compile(DistributedDataParallel(nn.Linear(4, 4))),
        TypeError,
        "got OptimizedModule; register before torch.compile",
    ),
    "complex": (lambda: DistributedDataParallel(Complex()), TypeError, "got weight of torch.complex64 on cpu"),
    "meta": (on_meta, TypeError, "got weight of torch.float32 on meta"),
}

BACKWARD = {
    "float64": (
        lambda: DistributedDataParallel(nn.Linear(4, 4).double()),
        r"got one of shape \(4, 4\) of torch.float64",
    ),
    "complex": (lambda: DistributedDataParallel(Complex()), r"got one of shape \(4, 4\) of torch.complex64"),
    "FSDP1": (
        lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        "got Tensor; .*where it comes from FSDP, use fully_shard and dltrain_ext.fsdp.register",
    ),
    "sparse": (
        lambda: DistributedDataParallel(nn.Sequential(nn.Embedding(4, 4, sparse=True))),
        "expected dense gradients, got torch.sparse_coo; make the embedding's sparse=False",
    ),
}


def check_refusals(rank, world_size):
    for make, error, text in REGISTER.values():
        model = make()
        with pytest.raises(error, match=text):
            ddp.register(model)
    for name, (make, text) in BACKWARD.items():
        model = make()
        model.register_comm_hook(ddp.AllReduceState(), ddp.allreduce_hook)
        x = torch.arange(4) if name == "sparse" else torch.ones(2, 4, dtype=next(model.parameters()).real.dtype)
        with pytest.raises(TypeError, match=text):
            model(x).sum().backward()
    model = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no supported functional optimizer equivalent for .*dltrain_ext"):
        ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, overlap_with_ddp=True)
    dist.barrier()


def test_errors_for_unsupported_combinations_name_the_supported_ones():
    run_ranks(2, check_refusals)


def check_outside_of_the_buckets(rank, world_size):
    def delayed(net):
        named = [("0.weight", net[0].weight)]
        return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": net[1].weight}

    def ignored(net):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
        return {}

    for options in (delayed, ignored):
        net = nn.Sequential(nn.Linear(512, 16), nn.Linear(16, 16))
        model = DistributedDataParallel(net, **options(net))
        state = ddp.register(model, codec="raw", scaler=LossScaler(enabled=False))
        for _ in range(2):
            model(torch.randn(4, 512)).sum().backward()
        assert same_everywhere(net[1].weight.grad)
        with pytest.raises(
            RuntimeError, match=r"got none of 0.weight, which DDP was told to .*; step without grad_stats"
        ):
            state.grad_stats  # noqa: B018


def test_parameters_outside_of_the_buckets_have_no_grad_stats():
    run_ranks(2, check_outside_of_the_buckets)


def check_python_reducer(rank, world_size):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))
        ddp.register(model)
        with pytest.raises(TypeError, match=r"got tuple; .*leave torch._dynamo.config.optimize_ddp at its default"):
            torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum().backward()


def test_the_python_reducer_is_refused():
    run_ranks(2, check_python_reducer)
