"""kfac.KFAC in one process: what it composes with, what it leaves out, and what it refuses."""

import copy
import gc
import io
import weakref

import exact
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dltrain_ext import amp, kfac, optim
from dltrain_ext.kfac.inverses import Inverses


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator)


def backward(model, seed=0, scale=1.0):
    model.zero_grad()
    inputs, targets = batch(seed)
    (scale * F.cross_entropy(model(inputs), targets)).backward()


def flat(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def plain_step(**options):
    model = make()
    preconditioner = kfac.KFAC(model, **options)
    backward(model)
    preconditioner.step()
    return flat(model)


@pytest.mark.parametrize("make_scaler", [amp.LossScaler, torch.amp.GradScaler])
def test_scaled_losses_give_the_same_factors_and_limit(make_scaler):
    model = make()
    scaler, optimizer = make_scaler("cpu", init_scale=1024.0), optim.SGD(model.parameters(), 0.1)
    preconditioner = kfac.KFAC(model, scaler=scaler, kl_clip=1e-4)
    scaler.scale(torch.zeros(()))
    backward(model, scale=1024.0)
    preconditioner.step()
    torch.testing.assert_close(flat(model) / 1024.0, plain_step(kl_clip=1e-4), rtol=1e-3, atol=1e-6)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="step: expected to be called before unscale_"):
        preconditioner.step()
    scaler.step(optimizer)
    scaler.update()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_overflowing_gradients_stay_visible_and_out_of_the_factors():
    model = make()
    scaler, optimizer = amp.LossScaler("cpu", init_scale=1024.0), optim.SGD(model.parameters(), 0.1)
    preconditioner = kfac.KFAC(model, scaler=scaler, inv_update_steps=100)
    before = copy.deepcopy(model.state_dict())
    scaler.scale(torch.zeros(()))
    backward(model, scale=torch.inf)
    preconditioner.step()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped_steps == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    scale = scaler.get_scale()
    backward(model, scale=scale)
    preconditioner.step()  # makes the inverses that the first batch could not give
    torch.testing.assert_close(flat(model) / scale, plain_step(), rtol=1e-3, atol=1e-6)


class Syncs(TorchDispatchMode):
    """Counts the operations for which a host would wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")
        return func(*args, **(kwargs or {}))


def test_only_steps_that_make_inverses_wait_for_the_device():
    model = make()
    scaler = amp.LossScaler("cpu")
    scaler.scale(torch.zeros(()))
    preconditioner = kfac.KFAC(model, factor_update_steps=1, inv_update_steps=2, scaler=scaler)
    counts = []
    for step in range(4):
        with Syncs() as syncs:
            backward(model, step)
            preconditioner.step()
        counts.append(syncs.count)
    assert counts[1] == counts[3] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations(reentrant):
    model = make()
    preconditioner = kfac.KFAC(model)
    inputs, targets = batch()
    outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=reentrant)
    F.cross_entropy(outputs, targets).backward()
    preconditioner.step()
    torch.testing.assert_close(flat(model), plain_step())


def test_a_compiled_model():
    model = make()
    preconditioner = kfac.KFAC(model)
    compiled = torch.compile(model, backend="aot_eager")
    inputs, targets = batch()
    F.cross_entropy(compiled(inputs), targets).backward()
    preconditioner.step()
    torch.testing.assert_close(flat(model), plain_step())


def test_autocast_takes_moments_in_fp32():
    model = make()
    preconditioner = kfac.KFAC(model)
    inputs, targets = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
    preconditioner.step()
    rows = torch.cat([inputs.bfloat16().float(), torch.ones(32, 1)], 1)
    factor = preconditioner.state_dict()["layers"]["0"]["A"]
    assert torch.linalg.norm(factor - rows.t() @ rows / 32) < 1e-2 * torch.linalg.norm(factor)
    assert F.cosine_similarity(flat(model), plain_step(), dim=0) > 0.95


def test_evaluation_leaves_no_trace():
    model = make()
    preconditioner = kfac.KFAC(model)
    with torch.no_grad():
        model(torch.full((4, 8), torch.nan))
    model(torch.randn(4, 8))  # no backward pass
    backward(model)
    preconditioner.step()
    torch.testing.assert_close(flat(model), plain_step())


def test_it_learns_in_fewer_steps_than_without():
    losses = {}
    for preconditions in (False, True):
        model = make()
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        preconditioner = kfac.KFAC(model, 1e-2, kl_clip=1e-2, factor_update_steps=1, inv_update_steps=2)
        for _ in range(20):
            backward(model)
            if preconditions:
                preconditioner.step()
            optimizer.step()
        inputs, targets = batch()
        losses[preconditions] = F.cross_entropy(model(inputs), targets).item()
    assert losses[True] < 0.5 * losses[False], losses


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.grouped = nn.Conv1d(8, 8, 1, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.grouped(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.used(self.normed(self.frozen(self.attention(x, x, x)[0])))


def test_other_parameters_are_left_as_they_are():
    torch.manual_seed(0)
    model = Mixed()
    preconditioner = kfac.KFAC(model)
    assert preconditioner.layers == ["used", "unused"]
    model(torch.randint(0, 10, (4, 6))).square().sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    preconditioner.step()
    changed = {name for name, grad in before.items() if not torch.equal(grad, model.get_parameter(name).grad)}
    assert changed == {"used.weight", "used.bias"}
    assert model.unused.weight.grad is None


def test_skipped_layers_and_the_text():
    assert kfac.KFAC(make(), skip_layers=["^0$"]).layers == ["2"]
    with pytest.raises(ValueError, match="model: expected at least one Linear or Conv2d"):
        kfac.KFAC(make(), skip_layers=["Linear"])
    assert "2 layers" in str(kfac.KFAC(make())) and "rank 0: 100.0%  0, 2" in str(kfac.KFAC(make()))


def tied():
    model = make()
    model.append(nn.Linear(4, 4))
    model.append(nn.Linear(4, 4))
    model[4].weight = model[3].weight
    return model


REFUSED = {
    "model: expected a torch.nn.Module, got int": lambda: kfac.KFAC(3),
    r"model: expected parameters that only one module uses, not '3', '4', got layer '3'": lambda: kfac.KFAC(tied()),
    r"model: expected initialized layers .* got layer '0'": lambda: kfac.KFAC(nn.Sequential(nn.LazyLinear(3))),
    "model: expected .* not torch.float64, got layer '0'": lambda: kfac.KFAC(make().double()),
    "damping: expected a finite number > 0, got 0": lambda: kfac.KFAC(make(), damping=0),
    "kl_clip: expected a finite number > 0, got -1": lambda: kfac.KFAC(make(), kl_clip=-1),
    "lr: expected a finite number >= 0, got -1": lambda: kfac.KFAC(make(), lr=-1),
    "factor_decay: expected 0 to 1, got 2": lambda: kfac.KFAC(make(), factor_decay=2),
    "inv_update_steps: expected an int of at least 1, got 0": lambda: kfac.KFAC(make(), inv_update_steps=0),
    "codec: expected one of raw, .* got 'zip'": lambda: kfac.KFAC(make(), codec="zip"),
    "approximation: expected one of expand, reduce": lambda: kfac.KFAC(make(), approximation="sum"),
    "skip_layers: expected a sequence of regular expressions, got '0'": lambda: kfac.KFAC(make(), skip_layers="0"),
    "scaler: expected a torch.amp.GradScaler or None, got int": lambda: kfac.KFAC(make(), scaler=1),
    "step: expected the gradients of a forward and a backward pass": lambda: kfac.KFAC(make()).step(),
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_arguments_are_refused_by_name(text):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        REFUSED[text]()


def test_a_checkpoint_loads_whole_or_not_at_all():
    model = make()
    preconditioner = kfac.KFAC(model)
    backward(model)
    preconditioner.step()
    state = preconditioner.state_dict()

    def changed(**entries):
        return {**state, "layers": {**state["layers"], "2": {**state["layers"]["2"], **entries}}}

    factor = state["layers"]["2"]["A"]
    lopsided = factor + torch.eye(17).roll(1, 0)
    other = kfac.KFAC(make(1))
    for broken, text in (
        (None, "expected that of a KFAC, got NoneType"),
        ({**state, "steps": -1}, "a whole number >= 0 as its steps, got -1"),
        ({**state, "layers": {"2": state["layers"]["2"]}}, "'0' is only in one of both"),
        (changed(A=factor[:-1]), r"a float32 tensor of shape \[17, 17\] as A of '2'"),
        (changed(A=factor.double()), "float32"),
        (changed(A=factor * torch.nan), "symmetric and finite, as A"),
        (changed(A=lopsided), "symmetric and finite, as A"),
        (changed(A=-factor), "symmetric and finite, as A"),
        (changed(G_weight=-1.0), "a number >= 0 as G_weight of '2', got -1.0"),
        (changed(more=1), "expected A, G, A_weight, G_weight for layer '2'"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            other.load_state_dict(broken)
    assert all(not entries["A"].any() for entries in other.state_dict()["layers"].values()), "nothing was loaded"
    other.load_state_dict(torch.load(saved(state), weights_only=True))
    for name, entries in other.state_dict()["layers"].items():
        for key, value in entries.items():
            torch.testing.assert_close(value, state["layers"][name][key])


def test_a_disabled_scaler_scales_nothing():
    found = plain_step(scaler=torch.amp.GradScaler("cpu", enabled=False), kl_clip=1e-4)
    assert torch.equal(found, plain_step(kl_clip=1e-4))


def test_copies_of_the_model_take_no_moments():
    model = make()
    preconditioner = kfac.KFAC(model)
    for copied in (copy.deepcopy(model), torch.load(saved(model), weights_only=False)):
        backward(copied)
    assert not preconditioner.state_dict()["layers"]["0"]["A_weight"]


def test_a_preconditioner_that_is_gone_takes_no_moments():
    model = make()
    preconditioner = kfac.KFAC(model)
    gone = weakref.ref(preconditioner)
    del preconditioner
    gc.collect()
    assert gone() is None
    backward(model)


def test_evaluation_mode_leaves_passes_out():
    model = make()
    preconditioner = kfac.KFAC(model)
    inputs = batch()[0].requires_grad_()
    model.eval()
    torch.autograd.grad(1000 * model(inputs).sum(), inputs)
    model.train()
    backward(model)
    preconditioner.step()
    torch.testing.assert_close(flat(model), plain_step())


@pytest.mark.parametrize("after", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
def test_operations_in_place_on_the_output_of_sequences(after):
    model = nn.Sequential(nn.Linear(8, 6), after, nn.Linear(6, 2))
    preconditioner = kfac.KFAC(model)
    model(torch.randn(4, 3, 8)).square().mean().backward()
    before = model[0].weight.grad.clone()
    preconditioner.step()
    assert preconditioner.state_dict()["layers"]["0"]["G"].any() and not torch.equal(model[0].weight.grad, before)


def test_layers_with_a_forward_of_their_own_are_left_as_they_are():
    class Own(nn.Linear):
        def forward(self, inputs):
            return super().forward(2 * inputs), None

    assert kfac.KFAC(nn.Sequential(Own(2, 2), nn.Linear(2, 2))).layers == ["1"]


def test_a_bias_that_is_frozen_later():
    model = make()
    preconditioner = kfac.KFAC(model)
    model[0].bias.requires_grad_(False)
    backward(model)
    before = model[0].weight.grad.clone()
    preconditioner.step()
    assert model[0].bias.grad is None and not torch.equal(model[0].weight.grad, before)


@pytest.mark.parametrize(("factor_steps", "inverse_steps"), [(1, 1), (2, 3), (10, 5)])
def test_without_memory_the_latest_batch_counts(factor_steps, inverse_steps):
    model = make()
    preconditioner = kfac.KFAC(model, factor_decay=0, factor_update_steps=factor_steps, inv_update_steps=inverse_steps)
    for step in range(11):
        backward(model, step)
        preconditioner.step()
        assert preconditioner.state_dict()["layers"]["0"]["A_weight"] == 1
    rows = torch.cat([batch(10)[0], torch.ones(32, 1)], 1)
    torch.testing.assert_close(preconditioner.state_dict()["layers"]["0"]["A"], rows.t() @ rows / 32)


def test_a_run_that_overflowed_at_once_goes_on_from_its_checkpoint():
    model = make()
    first = kfac.KFAC(model)
    backward(model, scale=torch.inf)
    first.step()
    second = kfac.KFAC(make(1))
    second.load_state_dict(first.state_dict())
    first.close()
    third = kfac.KFAC(model)
    third.load_state_dict(second.state_dict())
    backward(model)
    third.step()
    torch.testing.assert_close(flat(model), plain_step(), rtol=1e-3, atol=1e-6)


def test_an_update_that_fails_leaves_the_earlier_inverses(monkeypatch):
    model = make()
    preconditioner = kfac.KFAC(model, factor_update_steps=1, inv_update_steps=1, kl_clip=None)
    backward(model)
    preconditioner.step()
    backward(model)
    before = flat(model)
    factorize = torch.linalg.cholesky_ex

    def fail(matrix):
        triangle, info = factorize(matrix)
        return triangle, info + (len(matrix) == 17)  # the inputs of layer 2, and its bias

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "cholesky_ex", fail)
        with pytest.raises(ArithmeticError, match="the factors of layer '2' cannot be inverted with damping 0.001"):
            preconditioner.step()
    assert torch.equal(flat(model), before)
    preconditioner.step()
    assert not torch.equal(flat(model), before)


def test_a_layer_without_gradients_does_not_have_inverses_made_for_ever(monkeypatch):
    made = []
    update = Inverses.update
    monkeypatch.setattr(Inverses, "update", lambda self, damping: (made.append(1), update(self, damping)))
    model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    preconditioner = kfac.KFAC(model)
    for seed in range(40):
        inputs, targets = batch(seed)
        F.cross_entropy(model[0](inputs) + 0 * model[1](inputs), targets).backward()
        preconditioner.step()
    assert 2 < len(made) < 15


def test_huge_gradients_without_a_scaler_are_not_finite_after_the_limit():
    model = make()
    preconditioner = kfac.KFAC(model)
    backward(model)
    preconditioner.step()
    for parameter in model.parameters():
        parameter.grad.fill_(1e30)
    preconditioner.step()
    assert flat(model).isnan().all()


def saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_without_inverses_due_a_loaded_preconditioner_makes_them_at_the_next_step():
    model = make()
    first = kfac.KFAC(model, kl_clip=None)
    for seed in range(2):
        backward(model, seed)
        first.step()
    state = first.state_dict()
    first.close()
    second = kfac.KFAC(model, kl_clip=None)
    second.load_state_dict(state)
    backward(model, 5)
    before = exact.gradients(model)
    second.step()
    for name, gradient in exact.gradients(model).items():
        a, g = (state["layers"][name][key].double() for key in "AG")
        torch.testing.assert_close(
            gradient.double(), exact.preconditioned(a, g, before[name], 1e-3), rtol=1e-2, atol=1e-4
        )


def test_a_closed_preconditioner_takes_nothing():
    model = make()
    preconditioner = kfac.KFAC(model)
    preconditioner.close()
    backward(model)
    assert not preconditioner.state_dict()["layers"]["0"]["A"].any()
