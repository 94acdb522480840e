"""extras/drift.py: which tokens decide, and that SAN's push on the first decision is 0."""
import collections

import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer

import train
from config import Config
from data import Question
from extras.drift import PARTS, decisions, masked, search_probability
from rollout import Protocol, Trajectory, replay

PROTOCOL = Protocol(prompt="Q: {question}\n", retry="again\n", max_turn_tokens=24, max_observation_tokens=45)


def rollouts(tokenizer):
    turns = [["<search> a </search>"] * n + ["<answer> b </answer>"] for n in (0, 1, 2, 1, 0, 2)]
    questions = [Question(str(i), "what?", ["b"]) for i in range(6)]
    made = replay(turns, questions, tokenizer, FakeRetriever(), PROTOCOL, 400)
    for trajectory, reward in zip(made, (0.0, 1.0, 0.0, 0.0, 1.0, 1.0)):
        trajectory.reward, trajectory.group = reward, 0
    return made


def test_decisions_are_the_first_tokens_of_the_turns(tokenizer):
    assert decisions(Trajectory("0", 0, [1], [1] * 7, [1, 1, 0, 0, 1, 1, 0], [0.0] * 7)) == [1, 0, 0, 0, 1, 0, 0]
    for trajectory in rollouts(tokenizer):
        assert sum(decisions(trajectory)) == trajectory.n_searches + 1


def test_the_parts_add_up_and_sans_push_on_the_first_decision_is_zero(tokenizer):
    made = rollouts(tokenizer)
    advantages, strata = train.compute_advantages(made, Config(advantage="san"))
    every, first, rest = (masked(advantages, made, part) for part in PARTS)
    assert torch.equal(every, first + rest) and (first * rest == 0).all()
    push = collections.Counter()
    for row, stratum in zip(first, strata.tolist()):
        push[stratum] += row[0].item()
    assert all(value == pytest.approx(0, abs=1e-6) for value in push.values()) and first.abs().sum() > 1
    grpo = masked(train.compute_advantages(made, Config(advantage="grpo"))[0], made, "decisions only")
    by_stratum = [grpo[strata == k, 0].sum().item() for k in (0, 1, 2)]
    assert by_stratum == pytest.approx([0, 0, 0], abs=1e-6)  # every stratum here has mean 1/2, so GRPO is SAN
    made[0].reward = 1.0
    grpo = masked(train.compute_advantages(made, Config(advantage="grpo"))[0], made, "decisions only")
    assert grpo[strata == 0, 0].sum() > 0.5  # now the stratum without a search is paid as such


def test_search_probability_is_read_where_the_decision_is_made():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<search>"])
    made = rollouts(tokenizer)
    model = make_model(tokenizer)
    token = tokenizer.convert_tokens_to_ids("<search>")
    expected = []
    for t in made:
        places = [i for i, first in enumerate(decisions(t)) if first][:2]
        for place in places:
            ids = torch.tensor([(t.prompt_ids + t.response_ids)[: len(t.prompt_ids) + place]])
            with torch.no_grad():
                expected.append(model(input_ids=ids).logits[0, -1].softmax(-1)[token].item())
    assert len(expected) == 2 + 4 * 2
    assert search_probability(model, tokenizer, made, 2) == pytest.approx(sum(expected) / len(expected), rel=1e-4)
