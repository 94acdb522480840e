"""
train.py — train a search agent with Stratified GRPO, read top to bottom.

    python train.py                         # the embedded world (world.py), a tiny policy, minutes on a laptop CPU
    python train.py --advantage grpo        # the same run with another estimator: see stratgrpo.py, baselines.py
    python train.py --strata placement      # the same run with another idea of "same structure": see strata.py
    python train.py --model DIR --questions F --corpus F --eval-questions F     # your model and data
    python train.py --preset search-r1      # the paper's setting: Qwen2.5-3B, NQ + HotpotQA, 2018 Wikipedia; one GPU
    python train.py --protocol research ... # ReSearch's protocol and reward; r1: reasoning without search
    python train.py --protocol direct --demos answers --sft-steps 500 --steps 0 ...     # the SFT baseline
    python train.py --resume runs/NAME      # go on after an interruption

A step: rollout -> reward -> strata -> advantages -> PPO epochs over mini-batches -> log. runs/NAME/ then holds
config.json, metrics.jsonl (a line a step), trajectories.jsonl (every Nth step, decoded, with the sampled mask),
eval.json, dropped.jsonl (if a step was: see --max-dropped), and the two newest checkpoint-STEP/ (Hugging Face folders
that eval.py takes).

Departures from the paper and from Search-R1, which it follows:
 1. old log-probs are those of the forward pass that sampled the token; nothing is scored twice before the update.
 2. the loss is the token mean over a mini-batch of rollouts (Search-R1: mean over micro-batches), so micro-batches
    change nothing.
 3. a rollout with advantage 0 has gradient 0: without a KL term it is counted in the mean but not run through the
    model, and a mini-batch of nothing else takes no optimizer step.
 4. every step draws its randomness and its questions from (seed, step) alone, so that a resumed run needs no generator
    states.
"""
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shlex
import shutil
import signal
import sys
import time

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import strata
import world
from baselines import Critic, dr_grpo_advantages, reinforce_advantages, rloo_advantages
from checkpoint import (append_line, hold_interrupts, latest_checkpoint, load_critic, load_optimizer, lock, read_lines,
                        save_checkpoint, trim, whole_checkpoint, whole_or_nothing, write_json)
from config import alpha_at, parse_config
from data import resolve_questions, score
from methods import PROTOCOLS, answer_demonstrations
from policy import (MasterAdamW, OutOfMemory, choose_device, load_policy, micro_batches, out_of_memory_names,
                    pad_trajectories, token_logprobs, warm_start)
from retriever import RetrieverError, open_retriever
from rewards import reward
from rollout import Codec, begin, load_demonstrations, load_protocol, record, rollout
from stratgrpo import blended_advantages, group_advantages, kl_k3, ppo_clip_loss, stratified_advantages, stratum_report


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


def collect(sample, questions, config, step):
    """-> trajectories to learn from, trajectories sampled, and the question of each group.

    sample(questions) -> trajectories with rewards. With --resample, DAPO's dynamic sampling (arXiv 2503.14476): groups
    whose rollouts all earn the same teach nothing; they are dropped, and other questions are asked in their place.
    """
    batch = questions_of_step(questions, config, step)
    sampled = sample(batch)
    if not config.resample:
        return sampled, sampled, batch
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    missing, kept = config.questions_per_step, []
    for trial in range(config.resample + 1):
        if trial:
            drawn = torch.randint(len(questions), (missing,), generator=generator).tolist()
            more = sample([questions[i] for i in drawn])
            for trajectory in more:
                trajectory.group += len(batch)  # groups are numbered through all rounds
            batch, sampled = batch + [questions[i] for i in drawn], sampled + more
        rewards = {}
        for trajectory in sampled:
            rewards.setdefault(trajectory.group, set()).add(trajectory.reward)
        kept = [t for t in sampled if len(rewards[t.group]) > 1]
        missing = config.questions_per_step - len({t.group for t in kept})
        if missing == 0:
            break
    return kept, sampled, batch


def compute_advantages(trajectories, config, step=0, memory=()):
    """-> (N,) float64 advantages, and (N,) strata. A group is a question occurrence; --strata says what a stratum is.
    With ppo the advantages are 0, the critic knows better."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)       # (N,)
    groups = torch.tensor([t.group for t in trajectories])                              # (N,)
    seed = config.seed * 1_000_003 + step
    labels = torch.tensor(strata.label(trajectories, config.strata, seed, memory))      # (N,)
    rules = dict(ddof=config.ddof, min_stratum=config.min_stratum, small=config.small_strata, tau=config.shrink_tau)
    if config.advantage == "stratified":
        advantages = blended_advantages(rewards, groups, labels, alpha_at(config, step), **rules)
    elif config.advantage == "san":
        advantages = stratified_advantages(rewards, groups, labels, **rules)
    elif config.advantage == "grpo":
        advantages = group_advantages(rewards, groups, ddof=config.ddof)
    elif config.advantage == "dr-grpo":
        advantages = dr_grpo_advantages(rewards, groups)
    elif config.advantage == "rloo":
        advantages = rloo_advantages(rewards, groups)
    elif config.advantage == "reinforce":
        advantages = reinforce_advantages(rewards)
    else:
        advantages = torch.zeros_like(rewards)
    return advantages, labels                                                           # (N,) x 2


def padded(values, trajectories, like):
    """Per-token values of the responses -> (B, T) float tensor aligned with pad_trajectories, 0 elsewhere. A value of
    length 1 is that of every token."""
    out = torch.zeros(like.shape, device=like.device)
    for row, (value, trajectory) in enumerate(zip(values, trajectories)):
        response = torch.as_tensor(value, device=like.device)[: len(trajectory.response_ids)]
        out[row, len(trajectory.prompt_ids) : len(trajectory)] = response
    return out


COMBINE = {"ratio_min": min, "ratio_max": max}  # the other statistics add up


def update(model, optimizer, reference, trajectories, advantages, config, step):
    """PPO epochs over the rollouts of one step, in place. -> statistics averaged over the optimizer steps.

    advantages (N,), or (N, R): one for every response token, padded to the longest of R.
    """
    advantages = dict(zip(map(id, trajectories), advantages.reshape(len(trajectories), -1)))  # (1,) or (R,) each
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
            batch = [t for t in batch if advantages[id(t)].any() or reference]
            trained_tokens = sum(sum(t.sampled) for t in batch)
            if not batch:
                continue
            row = {"ratio_min": float("inf"), "ratio_max": float("-inf")}
            for part in micro_batches(batch, config.micro_batch_tokens):
                ids, sampled = pad_trajectories(part, model.device)                                        # (B, T) x 2
                logprobs, entropy = token_logprobs(model, ids, sampled, config.temperature)                # (B, T) x 2
                old_logprobs = padded([t.logprobs for t in part], part, ids)                               # (B, T)
                advantage = padded([advantages[id(t)] for t in part], part, ids)                           # (B, T)
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


def learn(model, optimizer, critic, reference, trajectories, config, step, memory):
    """strata -> advantages -> update. Writes each trajectory's stratum and advantage (ppo: the mean over its tokens)
    into it; -> statistics, the stratum report among them."""
    statistics, rewards = {}, torch.tensor([t.reward for t in trajectories], dtype=torch.float64)      # (N,)
    advantages, labels = compute_advantages(trajectories, config, step, memory)                        # (N,) x 2
    means = advantages
    both = whole_or_nothing(critic.optimizer) if critic else contextlib.nullcontext()
    with out_of_memory_names("micro-batch-tokens"), whole_or_nothing(optimizer), both:
        if critic:
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            advantages, statistics = critic.advantages(model, trajectories, config.gae_lambda, config.epochs,
                                                       config.mini_batch, config.micro_batch_tokens, generator)
            means = advantages.sum(1) / torch.tensor([sum(t.sampled) for t in trajectories])           # (N,)
        report = stratum_report(rewards, torch.tensor([t.group for t in trajectories]), labels, means)
        if report["theorem1_error"] > 1e-9 * max(1.0, report["var_group"]):
            raise ArithmeticError(f"Theorem 1 is off by {report['theorem1_error']}: strata or groups are not what they "
                                  "should be")
        for trajectory, stratum, advantage in zip(trajectories, labels.tolist(), means.tolist()):
            trajectory.stratum, trajectory.advantage = stratum, advantage
        return {**statistics, **report, **update(model, optimizer, reference, trajectories, advantages, config, step)}


def shares(trajectories):
    """Shares of rollouts that go wrong in form: cut by the context, with an invalid turn, without an answer."""
    count = len(trajectories)
    return {"truncated_share": sum(t.finish == "length" for t in trajectories) / count,
            "invalid_share": sum(t.n_invalid > 0 for t in trajectories) / count,
            "unanswered_share": sum(t.answer is None for t in trajectories) / count}


def alarms(metrics, scores):
    """Signs of a collapse: {what: one line}. metrics of a step, scores: the EM of every step so far."""
    limits = {  # metric: (sign, threshold, what it means)
        "truncated_share": (1, 0.5, "most rollouts run out of context; raise --max-context"),
        "invalid_share": (1, 0.5, "most rollouts neither search nor answer in some turn"),
        "unanswered_share": (1, 0.5, "most rollouts end without an answer"),
        "entropy": (-1, 0.01, "nats per token: the policy hardly samples any more, so nothing new is tried"),
        "approx_kl": (1, 0.1, "nats per token: one step moves the policy far; lower --learning-rate"),
        "clipfrac": (1, 0.3, "much of the gradient is clipped; lower --learning-rate or --epochs"),
    }
    found = {name: f"{name} {metrics[name]:.3f} is {'above' if sign > 0 else 'below'} {limit}: {text}"
             for name, (sign, limit, text) in limits.items()
             if name in metrics and sign * (metrics[name] - limit) > 0}
    count, most = max(metrics["by_searches"].items(), key=lambda item: item[1]["share"])
    if most["share"] > 0.98:
        found["by_searches"] = f"{most['share']:.1%} of the rollouts have {count} searches: no structure is left"
    means = [sum(scores[i : i + 5]) / 5 for i in range(len(scores) - 4)]  # of five steps
    if means and means[-1] < 0.5 * max(means):
        found["em"] = f"EM of the last five steps, {means[-1]:.3f}, is below half of the best five, {max(means):.3f}"
    return found


# -----------------------------------------------------------------------------
# main

def main(arguments=None):
    """Exit codes: 0 done, 1 error (one line on stderr), 2 unknown flag, 130 Ctrl-C or SIGTERM, after what is under way
    was finished and saved."""
    with contextlib.ExitStack() as held:
        terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers stop a run by SIGTERM
        held.callback(signal.signal, signal.SIGTERM, terminated)
        folder = None
        try:
            config, folder, resumed = parse_config(arguments, __doc__)
            if config.threads:
                torch.set_num_threads(config.threads)
            run = setup(config, folder, resumed, held)
        except (ValueError, OSError, RetrieverError, SafetensorError, OutOfMemory) as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            if folder and latest_checkpoint(folder):
                print(f"interrupted; go on with: {resume_command(folder)}", file=sys.stderr)
            sys.exit(130)
        try:
            train(config, folder, **run)
        except OSError as error:  # a full disk: weights and metrics may no longer belong together
            sys.exit(f"error: {error}; go on from the last checkpoint with: {resume_command(folder)}")


def resume_command(folder):
    return f"python train.py --resume {shlex.quote(str(folder))}"


def setup(config, folder, resumed, held):
    """Load everything, so that whatever is wrong with it is said before the run folder is made. -> keyword arguments of
    train. `held`: the ExitStack that keeps the lock of the run folder until the run ends."""
    if resumed:
        held.enter_context(lock(folder))
    device, dtype = choose_device(config.device, config.dtype)
    source, data = config.model, {name: getattr(config, name) for name in ("questions", "eval_questions", "corpus")}
    if not source:
        source = world.prepare(config.cache, config.seed)
        data = {"questions": f"{source}/train.jsonl", "eval_questions": f"{source}/heldout.jsonl",
                "corpus": f"{source}/corpus.jsonl"}
    checkpoint = whole_checkpoint(folder) if resumed else None
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
    with out_of_memory_names("model", "choose a smaller"):
        model, tokenizer = load_policy(checkpoint or source, device, dtype, config.max_context)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    codec = Codec(tokenizer, protocol)
    # all would take a while
    for question in sorted(questions + held_out, key=lambda question: len(question.question))[-1000:]:
        begin(codec, question, 0, config.max_context)  # ValueError if the prompt does not fit
    retriever = open_retriever(data["corpus"], cache_dir=config.cache or None)
    retriever.search(["is anyone there"], 1)  # a server that is down is found now
    if config.demos and not resumed:
        if config.demos == "answers":
            demonstrations = answer_demonstrations(questions, tokenizer, protocol, config.max_context)
        else:
            demonstrations = load_demonstrations(config.demos, tokenizer, retriever, protocol, config.max_context)
        try:
            with out_of_memory_names("micro-batch-tokens"):
                warm_start(model, demonstrations, config.sft_steps, config.sft_batch, config.sft_learning_rate,
                           config.micro_batch_tokens, config.seed)
        except FloatingPointError as error:
            raise ValueError(f"--sft-learning-rate {config.sft_learning_rate}: in the warm start {error}; lower it"
                             ) from None
    if not resumed:
        folder.mkdir(parents=True)
        held.enter_context(lock(folder))
    try:
        write_json(folder / "config.json", dataclasses.asdict(config))
        reference, step = None, 0
        optimizer, critic = MasterAdamW(model, config.learning_rate, (0.9, 0.999), config.weight_decay), None
        if config.advantage == "ppo":
            critic = Critic(model, protocol.max_searches, config.critic_sees_searches, config.critic_learning_rate)
        if checkpoint:
            step = int(checkpoint.name.removeprefix("checkpoint-"))
            with out_of_memory_names("model", "choose a smaller"):
                load_optimizer(optimizer, checkpoint)
                if critic:
                    load_critic(critic, checkpoint)
            for name in ("metrics.jsonl", "trajectories.jsonl", "strata.jsonl", "dropped.jsonl"):
                trim(folder / name, step)
        elif config.kl or config.log_kl:
            model.save_pretrained(folder / "reference")
            tokenizer.save_pretrained(folder / "reference")
        if config.kl or config.log_kl:
            with out_of_memory_names("model", "set --kl 0 or choose a smaller"):
                reference = load_policy(folder / "reference", device, dtype)[0].requires_grad_(False)
        if not checkpoint:  # resumable from the start: keeps the warm start, and finds a disk that is too small now
            with hold_interrupts():
                save_checkpoint(folder, 0, model, tokenizer, protocol, optimizer, critic)
    except BaseException:  # whatever it was: no half-made run folder is left behind
        if not latest_checkpoint(folder):
            shutil.rmtree(folder)
        raise
    return dict(model=model, tokenizer=tokenizer, protocol=protocol, questions=questions, held_out=held_out,
                retriever=retriever, reference=reference, optimizer=optimizer, critic=critic, step=step)


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


def finite(trajectory):
    return math.isfinite(trajectory.reward) and all(map(math.isfinite, trajectory.logprobs))


def check_finite(trajectories):
    """FloatingPointError naming the first reward or log-prob that is NaN or infinite: it would spoil every weight."""
    for trajectory in trajectories:
        if not finite(trajectory):
            raise FloatingPointError(f"question {trajectory.question_id}: the reward ({trajectory.reward}) or a "
                                     "log-prob of a rollout is not finite")


def suspects(model, trajectories, temperature):
    """The trajectories to look at when a step was dropped: not finite as sampled, else as scored now, else all."""
    def scored_badly(trajectory):
        with torch.no_grad():
            logprobs, _ = token_logprobs(model, *pad_trajectories([trajectory], model.device), temperature)
        return not logprobs.isfinite().all()

    return ([t for t in trajectories if not finite(t)] or [t for t in trajectories if scored_badly(t)]
            or trajectories)


def train(config, folder, model, tokenizer, protocol, questions, held_out, retriever, reference, optimizer, critic,
          step):
    """The loop. `step` counts finished steps, so a checkpoint at any point between two updates is a resumable one."""
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{folder} | {type(model).__name__} {parameters / 1e6:.1f} M parameters, {model.dtype} on {model.device} | "
          f"{len(questions)} training questions | advantage {config.advantage}"
          + (f", alpha {config.alpha}" if config.advantage == "stratified" else "") + f", strata: {config.strata}")
    test = functools.partial(evaluate, config, folder, model=model, tokenizer=tokenizer, protocol=protocol,
                             held_out=held_out, retriever=retriever)
    history = read_lines(folder / "metrics.jsonl")
    scores = [row["em"] for row in history]
    dropped = history[-1]["dropped"] if history else 0  # steps in a row
    memory = read_lines(folder / "strata.jsonl")[-strata.TREE_MEMORY :]  # of past steps, for --strata auto
    reward_name = config.reward or ("research" if config.protocol == "research" else "em")
    saved, warned = step, set()

    def sample(batch):
        """The rollouts of a batch of questions, with rewards."""
        with out_of_memory_names("slots"):
            trajectories = rollout(model, tokenizer, batch, retriever, protocol, config.rollouts_per_question,
                                   config.temperature, config.slots, config.max_context, generator)
        for trajectory in trajectories:
            trajectory.reward = reward(reward_name, trajectory, batch[trajectory.group], tokenizer)
        return trajectories

    def save():
        nonlocal saved
        with hold_interrupts():
            save_checkpoint(folder, step, model, tokenizer, protocol, optimizer, critic)
            saved = step

    def due(every):
        return step == config.steps or every and step % every == 0

    bar = tqdm(total=config.steps, initial=step, unit="step", disable=None, leave=False)
    try:
        if held_out and (step == 0 or due(config.eval_every)):  # when resumed: what an interruption may have cut off
            test(step)
        while step < config.steps:
            started = time.perf_counter()
            generator = torch.Generator(model.device).manual_seed(config.seed * 1_000_003 + step)
            trajectories, sampled, batch = collect(sample, questions, config, step)
            sampled_at = time.perf_counter()
            with hold_interrupts():  # from here the weights change
                statistics = {"alpha": alpha_at(config, step)} if config.advantage == "stratified" else {}
                try:
                    check_finite(sampled)
                    if trajectories:  # with --resample there may be none left
                        statistics |= learn(model, optimizer, critic, reference, trajectories, config, step, memory)
                    dropped = 0
                except FloatingPointError as error:
                    dropped += 1
                    statistics |= {"dropped_because": str(error), "optimizer_steps": 0}
                    append_line(folder / "dropped.jsonl", *(
                        {"step": step, "because": str(error), **record(t, batch[t.group], tokenizer)}
                        for t in suspects(model, sampled, config.temperature)))
                seconds = {"rollout_seconds": sampled_at - started, "update_seconds": time.perf_counter() - sampled_at}
                metrics = {"step": step, **score([batch[t.group] for t in sampled], sampled, interval=False),
                           **shares(sampled), "rollouts": len(sampled), "trained_rollouts": len(trajectories),
                           **statistics, "dropped": dropped, **seconds}
                append_line(folder / "metrics.jsonl", metrics)
                if not dropped:
                    if config.strata == "auto" and trajectories:
                        memory = [*memory, strata.memory_row(trajectories, step)][-strata.TREE_MEMORY :]
                        append_line(folder / "strata.jsonl", memory[-1])
                    if step % config.dump_every == 0:
                        append_line(folder / "trajectories.jsonl",
                                    *({"step": step, **record(t, batch[t.group], tokenizer)} for t in trajectories))
                step += 1
            tqdm.write(step_line(metrics, config))
            scores.append(metrics["em"])
            ringing = alarms(metrics, scores)
            for name, text in ringing.items():
                if name not in warned:  # once, not at every step from here on
                    tqdm.write(f"warning: {text}")
            warned = set(ringing)
            bar.update()
            if dropped >= config.max_dropped:
                raise FloatingPointError(f"{dropped} steps in a row were dropped ({metrics['dropped_because']}); their "
                                         f"trajectories are in {folder}/dropped.jsonl")
            if due(config.save_every):
                save()
            if held_out and due(config.eval_every):
                test(step)
        bar.close()
        data = ""
        if config.model:
            data = (f" --questions {config.eval_questions or 'F'} --corpus {config.corpus} "
                    f"--max-context {config.max_context}")
        print(f"done: {folder} | python eval.py --model {shlex.quote(str(latest_checkpoint(folder)))}{data}")
    except (KeyboardInterrupt, RetrieverError, OutOfMemory, FloatingPointError) as error:
        # weights and metrics are those of a whole step: the first two come between updates, whole_or_nothing cares for
        # the others
        with contextlib.suppress(KeyboardInterrupt):  # an impatient second Ctrl-C
            if saved != step:
                save()
        interrupted = isinstance(error, KeyboardInterrupt)
        stopped = "interrupted" if interrupted else f"error: {error}; stopped"
        print(f"{stopped} after step {step}; go on with: {resume_command(folder)}", file=sys.stderr)
        sys.exit(130 if interrupted else 1)
    finally:
        bar.close()


def step_line(m, config):
    """One human line a step: reward is the mean EM; then share and mean reward of every stratum."""
    cells = " ".join(f"{label}:{s['share']:.0%}/{s['reward_mean']:.2f}" for label, s in m.get("strata", {}).items())
    by = config.strata if config.strata in ("searches", "outcome", "placement") else "stratum"
    line = (f"step {m['step'] + 1:4d}/{config.steps} | EM {m['em']:.3f} | searches {m['searches']:.2f} | "
            f"share/EM by {by} {cells}")
    if m.get("dropped"):
        line += f" | dropped, {m['dropped']} in a row: {m['dropped_because']}"
    if m.get("optimizer_steps"):
        line += f" | kl {m['kl']:.4f}" if "kl" in m else ""
        line += f" | approx_kl {m['approx_kl']:.4f} | clip {m['clipfrac']:.3f} | entropy {m['entropy']:.2f}"
    return line + f" | {m['tokens'] / (m['rollout_seconds'] + m['update_seconds']):.0f} tok/s"


if __name__ == "__main__":
    # a log file is as up to date as a terminal; a name that the locale cannot print stops nothing
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    main()
