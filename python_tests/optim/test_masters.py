"""Parameters in bfloat16 without float32 masters: rounded stochastically, or extended by eight bits."""

import copy
import io

import pytest
import torch
from optimizers import assert_untouched, give_grads, make_params, taken_by
from torch import nn

from dltrain_ext import optim
from dltrain_ext.amp import LossScaler

COMPACT = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion, optim.LAMB]
SHAPES = [(96, 100), (7, 5), (3,)]
STOCHASTIC = {"master_weights": False, "rounding": "stochastic"}
EXTENDED = {"master_weights": "8bit"}
FORMS = [STOCHASTIC, EXTENDED, {**STOCHASTIC, "state_codec": "int8"}, {**EXTENDED, "state_codec": "int8"}]


def halves(shapes=SHAPES, device="cpu"):
    return [nn.Parameter(p.detach().bfloat16()) for p in make_params(shapes, device)]


def make(kind, params, lr=1e-3, **options):
    return kind(params, lr=lr, **taken_by(kind, momentum=0.9), **options)


def train(params, optimizer, seeds):
    for seed in seeds:
        give_grads(params, seed)
        optimizer.step()


def trained(kind, device="cpu", steps=5, shapes=SHAPES, **options):
    params = halves(shapes, device)
    optimizer = make(kind, params, **options)
    train(params, optimizer, range(steps))
    return params, optimizer


def masters_of(optimizer):
    return [entry["master_param"] for entry in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("kind", COMPACT)
def test_masters_of_8_bits_are_near_those_of_float32(kind, device):
    params, optimizer = trained(kind, device, steps=30, **EXTENDED)
    _, other = trained(kind, device, steps=30)
    for p, short, long in zip(params, masters_of(optimizer), masters_of(other), strict=True):
        kept = optimizer.state[p]["master_param"]
        assert kept.dtype == torch.uint8 and kept.shape == p.shape
        assert short.dtype == torch.float32
        assert ((short - long).norm() < 2e-3 * long.norm()).item()
        assert ((short - p.float()).abs() <= short.abs() * 2**-8).all(), "the parameter is the nearest bfloat16"
        assert not torch.equal(short, p.float())


def test_masters_of_8_bits_take_updates_that_bfloat16_rounds_away(device):
    params = [nn.Parameter(torch.ones(5000, dtype=torch.bfloat16, device=device))]
    optimizer = optim.SGD(params, lr=1e-4, **EXTENDED)
    for _ in range(100):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    torch.testing.assert_close(masters_of(optimizer)[0], torch.full((5000,), 0.99, device=device), rtol=0, atol=1e-3)
    torch.testing.assert_close(params[0].float(), torch.full((5000,), 0.99, device=device), rtol=0, atol=2**-9)


def test_stochastic_rounding_is_right_on_average(device):
    params = [nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16, device=device))]
    optimizer = optim.SGD(params, lr=1e-4, **STOCHASTIC)
    for _ in range(100):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    assert abs(params[0].float().mean().item() - 0.99) < 5e-5  # deviation of the mean: 2^-8 / 2 sqrt(10 / 1e5)
    exact = [nn.Parameter(torch.full((100_000,), 1.25, dtype=torch.bfloat16, device=device))]
    exact[0].grad = torch.zeros_like(exact[0])
    optim.SGD(exact, lr=0.1, **STOCHASTIC).step()
    assert (exact[0] == 1.25).all(), "what bfloat16 can represent is kept"


@pytest.mark.parametrize("kind", COMPACT)
def test_a_step_rounds_to_a_neighbour_of_the_result_in_float32(kind, device):
    params, _ = trained(kind, device, steps=1, **STOCHASTIC)
    _, other = trained(kind, device, steps=1)
    for p, master in zip(params, masters_of(other), strict=True):
        bits = p.detach().view(torch.int16).int() - (master.view(torch.int32) >> 16)
        assert ((bits == 0) | (bits == 1)).all()
        assert p.numel() < 100 or len(bits.unique()) == 2


def test_random_numbers_are_those_of_seed_step_and_parameter(device):
    def run(seed=3, steps=2, shapes=((64, 65), (64, 65))):
        params = halves(shapes, device)
        with torch.no_grad():
            params[1].copy_(params[0])
        optimizer = optim.SGD(params, lr=1e-3, seed=seed, **STOCHASTIC)
        for _ in range(steps):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [p.detach() for p in params]

    one, twin, other = run(), run(), run(seed=4)
    assert_untouched(one, twin)
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1]), "parameters have numbers of their own"
    start, first = halves(((64, 65),), device)[0], run(steps=1)
    assert ((one[0] != first[0]) != (first[0] != start)).any(), "steps have numbers of their own"


def test_bits_do_not_depend_on_threads_or_layout():
    def run(layout=torch.contiguous_format, threads=2):
        p = nn.Parameter(halves([(64, 32, 9, 9)])[0].detach().to(memory_format=layout))
        optimizer = optim.AdamW([p], **STOCHASTIC)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            train([p], optimizer, range(3))
        finally:
            torch.set_num_threads(before)
        return p.detach()

    assert torch.equal(run(), run(threads=1))
    assert torch.equal(run(), run(torch.channels_last))


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", COMPACT)
def test_continuing_from_a_file_gives_the_same_bits(kind, compressed, options, device):
    params, optimizer = trained(kind, device, **options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(compressed=compressed), file)
    file.seek(0)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = make(kind, twins, **options)
    twin.load_state_dict(torch.load(file))
    for each, of in ((params, optimizer), (twins, twin)):
        train(each, of, (7, 8))
    assert_untouched([p.detach() for p in params], [p.detach() for p in twins])
    torch.testing.assert_close(optimizer.state_dict()["state"], twin.state_dict()["state"], rtol=0, atol=0)


def test_masters_change_their_form_with_the_option(device):
    params, optimizer = trained(optim.AdamW, device)
    long = optimizer.state_dict()
    short = make(optim.AdamW, params, **EXTENDED)
    saved = copy.deepcopy(long)
    saved["param_groups"][0]["master_weights"] = "8bit"
    short.load_state_dict(saved)
    for p, master, entry in zip(params, masters_of(short), long["state"].values(), strict=True):
        assert short.state[p]["master_param"].dtype == torch.uint8
        assert ((master - entry["master_param"]).abs() <= entry["master_param"].abs() * 2**-15).all()
    back = make(optim.AdamW, params)
    saved = short.state_dict(compressed=True)
    saved["param_groups"][0]["master_weights"] = "auto"
    back.load_state_dict(saved)
    for one, two in zip(masters_of(back), masters_of(short), strict=True):
        assert torch.equal(one, two)
        assert one.dtype == torch.float32
    assert all(back.state[p]["master_param"].dtype == torch.float32 for p in params)


def test_float32_parameters_are_as_without_the_options(device):
    for options in (STOCHASTIC, EXTENDED):
        params, others = make_params(SHAPES, device), make_params(SHAPES, device)
        optimizer, other = make(optim.AdamW, params, **options), make(optim.AdamW, others)
        train(params, optimizer, range(3))
        train(others, other, range(3))
        assert_untouched([p.detach() for p in params], [p.detach() for p in others])
        assert "master_param" not in optimizer.state[params[0]]


def test_a_parameter_that_others_write_is_taken_over(device):
    params, optimizer = trained(optim.SGD, device, **EXTENDED)
    with torch.no_grad():
        params[0].zero_()
        params[1].fill_(2.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    for entry in optimizer.state.values():
        entry["momentum_buffer"].zero_()
    optimizer.step()
    assert params[0].abs().max() < 1e-38 and (params[1] == 2.0).all()


def test_a_skipped_step_changes_nothing_and_the_scaler_works(device):
    for options in (STOCHASTIC, EXTENDED):
        params, optimizer = trained(optim.AdamW, device, **options)
        before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
        scaler = LossScaler(torch.device(device).type, init_scale=4.0)
        scaler.scale(torch.ones((), device=device))
        give_grads(params, 1)
        params[0].grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close([(p.detach(), optimizer.state[p]) for p in params], before, rtol=0, atol=0)
        give_grads(params, 2)
        scaler.step(optimizer)
        assert not torch.equal(params[0].detach(), before[0][0])


def test_the_op_has_the_bits_of_the_class(device):
    params, optimizer = trained(optim.AdamW, device, seed=11, **STOCHASTIC)
    values = [p.detach().clone() for p in params]
    entries = copy.deepcopy([optimizer.state[p] for p in params])
    lists = [[entry[key] for entry in entries] for key in ("exp_avg", "exp_avg_sq", "step")]
    step = optimizer.param_groups[0]["rounding_step"].clone()
    assert step.item() == 5
    give_grads(params, 9)
    optimizer.step()
    torch.ops.dltrain_ext.adamw_(
        values, [p.grad for p in params], lists[0], lists[1], [], lists[2], [], lr=1e-3, seed=11, rounding_step=step
    )
    assert_untouched([p.detach() for p in params], values)


def test_a_converted_parameter_loses_what_extended_it(device):
    params, optimizer = trained(optim.AdamW, device, **EXTENDED)
    before = [p.detach().float() for p in params]
    for p in params:
        p.data, p.grad = p.data.float(), None
    assert "master_param" not in optimizer.state_dict()["state"][0]
    train(params, optimizer, (9,))
    assert not torch.equal(params[0].detach(), before[0])


def test_bits_of_bfloat16_are_refused_for_other_parameters():
    _, optimizer = trained(optim.AdamW, **EXTENDED)
    state = optimizer.state_dict(compressed=True)
    twin = optim.AdamW(make_params(SHAPES))
    with pytest.raises(ValueError, match=r"state\['master_param'\]: expected float32 for a parameter of torch.float32"):
        twin.load_state_dict(state)
    assert not twin.state


def test_loading_an_earlier_state_repeats_the_steps(device):
    params = halves(device=device)
    optimizer = make(optim.AdamW, params, **STOCHASTIC)
    start = copy.deepcopy([p.detach() for p in params]), copy.deepcopy(optimizer.state_dict())
    ends = []
    for _ in range(2):
        with torch.no_grad():
            for p, value in zip(params, start[0], strict=True):
                p.copy_(value)
        optimizer.load_state_dict(start[1])
        train(params, optimizer, range(3))
        ends.append([p.detach().clone() for p in params])
    assert_untouched(*ends)


def test_a_step_that_fails_counts_nothing():
    params = halves()
    optimizer = make(optim.AdamW, params, **STOCHASTIC)
    give_grads(params, 0)
    params[1].grad = torch.zeros(7, 5).bfloat16().to_sparse()
    with pytest.raises(TypeError, match=r"grads\[1\]: expected a plain dense tensor"):
        optimizer.step()
    assert "rounding_step" not in optimizer.param_groups[0]
    optimizer.param_groups[0]["params"] = [[1]]
    with pytest.raises(TypeError, match=r"params\[0\]: expected a tensor, got list"):
        optimizer.step()


def test_a_first_step_in_inference_mode():
    params = halves()
    optimizer = make(optim.SGD, params, **STOCHASTIC)
    with torch.inference_mode():
        train(params, optimizer, (0,))
    train(params, optimizer, (1,))
    assert optimizer.param_groups[0]["rounding_step"].item() == 2


def test_a_loaded_master_has_the_strides_of_its_parameter():
    params = [nn.Parameter(halves([(8, 4, 3, 3)])[0].detach().to(memory_format=torch.channels_last))]
    optimizer = make(optim.AdamW, params, **EXTENDED)
    train(params, optimizer, range(2))
    expected = masters_of(optimizer)[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[params[0]]["master_param"].stride() == params[0].stride()
    assert torch.equal(masters_of(optimizer)[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_weights": "4bit"}, "master_weights: expected 'auto', True, False or '8bit', got '4bit'"),
        ({"rounding": "up"}, "rounding: expected 'nearest' or 'stochastic', got 'up'"),
        ({"rounding": "stochastic"}, "rounding: expected 'nearest' unless master_weights=False, got 'stochastic'"),
        ({**STOCHASTIC, "seed": -1}, "seed: expected 0 to 9007199254740991, got -1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        optim.AdamW(halves(), **options)


def test_optimizers_that_cannot_refuse():
    with pytest.raises(ValueError, match="master_weights: expected 'auto', True or False, got '8bit'"):
        optim.NAdam(halves(), master_weights="8bit")
    with pytest.raises(ValueError, match="rounding: expected 'nearest' for NAdam, got 'stochastic'"):
        optim.NAdam([{"params": halves(), "master_weights": False, "rounding": "stochastic"}])


@pytest.mark.parametrize("options", [STOCHASTIC, EXTENDED])
def test_float16_is_refused(options):
    params = [nn.Parameter(p.detach().half()) for p in make_params(SHAPES)]
    with pytest.raises(ValueError, match="params: expected float32 or bfloat16 for .*, got float16"):
        optim.AdamW(params, **options)
    params, optimizer = trained(optim.AdamW, **options)
    for p in params:
        p.data = p.data.half()
        p.grad = torch.zeros_like(p)
    with pytest.raises(TypeError, match=r"(params|masters)\[0\]: expected float32"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "spoil", "message"),
    [
        (EXTENDED, lambda s: s["state"][0].update(master_param=torch.zeros(3, dtype=torch.uint8)), "expected shape"),
        (STOCHASTIC, lambda s: s["param_groups"][0].update(rounding_step=-1), "rounding_step: expected a number >= 0"),
        (STOCHASTIC, lambda s: s["param_groups"][0].update(seed=1.5), "seed: expected an int"),
    ],
)
def test_states_that_no_step_can_make_are_refused(options, spoil, message):
    _, optimizer = trained(optim.AdamW, **options)
    state = copy.deepcopy(optimizer.state_dict(compressed=True))
    spoil(state)
    twin = make(optim.AdamW, halves(), **options)
    with pytest.raises(ValueError, match=message):
        twin.load_state_dict(state)
    assert not twin.state
