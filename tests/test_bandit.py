"""extras/bandit.py: gradients against autograd, the exact expectation against its limit and against sampling, and the
values an earlier program by another hand measured."""

import functools
import json
import statistics
import sys

import pytest
import torch

from extras import bandit
from stratgrpo import group_advantages, stratified_advantages


def setting(p, q, group_size, alpha):
    return {"p": p, "q": q, "group_size": group_size, "alpha": alpha}


def sample(p, q, group_size, questions, seed):
    """-> logits, skill (3,); stratum, well, GRPO and SAN advantages (questions * group_size,)"""
    logits, skill = bandit.start(p, q)
    which, act, luck = torch.rand(3, questions * group_size, generator=torch.Generator().manual_seed(seed)).double()
    stratum = torch.bucketize(which, logits.softmax(0).cumsum(0)[:2])
    well = act < skill.sigmoid()[stratum]
    reward = (luck < torch.where(well, bandit.PAY_WELL[stratum], bandit.PAY_BADLY[stratum])).double()
    groups = torch.arange(questions).repeat_interleave(group_size)
    return (logits, skill, stratum, well, group_advantages(reward, groups),
            stratified_advantages(reward, groups, stratum))


def test_expected_reward_by_hand():
    # .16 (.5 .4 + .5 .1) + .24 (.5 .4 + .5 .1) + .6 (.05 1 + .95 .05)
    assert bandit.expected_reward(*bandit.start(0.6, 0.05)).item() == pytest.approx(0.4 * 0.25 + 0.6 * 0.0975)
    shares, well = torch.tensor([0.0, 0.0, 1.0]).log().double(), torch.tensor([0.0, 0.0, 99.0]).double()
    assert bandit.expected_reward(shares, well).item() == pytest.approx(1.0)


def test_gradients_are_those_of_advantage_times_log_probability():
    generator = torch.Generator().manual_seed(0)
    logits, skill = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    stratum = torch.randint(0, 3, (5, 40), generator=generator)
    well = torch.rand(5, 40, generator=generator) < 0.4
    advantages = torch.randn(5, 40, generator=generator, dtype=torch.float64)
    act = torch.distributions.Bernoulli(logits=skill.gather(1, stratum)).log_prob(well.double())
    objective = (advantages * (logits.log_softmax(1).gather(1, stratum) + act)).mean(1).sum()
    expected = torch.autograd.grad(objective, (logits, skill))
    torch.testing.assert_close(bandit.gradients(logits, skill, stratum, well, advantages), expected)


@pytest.mark.parametrize("group_size", [4, 8])
def test_a_step_is_the_gradient_of_the_blend(group_size):
    # one step of run, once more by hand from the same random numbers
    row, = bandit.run([setting(0.4, 0.2, group_size, "0.6")], [3], steps=1, rollouts=16, step_size=10.0)
    logits, skill = bandit.start(0.4, 0.2)
    generator = torch.Generator().manual_seed(3)
    which, act, luck = torch.rand(3, 16, generator=generator, dtype=torch.float64)
    stratum = torch.bucketize(which, logits.softmax(0).cumsum(0)[:2])
    well = act < skill.sigmoid()[stratum]
    reward = (luck < torch.where(well, bandit.PAY_WELL[stratum], bandit.PAY_BADLY[stratum])).double()
    groups = torch.arange(16 // group_size).repeat_interleave(group_size)
    blend = 0.6 * stratified_advantages(reward, groups, stratum) + 0.4 * group_advantages(reward, groups)
    push, lesson = bandit.gradients(logits[None], skill[None], stratum[None], well[None], blend[None])
    assert push.abs().max() > 1e-3 and lesson.abs().max() > 1e-3
    assert row["final_share"] == pytest.approx((logits + 10 * push[0]).softmax(0)[2].item())
    assert row["final_skill"] == pytest.approx((skill + 10 * lesson[0]).sigmoid()[2].item())


def test_alpha_is_linear_from_its_first_to_its_last_step():
    assert [bandit.alpha_at("0.9:0.3", progress) for progress in (0, 0.5, 1)] == pytest.approx([0.9, 0.6, 0.3])
    assert bandit.alpha_at("0.6", 0.7) == 0.6
    # one step: only the start of the schedule counts. many: it is neither of the two
    one, first = (bandit.run([setting(0.4, 0.2, 8, alpha)], [0], steps=1) for alpha in ("0.9:0.3", "0.9"))
    assert one[0]["final_share"] == first[0]["final_share"]
    rows = bandit.run([setting(0.4, 0.2, 8, alpha) for alpha in ("0.9:0.3", "0.9", "0.3")], [0], steps=9)
    assert len({row["final_share"] for row in rows}) == 3


def test_rows_do_not_depend_on_their_neighbours():
    settings = [setting(0.6, 0.05, 8, "0.6"), setting(0.2, 0.12, 16, "0.9:0.3"), setting(0.1, 0.2, 4, "0")]
    together = bandit.run(settings, [0, 5], steps=20)
    assert together == bandit.run(settings, [0, 5], steps=20)
    alone = [row for one in settings for seed in (0, 5) for row in bandit.run([one], [seed], steps=20)]
    assert [list(row) for row in together] == [list(row) for row in alone]
    for row, other in zip(together, alone):
        assert row["alpha"] == other["alpha"] and row["seed"] == other["seed"]
        assert row["final_reward"] == pytest.approx(other["final_reward"], rel=1e-12)
    assert together[0]["final_reward"] != together[1]["final_reward"]  # seeds differ


@pytest.mark.parametrize("group_size", [4, 8])
def test_expected_gradients_are_what_sampling_gives_on_average(group_size):
    p, q, questions = 0.6, 0.05, 40_000  # strata that differ in pay, so that every term counts
    logits, skill, stratum, well, grpo, san = sample(p, q, group_size, questions, seed=1)
    exact = bandit.expected_gradients(logits, skill, group_size)
    repeat = [tensor.expand(questions, 3) for tensor in (logits, skill)]
    for name, advantages in (("GRPO", grpo), ("SAN", san)):
        each = bandit.gradients(*repeat, *(x.view(questions, group_size) for x in (stratum, well, advantages)))
        for sampled, expected in zip(each, exact[name]):  # (questions, 3), (3,)
            error = sampled.std(0) / questions**0.5
            assert ((sampled.mean(0) - expected).abs() <= 4 * error + 1e-12).all()


@pytest.mark.parametrize("p, q", [(0.6, 0.05), (0.1, 0.9)])
def test_the_push_of_grpo_tends_to_share_times_bias_over_std(p, q):
    logits, skill = bandit.start(p, q)
    shares = logits.softmax(0)
    mean_k = bandit.PAY_BADLY + skill.sigmoid() * (bandit.PAY_WELL - bandit.PAY_BADLY)  # (3,)
    mean = shares @ mean_k
    limit = shares * (mean_k - mean) / (mean * (1 - mean)).sqrt()
    errors = [(bandit.expected_gradients(logits, skill, size)["GRPO"][0] - limit).abs().max() for size in (4, 8, 16)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.15 * limit.abs().max()
    huge = sample(p, q, 400_000, 1, seed=0)
    push, _ = bandit.gradients(*(x[None] for x in huge[:5]))
    torch.testing.assert_close(push[0], limit, atol=5e-3, rtol=0)


def test_san_never_pushes_and_a_blend_pushes_less():
    for p, q in ((0.6, 0.05), (0.1, 0.9)):
        exact = bandit.expected_gradients(*bandit.start(p, q), 8)
        assert exact["SAN"][0].abs().max() < 1e-12 < 1e-3 < exact["GRPO"][0].abs().max()
    assert exact["GRPO"][0][2] > 0.05  # two searches, good but rare: GRPO brings them back
    # not only on average: not in any batch
    logits, skill, stratum, well, grpo, san = sample(0.4, 0.2, 8, 500, seed=2)
    batches = [x.view(500, 8) for x in (stratum, well, san, grpo)]
    repeat = [tensor.expand(500, 3) for tensor in (logits, skill)]
    pushes = [bandit.gradients(*repeat, *batches[:2], advantages)[0] for advantages in batches[2:]]
    assert pushes[0].abs().max() < 1e-12 < 1e-2 < pushes[1].abs().max()
    blend, _ = bandit.gradients(*repeat, *batches[:2], 0.7 * batches[2] + 0.3 * batches[3])
    torch.testing.assert_close(blend, 0.3 * pushes[1])
    # so that in 400 steps the share stays where it was put, good or bad
    for row in bandit.run([setting(0.6, 0.05, 8, "1"), setting(0.1, 0.9, 8, "1")], [0]):
        assert row["final_share"] == pytest.approx(row["p"], abs=1e-9)


def test_san_pushes_at_random_where_a_minibatch_splits_a_stratum():
    # half of each group: the advantages of a stratum no longer sum to 0. mean 0, but the variance adds up over steps
    logits, skill, stratum, well, _, san = sample(0.4, 0.2, 8, 20_000, seed=3)
    half = [x.view(20_000, 8)[:, :4] for x in (stratum, well, san)]
    push, _ = bandit.gradients(logits.expand(20_000, 3), skill.expand(20_000, 3), *half)  # (20000, 3)
    error = push.std(0) / 20_000**0.5
    assert (push.mean(0).abs() < 4 * error).all()
    assert (push.std(0) > 0.05).all()


@pytest.mark.parametrize("group_size, known", [  # an earlier program by another hand: p, q, alpha, mean, spread
    (8, [(0.6, 0.05, "0", 0.47, 0.19), (0.6, 0.05, "0.6", 0.98, 0.01), (0.6, 0.05, "0.8", 0.98, 0.01),
         (0.6, 0.05, "1", 0.73, 0.01), (0.2, 0.12, "0", 0.98, 0.01), (0.2, 0.12, "0.6", 0.91, 0.10),
         (0.2, 0.12, "0.8", 0.83, 0.05), (0.2, 0.12, "1", 0.48, 0.01), (0.1, 0.2, "0", 0.99, 0.01),
         (0.1, 0.2, "0.6", 0.88, 0.05), (0.1, 0.2, "0.8", 0.44, 0.02), (0.1, 0.2, "1", 0.40, 0.01)]),
    (16, [(0.4, 0.05, "0", 0.39, 0.01), (0.4, 0.05, "0.6", 0.52, 0.20), (0.4, 0.05, "0.8", 0.97, 0.02),
          (0.4, 0.05, "1", 0.62, 0.01)]),
])
def test_known_starts(group_size, known):
    settings = [setting(p, q, group_size, alpha) for p, q, alpha, _, _ in known]
    rows = bandit.run(settings, range(8), rollouts=16 * group_size)
    for i, (p, q, alpha, mean, spread) in enumerate(known):
        ours = statistics.mean(row["final_reward"] for row in rows[8 * i : 8 * i + 8])
        assert ours == pytest.approx(mean, abs=spread + 0.005), (p, q, alpha)  # they are rounded to two digits


def test_interval_by_hand():
    # mean 2, std 1, n = 3, t = 4.30
    assert bandit.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.30 / 3**0.5))


def test_main_prints_tables_and_writes_rows_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bandit, "SHARES", (0.2, 0.6))
    monkeypatch.setattr(bandit, "SKILLS", (0.05,))
    monkeypatch.setattr(bandit, "GROUP_SIZES", (8,))
    monkeypatch.setattr(bandit, "KNOWN", bandit.KNOWN[:1])
    monkeypatch.setattr(bandit, "run", functools.partial(bandit.run, steps=5))
    monkeypatch.setattr(sys, "argv", ["bandit", "--seeds", "2", "--results", str(tmp_path / "rows.jsonl")])
    bandit.main()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(bandit.ALPHAS) * 2
    assert list(rows[0]) == "part p q group_size alpha seed final_reward final_share final_skill".split()
    printed = capsys.readouterr().out
    assert "Known starts" in printed and "Group size 8: SAN minus GRPO" in printed
    with pytest.raises(SystemExit):
        bandit.main()
    assert "exists: name a new file" in capsys.readouterr().err


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="group_size 12 does not divide the 128 rollouts"):
        bandit.run([setting(0.6, 0.05, 12, "0")], [0])
    with pytest.raises(ValueError, match="p is 1.0"):
        bandit.start(1.0, 0.5)
    with pytest.raises(ValueError, match="alpha is '0.9:1.5'"):
        bandit.run([setting(0.6, 0.05, 8, "0.9:1.5")], [0], steps=2)
