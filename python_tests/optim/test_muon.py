"""optim.Muon: torch's results, accuracy of the iterations, the same bits on all ranks, checkpoints, errors."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from optimizers import give_grads, make_params
from ranks import DEADLINE, run_ranks

from dltrain_ext import amp, optim
from dltrain_ext.optim.muon import optimizer as muon
from dltrain_ext.optim.muon.orthogonal import cost, orthogonalized, usual_dtype

SHAPES = [(24, 8), (16, 16), (8, 40), (1, 5), (7, 1), (12, 9)]
COEFFICIENTS = (3.4445, -4.775, 2.0315)
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
    {"adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"ns_steps": 0},
]


def iterated(matrix, steps=5):
    """Return the definition of the iterations in float64, and without a Gram matrix that is followed."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative_error(result, expected):
    return float((result.double() - expected).norm() / expected.norm())


def matrices(kind, rows, columns):
    torch.manual_seed(0)
    short = min(rows, columns)
    return {
        "normal": lambda: torch.randn(rows, columns),
        "of rank 2": lambda: torch.randn(rows, 2) @ torch.randn(2, columns),
        "of decaying values": lambda: (
            torch.randn(rows, short) @ torch.diag(torch.logspace(0, -4, short)) @ torch.randn(short, columns)
        ),
        "with outliers": lambda: torch.randn(rows, columns) * (1 + 1e3 * (torch.rand(rows, columns) < 0.01)),
    }[kind]()


@pytest.mark.parametrize("kind", ["normal", "of rank 2", "of decaying values", "with outliers"])
@pytest.mark.parametrize("rows, columns", [(64, 64), (48, 200), (200, 48), (2, 300)])
def test_iterations_have_the_accuracy_of_their_dtype(kind, rows, columns):
    given = matrices(kind, rows, columns)
    expected = iterated(given)
    error = relative_error(orthogonalized(given, COEFFICIENTS, 5, 1e-7, torch.float32), expected)
    assert error < 1e-3
    # Directions whose singular values are below bfloat16's resolution are noise, in torch's iterations too.
    direct = relative_error(torch.optim._muon._zeropower_via_newtonschulz(given, COEFFICIENTS, 5, 1e-7), expected)
    half = orthogonalized(given, COEFFICIENTS, 5, 1e-7, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and relative_error(half, expected) < 1.2 * direct + 0.1
    assert torch.linalg.svdvals(half.double()).max() < 1.3


def test_zero_and_not_finite():
    assert not orthogonalized(torch.zeros(4, 9), COEFFICIENTS, 5, 1e-7, torch.float32).any()
    assert orthogonalized(torch.full((4, 9), torch.nan), COEFFICIENTS, 5, 1e-7, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch(options, dtype, device):
    start = make_params(SHAPES, device)
    ours, theirs = make_params(SHAPES, device), make_params(SHAPES, device)
    optimizers = optim.Muon(ours, lr=0.02, dtype=dtype, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for step in range(4):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_grads(params, step)
            assert optimizer.step(lambda: "loss") == "loss"
    for p, q, before in zip(ours, theirs, start, strict=True):
        assert relative_error((p - before).detach(), (q - before).detach().double()) < 0.1
        assert torch.equal(
            *(optimizer.state[r]["momentum_buffer"] for optimizer, r in zip(optimizers, (p, q), strict=True))
        )


def test_a_state_dict_is_that_of_torch():
    torchs, ours = make_params(SHAPES), make_params(SHAPES)
    theirs = torch.optim.Muon(torchs)
    give_grads(torchs, 0)
    theirs.step()
    resumed = optim.Muon(ours)
    resumed.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert resumed.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    give_grads(ours, 1)
    resumed.step()
    back = torch.optim.Muon(torchs)
    back.load_state_dict(resumed.state_dict())
    for p, q in zip(ours, torchs, strict=True):
        assert torch.equal(back.state[q]["momentum_buffer"], resumed.state[p]["momentum_buffer"])


def test_copies_continue_alone():
    params = make_params(SHAPES)
    optimizer = copy.deepcopy(optim.Muon(params))
    give_grads(optimizer.param_groups[0]["params"], 0)
    optimizer.step()


def test_parameters_without_gradients_and_with_other_dtypes():
    params = make_params([(4, 8), (8, 4), (3, 3)])
    params[1].data = params[1].data.half()
    before = [p.detach().clone() for p in params]
    optimizer = optim.Muon(params)
    optimizer.step()
    assert not optimizer.state
    give_grads(params[:2], 0)
    optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(params, before, strict=True)] == [False, False, True]
    assert optimizer.state[params[1]]["momentum_buffer"].dtype == torch.half
    assert optimizer.metrics() == {"optim/lr": 1e-3, "optim/state_bytes": 4.0 * 32 + 2 * 32}


def test_a_loss_scaler_skips_and_clips():
    params = make_params([(4, 8)])
    before = params[0].detach().clone()
    optimizer, scaler = optim.Muon(params), amp.LossScaler("cpu", init_scale=4.0)
    for gradient in (torch.inf, 8.0):
        scaler.scale(torch.ones(()))
        params[0].grad = torch.full((4, 8), gradient)
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert torch.equal(params[0], before) == (gradient == torch.inf)
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("capability", [None, "amx_bf16", "avx512_bf16"])
def test_the_dtype_is_the_one_that_is_faster(monkeypatch, capability):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True}, raising=False)
    assert usual_dtype(torch.empty(128, 1000)) == torch.float32
    assert usual_dtype(torch.empty(1000, 129)) == (torch.bfloat16 if capability else torch.float32)


def test_costs_count_multiplications():
    wide = torch.empty(10, 40)
    assert cost(torch.empty(10, 10), 5, torch.float32) == 5 * 3 * 10**3
    # Of n iterations between two Gram matrices: this and X at the end; n squares, n - 1 products of the factors, and
    # 2 n - 2 for the next Gram matrices.
    assert cost(wide, 5, torch.float32) == (2 * 8 + (3 + 2 + 4) + (2 + 1 + 2)) * 10**3 == cost(wide.T, 5, torch.float32)
    assert cost(wide, 5, torch.bfloat16) == (3 * 8 + 2 * (2 + 1 + 2) + 1) * 10**3


# Several ranks.


def step_on_ranks(rank, world_size, dtype, codec, saved):
    params = make_params(SHAPES)
    optimizer = optim.Muon(params, dtype=dtype, group=dist.group.WORLD, codec=codec)
    if saved:
        optimizer.load_state_dict(saved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "WAVE", 200)
        for step in range(3):
            give_grads(params, step)
            params[step].grad = None
            optimizer.step()
    more = make_params([(6, 30)], seed=1)
    optimizer.add_param_group({"params": more})
    give_grads([*params, *more], 3)
    optimizer.step()
    sent = optimizer._owners.stats()["wire_bytes"] + optimizer._owners.stats()["inside_bytes"]
    optimizer.close()
    return [p.detach() for p in (*params, *more)], optimizer.state_dict(), sent


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_have_the_bits_of_one_process(ranks):
    alone = run_ranks(1, step_on_ranks, torch.bfloat16, "raw", None)[0]
    for params, state, sent in run_ranks(ranks, step_on_ranks, torch.bfloat16, "bf16", None):
        assert all(map(torch.equal, params, alone[0]))
        for found, expected in zip(state["state"].values(), alone[1]["state"].values(), strict=True):
            assert torch.equal(found["momentum_buffer"], expected["momentum_buffer"])
        assert (sent > 0) == (ranks > 1)


def test_a_lossy_codec_gives_all_ranks_the_same_bits():
    (first, state, _), (second, _, _) = run_ranks(2, step_on_ranks, torch.float32, "int8", None)
    assert all(map(torch.equal, first, second))
    state["state"].pop(len(SHAPES))
    state["param_groups"].pop()
    resumed = run_ranks(3, step_on_ranks, torch.float32, "int8", state)
    assert all(map(torch.equal, resumed[0][0], resumed[2][0]))


def lose_a_rank(rank, world_size):
    params = make_params(SHAPES)
    optimizer = optim.Muon(params, group=dist.group.WORLD)
    give_grads(params, 0)
    optimizer.step()
    if rank == 1:
        optimizer.close()
        return
    before = [p.detach().clone() for p in params]
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        optimizer.step()
    assert all(map(torch.equal, params, before))  # all of them are in one message


def test_a_lost_rank_is_named():
    run_ranks(2, lose_a_rank, timeout=10 * DEADLINE.total_seconds())


def test_each_owner_sends_a_part_at_a_time():
    jobs = [SimpleNamespace(name=str(index), p=torch.empty(shape)) for index, shape in enumerate(SHAPES)]
    owner = {"0": 0, "1": 1, "2": 0, "3": 0, "4": 1, "5": 0}  # 0: 192, 320, 5, 108 elements; 1: 256, 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "WAVE", 200)
        waves = [[job.name for job in wave] for wave in muon._waves(jobs, owner)]
    assert waves == [["0", "1", "2"], ["4"], ["3", "5"]]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"params": [torch.zeros(3)]}, "params: expected matrices|2D"),
        ({"params": [torch.zeros(3, 3, dtype=torch.int32)]}, "params: expected matrices|can't optimize|require"),
        ({"dtype": torch.half}, "dtype: expected torch.float32, torch.bfloat16 or None, got torch.float16"),
        ({"codec": "int3"}, "codec: expected one of raw"),
        ({"group": "world"}, "group: expected a torch.distributed.ProcessGroup or None, got 'world'"),
        ({"ns_steps": 2.5}, "ns_steps: expected an int, got 2.5"),
        ({"ns_steps": 100}, "ns_steps: expected 0 to 99, got 100"),
        ({"ns_coefficients": (1, 2)}, "ns_coefficients: expected three numbers, got (1, 2)"),
        ({"adjust_lr_fn": "none"}, "none"),
        ({"adjust_lr_fn": 3}, "adjust_lr_fn: expected one of (None, 'original', 'match_rms_adamw'), got 3"),
        ({"lr": torch.inf}, "lr: expected a finite number >= 0, got inf"),
    ],
)
def test_errors_name_the_argument(wrong, message):
    with pytest.raises((TypeError, ValueError)) as error:
        optim.Muon(**{"params": make_params([(2, 3)]), **wrong})
    assert any(part in str(error.value) for part in message.split("|"))


def test_an_error_in_a_step_changes_nothing():
    params = make_params([(4, 8), (2, 2)])
    give_grads(params, 0)
    optimizer = optim.Muon(params)
    params[1].grad = params[1].grad.to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"grad of a param of shape \[2, 2\]"):
        optimizer.step()
    params[1].grad = None
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="momentum_buffer: expected the shape of the gradient"):
        optimizer.step()
    assert torch.equal(params[0], before)
