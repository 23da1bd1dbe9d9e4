"""What holds among the ranks: plans, codecs, the same bits everywhere, the DDP hook, captured all-reduces."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, ddp
from dltrain_ext.codecs import CODECS
from dltrain_ext.selftest import ranks, sums
from dltrain_ext.selftest.report import Check, Found, Site, Skip

PROVED = 2048  # what verify takes


def _check(result: Tensor, data: sums.Data, codec: str, site: Site, what: str) -> None:
    tolerance = sums.tolerance(codec, site.world_size, data.magnitudes)
    wrong = torch.tensor(sums.count_wrong(result, data.total, tolerance, sums.first_if_unlike(result)))
    dist.all_reduce(wrong)  # all come to the same verdict, so that none goes on alone
    assert not wrong, f"{what}, {result.numel()} elements: {wrong} are wrong on some rank, or differ between ranks"


def _sizes(site: Site) -> tuple[int, ...]:
    return (1, 70_001) if site.quick else (1, 1000, 70_001, 2_000_003)


def proofs(site: Site) -> Found:
    if site.world_size > PROVED:
        raise Skip(f"plans are proved for up to {PROVED} ranks")
    for algorithm in comm.ALGORITHMS:
        comm.verify(algorithm, site.world_size)
    return Found(f"{len(comm.ALGORITHMS)} plans hold rules R1 to R4 for {site.world_size} ranks")


def plans(site: Site) -> Found:
    """Every plan, and the backend's own, with sums that are exact in any order."""
    communicator = comm.Communicator(timeout=ranks.TIMEOUT)
    algorithms = (*comm.ALGORITHMS, "auto", "native")
    for numel in _sizes(site):
        data = sums.Data.of(sums.whole_numbers(numel), site.rank, site.world_size, site.device)
        for algorithm in algorithms:
            result = data.own.clone()
            communicator.all_reduce(result, algorithm=algorithm)
            _check(result, data, "raw", site, algorithm)
    communicator.close()
    return Found(f"{len(algorithms)} algorithms, {len(_sizes(site))} sizes: sums are exact, bits the same on all ranks")


def plans_and_codecs(site: Site) -> Found:
    """Every plan with every codec, within the codec's bound; on CUDA with the bits of the CPU, residuals too."""
    communicator, count = comm.Communicator(timeout=ranks.TIMEOUT), 0
    for numel in _sizes(site):
        whole, normal = (
            sums.Data.of(kind(numel), site.rank, site.world_size, site.device)
            for kind in (sums.whole_numbers, sums.normal)
        )
        for codec in CODECS:
            data = whole if codec == "raw" else normal
            for algorithm in comm.algorithms_for(codec):
                for rounding in ("nearest", "stochastic"):
                    what = f"{codec} by {algorithm}, {rounding}"
                    options: dict[str, Any] = dict(algorithm=algorithm, codec=codec, rounding=rounding, seed=1, step=2)
                    feeds = sums.has_feedback(codec, rounding)
                    result, residual = data.own.clone(), torch.zeros_like(data.own)
                    communicator.all_reduce(result, residual=residual if feeds else None, **options)
                    if rounding == "nearest":
                        _check(result, data, codec, site, what)
                    if site.device.type != "cpu":
                        twin, lost = data.own.cpu(), torch.zeros(numel)
                        communicator.all_reduce(twin, residual=lost if feeds else None, **options)
                        same = torch.equal(_bits(result), _bits(twin)) and torch.equal(_bits(residual), _bits(lost))
                        assert same, f"{what}, {numel} elements: not the bits of the CPU"
                    count += 1
    communicator.close()
    return Found(f"{count} all-reduces are within their bounds, bits the same on all ranks")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


def reduce_scatter(site: Site) -> Found:
    communicator = comm.Communicator(timeout=ranks.TIMEOUT, ranks_per_host=1)
    share = 10_007
    data = sums.Data.of(sums.whole_numbers(share * site.world_size), site.rank, site.world_size, site.device)
    output = torch.empty(share, device=site.device)
    communicator.reduce_scatter(output, data.own)
    assert torch.equal(output, data.total[site.rank * share :][:share]), "reduce_scatter: the share is not the sum"
    communicator.close()
    return Found("each rank has its share of the sum")


def ddp_hook(site: Site) -> Found:
    """The gradients of a small model, over the hook with raw, beside plain DDP's; and with int8 the same on all."""
    gradients = {codec: _gradients(site, codec) for codec in ("plain", "raw", "int8")}
    torch.testing.assert_close(gradients["raw"], gradients["plain"], rtol=1e-5, atol=1e-6)
    for codec in ("raw", "int8"):
        assert sums.first_if_unlike(gradients[codec]) is None, f"{codec}: the ranks have different gradients"
    exact, got = gradients["plain"], gradients["int8"]
    error = sums.relative_error(got, exact)
    assert error < 0.05, f"int8: gradients are {error:.1%} off"
    return Found(f"raw as plain DDP, int8 {error:.2%} off, bits the same on all ranks")


def _gradients(site: Site, codec: str) -> Tensor:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(site.device)
    model = DistributedDataParallel(module, bucket_cap_mb=0.1, process_group=ranks.group_for(site.device))
    if codec != "plain":
        ddp.register(model, codec=codec)
    torch.manual_seed(1 + site.rank)
    for _ in range(3):  # DDP lays its buckets anew after the first
        model.zero_grad()
        model(torch.randn(16, 64).to(site.device)).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def captured_all_reduce(site: Site) -> Found:
    if site.device.type != "cuda":
        raise Skip("the CPU has no graphs")
    communicator = comm.Communicator(timeout=ranks.TIMEOUT)
    for algorithm, codec in (("ring", "raw"), ("direct", "int8"), ("native", "raw")):
        tensor = sums.normal(70_001)(site.rank).to(site.device)
        options: dict[str, Any] = {"algorithm": algorithm, "codec": codec, "step": 1}
        eager = tensor.clone()
        communicator.all_reduce(eager, **options)  # connects the peers, too
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            communicator.all_reduce(tensor, **options)
        graph.replay()
        torch.cuda.synchronize()
        del graph  # NCCL gives a communicator up only when no graph has it
        assert torch.equal(eager, tensor), f"{codec} by {algorithm}: a replay differs from a call"
    communicator.close()
    return Found("replays give what calls give")


CHECKS = [
    Check("proofs of plans", proofs),
    Check("plans", plans),
    Check("plans with codecs", plans_and_codecs),
    Check("reduce-scatter", reduce_scatter),
    Check("DDP hook", ddp_hook),
    Check("captured all-reduces", captured_all_reduce),
]
