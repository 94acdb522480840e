"""
regimes.py — two small worlds in which the two-level bandit (extras/bandit.py) becomes a language model that
searches.

    python -m extras.regimes                # makes both, once, and measures how their policies start

All questions are of one kind, "In which country is the town where Marta Venker was born?", and take two searches: the
person, then the town read in the passage found. A rollout has zero, one or two searches of one passage each and no
thoughts, 15 to 45 tokens, so that an RL step of 64 rollouts takes a fraction of a second.
  - guessing pays: six countries, the most frequent one holds 40 % of the towns. Guesses drawn from that prior are right
    in a quarter of the cases, and always guessing the most frequent one would be right in 40 %.
  - what the second search asks for decides. Asking for the town shows its country. Asking for the person again shows
    nothing new, and the policy then answers the town's name, which is always wrong.
  - train and held-out questions share no person and no town: no country can be known by heart.

A regime is how often the warm-started policy does each of four things, and nothing else. MIXTURES has the shares in the
demonstrations; what the policies then do, as `python -m extras.regimes` measures it:
  - "searches-a-lot-badly": 6 rollouts in 10 search twice, but only 1 in 25 of those asks for the town. Searching twice
    pays far less than guessing until the right second query has been found.
  - "good-searching-is-rare": 1 rollout in 6 searches twice, and 1 in 6 of those asks for the town. Searching twice pays
    nearly what guessing pays from the start.

The warm start is one pass of supervised learning: a short course of right demonstrations teaches reading and copying,
then the mixture sets the shares. One policy per regime serves every estimator and every seed. A run, F being the
folder that is printed:

    python train.py --preset tiny --model F --questions F/train.jsonl --eval-questions F/heldout.jsonl \\
        --corpus F/corpus.jsonl --questions-per-step 8 --max-context 128 --slots 64 --steps 50
"""
import argparse
import collections
import random
import shutil

import torch

import policy
import retriever
import rollout
import world
from data import exact_match, load_questions

QUESTION = world.QUESTIONS["birthplace", "country"]
PRIOR = dict(zip(world.COUNTRIES, (0.40, 0.20, 0.15, 0.10, 0.08, 0.07)))    # country -> share of the towns
# asking for the town is demonstrated somewhat more often than the policy will do it: it errs where it chooses between
# two names to copy
MIXTURES = {
    "searches-a-lot-badly": {"guess": 0.16, "one search": 0.24, "person again": 0.54, "town": 0.06},
    "good-searching-is-rare": {"guess": 0.34, "one search": 0.51, "person again": 0.105, "town": 0.045},
}
PROTOCOL = rollout.Protocol(prompt="{question}\n", retry=world.TINY.retry, passage="{text}\n", passages=1,
                            max_searches=2, max_turn_tokens=8, max_observation_tokens=24)
PEOPLE, TOWNS, HELD_OUT, HELD_OUT_QUESTIONS = 5000, 1900, 0.2, 200
SHORT_COURSE, FULL_COURSE, BATCH, LEARNING_RATE = 4000, 8000, 16, 3e-3


def build(rng):
    """-> passages, training questions and held-out questions, rows for jsonl; metadata.chain: person, town, country."""
    def names(words, count):
        return rng.sample([f"{a} {b}" for a in words[0] for b in words[1]], count)

    people, towns, passages, questions = names(world.PEOPLE, PEOPLE), names(world.TOWNS, TOWNS), [], {}
    for split, part in (("heldout", lambda rows: rows[: int(HELD_OUT * len(rows))]),
                        ("train", lambda rows: rows[int(HELD_OUT * len(rows)) :])):
        countries = {town: guess(rng) for town in part(towns)}
        passages += [{"title": town, "text": world.SENTENCES["town", "country"].format(s=town, o=country)}
                     for town, country in countries.items()]
        questions[split] = []
        for i, person in enumerate(part(people)):
            town = rng.choice(part(towns))
            passages.append({"title": person, "text": world.SENTENCES["person", "birthplace"].format(s=person, o=town)})
            questions[split].append({
                "id": f"{split}-{i}", "question": QUESTION.format(s=person), "golden_answers": [countries[town]],
                "metadata": {"chain": [person, town, countries[town]]}})
    passages = [{"id": f"p{i}", **passage} for i, passage in enumerate(passages)]
    return passages, questions["train"], questions["heldout"][:HELD_OUT_QUESTIONS]


def guess(rng):
    return rng.choices(list(PRIOR), PRIOR.values())[0]


def demonstrate(question, behaviour, rng):
    """The turns of one demonstration; a guess does not know the truth."""
    person, town, country = question["metadata"]["chain"]
    queries, answer = {"guess": ([], guess(rng)), "one search": ([person], guess(rng)),
                       "person again": ([person, person], town), "town": ([person, town], country)}[behaviour]
    return [f"<search> {query} </search>" for query in queries] + [f"<answer> {answer} </answer>"]


def demonstrations(questions, mixture, rng):
    """The warm start in order: the short course, then the mixture. -> rows of demos.jsonl."""
    behaviours = ["town"] * SHORT_COURSE + rng.choices(list(mixture), mixture.values(), k=FULL_COURSE)
    return [{"id": f"demo-{i}", "question": q["question"], "golden_answers": q["golden_answers"],
             "turns": demonstrate(q, behaviour, rng)}
            for i, (q, behaviour) in enumerate(zip(rng.choices(questions, k=len(behaviours)), behaviours))]


def prepare(regime, cache="", log=print):
    """-> folder with the world of `regime` and its warm-started policy, see world.made_once: corpus.jsonl, train.jsonl,
    heldout.jsonl, demos.jsonl, protocol.json, model and tokenizer. KeyError: no such regime."""
    mixture = MIXTURES[regime]

    def make(folder):
        rng, tokenizer = random.Random(0), world.build_tokenizer()
        passages, train, heldout = build(rng)
        for name, rows in (("corpus", passages), ("train", train), ("heldout", heldout),
                           ("demos", demonstrations(train, mixture, rng))):
            world.write_lines(folder / f"{name}.jsonl", rows)
        tokenizer.save_pretrained(folder)
        rollout.save_protocol(PROTOCOL, folder)
        log(f"regime {regime}: {len(passages)} passages, {len(train)} training questions; warm start, once")
        search = retriever.open_retriever(str(folder / "corpus.jsonl"), cache_dir=folder / "index")
        course = rollout.load_demonstrations(folder / "demos.jsonl", tokenizer, search, PROTOCOL)
        model = world.build_policy(tokenizer, seed=0, num_hidden_layers=3)
        policy.warm_start(model, course, len(course) // BATCH, BATCH, LEARNING_RATE, 1024, seed=None, log_every=50,
                          log=log)
        model.save_pretrained(folder)
        shutil.rmtree(folder / "index")

    sources = ("extras/regimes.py", "world.py", "policy.py", "rollout.py")
    return world.made_once(regime, sources, cache, log, make)


def start(folder, cache="", rollouts=4):
    """Sampled rollouts on the held-out questions -> {number of searches: (share of all rollouts, mean reward, share of
    those in it whose second search asked for the town)}."""
    model, tokenizer = policy.load_policy(folder)
    questions = load_questions(folder / "heldout.jsonl")
    search = retriever.open_retriever(str(folder / "corpus.jsonl"), cache_dir=cache or None)
    trajectories = rollout.rollout(model, tokenizer, questions, search, rollout.load_protocol(folder), rollouts, 1.0,
                                   64, 128, torch.Generator().manual_seed(0))
    table = collections.defaultdict(list)
    for t in trajectories:
        question = questions[t.group]
        town = question.metadata["chain"][1]
        table[t.n_searches].append((exact_match(t.answer, question.golden_answers),
                                    t.n_searches == 2 and t.searches[1].query == town))
    return {n: (len(rows) / len(trajectories), *(sum(column) / len(rows) for column in zip(*rows)))
            for n, rows in sorted(table.items())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default="", help="folder for what is made; empty: ~/.cache/stratgrpo")
    cache = parser.parse_args().cache
    torch.set_num_threads(1)
    for regime in MIXTURES:
        made = prepare(regime, cache)
        print(f"{regime}: {made}")
        for n, (share, reward, right) in start(made, cache).items():
            print(f"  {n} searches: {share:.1%} of the rollouts, reward {reward:.3f}, second query right {right:.1%}")
