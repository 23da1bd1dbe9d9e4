"""The ops of the optimizers: what the classes run, and a part of a compiled step."""

import pytest
import torch
from optimizers import KINDS, OPS, assert_untouched, give_grads, make_params, op_lists, telling

from dltrain_ext.optim.rule import RULES

SHAPES = [(3, 5), (7,), (64, 33)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_and_its_op_give_the_same_bits(kind, device):
    rule = RULES[kind.__name__.lower()]
    params = make_params(SHAPES, device)
    optimizer = kind(params, lr=0.1, **telling(kind), **({"adapt": True} if rule.flag == "adapt" else {}))
    for seed in range(2):
        give_grads(params, seed)
        optimizer.step()
    give_grads(params, 2)
    entries = [optimizer.state[p] for p in params]
    keys = [each.key for each in (*rule.states, *rule.counters)]
    lists = [[entry[key].detach().clone() for entry in entries if key in entry] for key in keys]
    values = [p.detach().clone() for p in params]
    hyper = optimizer._hyper(optimizer.param_groups[0])
    optimizer.step()
    getattr(torch.ops.dltrain_ext, f"{rule.name}_")(values, [p.grad for p in params], *lists, [], lr=0.1, **hyper)
    assert_untouched([p.detach() for p in params], values)
    for key, made in zip(keys, lists, strict=True):
        assert_untouched([entry[key] for entry in entries if key in entry], made)


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_compiled_step_takes_the_op_as_a_whole(op):
    def update(params, grads, *rest):
        grads = [2 * g for g in grads]
        getattr(torch.ops.dltrain_ext, op)(params, grads, *rest, **OPS[op])
        return [p.square().sum() for p in params]

    def run(function):
        params = [p.detach() for p in make_params(SHAPES)]
        states = [[p.abs() for p in params] for _ in range(3)]
        lists = op_lists(op, params, [p.clone() for p in params], states, [])
        return [*function(*lists), *(tensor for one in lists for tensor in one)]

    torch._dynamo.reset()
    assert_untouched(run(torch.compile(update, fullgraph=True, backend="aot_eager")), run(update))
