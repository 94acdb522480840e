"""
train.py — train a search agent with Stratified GRPO, read top to bottom.

    python train.py                         # the embedded world (world.py), a tiny policy, minutes on a laptop CPU
    python train.py --advantage grpo        # the same run with GRPO's advantages; san: without the blend
    python train.py --model DIR --questions F --corpus F --eval-questions F     # your model and data
    python train.py --preset search-r1      # the paper's setting: Qwen2.5-3B, NQ + HotpotQA, 2018 Wikipedia; one GPU
    python train.py --protocol research ... # ReSearch's protocol and reward; r1: reasoning without search
    python train.py --protocol direct --demos answers --sft-steps 500 --steps 0 ...     # the SFT baseline
    python train.py --resume runs/NAME      # go on after an interruption

A step: rollout -> reward -> strata -> advantages -> PPO epochs over mini-batches -> log. runs/NAME/ then holds
config.json, metrics.jsonl (a line a step), trajectories.jsonl (every Nth step, decoded, with the sampled mask),
eval.json, and checkpoint-STEP/ (a Hugging Face folder that eval.py takes).

Departures from the paper and from Search-R1, which it follows:
 1. old log-probs are those of the forward pass that sampled the token; nothing is scored twice before the update.
 2. the loss is the token mean over a mini-batch of rollouts (Search-R1: mean over micro-batches), so micro-batches
    change nothing.
 3. a rollout with advantage 0 has gradient 0: without a KL term it is counted in the mean but not run through the
    model, and a mini-batch of nothing else takes no optimizer step.
 4. every step draws its randomness and its questions from (seed, step) alone, so that a resumed run needs no generator
    states.
"""
import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import time
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import world
from checkpoint import append_line, hold_interrupts, latest_checkpoint, save_checkpoint, trim, write_json
from data import resolve_questions, score
from methods import PROTOCOLS, answer_demonstrations
from policy import (MasterAdamW, choose_device, load_policy, micro_batches, out_of_memory_names, pad_trajectories,
                    token_logprobs, warm_start)
from retriever import RetrieverError, open_retriever
from rewards import REWARDS, reward
from rollout import Codec, load_demonstrations, load_protocol, record, rollout
from stratgrpo import blended_advantages, group_advantages, kl_k3, ppo_clip_loss, stratified_advantages, stratum_report


def flag(default, text, **metadata):
    return field(default=default, metadata={"help": text, **metadata})


@dataclass
class Config:
    """Every field is a flag: --questions-per-step 16. The defaults are those of the preset tiny."""
    preset: str = flag("tiny", "settings to start from. tiny: the embedded world on a CPU; search-r1: the paper's, and "
                       "the default with --model", choices=["tiny", "search-r1"])
    name: str = flag("", "run folder runs/NAME; empty: named after preset, advantage and seed")
    seed: int = flag(0, "seed of everything: world, warm start, questions, sampling")
    # data
    model: str = flag("", "Hugging Face folder or hub name; empty: the embedded world with its own policy, questions "
                      "and corpus")
    questions: str = flag("", "training questions: jsonl files or names (nq, hotpotqa), comma-separated")
    eval_questions: str = flag("", "held-out questions, the same forms; empty: no evaluation")
    corpus: str = flag("", "jsonl of passages, a pyserini index name, or the http://... of a Search-R1 /retrieve "
                       "server")
    # warm start
    demos: str = flag("", "jsonl of demonstrations {id, question, golden_answers, turns} for a supervised warm start, "
                      "or 'answers': every training question -> its first golden answer, the paper's SFT baseline")
    sft_steps: int = flag(0, "optimizer steps on the demonstrations before RL")
    sft_batch: int = flag(32, "demonstrations per such step")
    sft_learning_rate: float = flag(1e-5, "peak learning rate of the warm start")
    # the method
    advantage: str = flag("stratified", "stratified: alpha SAN + (1 - alpha) GRPO",
                          choices=["stratified", "san", "grpo"])
    alpha: float = flag(0.6, "share of SAN in the stratified advantage, in [0, 1]")
    loss: str = flag("token-mean", "mean over the tokens, or over the rollouts, of a mini-batch",
                     choices=["token-mean", "sequence-mean"])
    clip_low: float = flag(0.2, "PPO: ratios below 1 - clip_low earn nothing more")
    clip_high: float = flag(0.2, "PPO: ratios above 1 + clip_high earn nothing more")
    kl: float = flag(0.0, "weight of the k3 KL to the frozen initial policy; 0: no reference model")
    # rollouts
    steps: int = flag(40, "RL steps")
    questions_per_step: int = flag(16, "questions per step")
    rollouts_per_question: int = flag(8, "G, rollouts per question, at least 2")
    temperature: float = flag(1.0, "sampling temperature; the log-probs trained on are at this temperature, too")
    max_searches: int = flag(-1, "turns that may search; 0: the no-search control; -1: as the protocol says")
    passages: int = flag(-1, "passages per search; -1: as the protocol says")
    max_turn_tokens: int = flag(-1, "tokens the policy may sample in one turn; -1: as the protocol says")
    max_observation_tokens: int = flag(-1, "tokens of one <information> block; -1: as the protocol says")
    protocol: str = flag("", "prompt and tags, see methods.py; empty: as the model was trained, else search-r1",
                         choices=["", *PROTOCOLS])
    reward: str = flag("", "em, or one that looks at the form, see rewards.py; empty: em, with --protocol research its "
                       "own", choices=["", *REWARDS])
    prompt_file: str = flag("", "text file with another prompt, containing {question}")
    max_context: int = flag(512, "tokens of prompt and response together; a trajectory that does not fit stops")
    slots: int = flag(128, "rollouts in flight; the KV cache holds slots x max_context tokens. lower it when memory "
                      "runs out")
    # the update
    epochs: int = flag(1, "PPO epochs over the rollouts of a step")
    mini_batch: int = flag(64, "rollouts per optimizer step")
    micro_batch_tokens: int = flag(8192, "padded tokens per forward and backward. lower it when memory runs out")
    learning_rate: float = flag(3e-4, "AdamW learning rate, constant after the warm-up")
    warmup_steps: int = flag(5, "RL steps of linear learning-rate warm-up")
    weight_decay: float = flag(0.0, "AdamW weight decay")
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, a third more "
                                        "time")
    # the machine
    device: str = flag("cpu", "auto (a GPU if there is one), cpu, cuda, ...")
    dtype: str = flag("auto", "auto: bfloat16 on a GPU that has it, else float32",
                      choices=["auto", "float32", "bfloat16"])
    threads: int = flag(1, "CPU threads, one is best for tiny matrices; 0: torch decides")
    # logging
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only")
    eval_limit: int = flag(0, "evaluate on the first N questions of each held-out file; 0: all")
    save_every: int = flag(0, "steps between checkpoints; 0: at the end (and at Ctrl-C) only")
    dump_every: int = flag(10, "write the trajectories of every Nth step")
    cache: str = flag("", "folder for indexes and the embedded world; empty: ~/.cache/stratgrpo")


PRESETS = {
    "tiny": {},
    "search-r1": dict(
        kl=0.001, steps=1005, questions_per_step=512, rollouts_per_question=5, max_context=4096, slots=128,
        mini_batch=256, micro_batch_tokens=16384, learning_rate=1e-6, warmup_steps=286, weight_decay=0.01,
        gradient_checkpointing=True, device="auto", threads=0, eval_every=100, eval_limit=500, save_every=50, dump_every=50,
    ),
}
PAPER_DATA = dict(model="Qwen/Qwen2.5-3B", questions="nq,hotpotqa", eval_questions="nq,hotpotqa",
                  corpus="wikipedia-dpr-100w")
CHANGEABLE = ("steps", "slots", "micro_batch_tokens", "eval_every", "eval_limit", "save_every", "dump_every", "threads",
              "device", "cache")


def parse_config(arguments):
    """Flags -> (Config, run folder, whether it is resumed). Defaults < preset < saved config of --resume < flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--resume", metavar="RUN",
                        help="run folder to go on with; only these flags may change: " + ", ".join(CHANGEABLE).replace("_", "-"))
    for f in dataclasses.fields(Config):
        paper = {**PRESETS["search-r1"], **PAPER_DATA}.get(f.name, f.default)
        defaults = f"{f.default!r}" + (f"; search-r1: {paper!r}" if paper != f.default else "")
        name, options = "--" + f.name.replace("_", "-"), {"help": f"{f.metadata['help']} (default: {defaults})"}
        if f.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None, **options)
        else:
            parser.add_argument(name, type=f.type, default=None, choices=f.metadata.get("choices"), **options)
    given = {key: value for key, value in vars(parser.parse_args(arguments)).items() if value is not None}
    resume = given.pop("resume", None)
    if resume:
        folder = pathlib.Path(resume)
        if not (folder / "config.json").is_file() or not latest_checkpoint(folder):
            raise ValueError(f"--resume {resume}: no config.json and checkpoint in this folder, nothing to go on with")
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if fixed := [key for key in given if key not in CHANGEABLE and given[key] != saved[key]]:
            raise ValueError(f"--resume keeps the run's settings: --{fixed[0].replace('_', '-')} cannot change")
        config = Config(**{**saved, **given})
    else:
        # with a model of one's own the paper's settings are the better start, its data only when asked for by name
        data = PAPER_DATA if given.get("preset") == "search-r1" else {}
        preset = given.setdefault("preset", "search-r1" if "model" in given else "tiny")
        config = Config(**{**PRESETS[preset], **data, **given})
    check_config(config)
    if not resume:
        folder = new_run_folder(config)
    return config, folder, bool(resume)


def check_config(config):
    def require(condition, name, fix):
        if not condition:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: {fix}")

    require(config.rollouts_per_question >= 2, "rollouts_per_question",
            "an advantage compares rollouts, give at least 2")
    require(0 <= config.alpha <= 1, "alpha", "must lie in [0, 1]")
    require(config.temperature > 0, "temperature", "must be above 0 in training")
    for name in ("questions_per_step", "slots", "mini_batch", "micro_batch_tokens", "epochs", "max_context",
                 "sft_batch", "dump_every"):
        require(getattr(config, name) >= 1, name, "must be at least 1")
    require(config.clip_low <= 1, "clip_low", "must lie in [0, 1]")
    for name, least in (("max_searches", 0), ("passages", 1), ("max_turn_tokens", 1), ("max_observation_tokens", 1)):
        value = getattr(config, name)
        require(value >= least or value == -1, name, f"must be at least {least}, or -1: as the protocol says")
    for name in ("steps", "sft_steps", "warmup_steps", "eval_every", "eval_limit", "save_every", "threads", "kl",
                 "weight_decay", "clip_low", "clip_high"):
        require(getattr(config, name) >= 0, name, "must not be negative")
    for name in ("learning_rate", "sft_learning_rate", "max_grad_norm"):
        require(getattr(config, name) > 0, name, "must be above 0")
    for name in ("questions", "corpus") if config.model else ():
        require(getattr(config, name), name, "is needed with --model")
    for name in ("questions", "corpus", "eval_questions", "demos") if not config.model else ():
        require(not getattr(config, name), name, "needs --model; without it the embedded world is used")
    require(not config.sft_steps or config.demos, "sft_steps", "needs --demos")
    require(not config.demos or config.sft_steps, "demos", "needs --sft-steps")


def new_run_folder(config):
    """A named folder must be new; an automatic name gets -2, -3, ... so that no run is ever overwritten."""
    name, runs = config.name or f"{config.preset}-{config.advantage}-seed{config.seed}", pathlib.Path("runs")
    if config.name and (runs / name).exists():
        raise ValueError(f"--name {name}: {runs / name} exists; go on with --resume {runs / name} or choose another "
                         "name")
    candidates = [name] + [f"{name}-{i}" for i in range(2, 1000)]
    return runs / next(candidate for candidate in candidates if not (runs / candidate).exists())


# -----------------------------------------------------------------------------
# the step, phase by phase

@functools.lru_cache(maxsize=2)
def question_order(count, seed, epoch):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def questions_of_step(questions, config, step):
    """The questions of step 0, 1, ...: a fresh permutation every epoch, a function of (seed, step) alone."""
    first = step * config.questions_per_step
    places = (divmod(i, len(questions)) for i in range(first, first + config.questions_per_step))
    return [questions[question_order(len(questions), config.seed, epoch)[i]] for epoch, i in places]


def compute_advantages(trajectories, config):
    """-> (N,) float64 advantages, and the stratum report. A stratum: same question occurrence, same number of executed
    searches."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)       # (N,)
    groups = torch.tensor([t.group for t in trajectories])                              # (N,)
    strata = torch.tensor([t.n_searches for t in trajectories])                         # (N,)
    if config.advantage == "grpo":
        advantages = group_advantages(rewards, groups)
    elif config.advantage == "san":
        advantages = stratified_advantages(rewards, groups, strata)
    else:
        advantages = blended_advantages(rewards, groups, strata, config.alpha)
    return advantages, stratum_report(rewards, groups, strata)


def padded(values, trajectories, like):
    """Per-token lists over the responses -> (B, T) float tensor aligned with pad_trajectories."""
    out = torch.zeros(like.shape, device=like.device)
    for row, (value, trajectory) in enumerate(zip(values, trajectories)):
        out[row, len(trajectory.prompt_ids) : len(trajectory)] = torch.tensor(value, device=like.device)
    return out


COMBINE = {"ratio_min": min, "ratio_max": max}  # the other statistics add up


def update(model, optimizer, reference, trajectories, advantages, config, step):
    """PPO epochs over the rollouts of one step, in place. -> statistics averaged over the optimizer steps."""
    advantages = dict(zip(map(id, trajectories), advantages.tolist()))
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    learning_rate = config.learning_rate * min(1.0, (step + 1) / (config.warmup_steps + 1))
    history = []
    for _ in range(config.epochs):
        order = torch.randperm(len(trajectories), generator=generator).tolist()
        for start in range(0, len(order), config.mini_batch):
            batch = [trajectories[i] for i in order[start : start + config.mini_batch]]
            # whole-batch denominators make the gradient independent of the micro-batches; departure 3 says what is
            # left out
            total_tokens = sum(sum(t.sampled) for t in batch)
            denominator = total_tokens if config.loss == "token-mean" else len(batch)
            batch = [t for t in batch if advantages[id(t)] != 0 or reference]
            trained_tokens = sum(sum(t.sampled) for t in batch)
            if not batch:
                continue
            row = {"ratio_min": float("inf"), "ratio_max": float("-inf")}
            for part in micro_batches(batch, config.micro_batch_tokens):
                ids, sampled = pad_trajectories(part, model.device)                                        # (B, T) x 2
                logprobs, entropy = token_logprobs(model, ids, sampled, config.temperature)                # (B, T) x 2
                old_logprobs = padded([t.logprobs for t in part], part, ids)                               # (B, T)
                advantage = torch.tensor([advantages[id(t)] for t in part], device=model.device)           # (B,)
                loss, statistics = ppo_clip_loss(logprobs, old_logprobs, advantage, sampled, config.clip_low,
                                                 config.clip_high, config.loss, denominator, total_tokens)
                statistics["entropy"] = entropy.sum() / total_tokens
                if reference:
                    with torch.no_grad():
                        reference_logprobs, _ = token_logprobs(reference, ids, sampled, config.temperature)
                    # 0 where forced
                    kl = kl_k3(logprobs, reference_logprobs)                                               # (B, T)
                    statistics["kl"] = kl.detach().sum() / total_tokens
                    weights = 1.0 if config.loss == "token-mean" else 1.0 / sampled.sum(1, keepdim=True)   # (B, 1)
                    loss = loss + config.kl * (kl * weights).sum() / denominator
                statistics["loss"] = loss.detach()
                loss.backward()
                optimizer.accumulate()
                for key, value in statistics.items():
                    value = value.item()
                    row[key] = COMBINE[key](row[key], value) if key in COMBINE else row.get(key, 0.0) + value
            row["grad_norm"] = optimizer.step(learning_rate, config.max_grad_norm)
            for key in ("ratio_mean", "clipfrac", "approx_kl", "entropy"):
                row[key] *= total_tokens / trained_tokens  # a mean over the tokens that were run
            history.append(row)
    columns = {key: [row[key] for row in history] for key in (history[0] if history else ())}
    statistics = {key: COMBINE[key](v) if key in COMBINE else sum(v) / len(v) for key, v in columns.items()}
    return {**statistics, "learning_rate": learning_rate, "optimizer_steps": len(history)}


# -----------------------------------------------------------------------------
# main

def main(arguments=None):
    try:
        config, folder, resumed = parse_config(arguments)
        if config.threads:
            torch.set_num_threads(config.threads)
        run = setup(config, folder, resumed)
    except (ValueError, OSError, RetrieverError, SafetensorError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        if latest_checkpoint(folder):
            print(f"interrupted; go on with: python train.py --resume {folder}", file=sys.stderr)
        sys.exit(130)
    try:
        train(config, folder, **run)
    except (OSError, FloatingPointError) as error:  # a full disk, a gradient of NaN; the update may be half done
        sys.exit(f"error: {error}; go on from the last checkpoint with: python train.py --resume {folder}")


def setup(config, folder, resumed):
    """Load everything, so that whatever is wrong with it is said before the run folder is made. -> keyword arguments of
    train."""
    device, dtype = choose_device(config.device, config.dtype)
    source, data = config.model, {name: getattr(config, name) for name in ("questions", "eval_questions", "corpus")}
    if not source:
        source = world.prepare(config.cache, config.seed)
        data = {"questions": f"{source}/train.jsonl", "eval_questions": f"{source}/heldout.jsonl",
                "corpus": f"{source}/corpus.jsonl"}
    checkpoint = latest_checkpoint(folder) if resumed else None
    protocol = load_protocol(checkpoint or source)
    if config.protocol and not resumed:
        protocol = PROTOCOLS[config.protocol]
    changes = {key: getattr(config, key)
               for key in ("max_searches", "passages", "max_turn_tokens", "max_observation_tokens")}
    protocol = dataclasses.replace(protocol, **{key: value for key, value in changes.items() if value >= 0})
    if config.prompt_file and not resumed:  # a checkpoint holds the prompt it was trained with
        protocol = dataclasses.replace(protocol, prompt=pathlib.Path(config.prompt_file).read_text(encoding="utf-8"))
        if "{question}" not in protocol.prompt:
            raise ValueError(f"--prompt-file {config.prompt_file}: the text must contain {{question}}, where the "
                             "question goes")
    questions = resolve_questions(data["questions"], "train")
    held_out = []
    if data["eval_questions"]:
        held_out = resolve_questions(data["eval_questions"], "test", config.eval_limit)
    model, tokenizer = load_policy(checkpoint or source, device, dtype, config.max_context)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    codec = Codec(tokenizer, protocol)
    # all would take a while
    for question in sorted(questions + held_out, key=lambda question: len(question.question))[-1000:]:
        if (length := len(codec.prompt(question.question))) >= config.max_context:
            raise ValueError(f"question {question.id}: prompt of {length} tokens does not fit "
                             f"--max-context {config.max_context}")
    retriever = open_retriever(data["corpus"], cache_dir=config.cache or None)
    retriever.search(["is anyone there"], 1)  # a server that is down is found now
    if config.demos and not resumed:
        if config.demos == "answers":
            demonstrations = answer_demonstrations(questions, tokenizer, protocol, config.max_context)
        else:
            demonstrations = load_demonstrations(config.demos, tokenizer, retriever, protocol, config.max_context)
        with out_of_memory_names("micro-batch-tokens"):
            warm_start(model, demonstrations, config.sft_steps, config.sft_batch, config.sft_learning_rate,
                       config.micro_batch_tokens, config.seed)
    folder.mkdir(parents=True, exist_ok=resumed)
    try:
        write_json(folder / "config.json", dataclasses.asdict(config))
        reference, step = None, 0
        optimizer = MasterAdamW(model, config.learning_rate, (0.9, 0.999), config.weight_decay)
        if checkpoint:
            step = int(checkpoint.name.removeprefix("checkpoint-"))
            optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location=device, weights_only=True))
            for name in ("metrics.jsonl", "trajectories.jsonl"):
                trim(folder / name, step)
        elif config.kl:
            model.save_pretrained(folder / "reference")
            tokenizer.save_pretrained(folder / "reference")
        if config.kl:
            reference = load_policy(folder / "reference", device, dtype)[0].requires_grad_(False)
        if not checkpoint:  # resumable from the start: keeps the warm start, and finds a disk that is too small now
            with hold_interrupts():
                save_checkpoint(folder, 0, model, tokenizer, protocol, optimizer)
    except BaseException:  # whatever it was: no half-made run folder is left behind
        if not latest_checkpoint(folder):
            shutil.rmtree(folder)
        raise
    return dict(model=model, tokenizer=tokenizer, protocol=protocol, questions=questions, held_out=held_out,
                retriever=retriever, reference=reference, optimizer=optimizer, step=step)


def evaluate(config, folder, step, model, tokenizer, protocol, held_out, retriever):
    """Greedy rollouts, one per held-out question. -> and prints EM, F1, searches; keeps them in eval.json by step."""
    with out_of_memory_names("slots"):
        trajectories = rollout(model, tokenizer, held_out, retriever, protocol, 1, 0.0, config.slots,
                               config.max_context)
    result = score(held_out, trajectories)
    low, high = result["em_interval"]
    tqdm.write(f"eval {step:4d} | {len(held_out)} held-out questions, greedy | EM {result['em']:.3f} "
               f"[{low:.3f}, {high:.3f}] | F1 {result['f1']:.3f} | searches {result['searches']:.2f} per question")
    path = folder / "eval.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**saved, str(step): result})
    return result


def train(config, folder, model, tokenizer, protocol, questions, held_out, retriever, reference, optimizer, step):
    """The loop. `step` counts finished steps, so a checkpoint at any point between two updates is a resumable one."""
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder} | {type(model).__name__} {parameters / 1e6:.1f} M parameters, {model.dtype} on {model.device} | "
          f"{len(questions)} training questions | advantage {config.advantage}"
          + (f", alpha {config.alpha}" if config.advantage == "stratified" else ""))
    test = functools.partial(evaluate, config, folder, model=model, tokenizer=tokenizer, protocol=protocol,
                             held_out=held_out, retriever=retriever)
    saved = step
    reward_name = config.reward or ("research" if config.protocol == "research" else "em")

    def save():
        nonlocal saved
        with hold_interrupts():
            save_checkpoint(folder, step, model, tokenizer, protocol, optimizer)
            saved = step

    def due(every):
        return step == config.steps or every and step % every == 0

    bar = tqdm(total=config.steps, initial=step, unit="step", disable=None, leave=False)
    try:
        if held_out and (step == 0 or due(config.eval_every)):  # when resumed: what an interruption may have cut off
            test(step)
        while step < config.steps:
            started = time.perf_counter()
            batch = questions_of_step(questions, config, step)
            generator = torch.Generator(model.device).manual_seed(config.seed * 1_000_003 + step)
            with out_of_memory_names("slots"):
                trajectories = rollout(model, tokenizer, batch, retriever, protocol, config.rollouts_per_question,
                                       config.temperature, config.slots, config.max_context, generator)
            for trajectory in trajectories:
                trajectory.reward = reward(reward_name, trajectory, batch[trajectory.group], tokenizer)
            advantages, report = compute_advantages(trajectories, config)
            sampled_at = time.perf_counter()
            with hold_interrupts():  # from here the weights change
                with out_of_memory_names("micro-batch-tokens"):
                    statistics = update(model, optimizer, reference, trajectories, advantages, config, step)
                seconds = {"rollout_seconds": sampled_at - started, "update_seconds": time.perf_counter() - sampled_at}
                metrics = {"step": step, **score([batch[t.group] for t in trajectories], trajectories, interval=False),
                           **statistics, **report, **seconds}
                append_line(folder / "metrics.jsonl", metrics)
                if step % config.dump_every == 0:
                    append_line(folder / "trajectories.jsonl", *(
                        {"step": step, "advantage": a, **record(t, batch[t.group], tokenizer)}
                        for t, a in zip(trajectories, advantages.tolist())))
                step += 1
            tqdm.write(step_line(metrics, config))
            bar.update()
            if due(config.save_every):
                save()
            if held_out and due(config.eval_every):
                test(step)
        bar.close()
        data = ""
        if config.model:
            data = (f" --questions {config.eval_questions or 'F'} --corpus {config.corpus} "
                    f"--max-context {config.max_context}")
        print(f"done: {folder} | python eval.py --model {latest_checkpoint(folder)}{data}")
    except (KeyboardInterrupt, RetrieverError) as error:  # come between two updates only
        with contextlib.suppress(KeyboardInterrupt):  # an impatient second Ctrl-C
            if saved != step:
                save()
        stopped = f"error: {error}; stopped" if isinstance(error, RetrieverError) else "interrupted"
        print(f"{stopped} after step {step}; go on with: python train.py --resume {folder}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RetrieverError) else 130)
    finally:
        bar.close()


def step_line(m, config):
    """One human line a step: reward is the mean EM; then share and mean reward of every stratum (number of
    searches)."""
    strata = " ".join(f"{label}:{s['share']:.0%}/{s['reward_mean']:.2f}" for label, s in m["strata"].items())
    line = (f"step {m['step'] + 1:4d}/{config.steps} | EM {m['em']:.3f} | searches {m['searches']:.2f} | "
            f"share/EM by searches {strata}")
    if m["optimizer_steps"]:
        line += f" | kl {m['kl']:.4f}" if "kl" in m else ""
        line += f" | approx_kl {m['approx_kl']:.4f} | clip {m['clipfrac']:.3f} | entropy {m['entropy']:.2f}"
    return line + f" | {m['tokens'] / (m['rollout_seconds'] + m['update_seconds']):.0f} tok/s"


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a log file is as up to date as a terminal
    main()
