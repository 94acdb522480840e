"""
eval.py — exact match and F1 of a policy on question files, with intervals, per number of searches.

    python eval.py --model runs/tiny-stratified-seed0/checkpoint-000040 --questions heldout.jsonl --corpus corpus.jsonl
    python eval.py --model Qwen/Qwen2.5-3B --questions nq,hotpotqa --corpus wikipedia-dpr-100w --out nq-hotpotqa

Greedy, every question exactly once. The protocol is the one the model folder was trained with (protocol.json), else
Search-R1's.
A checkpoint of the embedded world needs neither --questions nor --corpus: its own held-out questions are used.
Prints a table; --out FOLDER keeps eval.json (scores and settings) and trajectories.jsonl (every rollout, decoded, with
its mask).
"""
import argparse
import dataclasses
import json
import pathlib
import sys

import torch
from tqdm import tqdm

import world
from data import resolve_questions, score
from policy import OutOfMemory, choose_device, context_limit, load_policy, out_of_memory_names
from retriever import RetrieverError, open_retriever
from rollout import load_protocol, record, rollout


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Hugging Face folder (a checkpoint of a run) or hub name")
    parser.add_argument("--questions", help="jsonl files or benchmark names (nq, hotpotqa, ...), comma-separated: "
                        "one table row each")
    parser.add_argument("--corpus", help="jsonl of passages, a pyserini index name, or the http://... of a "
                        "/retrieve server")
    parser.add_argument("--limit", type=int, default=0, help="only the first N questions of each file; 0: all")
    parser.add_argument("--max-searches", type=int, default=-1, help="turns that may search; -1: as the protocol says")
    parser.add_argument("--max-context", type=int, default=0, help="tokens of prompt and response; 0: what the model "
                        "holds, at most 4096")
    parser.add_argument("--slots", type=int, default=64, help="rollouts in flight; lower it when memory runs out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
                        help="auto: bfloat16 on a GPU that has it")
    parser.add_argument("--cache", default="",
                        help="folder for indexes and the embedded world; empty: ~/.cache/stratgrpo")
    parser.add_argument("--out", help="new folder for eval.json and trajectories.jsonl")
    args = parser.parse_args(arguments)
    try:
        results = run(args)
    except (ValueError, OSError, RetrieverError, OutOfMemory) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print_table(results)


def run(args):
    """-> {questions name: scores}, in the order asked; writes --out."""
    if bool(args.questions) != bool(args.corpus):
        raise ValueError("--questions and --corpus go together")
    for name, least in (("slots", 1), ("limit", 0), ("max_context", 0), ("max_searches", -1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.out and pathlib.Path(args.out).exists():
        raise ValueError(f"--out {args.out}: exists; choose a new folder")
    names, corpus = args.questions.split(",") if args.questions else [], args.corpus
    if not names:  # a checkpoint of the embedded world: the settings of its run say which one
        run_config = pathlib.Path(args.model).absolute().parent / "config.json"
        saved = json.loads(run_config.read_text(encoding="utf-8")) if run_config.is_file() else {"model": "another"}
        if saved["model"]:
            raise ValueError(f"--model {args.model}: no checkpoint of the embedded world; give --questions and --corpus")
        folder = world.prepare(args.cache or saved["cache"], saved["seed"])
        names, corpus = [str(folder / "heldout.jsonl")], str(folder / "corpus.jsonl")
    protocol = load_protocol(args.model)
    if args.max_searches >= 0:
        protocol = dataclasses.replace(protocol, max_searches=args.max_searches)
    questions = {name: resolve_questions(name, "test", args.limit) for name in names}
    model, tokenizer = load_policy(args.model, *choose_device(args.device, args.dtype), args.max_context)
    max_context = args.max_context or min(4096, context_limit(model) or 4096)
    retriever = open_retriever(corpus, cache_dir=args.cache or None)
    results, rows = {}, []
    for name, items in questions.items():
        trajectories = []
        for start in tqdm(range(0, len(items), 4 * args.slots), desc=name, unit="batch", disable=None, leave=False):
            batch = items[start : start + 4 * args.slots]
            with out_of_memory_names("slots"):
                trajectories += rollout(model, tokenizer, batch, retriever, protocol, 1, 0.0, args.slots, max_context)
        results[name] = score(items, trajectories)
        if args.out:
            rows += [{"questions": name, **record(t, q, tokenizer)} for q, t in zip(items, trajectories)]
    if args.out:
        out = pathlib.Path(args.out)
        out.mkdir(parents=True)
        (out / "eval.json").write_text(json.dumps({
            "settings": vars(args), "protocol": dataclasses.asdict(protocol), "torch": torch.__version__,
            "results": results}, indent=2) + "\n", encoding="utf-8")
        with open(out / "trajectories.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return results


def print_table(results):
    print(f"{'questions':24} {'n':>6} {'EM':>6} {'95 % interval':>16} {'F1':>6} {'95 % interval':>16} {'searches':>8}")
    for name, r in results.items():
        n = sum(row["count"] for row in r["by_searches"].values())
        intervals = [f"[{low:.3f}, {high:.3f}]" for low, high in (r["em_interval"], r["f1_interval"])]
        print(f"{pathlib.Path(name).stem[:24]:24} {n:6d} {r['em']:6.3f} {intervals[0]:>16} {r['f1']:6.3f} "
              f"{intervals[1]:>16} {r['searches']:8.2f}")
        for searches, row in r["by_searches"].items():
            label = f"  {searches} searches"
            print(f"{label:24} {row['count']:6d} {row['em']:6.3f} {'':16} {row['f1']:6.3f}")


if __name__ == "__main__":
    main()
