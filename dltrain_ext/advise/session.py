"""One run on every rank: measures the group, the model and the optimizer, and prints what to use."""

import argparse
import json
import os
from dataclasses import asdict

import torch
import torch.distributed as dist

from dltrain_ext.advise import workload
from dltrain_ext.advise.prediction import PLAIN, Prediction, best, plain, predict
from dltrain_ext.advise.workload import Workload
from dltrain_ext.comm import Tuning
from dltrain_ext.selftest import ranks
from dltrain_ext.selftest.report import write

CODECS = ("fp16", "bf16", "int8", "int4")


def run(options: argparse.Namespace) -> int:
    """Every rank returns the same status."""
    device = torch.device("cpu")
    if options.device == "cuda":
        ranks.take_gpu()
        device = torch.device("cuda", torch.cuda.current_device())
    own = measure_workload(options, device)
    of_all = [Workload(**each) for each in ranks.exchange("workload", asdict(own))]
    slowest = Workload(
        own.numels,
        *(max(getattr(each, name) for each in of_all) for name in ("forward", "backward", "torch_step", "our_step")),
    )
    with ranks.communicator(device) as communicator:
        tuning = communicator.tune(seconds=options.seconds, codecs=CODECS)
    if PLAIN not in tuning.table:
        raise ValueError(f"--seconds: expected enough for an all-reduce of the backend, got {options.seconds}")
    hosts = ranks.exchange("hosts", os.uname().nodename)
    if dist.get_rank() == 0:
        predictions = predict(tuning, slowest)
        base, chosen = plain(tuning, slowest), best(predictions)
        print("\n".join(report(tuning, slowest, base, predictions, chosen, len(set(hosts)))), flush=True)
        if options.json:
            kept = {
                "plain": asdict(base),
                "predictions": [asdict(each) for each in predictions],
                "chosen": chosen.codec,
                "workload": asdict(slowest),
                "tuning": json.loads(tuning.to_json()),
            }
            write(options.json, kept)
    return 0


def measure_workload(options: argparse.Namespace, device: torch.device) -> Workload:
    if options.model:
        return workload.of_model(*workload.load(options.model), device)
    return workload.of_numel(options.parameters, options.forward / 1e3, options.backward / 1e3, device)


def report(
    tuning: Tuning, of: Workload, base: Prediction, predictions: list[Prediction], chosen: Prediction, hosts: int
) -> list[str]:
    """Returns the lines that say what was measured, what is predicted, and what to use."""
    network = tuning.network
    where = f"{hosts} hosts" if hosts > 1 else "one host; to measure links between hosts, run this there by torchrun"
    buckets = f"{len(of.buckets)} bucket{'s' if len(of.buckets) > 1 else ''}"
    lines = [
        f"{tuning.world_size} ranks on {where}",
        f"links: {network.bandwidth * 8e-9:.3g} Gbit/s, {network.latency * 1e6:.0f} us",
        f"model: {sum(of.numels):,} parameters, {buckets}; forward {of.forward * 1e3:.3g} ms, backward "
        f"{of.backward * 1e3:.3g} ms",
        f"unscale, clip and AdamW: torch {of.torch_step * 1e3:.3g} ms, ours {of.our_step * 1e3:.3g} ms",
        "",
        f"{'predicted, ms':34}{'step':>9}{'exposed':>9}{'sending':>9}{'optimizer':>11}{'faster':>9}{'error':>10}  plan",
    ]
    for name, each in [("plain DDP, torch's AdamW", base), *((_name(each), each) for each in predictions)]:
        times = (
            f"{each.seconds * 1e3:9.1f}{each.exposed * 1e3:9.1f}{each.sending * 1e3:9.1f}{each.optimizer * 1e3:11.1f}"
        )
        lines.append(f"{name:34}{times}{base.seconds / each.seconds:8.2f}x{each.error:10.2g}  {each.plan}")
    return [*lines, "", *recommendation(base, chosen)]


def _name(prediction: Prediction) -> str:
    return "plain DDP, optim.AdamW" if prediction.codec == PLAIN else f"{prediction.codec}, optim.AdamW"


def recommendation(base: Prediction, chosen: Prediction) -> list[str]:
    if base.seconds <= 1.02 * chosen.seconds:
        return ["use plain DDP and torch's optimizer: nothing here is more than 2 % faster"]
    lines = [
        f"use this, predicted {base.seconds / chosen.seconds:.2f} times as fast as plain DDP and torch's optimizer:",
        "    optimizer = dltrain_ext.optim.AdamW(model.parameters(), lr=...)",
        "    scaler = dltrain_ext.amp.LossScaler(device.type)",
    ]
    if chosen.codec == PLAIN:
        return [
            *lines,
            "    scaler.step(optimizer, max_norm=1.0)  # and no hook: the gradients are sent faster without",
        ]
    hook = (
        f'    state = dltrain_ext.ddp.register(model, codec="{chosen.codec}", algorithm="{chosen.plan}", scaler=scaler)'
    )
    return [*lines, hook, "    scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)"]
