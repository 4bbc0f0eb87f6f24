"""Seconds and bytes of a group's attention, by hand; what mappings and oversubscription do; kernels against curves."""

import dataclasses

import numpy as np
import pytest
import simulate_base as base

from libra_jax import CostModel, Links
from libra_jax.assignments import at_home
from libra_jax.policies.magi import Magi
from libra_jax.policies.packed import ROOMY, Pools, Sharded, disaggregated, libra, plain_context_parallel, ulysses
from libra_jax.simulate.attention import Network, group_seconds, local_share
from libra_jax.simulate.constants import CURVES, KERNELS, constants, fitted, kernel
from libra_jax.simulate.study import outcome, outcomes

# One document of 32 tokens in blocks of 4, one head of 8, two ranks; a token's keys and values are 2 * 8 * 2 = 32 B.


def group_of(policy, setting, sequences=([32],)):
    return policy.step([list(each) for each in sequences], setting.run).micro_steps[0][0]


def priced(policy, setting=None, sequences=([32],), products=(0.0, 0.0)):
    setting = setting or base.setting_of()
    return group_seconds(group_of(policy, setting, sequences), setting.cost, setting.network, products)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


# Zigzag: rank 0 has tokens 0-7 and 24-31, whose blocks visit 1 + 2 and 7 + 8 pages; rank 1 has 8-23: 3 + 4 + 5 + 6.
# Both: 18 pages, 4 blocks. Forward 18 + 0.4 + 10 ms, backward 36 + 1.2 + 20 ms.
KERNELS_MS = (28.4, 57.2)


def test_all_gather_by_hand():
    # Each gets the other's 16 tokens, 512 B: 100 ms and 10 ms of latency. Backward twice: there, and gradients back.
    found = priced(Sharded("sequence"))
    close(found.kernels, np.array([KERNELS_MS] * 2).T * 1e-3)
    close(found.attention, ((110 + 28.4) * 1e-3, (220 + 57.2) * 1e-3))
    close(found.sent, [3 * 512] * 2)
    close(found.received, [3 * 512] * 2)
    assert found.across == 0
    # 32 * 33 / 2 = 528 pairs are 33 pages of 16, half of them for each rank.
    close(found.pure, (16.5e-3, 33e-3))
    close(found.even, found.slowest_kernel)


def test_all_gather_across_nodes_by_hand():
    # A rank a node: 512 B at 512 B/s, and 20 ms.
    found = priced(Sharded("sequence"), base.setting_of(wires={**base.WIRES, "ranks_per_node": 1}))
    close(found.attention, (1.02 + 0.0284, 2.04 + 0.0572))
    assert found.across == 3 * 512


def test_a_nodes_ports_share_what_an_all_gather_brings_in():
    # 4 ranks on 2 nodes, 8 tokens each: a rank gets 24 * 32 = 768 B, at 1024 B/s through two ports (5120 inside).
    setting = base.setting_of(cp=4, wires={**base.WIRES, "ranks_per_node": 2})
    found = priced(Sharded("sequence"), setting)
    close(found.attention[0] - found.slowest_kernel[0], 768 / 1024 + 0.02)
    assert found.across == 3 * 768 / 2


def test_ring_by_hand():
    # One of two steps runs beside the exchange: half the kernel hides.
    found = priced(Sharded("sequence", exchange="ring"))
    close(found.attention, ((28.4 + 110 - 14.2) * 1e-3, (57.2 + 220 - 28.6) * 1e-3))
    fast = priced(Sharded("sequence", exchange="ring"), base.setting_of(wires={**base.WIRES, "inside": 512e3}))
    close(fast.attention, ((28.4) * 1e-3, 57.2e-3))  # 1 ms and 10 ms, and twice that, are less than 14.2 and 28.6


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "needed"])
def test_no_more_crosses_nodes_than_is_moved(exchange):
    """Ranks hold 3 and 2 of 5 tokens, 32 B each: what one is sent forward it gives back as gradients."""
    setting = base.setting_of(wires={**base.WIRES, "ranks_per_node": 1})
    found = priced(Sharded("document", exchange=exchange), setting, ([5],))
    assert found.across == max(found.sent.max(), found.received.max())


def test_a_ring_goes_through_one_port_of_a_node():
    # Rank 1 passes all that it got on to rank 2, on the other node: 24 tokens, 768 B, at 512 B/s; a quarter of the
    # kernel, 4 + 4 blocks of 1 + 2 + ... + 8 pages in all, does not hide.
    setting = base.setting_of(cp=4, wires={**base.WIRES, "ranks_per_node": 2})
    found = priced(Sharded("sequence", exchange="ring"), setting)
    kernel = 9e-3 + 2e-4 + 1e-2
    close(found.slowest_kernel[0], kernel)
    close(found.attention[0], kernel / 4 + 768 / 512 + 0.02)
    assert found.across == 3 * 768


def zigzag_needed(setting):
    group = dataclasses.replace(group_of(Sharded("sequence"), setting), exchange="needed")
    return group_seconds(group, setting.cost, setting.network)


def test_what_is_needed_by_hand():
    # Rank 0 needs tokens 8-23 of rank 1, 512 B; rank 1 needs 0-7 of rank 0, 256 B: both have 512 B to move, 110 ms.
    # Of 264 pairs a rank has 136 at home: rank 0's 36 and 8 * 8 + 36, rank 1's 16 * 17 / 2.
    setting = base.setting_of()
    group = group_of(Sharded("sequence"), setting)
    assert group.parts is not None
    close(local_share(group.parts, 2), [136 / 264] * 2)
    found = zigzag_needed(setting)
    rest = 128 / 264
    close(found.attention, (0.11 + 0.0284 * rest, 0.11 + 0.0572 * rest + 0.11))
    # Keys and values twice, their gradients the other way.
    close(found.sent, [2 * 256 + 512, 2 * 512 + 256])
    close(found.received, [2 * 512 + 256, 2 * 256 + 512])


def test_what_is_needed_from_other_nodes_is_no_more_than_what_is_moved():
    found = zigzag_needed(base.setting_of(wires={**base.WIRES, "ranks_per_node": 1}))
    assert found.across == max(found.sent.max(), found.received.max()) == 1280


def test_what_is_needed_from_another_pod_takes_longer():
    """Magi's exchange pays for oversubscription as all others do."""
    wires = {**base.WIRES, "ranks_per_node": 1}
    near = zigzag_needed(base.setting_of(wires=wires))
    far = zigzag_needed(base.setting_of(wires=wires, pod_nodes=1, oversubscription=3))
    close(far.attention[0] - near.attention[0], 2 * 512 / 512)
    close(far.attention[1] - near.attention[1], 4 * 512 / 512)


def test_a_plan_by_hand():
    # At home rank 0 has pages 1 + 2 + 3 + 4, rank 1 5 + 6 + 7 + 8. It needs the first 4 pages, 512 B: 110 ms before all
    # work. No block travels, so what comes home after it is a latency forward, and 512 B of gradients backward.
    found = priced(Pools(at_home, waves=1, room=ROOMY))
    close(found.kernels, np.array([[20.4, 36.4], [41.2, 73.2]]) * 1e-3)
    close(found.attention, ((110 + 36.4 + 10) * 1e-3, (110 + 73.2 + 110) * 1e-3))
    close(found.sent, [2 * 512, 512])
    close(found.received, [512, 2 * 512])


def test_ping_pong_by_hand():
    # 512 B each way and two latencies, 120 ms, beside a kernel and the products of 16 tokens: what is left of them
    # beyond the products is attention's.
    setting = base.setting_of()
    group = dataclasses.replace(group_of(Pools(at_home, waves=1, room=ROOMY), setting), exchange="ping_pong")
    found = group_seconds(group, setting.cost, setting.network, (1e-3, 2e-3))
    close(found.attention, ((120 - 16) * 1e-3, (120 - 32) * 1e-3))
    hidden = group_seconds(group, setting.cost, setting.network, (8e-3, 8e-3))
    close(hidden.attention, (36.4e-3, 73.2e-3))


def test_a_rank_alone_exchanges_nothing():
    for policy in (Sharded("sequence"), Sharded("document", exchange="ring"), Magi(), ulysses(), disaggregated()):
        found = priced(policy, base.setting_of(cp=1))
        close(found.attention, found.slowest_kernel)
        assert found.sent.max() == found.received.max() == found.across == 0


def test_a_sequence_that_is_all_padding_costs_its_launches():
    for policy in (Sharded("sequence"), Sharded("document"), Sharded("document", exchange="ring"), Magi(), ulysses()):
        found = priced(policy, sequences=([],))
        close(found.kernels, [[1e-2] * 2, [2e-2] * 2])
        assert np.isfinite(found.attention).all() and found.pure == (0, 0)


# ------------------------------------------------------------------------------------------------------ where ranks lie


WIDE = {"seq_len": 128, "dp": 4, "cp": 4, "wires": {**base.WIRES, "ranks_per_node": 4}}


@pytest.mark.parametrize("policy", [ulysses(), Sharded("sequence"), Sharded("document", exchange="ring"), Magi()])
def test_strided_ranks_of_a_sequence_are_on_nodes_of_their_own(policy):
    """Packed, a sequence of 4 ranks is in one node of 4; with data parallelism innermost it is on 4."""
    packed = priced(policy, base.setting_of(**WIDE), [[128]] * 4)
    strided = priced(policy, base.setting_of(**WIDE, strided=True), [[128]] * 4)
    assert packed.across == 0
    assert strided.across > 0
    assert min(strided.attention) > max(packed.attention)
    np.testing.assert_array_equal(np.sort(strided.kernels), np.sort(packed.kernels))


def test_strided_pools_keep_the_same_part_of_each_sequence_in_a_node():
    """Pool of 4 sequences, nodes of 4: Ulysses' exchange leaves the node, what goes between the sequences' first ranks
    does not."""
    setting = base.setting_of(**WIDE)
    far = dataclasses.replace(setting, network=dataclasses.replace(setting.network, strided=True))
    sequences = [[128]] * 4
    one_group = dataclasses.replace(ulysses(), pool_size=4)
    packed, strided = priced(one_group, setting, sequences), priced(one_group, far, sequences)
    assert packed.across == 0
    close(strided.across, max(strided.sent.max(), strided.received.max()))

    def to_the_next_sequence(first_page, num_pages, spec, speed):
        home = at_home(first_page, num_pages, spec, speed)
        return np.roll(home, 1, axis=0)

    swapped = Pools(to_the_next_sequence, pool_size=4, waves=1, room=ROOMY)
    packed = priced(swapped, setting, [[1] * 128] * 4)
    strided = priced(swapped, far, [[1] * 128] * 4)
    assert strided.across == 0
    close(packed.across, max(packed.sent.max(), packed.received.max()))


def test_strided_pools_have_no_relays():
    """Relays serve ranks that share a node: `outcome` leaves them out, a plan that has them is refused."""
    setting = base.setting_of(seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 4})
    far = dataclasses.replace(setting, network=dataclasses.replace(setting.network, strided=True))
    sequences = base.random_step(setting, np.random.default_rng(1))
    group = group_of(libra(4), setting, sequences)
    assert group.spec.ranks_per_node == 4
    with pytest.raises(ValueError, match=r"ranks_per_node \(4\) must be None where neighbours are on different nodes"):
        group_seconds(group, far.cost, far.network)
    one_level = outcome("libra", libra(4, relays=False), [sequences], far)
    assert outcome("libra", libra(4), [sequences], far).steps[0].step == one_level.steps[0].step


@pytest.mark.parametrize("policy", [libra(4), libra(2, relays=False), ulysses(), Magi(), disaggregated()])
def test_steps_planned_once_cost_in_every_network_what_they_cost_alone(policy):
    setting = base.setting_of(seq_len=128, dp=4, cp=4, micro_steps=2, wires={**base.WIRES, "ranks_per_node": 4})
    changes = ({}, {"pod_nodes": 1, "oversubscription": 4.0}, {"pod_nodes": 2, "oversubscription": 8.0})
    networks = [dataclasses.replace(setting.network, **change) for change in changes]
    settings = [dataclasses.replace(setting, network=network) for network in networks]
    rng = np.random.default_rng(3)
    batches = [base.random_step(setting, rng) for _ in range(3)]
    together = outcomes("all", policy, batches, settings, warm_up=1)
    for found, each in zip(together, settings, strict=True):
        alone = outcome("one", policy, batches, each, warm_up=1)
        for a, b in zip(found.steps, alone.steps, strict=True):
            assert dataclasses.replace(a, planning=0) == dataclasses.replace(b, planning=0)
        assert (found.changed, found.documents) == (alone.changed, alone.documents)
        assert found.documents == sum(len(sequence) for sequences in batches[1:] for sequence in sequences)
    with pytest.raises(ValueError, match="nothing to price"):
        outcomes("all", policy, batches, settings, warm_up=3)
    with pytest.raises(ValueError, match="one run"):
        outcomes("all", policy, batches, [setting, base.setting_of(seq_len=128, dp=4, cp=4)])


def test_settings_of_one_plan_are_all_strided_or_none():
    setting = base.setting_of(seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 4})
    far = dataclasses.replace(setting, network=dataclasses.replace(setting.network, strided=True))
    batches = [base.random_step(setting, np.random.default_rng(1))]
    with pytest.raises(ValueError, match="must all be strided, or none"):
        outcomes("libra", libra(4), batches, [setting, far])
    assert len(outcomes("libra", libra(4, relays=False), batches, [setting, far])) == 2


@pytest.mark.parametrize("documents", [[1] * 32, [7] * 4 + [1], [17, 3, 3]])
def test_ranks_have_the_products_of_the_tokens_that_they_hold(documents):
    """Per document, rank 0 gets what is too short for all."""
    setting = base.setting_of(seq_len=32, cp=8)
    group = group_of(Sharded("document"), setting, [documents])
    held = np.zeros(8, int)
    for rank, begin, end in zip(group.parts.rank, group.parts.begin, group.parts.end, strict=True):
        held[rank] += end - begin
    assert group.tokens == max(held.max(), 4)


@pytest.mark.parametrize("waves", [2, 6])
def test_what_planning_worked_out_is_what_the_plan_makes_ranks_send(waves):
    setting = base.setting_of(seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 4})
    group = group_of(
        libra(4, waves=waves, relays=waves > 2), setting, base.random_step(setting, np.random.default_rng(2))
    )
    assert group.counts is not None
    alone = group_seconds(dataclasses.replace(group, counts=None), setting.cost, setting.network)
    known = group_seconds(group, setting.cost, setting.network)
    assert known.attention == alone.attention and known.across == alone.across
    for name in ("kernels", "sent", "received"):
        np.testing.assert_array_equal(getattr(known, name), getattr(alone, name))


@pytest.mark.parametrize("policy", [libra(4, relays=False), ulysses(), Sharded("sequence"), Magi(), disaggregated()])
def test_oversubscription_slows_only_what_leaves_a_pod(policy):
    rng = np.random.default_rng(0)
    setting = base.setting_of(seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 2})
    sequences = base.random_step(setting, rng)
    one_pod = base.setting_of(
        seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 2}, oversubscription=4, pod_nodes=8
    )
    small_pods = base.setting_of(
        seq_len=128, dp=4, cp=4, wires={**base.WIRES, "ranks_per_node": 2}, oversubscription=4, pod_nodes=1
    )
    usual, same, slow = (priced(policy, each, sequences) for each in (setting, one_pod, small_pods))
    assert same.attention == usual.attention
    assert slow.attention[0] > usual.attention[0] and slow.attention[1] > usual.attention[1]


def test_oversubscription_counts_where_the_last_bytes_are():
    """Rank 0 sends 8 blocks to rank 1, of its pod; rank 2 sends 3 to rank 0, of another. Four times slower beyond the
    pod, these take as long as 12: half as long again as the 8, and not four times as long."""

    def some(first_page, num_pages, spec, speed):
        executor = at_home(first_page, num_pages, spec, speed)
        executor[0] = 1
        executor[2, :, :3] = 0
        return executor

    wires = {**base.WIRES, "ranks_per_node": 1, "across_latency": 0.0}
    policy, sequences = Pools(some, pool_size=4, waves=1, room=ROOMY), [[1] * 32] * 4
    usual = priced(policy, base.setting_of(dp=4, cp=1, wires=wires), sequences)
    slow = priced(policy, base.setting_of(dp=4, cp=1, wires=wires, pod_nodes=2, oversubscription=4), sequences)
    exchange = [found.attention[0] - found.slowest_kernel[0] for found in (usual, slow)]
    close(exchange[1] / exchange[0], 1.5)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_ulysses_moves_what_bytes_are_compared_with(cp):
    """`StepResult.ulysses_bytes` is what Ulysses itself moves, but for the positions that go with a block: 1% here."""
    from libra_jax.simulate.step import simulate_step

    model = dataclasses.replace(base.MODEL, num_heads=16, num_kv_heads=8, head_dim=128)
    setting = base.setting_of(seq_len=4096, cp=cp, cost=CostModel(), model=model)
    found = simulate_step(ulysses().step([[4096]], setting.run), setting)
    assert found.busiest_bytes == pytest.approx(found.ulysses_bytes, rel=0.02)


# ------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("name", CURVES)
def test_fitted_kernels_have_the_published_speeds(name):
    """TFLOP/s of one document, counted as the publication does: half of all pairs forward, all of them backward."""
    curve, cost = CURVES[name], fitted(CURVES[name])
    for tokens, speed in curve.forward.items():
        n = tokens // 128
        flops = 4 * tokens**2 * 128 / 2
        assert flops / cost.forward(n * (n + 1) / 2, n) / 1e12 == pytest.approx(speed, rel=0.03)
    for tokens, speed in curve.backward.items():
        n = tokens // 128
        flops = 10 * tokens**2 * 128
        assert flops / cost.backward(n * n, n) / 1e12 == pytest.approx(speed, rel=0.03)


def test_tritons_kernel_has_the_published_speeds():
    cost = kernel("triton", constants("H100"))[0]
    for tokens, speed in {2048: 323, 4096: 353, 8192: 369, 16384: 378}.items():
        n = tokens // 128
        assert 2 * tokens**2 * 128 / cost.forward(n * (n + 1) / 2, n) / 1e12 == pytest.approx(speed, rel=0.03)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_another_gpu_say_that_they_are_scaled(name):
    usual, source = kernel(name, constants("H100"))
    other, scaled = kernel(name, constants("B200"))
    assert "scaled" not in source and "not measured" in scaled and source in scaled
    assert other.page_seconds == pytest.approx(usual.page_seconds * 989.5 / 2250)
    assert other.launch_seconds == usual.launch_seconds


def test_a_measured_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "cost.json"
    base.COST.save(path)
    cost, source = kernel(str(path), constants("B200"))
    assert cost == base.COST
    assert source == f"measured: {path}"


def test_a_network_without_strides_leaves_links_alone():
    spec = base.setting_of().run.spec(1)
    assert Network(Links(4)).links_of(spec) == Links(4)
    assert Network(Links(4), strided=True).links_of(spec).ranks_per_node == 1


def test_context_parallelism_by_waves_takes_no_longer_than_all_at_once():
    setting = base.setting_of(seq_len=128, cp=4)
    at_once = priced(Pools(at_home, waves=1, room=ROOMY), setting, ([128],))
    cheap = dataclasses.replace(setting, cost=dataclasses.replace(setting.cost, launch_seconds=0.0))
    assert priced(plain_context_parallel(), cheap, ([128],)).attention[0] < at_once.attention[0]
