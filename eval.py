"""
eval.py — exact match and F1 of policies and baselines on question files, with intervals; one table for all of them.

    python eval.py --model runs/tiny-stratified-seed0/checkpoint-000040 --questions heldout.jsonl --corpus corpus.jsonl
    python eval.py --model Qwen/Qwen2.5-3B-Instruct --method direct,cot,rag,ircot,search-o1,agent \\
        --benchmarks nq,triviaqa,popqa,hotpotqa,2wikimultihopqa,musique,bamboogle --corpus wikipedia-dpr-100w --out all

--method agent (the default) is a whole rollout under the protocol that the model folder was trained with
(protocol.json), else Search-R1's; methods.py has the others. Every --model is run with every --method; the first pair
is what the others are compared with. The paper's seven benchmarks, by name, are searched for in the paper's corpus,
wikipedia-dpr-100w, unless --corpus says otherwise. A checkpoint of the embedded world needs neither --questions nor
--corpus: its own held-out questions are used.

Greedy, every question exactly once; --samples K --temperature T asks each K times. Tokens are those the model read or
wrote, prompts and second passes included, each once. --out FOLDER keeps predictions.jsonl (every trajectory, decoded,
with its mask) and eval.json (settings, versions, scores); the same command goes on with an interrupted FOLDER.
"""
import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import sys

import numpy as np
import torch
import transformers
from tqdm import tqdm

import world
from checkpoint import append_line, write_json
from data import exact_match, f1_score, resolve_questions
from methods import METHODS, SEARCHLESS, Sampler
from policy import OutOfMemory, choose_device, context_limit, load_policy, out_of_memory_names
from retriever import RetrieverError, open_retriever
from rollout import Search, Trajectory, load_protocol, record
from tables import AVERAGES, STYLES, scores, summary, tables

CHANGEABLE = ("slots", "cache", "table", "out")  # settings that change no answer


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Hugging Face folders (checkpoints of runs) or hub names, "
                        "comma-separated")
    parser.add_argument("--method", default="agent", help=f"comma-separated: {', '.join(METHODS)}")
    parser.add_argument("--questions", "--benchmarks", help="files or benchmark names (nq, hotpotqa, ...), "
                        "comma-separated: one table row each")
    parser.add_argument("--layout", default="auto", help="of the question files, see layouts.py; auto: by content")
    parser.add_argument("--corpus", help="passages (see layouts.py), a pyserini index name, or the http://... of a "
                        "/retrieve server")
    parser.add_argument("--limit", type=int, default=0, help="only the first N questions of each file; 0: all")
    parser.add_argument("--samples", type=int, default=1, help="answers per question; more need a --temperature")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--max-searches", type=int, default=-1, help="searches per question, for methods that choose "
                        "how many; -1: as the protocol says")
    parser.add_argument("--max-turn-tokens", type=int, default=0, help="cut every turn at N tokens; 0: as the protocol "
                        "says")
    parser.add_argument("--max-context", type=int, default=0, help="tokens of prompt and response; 0: what the model "
                        "holds, at most 4096")
    parser.add_argument("--slots", type=int, default=64, help="rollouts in flight; lower it when memory runs out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
                        help="auto: bfloat16 on a GPU that has it")
    parser.add_argument("--cache", default="",
                        help="folder for indexes and the embedded world; empty: ~/.cache/stratgrpo")
    parser.add_argument("--table", default="plain", choices=list(STYLES), help="how the tables are printed")
    parser.add_argument("--out", help="folder for eval.json and predictions.jsonl: new, or one to go on with")
    args = parser.parse_args(arguments)
    try:
        systems = run(args)
    except (ValueError, OSError, RetrieverError, OutOfMemory) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        if args.out and pathlib.Path(args.out).exists():
            print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    print("\n\n".join(STYLES[args.table](rows) for rows in tables(systems)))


def run(args):
    """-> one dict for each (model, method): model, method, protocol, and what tables.summary says of its scores; keeps
    them in --out."""
    check_flags(args)
    models, methods = args.model.split(","), args.method.split(",")
    if args.questions:
        names, corpus = args.questions.split(","), args.corpus
        if not corpus and set(names) <= set(AVERAGES["all seven"]):
            corpus = "wikipedia-dpr-100w"
    else:
        names, corpus = embedded_world(models, args.cache)
    if not corpus and not set(methods) <= SEARCHLESS:
        raise ValueError(f"--corpus: is needed with --questions, unless --method is of {', '.join(sorted(SEARCHLESS))}")
    for flag, values in (("model", models), ("method", methods), ("questions", names)):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"--{flag} {twice[0]}: given twice")
    for model in models:
        if model.startswith((".", "/", "~")) and not pathlib.Path(model).is_dir():  # not after an hour for another one
            raise ValueError(f"--model {model}: no such folder")
    questions = {name: resolve_questions(name, "test", args.limit, args.layout) for name in names}
    systems = [{"model": model, "method": method, "protocol": protocol_of(model, method, args)}
               for model in models for method in methods]
    config = {**vars(args), "corpus": corpus,
              "systems": [{**system, "protocol": dataclasses.asdict(system["protocol"])} for system in systems],
              "benchmarks": {name: {"questions": len(items), "sha256": fingerprint(items)}
                             for name, items in questions.items()}}
    done = resume(args.out, config)
    device, retriever, loaded = choose_device(args.device, args.dtype), None, None
    for system in systems:
        for name, items in questions.items():
            key = (system["model"], system["method"], name)
            waiting = [(question, i) for question in items for i in range(args.samples)
                       if (*key, question.id, i) not in done]
            if waiting and not retriever and system["method"] not in SEARCHLESS:
                retriever = open_retriever(corpus, cache_dir=args.cache or None)
            if waiting and loaded != system["model"]:
                model = None  # frees the one before
                model, tokenizer = load_policy(system["model"], *device, args.max_context)
                loaded = system["model"]
            size = 4 * args.slots  # a chunk is answered together and written together
            for start in tqdm(range(0, len(waiting), size), desc=" ".join(key[1:]), unit="chunk", disable=None,
                              leave=False):
                chunk = waiting[start : start + size]
                rows = answer(model, tokenizer, retriever, system, name, chunk, args)
                if args.out:
                    prepare_out(args.out, config)
                    append_line(pathlib.Path(args.out, "predictions.jsonl"), *rows)
                done |= {row_key(row): slim(row) for row in rows}
    scored = [{name: scores(items, [[done[s["model"], s["method"], name, q.id, i] for i in range(args.samples)]
                                    for q in items]) for name, items in questions.items()} for s in systems]
    results = [{**system, **summary(benchmarks, scored[0] if i else None)}
               for i, (system, benchmarks) in enumerate(zip(config["systems"], scored))]
    if args.out:
        prepare_out(args.out, config)
        write_json(pathlib.Path(args.out, "eval.json"), {"config": config, "versions": versions(), "systems": results})
    return results


def check_flags(args):
    if args.corpus and not args.questions:
        raise ValueError("--corpus: needs --questions, too")
    for name, least in (("slots", 1), ("limit", 0), ("max_context", 0), ("max_searches", -1), ("max_turn_tokens", 0),
                        ("samples", 1), ("temperature", 0)):
        if not getattr(args, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.samples > 1 and not args.temperature:
        raise ValueError(f"--samples {args.samples}: greedy answers are all the same; give a --temperature, too")
    for method in args.method.split(","):
        if method not in METHODS:
            raise ValueError(f"--method {method}: not one of {', '.join(METHODS)}")


def embedded_world(models, cache):
    """Checkpoints of the embedded world -> its held-out questions and its corpus; the runs' settings say which."""
    folders = set()
    for model in models:
        run_config = pathlib.Path(model).absolute().parent / "config.json"
        saved = json.loads(run_config.read_text(encoding="utf-8")) if run_config.is_file() else {"model": "another"}
        if saved["model"]:
            raise ValueError(f"--model {model}: no checkpoint of the embedded world; give --questions and --corpus")
        folders.add(world.prepare(cache or saved["cache"], saved["seed"]))
    if len(folders) > 1:
        raise ValueError("--model: these checkpoints are of different worlds; give --questions and --corpus")
    folder = folders.pop()
    return [str(folder / "heldout.jsonl")], str(folder / "corpus.jsonl")


def protocol_of(model, method, args):
    protocol = METHODS[method][1] or load_protocol(model)
    if args.max_searches >= 0 and (protocol.search[1] or protocol.max_searches):
        protocol = dataclasses.replace(protocol, max_searches=args.max_searches)
    if args.max_turn_tokens:
        protocol = dataclasses.replace(protocol, max_turn_tokens=min(protocol.max_turn_tokens, args.max_turn_tokens))
    return protocol


def answer(model, tokenizer, retriever, system, name, chunk, args):
    """Run one method on the (question, sample) pairs of a chunk. -> a row of predictions.jsonl each."""
    limit = args.max_context or min(4096, context_limit(model) or 4096)
    seed = int(hashlib.sha256(f"{args.seed} {name} {chunk[0][0].id} {chunk[0][1]}".encode()).hexdigest()[:15], 16)
    sampler = Sampler(model, tokenizer, retriever, args.temperature, args.slots, limit,
                      torch.Generator(model.device).manual_seed(seed))
    with out_of_memory_names("slots"):
        results = METHODS[system["method"]][0](sampler, system["protocol"], [question for question, _ in chunk])
    rows = []
    for (question, sample), (trajectory, *second_passes) in zip(chunk, results, strict=True):
        passes = [record(t, question, tokenizer) for t in (trajectory, *second_passes)]
        last_turn = len(trajectory.sampled) - 1 - bytes(trajectory.sampled).rfind(0)  # tokens after the last forced one
        truncated = trajectory.finish == "length" or (trajectory.finish == "turns" and
                                                      last_turn >= system["protocol"].max_turn_tokens)
        rows.append({"model": system["model"], "method": system["method"], "questions": name, "sample": sample,
                     **passes[0], "em": exact_match(trajectory.answer, question.golden_answers),
                     "f1": f1_score(trajectory.answer, question.golden_answers), "truncated": truncated,
                     "tokens": sum(len(t) for t in (trajectory, *second_passes)), "second_passes": passes[1:]})
    return rows


# -----------------------------------------------------------------------------
# files

def fingerprint(questions):
    text = json.dumps([[q.id, q.question, q.golden_answers] for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions():
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "numpy": np.__version__}


def prepare_out(out, config):
    """Make --out, before its first line: until then nothing is left behind by whatever goes wrong."""
    folder = pathlib.Path(out)
    if not folder.exists():
        folder.mkdir(parents=True)
        write_json(folder / "eval.json", {"config": config, "versions": versions()})


def resume(out, config):
    """What --out holds of an interrupted run of the same settings -> {row_key: slim row}; {} if there is no --out yet.

    A last line without its end, torn off by the interruption, is dropped from the file. ValueError: other settings, no
    evaluation at all, or a line that is not ours.
    """
    folder, done = pathlib.Path(out or ""), {}
    if not out or not folder.exists():
        return done
    try:
        saved = json.loads((folder / "eval.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--out {out}: exists, and is no evaluation to go on with; choose a new folder") from None
    ours = json.loads(json.dumps(config))  # tuples to lists, as they were saved
    if changed := [key for key in ours if key not in CHANGEABLE and saved.get(key) != ours[key]]:
        raise ValueError(f"--out {out}: holds a run with other settings ({', '.join(changed)}); choose a new folder")
    path = folder / "predictions.jsonl"
    if not path.exists():
        return done
    whole = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                done[row_key(row)] = slim(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a line of an evaluation ({type(error).__name__}: {error})"
                                 ) from None
            whole += len(line)
    os.truncate(path, whole)
    return done


def row_key(row):
    return row["model"], row["method"], row["questions"], row["question_id"], row["sample"]


def slim(row):
    """A row of predictions.jsonl -> what scoring needs; of the ids only the mask is kept, a byte a token, so that
    100,000 predictions fit in memory."""
    values = {field.name: row[field.name] for field in dataclasses.fields(Trajectory) if field.name in row}
    mask = bytes(row["sampled"])
    values |= {"prompt_ids": b"", "response_ids": mask, "sampled": mask, "logprobs": b"",
               "searches": [Search(**search) for search in row["searches"]]}
    return {"trajectory": Trajectory(**values), "tokens": row["tokens"], "truncated": row["truncated"],
            "em": row["em"], "f1": row["f1"]}


if __name__ == "__main__":
    main()
