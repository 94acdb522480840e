"""The embedded world: what its questions promise, what its demonstrations say, and that it is a function of the
seed."""
import pytest
import torch
from conftest import FakeRetriever

import world
from data import Question, exact_match, normalize_answer
from rollout import Codec, replay
from world import NOISE, QUESTIONS, SENTENCES, TINY, build_policy, build_tokenizer, build_world, demonstrations

WORLD = build_world(seed=3)
TOKENIZER = build_tokenizer()


class Oracle:
    """Returns the passage whose title was asked for, else one that is about something else."""

    def __init__(self):
        self.passages = {p["title"]: p for p in WORLD.passages}

    def search(self, queries, k):
        found = FakeRetriever(text="nothing", title="Nobody").search(queries, 1)
        for i, query in enumerate(queries):
            if query in self.passages:
                passage = self.passages[query]
                found[i] = [type(found[i][0])(passage["id"], passage["title"], passage["text"], 1.0)]
        return found


def test_a_world_is_a_function_of_its_seed():
    assert build_world(3) == WORLD and build_world(4).facts != WORLD.facts


def test_thousands_of_passages_with_namesakes():
    assert len(WORLD.passages) > 3000 and len({p["id"] for p in WORLD.passages}) == len(WORLD.passages)
    for position in (0, 1):
        words = [p["title"].split()[position] for p in WORLD.passages]
        assert sum(words.count(word) > 1 for word in words) / len(words) > 0.99


def test_train_and_held_out_questions_share_no_entity_and_no_fact():
    mentioned = {split: {name for row in rows for name in row["metadata"]["chain"]} - set(world.COUNTRIES)
                 for split, rows in (("train", WORLD.train), ("heldout", WORLD.heldout))}
    assert not mentioned["train"] & mentioned["heldout"]
    assert len({row["question"] for row in WORLD.train}) == len(WORLD.train) == len({row["id"] for row in WORLD.train})


def test_every_answer_is_stated_in_the_passage_of_the_entity_before_it():
    texts = {p["title"]: p["text"] for p in WORLD.passages}
    for row in WORLD.train + WORLD.heldout:
        chain, path = row["metadata"]["chain"], row["metadata"]["path"]
        assert row["golden_answers"] == [chain[-1]] and len(chain) == len(path) + 1 == row["metadata"]["hops"] + 1
        for subject, relation, object in zip(chain, path, chain[1:]):
            assert SENTENCES[WORLD.kinds[subject], relation].format(s=subject, o=object) in texts[subject]


def test_guessing_does_not_pay():
    """The most frequent answer of each kind of question is right for few of them."""
    best = 0
    for path in QUESTIONS:
        answers = [row["golden_answers"][0] for row in WORLD.heldout if tuple(row["metadata"]["path"]) == path]
        best += max(answers.count(answer) for answer in answers)
    assert best / len(WORLD.heldout) < 0.06


def test_the_tokenizer_knows_every_word_and_round_trips_answers():
    codec = Codec(TOKENIZER, TINY)
    texts = ([f"{p['title']} {p['text']}" for p in WORLD.passages] + [row["question"] for row in WORLD.train]
             + [TINY.retry])
    texts += [turn for row in demonstrations(WORLD, WORLD.train, Oracle(), 0, 100) for turn in row["turns"]]
    for text in texts:
        ids = codec.encode(text)
        assert TOKENIZER.unk_token_id not in ids
        assert normalize_answer(codec.decode(ids)) == normalize_answer(text)
    assert codec.encode("<search>") == [TOKENIZER.convert_tokens_to_ids("<search>")]
    assert codec.encode("unheard of ☃")[-1] == TOKENIZER.unk_token_id


def test_right_demonstrations_reach_the_answer_and_noisy_ones_mix_searches():
    rows = demonstrations(WORLD, WORLD.heldout, Oracle(), 1, 100, noise={})
    questions = [Question(row["id"], row["question"], row["golden_answers"]) for row in rows]
    for trajectory, question in zip(
            replay([row["turns"] for row in rows], questions, TOKENIZER, Oracle(), TINY), questions):
        assert exact_match(trajectory.answer, question.golden_answers) == 1.0 and 1 <= trajectory.n_searches <= 2
        assert all(search.hit for search in trajectory.searches[-1:])
    rows = demonstrations(WORLD, WORLD.train, Oracle(), 1, 600, NOISE)
    questions = [Question(row["id"], row["question"], row["golden_answers"]) for row in rows]
    trajectories = replay([row["turns"] for row in rows], questions, TOKENIZER, Oracle(), TINY)
    searches = [t.n_searches for t in trajectories]
    assert all(searches.count(n) > 20 for n in (0, 1, 2, 3)) and max(searches) == TINY.max_searches
    right = sum(exact_match(t.answer, q.golden_answers) for t, q in zip(trajectories, questions)) / len(rows)
    assert 0.3 < right < 0.65
    assert max(map(len, trajectories)) < 512


def test_the_policy_is_small_seeded_and_starts_with_a_previous_token_head():
    policy, again, other = (build_policy(TOKENIZER, seed) for seed in (0, 0, 1))
    assert 1e6 <= sum(p.numel() for p in policy.parameters()) <= 3e6
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters()))
    assert not torch.equal(policy.model.embed_tokens.weight, other.model.embed_tokens.weight)
    policy.set_attn_implementation("eager")
    with torch.no_grad():
        attention = policy(torch.randint(20, 500, (1, 40)), output_attentions=True).attentions[0][0, 0]  # (40, 40)
    assert attention.diagonal(-1)[5:].mean() > 0.5


def test_prepare_is_atomic_cached_and_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "SHORT_COURSE", 8)
    monkeypatch.setattr(world, "FULL_COURSE", 16)
    monkeypatch.setattr(world, "open_retriever", lambda *arguments, **options: Oracle())
    monkeypatch.setattr(world, "build_world", lambda seed: WORLD)
    real, calls = world.warm_start, []

    def broken(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(world, "warm_start", broken)
    with pytest.raises(KeyboardInterrupt):
        world.prepare(tmp_path, 0)
    assert all(path.suffix == ".lock" for path in tmp_path.iterdir())  # nothing half-made is left
    monkeypatch.setattr(world, "warm_start",
                        lambda *arguments, **options: calls.append(1) or real(*arguments, **options))
    folder = world.prepare(tmp_path, 0, log=lambda line: None)
    assert world.prepare(tmp_path, 0) == folder and len(calls) == 1
    names = {"corpus.jsonl", "train.jsonl", "heldout.jsonl", "demos.jsonl", "protocol.json", "model.safetensors",
             "tokenizer.json"}
    assert names <= {path.name for path in folder.iterdir()}
