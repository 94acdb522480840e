"""The two regimes: what their questions promise, what a behaviour does when it is replayed, and the shares of the
mixtures."""
import collections
import random

import pytest

import world
from data import Question, exact_match
from extras.regimes import MIXTURES, PRIOR, PROTOCOL, SHORT_COURSE, build, demonstrate, demonstrations
from retriever import Passage
from rollout import replay

PASSAGES, TRAIN, HELD_OUT = build(random.Random(0))
TOKENIZER = world.build_tokenizer()


class Oracle:
    """Returns the passage whose title was asked for."""
    titles = {p["title"]: p for p in PASSAGES}

    def search(self, queries, k):
        return [[Passage(**self.titles[query], score=1.0)] for query in queries]


def test_train_and_held_out_questions_share_no_person_and_no_town():
    mentioned = [{name for row in rows for name in row["metadata"]["chain"][:2]} for rows in (TRAIN, HELD_OUT)]
    assert not mentioned[0] & mentioned[1]
    assert len(HELD_OUT) == 200 and len({p["title"] for p in PASSAGES}) == len(PASSAGES)


def test_every_answer_is_stated_in_the_town_s_passage_and_not_in_the_person_s():
    texts = {p["title"]: p["text"] for p in PASSAGES}
    for row in TRAIN + HELD_OUT:
        person, town, country = row["metadata"]["chain"]
        assert town in texts[person] and country in texts[town] and row["golden_answers"] == [country]
        assert not any(country in texts[person] for country in PRIOR)


def test_always_guessing_the_most_frequent_country_is_right_in_two_fifths():
    for rows in (TRAIN, HELD_OUT):
        counts = collections.Counter(row["golden_answers"][0] for row in rows)
        assert counts.most_common(1)[0][0] == next(iter(PRIOR))
        assert counts.most_common(1)[0][1] / len(rows) == pytest.approx(0.4, abs=0.06)
    assert sum(share**2 for share in PRIOR.values()) == pytest.approx(0.25, abs=0.01)  # guesses drawn from the prior


@pytest.mark.parametrize("behaviour, searches", [("guess", 0), ("one search", 1), ("person again", 2), ("town", 2)])
def test_behaviours_replayed(behaviour, searches):
    rng = random.Random(1)
    rows = TRAIN[:300]
    questions = [Question(row["id"], row["question"], row["golden_answers"], {}) for row in rows]
    trajectories = replay([demonstrate(row, behaviour, rng) for row in rows], questions, TOKENIZER, Oracle(), PROTOCOL)
    assert {t.n_searches for t in trajectories} == {searches}
    reward = sum(exact_match(t.answer, q.golden_answers) for t, q in zip(trajectories, questions)) / len(rows)
    expected = {"town": 1, "person again": 0}.get(behaviour, 0.244)
    assert reward == pytest.approx(expected, abs=0 if expected in (0, 1) else 0.09)
    assert all(len(t) <= 48 and TOKENIZER.unk_token_id not in t.prompt_ids + t.response_ids for t in trajectories)


@pytest.mark.parametrize("regime", MIXTURES)
def test_demonstrations_follow_the_mixture(regime):
    assert sum(MIXTURES[regime].values()) == pytest.approx(1)
    rows = demonstrations(TRAIN, MIXTURES[regime], random.Random(2))
    assert all(len(row["turns"]) == 3 for row in rows[:SHORT_COURSE])
    rest = rows[SHORT_COURSE:]
    shares = collections.Counter(len(row["turns"]) for row in rest)
    expected = list(MIXTURES[regime].values())
    for turns, share in ((1, expected[0]), (2, expected[1]), (3, expected[2] + expected[3])):
        assert shares[turns] / len(rest) == pytest.approx(share, abs=0.03)
