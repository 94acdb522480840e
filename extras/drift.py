"""
drift.py — SAN never pays for a search. Why does the number of searches change under it all the same?

    python -m extras.drift                  # some minutes on one core
    python -m extras.drift --seeds 2 --steps 10

SAN's advantages sum to 0 in every stratum of every group. The tokens that decide the structure, the first of each turn
(<search> or <answer>), are the same for a whole stratum, so what they are pushed by sums to 0, too, wherever the state
in which they were sampled is the same: before the first search it always is, it is the prompt. In the two-level bandit
that is the end of it (extras/bandit.py). A language model has more ways to move:

  - its parameters are shared: what is learned at the other tokens (a query, an answer) also moves the decision;
  - after the first search states differ inside a stratum: a good query is followed by another decision than a bad one;
  - AdamW divides by the size of the gradient: a push that nearly cancels is made large again;
  - mini-batches split strata, so that sums are 0 over the batch and not in each part.

First, one optimizer step from the warm-started policy of a regime: the change of P(<search>) at the decisions of
held-out rollouts, when all tokens teach, only decisions, or only the others. Then the same over a training run.
"""
import argparse
import copy

import torch

import train
from config import Config
from data import exact_match, load_questions
from extras import bandit, regimes
from policy import MasterAdamW, load_policy, pad_trajectories
from retriever import open_retriever
from rollout import load_protocol, rollout

PARTS = ("all tokens", "decisions only", "other tokens only")


def decisions(trajectory):
    """1 at the first token of each turn, 0 elsewhere: a list as long as the response."""
    before = [0, *trajectory.sampled]
    return [int(sampled and not earlier) for sampled, earlier in zip(trajectory.sampled, before)]


def masked(advantages, trajectories, part):
    """(N,) advantages -> (N, R) for every response token, 0 at those that are not to teach."""
    out = torch.zeros(len(trajectories), max(len(t.response_ids) for t in trajectories))            # (N, R)
    for row, (advantage, trajectory) in enumerate(zip(advantages, trajectories)):
        first = torch.tensor(decisions(trajectory), dtype=torch.float32)                            # (R,)
        teaches = {"all tokens": torch.ones_like(first), "decisions only": first, "other tokens only": 1 - first}[part]
        out[row, : len(first)] = advantage * teaches
    return out


@torch.no_grad()
def search_probability(model, tokenizer, trajectories, max_searches):
    """Mean P(<search>) over the decisions of these rollouts at which a search was still allowed."""
    ids, _ = pad_trajectories(trajectories, model.device)                                           # (B, T)
    probabilities = model(input_ids=ids).logits.softmax(-1)[..., tokenizer.convert_tokens_to_ids("<search>")]  # (B, T)
    found = []
    for row, trajectory in enumerate(trajectories):
        places = [i for i, first in enumerate(decisions(trajectory)) if first][:max_searches]
        found += [probabilities[row, len(trajectory.prompt_ids) + place - 1].item() for place in places]
    return sum(found) / len(found)


class World:
    """A regime, and what is sampled in it."""

    def __init__(self, regime, cache):
        folder = regimes.prepare(regime, cache)
        self.model, self.tokenizer = load_policy(folder)
        self.protocol = load_protocol(folder)
        self.questions, self.held_out = load_questions(folder / "train.jsonl"), load_questions(folder / "heldout.jsonl")
        self.retriever = open_retriever(str(folder / "corpus.jsonl"), cache_dir=folder / "index")

    def sample(self, model, questions, rollouts, seed):
        trajectories = rollout(model, self.tokenizer, questions, self.retriever, self.protocol, rollouts, 1.0, 128, 128,
                               torch.Generator().manual_seed(seed))
        for t in trajectories:
            t.reward = exact_match(t.answer, questions[t.group].golden_answers)
        return trajectories

    def train(self, config, part, steps):
        """-> searches per rollout in the last step, after `steps` steps in which only `part` of the tokens teach."""
        model = copy.deepcopy(self.model)
        optimizer = MasterAdamW(model, config.learning_rate, (0.9, 0.999), 0.0)
        for step in range(steps + 1):
            questions = train.questions_of_step(self.questions, config, step)
            trajectories = self.sample(model, questions, 8, config.seed * 1000 + step)
            if step < steps:
                advantages = train.compute_advantages(trajectories, config, step)[0]
                train.update(model, optimizer, None, trajectories, masked(advantages, trajectories, part), config, step)
        return sum(t.n_searches for t in trajectories) / len(trajectories)


def show(name, values):
    mean, half = bandit.interval(values)
    print(f"{name:52} {mean:+.4f} ± {half:.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", default="searches-a-lot-badly", choices=list(regimes.MIXTURES))
    parser.add_argument("--seeds", type=int, default=6, help="2 to 16 batches of 512 rollouts for the single steps")
    parser.add_argument("--steps", type=int, default=40, help="RL steps of the training runs, which have 3 seeds")
    parser.add_argument("--cache", default="", help="folder for the regimes; empty: ~/.cache/stratgrpo")
    args = parser.parse_args()
    if not 2 <= args.seeds <= 16:
        parser.error(f"--seeds {args.seeds}: an interval needs 2, and its table ends at 16")
    torch.set_num_threads(1)
    world = World(args.regime, args.cache)
    fixed = world.sample(world.model, world.held_out, 1, 0)
    start = search_probability(world.model, world.tokenizer, fixed, world.protocol.max_searches)
    print(f"{args.regime}: P(<search>) is {start:.3f} at the decisions of {len(fixed)} held-out rollouts")
    print("its change by one pass over 512 rollouts, learning rate 3e-4, mean ± 95 % interval over batches:\n")
    config = Config(questions_per_step=64)
    asked = [train.questions_of_step(world.questions, config, seed) for seed in range(args.seeds)]
    batches = [world.sample(world.model, questions, 8, seed + 1) for seed, questions in enumerate(asked)]
    for advantage, loss, size in (("san", "token-mean", 512), ("san", "sequence-mean", 512), ("san", "token-mean", 16),
                                  ("grpo", "token-mean", 512)):
        for part in PARTS:
            changes = []
            for trajectories in batches:
                config = Config(advantage=advantage, loss=loss, mini_batch=size, warmup_steps=0)
                model = copy.deepcopy(world.model)
                advantages = masked(train.compute_advantages(trajectories, config)[0], trajectories, part)
                optimizer = MasterAdamW(model, config.learning_rate, (0.9, 0.999), 0.0)
                train.update(model, optimizer, None, trajectories, advantages, config, 0)
                changes.append(search_probability(model, world.tokenizer, fixed, world.protocol.max_searches) - start)
            show(f"{advantage}, {loss}, mini-batches of {size}: {part}", changes)
    print(f"\nsearches per rollout after {args.steps} steps of 64 rollouts, 3 seeds (start: "
          f"{sum(t.n_searches for t in batches[0]) / 512:.2f}):\n")
    for advantage in ("san", "grpo"):
        for part in PARTS:
            configs = [Config(advantage=advantage, questions_per_step=8, seed=seed) for seed in range(3)]
            show(f"{advantage}: {part}", [world.train(config, part, args.steps) for config in configs])


if __name__ == "__main__":
    main()
