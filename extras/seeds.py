"""
seeds.py — the README's table for the embedded world: estimators x seeds, and the no-search control.

    python -m extras.seeds              # 5 seeds, an hour on one core; finished runs are kept, so it can be continued
    python -m extras.seeds --seeds 1    # a look

Every run is `python train.py` with the flags of its row; all estimators of a seed start from the same warm-started
policy. Prints greedy EM on the held-out questions before and after as mean and standard deviation over seeds, and each
seed's value.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ARMS = {
    "stratified": ["--advantage", "stratified"],
    "grpo": ["--advantage", "grpo"],
    "san": ["--advantage", "san"],
    "nosearch": ["--max-searches", "0"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(f"{'run':12} {'EM before':>15} {'EM after':>15} {'searches after':>15}   EM after, by seed")
    for arm, flags in ARMS.items():
        before, after, searches = [], [], []
        for seed in range(args.seeds):
            folder = pathlib.Path("runs") / f"{arm}-seed{seed}"
            results = json.loads((folder / "eval.json").read_text()) if (folder / "eval.json").exists() else {}
            if str(args.steps) not in results:
                start = ["--name", folder.name, "--seed", str(seed), *flags]
                how = ["--resume", str(folder)] if folder.exists() else start
                command = [sys.executable, "train.py", *how, "--steps", str(args.steps)]
                subprocess.run(command, check=True, stdout=sys.stderr)
                results = json.loads((folder / "eval.json").read_text())
            before.append(results["0"]["em"])
            after.append(results[str(args.steps)]["em"])
            searches.append(results[str(args.steps)]["searches"])
        cells = [f"{statistics.mean(v):.3f} ± {statistics.stdev(v) if len(v) > 1 else 0:.3f}"
                 for v in (before, after, searches)]
        print(f"{arm:12} {cells[0]:>15} {cells[1]:>15} {cells[2]:>15}   {' '.join(f'{em:.3f}' for em in after)}")


if __name__ == "__main__":
    main()
