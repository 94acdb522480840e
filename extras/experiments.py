"""
experiments.py — the evidence in the README: when does stratification help? Flat, resumable, never a single run.

    python -m extras.experiments run --parts 1,2,3          # under an hour on two cores; goes on where it stopped
    python -m extras.experiments run --parts 2 --seeds 1    # a look
    python -m extras.experiments run --parts 4 --model SmolLM2-135M-Instruct --data FOLDER
    python -m extras.experiments table                      # results.jsonl as the tables of the README

 1. the two-level bandit (extras/bandit.py): shares, skills, alphas, group sizes.
 2. the two regimes of extras/regimes.py: ten estimators.
 3. the first regime again: group sizes at equal rollouts, ddof, rules for small strata, token against sequence mean.
 4. a real model on real multi-hop questions, GRPO against Stratified GRPO. --data holds corpus/multihop.jsonl and
    questions/multihop_train.jsonl, 2wikimultihopqa_dev.jsonl; demonstrations come from extras/multihop_demos.py.

A run is train.py with the flags listed below and nothing else, started from the one warm-started policy of its regime;
a seed decides questions and sampling. Finished runs are lines of results.jsonl, in any order; an interrupted run is
made again. Runs share nothing, so that --workers of them go on at a time, one thread each.
"""
import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback

from checkpoint import append_line, read_lines
from extras import bandit, regimes

BAD, RARE = "searches-a-lot-badly", "good-searching-is-rare"
COMMON = ("--preset tiny --questions-per-step 8 --rollouts-per-question 8 --max-context 128 --slots 64 --steps 50 "
          "--dump-every 1000").split()
ARMS = {  # part 2: estimator -> flags
    "grpo": "--advantage grpo", "stratified 0.6": "", "stratified 0.8": "--alpha 0.8",
    "stratified 0.9:0.3": "--alpha 0.9:0.3", "san": "--advantage san", "random strata 0.6": "--strata random",
    "rloo": "--advantage rloo", "dr-grpo": "--advantage dr-grpo", "ppo": "--advantage ppo --critic-learning-rate 1e-2",
    "ppo, sees searches": "--advantage ppo --critic-learning-rate 1e-2 --critic-sees-searches",
}
GROUPS = {  # part 3, all in the first regime. 64 rollouts a step, whatever the group size
    f"{name}, group of {size}": f"{flags} --questions-per-step {64 // size} --rollouts-per-question {size}"
    for size in (4, 16, 32) for name, flags in (("grpo", "--advantage grpo"), ("stratified 0.6", ""))
}
RULES = {
    "stratified 0.6, ddof 1": "--ddof 1", "grpo, ddof 1": "--advantage grpo --ddof 1",
    **{f"stratified 0.6, strata below 4: {rule}": f"--min-stratum 4 --small-strata {rule}"
       for rule in ("zero", "center", "pool", "shrink")},
    "grpo, sequence mean": "--advantage grpo --loss sequence-mean",
    "stratified 0.6, sequence mean": "--loss sequence-mean",
}
REAL = ("--preset tiny --max-context 512 --eval-limit 100 --questions-per-step 8 --rollouts-per-question 8 --slots 64 "
        "--mini-batch 32 --micro-batch-tokens 2048 --learning-rate 1e-5 --warmup-steps 2 --dump-every 1").split()
REAL_WARM_START = ("--steps 0 --sft-steps 32 --sft-batch 8 --sft-learning-rate 1e-4 --max-searches 2 "
                   "--max-turn-tokens 96 --max-observation-tokens 80").split()
REAL_PROMPT = ("Answer the question. Think in <think> </think>. Look things up with <search> query </search>. Give a "
               "short answer in <answer> </answer>. Question: {question}\n")
LAST = 10  # the end of a run: its last steps, whose sampled EM is the mean of 640 rollouts


def summarise(folder):
    """A finished run folder -> what results.jsonl keeps of it."""
    evaluations = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    steps = read_lines(folder / "metrics.jsonl")
    last = str(max(map(int, evaluations)))
    keys = ("em", "searches", "entropy", "grad_norm", "approx_kl", "clipfrac", "dead_share", "singleton_share",
            "var_group", "var_stratum", "response_tokens", "unanswered_share")
    curves = {key: [row.get(key) for row in steps] for key in keys}  # None: a step without an update
    curves["two_searches"] = [row["by_searches"].get("2", {"share": 0.0})["share"] for row in steps]
    return {"em_before": evaluations["0"]["em"], "em": evaluations[last]["em"],
            "searches_before": evaluations["0"]["searches"], "searches": evaluations[last]["searches"],
            "seconds": sum(row["rollout_seconds"] + row["update_seconds"] for row in steps), "curves": curves}


def one_run(task):
    """Worker: train.py in this process, in a folder of its own. -> the row of results.jsonl, or a traceback (str)."""
    import train  # here: every worker has its own torch and its own Java machine, which it keeps

    row, flags, logs = task
    log = open(logs / f"{row['part']}-{row['regime']}-{row['arm']}-{row['seed']}.log".replace(" ", "_"), "w")
    with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            train.main([*flags, "--name", "run", "--seed", str(row["seed"])])
            return {**row, "flags": " ".join(flags), **summarise(pathlib.Path("runs/run"))}
        except (Exception, SystemExit):
            return f"{log.name}:\n{traceback.format_exc()}"
        finally:
            os.chdir("/")


def plan(parts, seeds, cache):
    """-> list of (row, flags) of parts 2 and 3; makes the regimes."""
    tasks = []
    for regime in (BAD, RARE) if parts & {2, 3} else ():
        folder = regimes.prepare(regime, cache)
        data = [f"--model {folder} --questions {folder}/train.jsonl --eval-questions {folder}/heldout.jsonl "
                f"--corpus {folder}/corpus.jsonl".split(), ["--cache", str(folder / "index")]]
        for part, arms in ((2, ARMS), (3, {**GROUPS, **RULES})):
            if part in parts and (part == 2 or regime == BAD):
                tasks += [({"part": part, "regime": regime, "arm": arm, "seed": seed},
                           [*COMMON, *sum(data, []), *flags.split()])
                          for seed in range(seeds) for arm, flags in arms.items()]
    return sorted(tasks, key=lambda task: task[0]["seed"])  # whenever it is stopped, the arms have equally many seeds


def plan_real(model, data, seeds, results):
    """-> list of (row, flags) of part 4; makes the warm start first, beside the results."""
    import train
    from extras import multihop_demos

    source, aside = pathlib.Path(data).resolve(), results.parent / "part4"
    corpus, questions = source / "corpus/multihop.jsonl", source / "questions/multihop_train.jsonl"
    flags = [*REAL, "--corpus", str(corpus), "--questions", str(questions),
             "--eval-questions", str(source / "questions/2wikimultihopqa_dev.jsonl")]
    warm = aside / "runs/warm/checkpoint-000000"
    if not warm.is_dir():
        aside.mkdir(exist_ok=True)
        (aside / "prompt.txt").write_text(REAL_PROMPT, encoding="utf-8")
        multihop_demos.main([str(questions), str(aside / "demos.jsonl"), "--max-searches", "2"])
        with contextlib.chdir(aside):
            train.main([*flags, *REAL_WARM_START, "--model", str(pathlib.Path(model).resolve()), "--name", "warm",
                        "--demos", "demos.jsonl", "--prompt-file", "prompt.txt"])
    return [({"part": 4, "regime": "real", "arm": arm, "seed": seed},
             [*flags, "--steps", "12", "--advantage", arm, "--model", str(warm.resolve())])
            for seed in range(seeds) for arm in ("grpo", "stratified")]


def key(row):
    return row["part"], row["regime"], row["arm"], row["seed"]


def run(args):
    results, started = pathlib.Path(args.results).resolve(), time.monotonic()
    results.parent.mkdir(parents=True, exist_ok=True)
    logs = results.parent / "logs"
    logs.mkdir(exist_ok=True)
    rows = read_lines(results)
    if 1 in args.parts:
        done = {(row["group_size"], row["p"]) for row in rows if row["part"] == 1}
        for size in bandit.GROUP_SIZES:
            for p in bandit.SHARES:
                if (size, p) not in done:
                    settings = [{"p": p, "q": q, "group_size": size, "alpha": alpha}
                                for q in bandit.SKILLS for alpha in bandit.ALPHAS]
                    append_line(results, *bandit.run(settings, range(8)))
    done = {key(row) for row in rows if row["part"] > 1}
    tasks = plan(args.parts, args.seeds, args.cache)
    if 4 in args.parts:
        tasks += plan_real(args.model, args.data, args.seeds, results)
    tasks = [(row, flags, logs) for row, flags in tasks if key(row) not in done]
    if not tasks:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for count, row in enumerate(pool.imap_unordered(one_run, tasks), 1):
            if isinstance(row, str):
                sys.exit(f"error: a run failed, see {row}")
            append_line(results, row)
            print(f"{(time.monotonic() - started) / 60:6.1f} min {count:4d}/{len(tasks)} | part {row['part']} "
                  f"{row['regime']} {row['arm']} seed {row['seed']} | EM {row['em_before']:.3f} -> {row['em']:.3f} | "
                  f"searches {row['searches_before']:.2f} -> {row['searches']:.2f} | {row['seconds']:.0f} s",
                  flush=True)


# -----------------------------------------------------------------------------
# tables

def mean_interval(values):
    """"mean ± half-width" of the 95 % Student interval over seeds; one seed has no interval."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    mean, half = bandit.interval(values)
    return f"{mean:.2f} ± {half:.2f}"


def end(row, name, last=LAST):
    values = [value for value in row["curves"][name][-last:] if value is not None]
    return statistics.mean(values) if values else 0.0


def baseline_of(arm):
    """The arm of GRPO that an arm is compared with: of the same group size."""
    return "grpo" + (arm[arm.index(", group of") :] if ", group of" in arm else "")


def row_of(arm, rows, grpo, guess):
    """One line: learning curve, sampled EM in the last steps and what it is more than GRPO's of the same seed, greedy
    EM, searches, share of seeds that do not beat guessing."""
    curve = [mean_interval([statistics.mean(row["curves"]["em"][first : first + 10]) for row in rows]).split(" ")[0]
             for first in range(0, len(rows[0]["curves"]["em"]), 10)]
    stuck = sum(row["em"] <= guess for row in rows)
    margins = [end(row, "em") - end(other, "em") for row in rows for other in grpo if other["seed"] == row["seed"]]
    margin = mean_interval(margins) if margins and rows is not grpo else ""
    return (f"| {arm} | {len(rows)} | {' '.join(curve)} | {mean_interval([end(row, 'em') for row in rows])} | "
            f"{margin} | {mean_interval([row['em'] for row in rows])} | "
            f"{mean_interval([end(row, 'searches') for row in rows])} | {stuck}/{len(rows)} |")


HEADER = ("| estimator | seeds | sampled EM, means of ten steps | sampled EM, last 10 steps | minus GRPO, paired | "
          "greedy EM after | searches, last 10 steps | stuck at guessing |\n|---|---|---|---|---|---|---|---|")


def table(args):
    rows = read_lines(pathlib.Path(args.results))
    if not rows:
        sys.exit(f"error: --results {args.results}: no such file or no rows; make them with: run --parts 1,2,3")
    for size in bandit.GROUP_SIZES:
        if part := [row for row in rows if row["part"] == 1 and row["group_size"] == size]:
            bandit.tables(part)
    by_arm = {}
    for row in sorted((row for row in rows if row["part"] > 1), key=lambda row: row["seed"]):
        by_arm.setdefault((row["part"], row["regime"], row["arm"]), []).append(row)
    for title, part, regime, arms in (
            (f"part 2, {BAD}", 2, BAD, ARMS), (f"part 2, {RARE}", 2, RARE, ARMS),
            ("part 3, group size at 64 rollouts a step (of 8: part 2)", 3, BAD, GROUPS),
            ("part 3, rules", 3, BAD, RULES), ("part 4, real model", 4, "real", ("grpo", "stratified"))):
        if present := [arm for arm in arms if (part, regime, arm) in by_arm]:
            print(f"\n{title}\n\n{HEADER}")
            for arm in present:
                grpo = by_arm.get((part, regime, baseline_of(arm))) or by_arm.get((2, regime, "grpo"), [])
                print(row_of(arm, by_arm[part, regime, arm], grpo, guess=0.45 if part < 4 else 0.0))
    print("\n± is the half-width of the 95 % Student interval over seeds. stuck: greedy EM after at most .45, where "
          "always guessing the most frequent country gives about .40")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--parts", default="1,2,3", help="comma-separated, of 1, 2, 3, 4")
    parser.add_argument("--seeds", type=int, default=5, help="of parts 2 to 4; the bandit has 8")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--results", default="runs/experiments/results.jsonl")
    parser.add_argument("--cache", default="", help="folder for the regimes; empty: ~/.cache/stratgrpo")
    parser.add_argument("--model", default="", help="part 4: SmolLM2-135M-Instruct, a folder")
    parser.add_argument("--data", default="", help="part 4: folder with corpus/ and questions/")
    args = parser.parse_args()
    try:
        args.parts = {int(part) for part in args.parts.split(",")}
    except ValueError:
        args.parts = {0}
    if not args.parts <= {1, 2, 3, 4}:
        parser.error("--parts: give some of 1,2,3,4")
    if 4 in args.parts and not (args.model and args.data) and args.command == "run":
        parser.error("part 4 needs --model and --data")
    if args.seeds < 1 or args.workers < 1:
        parser.error("--seeds and --workers must be at least 1")
    table(args) if args.command == "table" else run(args)


if __name__ == "__main__":
    main()
