"""Fuzz tests of plans, the cost model, tunings, collectives and the DDP state: an error names the argument."""

import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fuzzing import anything, attempt, fuzz, numbers, plain, shapes, spoiled, tensors
from hypothesis import assume, given
from hypothesis import strategies as st
from test_fuzz_optim import corrupted
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp, fsdp, sim

pytestmark = pytest.mark.usefixtures("group")

codec_names = st.sampled_from(codecs.CODECS)
algorithms = st.sampled_from([*comm.ALGORITHMS, "auto", "butterfly"])
sizes = st.one_of(st.integers(0, 9), numbers)
networks = st.sampled_from([None, sim.Network(), sim.Network(ranks_per_host=2)])


@pytest.fixture(scope="module")
def communicator(group):
    return comm.Communicator()


@fuzz(
    *("comm.plan", "comm.verify", "comm.verify_plans", "comm.algorithms_for", "comm.ALGORITHMS", "comm.COLLECTIVES"),
    examples=60,
)
@given(st.data())
def test_plans(data):
    collective = data.draw(st.sampled_from(list(comm.COLLECTIVES)))
    some = st.sampled_from(comm.COLLECTIVES[collective])
    rooted = {"collective": st.just(collective), "root": st.integers(0, 1)}
    plans = st.integers(1, 4).map(lambda size: [comm.plan("ring", rank, size) for rank in range(size)])
    function, fits = data.draw(
        st.sampled_from(
            [
                (comm.plan, {"algorithm": some, "rank": sizes, "world_size": sizes, **rooted}),
                (comm.verify, {"algorithm": some, "world_size": st.integers(0, 9), **rooted}),
                (comm.verify_plans, {"plans": plans}),
                (comm.algorithms_for, {"codec": codec_names}),
            ]
        )
    )
    attempt(function, data.draw(spoiled(fits)))


@fuzz("comm.Plan", "comm.Step", examples=60)
@given(st.data())
def test_plans_by_hand(data):
    ops = st.sampled_from(["send_partial", "recv_reduce", "finalize", "send_final", "recv_final"])
    small = st.one_of(st.integers(-1, 3), st.sampled_from([-(2**31), 2**31 - 1]))
    step = {"op": ops, "peer": small, "chunks": st.tuples(small, small)}
    signature = r"\(self: dltrain_ext|len\(\) of unsized"  # of pybind11
    made = []
    for rank in range(data.draw(st.integers(1, 3))):
        steps = [attempt(comm.Step, data.draw(spoiled(step, most=1)), names=step, also=signature)[0] for _ in range(3)]
        fields = {
            "algorithm": st.one_of(st.just("ring"), st.text()),
            "rank": st.just(rank),
            "world_size": st.integers(1, 3),
            "chunks": st.sampled_from([1, 2, 2**31 - 1]),
            "rounds": st.just([[each for each in steps if each is not None]] * 2),
            "exact": st.booleans(),
            "collective": st.sampled_from(["all_reduce", *comm.COLLECTIVES]),
            "root": st.integers(-1, 2),
        }
        plan, _ = attempt(comm.Plan, data.draw(spoiled(fields, most=1)), names=fields, also=signature)
        if plan is not None:
            assert json.loads(plan.to_json())["algorithm"] == plan.algorithm
            assert str(plan) and repr(plan) and plan == plan
            made.append(plan)
    attempt(comm.verify_plans, {"plans": made}, also=r"R[1-4]: |at least 1 chunk")


@fuzz("ops.all_reduce_", examples=60)
@given(st.data(), shapes)
def test_all_reduce_of_graphs(data, shape):
    fits = {
        "tensor": tensors(shape),
        "op": st.sampled_from(["sum", "avg"]),
        "algorithm": algorithms,
        "codec": codec_names,
        "group_name": st.sampled_from([dist.group.WORLD.group_name, "", "0"]),
    }
    arguments = data.draw(spoiled(fits, shape))
    assume(getattr(arguments["tensor"], "layout", None) is not torch.jagged)  # torch only names the op in its error
    op = torch.ops.dltrain_ext.all_reduce_
    attempt(op, arguments, names=fits, also="Could not run|Cannot access storage|NestedTensor")


@fuzz(
    *("sim.simulate", "sim.best", "sim.training_step", "sim.break_even", "sim.parameter_server"),
    *("sim.bounded_staleness", "sim.local_sgd"),
    examples=90,
)
@given(st.data())
def test_simulations(data):
    name, fits = data.draw(
        st.sampled_from(
            [
                (
                    "simulate",
                    {
                        "algorithm": algorithms,
                        "world_size": st.integers(0, 9),
                        "nbytes": sizes,
                        "codec": codec_names,
                        "network": networks,
                        "segments": st.one_of(st.none(), sizes),
                        "levels": st.integers(1, 2),
                        "late": st.lists(st.floats(0, 1), max_size=3),
                        "collective": st.sampled_from(list(comm.COLLECTIVES)),
                    },
                ),
                ("best", {"world_size": st.integers(0, 9), "nbytes": sizes, "codec": codec_names, "network": networks}),
                (
                    "training_step",
                    {
                        "world_size": st.integers(0, 9),
                        "buckets": st.lists(sizes, max_size=3),
                        "backward": st.floats(),
                        "other": st.floats(),
                        "codec": codec_names,
                        "algorithm": st.one_of(st.none(), algorithms),
                        "network": networks,
                        "stragglers": st.tuples(st.floats(), st.floats()),
                    },
                ),
                (
                    "break_even",
                    {
                        "codec": codec_names,
                        "world_size": st.integers(0, 9),
                        "nbytes": sizes,
                        "against": codec_names,
                        "network": networks,
                    },
                ),
                (
                    "parameter_server",
                    {
                        "world_size": st.integers(0, 9),
                        "nbytes": sizes,
                        "servers": st.one_of(st.none(), sizes),
                        "codec": codec_names,
                        "network": networks,
                        "segments": st.one_of(st.none(), sizes),
                        "levels": st.integers(1, 2),
                    },
                ),
                (
                    "bounded_staleness",
                    {
                        "world_size": st.integers(0, 9),
                        "staleness": st.one_of(st.none(), sizes),
                        "compute": st.one_of(st.floats(), st.lists(st.floats(), max_size=3)),
                        "stragglers": st.tuples(st.floats(), st.floats()),
                        "exchange": st.floats(),
                        "serving": st.floats(),
                        "pushes": st.integers(0, 99),
                        "seed": sizes,
                    },
                ),
                (
                    "local_sgd",
                    {
                        "world_size": st.integers(0, 9),
                        "nbytes": sizes,
                        "sync_every": st.integers(0, 9).map(lambda number: 12 * number),
                        "compute": st.floats(),
                        "fragments": st.integers(0, 4),
                        "delay": sizes,
                        "codec": codec_names,
                        "network": networks,
                        "largest": st.one_of(st.none(), sizes),
                    },
                ),
            ]
        )
    )
    function = getattr(sim, name)
    names = [*fits, "codec", "algorithm", "numel", "late", "buckets"]
    attempt(function, data.draw(spoiled(fits)), names=names)


@fuzz("sim.Network", "sim.Speed", "sim.Network.speed", "sim.Network.to_dict", "sim.Network.from_dict")
@given(st.data())
def test_networks(data):
    fits = {
        "latency": st.floats(0, 1),
        "bandwidth": st.floats(1, 1e12),
        "ranks_per_host": st.integers(1, 9),
        "speeds": st.just({"int8": sim.Speed(1e9, 1e9)}),
        "burst": st.floats(0, 1),
        "cores": st.integers(0, 4),
    }
    network, _ = attempt(sim.Network, data.draw(spoiled(fits)), names=[*fits, "codec", "encode", "decode"])
    attempt(sim.Speed, data.draw(spoiled({"encode": st.floats(), "decode": st.floats()})))
    if network is not None:
        again = sim.Network.from_dict(network.to_dict())
        assert again == network
        assert sim.simulate("ring", 4, 1000, network=network).rounds == 6
        attempt(network.speed, data.draw(spoiled({"codec": codec_names})))


CHOICE = {"nbytes": 1024, "algorithm": "ring", "segments": 1, "seconds": 1e-3, "measured": True}
TUNING = {
    "version": 1,
    "world_size": 1,
    "network": sim.Network().to_dict(),
    "table": {"raw": [CHOICE], "int8": [CHOICE], "native": [{**CHOICE, "algorithm": "native"}]},
}


@fuzz("comm.Tuning", "comm.Choice", "comm.Tuning.from_json", "comm.Tuning.load", "comm.Tuning.save", examples=60)
@given(data=st.data())
def test_tunings(tmp_path_factory, data):
    saved = data.draw(corrupted(TUNING))
    try:
        text = json.dumps(saved)
    except (TypeError, ValueError, AttributeError):
        text = data.draw(st.one_of(st.text(), st.just("[" * 10**5), st.binary()))
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    tuning, _ = attempt(comm.Tuning.from_json, {"text": text}, names=["tuning"])
    path = tmp_path_factory.getbasetemp() / "tuning.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    attempt(comm.Tuning.load, {"path": str(path)}, names=["tuning"])
    if tuning is not None:
        assert comm.Tuning.from_json(tuning.to_json()) == tuning and str(tuning)
        assert tuning.choose(next(iter(tuning.table)), 5000).seconds > 0
        tuning.save(path)
        assert comm.Tuning.load(path) == tuning


@fuzz("comm.Tuning.choose", "comm.Tuning.codec_for", "comm.Tuning.times_for", "comm.Tuning.to_json")
@given(st.integers(0, 2**62))
def test_choices(nbytes):
    tuning = comm.Tuning.from_json(json.dumps(TUNING))
    assert tuning.choose("raw", nbytes).algorithm == "ring"
    assert tuning.codec_for(nbytes) in ("raw", "native")
    assert all(time > 0 for time in tuning.times_for(nbytes).values())


OPTIONS = {
    "codec": codec_names,
    "residual": st.none(),
    "rounding": st.sampled_from(["nearest", "stochastic"]),
    "seed": st.integers(0, 2**63 - 1),
    "step": st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    "segments": st.one_of(st.none(), st.integers(0, 2**16 - 1)),
    "async_op": st.booleans(),
}


def collective(data, name, shape):
    fits = {**OPTIONS, "algorithm": st.sampled_from([*comm.COLLECTIVES[name], "auto", "butterfly"])}
    if name in ("reduce_scatter", "all_gather"):
        lists = tensors(shape).map(lambda tensor: [tensor])
        whole, part = ("input", "output") if name == "reduce_scatter" else ("output", "input")
        fits |= {whole: st.one_of(tensors(shape), lists), part: tensors(shape)}
    else:
        fits["tensor"] = tensors(shape)
    if name in ("broadcast", "reduce"):
        fits["src" if name == "broadcast" else "dst"] = st.just(0)
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        fits["op"] = st.sampled_from(["sum", "avg", dist.ReduceOp.SUM])
    arguments = data.draw(spoiled(fits, shape))
    if data.draw(st.booleans()):
        arguments["residual"] = torch.zeros(shape)
    return arguments


def call(function, **arguments):
    work = function(**arguments)
    if work is not None:
        assert work.wait() and work.is_completed() and work.get_future().done()


@fuzz(
    *(f"comm.{name}" for name in comm.COLLECTIVES),
    *(f"comm.Communicator.{name}" for name in comm.COLLECTIVES),
    *("comm.Work", "comm.Work.wait", "comm.Work.is_completed", "comm.Work.get_future", "comm.Communicator.stats"),
    examples=80,
)
@given(st.data(), shapes)
def test_collectives(communicator, data, shape):
    name = data.draw(st.sampled_from(list(comm.COLLECTIVES)))
    if data.draw(st.booleans()):
        function = getattr(comm, name)
        arguments = collective(data, name, shape)
        arguments["group"] = data.draw(st.one_of(st.none(), st.none(), plain))
    else:
        function = getattr(communicator, name)
        arguments = collective(data, name, shape)
    if isinstance(arguments["async_op"], object) and not isinstance(arguments["async_op"], bool):
        arguments["async_op"] = False
    attempt(lambda **given: call(function, **given), arguments, names=[*arguments, "residual"])
    assert communicator.stats()["wire_bytes"] == 0


def test_a_seed_has_to_be_an_int(communicator):
    with pytest.raises(TypeError, match="seed: expected an int, got None"):
        communicator.reduce_scatter(torch.ones(2), torch.ones(2), seed=None)


@fuzz(
    *("comm.Communicator", "comm.Communicator.tune", "comm.Communicator.tuning", "comm.Communicator.plan_for"),
    *("comm.Communicator.codec_for", "comm.Communicator.times_for", "comm.Communicator.usual_plan"),
    "comm.Communicator.close",
)
@given(st.data())
def test_communicators(data):
    fits = {
        "group": st.none(),
        "timeout": st.sampled_from([None, timedelta(seconds=9)]),
        "transport": st.sampled_from(["auto", "c10d"]),
        "ranks_per_host": st.sampled_from([None, 1]),
        "tuning": st.sampled_from([None, comm.Tuning.from_json(json.dumps(TUNING))]),
    }
    communicator, _ = attempt(
        comm.Communicator, data.draw(spoiled(fits)), also="No such file|embedded null|surrogates|directory|File name"
    )
    if communicator is None:
        return
    attempt(communicator.tune, {"seconds": data.draw(plain), "codecs": ["x"]}, names=["seconds", "codec", "codecs"])
    assert communicator.tuning is None or communicator.tuning.world_size == 1
    assert communicator.usual_plan == "ring"
    attempt(communicator.plan_for, data.draw(spoiled({"codec": codec_names, "nbytes": sizes})))
    if communicator.tuning is not None:
        dtypes = st.sampled_from([torch.float32, torch.bfloat16])
        fits = {"nbytes": sizes, "algorithm": algorithms, "dtype": dtypes}
        for find in (communicator.codec_for, communicator.times_for):
            attempt(find, data.draw(spoiled(fits)))
    communicator.close()
    communicator.close()
    with pytest.raises(RuntimeError, match="the communicator was closed"):
        communicator.all_reduce(torch.ones(1))


@fuzz(
    *("ddp.AllReduceState", "ddp.AllReduceState.codec", "ddp.AllReduceState.algorithm", "ddp.register"),
    *("fsdp.register", "ddp.allreduce_hook", "fsdp.ShardedState"),
)
@given(st.data())
def test_hooks(data):
    fits = {
        "codec": codec_names,
        "algorithm": st.just("auto"),
        "error_feedback": st.booleans(),
        "feedback_dtype": st.sampled_from(["fp32", "bf16"]),
        "scaler": st.none(),
        "named_parameters": st.just([("weight", torch.ones(4, requires_grad=True))]),
        "min_compress_numel": sizes,
        "warmup_steps": sizes,
        "rounding": st.just("nearest"),
        "seed": sizes,
    }
    arguments = data.draw(spoiled(fits).filter(lambda arguments: repr(arguments["codec"]) != "'auto'"))
    state, _ = attempt(ddp.AllReduceState, arguments)
    if state is not None:
        assert (state.codec, state.algorithm) == (arguments["codec"] or "int8", "ring")
        attempt(ddp.allreduce_hook, data.draw(spoiled({"state": st.just(state), "bucket": plain})))
        attempt(state.state_dict, {"saved_by": data.draw(sizes)}, names=["saved_by", "named_parameters"])
        state.communicator.close()
    for register in (ddp.register, fsdp.register):
        attempt(register, {"model": data.draw(anything()), "codec": "int8"})


@fuzz(
    "ddp.ShardedOptimizerState",
    *(f"ddp.ShardedOptimizerState.{name}" for name in ("grad_stats", "stats", "codec", "algorithm")),
    *(f"ddp.ShardedOptimizerState.{name}" for name in ("state_dict", "load_state_dict")),
)
@given(st.data())
def test_sharded_optimizers(data):
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"codec": codec_names, "algorithm": st.sampled_from(["auto", "direct", "ring"]), "shard": st.just(good)}
    arguments = data.draw(spoiled(given).filter(lambda given: given["shard"] is not None))
    state, _ = attempt(ddp.register, {"model": model, **arguments})
    if state is None:
        params = good.param_groups[0]["params"]
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True)), "the optimizer has not changed"
        return
    assert state.stats()["gather_bytes"] == 0
    assert (state.codec, state.algorithm) == (arguments["codec"] or "int8", state.algorithm)
    saved = state.state_dict()
    attempt(state.load_state_dict, {"state_dict": data.draw(corrupted(saved))})
    with pytest.raises(RuntimeError, match="grad_stats: expected a state without shard"):
        _ = state.grad_stats
    state.communicator.close()


@pytest.fixture(scope="module")
def hooked(group):
    """Return parameters by name, and a state of each kind that has their feedback."""
    named = {"weight": torch.ones(2, 3, requires_grad=True), "bias": torch.ones(4, requires_grad=True)}
    kinds = {"codec": "int8"}, {"codec": "auto", "max_error": 0.1}
    states = [ddp.AllReduceState(named_parameters=named.items(), **options) for options in kinds]
    yield named, states
    for state in states:
        state.communicator.close()


@fuzz("ddp.AllReduceState.load_state_dict", "ddp.AllReduceState.state_dict", "ddp.AllReduceState.stats", examples=60)
@given(st.data())
def test_hook_checkpoints(hooked, data):
    named, states = hooked
    state = data.draw(st.sampled_from(states))
    budget = {"max_error": 0.1, "codecs": {"weight": "int8", "bias": "auto"}}
    residuals = {name: torch.ones(p.shape) for name, p in named.items()}
    good = {"version": 1, "steps": 3, "world_size": 1, "feedback": {"rank 0 of 1": residuals}, "budget": budget}
    state.load_state_dict(good)
    before = repr(state.state_dict())
    saved = data.draw(st.one_of(corrupted(good), corrupted([good]), corrupted([{**good, "world_size": 2}, good])))
    _, error = attempt(state.load_state_dict, {"state_dict": saved})
    if error is not None:
        assert repr(state.state_dict()) == before
    assert state.stats()["steps"] == state.steps
    with pytest.raises(RuntimeError, match="grad_stats: expected a state that was given the scaler"):
        _ = state.grad_stats


@pytest.fixture(scope="module")
def sharded(group):
    model = torch.nn.Linear(3, 2)
    fully_shard(model)
    return fsdp.register(model, "int8", error_feedback=True, min_compress_numel=0)


@fuzz("fsdp.ShardedState.load_state_dict", "fsdp.ShardedState.state_dict", "fsdp.ShardedState.stats", examples=60)
@given(st.data())
def test_shard_checkpoints(sharded, data):
    residuals = {"rank 0 of 1": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}}
    good = {"version": 1, "steps": 3, "world_size": 1, "feedback": residuals, "reductions": {"": 3}, "shard": [0, 1]}
    sharded.load_state_dict(good)
    before = repr(sharded.state_dict())
    saved = data.draw(st.one_of(corrupted(good), corrupted([good]), corrupted([{**good, "shard": [1, 2]}, good])))
    _, error = attempt(sharded.load_state_dict, {"state_dict": saved})
    if error is not None:
        assert repr(sharded.state_dict()) == before
    attempt(sharded.state_dict, {"saved_by": data.draw(sizes)}, names=["saved_by"])
    assert sharded.stats()["per_module"] == {}


def test_a_destroyed_group_is_reported():
    own = dist.new_group([0])
    communicator = comm.Communicator(own)
    dist.destroy_process_group(own)
    tensor = torch.ones(3)
    communicator.all_reduce(tensor)  # it has its own connections
    assert torch.equal(tensor, torch.ones(3)) and os.getpid() == communicator._process
