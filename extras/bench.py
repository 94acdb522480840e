"""
bench.py — how fast is it? Ours against what people use, in turn, in one run: medians of ratios, and a roofline.

    python -m extras.bench                                              # the embedded world's policy: a look
    python -m extras.bench --model DIR --questions F --corpus F         # the README's table
    ... --with-vllm PYTHON --with-trl PYTHON    # two peers, each in an environment of its own: see bench_peers.py
    ... --parts rollout,update                  # only these; --json FILE keeps every figure

Every rollout follows a forced pattern, so that all engines do the same work: rollout i of a question searches i mod 4
times, each turn is `--turn-tokens` sampled tokens, queries are questions of the file, passages come from the corpus.

What is left out favours the peers: only ours computes the log-prob of every token, and they get their observations as
ids. "Turn by turn" is what flat GRPO scripts do: `generate` on the whole conversation, every turn anew. Peak memory is
read as Linux counts it: without a GPU the parts update and growth need Linux.
"""
import argparse
import contextlib
import copy
import ctypes
import dataclasses
import functools
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers

import rollout as sampler
import train
import world
from config import Config
from data import load_questions
from policy import MasterAdamW, choose_device, load_policy, pad_trajectories
from retriever import RetrieverError, open_retriever
from rollout import Codec, Row, answer_searches, begin, load_protocol, sample_rows
from stratgrpo import blended_advantages, group_advantages, ppo_clip_loss

HERE = pathlib.Path(__file__).parent


# -----------------------------------------------------------------------------
# the same work for everyone

class ForcedRow(Row):
    """A row whose turns all have `turn_tokens` sampled tokens; the first ones end in `queries`, the last one is the
    answer."""

    def __init__(self, trajectory, question, codec, max_context, queries, turn_tokens):
        super().__init__(trajectory, question, codec, max_context, frozenset())
        self.queries, self.turn_tokens = queries, turn_tokens

    def accept(self, token, logprob):
        self.trajectory.append(token, 1, logprob)
        self.feed = [token]
        if len(self.trajectory.response_ids) - self.turn_start == self.turn_tokens:
            if self.turn < len(self.queries):
                self.query = self.queries[self.turn]
            else:
                self.trajectory.finish = "answer"


def forced_rows(codec, questions, rollouts_per_question, turn_tokens, max_context, most_searches=3):
    rows = []
    for group, question in enumerate(questions):
        for i in range(rollouts_per_question):
            queries = [questions[(group + hop) % len(questions)].question for hop in range(i % (most_searches + 1))]
            rows.append(ForcedRow(begin(codec, question, group, max_context), question, codec, max_context, queries,
                                  turn_tokens))
    return rows


def our_rollouts(model, rows, end_turns):
    """One pass of the product's sampler, all rows in flight. -> trajectories"""
    generator = torch.Generator(model.device).manual_seed(0)
    sample_rows(model, rows, end_turns, 1.0, len(rows), rows[0].max_context, generator)
    return [row.trajectory for row in rows]


def turn_by_turn(generate, rows, end_turns):
    """generate(conversations, new_tokens) -> new ids, for all rows under way, until none is. -> trajectories"""
    under_way = rows
    while under_way:
        conversations = [row.trajectory.prompt_ids + row.trajectory.response_ids for row in under_way]
        for row, ids in zip(under_way, generate(conversations, rows[0].turn_tokens), strict=True):
            for token in ids:
                row.accept(token, 0.0)
        end_turns(under_way)
        under_way = [row for row in under_way if not row.trajectory.finish]
    return [row.trajectory for row in rows]


def transformers_generate(model, conversations, new_tokens):
    width = max(map(len, conversations))
    ids = torch.tensor([[0] * (width - len(c)) + c for c in conversations], device=model.device)            # (R, T)
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in conversations], device=model.device)
    out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                         min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    return out[:, width:].tolist()


def start_peer(python, peer, model, settings):
    """-> ask(**job), which sends a line of JSON to bench_peers.py and waits for the answer, and stop()."""
    log = tempfile.NamedTemporaryFile("w+", prefix=f"bench-{peer}-", suffix=".log", delete=False)
    process = subprocess.Popen([python, HERE / "bench_peers.py", peer, model], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)

    def ask(**job):
        with contextlib.suppress(BrokenPipeError):  # it has ended: no answer comes
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            sys.exit(f"error: --with-{peer} {python}: the process ended; what it said is in {log.name}")
        return json.loads(answer)

    def stop():  # with the processes that it has started: vLLM's outlive it
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()

    print(f"{peer} {ask(**settings)['version']} is ready", flush=True)
    return ask, stop


# -----------------------------------------------------------------------------
# measuring

def seconds_of(job):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(jobs, repeats):
    """{name: [seconds of each repetition]}; in every repetition each job has its turn, so a slow minute hits all."""
    seconds = {name: [] for name in jobs}
    for repeat in range(repeats):
        for name, job in jobs.items():
            seconds[name].append(seconds_of(job))
            print(f"  {repeat + 1}/{repeats} {name}: {seconds[name][-1]:.2f} s", flush=True)
    return seconds


def ratio(ours, theirs):
    """Median over repetitions of theirs / ours."""
    return statistics.median(b / a for a, b in zip(ours, theirs))


@contextlib.contextmanager
def peak_memory(found):
    """Sets found["bytes"]: how far memory rose above where it stood. Main memory is Linux's count (VmHWM)."""
    def status(key):
        line = next(line for line in open("/proc/self/status") if line.startswith(key))
        return int(line.split()[1]) * 1024

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)                        # glibc gives back what is free
        pathlib.Path("/proc/self/clear_refs").write_text("5")   # VmHWM starts again
        before = status("VmRSS")
    yield
    after = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status("VmHWM")
    found["bytes"] = max(1, after - before)


def machine_rates(model, repeats=5):
    """-> (FLOP/s of a large matrix product with one of the model's matrices, bytes/s of reading all weights once)."""
    weights = list(model.parameters())
    matrix = max((p for p in model.base_model.layers.parameters() if p.dim() == 2), key=torch.Tensor.numel)
    x = torch.randn(2048, matrix.shape[1], device=model.device, dtype=model.dtype)
    with torch.no_grad():
        product = min(seconds_of(lambda: x @ matrix.T) for _ in range(repeats))
        stream = min(seconds_of(lambda: [weight.sum() for weight in weights]) for _ in range(repeats))
    return 2 * len(x) * matrix.numel() / product, sum(w.numel() * w.element_size() for w in weights) / stream


def work(model, trajectories):
    """What sampling these trajectories cannot do without, a dict: FLOPs to read forced tokens (prompts once a group)
    and to decode the sampled ones, and bytes to stream while decoding (all weights every step, each row's own keys and
    values).

    A matrix product of n weights has 2n FLOPs a token, attention 4 x layers x heads x head_dim a token of context.
    """
    config, item = model.config, next(model.parameters()).element_size()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    vocabulary = model.get_output_embeddings().weight.numel()
    linear = sum(p.numel() for p in model.base_model.layers.parameters() if p.dim() == 2)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    key_value_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * item
    total, groups = {"read": 0, "decode": 0, "bytes": 0}, set()
    for t in trajectories:
        start = len(t.prompt_ids) if t.group in groups else 0
        groups.add(t.group)
        sampled = [0] * len(t.prompt_ids) + t.sampled
        for position in range(start, len(sampled) - 1):         # the last token is never read
            phase = "decode" if sampled[position] else "read"
            total[phase] += 2 * linear + attention * (position + 1)
            total["bytes"] += key_value_bytes * (position + 1) * sampled[position]
        total["decode"] += 2 * vocabulary * sum(t.sampled)
    total["bytes"] += max(sum(t.sampled) for t in trajectories) * (linear + vocabulary) * item
    return total


def roofline(work, flops, bandwidth):
    """-> seconds (reading, decoding) of a machine that loses nothing: decoding is bound by products or by memory."""
    return work["read"] / flops, max(work["decode"] / flops, work["bytes"] / bandwidth)


def exponent(sizes, values):
    """Least squares b of value = a size^b: 1 is linear."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope


# -----------------------------------------------------------------------------
# the parts; report(what, value, unit, goal) adds a row to the table

def bench_rollout(args, report):
    rows = lambda: forced_rows(args.codec, args.batch, args.rollouts, args.turn_tokens, args.max_context)
    done, phase, encode = {}, {"read": 0.0, "decode": 0.0}, sampler.encode

    def timed_encode(model, cache, slots, feeds, lengths):
        sampler.encode, out = encode, []                        # encode cuts a long batch in two: the whole is timed
        phase["decode" if max(map(len, feeds)) == 1 else "read"] += seconds_of(
            lambda: out.append(encode(model, cache, slots, feeds, lengths)))
        sampler.encode = timed_encode
        return out[0]

    rates = []                                                  # in every repetition: a machine's speed comes and goes
    jobs = {"ours": lambda: done.update(ours=our_rollouts(args.policy, rows(), args.end_turns)),
            "machine": lambda: rates.append(machine_rates(args.policy)),
            "transformers": lambda: done.update(transformers=turn_by_turn(
                functools.partial(transformers_generate, args.policy), rows(), args.end_turns))}
    if args.with_vllm:
        ask, stop = start_peer(args.with_vllm, "vllm", args.model, {
            "threads": args.threads, "max_context": args.max_context, "seed": 0, "dtype": args.dtype})

        def vllm():
            ask(reset=True)                                     # every repetition starts with an empty prefix cache
            done["vllm"] = turn_by_turn(lambda prompts, n: ask(prompts=prompts, new_tokens=n)["ids"], rows(),
                                        args.end_turns)
        jobs["vllm"] = vllm
    sampler.encode = timed_encode
    seconds = alternate(jobs, args.repeats)
    sampler.encode = encode
    if args.with_vllm:
        stop()
    sampled = {name: sum(sum(t.sampled) for t in trajectories) for name, trajectories in done.items()}
    tokens = {name: sum(map(len, trajectories)) for name, trajectories in done.items()}
    assert len(set(sampled.values())) == len(set(tokens.values())) == 1, (sampled, tokens)  # all did the same work
    for name in done:
        report(f"{name}, {len(done[name])} rollouts of {tokens[name] / len(done[name]):.0f} tokens",
               sampled[name] / statistics.median(seconds[name]), "sampled tokens/s")
    report("ours over transformers, turn by turn", ratio(seconds["ours"], seconds["transformers"]), "x", (">=", 5))
    if args.with_vllm:
        report("ours over vLLM, turn by turn", ratio(seconds["ours"], seconds["vllm"]), "x", (">=", 1))
    flops, bandwidth = (statistics.median(values) for values in zip(*rates))
    reading, decoding = roofline(work(args.policy, done["ours"]), flops, bandwidth)
    ours = statistics.median(seconds["ours"])
    report(f"share of the roofline ({flops / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s)",
           (reading + decoding) / ours, "", (">=", 0.5))
    read, decode = phase["read"] / args.repeats, phase["decode"] / args.repeats
    report("reading passages and prompts, roofline / measured", reading / read, f"of {read:.1f} s")
    report("decoding, roofline / measured", decoding / decode, f"of {decode:.1f} s")
    report("sampling, searching and the rest", statistics.mean(seconds["ours"]) - read - decode, "s")


def padded_update(model, optimizer, trajectories, advantages):
    """What flat scripts do: all rollouts in one padded batch, float32 logits of every position."""
    ids, sampled = pad_trajectories(trajectories, model.device)                                     # (B, T) x 2
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)         # (B, T - 1, V)
    logprobs = logprobs.gather(-1, ids[:, 1:, None])[..., 0] * sampled[:, 1:]                       # (B, T - 1)
    old = train.padded([t.logprobs for t in trajectories], trajectories, ids)[:, 1:]
    advantage = train.padded([a.reshape(1) for a in advantages], trajectories, ids)[:, 1:]
    loss, _ = ppo_clip_loss(logprobs, old, advantage, sampled[:, 1:])
    loss.backward()
    if optimizer:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Gradients:
    """Takes the place of the optimizer where only the gradient is wanted."""

    def accumulate(self):
        pass

    def step(self, *_):
        return 0.0


def bench_update(args, report):
    # at most two searches: the padded batch with all its logits has to fit
    rows = forced_rows(args.codec, args.batch[:1], 4, args.turn_tokens, args.max_context, 2)
    trajectories = our_rollouts(args.policy, rows, args.end_turns)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    # learning rate 0: the work of a step, and the same weights for all
    config = Config(learning_rate=0.0, mini_batch=len(trajectories), micro_batch_tokens=args.micro_batch_tokens)
    gradients = []
    for update in (lambda model: train.update(model, Gradients(), None, trajectories, advantages, config, 0),
                   lambda model: padded_update(model, None, trajectories, advantages)):
        update(args.policy)
        gradients.append(torch.cat([p.grad.flatten() for p in args.policy.parameters()]))
        args.policy.zero_grad()
    ours, theirs = gradients
    report("gradient, relative difference", ((ours - theirs).norm() / theirs.norm()).item(), "",
           ("<=", 1e-4) if args.dtype == "float32" else None)   # bfloat16 rounds at 4e-3
    del gradients, ours, theirs
    memory, other = {"ours": {}, "padded": {}}, copy.deepcopy(args.policy)
    optimizers = {"ours": MasterAdamW(args.policy, 0.0, (0.9, 0.999), 0.0),
                  "padded": torch.optim.AdamW(other.parameters(), lr=0.0, weight_decay=0.0)}

    def ours():
        with peak_memory(memory["ours"]):
            train.update(args.policy, optimizers["ours"], None, trajectories, advantages, config, 0)

    def padded():
        with peak_memory(memory["padded"]):
            padded_update(other, optimizers["padded"], trajectories, advantages)

    jobs = {"ours": ours, "padded": padded}
    for job in jobs.values():                                   # the optimizers' moments are made once
        job()
    seconds = alternate(jobs, args.repeats)
    tokens = sum(map(len, trajectories))
    for name in jobs:
        report(f"{name}, {len(trajectories)} rollouts, {tokens} tokens, {memory[name]['bytes'] / 2**20:.0f} MiB",
               tokens / statistics.median(seconds[name]), "tokens/s")
    report("ours over a padded batch with all logits", ratio(seconds["ours"], seconds["padded"]), "x", (">=", 2))
    report("memory, ours / theirs", memory["ours"]["bytes"] / memory["padded"]["bytes"], "x", ("<=", 0.5))


def bench_trl(args, report):
    if not args.with_trl:
        return
    count, new_tokens = args.rollouts, args.turn_tokens
    begun = [begin(args.codec, question, group, args.max_context) for group, question in enumerate(args.batch)]
    texts = [args.codec.decode(trajectory.prompt_ids) for trajectory in begun]
    ask, stop = start_peer(args.with_trl, "trl", args.model, {
        "threads": args.threads, "prompts": texts, "rollouts_per_question": count, "new_tokens": new_tokens,
        "steps": args.repeats + 1, "micro_batch": 8, "learning_rate": 1e-6, "dtype": args.dtype})
    model = copy.deepcopy(args.policy)
    optimizer = MasterAdamW(model, 1e-6, (0.9, 0.999), 0.0)
    config = Config(learning_rate=1e-6, mini_batch=len(texts) * count, micro_batch_tokens=args.micro_batch_tokens)
    answers = []

    def ours():
        rows = forced_rows(args.codec, args.batch, count, new_tokens, args.max_context, 0)
        trajectories = our_rollouts(model, rows, lambda rows: None)
        rewards = torch.tensor([sum(id % 2 for id in t.response_ids) / new_tokens for t in trajectories])
        advantages = group_advantages(rewards.double(), torch.tensor([t.group for t in trajectories]))
        train.update(model, optimizer, None, trajectories, advantages, config, 0)

    jobs = {"ours": ours, "trl": lambda: answers.append(ask(go=True))}
    for job in jobs.values():                                   # neither first step counts
        job()
    seconds = alternate(jobs, args.repeats)
    stop()
    samples = len(texts) * count
    assert all((a["samples"], a["tokens"]) == (samples, samples * new_tokens) for a in answers), answers
    for name in jobs:
        report(f"{name}, {samples} samples of {new_tokens} tokens a step", samples / statistics.median(seconds[name]),
               "samples/s")
    report("ours over TRL, rollouts and update", ratio(seconds["ours"], seconds["trl"]), "x", (">=", 2))


READY = """
import sys, time
import retriever
start = time.perf_counter()
retriever.open_retriever(sys.argv[1], cache_dir=sys.argv[2] or None).search(["ready"], 1)
print(time.perf_counter() - start)"""


def bench_retrieval(args, report):
    ready = [float(subprocess.run([sys.executable, "-c", READY, args.corpus, args.cache], text=True, check=True,
                                  stdout=subprocess.PIPE, cwd=HERE.parent).stdout) for _ in range(3)]
    report("a new process is ready (JVM, index open, first search)", statistics.median(ready), "s", ("<", 3))
    asked = [question.question for question in args.everything if question not in args.batch]
    batches = [asked[i : i + 16] for i in range(0, len(asked), 16)]
    seconds = seconds_of(lambda: [args.retriever.search(batch, args.codec.protocol.passages) for batch in batches])
    report(f"{len(asked)} different queries, 16 at a time", len(asked) / seconds, "queries/s")
    rows = forced_rows(args.codec, args.batch, args.rollouts, args.turn_tokens, args.max_context)
    searches = sum(len(row.queries) for row in rows)
    step = seconds_of(lambda: our_rollouts(args.policy, rows, args.end_turns))
    report(f"{searches} new queries / the rollouts of a step ({step:.0f} s, without its update)",
           100 * searches * seconds / len(asked) / step, "%", ("<", 5))


def bench_advantages(args, report):
    for count in (10**4, 10**6):
        generator = torch.Generator().manual_seed(0)
        rewards = torch.randint(2, (count,), generator=generator).double()
        strata = torch.randint(4, (count,), generator=generator)
        groups = torch.arange(count) // 8
        seconds = [seconds_of(lambda: blended_advantages(rewards, groups, strata, 0.6)) for _ in range(args.repeats)]
        report(f"blended_advantages of {count:,} rollouts", 1000 * statistics.median(seconds), "ms")


def bench_growth(args, report):
    """A small policy with random weights; one thing doubles, the others stay."""
    tokenizer = world.build_tokenizer()
    model, codec = world.build_policy(tokenizer, 0, max_position_embeddings=8192), Codec(tokenizer, world.TINY)
    questions = [dataclasses.replace(question, question="who") for question in args.batch[:4]]
    base = {"rollouts per question": 8, "turns": 2, "passage tokens": 128}
    for name, sizes in (("rollouts per question", (8, 16, 32, 64)), ("turns", (2, 4, 8, 16)),
                        ("passage tokens", (128, 256, 512, 1024))):
        times, memories, flops = [], [], []
        for size in sizes:
            count, turns, passage = {**base, name: size}.values()
            found = {}

            def step():
                rows = [ForcedRow(begin(codec, q, group, 8192), q, codec, 8192, [""] * (turns - 1), 16)
                        for group, q in enumerate(questions) for _ in range(count)]
                trajectories = our_rollouts(model, rows, lambda rows: [
                    row.observe([5] * passage) for row in rows if row.query is not None])
                train.update(model, MasterAdamW(model, 0.0, (0.9, 0.999), 0.0), None, trajectories,
                             torch.ones(len(rows), dtype=torch.float64), Config(mini_batch=len(rows)), 0)
                found["flops"] = sum(value for key, value in work(model, trajectories).items() if key != "bytes")

            step()
            with peak_memory(found):
                times.append(min(seconds_of(step) for _ in range(2)))
            memories.append(found["bytes"])
            flops.append(found["flops"])
        least = exponent(sizes, flops)                          # above 1 where attention is
        report(f"{name} {sizes[0]} to {sizes[-1]}: {times[0]:.2f} to {times[-1]:.2f} s, time grows as its power",
               exponent(sizes, times), "", ("<=", round(max(1.0, least) + 0.1, 2)))
        report(f"{name} {sizes[0]} to {sizes[-1]}: {memories[0] / 2**20:.0f} to {memories[-1] / 2**20:.0f} MiB, memory",
               exponent(sizes, memories), "", ("<=", 1.1))


def bench_default(args, report):
    """`python train.py` from nothing, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE.parent / "train.py", "--cache", f"{folder}/cache"]
        start, before = time.perf_counter(), None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
            for line in process.stdout:
                if line.startswith("step") and before is None:
                    before = time.perf_counter() - start
        total = time.perf_counter() - start
        if process.returncode:
            sys.exit(f"error: python train.py ended with exit code {process.returncode}")
        metrics, = pathlib.Path(folder).glob("runs/*/metrics.jsonl")
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    rollouts, updates = (sum(step[key] for step in steps) for key in ("rollout_seconds", "update_seconds"))
    before -= steps[0]["rollout_seconds"] + steps[0]["update_seconds"]
    report(f"python train.py, {len(steps)} steps, from an empty cache", total, "s", ("<", 240))
    report("... world, index, warm start, first evaluation (cached but for the last)", before, "s")
    report("... rollouts", rollouts, "s")
    report("... updates", updates, "s")
    report("... logs, checkpoints, last evaluation", total - before - rollouts - updates, "s")


# -----------------------------------------------------------------------------
# main

PARTS = {"rollout": bench_rollout, "update": bench_update, "trl": bench_trl, "retrieval": bench_retrieval,
         "advantages": bench_advantages, "growth": bench_growth, "default": bench_default}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    for name in ("model", "questions", "corpus"):
        parser.add_argument(f"--{name}", default="", help="default: the embedded world's")
    parser.add_argument("--with-vllm", default="", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--with-trl", default="", metavar="PYTHON", help="interpreter of an environment with TRL")
    for name, value in (("asked", 8), ("rollouts", 8), ("turn-tokens", 48), ("max-context", 4096), ("repeats", 3),
                        ("threads", 2), ("micro-batch-tokens", Config.micro_batch_tokens)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
                        help="of --model, in all engines; auto: bfloat16 on a GPU that has it")
    parser.add_argument("--cache", default="", help="folder for indexes and the embedded world")
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows of the table here, too")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    for name in ("asked", "rollouts", "turn_tokens", "repeats", "threads", "micro_batch_tokens"):
        if getattr(args, name) < 1:
            sys.exit(f"error: --{name.replace('_', '-')} must be at least 1")
    if unknown := set(parts) - PARTS.keys():
        sys.exit(f"error: --parts: no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(args.threads)
    device, dtype = choose_device(dtype=args.dtype)
    args.dtype = str(dtype).removeprefix("torch.")
    if args.model and not (args.questions and args.corpus):
        sys.exit("error: --model needs --questions and --corpus")
    if not args.model:
        args.model = str(world.prepare(args.cache, 0))
        args.questions, args.corpus = f"{args.model}/train.jsonl", f"{args.model}/corpus.jsonl"
        args.max_context = min(args.max_context, 512)
    try:
        args.policy, tokenizer = load_policy(args.model, device, dtype, args.max_context)
        args.codec = Codec(tokenizer, load_protocol(args.model))
        args.everything = load_questions(args.questions)[:500]
        args.retriever = open_retriever(args.corpus, cache_dir=args.cache or None)
    except (ValueError, OSError, RetrieverError) as error:
        sys.exit(f"error: {error}")
    args.batch = args.everything[: args.asked]
    args.end_turns = functools.partial(answer_searches, retriever=args.retriever, codec=args.codec)
    rows = []
    for part in parts:
        print(f"{part}:", flush=True)

        def report(what, value, unit, goal=None):
            met = "" if goal is None else "yes" if (value >= goal[1] if goal[0] == ">=" else value <= goal[1]) else "no"
            rows.append({"part": part, "what": what, "value": value, "unit": unit, "goal": goal, "met": met})
            print(f"  {what}: {value:.3g} {unit}", flush=True)

        PARTS[part](args, report)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {pathlib.Path(args.model).name} in {args.dtype} on {device}\n")
    print("| part | what | measured | goal | met |\n|---|---|---|---|---|")
    for row in rows:
        goal = " ".join(map(str, row["goal"])) if row["goal"] else ""
        print(f"| {row['part']} | {row['what']} | {row['value']:.3g} {row['unit']} | {goal} | {row['met']} |")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
