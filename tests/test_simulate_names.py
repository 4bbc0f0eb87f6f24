"""Every policy that has a name: what it plans for small steps, and that it keeps what it says it keeps."""

from collections import Counter

import numpy as np
import pytest
import simulate_base as base

from libra_jax.policies import names, packed
from libra_jax.policies.base import changed
from libra_jax.simulate.step import simulate_step

ALL = (*names.POLICIES, *(f"{name}:{size}" for name in names.SIZED for size in (1, 2, 4)))


def setting():
    return base.setting_of(seq_len=64, dp=4, cp=2, micro_steps=2)


def steps(number=4, seed=0):
    rng = np.random.default_rng(seed)
    return [base.random_step(setting(), rng) for _ in range(number)]


@pytest.mark.parametrize("name", ALL)
def test_plans_use_the_runs_ranks_and_account_for_every_document(name):
    run = setting().run
    known, policy = names.known(name), names.policy(name)
    given, trained = Counter(), Counter()
    for sequences in steps():
        plan = policy.step(sequences, run)
        handed_in = Counter(length for sequence in sequences for length in sequence)
        given += handed_in
        trained += plan.documents
        assert given - trained == Counter(plan.waiting) and not trained - given
        told = changed(plan, sequences)
        if known.keeps:
            assert plan.documents == handed_in and not plan.waiting and not any(told)
        assert (told.left_out == told.from_others == 0) == (plan.documents == handed_in)
        left, came = handed_in - plan.documents, plan.documents - handed_in
        assert told[:2] == (left.total(), sum(n * count for n, count in left.items()))
        assert told[2:] == (came.total(), sum(n * count for n, count in came.items()))
        for groups in plan.micro_steps:
            assert 0 < sum(group.ranks for group in groups) <= run.ranks
            for group in groups:
                assert sum(group.documents) <= group.tokens * group.ranks
                assert (group.executor is None) != (group.parts is None)
                assert group.planning_seconds >= 0
        simulate_step(plan, setting())


@pytest.mark.parametrize("name", ALL)
def test_a_fresh_policy_plans_the_same(name):
    """Names make policies anew, so that what one run holds back is not in the next."""
    sequences = steps(1)[0]
    first = names.policy(name).step(sequences, setting().run)
    second = names.policy(name).step(sequences, setting().run)
    assert first.waiting == second.waiting
    assert [[g.sequences for g in groups] for groups in first.micro_steps] == [
        [g.sequences for g in groups] for groups in second.micro_steps
    ]


@pytest.mark.parametrize("name", ALL)
def test_sequences_of_a_pool(name):
    size = names.pool_size(name, 4)
    plan = names.policy(name).step(steps(1)[0], setting().run)
    assert {len(group.sequences) for groups in plan.micro_steps for group in groups} == {size}
    assert names.known(name).pools == (size > 1 or name.startswith("libra"))


@pytest.mark.parametrize("name", ALL)
def test_what_is_said_of_it(name):
    known = names.known(name)
    assert known.about and known.source and known.limits


def test_what_holds_documents_back_says_so():
    """Names with "-delay" are those whose queues fill before steps are priced."""
    run = setting().run
    holding = set()
    for name in ALL:
        policy = names.policy(name)
        if any(policy.step(sequences, run).waiting for sequences in steps(6)):
            holding.add(name)
    assert {name for name in holding if "-delay" in name} == {name for name in ALL if "-delay" in name}
    assert all(not names.known(name).keeps for name in holding)


def test_planning_counts_the_placement(monkeypatch):
    """Time to deal sequences to pools is shared among a step's groups, beside each one's own."""
    from libra_jax.policies import packed

    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(packed.time, "process_time", lambda: float(next(clock)))
    groups = names.policy("libra:2").step(steps(1)[0], setting().run).micro_steps
    assert [group.planning_seconds for each in groups for group in each] == [10 + 10 / 4] * 4


def test_names_that_there_are_not():
    for name, meant in {"libr": "libra", "zig-zag": "zigzag", "dynamic_cp": "dynamic-cp"}.items():
        with pytest.raises(
            ValueError, match=rf"no policy is called '{name}'\. Was {meant}.* meant\? There are ulysses"
        ):
            names.known(name)
    for name in ("libra:", "libra:x", "libra:-1", "ulysses:2", ""):
        with pytest.raises(ValueError, match="no policy is called"):
            names.policy(name)
    assert names.pool_size("libra", 16) == 8 and names.pool_size("distca", 16) == 16


@pytest.mark.parametrize(("dp", "cp"), [(3, 1), (2, 2), (3, 4), (1, 6), (5, 3), (4, 16)])
def test_a_global_pools_servers_go_into_ranks_evenly(dp, cp):
    """Nodes of 8 where they go into the pool; fewer ranks to a server where they do not."""
    setting = base.setting_of(seq_len=8 * 12 * 16, dp=dp, cp=cp, micro_steps=1)
    plan = names.policy("distca").step([[setting.run.seq_len]] + [[1]] * (dp - 1), setting.run)
    ((group,),) = plan.micro_steps
    assert group.ranks == dp * cp
    assert len(np.unique(group.executor)) > (1 if dp * cp > 1 else 0)


def test_libra_is_told_the_runs_network(monkeypatch):
    """As `plan_pool` is, so that what crosses nodes is dear where their wires are slow."""
    seen, real = [], packed.pooled
    monkeypatch.setattr(packed, "pooled", lambda *args, **named: seen.append(named["links"]) or real(*args, **named))
    run = setting().run
    names.policy("libra:2").step(steps(1)[0], run)
    assert seen == [run.links] * 4
