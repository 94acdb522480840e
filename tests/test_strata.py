"""strata.py: every partition by hand, and what a partition must never do."""
import collections
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from rollout import Search, Trajectory


def one(group=0, sampled=(1, 1, 1, 0, 1, 1, 1), positions=(), hits=(), reward=0.0):
    searches = [Search("q", [], hit, position) for position, hit in zip(positions, hits or [False] * len(positions))]
    return Trajectory("0", group, [1], list(range(len(sampled))), list(sampled), [0.0] * len(sampled), searches,
                      reward=reward)


def test_searches_and_outcome_by_hand():
    rollouts = [one(), one(positions=[3]), one(positions=[3, 3], hits=[False, True]), one(positions=[3], hits=[True])]
    assert strata.label(rollouts, "searches", 0, []) == [0, 1, 2, 1]
    assert strata.label(rollouts, "outcome", 0, []) == [0, 2, 5, 3]
    assert strata.label(rollouts, "none", 0, []) == [0, 0, 0, 0]


def test_placement_by_hand():
    mask = [1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1]  # nine sampled tokens, observations after the first, fourth, seventh
    for positions, label in (([], 0), ([1], 1), ([5], 2), ([9], 4), ([1, 9], 5), ([1, 5, 9], 7)):
        assert strata.placement([one(sampled=mask, positions=positions)]) == [label]
    # the same number of searches, and two structures
    early, late = one(sampled=[1, 0, 1, 1, 1, 1, 1], positions=[1]), one(sampled=[1, 1, 1, 1, 1, 0, 1], positions=[5])
    assert strata.searches([early, late]) == [1, 1] and strata.placement([early, late]) == [1, 4]
    # two searches in one third are one placement
    assert strata.placement([one(sampled=[1, 0, 1, 0, 1, 1, 1, 1], positions=[1, 3])]) == [1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 99))
def test_random_strata_have_the_sizes_of_searches(rows, seed):
    rollouts = [one(group, positions=[3] * count) for group, count in rows]
    labels = strata.label(rollouts, "random", seed, [])
    for group in {group for group, _ in rows}:
        assert (collections.Counter(label for label, t in zip(labels, rollouts) if t.group == group)
                == collections.Counter(t.n_searches for t in rollouts if t.group == group))
    assert labels == strata.label(rollouts, "random", seed, [])


def test_random_strata_are_random():
    rollouts = [one(positions=[3] * (i % 2)) for i in range(40)]
    drawn = [strata.label(rollouts, "random", seed, []) for seed in range(50)]
    assert len(set(map(tuple, drawn))) == 50
    # every rollout is in stratum 1 half of the time, whatever it did
    shares = [sum(labels[i] for labels in drawn) / 50 for i in range(40)]
    assert all(0.2 < share < 0.8 for share in shares)


def test_the_tree_splits_where_the_rewards_differ():
    past = [one(group, positions=[3] * count, reward=float(count == 2))
            for group in range(20) for count in (0, 1, 2, 2)]
    memory = [strata.memory_row(past, 0)]
    rollouts = [one(positions=[3] * count) for count in (0, 1, 2, 2)]
    labels = strata.label(rollouts, "auto", 0, memory)
    assert labels[2] == labels[3] != labels[0] == labels[1]  # 0 and 1 search earned the same: one stratum
    assert strata.label(rollouts, "auto", 0, []) == [0, 0, 0, 0]  # without a past nothing is known


def test_the_tree_never_sees_the_rewards_it_will_judge():
    past = [one(group, positions=[3] * count, reward=float(count)) for group in range(20) for count in (0, 1)]
    memory = [strata.memory_row(past, 0)]
    for reward in (0.0, 1.0):
        rollouts = [one(positions=[3] * count, reward=reward * count) for count in (0, 1)]
        labels = strata.label(rollouts, "auto", 0, memory)
        assert labels[0] != labels[1]
    # rewards relative to the group: an easy question with many searches is no reason to split
    easy = [one(0, positions=[3, 3], reward=1.0)] * 40 + [one(1, reward=0.0)] * 40
    assert len(set(strata.label(easy, "auto", 0, [strata.memory_row(easy, 0)]))) == 1


def test_only_the_last_steps_are_remembered():
    old = [one(group, positions=[3] * count, reward=float(count)) for group in range(20) for count in (0, 1)]
    new = [one(group, positions=[3] * count, reward=0.5) for group in range(20) for count in (0, 1)]
    memory = [strata.memory_row(old, 0)] + [strata.memory_row(new, i) for i in range(1, strata.TREE_MEMORY + 1)]
    assert len(set(strata.label(old, "auto", 0, memory))) == 1 < len(set(strata.label(old, "auto", 0, memory[:1])))


def test_a_leaf_has_a_minimum_size():
    past = [one(group, positions=[3] * (group == 0), reward=float(group == 0)) for group in range(100)]
    past = [t for t in past for _ in (0, 1)]
    past[0].reward = 0.0
    labels = strata.label(past, "auto", 0, [strata.memory_row(past, 0)])
    assert min(collections.Counter(labels).values()) >= strata.TREE_LEAF * len(past)


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def length(ts): return [len(t.response_ids) for t in ts]\n"
                                      "def short(ts): return [1]\ndef floats(ts): return [0.5 for t in ts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    rollouts = [one(), one(sampled=[1, 1])]
    assert strata.label(rollouts, "mine:length", 0, []) == [7, 2]
    for name in ("short", "floats"):
        with pytest.raises(ValueError, match=f"--strata mine:{name}.* one integer for each of 2"):
            strata.label(rollouts, f"mine:{name}", 0, [])
