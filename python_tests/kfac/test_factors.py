"""Factors of layers, their packed form and their inverses, in one process."""

import itertools

import exact
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dltrain_ext import kfac
from dltrain_ext.kfac.cholesky import damped_inverses
from dltrain_ext.kfac.triangle import pack, packed_numel, unpack


@pytest.mark.parametrize("size", range(1, 10))
def test_a_packed_matrix_has_its_lower_triangle_once(size):
    matrix = torch.arange(size * size, dtype=torch.float32).view(size, size)
    packed = pack(matrix)
    assert packed.shape == (packed_numel(size),)
    triangle = matrix[tuple(torch.tril_indices(size, size))]
    assert torch.equal(packed.sort().values, triangle.sort().values)
    assert torch.equal(unpack(packed, size), matrix.tril() + matrix.tril(-1).t())


def test_inverses_have_the_accuracy_of_their_condition():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2 * size, size, generator=generator) for size in (1, 2, 40, 200)]
    matrices = [some.t() @ some / len(some) for some in rows]
    inverses, growths = damped_inverses(matrices, [1e-3] * 4)
    assert growths == [0] * 4
    for matrix, inverse in zip(matrices, inverses, strict=True):
        exactly = (matrix.double() + 1e-3 * torch.eye(len(inverse)).double()).inverse()
        condition = torch.linalg.cond(exactly)
        assert torch.linalg.norm(inverse - exactly) <= 10 * condition * 1.2e-7 * torch.linalg.norm(exactly)


def test_an_indefinite_matrix_gets_ten_times_the_damping_and_the_retries_are_counted():
    definite, indefinite = torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -0.5]))
    inverses, growths = damped_inverses([definite, indefinite], [1e-2, 1e-2])
    assert growths == [0, 2]
    torch.testing.assert_close(inverses[0], torch.eye(3) / 1.01)
    torch.testing.assert_close(inverses[1].diagonal(), torch.tensor([0.5, 0.5, 2.0]))


def test_a_matrix_without_an_inverse_gives_nan():
    (one, nan), growths = damped_inverses([torch.eye(2), torch.full((2, 2), torch.nan)], [1.0, 1.0])
    assert growths[0] == 0 < growths[1] and nan.isnan().all()
    torch.testing.assert_close(one, torch.eye(2) / 2)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)), (6,)),
    "sequences": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)), (4, 6)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
            nn.Tanh(),
            nn.Conv2d(4, 6, 1, bias=False),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 5),
        ),
        (3, 9, 8),
    ),
}


def losses_of(outputs, approximation):
    """Squared errors to a constant: of each example, or of each position of a sequence that counts as an example."""
    errors = (outputs - 1).square().sum(-1)
    return errors if approximation == "expand" or errors.dim() == 1 else errors.mean(1)


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_those_of_every_example(name, approximation):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), torch.randn(8, *shape)
    preconditioner = kfac.KFAC(model, approximation=approximation)
    losses_of(model(data), approximation).mean().backward()
    saved = preconditioner.state_dict()["layers"]
    for layer, (a, g) in exact.factors(model, data, lambda out: losses_of(out, approximation), approximation).items():
        torch.testing.assert_close(saved[layer]["A"].double(), a, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(saved[layer]["G"].double(), g, rtol=1e-5, atol=1e-6 * float(g.abs().max()))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("padding", ["same", 1])
def test_padding_modes_and_examples_without_a_batch(mode, padding):
    module = nn.Conv2d(2, 3, 3, padding=padding, padding_mode=mode)
    model = nn.Sequential(module)
    preconditioner = kfac.KFAC(model)
    image = torch.randn(2, 6, 5)
    model(image).sum().backward()
    padded = F.pad(image[None], (1, 1, 1, 1), "constant" if mode == "zeros" else mode)
    columns = torch.cat([F.unfold(padded, 3)[0], torch.ones(1, 30)])
    torch.testing.assert_close(preconditioner.state_dict()["layers"]["0"]["A"], columns @ columns.t() / 30)


def batch_of(model, data):
    model.zero_grad()
    (model(data) - 1).square().mean().backward()


def test_a_step_is_the_formula():
    torch.manual_seed(0)
    make, shape = MODELS["convolutions"]
    model, data, damping, kl_clip, lr = make(), torch.randn(16, *shape), 1e-2, 1e-4, 0.3
    preconditioner = kfac.KFAC(model, damping, kl_clip=kl_clip, lr=lambda: lr)
    (model(data) - 1).square().sum(-1).mean().backward()
    before = exact.gradients(model)
    preconditioner.step()
    after = exact.gradients(model)
    found = exact.factors(model, data, lambda out: (out - 1).square().sum(-1), "expand")
    wanted = {name: exact.preconditioned(*found[name], before[name], damping) for name in before}
    change = lr**2 * sum((before[name] * wanted[name]).sum() for name in before)
    factor = min(1.0, (kl_clip / change) ** 0.5)
    assert 0 < factor < 1, "the test must clip"
    for name in wanted:
        torch.testing.assert_close(after[name].double(), factor * wanted[name], rtol=1e-3, atol=1e-6)


def test_means_decay_and_inverses_are_made_when_they_are_due():
    torch.manual_seed(0)
    model = MODELS["linear"][0]()
    preconditioner = kfac.KFAC(model, factor_decay=0.5, factor_update_steps=2, inv_update_steps=3, kl_clip=None)
    taken, gradients = [], []
    for step in range(6):
        data = torch.randn(8, 6)
        batch_of(model, data)
        if step % 2 == 0:
            taken.append(torch.cat([data, torch.ones(8, 1)], 1))
        for layer in (model[0], model[2]):
            layer.weight.grad.fill_(1)
        model[0].bias.grad.fill_(1)
        preconditioner.step()
        gradients.append(exact.gradients(model)["0"].clone())
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(gradients)]
    assert changed == [False, False, True, False, False], "the inverses of steps 0 and 3 serve three steps each"
    mean = sum(weight * rows.t() @ rows / 8 for weight, rows in zip((0.25, 0.5, 1), taken, strict=True)) / 1.75
    torch.testing.assert_close(preconditioner.state_dict()["layers"]["0"]["A"], mean)


def test_accumulated_passes_are_one_batch():
    torch.manual_seed(0)
    model, data = MODELS["linear"][0](), torch.randn(12, 6)
    whole = kfac.KFAC(model)
    batch_of(model, data)
    wanted = whole.state_dict()["layers"]
    whole.step()
    stepped = exact.gradients(model)
    whole.close()
    parts = kfac.KFAC(model, accumulation_steps=3)
    model.zero_grad()
    for part in data.split(4):
        ((model(part) - 1).square().mean() / 3).backward()
    found = parts.state_dict()["layers"]
    for name in wanted:
        for key in ("A", "G"):
            torch.testing.assert_close(found[name][key], wanted[name][key])
    parts.step()
    for name, gradient in exact.gradients(model).items():
        torch.testing.assert_close(gradient, stepped[name], rtol=1e-3, atol=1e-6)


def test_layers_that_are_called_twice_count_both_calls():
    model = nn.Linear(3, 3, bias=False)
    preconditioner = kfac.KFAC(nn.Sequential(model))
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    (model(first).sum() + model(second).sum()).backward()
    both = torch.cat([first, second])
    torch.testing.assert_close(preconditioner.state_dict()["layers"]["0"]["A"], both.t() @ both / 8)
