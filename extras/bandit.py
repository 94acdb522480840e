"""
bandit.py — when does stratification help? The smallest problem in which the question has an answer.

    python -m extras.bandit                             # four known starts, the expected update, the phase diagram:
                                                        # a minute and a half of one core
    python -m extras.bandit --results bandit.jsonl      # the same, and keeps one row per setting and seed

A policy of six numbers. It first picks a stratum, 0, 1 or 2 searches, with probability softmax(logits), then acts well
with probability sigmoid(skill[stratum]), and is paid 1 with a probability that depends on both. The best policy always
searches twice and searches well (expected reward 1); never searching twice pays at most .4. At the start two searches
have the share p and the skill q: p large, q small is "searches a lot, badly", p small is "good searching is rare".
The update is the plain score-function gradient with the advantages of stratgrpo.py, on every rollout of the step once:
no clipping, no Adam, nothing shared between the strata, so that what differs between alphas is the estimator alone.

What to look for. A gradient does two things: it *pushes* rollouts from stratum to stratum (logits), and it *teaches*
inside a stratum (skill). GRPO pushes towards the stratum that pays more now; where two searches are common but bad it
empties that stratum before it has been learned. SAN never pushes at all, a blend 1 - alpha times as hard as GRPO; and
where a stratum has hardly a member per group, SAN teaches less, too (a lone rollout gets 0). A falling alpha has both.

All settings use the same random numbers in the same seed: differences between estimators are paired, and a row does not
depend on the rows beside it. (Neighbouring cells of the diagram are then no independent evidence for each other.)
"""
import argparse
import itertools
import json
import pathlib
import statistics

import torch

from stratgrpo import group_advantages, stratified_advantages

PAY_WELL = torch.tensor([0.4, 0.4, 1.0], dtype=torch.float64)  # P(reward 1) in a stratum when acting well, badly
PAY_BADLY = torch.tensor([0.1, 0.1, 0.05], dtype=torch.float64)
ALPHAS = ("0", "0.3", "0.6", "0.8", "1", "0.9:0.3")  # 0 is GRPO, 1 is SAN; start:end is linear over the steps
NAMES = {"0": "GRPO", "1": "SAN"}
SHARES, SKILLS, GROUP_SIZES = (0.1, 0.2, 0.4, 0.6, 0.8), (0.02, 0.05, 0.12, 0.2, 0.4), (4, 8, 16, 32)
KNOWN = (  # p, q, group size; final reward of GRPO, 0.6, 0.8, SAN in an earlier program by another hand (mean ± std)
    (0.6, 0.05, 8, ("0.47 ± 0.19", "", "0.98 ± 0.00", "0.98", "0.73")),
    (0.4, 0.05, 16, ("0.39", "", "0.52 ± 0.20", "0.97", "0.62")),
    (0.2, 0.12, 8, ("0.98", "", "0.91 ± 0.10", "0.83", "0.48")),
    (0.1, 0.2, 8, ("0.99", "", "0.88", "0.44", "0.40")),
)
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)  # n = 2 ... 16


def start(p, q):
    """-> logits (3,), skill (3,): the policy that searches twice with probability p and does it well with q."""
    if not (0 < p < 1 and 0 < q < 1):
        raise ValueError(f"p is {p}, q is {q}: both must lie strictly between 0 and 1")
    shares = torch.tensor([0.4 * (1 - p), 0.6 * (1 - p), p], dtype=torch.float64)
    return shares.log(), torch.tensor([0.5, 0.5, q], dtype=torch.float64).logit()


def expected_reward(logits, skill):
    """(..., 3), (..., 3) -> (...), exact."""
    return (logits.softmax(-1) * (PAY_BADLY + skill.sigmoid() * (PAY_WELL - PAY_BADLY))).sum(-1)


def alpha_at(alpha, progress):
    """"0.6" -> 0.6; "0.9:0.3" -> 0.9 at progress 0, 0.3 at progress 1, linear. ValueError outside [0, 1]."""
    first, _, last = alpha.partition(":")
    value = float(first) + (float(last or first) - float(first)) * progress
    if not 0 <= value <= 1:
        raise ValueError(f"alpha is {alpha!r}: it must lie in [0, 1]")
    return value


def gradients(logits, skill, stratum, well, advantages):
    """of the mean over R rollouts of advantage x log-probability, for C independent policies.

    logits, skill (C, 3); stratum (C, R) integer; well (C, R) bool; advantages (C, R) -> two tensors (C, 3)
    """
    surprise = well.double() - skill.sigmoid().gather(1, stratum)  # (C, R) d log P(act) / d skill[stratum]
    zeros = torch.zeros_like(logits)  # (C, 3)
    push = zeros.scatter_add(1, stratum, advantages) - logits.softmax(1) * advantages.sum(1, keepdim=True)  # (C, 3)
    lesson = zeros.scatter_add(1, stratum, advantages * surprise)  # (C, 3)
    return push / stratum.shape[1], lesson / stratum.shape[1]


def run(settings, seeds, steps=400, rollouts=128, step_size=0.3):
    """train one policy per setting and seed -> one row (dict) each.

    settings  dicts with p, q, group_size, alpha (as in ALPHAS). rollouts is per step: rollouts / group_size questions,
    so that group sizes are compared at equal cost. Raises ValueError naming what does not fit.
    """
    cells = list(itertools.product(settings, seeds))  # C of them
    for setting in settings:
        if rollouts % setting["group_size"]:
            raise ValueError(f"group_size {setting['group_size']} does not divide the {rollouts} rollouts of a step")
    logits, skill = map(torch.stack, zip(*(start(cell["p"], cell["q"]) for cell, _ in cells)))  # (C, 3), (C, 3)
    size = torch.tensor([cell["group_size"] for cell, _ in cells])[:, None]  # (C, 1)
    groups = torch.arange(rollouts) // size + torch.arange(len(cells))[:, None] * rollouts  # (C, R)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for step in range(steps):
        draws = torch.stack([torch.rand(3, rollouts, generator=g, dtype=torch.float64) for g in generators])
        which, act, luck = draws.repeat(len(settings), 1, 1).unbind(1)  # (C, R) each
        stratum = (which[..., None] > logits.softmax(1).cumsum(1)[:, None, :2]).sum(-1)  # (C, R)
        well = act < skill.sigmoid().gather(1, stratum)  # (C, R)
        reward = (luck < torch.where(well, PAY_WELL[stratum], PAY_BADLY[stratum])).double()  # (C, R)
        grpo = group_advantages(reward.flatten(), groups.flatten()).view_as(reward)  # (C, R)
        san = stratified_advantages(reward.flatten(), groups.flatten(), stratum.flatten()).view_as(reward)  # (C, R)
        alpha = [[alpha_at(cell["alpha"], step / max(steps - 1, 1))] for cell, _ in cells]
        alpha = torch.tensor(alpha, dtype=torch.float64)  # (C, 1)
        push, lesson = gradients(logits, skill, stratum, well, alpha * san + (1 - alpha) * grpo)
        logits, skill = logits + step_size * push, skill + step_size * lesson
    final = torch.stack([expected_reward(logits, skill), logits.softmax(1)[:, 2], skill.sigmoid()[:, 2]], 1)  # (C, 3)
    return [{"part": 1, **cell, "seed": seed, "final_reward": reward, "final_share": share, "final_skill": well}
            for (cell, seed), (reward, share, well) in zip(cells, final.tolist())]


def expected_gradients(logits, skill, group_size):
    """what `gradients` of one group is on average over the sampling, exactly: {"GRPO" or "SAN": two tensors (3,)}.

    logits, skill (3,). Every way to fill a group with the six outcomes (stratum, reward) is listed, up to order, and
    weighted with its multinomial probability. As group_size grows GRPO's push on logit k tends to
    share_k (mean_k - mean) / std. SAN's is 0, and not only on average: its advantages sum to 0 in every stratum of
    every group, so no batch moves the logits at all. A blend pushes 1 - alpha times as hard as GRPO.
    """
    shares, well = logits.softmax(0), skill.sigmoid()  # (3,)
    pay = torch.stack([1 - PAY_WELL, PAY_WELL], 1)  # (3, 2) P(reward 0 and 1 | stratum, acting well)
    chance = well[:, None] * pay + (1 - well)[:, None] * torch.stack([1 - PAY_BADLY, PAY_BADLY], 1)  # (3, 2)
    surprise = (well[:, None] * pay / chance - well[:, None]).flatten()  # (6,) E[well - P(well) | outcome], Bayes
    outcome = torch.tensor(list(itertools.combinations_with_replacement(range(6), group_size)))  # (M, G)
    count = torch.nn.functional.one_hot(outcome, 6).sum(1)  # (M, 6)
    log_weight = torch.lgamma(torch.tensor(group_size + 1.0)) - torch.lgamma(count + 1.0).sum(1)  # (M,)
    weight = (log_weight + count.double() @ (shares[:, None] * chance).flatten().log()).exp()  # (M,)
    stratum, reward = outcome.flatten() // 2, (outcome.flatten() % 2).double()  # (M * G,)
    groups = torch.arange(len(outcome)).repeat_interleave(group_size)  # (M * G,)
    member = torch.nn.functional.one_hot(stratum, 3).double()  # (M * G, 3)
    result = {"GRPO": group_advantages(reward, groups), "SAN": stratified_advantages(reward, groups, stratum)}
    for name, advantages in result.items():
        weighted = advantages * weight.repeat_interleave(group_size) / group_size  # (M * G,)
        result[name] = weighted @ (member - shares), (weighted * surprise[outcome.flatten()]) @ member  # (3,), (3,)
    return result


def interval(values):
    """-> mean and half-width of its 95 % Student interval."""
    return statistics.mean(values), T_975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5


def known_starts(seeds):
    print(f"Known starts: final expected reward, mean ± std over {len(seeds)} seeds. Below each row the values of an")
    print("earlier program by another hand, for GRPO, 0.6, 0.8 and SAN\n")
    print("p    q     group  " + "".join(f"{NAMES.get(alpha, alpha):14}" for alpha in ALPHAS))
    for p, q, size, theirs in KNOWN:
        settings = [{"p": p, "q": q, "group_size": size, "alpha": alpha} for alpha in ALPHAS]
        rows = run(settings, seeds, rollouts=16 * size)
        finals = [[row["final_reward"] for row in rows if row["alpha"] == alpha] for alpha in ALPHAS]
        print(f"{p:<4} {q:<5} {size:<5}  " + "".join(
            f"{statistics.mean(final):.2f} ± {statistics.stdev(final):.2f}   " for final in finals))
        print(" " * 18 + "".join(f"{value:14}" for value in theirs), flush=True)


def expected_updates():
    print("\nExact expected gradient: push on the logit of two searches, and lesson on the skill in them")
    print("(last row: two searches are good, but have become rare)\n")
    print("p    q     group  push: GRPO      SAN   lesson: GRPO      SAN")
    for p, q, size in [known[:3] for known in KNOWN] + [(0.1, 0.9, 8)]:
        exact = expected_gradients(*start(p, q), size)
        (push, lesson), (no_push, less) = [[part[2].item() for part in exact[name]] for name in ("GRPO", "SAN")]
        print(f"{p:<4} {q:<5} {size:<5} {push:11.4f} {abs(no_push):8.4f} {lesson:14.4f} {less:8.4f}")
    print("\nSAN pushes by 0 in every batch: if something else moves the number of searches, nothing pulls it back.")


def tables(rows):
    """print the phase diagram of one group size: every number, maps of who wins where, and the sums over all starts."""
    final = {}
    for row in sorted(rows, key=lambda row: row["seed"]):  # by seed, because margins are paired
        final.setdefault((row["p"], row["q"], row["alpha"]), []).append(row["final_reward"])
    starts = sorted({key[:2] for key in final})
    title = f"\nGroup size {rows[0]['group_size']}:"

    def margin(p, q, alpha):
        return interval([blend - grpo for blend, grpo in zip(final[p, q, alpha], final[p, q, "0"])])

    def show(p, q, alpha):
        mean, half = margin(p, q, alpha)
        return "=    " if abs(mean) < 0.005 else f"{mean:+.2f}{'~' if abs(mean) <= half else ' '}"

    def best(p, q):
        alpha = max(ALPHAS[1:], key=lambda alpha: margin(p, q, alpha)[0])
        return f"{NAMES.get(alpha, alpha)} {show(p, q, alpha)}"

    def print_map(cell, width):
        skills = sorted({q for _, q in starts})
        print("p \\ q " + "".join(f"{q:>{width}}" for q in skills))
        for p in sorted({p for p, _ in starts}):
            print(f"{p:<6}" + "".join(f"{cell(p, q):>{width}}" for q in skills))

    print(f"{title} final expected reward, mean ± 95 % interval over {len({row['seed'] for row in rows})} seeds\n")
    print("p    q     " + "".join(f"{NAMES.get(alpha, alpha):14}" for alpha in ALPHAS))
    for p, q in starts:
        cells = [interval(final[p, q, alpha]) for alpha in ALPHAS]
        print(f"{p:<4} {q:<5} " + "".join(f"{mean:.2f} ± {half:.2f}   " for mean, half in cells))
    print(f"{title} the best alpha > 0 and its margin over GRPO. -: GRPO beats every alpha; =: less than 0.005;")
    print("~: the margin's 95 % interval holds 0. (The best of five is chosen afterwards, which flatters it)\n")
    print_map(best, 16)
    for alpha in ALPHAS[1:]:
        print(f"{title} {NAMES.get(alpha, alpha)} minus GRPO\n")
        print_map(lambda p, q: show(p, q, alpha), 8)
    print(f"{title} over {len(starts)} starts. better, worse than GRPO: by 0.05 or more, and more than noise\n")
    print("alpha     mean   worst  better  worse  alike")
    for alpha in ALPHAS:
        means = [statistics.mean(final[p, q, alpha]) for p, q in starts]
        clear = [mean for mean, half in (margin(p, q, alpha) for p, q in starts) if abs(mean) > max(half, 0.05)]
        better = sum(mean > 0 for mean in clear)
        print(f"{NAMES.get(alpha, alpha):9} {statistics.mean(means):.3f}  {min(means):5.2f}  {better:6}"
              f"  {len(clear) - better:5}  {len(starts) - len(clear):5}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="2 to 16")
    parser.add_argument("--results", type=pathlib.Path, help="new file, a line of JSON per setting and seed")
    args = parser.parse_args()
    if not 2 <= args.seeds <= 16:
        parser.error(f"--seeds is {args.seeds}: an interval needs 2, and its table ends at 16")
    if args.results and args.results.exists():
        parser.error(f"--results {args.results} exists: name a new file")
    seeds, rows = range(args.seeds), []
    known_starts(seeds)
    expected_updates()
    for size in GROUP_SIZES:
        fresh = []
        for p in SHARES:
            fresh += run([{"p": p, "q": q, "group_size": size, "alpha": a} for q in SKILLS for a in ALPHAS], seeds)
        tables(fresh)
        rows += fresh
    if args.results:
        args.results.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
