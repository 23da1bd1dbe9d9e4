"""The options of DDP and of its hook: with all of them nothing is lost, and the buckets do not matter."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from contributions import fitting, same_everywhere
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp

SMALL = 1024  # elements; smaller parameters are sent as fp32


class Net(nn.Module):
    """The layers are not used in the order of their definition, so DDP's second buckets differ from the first.

    The weights have odd numbers of elements: one is small, one is a single piece, the others are divided.
    """

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(65, 20)
        self.middle = nn.Linear(77, 65)
        self.first = nn.Linear(100, 77)
        self.head = nn.Linear(20, 7)
        self.spares = nn.ModuleList(nn.Linear(77, 77) for _ in range(2))

    def forward(self, x, spares=(0, 1)):
        for layer in (self.first, *(self.spares[i] for i in spares), self.middle, self.last, self.head):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


def make(bucket_kib=16, dtypes=None, **options):
    torch.manual_seed(0)
    net = Net()
    for name, dtype in (dtypes or {}).items():
        net.get_submodule(name).to(dtype)
    return DistributedDataParallel(net, bucket_cap_mb=bucket_kib / 1024, **options)


def batch(rank, step, number=0):
    return torch.randn(4, 100, generator=torch.Generator().manual_seed(1000 * number + 10 * step + rank))


def register(model, **options):
    return ddp.register(model, min_compress_numel=SMALL, **options)


def loss(model, x, spares=(0, 1)):
    return (model(x, spares) - 0.3).square().sum()


def own_gradients(model, x, spares=(0, 1)):
    """Return the gradients of this rank, computed without DDP."""
    return torch.autograd.grad(loss(model.module, x, spares), [*model.parameters()], allow_unused=True)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def residuals(state):
    (found,) = state.state_dict()["feedback"].values()
    return found


def step_sgd(model):
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad


def is_small(parameter):
    return parameter.dim() <= 1 or parameter.numel() < SMALL


class Account:
    """The sums over all steps of the gradients of this rank, and of those that DDP delivered."""

    def __init__(self, model, state):
        self.model, self.state = model, state
        self.given = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
        self.delivered = [total.clone() for total in self.given]

    def note(self, totals, found):
        for total, gradient in zip(totals, found, strict=True):
            if gradient is not None:
                total += gradient.double()

    def give(self, x, spares=(0, 1)):
        self.note(self.given, own_gradients(self.model, x, spares))

    def deliver(self):
        self.note(self.delivered, gradients(self.model))

    def check(self, case, tolerance=1e-5, delivered=True):
        """Check that delivered gradients plus all residuals equal the exact average, to `tolerance` of the largest."""
        owed = residuals(self.state)
        named = self.model.module.named_parameters()
        for (name, parameter), exact, got in zip(named, self.given, self.delivered, strict=True):
            exact /= dist.get_world_size()
            residual = owed[name].double()
            assert residual.isfinite().all(), (case, name)
            for total in (exact, residual):
                dist.all_reduce(total)
            if not delivered:
                continue
            largest = float(exact.abs().max())
            error = float((got + residual - exact).abs().max())
            assert error <= tolerance * largest, (case, name, error, largest)
            if is_small(parameter):
                assert not owed[name].any(), (case, name)
            elif largest > 0:
                assert float(residual.abs().max()) > 1e-4 * largest, (case, name)  # otherwise nothing was lost


def used_by_some(rank, step):
    """Alternate between batches in which all ranks, one rank, or no rank uses a spare layer."""
    return {0: (0, 1), 1: (0, 1) if rank == 1 else (1,), 2: (1,), 3: (1,) if rank == 0 else ()}.get(step, ())


def used_by_nobody(step):
    return {2: (0,), 3: (0,), 4: (0, 1)}.get(step, ())


UNUSED = {"find_unused_parameters": True}
HALVES = {"middle": torch.bfloat16, "spares.0": torch.float16}
CASES = {
    "int8": {},
    "int4": {"hook": {"codec": "int4"}},
    "ring": {"hook": {"algorithm": "ring"}},
    "tree": {"hook": {"algorithm": "tree"}},
    "halving_doubling": {"hook": {"algorithm": "halving_doubling"}},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "static": {"options": {"static_graph": True}},
    "unused": {"options": UNUSED, "spares": used_by_some, "unused": used_by_nobody},
    "unused views": {"options": {**UNUSED, "gradient_as_bucket_view": True}, "spares": used_by_some},
    "unused ring": {"options": UNUSED, "hook": {"algorithm": "ring"}, "spares": used_by_some, "unused": used_by_nobody},
    "accumulation": {"local": 2},
    "warmup": {"hook": {"warmup_steps": 2}},
    "stochastic": {"hook": {"rounding": "stochastic"}},
    # DDP delivers half types, whose error is smaller than that of int4 without error feedback.
    "halves": {"options": {"dtypes": HALVES}, "hook": {"codec": "int4"}, "tolerance": 2**-8},
    "bf16 feedback": {"hook": {"codec": "int4", "feedback_dtype": "bf16"}, "tolerance": 1e-3},
}


def check_case(
    rank,
    case,
    options=None,
    hook=None,
    spares=lambda rank, step: (0, 1),
    unused=lambda step: (),
    local=0,
    tolerance=1e-5,
):
    """Run five steps, with DDP's first buckets and with its second."""
    options = options or {}
    model = make(**options)
    state = register(model, **(hook or {}))
    account, sizes = Account(model, state), []
    for step in range(5):
        model.zero_grad()
        before = residuals(state)
        with model.no_sync():
            for number in range(local):
                account.give(batch(rank, step, number))
                loss(model, batch(rank, step, number)).backward()
        x, used = batch(rank, step, local), spares(rank, step)
        account.give(x, used)
        loss(model, x, used).backward()
        account.deliver()
        after = residuals(state)
        for i in unused(step):
            assert all(p.grad is None for p in model.module.spares[i].parameters()), (case, step)
            name = f"spares.{i}.weight"
            assert before[name].any() and torch.equal(before[name], after[name]), (case, step)
        sizes.append([bucket["numel"] for bucket in state.stats()["per_bucket"]])
        step_sgd(model)
    assert len(sizes[-1]) >= 4, (case, sizes)
    # With find_unused_parameters, DDP keeps its first buckets.
    assert (sizes[0] == sizes[-1]) == ("find_unused_parameters" in options), (case, sizes)
    account.check(case, tolerance)


def check_cases(rank, world_size):
    for name, case in CASES.items():
        check_case(rank, name, **case)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost(world_size):
    run_ranks(world_size, check_cases)


def check_join(rank, world_size, batches):
    for codec in ("int8", "int4"):
        model = make()
        state = register(model, codec=codec)
        account = Account(model, state)
        with model.join():
            for step in range(batches[rank]):
                model.zero_grad()
                account.give(batch(rank, step))
                loss(model, batch(rank, step)).backward()
                account.deliver()
                step_sgd(model)
        assert all(same_everywhere(p.detach()) for p in model.parameters())
        account.check(("join", codec), delivered=batches[rank] == max(batches))


def test_ranks_that_have_joined_contribute_zeros():
    run_ranks(3, check_join, (5, 1, 0))


def check_join_of_those_left(rank, world_size):
    model = DistributedDataParallel(nn.Linear(3, 2))
    ddp.register(model)
    with (
        pytest.raises(Exception, match="divide_by_initial_world_size: expected True"),
        model.join(divide_by_initial_world_size=False),
    ):
        model(torch.ones(4, 3)).sum().backward()


def test_averages_over_the_remaining_ranks_are_refused():
    run_ranks(2, check_join_of_those_left)


def outcome(model, rank, steps=3, **options):
    """Return the gradients of each step, the final residuals, and the number of buckets."""
    state = register(model, **options)
    found = []
    for step in range(steps):
        model.zero_grad()
        loss(model, batch(rank, step)).backward()
        found += gradients(model)
        step_sgd(model)
    return [*found, *residuals(state).values()], len(state.stats()["per_bucket"])


def assert_same(ours, theirs, case):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), case


def check_independence(rank, world_size, cases):
    for case in cases:
        one, buckets = outcome(make(bucket_kib=1 << 20), rank, **case)
        assert buckets == 1
        several, buckets = outcome(make(bucket_kib=1), rank, **case)
        assert buckets >= 5
        assert_same(one, several, case)


def pairs(codecs_, algorithms):
    return [{"codec": c, "algorithm": a} for c in codecs_ for a in algorithms if a in fitting(c)]


EVERY = [a for a in fitting("raw") if a != "native"]


FEW = ["direct", "tree", "halving_doubling"]
PAIRS = {
    2: pairs(["int8"], EVERY),
    3: [
        *pairs(["raw", "int8", "int4"], EVERY),
        *pairs(["fp16", "bf16", "fp8", "sign"], ["direct", "ring"]),
        *({"rounding": "stochastic", **pair} for pair in pairs(["int8"], ["direct", "tree"])),
    ],
    4: pairs(["raw", "int8"], FEW),
}


@pytest.mark.parametrize("world_size", PAIRS)
def test_buckets_do_not_matter(world_size):
    run_ranks(world_size, check_independence, PAIRS[world_size])


class Large(nn.Sequential):
    """A model for several segments, with a parameter of several pieces."""

    def __init__(self):
        super().__init__(nn.Linear(100, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 250))

    def forward(self, x, spares=()):
        return super().forward(x)


def check_large(rank, world_size):
    for case in pairs(["int8", "raw"], ["direct", "tree"]):
        found = []
        for mib in (1024, 1):
            torch.manual_seed(0)
            model = DistributedDataParallel(Large(), bucket_cap_mb=mib)
            found.append(outcome(model, rank, steps=2, **case))
        assert (found[0][1], found[1][1]) == (1, 3)
        assert_same(found[0][0], found[1][0], case)


def test_large_buckets_do_not_matter():
    run_ranks(3, check_large)


def check_warmup(rank, world_size):
    for algorithm in ("direct", "ring"):
        states = []
        models = [make(), make()]
        for model, options in zip(models, ({"codec": "raw"}, {"codec": "int8", "warmup_steps": 2}), strict=True):
            states.append(register(model, algorithm=algorithm, **options))
        for step in range(4):
            for model in models:
                model.zero_grad()
                loss(model, batch(rank, step)).backward()
            same = [torch.equal(a, b) for a, b in zip(*map(gradients, models), strict=True)]
            owed, ratio = residuals(states[1]), states[1].stats()["ratio"]
            if step < 2:
                assert all(same) and not any(r.any() for r in owed.values()) and ratio == 1
            else:
                assert not any(s for s, p in zip(same, model.parameters(), strict=True) if not is_small(p))
                assert all(owed[name].any() for name, p in model.module.named_parameters() if not is_small(p))
                assert ratio > 3
            for model in models:
                step_sgd(model)


def test_warmup_is_exact():
    run_ranks(3, check_warmup)


def check_small(rank, world_size):
    sizes = [p.numel() for p in make().parameters() if p.dim() > 1]
    least, largest = min(sizes), max(sizes)
    for at_least in (0, least, least + 1, SMALL, largest, largest + 1):
        model = make()
        state = ddp.register(model, codec="int8", min_compress_numel=at_least)
        exact = [gradient.double() / world_size for gradient in own_gradients(model, batch(rank, 0))]
        loss(model, batch(rank, 0)).backward()
        message = 0
        for (name, p), average in zip(model.module.named_parameters(), exact, strict=True):
            dist.all_reduce(average)
            error = (p.grad - average).abs().max() / average.abs().max()
            travels_as = "int8" if p.dim() > 1 and p.numel() >= at_least else "raw"
            assert error > 1e-4 if travels_as == "int8" else error < 1e-6, (name, at_least, error)
            assert residuals(state)[name].any() == (travels_as == "int8"), (name, at_least)
            message += codecs.nbytes(travels_as, p.numel())
        stats = state.stats()
        assert stats["ratio"] == pytest.approx(4 * sum(p.numel() for p in model.parameters()) / message, rel=1e-9)
        # Each of two ranks sends half of its input, and half of the result.
        assert stats["wire_bytes"] == pytest.approx(message, rel=0.05)


def test_small_parameters_are_sent_as_fp32():
    run_ranks(2, check_small)


def check_one_rank(rank, world_size):
    plain, ours = make(), make()
    state = register(ours, codec="int8")
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
        assert_same(gradients(ours), gradients(plain), step)
        for model in (plain, ours):
            step_sgd(model)
    assert not any(r.any() for r in residuals(state).values())
    stats = state.stats()
    assert (stats["ratio"], stats["wire_bytes"], stats["steps"]) == (1, 0, 3)


def test_one_rank_loses_nothing():
    run_ranks(1, check_one_rank)


def check_two_levels(rank, world_size):
    for codec in ("int8", "int4"):
        model = make()
        state = register(model, codec=codec, ranks_per_host=2)
        account = Account(model, state)
        for step in range(4):
            model.zero_grad()
            account.give(batch(rank, step))
            loss(model, batch(rank, step)).backward()
            account.deliver()
            assert all(same_everywhere(p.grad) for p in model.parameters()), (codec, step)
            step_sgd(model)
        account.check(("two levels", codec))
        stats = state.stats()
        assert stats["inside_bytes"] > 2 * stats["wire_bytes"] > 0  # fp32 within a host


def test_two_levels_lose_nothing():
    run_ranks(4, check_two_levels)


def check_all_is_fed_back(rank, world_size):
    model = make()
    state = register(model, codec="int4")
    owed = []
    for step in range(4):
        model.zero_grad()
        loss(model, batch(rank, step)).backward()
        owed.append(torch.cat([residual.flatten() for residual in residuals(state).values()]))
    stuck = (owed[0] != 0) & (owed[0] == owed[1]) & (owed[1] == owed[2]) & (owed[2] == owed[3])
    assert (owed[3] != 0).sum() > 5000
    assert stuck.sum() < 10, stuck.sum()  # a few may be equal by chance


def test_all_residuals_are_fed_back():
    """This includes the residuals of DDP's first buckets, in one level."""
    run_ranks(4, check_all_is_fed_back)


STATS = {"buckets", "wire_bytes", "inside_bytes", "steps", "ratio", "hidden", "per_bucket"}
STATS |= {"codec", "algorithm", "segments"}
TIMES = {"queued", "busy", "encoding", "sending", "waiting", "late"}


def check_stats(rank, world_size):
    model = make()
    state = register(model)
    before = state.stats()
    assert before.keys() == STATS
    assert (before["buckets"], before["wire_bytes"], before["steps"], before["per_bucket"]) == (0, 0, 0, [])
    assert before["ratio"] is None and before["hidden"] is None

    def after(step):
        model.zero_grad()
        loss(model, batch(rank, step)).backward()
        return state.stats()

    first = after(0)  # one bucket, until DDP knows the order
    (only,) = first["per_bucket"]
    assert only.keys() == {"numel", "codec", "wire_bytes", "ratio", "codec_error"} | TIMES
    assert only["wire_bytes"] == first["wire_bytes"]
    assert (first["buckets"], first["steps"], first["inside_bytes"]) == (1, 1, 0)
    lost = math.fsum(float(r.double().square().sum()) for r in residuals(state).values())
    total = math.fsum(float(p.grad.double().square().sum()) for p in model.parameters())
    assert only["codec_error"] == pytest.approx(math.sqrt(lost / total), rel=1e-6)
    assert 0 < only["codec_error"] < 2 * codecs.error_bound("int8").max

    second = after(1)
    third = after(2)
    sent = [bucket["wire_bytes"] for bucket in second["per_bucket"]]
    assert first["wire_bytes"] + sum(sent) == second["wire_bytes"]
    assert [bucket["wire_bytes"] for bucket in third["per_bucket"]] == [2 * each for each in sent]  # since the second
    assert (third["buckets"], third["steps"]) == (1 + 2 * len(sent), 3)
    numels = [bucket["numel"] for bucket in third["per_bucket"]]
    assert sum(numels) == sum(p.numel() for p in model.parameters())
    assert 3.5 < third["ratio"] < 4 and 0 <= third["hidden"] <= 1
    ratios = [bucket["ratio"] for bucket in third["per_bucket"]]
    assert min(ratios) < third["ratio"] < max(ratios) < 4
    for bucket in third["per_bucket"]:
        times = {name: bucket[name] for name in TIMES}
        assert all(0 < seconds < 60 for seconds in times.values()), times
        inside = bucket["encoding"] + bucket["sending"] + bucket["waiting"]
        assert inside <= bucket["busy"] * 1.001, times
        assert bucket["queued"] + bucket["busy"] == pytest.approx(bucket["late"], rel=0.05, abs=1e-4), times


def test_stats():
    run_ranks(2, check_stats)


def check_times(rank, world_size):
    for pauses in (False, True):
        model = make()
        state = register(model)
        if pauses and rank == 0:
            model.module.first.weight.register_hook(lambda _: time.sleep(0.5))  # before the last bucket
        start = []
        for step in range(4):
            model.zero_grad()
            start.append(time.monotonic())
            if rank == 1:
                time.sleep(0.15)
            loss(model, batch(rank, step)).backward()
        elapsed, stats = time.monotonic() - start[1], state.stats()
        assert 3 * sum(bucket["busy"] for bucket in stats["per_bucket"]) <= elapsed  # three passes over these buckets
        if rank == 0:
            assert (
                sum(bucket["waiting"] for bucket in stats["per_bucket"]) > 0.05
            )  # DDP itself waits in the first of the three
            assert stats["hidden"] > 0.5 if pauses else stats["hidden"] < 0.5


def test_stats_report_who_waits_and_what_is_hidden():
    run_ranks(2, check_times)


def ranges_in_profile(rank, world_size):
    model = make()
    register(model)
    loss(model, batch(rank, 0)).backward()
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss(model, batch(rank, 1)).backward()
    return {event.name for event in profile.events()}


def test_profiler_shows_the_phases():
    for names in run_ranks(2, ranges_in_profile):
        assert {f"dltrain_ext::{phase}" for phase in ("encode", "send", "wait", "decode")} <= names


def collectives_in_profile(rank, world_size, where):
    group = dist.new_group([0, 1], group_desc="of two")
    communicator, tensor = comm.Communicator(group), torch.ones(300)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        communicator.all_reduce(tensor, codec="int8")
        communicator.all_reduce(tensor, async_op=True).wait()
        communicator.reduce_scatter(torch.empty(150), tensor)
    profile.export_chrome_trace(f"{where}/{rank}")
    events = json.loads(Path(where, str(rank)).read_text())["traceEvents"]
    calls = sorted((e for e in events if e.get("name") == "record_param_comms"), key=lambda event: event["ts"])
    return [call["args"] for call in calls], group.group_name


def test_the_profiler_shows_the_collectives_like_torchs_own(tmp_path):
    for calls, group in run_ranks(2, collectives_in_profile, str(tmp_path)):
        found = [(call["Collective name"], call["In msg nelems"], call["Out msg nelems"]) for call in calls]
        assert found == [("allreduce", 300, 300), ("allreduce", 300, 300), ("reduce_scatter", 300, 150)]
        for call in calls:
            assert (call["dtype"], call["Group size"]) == ("Float", 2)
            assert (call["Process Group Name"], call["Process Group Description"]) == (group, "of two")
            assert call["Process Group Ranks"] == "[0, 1]"


def check_without_feedback(rank, world_size):
    model = make()
    state = register(model, error_feedback=False)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss(model, batch(rank, 0)).backward()
        found.append(gradients(model))
    assert_same(*found, "the same batch")
    assert residuals(state) == {}
    assert [bucket["codec_error"] for bucket in state.stats()["per_bucket"]].count(None) == len(
        state.stats()["per_bucket"]
    )
    fed, state = make(), None
    register(fed)
    for _ in range(2):
        fed.zero_grad()
        loss(fed, batch(rank, 0)).backward()
        found.append(gradients(fed))
    assert_same(found[0], found[2], "nothing is owed yet")
    assert not torch.equal(found[1][2], found[3][2])


def test_without_feedback():
    run_ranks(2, check_without_feedback)


def check_stochastic(rank, world_size):
    options = {"codec": "int4", "rounding": "stochastic", "error_feedback": False}
    one, same, other = (outcome(make(), rank, seed=seed, **options)[0] for seed in (5, 5, 6))
    assert_same(one, same, "a seed")
    assert not torch.equal(one[0], other[0])

    model = make()
    register(model, **options)
    steps, total, single = 64, 0, []
    exact = own_gradients(model, batch(rank, 0))[0].double() / world_size
    dist.all_reduce(exact)
    for _ in range(steps):
        model.zero_grad()
        loss(model, batch(rank, 0)).backward()
        found = next(model.parameters()).grad.double()
        single.append((found - exact).square().mean())
        total += found
    off = (total / steps - exact).square().mean()
    assert off < 1.5 * sum(single) / steps / steps  # as large as the error of a mean of independent, unbiased errors


def test_stochastic_rounding():
    run_ranks(2, check_stochastic)
