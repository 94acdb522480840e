"""stratgrpo.py against numbers by hand, a loop oracle, the statements of the paper, and the known bugs of others."""

import ast
import doctest
import json
import math
import pathlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stratgrpo
from stratgrpo import (SMALL_STRATA, blended_advantages, group_advantages, kl_k3, pool_small_strata, ppo_clip_loss,
                       stratified_advantages, stratum_report)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def near(tensor, values, tolerance=1e-5):
    assert tensor.tolist() == pytest.approx(list(values), abs=tolerance)


# rewards, groups, strata of a batch: few groups and labels, so that singletons, constants and ties all turn up. rewards
# are multiples of 1/8, so that equal means equal and a spread is never a rounding error
rollout_lists = st.lists(st.tuples(st.integers(-9, 9), st.integers(-1, 2), st.integers(-1, 2)), min_size=1, max_size=20)
property_test = settings(max_examples=60, deadline=None)


def tensors(rows):
    rewards, groups, strata = zip(*rows)
    return f64(*rewards) / 8, torch.tensor(groups), torch.tensor(strata)


def oracle(rewards, keys, eps, ddof=0, singleton_keeps_reward=False):
    """the definition in plain Python, one rollout at a time. ddof 1 and singleton_keeps_reward: verl's grpo"""
    advantages = []
    for reward, key in zip(rewards, keys):
        peers = [other for other, other_key in zip(rewards, keys) if other_key == key]
        if len(peers) == 1:
            advantages.append(reward if singleton_keeps_reward else 0.0)
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - ddof))
        advantages.append(0.0 if max(peers) == min(peers) else (reward - mean) / (std + eps))
    return advantages


# ----------------------------------------------------------------------------------------------------------------------
# advantages: numbers


def test_group_advantages_by_hand():
    # mean .4, population variance .4 * .6 = .24
    advantages = group_advantages(f64(1, 0, 0, 1, 0), torch.zeros(5).long())
    near(advantages, [1.2247424, -0.8164949, -0.8164949, 1.2247424, -0.8164949], 1e-7)


def test_oracle_reproduces_verl():
    verl = oracle([1, 0, 0, 1, 0], "aaaaa", 1e-6, ddof=1)
    assert verl == pytest.approx([1.0954431, -0.7302954, -0.7302954, 1.0954431, -0.7302954], abs=1e-7)
    trl = oracle([1, 0, 0, 1, 0], "aaaaa", 1e-4, ddof=1)
    assert trl == pytest.approx([1.0952452, -0.7301634, -0.7301634, 1.0952452, -0.7301634], abs=1e-7)


def test_stratified_advantages_by_hand():
    rewards, group, strata = f64(1, 0, 0, 1, 1, 0, 1, 0), torch.zeros(8).long(), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    near(group_advantages(rewards, group), [1, -1, -1, 1, 1, -1, 1, -1])
    san = [1.41421, -0.70711, -0.70711, 0.70711, 0.70711, -1.41421, 1, -1]
    near(stratified_advantages(rewards, group, strata), san)
    blend = [0.6 * s + 0.4 * g for s, g in zip(san, [1, -1, -1, 1, 1, -1, 1, -1])]
    near(blended_advantages(rewards, group, strata, 0.6), blend)


def test_known_vectors_with_the_sample_std():
    # the vectors that verl's n - 1 gives; a stratum of n becomes them by the factor sqrt((n - 1) / n)
    rewards, group, strata = f64(1, 0, 0, 1, 1, 0, 1, 0), torch.zeros(8).long(), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    shrink = (f64(2, 2, 2, 2, 2, 2, 1, 1) / f64(3, 3, 3, 3, 3, 3, 2, 2)).sqrt()
    san = stratified_advantages(rewards, group, strata, 0.0) * shrink
    gn = group_advantages(rewards, group, 0.0) * math.sqrt(7 / 8)
    near(san, [1.1546985, -0.5773493, -0.5773493, 0.5773493, 0.5773493, -1.1546985, 0.7071058, -0.7071058], 3e-6)
    near(gn, [0.9354126 * sign for sign in (1, -1, -1, 1, 1, -1, 1, -1)], 3e-6)
    blend = [1.0669842, -0.7205746, -0.7205746, 0.7205746, 0.7205746, -1.0669842, 0.7984285, -0.7984285]
    near(0.6 * san + 0.4 * gn, blend, 3e-6)


def test_constant_and_lone_strata_by_hand():
    group = torch.zeros(5).long()
    assert stratified_advantages(f64(0, 0, 0, 1, 1), group, torch.tensor([0, 0, 0, 2, 2])).tolist() == [0.0] * 5
    near(group_advantages(f64(0, 0, 0, 1, 1), group), [-0.81650, -0.81650, -0.81650, 1.22474, 1.22474])
    mixed = stratified_advantages(f64(0, 1, 0, 1, 1), group, torch.tensor([0, 0, 1, 1, 3]))
    near(mixed, [-1, 1, -1, 1, 0])
    assert mixed[4] == 0.0  # exactly; verl would give the lone rollout its reward


@pytest.mark.parametrize("value", [0.1, 0.9, 1 / 3])
@pytest.mark.parametrize("size", [1, 5, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_give_exactly_zero(value, size, dtype):
    # a float32 mean of eight 0.1 is not 0.1, so (r - mean) / (std + 1e-8) is spurious: the test is max > min
    rewards, zeros = torch.full((size,), value, dtype=dtype), torch.zeros(size).long()
    for advantages in (
        group_advantages(rewards, zeros, 1e-8),
        stratified_advantages(rewards, zeros, zeros, 1e-8),
        stratified_advantages(rewards, zeros, zeros, 0.0),
        blended_advantages(rewards, zeros, zeros, 0.6, 1e-8),
    ):
        assert advantages.dtype == dtype
        assert (advantages == 0).all()


def test_same_label_in_two_groups_is_two_strata():
    rewards, groups, strata = f64(0, 1, 10, 30), torch.tensor([7, 7, -3, -3]), torch.tensor([2, 2, 2, 2])
    near(stratified_advantages(rewards, groups, strata), [-1, 1, -1, 1])
    # labels that a careless `group * width + label` would merge: (0, 5) and (1, 0) with width 5
    near(stratified_advantages(rewards, torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 0, 0])), [-1, 1, -1, 1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_labels(dtype):
    labels = torch.tensor([0, 0, 250, 250] if dtype == torch.uint8 else [0, 0, -9, -9], dtype=dtype)
    near(stratified_advantages(f64(0, 1, 0, 1), labels, labels), [-1, 1, -1, 1])


def test_labels_at_the_ends_of_int64():
    ends = torch.tensor([-(2**63), -(2**63), 2**63 - 1, 2**63 - 1])
    near(stratified_advantages(f64(0, 1, 0, 1), ends, ends), [-1, 1, -1, 1])


def test_dtype_of_rewards_is_kept():
    zeros = torch.zeros(2).long()
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([0, 1], dtype=dtype)
        assert group_advantages(rewards, zeros).dtype == dtype
        assert blended_advantages(rewards, zeros, zeros, 0.6).dtype == dtype


def test_a_million_rollouts():
    generator = torch.Generator().manual_seed(0)
    n = 1_000_000
    groups = torch.randint(0, n // 8, (n,), generator=generator)
    strata = torch.randint(0, 4, (n,), generator=generator)
    rewards = torch.randint(0, 2, (n,), generator=generator).float()
    advantages = stratified_advantages(rewards, groups, strata)
    assert advantages.shape == (n,) and advantages.isfinite().all()
    some = groups < 20  # whole groups, so the oracle sees all peers
    keys = list(zip(groups[some].tolist(), strata[some].tolist()))
    near(advantages[some], oracle(rewards[some].tolist(), keys, 1e-6))
    assert stratum_report(rewards, groups, strata)["strata"].keys() == {"0", "1", "2", "3"}


# ----------------------------------------------------------------------------------------------------------------------
# advantages: oracle and statements of the paper, as properties


@property_test
@given(rollout_lists, st.sampled_from([0.0, 1e-6, 1e-2]), st.floats(0, 1))
def test_loop_oracle(rows, eps, alpha):
    rewards, groups, strata = tensors(rows)
    gn = oracle(rewards.tolist(), groups.tolist(), eps)
    san = oracle(rewards.tolist(), list(zip(groups.tolist(), strata.tolist())), eps)
    near(group_advantages(rewards, groups, eps), gn, 1e-9)
    near(stratified_advantages(rewards, groups, strata, eps), san, 1e-9)
    blend = [alpha * s + (1 - alpha) * g for s, g in zip(san, gn)]
    near(blended_advantages(rewards, groups, strata, alpha, eps), blend, 1e-9)


@property_test
@given(rollout_lists)
def test_verl_grpo_on_index_uid_and_stratum(rows):
    # SAN is verl's grpo with index = uid|k, up to n - 1 (a factor, at eps 0) and the raw reward of a lone rollout
    rewards, groups, strata = tensors(rows)
    index = [f"{uid}|{k}" for uid, k in zip(groups.tolist(), strata.tolist())]
    verl = oracle(rewards.tolist(), index, 0.0, ddof=1, singleton_keeps_reward=True)
    sizes = [index.count(key) for key in index]
    ours = [0.0 if n == 1 else value * math.sqrt(n / (n - 1)) for value, n in zip(verl, sizes)]
    near(stratified_advantages(rewards, groups, strata, 0.0), ours, 1e-9)


@property_test
@given(rollout_lists)
def test_stratified_advantages_are_unbiased_with_unit_variance(rows):
    rewards, groups, strata = tensors(rows)
    advantages = stratified_advantages(rewards, groups, strata, 0.0)
    for group in groups.unique():
        in_group = groups == group
        with_spread = 0
        for label in strata[in_group].unique():
            cell = in_group & (strata == label)
            assert abs(advantages[cell].mean()) < 1e-9
            has_spread = len(set(rewards[cell].tolist())) > 1
            assert advantages[cell].var(correction=0).item() == pytest.approx(float(has_spread), abs=1e-9)
            with_spread += has_spread * int(cell.sum())
        # over the group: mean 0, and variance = share of rollouts whose stratum has spread (1 when all have)
        assert abs(advantages[in_group].mean()) < 1e-9
        share = with_spread / int(in_group.sum())
        assert advantages[in_group].var(correction=0).item() == pytest.approx(share, abs=1e-9)


@property_test
@given(rollout_lists, st.floats(0.01, 100), st.floats(-100, 100))
def test_invariance_to_positive_affine_rewards(rows, scale, shift):
    rewards, groups, strata = tensors(rows)
    # constant cells stay bit-equal under one affine map, so the exact zeros stay exact, too
    for alpha in (0.0, 0.6, 1.0):
        before = blended_advantages(rewards, groups, strata, alpha, 0.0)
        after = blended_advantages(scale * rewards + shift, groups, strata, alpha, 0.0)
        near(after, before.tolist(), 1e-6)
    # and a negative scale turns every sign, so the test above is not passed by a constant
    turned = stratified_advantages(-scale * rewards, groups, strata, 0.0)
    near(-turned, stratified_advantages(rewards, groups, strata, 0.0).tolist(), 1e-6)


@property_test
@given(rollout_lists, st.randoms(use_true_random=False))
def test_permutation_equivariance(rows, random):
    rewards, groups, strata = tensors(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = blended_advantages(rewards, groups, strata, 0.6)
    permuted = blended_advantages(rewards[order], groups[order], strata[order], 0.6)
    near(permuted, straight[order].tolist(), 1e-9)


@property_test
@given(rollout_lists)
def test_one_stratum_is_grpo_exactly_and_alpha_ends(rows):
    rewards, groups, strata = tensors(rows)
    one = torch.full_like(strata, 3)
    assert torch.equal(stratified_advantages(rewards, groups, one), group_advantages(rewards, groups))
    assert torch.equal(blended_advantages(rewards, groups, strata, 0.0), group_advantages(rewards, groups))
    assert torch.equal(blended_advantages(rewards, groups, strata, 1.0), stratified_advantages(rewards, groups, strata))


@property_test
@given(rollout_lists)
def test_proposition_1_and_theorem_1(rows):
    rewards, groups, strata = tensors(rows)
    report = stratum_report(rewards, groups, strata)
    plain, keys = rewards.tolist(), list(zip(groups.tolist(), strata.tolist()))

    def mean_of(condition):
        chosen = [reward for reward, key in zip(plain, keys) if condition(key)]
        return sum(chosen) / len(chosen)

    group_mean = [mean_of(lambda other: other[0] == key[0]) for key in keys]
    stratum_mean = [mean_of(lambda other: other == key) for key in keys]
    centred_group = [reward - mean for reward, mean in zip(plain, group_mean)]
    centred_stratum = [reward - mean for reward, mean in zip(plain, stratum_mean)]
    n = len(plain)
    for label in sorted(set(strata.tolist())):  # Proposition 1, averaged over the rollouts of a label
        members = [i for i, key in enumerate(keys) if key[1] == label]
        bias = sum(centred_group[i] - centred_stratum[i] for i in members) / len(members)
        assert report["strata"][str(label)]["bias"] == pytest.approx(bias, abs=1e-9)
    first_of = {key: keys.index(key) for key in keys}  # Theorem 1, a sum over strata
    between = sum(keys.count(key) * (stratum_mean[i] - group_mean[i]) ** 2 for key, i in first_of.items())
    assert report["var_group"] == pytest.approx(sum(a * a for a in centred_group) / n, abs=1e-9)
    assert report["var_stratum"] == pytest.approx(sum(a * a for a in centred_stratum) / n, abs=1e-9)
    assert report["gap"] == pytest.approx(between / n, abs=1e-9)
    assert report["var_group"] - report["var_stratum"] == pytest.approx(report["gap"], abs=1e-9)
    assert report["gap"] >= 0
    shares = [row["share"] for row in report["strata"].values()]
    assert sum(shares) == pytest.approx(1.0)
    assert report["dead_share"] == sum(a == 0 for a in stratified_advantages(rewards, groups, strata).tolist()) / n
    assert report["singleton_share"] == sum(keys.count(key) == 1 for key in keys) / n


@property_test
@given(rollout_lists)
def test_theorem_1_is_an_equality_exactly_when_the_strata_of_every_group_have_one_mean(rows):
    rewards, groups, strata = tensors(rows)
    report = stratum_report(rewards, groups, strata)
    means = {}
    for reward, group, stratum in zip(rewards.tolist(), groups.tolist(), strata.tolist()):
        means.setdefault(group, {}).setdefault(stratum, []).append(reward)
    equal = all(max(values) - min(values) < 1e-12
                for values in ([sum(c) / len(c) for c in cells.values()] for cells in means.values()))
    assert (report["gap"] < 1e-20) == equal and report["theorem1_error"] < 1e-9
    # the pointwise Proposition 1: the two centred advantages differ by one number for a whole stratum
    centred = stratified_advantages(rewards, groups, strata, min_stratum=10**6, small="center")
    bias = rewards - torch.tensor([sum(sum(means[g].values(), [])) / sum(map(len, means[g].values()))
                                   for g in groups.tolist()]).double() - centred
    for key in set(zip(groups.tolist(), strata.tolist())):
        members = bias[(groups == key[0]) & (strata == key[1])]
        assert (members - members[0]).abs().max() < 1e-12


def test_dead_strata_are_where_the_claims_fail():
    """Every stratum agrees with itself: SAN is 0 everywhere and its variance 0, not 1, while GRPO's is 1."""
    rewards, groups, strata = f64(0, 0, 1, 1), torch.zeros(4).long(), torch.tensor([0, 0, 1, 1])
    assert stratified_advantages(rewards, groups, strata).tolist() == [0] * 4
    near(group_advantages(rewards, groups), [-1, -1, 1, 1])
    report = stratum_report(rewards, groups, strata)
    assert report["dead_share"] == 1 and report["var_stratum"] == 0 and report["gap"] == report["var_group"] == 0.25


def test_small_strata_by_hand():
    # stratum 0: three rollouts 1 0 0; stratum 1: two, 1 0; stratum 4: one, 1
    rewards, groups, strata = f64(1, 0, 0, 1, 0, 1), torch.zeros(6).long(), torch.tensor([0, 0, 0, 1, 1, 4])
    root = math.sqrt(2)

    def san(min_stratum, small, **options):
        return stratified_advantages(rewards, groups, strata, 1e-9, min_stratum=min_stratum, small=small, **options)

    near(san(2, "zero"), [root, -root / 2, -root / 2, 1, -1, 0])
    near(san(3, "zero"), [root, -root / 2, -root / 2, 0, 0, 0])
    near(san(3, "center"), [root, -root / 2, -root / 2, 0.5, -0.5, 0])
    near(san(2, "center"), [root, -root / 2, -root / 2, 1, -1, 0])
    # the lone rollout joins stratum 1: 1 0 1
    near(san(2, "pool"), [root, -root / 2, -root / 2, root / 2, -root, root / 2])
    # the group: mean 1/2, s 1/2. n = 2, tau 2: w = 1/2, mean 1/2, s 1/2. n = 1: w = 1/3, mean 2/3, s 1/3
    near(san(3, "shrink", tau=2.0), [root, -root / 2, -root / 2, 1, -1, 1])
    # all three strata small. n = 3, tau 3: w = 1/2, mean (1/3 + 1/2) / 2 = 5/12, s (sqrt 2 / 3 + 1/2) / 2
    s = (root / 3 + 0.5) / 2
    near(san(9, "shrink", tau=3.0)[:3], [(7 / 12) / s, (-5 / 12) / s, (-5 / 12) / s])
    near(blended_advantages(rewards, groups, strata, 0.5, 1e-9, min_stratum=3, small="zero"),
         [(root + 1) / 2, (-root / 2 - 1) / 2, (-root / 2 - 1) / 2, 0.5, -0.5, 0.5])


def test_pooling_by_hand():
    def pooled(strata, least, groups=None):
        strata = torch.tensor(strata)
        return pool_small_strata(torch.zeros_like(strata) if groups is None else torch.tensor(groups), strata, least)

    assert pooled([0, 0, 1, 3, 3], 2).tolist() == [0, 0, 0, 3, 3]       # 1 is nearer to 0 than to 3
    assert pooled([0, 0, 1, 2, 2], 2).tolist() == [0, 0, 0, 2, 2]       # equally near: the lower
    assert pooled([0, 1, 2, 7, 7], 2).tolist() == [1, 1, 1, 7, 7]       # 0 joins 1, which is enough; 2 joins 1
    assert pooled([0, 1, 2], 9).tolist() == [1, 1, 1]                   # a group too small altogether
    assert pooled([0, 0, 1, 0, 1, 1], 2, [0, 0, 0, 1, 1, 1]).tolist() == [0, 0, 0, 1, 1, 1]  # within a group only
    assert pooled([0, 5, 9], 1).tolist() == [0, 5, 9]


@property_test
@given(rollout_lists, st.integers(1, 6), st.sampled_from(SMALL_STRATA))
def test_small_strata_properties(rows, least, small):
    rewards, groups, strata = tensors(rows)
    plain = stratified_advantages(rewards, groups, strata)
    ruled = stratified_advantages(rewards, groups, strata, min_stratum=least, small=small)
    keys = list(zip(groups.tolist(), strata.tolist()))
    big = torch.tensor([keys.count(key) >= least for key in keys])
    if small == "pool":
        merged = pool_small_strata(groups, strata, least)
        assert torch.equal(ruled, stratified_advantages(rewards, groups, merged))
        for group in set(groups.tolist()):  # whole strata are merged, until all are big enough or one is left
            sizes = merged[groups == group].unique(return_counts=True)[1]
            assert sizes.min() >= least or len(sizes) == 1
        for key in set(keys):
            assert len(merged[(groups == key[0]) & (strata == key[1])].unique()) == 1
    else:
        assert torch.equal(ruled[big], plain[big])
    if small == "zero":
        assert (ruled[~big] == 0).all()
    if small == "shrink":
        far = stratified_advantages(rewards, groups, strata, min_stratum=99, small="shrink", tau=1e12)
        near(far, group_advantages(rewards, groups).tolist())  # shrunk all the way, it is GRPO
        none = stratified_advantages(rewards, groups, strata, min_stratum=99, small="shrink", tau=0.0)
        near(none[plain != 0], plain[plain != 0].tolist())     # not shrunk at all, SAN


@property_test
@given(rollout_lists)
def test_sample_std_is_the_population_one_times_a_factor(rows):
    rewards, groups, strata = tensors(rows)
    keys = list(zip(groups.tolist(), strata.tolist()))
    factor = f64(*(math.sqrt(1 - 1 / keys.count(key)) for key in keys))
    near(stratified_advantages(rewards, groups, strata, 0.0, ddof=1),
         (stratified_advantages(rewards, groups, strata, 0.0) * factor).tolist(), 1e-9)


def test_sample_std_gives_the_vectors_of_verl_and_trl():
    rewards, zeros = f64(1, 0, 0, 1, 0), torch.zeros(5).long()
    for eps, high, low in ((1e-6, 1.0954431, -0.7302954), (1e-4, 1.0952452, -0.7301634)):  # verl's eps, TRL's
        near(group_advantages(rewards, zeros, eps, ddof=1), [high, low, low, high, low], 6e-8)
    rewards, strata = f64(1, 0, 0, 1, 1, 0, 1, 0), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    zeros = torch.zeros(8).long()
    blend = [1.0669842, -0.7205746, -0.7205746, 0.7205746, 0.7205746, -1.0669842, 0.7984285, -0.7984285]
    near(blended_advantages(rewards, zeros, strata, 0.6, 1e-6, ddof=1), blend, 5e-7)


@pytest.mark.parametrize("options, message", [
    (dict(ddof=2), "ddof is 2"), (dict(min_stratum=0), "min_stratum is 0"), (dict(tau=-1.0), "tau -1.0"),
    (dict(small="drop"), "zero, center, pool, shrink")])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        stratified_advantages(f64(1, 0), torch.zeros(2).long(), torch.zeros(2).long(), **options)


def test_report_with_advantages():
    report = stratum_report(f64(1, 0, 1), torch.zeros(3).long(), torch.tensor([0, 0, 1]), f64(3, 1, -2))
    assert report["strata"]["0"]["advantage_mean"] == 2 and report["strata"]["0"]["advantage_var"] == 1
    assert report["strata"]["1"]["advantage_mean"] == -2 and report["strata"]["1"]["advantage_var"] == 0


def test_report_by_hand():
    # group 0: stratum 0 = (1, 0), stratum 1 = (1, 1), mean .75; group 1: stratum 0 = (0), stratum 10 = (1), mean .5
    rewards, groups = torch.tensor([1.0, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    report = stratum_report(rewards, groups, torch.tensor([0, 0, 1, 1, 0, 10]))
    assert list(report["strata"]) == ["0", "1", "10"]  # by number, not by spelling
    zero = report["strata"]["0"]
    assert zero["count"] == 3 and zero["share"] == 0.5
    assert zero["reward_mean"] == pytest.approx(1 / 3) and zero["reward_std"] == pytest.approx(math.sqrt(2 / 9))
    assert zero["bias"] == pytest.approx((-0.25 - 0.25 - 0.5) / 3)
    assert report["strata"]["1"]["bias"] == pytest.approx(0.25)
    assert report["var_group"] == pytest.approx((3 * 0.0625 + 0.5625 + 2 * 0.25) / 6)
    assert report["var_stratum"] == pytest.approx(0.5 / 6)
    assert report["gap"] == pytest.approx((4 * 0.0625 + 2 * 0.25) / 6)
    assert report["dead_share"] == pytest.approx(4 / 6) and report["singleton_share"] == pytest.approx(2 / 6)
    assert json.loads(json.dumps(report)) == report


# ----------------------------------------------------------------------------------------------------------------------
# loss


def one_token(ratio, advantage, **keywords):
    """loss, d loss / d ratio and statistics for a single token of the given ratio"""
    ratio = f64(ratio).requires_grad_()
    zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1)
    loss, statistics = ppo_clip_loss(ratio.log()[None], zero, f64(advantage), one, **keywords)
    (gradient,) = torch.autograd.grad(loss, ratio)
    return loss.item(), gradient.item(), statistics


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (0.5, 1, -0.5, -1), (0.9, 1, -0.9, -1), (1.25, 1, -1.2, 0), (4, 1, -1.2, 0),
        (0.5, -1, 0.8, 0), (0.9, -1, 0.9, 1), (1.25, -1, 1.25, 1), (4, -1, 4, 1),
    ],
)
def test_ppo_term_and_its_gradient(ratio, advantage, loss, gradient):
    # the bug of a published teaching repository: for a negative advantage it stops the gradient in the wrong half
    got, slope, statistics = one_token(ratio, advantage)
    assert got == pytest.approx(loss)
    assert slope == pytest.approx(gradient) and (slope == 0) == (gradient == 0)
    assert statistics["clipfrac"] == float(gradient == 0)


@property_test
@given(st.floats(0.02, 50), st.sampled_from([-3.0, -0.5, 0.5, 2.0]), st.floats(0, 0.9), st.floats(0, 3))
def test_gradient_is_zero_exactly_in_the_clipped_halves(ratio, advantage, low, high):
    ratio = f64(ratio).log().exp().item()  # what the loss sees
    if min(abs(ratio - 1 - high), abs(ratio - 1 + low)) < 1e-9:
        return  # on the corner both one-sided slopes are right
    loss, slope, statistics = one_token(ratio, advantage, clip_low=low, clip_high=high)
    stopped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    assert (slope == 0) == stopped and statistics["clipfrac"] == float(stopped)
    if not stopped:
        assert slope == pytest.approx(-advantage) and loss == pytest.approx(-ratio * advantage)


def test_statistics_by_hand():
    ratio, mask = f64(0.5, 1, 4, 99).reshape(2, 2), torch.tensor([[1, 1], [1, 0]])
    loss, statistics = ppo_clip_loss(ratio.log(), torch.zeros(2, 2).double(), f64(1, 1), mask)
    assert loss.item() == pytest.approx(-(0.5 + 1 + 1.2) / 3)
    kl = (0.5 - 1 - math.log(0.5) + 4 - 1 - math.log(4)) / 3
    expected = {"ratio_min": 0.5, "ratio_mean": 5.5 / 3, "ratio_max": 4, "clipfrac": 1 / 3, "approx_kl": kl}
    assert {name: value.item() for name, value in statistics.items()} == pytest.approx(expected)
    assert all(value.ndim == 0 and not value.requires_grad for value in statistics.values())
    # forced tokens have no ratio, not ratio 1
    for sampled in (2.0, 0.5):
        _, statistics = ppo_clip_loss(f64(sampled, 1).log()[None], f64(0, 0)[None], f64(1), torch.tensor([[1, 0]]))
        assert [statistics[f"ratio_{name}"].item() for name in ("min", "mean", "max")] == pytest.approx([sampled] * 3)


def test_token_mean_and_sequence_mean_by_hand():
    # rows [1 1 1 1], [2 2], [4] of loss: ratio 1, advantage = -loss
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]]).bool()
    zeros = torch.zeros(3, 4).double()
    assert ppo_clip_loss(zeros, zeros, f64(-1, -2, -4), mask)[0].item() == pytest.approx(12 / 7)  # 1.7142857
    loss, _ = ppo_clip_loss(zeros, zeros, f64(-1, -2, -4), mask, reduction="sequence-mean")
    assert loss.item() == pytest.approx(7 / 3)  # 2.3333333
    # a fourth rollout with nothing sampled has no token mean: it is no rollout with mean 0
    more = torch.cat([mask, torch.zeros(1, 4).bool()])
    zeros = torch.zeros(4, 4).double()
    loss, _ = ppo_clip_loss(zeros, zeros, f64(-1, -2, -4, -9), more, reduction="sequence-mean")
    assert loss.item() == pytest.approx(7 / 3)


def random_batch(seed=0, rows=7, length=9):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(rows, length, generator=generator).double()
    old = logprobs + 0.4 * torch.randn(rows, length, generator=generator).double()
    advantages = torch.randn(rows, length, generator=generator).double()
    mask = torch.rand(rows, length, generator=generator) < torch.linspace(0.1, 0.9, rows)[:, None]
    mask[2] = False  # a rollout without a sampled token
    return logprobs, old, advantages, mask


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_micro_batches_add_up(reduction, size):
    logprobs, old, advantages, mask = random_batch()
    logprobs.requires_grad_()
    whole, whole_statistics = ppo_clip_loss(logprobs, old, advantages, mask, reduction=reduction)
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)
    tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
    total, parts = 0.0, []
    for rows in torch.arange(len(mask)).split(size):
        loss, statistics = ppo_clip_loss(
            logprobs[rows], old[rows], advantages[rows], mask[rows], reduction=reduction,
            denominator=tokens if reduction == "token-mean" else sequences, total_tokens=tokens,
        )
        total = total + loss
        parts.append(statistics)
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=0)
    for name in ("ratio_mean", "clipfrac", "approx_kl"):
        assert sum(part[name].item() for part in parts) == pytest.approx(whole_statistics[name].item(), rel=1e-12)
    assert min(part["ratio_min"] for part in parts) == whole_statistics["ratio_min"]
    assert max(part["ratio_max"] for part in parts) == whole_statistics["ratio_max"]
    if size == 1:  # the usual bug, a mean of the means of micro-batches, is another number on this batch
        means = [ppo_clip_loss(logprobs[i : i + 1], old[i : i + 1], advantages[i : i + 1], mask[i : i + 1])[0].item()
                 for i in range(7) if mask[i].any()]
        assert reduction == "sequence-mean" or abs(sum(means) / len(means) - whole.item()) > 1e-3


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_garbage_at_forced_positions_changes_nothing(garbage, reduction):
    logprobs, old, advantages, mask = random_batch()
    expected, expected_statistics = ppo_clip_loss(logprobs, old, advantages, mask, reduction=reduction)
    # the raw log-probs have a graph behind them: NaN must not come back through it either
    raw = logprobs.clone().requires_grad_()
    for spoiled in ("old", "advantages", "logprobs"):
        inputs = {"logprobs": raw * 1.0, "old": old, "advantages": advantages}
        inputs[spoiled] = inputs[spoiled].masked_fill(~mask, garbage)
        loss, statistics = ppo_clip_loss(*inputs.values(), mask, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, raw)
        assert loss.item() == expected.item() and statistics == expected_statistics
        assert gradient.isfinite().all() and (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


def test_nan_at_a_sampled_token_is_not_hidden():
    logprobs = torch.tensor([[0.0, float("nan")]])
    loss, _ = ppo_clip_loss(logprobs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    assert loss.isnan()


def test_advantage_per_rollout_equals_advantage_per_token():
    logprobs, old, advantages, mask = random_batch()
    per_rollout, _ = ppo_clip_loss(logprobs, old, advantages[:, 0], mask)
    per_token, _ = ppo_clip_loss(logprobs, old, advantages[:, :1].expand(7, 9), mask)
    assert per_rollout.item() == per_token.item()
    square = torch.arange(4).double().reshape(2, 2)  # B == T: (B,) must go down the rows, not along the tokens
    loss, _ = ppo_clip_loss(square * 0, square * 0, f64(1, 3), torch.tensor([[1, 1], [1, 0]]))
    assert loss.item() == pytest.approx(-(1 + 1 + 3) / 3)


def test_on_policy_gradient_is_the_policy_gradient():
    logprobs, _, advantages, mask = random_batch()
    logprobs.requires_grad_()
    loss, statistics = ppo_clip_loss(logprobs, logprobs.detach(), advantages, mask)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -advantages * mask / mask.sum())
    assert statistics["clipfrac"] == 0 and statistics["approx_kl"] == 0 and statistics["ratio_mean"] == 1


def test_k3_by_hand_and_as_a_property():
    near(kl_k3(f64(-1, -2, -5), f64(-2, -1, -0.1)), [0.3678794, 0.7182818, 128.38978], 1e-5)
    logprobs, ref, _, _ = random_batch()
    assert (kl_k3(logprobs, ref) >= 0).all() and (kl_k3(ref, ref) == 0).all()
    # its mean under the policy is the KL: enumerate a categorical instead of sampling it
    p, q = torch.softmax(f64(0.3, -1, 2, 0), 0), torch.softmax(f64(1, 0, 0.5, -2), 0)
    exact = (p * (p / q).log()).sum().item()
    assert (p * kl_k3(p.log(), q.log())).sum().item() == pytest.approx(exact)
    tiny = kl_k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12]))  # float32: exp(d) - 1 - d has no digit left
    assert tiny.item() == pytest.approx(math.expm1(2**-12) - 2**-12, rel=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# bad input: a ValueError that names the argument


def test_bad_rollouts_name_the_argument():
    good, labels = f64(0, 1), torch.tensor([0, 0])
    bad_calls = {
        "rewards": [f64(0, math.nan), f64(0, math.inf), f64(), f64(0, 1)[None], torch.tensor([0, 1]), [0.0, 1.0]],
        "groups": [torch.tensor([0]), f64(0, 0), torch.tensor([True, False]), labels[None], [0, 0]],
        "strata": [torch.tensor([0, 0, 0]), f64(0, 0), torch.tensor([True, False]), labels[None], None],
    }
    for name, values in bad_calls.items():
        for value in values:
            arguments = {"rewards": good, "groups": labels, "strata": labels, name: value}
            for function in (stratified_advantages, stratum_report):
                with pytest.raises(ValueError, match=name):
                    function(**arguments)
            with pytest.raises(ValueError, match=name):
                blended_advantages(**arguments, alpha=0.6)
            if name != "strata":
                with pytest.raises(ValueError, match=name):
                    group_advantages(arguments["rewards"], arguments["groups"])
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        group_advantages(f64(0, math.nan), labels)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf])
def test_bad_alpha(alpha):
    with pytest.raises(ValueError, match="alpha"):
        blended_advantages(f64(0, 1), torch.tensor([0, 0]), torch.tensor([0, 0]), alpha)


@pytest.mark.parametrize("eps", [-1e-6, math.nan])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match="eps"):
        group_advantages(f64(0, 1), torch.tensor([0, 0]), eps)


@pytest.mark.parametrize(
    "name, change",
    [
        ("logprobs", {"logprobs": torch.zeros(3), "old_logprobs": torch.zeros(3)}),
        ("old_logprobs", {"old_logprobs": torch.zeros(2, 4)}),
        ("mask", {"mask": torch.ones(3, 2)}),
        ("mask", {"mask": torch.full((2, 3), 0.5)}),
        ("mask", {"mask": torch.full((2, 3), math.nan)}),
        ("mask", {"mask": torch.zeros(2, 3)}),
        ("advantages", {"advantages": torch.zeros(3)}),
        ("advantages", {"advantages": torch.zeros(2, 1)}),
        ("clip_low", {"clip_low": -0.1}),
        ("clip_high", {"clip_high": math.nan}),
        ("reduction", {"reduction": "mean"}),
        ("denominator", {"denominator": 5}),  # this batch alone has 6 tokens
        ("denominator", {"denominator": 0, "mask": torch.zeros(2, 3)}),
        ("denominator", {"denominator": 1, "reduction": "sequence-mean", "total_tokens": 6}),
        ("total_tokens", {"denominator": 2, "reduction": "sequence-mean"}),
        ("total_tokens", {"denominator": 2, "reduction": "sequence-mean", "total_tokens": 5}),
    ],
)
def test_bad_loss_arguments(name, change):
    arguments = {"logprobs": torch.zeros(2, 3), "old_logprobs": torch.zeros(2, 3), "advantages": torch.zeros(2)}
    with pytest.raises(ValueError, match=name):
        ppo_clip_loss(**{**arguments, "mask": torch.ones(2, 3), **change})


def test_k3_shape_mismatch():
    with pytest.raises(ValueError, match="ref_logprobs"):
        kl_k3(torch.zeros(2, 3), torch.zeros(2, 1))


def test_imports_torch_only_and_its_example_is_right():
    tree = ast.parse(pathlib.Path(stratgrpo.__file__).read_text(encoding="utf-8"))
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports == ["import torch"]
    results = doctest.testmod(stratgrpo)
    assert results.attempted > 0 and results.failed == 0
