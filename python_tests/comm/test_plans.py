"""Plans as data: all are verified for every world size, and the verifier rejects broken ones."""

import json

import pytest
from properties import property_test, st

from dltrain_ext import comm
from dltrain_ext.comm import Plan, Step


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_every_world_size_verifies(algorithm):
    for world_size in [*range(1, 65), 100, 128]:
        comm.verify(algorithm, world_size)


def edited(plan: Plan, edit) -> Plan:
    """Return the plans with ``edit`` applied to the rounds of one, a list of lists of steps."""
    rounds = [list(steps) for steps in plan.rounds]
    edit(rounds)
    return Plan(plan.algorithm, plan.rank, plan.world_size, plan.chunks, rounds, plan.exact)


def plans(algorithm, world_size=4, edits=None):
    made = [comm.plan(algorithm, rank, world_size) for rank in range(world_size)]
    for rank, edit in (edits or {}).items():
        made[rank] = edited(made[rank], edit)
    return made


def drop(round_, index):
    return lambda rounds: rounds[round_].pop(index)


def with_peer(round_, index, peer):
    def edit(rounds):
        step = rounds[round_][index]
        rounds[round_][index] = Step(step.op, peer, step.chunks)

    return edit


def receive_first(rounds):
    """Move every receive one round before its send. If all ranks did so, each would wait for the others."""
    first = [[step for step in steps if step.op.startswith("recv")] for steps in rounds]
    then = [[step for step in steps if not step.op.startswith("recv")] for steps in rounds]
    rounds[:] = [steps for pair in zip(first, then, strict=True) for steps in pair]


def finalize_early(rounds):
    rounds[1].insert(0, Step("finalize", -1, rounds[3][0].chunks))
    del rounds[3][0]


BROKEN = {
    "dropped send": ("R1", plans("ring", edits={2: drop(1, 0)})),
    "dropped receive": ("R1", plans("ring", edits={2: drop(1, 1)})),
    "dropped message": ("R2", plans("direct", edits={0: drop(0, 0), 1: drop(0, 1)})),
    "dropped finalize": ("R4", plans("ring", edits={3: drop(3, 0)})),
    "dropped last message": ("R2", plans("ring", edits={0: drop(5, 0), 1: drop(5, 1)})),
    "swapped peer": ("R1", plans("ring", edits={1: with_peer(0, 0, 3)})),
    "peer outside the world": ("R1", plans("ring", edits={1: with_peer(0, 0, 4)})),
    "itself as peer": ("R1", plans("ring", edits={1: with_peer(0, 0, 1)})),
    "cycle": ("R1", plans("ring", edits={0: receive_first})),
    "cycle through all ranks": ("R1", plans("ring", edits=dict.fromkeys(range(4), receive_first))),
    "incomplete sum finalized": ("R2", plans("ring", edits={0: finalize_early})),
    "final sent before it came": (
        "R4",
        plans("ring", edits={0: lambda rounds: rounds[3:5].reverse() or rounds.insert(3, rounds.pop(4))}),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_verifier_rejects_broken_plans_by_the_right_rule(case):
    rule, broken = BROKEN[case]
    with pytest.raises(ValueError, match=f"^{rule}: "):
        comm.verify_plans(broken)


def test_a_doubled_contribution_is_rejected():
    # Rank 1 sends its part to rank 0 in both rounds.
    twice = [
        Plan(
            "twice",
            0,
            2,
            1,
            [[Step("recv_reduce", 1, (0, 1))]] * 2 + [[Step("finalize", -1, (0, 1)), Step("send_final", 1, (0, 1))]],
        ),
        Plan("twice", 1, 2, 1, [[Step("send_partial", 0, (0, 1))]] * 2 + [[Step("recv_final", 0, (0, 1))]]),
    ]
    with pytest.raises(ValueError, match="^R4: .* encodes chunk 0 a second time"):
        comm.verify_plans(twice)

    # Rank 2 receives rank 0's part directly, and again within rank 1's part.
    chunk = (0, 1)
    doubled = [
        Plan(
            "doubled",
            0,
            3,
            1,
            [[Step("send_partial", 1, chunk), Step("send_partial", 2, chunk)], [], [Step("recv_final", 2, chunk)]],
        ),
        Plan(
            "doubled",
            1,
            3,
            1,
            [[Step("recv_reduce", 0, chunk)], [Step("send_partial", 2, chunk)], [Step("recv_final", 2, chunk)]],
        ),
        Plan(
            "doubled",
            2,
            3,
            1,
            [
                [Step("recv_reduce", 0, chunk)],
                [Step("recv_reduce", 1, chunk)],
                [Step("finalize", -1, chunk), Step("send_final", 0, chunk), Step("send_final", 1, chunk)],
            ],
        ),
    ]
    with pytest.raises(ValueError, match="^R2: .* counts the contribution of rank 0 twice"):
        comm.verify_plans(doubled)


def test_only_exact_plans_may_encode_twice():
    """In recursive doubling several ranks encode each sum, and each rank encodes its chunk in every round."""
    for world_size in (4, 6):
        lossy = [
            Plan(plan.algorithm, plan.rank, plan.world_size, plan.chunks, plan.rounds)
            for plan in plans("recursive_doubling", world_size)
        ]
        with pytest.raises(ValueError, match="^R4: .* encodes chunk 0 a second time"):
            comm.verify_plans(lossy)


def test_a_different_order_of_summing_is_rejected():
    """Rank 0 adds all four parts in a sequence, and the others add the sums of ranks 0 and 1, and of 2 and 3."""

    def steps(send=(), fold=()):
        return [Step("send_partial", peer, (0, 1)) for peer in send] + [
            Step("recv_reduce", peer, (0, 1)) for peer in fold
        ]

    rounds = [
        [steps([1], [1, 2, 3]), []],
        [steps([0], [0]), steps([2, 3], [2])],
        [steps([0, 3], [3]), steps([1], [1])],
        [steps([0, 2], [2]), steps([], [1])],
    ]
    with pytest.raises(ValueError, match="^R3: at the end ranks 0 and 1 hold different bits"):
        comm.verify_plans([Plan("by hand", rank, 4, 1, mine, True) for rank, mine in enumerate(rounds)])


def test_final_bytes_are_encoded_and_received_once():
    def again(rank):
        peers = [peer for peer in range(4) if peer != rank]
        steps = [Step("send_final", peer, (rank, rank + 1)) for peer in peers]
        steps += [Step("recv_final", peer, (peer, peer + 1)) for peer in peers]
        return lambda rounds: rounds.append(steps)

    with pytest.raises(ValueError, match="^R3: .* which it holds as final already"):
        comm.verify_plans(plans("direct", edits={rank: again(rank) for rank in range(4)}))
    with pytest.raises(ValueError, match="^R3: .* which is final already"):
        comm.verify_plans(plans("direct", edits={1: lambda rounds: rounds.append([Step("finalize", -1, (1, 2))])}))


def test_a_part_that_is_overwritten_is_rejected():
    chunk = (0, 1)
    lost = [
        Plan(
            "lost",
            0,
            3,
            1,
            [[Step("send_partial", 1, chunk), Step("send_partial", 2, chunk)], [Step("recv_final", 1, chunk)]],
        ),
        Plan(
            "lost",
            1,
            3,
            1,
            [
                [Step("recv_reduce", 0, chunk), Step("recv_reduce", 2, chunk)],
                [Step("finalize", -1, chunk), Step("send_final", 0, chunk), Step("send_final", 2, chunk)],
            ],
        ),
        Plan(
            "lost",
            2,
            3,
            1,
            [[Step("send_partial", 1, chunk), Step("recv_reduce", 0, chunk)], [Step("recv_final", 1, chunk)]],
        ),
    ]
    with pytest.raises(ValueError, match="^R4: .* rank 2 overwrites chunk 0"):
        comm.verify_plans(lost)


def test_plans_of_given_steps_are_checked_and_drawn():
    with pytest.raises(ValueError, match="chunks: expected at least 1, got 0"):
        Plan("empty", 0, 1, 0, [])
    with pytest.raises(ValueError, match="rank: expected 0 to 0, got 1"):
        Plan("outside", 1, 1, 1, [])
    beyond = Plan('a "name"', 0, 1, 1, [[Step("finalize", -1, (-5, 100_000))]])
    assert "finalize -5-99999" in str(beyond)
    assert json.loads(beyond.to_json())["algorithm"] == 'a "name"'
    with pytest.raises(ValueError, match="^R1: "):
        comm.verify_plans([beyond])


@property_test(
    200,
    algorithm=st.sampled_from(comm.ALGORITHMS),
    world_size=st.integers(2, 9),
    data=st.data(),
)
def test_any_dropped_step_is_detected(algorithm, world_size, data):
    rank = data.draw(st.integers(0, world_size - 1))
    plan = comm.plan(algorithm, rank, world_size)
    round_ = data.draw(st.sampled_from([index for index, steps in enumerate(plan.rounds) if steps]))
    index = data.draw(st.integers(0, len(plan.rounds[round_]) - 1))
    with pytest.raises(ValueError, match=r"^R[1-4]: "):
        comm.verify_plans(plans(algorithm, world_size, {rank: drop(round_, index)}))


def test_a_plan_is_drawn_and_listed():
    plan = comm.plan("ring", 1, 4)
    drawn = str(plan)
    assert "ring, rank 1 of 4: 6 rounds over 4 chunks" in drawn
    assert "send 1 to 2, fold 0 from 0" in drawn
    assert len(drawn.splitlines()) == 2 + 6 + 1

    written = json.loads(plan.to_json())
    steps = [[Step(s["op"], s["peer"], tuple(s["chunks"])) for s in steps] for steps in written["rounds"]]
    assert Plan(**{**written, "rounds": steps}) == plan
    assert str(comm.plan("direct", 0, 100)).count("\n") == 3  # too wide to draw, so it is only described in words


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("rign", 0, 4), "algorithm: expected one of ring, tree.*, got 'rign'"),
        (("ring", 4, 4), "rank: expected 0 to 3, got 4"),
        (("ring", 0, 0), "world_size: expected at least 1, got 0"),
    ],
)
def test_errors_name_the_wrong_argument(arguments, match):
    with pytest.raises(ValueError, match=match):
        comm.plan(*arguments)


def test_plans_of_different_worlds_do_not_mix():
    with pytest.raises(ValueError, match=r"plans\[1\]: expected rank 1 of 2"):
        comm.verify_plans([comm.plan("ring", 0, 2), comm.plan("ring", 1, 3)])
    with pytest.raises(ValueError, match="op: expected one of send_partial"):
        Step("send", 0, (0, 1))
