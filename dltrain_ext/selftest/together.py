"""Checks of several ranks: plans, codecs, the same bits on all ranks, the DDP hook, captured all-reduces."""

import gc
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, ddp
from dltrain_ext.codecs import CODECS
from dltrain_ext.selftest import ranks, sums
from dltrain_ext.selftest.report import Check, Found, Site, Skip

PROVED = 2048  # the largest number of ranks that verify accepts


def _check(result: Tensor, data: sums.Data, codec: str, site: Site, what: str) -> None:
    tolerance = sums.tolerance(codec, site.world_size, data.magnitudes)
    wrong = sums.count_wrong(result, data.total, tolerance, sums.first_if_unlike(result))
    ranks.agree(f"{what}, {result.numel()} elements: {wrong} are wrong, or not those of rank 0" if wrong else "")


def _sizes(site: Site) -> tuple[int, ...]:
    return (1, 70_001) if site.quick else (1, 1000, 70_001, 2_000_003)


def proofs(site: Site) -> Found:
    if site.world_size > PROVED:
        raise Skip(f"plans are proved for up to {PROVED} ranks")
    of_each = [(collective, algorithm) for collective, names in comm.COLLECTIVES.items() for algorithm in names]
    for collective, algorithm in of_each:
        comm.verify(algorithm, site.world_size, collective=collective)
    return Found(f"{len(of_each)} plans hold rules R1 to R4 for {site.world_size} ranks")


def plans(site: Site) -> Found:
    """Runs every plan, and the backend's own, with sums that are exact in any order; in two levels with hosts."""
    algorithms = (*comm.ALGORITHMS, "auto", "native")
    with ranks.communicator(site.device) as communicator:
        for numel in _sizes(site):
            data = sums.Data.of(sums.whole_numbers(numel), site.rank, site.world_size, site.device)
            for algorithm in algorithms:
                result = data.own.clone()
                communicator.all_reduce(result, algorithm=algorithm)
                _check(result, data, "raw", site, algorithm)
    return Found(f"{len(algorithms)} algorithms, {len(_sizes(site))} sizes: sums are exact, bits the same on all ranks")


def plans_and_codecs(site: Site) -> Found:
    """Runs every plan with every codec within the codec's bound; on CUDA with the bits of the CPU, residuals too."""
    count = 0
    # In two levels the sum within a host is the backend's, which adds in another order on each device.
    with ranks.communicator(site.device, ranks_per_host=1) as communicator:
        for numel in _sizes(site):
            whole, normal = (
                sums.Data.of(kind(numel), site.rank, site.world_size, site.device)
                for kind in (sums.whole_numbers, sums.normal)
            )
            for codec in CODECS:
                data = whole if codec == "raw" else normal
                for algorithm, rounding in itertools.product(comm.algorithms_for(codec), ("nearest", "stochastic")):
                    _reduce_and_check(communicator, data, algorithm, codec, rounding, site)
                    count += 1
    return Found(f"{count} all-reduces are within their bounds, bits the same on all ranks")


def _reduce_and_check(
    communicator: comm.Communicator, data: sums.Data, algorithm: str, codec: str, rounding: str, site: Site
) -> None:
    options: dict[str, Any] = dict(algorithm=algorithm, codec=codec, rounding=rounding, seed=1, step=2)
    what = f"{codec} by {algorithm}, {rounding}"

    def reduced(own: Tensor) -> tuple[Tensor, Tensor]:
        result, residual = own.clone(), torch.zeros_like(own)
        feedback = residual if sums.has_feedback(codec, rounding) else None
        communicator.all_reduce(result, residual=feedback, **options)
        return result, residual

    got = reduced(data.own)
    if rounding == "nearest":
        _check(got[0], data, codec, site, what)
    if site.device.type != "cpu":
        same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(got, reduced(data.own.cpu()), strict=True))
        ranks.agree("" if same else f"{what}, {data.own.numel()} elements: not the bits of the CPU")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.uint8)


def other_collectives(site: Site) -> Found:
    numel, root = 10_007, site.world_size - 1
    given = sums.whole_numbers(numel * site.world_size)
    data = sums.Data.of(given, site.rank, site.world_size, site.device)
    shard, gathered = torch.empty(numel, device=site.device), torch.empty_like(data.own)
    sent, added = data.own.clone(), data.own.clone()
    with ranks.communicator(site.device, ranks_per_host=1) as communicator:
        communicator.reduce_scatter(shard, data.own)
        communicator.all_gather(gathered, shard)
        communicator.broadcast(sent, root)
        communicator.reduce(added, root)
    right = {
        "reduce_scatter": torch.equal(shard, data.total[site.rank * numel :][:numel]),
        "all_gather": torch.equal(gathered, data.total),
        "broadcast": torch.equal(sent, given(root).to(site.device)),
        "reduce": site.rank != root or torch.equal(added, data.total),
    }
    ranks.agree(", ".join(f"{name}: the result is wrong" for name, is_right in right.items() if not is_right))
    return Found(f"the results of {', '.join(right)} are right")


def ddp_hook(site: Site) -> Found:
    """Compares the gradients of a small model with plain DDP's: the hook with raw, and with int8, with the same bits on
    all."""
    plain, raw, int8 = (_gradients(site, codec) for codec in ("plain", "raw", "int8"))
    wrong = []
    if not torch.allclose(raw, plain, rtol=1e-5, atol=1e-6):
        wrong.append(f"raw: gradients are {sums.relative_error(raw, plain):.1e} off those of plain DDP")
    if (error := sums.relative_error(int8, plain)) > 0.05:
        wrong.append(f"int8: gradients are {error:.1%} off those of plain DDP")
    for codec, gradients in (("raw", raw), ("int8", int8)):
        if sums.first_if_unlike(gradients) is not None:
            wrong.append(f"{codec}: the ranks have different gradients")
    ranks.agree("; ".join(wrong))
    return Found(f"raw as plain DDP, int8 {error:.2%} off, bits the same on all ranks")


def _gradients(site: Site, codec: str) -> Tensor:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(site.device)
    group = ranks.group_for(site.device.type)
    model = DistributedDataParallel(module, bucket_cap_mb=0.1, process_group=group)
    if codec != "plain":
        ddp.register(model, codec=codec)
    torch.manual_seed(1 + site.rank)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        model(torch.randn(16, 64).to(site.device)).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    ranks.wait_for_all(site.device)
    return gradients


def captured_all_reduce(site: Site) -> Found:
    if site.device.type != "cuda":
        raise Skip("the CPU has no graphs")
    with ranks.communicator(site.device) as communicator:
        for algorithm, codec in (("ring", "raw"), ("direct", "int8"), ("native", "raw")):
            given = sums.whole_numbers(70_001)(site.rank).to(site.device)
            options: dict[str, Any] = {"algorithm": algorithm, "codec": codec, "step": 1}
            eager, tensor = given.clone(), given.clone()
            communicator.all_reduce(eager, **options)  # also connects the peers
            gc.collect()  # memory that is freed while a graph is captured may invalidate it
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                communicator.all_reduce(tensor, **options)
            graph.replay()
            torch.cuda.synchronize()
            del graph  # NCCL destroys a communicator only when no graph uses it
            ranks.agree("" if torch.equal(eager, tensor) else f"{codec} by {algorithm}: a replay differs from a call")
    return Found("replays give what calls give")


CHECKS = [
    Check("proofs of plans", proofs),
    Check("plans", plans),
    Check("plans with codecs", plans_and_codecs),
    Check("other collectives", other_collectives),
    Check("DDP hook", ddp_hook),
]
LAST = [Check("captured all-reduces", captured_all_reduce)]  # NCCL may wait for graphs forever
