"""The codec and plan that are selected by trials, on networks whose clock only counts communication."""

import pytest
import torch

from dltrain_ext import _ops
from dltrain_ext.comm import timing
from dltrain_ext.comm.trial_selection import select_by_trials

ROUNDS = {"ring": 6, "tree": 4, "double_tree": 4, "recursive_doubling": 2, "halving_doubling": 4, "direct": 2}
ROUNDS |= {"oneshot": 1}
TIMES = {"tree": 4.0, "recursive_doubling": 2.0, "oneshot": 3.0}  # time in tensors' bytes; other plans take 1.5
BUCKET = 25 << 20


class Network:
    """A network of four ranks with equal values: seconds per round, per byte, and per encoded element."""

    def __init__(self, latency, gbits, encode=0.0, native=1.0, plans=()):
        self.latency, self.per_byte, self.encode, self.native = latency, 8e-9 / gbits, encode, native
        self.plans = {name: 1.5 for name in ROUNDS} | TIMES | dict(plans)
        self.now = 0.0

    def all_reduce(self, tensor, trial):
        if trial.codec == "native":
            rounds, sent = 6 * self.native, 1.5 * self.native * tensor.nbytes
        else:
            wire = _ops.find_codec(trial.codec).bytes(tensor.numel())
            rounds, sent = ROUNDS[trial.algorithm], self.plans[trial.algorithm] * wire
            self.now += 0 if trial.codec == "raw" else self.encode * tensor.numel()
        self.now += self.latency * rounds + self.per_byte * sent
        tensor *= 4

    def select_by_trials(self, monkeypatch, dtype=torch.float32, algorithm="auto", nbytes=BUCKET):
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        group = timing.Group(0, 4, torch.device("cpu"), self.all_reduce, lambda text: [text] * 4)
        return select_by_trials(group, nbytes, dtype, algorithm, 1.0)


@pytest.mark.parametrize(
    ("network", "dtype", "expected"),
    [
        (Network(3e-5, 1.0), torch.float32, "int4"),
        (Network(3e-5, 10.0, encode=2e-9), torch.float32, "int4"),
        (Network(3e-5, 10.0, encode=2e-9), torch.bfloat16, "native"),  # it sends half the bytes of raw
        (Network(3e-5, 10.0, encode=1e-8), torch.float32, "raw"),
        (Network(3e-5, 1.0, encode=5e-9), torch.bfloat16, "int4"),
        (Network(3e-5, 100.0, encode=1e-9, native=0.5), torch.float32, "native"),
    ],
)
def test_the_selected_codec_depends_on_the_network_and_the_dtype(monkeypatch, network, dtype, expected):
    codec, plan = network.select_by_trials(monkeypatch, dtype)
    assert codec == expected
    assert plan == ("native" if codec == "native" else "direct")
    assert network.now < 1.6


def test_trials_of_long_buckets_are_extrapolated(monkeypatch):
    """At 10 Mbit/s and 150 ms, messages of 64 KiB take one latency, and the bytes dominate buckets of 25 MiB."""
    slow = Network(0.15, 0.01)
    assert slow.select_by_trials(monkeypatch) == ("int4", "direct")
    assert slow.now < 15  # a single bucket in fp32 would take 31 s


def test_only_a_clearly_faster_plan_is_selected(monkeypatch):
    for times, expected in ((1.2, "ring"), (1.45, "direct")):
        assert Network(1e-6, 1.0, plans={"ring": times}).select_by_trials(monkeypatch) == ("int4", expected)


def test_plans_with_few_rounds_are_only_for_small_models(monkeypatch):
    assert Network(1e-3, 10.0).select_by_trials(monkeypatch, nbytes=4096) == ("raw", "oneshot")
    assert Network(1e-6, 1.0).select_by_trials(monkeypatch, nbytes=4 * 4**11)[1] == "direct"


def test_a_named_plan_is_kept(monkeypatch):
    assert Network(3e-5, 1.0).select_by_trials(monkeypatch, algorithm="ring") == ("int4", "ring")
