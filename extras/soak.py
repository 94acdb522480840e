"""
soak.py — thousands of tiny steps in one process: do memory, open files, Java's heap and a step's time stay flat?

    python -m extras.soak                # 2,000 steps of a policy with random weights, some four minutes

Such a policy hardly ever searches, so every step also asks Lucene 16 new queries: the retriever's cache of 10,000
answers fills up and is turned over. The reward is a coin, so that most steps have an update. A checkpoint is written
every 100 steps. Slopes are least squares over the second half, when caches and allocators are warm.
"""
import argparse
import gc
import json
import os
import pathlib
import statistics
import tempfile
import time

import torch

import retriever
import train
import world
from rollout import Protocol, save_protocol


def resident_megabytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files():
    return len(os.listdir("/proc/self/fd"))


def java_megabytes():
    runtime = retriever.start_java().autoclass("java.lang.Runtime").getRuntime()
    runtime.gc()
    return (runtime.totalMemory() - runtime.freeMemory()) / 2**20


def write_toy(folder):
    """A model of random weights over the embedded world's words; 300 passages."""
    made, tokenizer = world.build_world(0, people=200, towns=50, companies=50, train_questions=300,
                                        heldout_questions=20), world.build_tokenizer()
    world.build_policy(tokenizer, 0, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                       intermediate_size=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_protocol(Protocol(prompt="{question}\n", retry="\n", passage="{text}\n", max_searches=2, max_turn_tokens=8,
                           max_observation_tokens=40), folder)
    for name, rows in (("corpus", made.passages), ("train", made.train)):
        world.write_lines(folder / f"{name}.jsonl", rows)


class RandomQueries:
    """In front of Lucene: asks something new when told to."""

    def __init__(self, real, words):
        self.real, self.words, self.count = real, words, 0

    def search(self, queries, k):
        return self.real.search(queries, k)

    def ask_something_new(self):
        self.count += 16
        self.real.search([f"{self.words[i % len(self.words)]} {i}" for i in range(self.count - 16, self.count)], 3)


def slope(values):
    """Least squares, per 1,000 steps, over the second half of (step, value)."""
    points = values[len(values) // 2 :]
    return 1000 * statistics.linear_regression(*zip(*points)).slope


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    rows, seconds = [], []

    def watched_update(*arguments):
        statistics = update(*arguments)
        front.ask_something_new()
        seconds.append(time.perf_counter())
        if len(seconds) % 50 == 0:
            gc.collect()
            rows.append((len(seconds), resident_megabytes(), open_files(), java_megabytes()))
        return statistics

    update, train.update = train.update, watched_update
    real_open = train.open_retriever
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        folder = pathlib.Path(temporary)
        write_toy(folder)
        front = RandomQueries(real_open(f"{folder}/corpus.jsonl", cache_dir=folder), world.FIRST)
        train.open_retriever = lambda *arguments, **options: front
        train.reward = lambda *_: float(torch.rand(()) < 0.5)  # so that there is always an update
        train.main(["--preset", "tiny", "--name", "soak", "--model", str(folder), "--steps", str(steps),
                    "--questions", f"{folder}/train.jsonl", "--corpus", f"{folder}/corpus.jsonl",
                    "--questions-per-step", "2", "--rollouts-per-question", "2", "--max-context", "160",
                    "--save-every", "100", "--dump-every", "10"])
        lines = [json.loads(line) for line in open("runs/soak/metrics.jsonl", encoding="utf-8")]
    intervals = [b - a for a, b in zip(seconds, seconds[1:])]
    quarter = len(intervals) // 4
    print(f"\n{len(lines)} steps, {sum(row['optimizer_steps'] > 0 for row in lines)} with an update, "
          f"{sum(row['searches'] for row in lines):.0f} searches by the policy, {front.count} more")
    for name, column, unit in (("resident memory", 1, "MB"), ("open files", 2, ""), ("Java heap in use", 3, "MB")):
        values = [(row[0], row[column]) for row in rows]
        print(f"{name:18} first {values[0][1]:8.1f}, last {values[-1][1]:8.1f} {unit}; slope {slope(values):+.3f} "
              f"per 1,000 steps")
    first, last = (1000 * statistics.median(part) for part in (intervals[:quarter], intervals[-quarter:]))
    print(f"a step             first quarter {first:.1f} ms, last {last:.1f} ms (medians)")


if __name__ == "__main__":
    main()
