"""
strata.py — what counts as "the same structure": trajectories in, one integer label each out.

    python train.py --strata outcome                    # searches (the paper's), outcome, placement, random, none, auto
    python train.py --strata mymodule:my_function       # your own: a list of trajectories -> a list of integers

Labels are compared inside a question's group only (stratgrpo.py, convention 2). Only the order of labels matters beyond
that, and only to --small-strata pool, which merges neighbours.
"""
import importlib
import random

TREE_MEMORY, TREE_DEPTH, TREE_LEAF = 8, 3, 0.05  # steps remembered, splits on a path, share of the rollouts in a leaf


def searches(trajectories):
    """The paper's: the number of executed searches."""
    return [t.n_searches for t in trajectories]


def outcome(trajectories):
    """2 n + 1 if any passage of the n searches contains a golden answer, else 2 n: a lucky search is not compared with
    an unlucky one. But a good query brings its own luck, and that merit is then no longer paid."""
    return [2 * t.n_searches + any(search.hit for search in t.searches) for t in trajectories]


def placement(trajectories):
    """Where the searches happen. The policy's own tokens are cut into thirds, early, middle and late; the label is
    1 (a search in the early third) + 2 (in the middle) + 4 (in the late one). A search lies where its closing tag is.

    Two rollouts of one search each differ here if one searches at once and then reasons, the other first reasons.
    """
    labels = []
    for t in trajectories:
        total = sum(t.sampled)
        thirds = {3 * (sum(t.sampled[: search.position]) - 1) // total for search in t.searches}
        labels.append(sum(2**third for third in thirds))
    return labels


def shuffled_searches(trajectories, seed):
    """The control: strata of the same sizes as those of `searches`, filled by lot. What these gain is not structure."""
    labels = searches(trajectories)
    members = {}
    for i, t in enumerate(trajectories):
        members.setdefault(t.group, []).append(i)
    generator = random.Random(seed)
    shuffled = list(labels)
    for indices in members.values():
        for i, source in zip(indices, generator.sample(indices, len(indices))):
            shuffled[i] = labels[source]
    return shuffled


def features(trajectories):
    """What the tree of `auto` may split on: searches, searches that hit, invalid turns, sampled tokens."""
    return [[t.n_searches, sum(search.hit for search in t.searches), t.n_invalid, sum(t.sampled)] for t in trajectories]


def memory_row(trajectories, step):
    """What `auto` keeps of a step: features, and the rewards minus their group's mean, which no question's difficulty
    enters."""
    by_group = {}
    for t in trajectories:
        by_group.setdefault(t.group, []).append(t.reward)
    targets = [t.reward - sum(by_group[t.group]) / len(by_group[t.group]) for t in trajectories]
    return {"step": step, "features": features(trajectories), "targets": targets}


def tree(trajectories, memory):
    """The leaves of a small regression tree that predicts a reward relative to its group from the structure, fitted to
    the last TREE_MEMORY rows of memory, all of them of past steps: a label must not depend on the reward it will judge.
    Before there is any past, one stratum."""
    rows = memory[-TREE_MEMORY:]
    if not rows:
        return [0] * len(trajectories)
    from sklearn.tree import DecisionTreeRegressor  # a second of import that only this needs

    fitted = DecisionTreeRegressor(max_depth=TREE_DEPTH, min_samples_leaf=TREE_LEAF, random_state=0)
    fitted.fit([x for row in rows for x in row["features"]], [y for row in rows for y in row["targets"]])
    return fitted.apply(features(trajectories)).tolist()  # node numbers, in depth-first order


def load_function(spec):
    """"module:function" -> the function. ValueError naming the flag."""
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--strata {spec}: {error}; give one of {', '.join(NAMES)} or module:function") from error


NAMES = ("searches", "outcome", "placement", "random", "none", "auto")


def label(trajectories, name, seed, memory):
    """-> (N,) list of integer labels under the partition `name`. seed: for random. memory: for auto, see `tree`."""
    if name == "random":
        return shuffled_searches(trajectories, seed)
    if name == "auto":
        return tree(trajectories, memory)
    if name == "none":
        return [0] * len(trajectories)
    known = {"searches": searches, "outcome": outcome, "placement": placement}
    labels = list((known[name] if name in known else load_function(name))(trajectories))
    if len(labels) != len(trajectories) or not all(isinstance(value, int) for value in labels):
        raise ValueError(f"--strata {name}: must return one integer for each of {len(trajectories)} trajectories")
    return labels
