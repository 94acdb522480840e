"""baselines.py: by hand, against each other, and against verl where it is installed."""
import copy
import math

import pytest
import torch
from conftest import FakeRetriever, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines import Critic, dr_grpo_advantages, gae, reinforce_advantages, rloo_advantages, searches_so_far
from checkpoint import load_critic, save_critic
from data import Question
from rollout import Protocol, Search, Trajectory, replay
from stratgrpo import group_advantages

PROTOCOL = Protocol(prompt="Q: {question}\n", retry="again\n", max_turn_tokens=24, max_observation_tokens=45)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_outcome_estimators_by_hand():
    rewards, groups = f64(1, 0, 0, 1, 0), torch.zeros(5).long()
    assert dr_grpo_advantages(rewards, groups).tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    assert rloo_advantages(rewards, groups).tolist() == pytest.approx([0.75, -0.5, -0.5, 0.75, -0.5])
    assert reinforce_advantages(rewards).tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    # two questions, one easy: only the batch baseline pays for the question; a lone rollout has nothing to compare with
    rewards, groups = f64(1, 1, 0, 1, 1), torch.tensor([4, 4, 7, 7, 9])
    assert dr_grpo_advantages(rewards, groups).tolist() == pytest.approx([0, 0, -0.5, 0.5, 0])
    assert rloo_advantages(rewards, groups).tolist() == pytest.approx([0, 0, -1, 1, 0])
    assert reinforce_advantages(rewards).tolist() == pytest.approx([0.2, 0.2, -0.8, 0.2, 0.2])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 3)), min_size=1, max_size=20))
def test_outcome_estimators_in_plain_python(rows):
    plain, labels = [reward / 8 for reward, _ in rows], [group for _, group in rows]
    rewards, groups = f64(*plain), torch.tensor(labels)
    for i, (reward, label) in enumerate(zip(plain, labels)):
        others = [r for j, (r, g) in enumerate(zip(plain, labels)) if g == label and j != i]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert rloo_advantages(rewards, groups)[i].item() == pytest.approx(expected, abs=1e-9)
        mean = (sum(others) + reward) / (len(others) + 1)
        assert dr_grpo_advantages(rewards, groups)[i].item() == pytest.approx(reward - mean, abs=1e-9)
    # grpo and dr-grpo differ by a positive factor in each group, so in no sign
    assert (group_advantages(rewards, groups) * dr_grpo_advantages(rewards, groups) > -1e-12).all()


def test_bad_rewards():
    for function in (dr_grpo_advantages, rloo_advantages):
        with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
            function(f64(0, math.nan), torch.zeros(2).long())
        with pytest.raises(ValueError, match="groups has shape"):
            function(f64(0, 1), torch.zeros(3).long())
    with pytest.raises(ValueError, match="rewards is empty"):
        reinforce_advantages(f64())


# -----------------------------------------------------------------------------
# ppo

def test_gae_by_hand():
    advantages, returns = gae(1.0, [0.2, 0.5, 0.4], gamma=0.9, lam=0.5)
    last = 1.0 - 0.4
    middle = 0.9 * 0.4 - 0.5 + 0.45 * last
    first = 0.9 * 0.5 - 0.2 + 0.45 * middle
    assert advantages == pytest.approx([first, middle, last])
    assert returns == pytest.approx([first + 0.2, middle + 0.5, last + 0.4])
    assert gae(1.0, [0.2, 0.5, 0.4]) == (pytest.approx([0.8, 0.5, 0.6]), pytest.approx([1.0, 1.0, 1.0]))  # R - V
    assert gae(1.0, [0.2, 0.5, 0.4], lam=0.0)[0] == pytest.approx([0.3, -0.1, 0.6])  # one-step errors


@settings(max_examples=60, deadline=None)
@given(st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(reward, values, gamma, lam):
    """Equation 16 as it stands: a sum, no recursion."""
    target = [gamma * value for value in values[1:]] + [reward]
    errors = [b - a for a, b in zip(values, target)]
    expected = [sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(values))]
    assert gae(reward, values, gamma, lam)[0] == pytest.approx(expected, abs=1e-9)


def test_against_the_installed_verl():
    """The same numbers as verl's own functions, where verl is installed."""
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=generator), torch.arange(12) // 4
    token_rewards, mask = torch.zeros(12, 5), torch.ones(12, 5)
    token_rewards[:, -1] = rewards
    arguments = dict(token_level_rewards=token_rewards, response_mask=mask, index=groups.numpy())
    assert torch.allclose(core.compute_grpo_outcome_advantage(**arguments)[0][:, 0],
                          group_advantages(rewards, groups, 1e-6, ddof=1), atol=1e-6)
    assert torch.allclose(core.compute_grpo_outcome_advantage(**arguments, norm_adv_by_std_in_grpo=False)[0][:, 0],
                          dr_grpo_advantages(rewards, groups), atol=1e-6)
    assert torch.allclose(core.compute_rloo_outcome_advantage(**arguments)[0][:, 0],
                          rloo_advantages(rewards, groups), atol=1e-6)
    values = torch.rand(12, 5, generator=generator)
    mask[:, 2] = 0  # a forced token in the middle
    theirs, returns = core.compute_gae_advantage_return(token_rewards, values, mask, 1.0, 0.9)
    seen = mask[0].bool()
    ours = [gae(reward, value[seen].tolist(), 1.0, 0.9) for reward, value in zip(rewards.tolist(), values)]
    whitened = f64(*(a for pair in ours for a in pair[0]))
    whitened = (whitened - whitened.mean()) / (whitened.std(correction=1) ** 2 + 1e-8).sqrt()
    assert torch.allclose(theirs[:, seen].flatten().double(), whitened, atol=1e-4)
    assert torch.allclose(returns[:, seen].flatten().double(), f64(*(r for pair in ours for r in pair[1])), atol=1e-5)


@pytest.fixture(scope="module")
def trajectories(tokenizer):
    turns = [["<search> a </search>"] * n + ["<answer> b </answer>"] for n in (0, 1, 2, 1)]
    questions = [Question(str(i), "what?", ["b"]) for i in range(4)]
    made = replay(turns, questions, tokenizer, FakeRetriever(), PROTOCOL, 200)
    for trajectory, reward in zip(made, (0.0, 1.0, 0.0, 1.0)):
        trajectory.reward = reward
    return made


def test_searches_so_far(trajectories):
    by_hand = Trajectory("0", 0, [1], [5, 6, 7, 8, 9], [1, 0, 1, 0, 1], [0.0] * 5,
                         [Search("a", [], False, 1), Search("b", [], False, 3)])
    assert searches_so_far(by_hand) == [0, 1, 2]
    for trajectory in trajectories:  # the same from the mask alone: a run of forced tokens is a search here
        counts, runs, before = [], 0, 1
        for sampled in trajectory.sampled:
            runs += before == 1 and sampled == 0
            before = sampled
            counts += [runs] if sampled else []
        assert searches_so_far(trajectory) == counts and counts[-1] == trajectory.n_searches


def fit(critic, model, trajectories, steps, lam=1.0):
    for step in range(steps):
        out = critic.advantages(model, trajectories, lam, 1, 2, 10**6, torch.Generator().manual_seed(step))
    return out


def test_the_critic_starts_at_zero_and_its_advantages_are_whitened_rewards(trajectories, model):
    critic = Critic(model, 4, False, 1e-2)
    advantages, statistics = critic.advantages(model, trajectories, 1.0, 1, 2, 10**6, torch.Generator())
    rewards = torch.tensor([t.reward for t in trajectories for s in t.sampled if s])
    assert statistics["value_loss"] == pytest.approx(rewards.square().mean().item())
    expected = (rewards - rewards.mean()) / rewards.std(correction=0)
    masks = [torch.tensor(t.sampled).bool() for t in trajectories]
    assert torch.allclose(torch.cat([a[: len(m)][m] for a, m in zip(advantages, masks)]), expected, atol=1e-5)
    assert all((a[: len(m)][~m] == 0).all() and (a[len(m) :] == 0).all() for a, m in zip(advantages, masks))


def test_the_critic_learns_what_a_number_of_searches_earns(trajectories, model):
    """One search pays here, none and two do not; with the policy's features blanked, only the count can tell."""
    blank = copy.deepcopy(model)
    with torch.no_grad():
        blank.model.norm.weight.zero_()
    blind, seeing = Critic(blank, 4, False, 3e-2), Critic(blank, 4, True, 3e-2)
    losses = [fit(critic, blank, trajectories, 300)[1]["value_loss"] for critic in (blind, seeing)]
    tokens = [(count, t.reward) for t in trajectories for count in searches_so_far(t)]
    by_count = [[reward for c, reward in tokens if c == count] for count in range(3)]
    means = [sum(rewards) / len(rewards) for rewards in by_count]
    overall = sum(reward for _, reward in tokens) / len(tokens)
    least = [sum((reward - mean) ** 2 for _, reward in tokens) / len(tokens) for mean in (overall,)]
    least += [sum((reward - means[count]) ** 2 for count, reward in tokens) / len(tokens)]
    assert losses == pytest.approx(least, abs=0.01) and least[1] < least[0] - 0.02  # the best that either can do
    values = (seeing.head.weight[0, -5:] + seeing.head.bias).tolist()
    assert values[:3] == pytest.approx(means, abs=0.1) and means[2] == 0 < means[1]


def test_the_critic_does_not_touch_the_policy_or_the_random_numbers(trajectories, tokenizer):
    model = make_model(tokenizer)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    fit(Critic(model, 4, True, 1e-2), model, trajectories, 3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_critic_goes_on_where_it_was(trajectories, model, tmp_path):
    first, second = Critic(model, 4, True, 1e-2), Critic(model, 4, True, 1e-2)
    fit(first, model, trajectories, 3)
    save_critic(first, tmp_path)
    load_critic(second, tmp_path)
    a, b = fit(first, model, trajectories, 2), fit(second, model, trajectories, 2)
    assert torch.equal(a[0], b[0]) and a[1] == b[1]


def test_micro_batches_do_not_matter(trajectories, model):
    features = [Critic(model, 4, True, 1e-2).features(model, trajectories, budget) for budget in (1, 10**6)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*features))
