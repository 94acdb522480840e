"""train.py: flags, questions of a step, advantages, the update against an oracle, and whole runs on a toy folder,
interrupted or not."""
import copy
import dataclasses
import errno
import json
import pathlib
import shutil
import signal

import eval as evaluation
import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import checkpoint
import retriever
import train
from baselines import dr_grpo_advantages, reinforce_advantages, rloo_advantages
from checkpoint import append_line, checkpoints, hold_interrupts, latest_checkpoint, save_checkpoint, trim
from config import CHANGEABLE, PRESETS, Config, alpha_at, check_config, parse_config
from data import Question
from policy import MasterAdamW, load_policy, pad_trajectories, token_logprobs, warm_start
from retriever import RetrieverError, open_retriever
from rollout import SEARCH_R1, Protocol, Trajectory, replay, rollout
from stratgrpo import blended_advantages, group_advantages, stratified_advantages
from train import alarms, collect, compute_advantages, questions_of_step, step_line, update

PROMPT = "Q: {question}\n"
PROTOCOL = Protocol(prompt=PROMPT, retry="again\n", max_turn_tokens=24, max_observation_tokens=45)
QUESTIONS = [Question(str(i), f"number {i}?", ["golden"]) for i in range(6)]
SECONDS = ("rollout_seconds", "update_seconds")


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A folder with everything a run needs; the model answers golden or wrong, with or without a search, so rewards
    differ."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    turns = [[f"<search> {i} </search>"] * searches + [f"<answer> {answer} </answer>"]
             for i in range(6) for searches in (0, 1) for answer in ("golden", "wrong")]
    demonstrations = replay(turns, [question for question in QUESTIONS for _ in range(4)], tokenizer, FakeRetriever(),
                            PROTOCOL, 200)
    warm_start(model, demonstrations, 80, 12, 1e-2, 10**6, 0, log=lambda line: None)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [dataclasses.asdict(question) for question in QUESTIONS]
    write_lines(folder / "train.jsonl", *rows)
    write_lines(folder / "heldout.jsonl", *rows[:3])
    write_lines(folder / "demos.jsonl", *({**row, "turns": turns[0]} for row in rows))
    write_lines(folder / "corpus.jsonl", *({"id": str(i), "title": f"T{i}", "text": f"number {i} is golden"}
                                           for i in range(20)))
    (folder / "prompt.txt").write_text(PROMPT)
    return folder


def make_command(toy, folder, patch):
    patch.chdir(folder)
    patch.setattr(train, "open_retriever", lambda *args, **kwargs: FakeRetriever())

    def command(*flags, name="run"):
        train.main([
            "--name", name, "--preset", "tiny", "--model", f"{toy}/model", "--questions", f"{toy}/train.jsonl",
            "--eval-questions", f"{toy}/heldout.jsonl", "--corpus", f"{toy}/corpus.jsonl",
            "--prompt-file", f"{toy}/prompt.txt", "--questions-per-step", "2", "--rollouts-per-question", "4",
            "--max-turn-tokens", "24", "--max-observation-tokens", "45", "--max-context", "160", "--max-searches", "2",
            "--mini-batch", "4", "--learning-rate", "2e-4", "--warmup-steps", "1", "--dump-every", "2",
            *map(str, flags)])
        return folder / "runs" / name

    command.resume = lambda *flags, name="run": train.main(["--resume", f"runs/{name}", *map(str, flags)])
    return command


@pytest.fixture
def run(toy, tmp_path, monkeypatch):
    """run("--steps", 4) = python train.py on the toy folder, in tmp_path, searching a FakeRetriever; -> the run
    folder."""
    return make_command(toy, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    """The folder of an undisturbed run of 4 steps, to which interrupted ones are compared."""
    with pytest.MonkeyPatch.context() as patch:
        return make_command(toy, tmp_path_factory.mktemp("straight"), patch)("--steps", 4)


def read_lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # bytes: a sampled U+2028 is no end of line


def metrics(folder):
    return [{key: value for key, value in row.items() if key not in SECONDS}
            for row in read_lines(folder / "metrics.jsonl")]


def assert_same_run(a, b):
    """The same weights, optimizer, metrics and trajectories, bit for bit."""
    newest = latest_checkpoint(a)
    assert newest.name == latest_checkpoint(b).name
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "protocol.json", "config.json"):
        assert (newest / file).read_bytes() == (latest_checkpoint(b) / file).read_bytes()
    assert "0.exp_avg" in load_file(newest / "optimizer.safetensors")
    assert metrics(a) == metrics(b)
    assert read_lines(a / "trajectories.jsonl") == read_lines(b / "trajectories.jsonl")


def weights(folder):
    return (latest_checkpoint(folder) / "model.safetensors").read_bytes()


# -----------------------------------------------------------------------------
# flags

def test_presets_and_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, folder, resumed = parse_config([])
    assert (config == Config() and not resumed and folder == pathlib.Path("runs/tiny-stratified-seed0")
            and not folder.exists())
    config, folder, _ = parse_config(
        ["--preset", "search-r1", "--alpha", "0.3", "--no-gradient-checkpointing", "--advantage", "san"])
    assert config.model == "Qwen/Qwen2.5-3B" and config.questions_per_step == 512 and config.rollouts_per_question == 5
    assert config.alpha == "0.3" and config.gradient_checkpointing is False and folder.name == "search-r1-san-seed0"
    config, _, _ = parse_config(["--model", "M", "--questions", "F", "--corpus", "C"])  # the paper's settings
    assert config.preset == "search-r1" and config.learning_rate == 1e-6 and config.max_context == 4096
    assert (config.model, config.questions, config.corpus, config.eval_questions) == ("M", "F", "C", "")
    config, _, _ = parse_config(["--preset", "search-r1", "--corpus", "http://host/retrieve", "--steps", "3"])
    assert (config.corpus, config.steps, config.questions) == ("http://host/retrieve", 3, "nq,hotpotqa")
    for preset in PRESETS.values():  # every key of a preset is a flag, and the preset passes the checks
        check_config(Config(**preset))


def test_every_flag_has_a_help_text(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and all("--" + f.name.replace("_", "-") in text and f.metadata["help"]
                                        for f in dataclasses.fields(Config))


@pytest.mark.parametrize("arguments", [
    ["--nonsense", "1"], ["--learning", "1"], ["--steps", "x"], ["--advantage", "q-learning"], ["extra"]])
def test_unknown_flags_abbreviations_and_values_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(arguments)
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


BAD_FLAGS = [
    ("--rollouts-per-question 1", "at least 2"), ("--alpha 1.1", r"\[0, 1\]"), ("--alpha -0.1", r"\[0, 1\]"),
    ("--alpha nan", r"\[0, 1\]"), ("--alpha 0.9:1.3", "schedule"), ("--alpha 0.9:0.6:0.3", "schedule"),
    ("--alpha x", "schedule"), ("--alpha 0.9:", "schedule"), ("--strata depth", "searches, outcome, placement"),
    ("--strata nowhere:f", "No module named 'nowhere'"), ("--strata strata:nothing", "no attribute 'nothing'"),
    ("--strata :f", "Empty module name"), ("--min-stratum 0", "at least 1"), ("--shrink-tau -1", "negative"),
    ("--resample -1", "negative"), ("--gae-lambda 1.5", r"\[0, 1\]"), ("--critic-learning-rate 0", "above 0"),
    ("--critic-sees-searches", "needs --advantage ppo"),
    ("--temperature 0", "above 0"), ("--questions-per-step 0", "at least 1"),
    ("--slots 0", "at least 1"), ("--mini-batch 0", "at least 1"), ("--micro-batch-tokens 0", "at least 1"),
    ("--epochs 0", "at least 1"), ("--max-context 0", "at least 1"), ("--sft-batch 0", "at least 1"),
    ("--dump-every 0", "at least 1"), ("--steps -1", "negative"), ("--sft-steps -1", "negative"),
    ("--warmup-steps -1", "negative"), ("--eval-every -1", "negative"), ("--eval-limit -1", "negative"),
    ("--save-every -1", "negative"), ("--threads -1", "negative"), ("--kl -0.1", "negative"),
    ("--weight-decay -1", "negative"), ("--learning-rate 0", "above 0"), ("--learning-rate nan", "above 0"),
    ("--sft-learning-rate 0", "above 0"), ("--max-grad-norm 0", "above 0"), ("--clip-low 1.5", r"\[0, 1\]"),
    ("--clip-low -0.1", "negative"), ("--clip-high -0.1", "negative"), ("--max-searches -2", "at least 0, or -1"),
    ("--passages 0", "at least 1, or -1"), ("--max-turn-tokens 0", "at least 1, or -1"),
    ("--max-observation-tokens 0", "at least 1, or -1"), ("--questions F", "needs --model"),
    ("--corpus F", "needs --model"), ("--eval-questions F", "needs --model"), ("--demos F", "needs --model"),
    ("--sft-steps 3", "needs --demos"), ("--demos F --model M --questions F --corpus F", "needs --sft-steps"),
    ("--questions ''  --model M --corpus F", "needed with --model"),
    ("--corpus '' --model M --questions F", "needed with --model"),
]


@pytest.mark.parametrize("line, message", BAD_FLAGS)
def test_every_check_names_the_flag(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        parse_config([word.strip("'") for word in line.split()])
    assert str(error.value).startswith(line.split()[0]) and "\n" not in str(error.value)


def test_run_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-stratified-seed0").mkdir(parents=True)
    assert parse_config([])[1] == pathlib.Path("runs/tiny-stratified-seed0-2")
    (tmp_path / "runs" / "mine").mkdir()
    with pytest.raises(ValueError, match="--name mine: runs/mine exists"):
        parse_config(["--name", "mine"])


def test_what_resuming_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "r"
    (folder / "checkpoint-000003").mkdir(parents=True)
    with pytest.raises(ValueError, match="nothing to go on with"):
        parse_config(["--resume", "runs/r"])
    (folder / "config.json").write_text(json.dumps({**dataclasses.asdict(Config()), "seed": 7, "steps": 3}))
    config, resumed_folder, resumed = parse_config(
        ["--resume", "runs/r", "--steps", "9", "--slots", "4", "--seed", "7"])
    assert ((config.seed, config.steps, config.slots, resumed) == (7, 9, 4, True)
            and resumed_folder == pathlib.Path("runs/r"))
    # what changes the mathematics is kept; what only changes how the machine is used may change
    assert not {"seed", "learning_rate", "mini_batch", "questions_per_step", "alpha", "advantage", "kl",
                "model"} & set(CHANGEABLE)
    for change in (["--seed", "8"], ["--learning-rate", "1"], ["--advantage", "grpo"], ["--gradient-checkpointing"]):
        with pytest.raises(ValueError, match=f"{change[0]} cannot change"):
            parse_config(["--resume", "runs/r", *change])
    (folder / "checkpoint-000003").rmdir()
    with pytest.raises(ValueError, match="nothing to go on with"):
        parse_config(["--resume", "runs/r"])


# -----------------------------------------------------------------------------
# questions and advantages

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_questions_of_step_are_one_permutation_after_another(count, per_step, seed):
    questions, config = list(range(count)), Config(questions_per_step=per_step, seed=seed)
    steps = -(-3 * count // per_step)
    seen = [questions_of_step(questions, config, step) for step in range(steps)]
    assert all(len(batch) == per_step for batch in seen)
    stream = [question for batch in seen for question in batch]
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == questions
    for step in reversed(range(steps)):  # of (seed, step) alone, in whatever order they are asked for
        assert questions_of_step(questions, config, step) == seen[step]


def test_epochs_and_seeds_differ():
    questions = list(range(50))
    orders = [questions_of_step(questions, Config(questions_per_step=50, seed=seed), step)
              for seed in (0, 1) for step in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def one(group, reward, searches, question_id="q"):
    trajectory = Trajectory(question_id, group, [1], [2], [1], [-1.0], reward=reward)
    trajectory.searches = [None] * searches
    return trajectory


def test_compute_advantages_by_hand():
    rewards, searches = [1, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2]
    trajectories = [one(0, float(r), s) for r, s in zip(rewards, searches)]
    grpo = [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
    root = 2**0.5
    san = [root, -root / 2, -root / 2, root / 2, root / 2, -root, 1.0, -1.0]
    for config, expected in ((Config(advantage="grpo"), grpo), (Config(advantage="san"), san), (Config(alpha="0.25"),
                             [0.25 * s + 0.75 * g for s, g in zip(san, grpo)])):
        advantages, strata = compute_advantages(trajectories, config)
        assert advantages.dtype == torch.float64 and advantages.tolist() == pytest.approx(expected, abs=1e-5)
        assert strata.tolist() == searches


def test_the_same_question_twice_is_two_groups():
    first, second = [one(0, 1.0, 0), one(0, 0.0, 0)], [one(1, 1.0, 0), one(1, 1.0, 0)]
    advantages, _ = compute_advantages(first + second, Config(advantage="grpo"))
    assert advantages.tolist() == pytest.approx([1, -1, 0, 0], abs=1e-5)  # one group would give 1/sqrt(3), -sqrt(3)


def test_compute_advantages_is_stratgrpo_with_groups_and_search_counts():
    generator = torch.Generator().manual_seed(0)
    groups, searches = (torch.randint(high, (40,), generator=generator) for high in (5, 4))
    rewards = torch.rand(40, generator=generator, dtype=torch.float64)
    trajectories = [one(g, r, s) for g, r, s in zip(groups.tolist(), rewards.tolist(), searches.tolist())]
    assert torch.equal(compute_advantages(trajectories, Config(advantage="grpo"))[0], group_advantages(rewards, groups))
    assert torch.equal(compute_advantages(trajectories, Config(advantage="san"))[0],
                       stratified_advantages(rewards, groups, searches))
    assert torch.equal(compute_advantages(trajectories, Config(alpha="0.6"))[0],
                       blended_advantages(rewards, groups, searches, 0.6))


def test_every_estimator_is_its_function():
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 0, 1]).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    trajectories = [one(g, r, s) for g, r, s in zip(groups.tolist(), rewards.tolist(), [0, 0, 1, 1, 1, 2])]
    strata = torch.tensor([0, 0, 1, 1, 1, 2])
    for config, expected in (
            (Config(advantage="dr-grpo"), dr_grpo_advantages(rewards, groups)),
            (Config(advantage="rloo"), rloo_advantages(rewards, groups)),
            (Config(advantage="reinforce"), reinforce_advantages(rewards)),
            (Config(advantage="grpo", ddof=1), group_advantages(rewards, groups, ddof=1)),
            (Config(advantage="san", ddof=1), stratified_advantages(rewards, groups, strata, ddof=1)),
            (Config(advantage="san", min_stratum=3, small_strata="shrink", shrink_tau=2.0),
             stratified_advantages(rewards, groups, strata, min_stratum=3, small="shrink", tau=2.0)),
            (Config(min_stratum=3, small_strata="pool"),
             blended_advantages(rewards, groups, strata, 0.6, min_stratum=3, small="pool")),
            (Config(strata="none"), group_advantages(rewards, groups))):  # one stratum: any blend is GRPO
        assert compute_advantages(trajectories, config)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_the_schedule_of_alpha():
    config = Config(alpha="0.9:0.3", steps=7)
    assert [alpha_at(config, step) for step in range(7)] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    assert alpha_at(Config(alpha="0.9:0.3", steps=1), 0) == 0.9
    assert [alpha_at(Config(alpha="0.25", steps=9), step) for step in (0, 4, 8)] == [0.25] * 3


def test_the_schedule_needs_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/r"
    (folder / "checkpoint-000002").mkdir(parents=True)
    config = Config(name="r", alpha="0.9:0.3", steps=4)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    with pytest.raises(ValueError, match="--steps cannot change"):
        parse_config(["--resume", "runs/r", "--steps", "8"])
    assert parse_config(["--resume", "runs/r", "--steps", "4"])[0] == config


def test_resampling_drops_groups_without_spread_and_fills_up():
    """Question i earns what pay[i] says; only questions 3 and 4 have spread."""
    pay = [[0, 0], [1, 1], [0, 0], [0, 1], [1, 0], [0, 0]]
    asked = []

    def sample(batch):
        asked.append([q.id for q in batch])
        return [dataclasses.replace(one(group, float(reward), 0), question_id=q.id)
                for group, q in enumerate(batch) for reward in pay[int(q.id)]]

    config = Config(questions_per_step=4, resample=50)
    kept, sampled, batch = collect(sample, QUESTIONS, config, 0)
    assert len(asked) > 1 and {t.question_id for t in kept} <= {"3", "4"} and len(sampled) == 2 * sum(map(len, asked))
    groups = {t.group for t in kept}
    assert len(kept) == 8 and len(groups) == 4  # as many groups as a step has questions, all with spread
    assert [q.id for q in batch] == sum(asked, [])
    assert all(batch[t.group].id == t.question_id for t in sampled)  # groups are numbered through all rounds
    first = list(asked)
    asked.clear()
    collect(sample, QUESTIONS, config, 0)
    assert asked == first  # a function of (seed, step)
    asked.clear()
    kept, sampled, _ = collect(sample, QUESTIONS[:3], Config(questions_per_step=3, resample=2), 0)
    assert kept == [] and len(asked) == 3 and len(sampled) == 18  # rounds are limited
    asked.clear()
    kept, sampled, _ = collect(sample, QUESTIONS, Config(questions_per_step=4), 0)
    assert len(asked) == 1 and kept == sampled  # without the flag nothing is dropped


def test_alarms():
    calm = dict(truncated_share=0.1, invalid_share=0.2, unanswered_share=0.5, entropy=0.2, approx_kl=0.01, clipfrac=0.1,
                by_searches={"0": {"share": 0.98}, "2": {"share": 0.02}})
    assert alarms(calm, [0.4, 0.5, 0.6, 0.5, 0.4, 0.3]) == {}
    for change in (dict(truncated_share=0.51), dict(invalid_share=0.6), dict(unanswered_share=0.6), dict(entropy=0.005),
                   dict(approx_kl=0.2), dict(clipfrac=0.4), dict(by_searches={"2": {"share": 0.99}})):
        (name, text), = alarms({**calm, **change}, [0.4]).items()
        assert name in change and (name == "by_searches" or f"{change[name]:.3f}" in text)
    assert "99.0% of the rollouts have 2 searches" in alarms(
        {**calm, "by_searches": {"2": {"share": 0.99}}}, [])["by_searches"]
    fallen = alarms(calm, [0.6] * 5 + [0.1] * 5)
    assert list(fallen) == ["em"] and "0.100" in fallen["em"] and "0.600" in fallen["em"]
    assert alarms(calm, [0.6] * 5 + [0.1] * 2) == {}  # one bad step is none
    assert alarms({k: v for k, v in calm.items() if k not in ("entropy", "approx_kl")}, []) == {}  # no update


# -----------------------------------------------------------------------------
# the update

class Gradients:
    """Stands in for the optimizer: keeps the gradient of every optimizer step and leaves the weights alone."""

    def __init__(self, model):
        self.model, self.steps, self.learning_rates = model, [], []

    def accumulate(self):
        pass

    def step(self, learning_rate, max_grad_norm):
        self.steps.append(torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]))
        self.learning_rates.append(learning_rate)
        self.model.zero_grad()
        return 0.0


@pytest.fixture(scope="module")
def toy_model(toy):
    return load_policy(toy / "model")


@pytest.fixture(scope="module")
def sampled_trajectories(toy_model):
    """8 rollouts of unequal lengths, their old log-probs shifted so that some ratios are clipped, and advantages with
    zeros."""
    trajectories = rollout(*toy_model, QUESTIONS[:2], FakeRetriever(), PROTOCOL, 4, max_context=160,
                           generator=torch.Generator().manual_seed(3))
    shift = torch.Generator().manual_seed(4)
    for trajectory in trajectories:
        noise = 0.4 * torch.randn(len(trajectory.logprobs), generator=shift)
        trajectory.logprobs = [x + n if s else 0.0 for x, n, s in
                               zip(trajectory.logprobs, noise.tolist(), trajectory.sampled)]
    advantages = torch.tensor([1.2, 0.0, -0.7, 0.3, 0.0, -1.5, 0.8, 0.0], dtype=torch.float64)
    return trajectories, advantages


def gradient_of_update(model, trajectories, advantages, reference=None, **changes):
    config = Config(**{"mini_batch": len(trajectories), **changes})
    optimizer = Gradients(model)
    statistics = update(model, optimizer, reference, trajectories, advantages, config, 0)
    return optimizer.steps, statistics


def oracle_gradient(model, trajectories, advantages, loss, temperature=1.0, reference=None, kl_weight=0.0):
    """Equations (8) and (9), one rollout and one token at a time, over every rollout, whatever its advantage."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(sum(t.sampled) for t in trajectories)
    for trajectory, advantage in zip(trajectories, advantages.tolist()):
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        table = torch.log_softmax(model(input_ids=ids).logits[0].double() / temperature, -1)
        other = (torch.log_softmax(reference(input_ids=ids).logits[0].detach().double() / temperature, -1)
                 if reference else None)
        for i, (token, sampled, old) in enumerate(
                zip(trajectory.response_ids, trajectory.sampled, trajectory.logprobs)):
            if not sampled:
                continue
            place = len(trajectory.prompt_ids) + i - 1
            ratio = (table[place, token] - old).exp()
            term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if reference:
                difference = other[place, token] - table[place, token]
                term = term + kl_weight * (difference.exp() - difference - 1)
            total = total + term / (tokens if loss == "token-mean" else len(trajectories) * sum(trajectory.sampled))
    total.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient, total.item()


def relative_difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("budget", [1, 200, 10**6])
def test_the_update_follows_the_equations_whatever_the_micro_batches(loss, budget, toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    (gradient,), statistics = gradient_of_update(model, trajectories, advantages, loss=loss, micro_batch_tokens=budget)
    expected, value = oracle_gradient(model, trajectories, advantages, loss)
    assert relative_difference(gradient, expected) < 1e-4
    assert statistics["loss"] == pytest.approx(value, rel=1e-4) and 0 < statistics["clipfrac"] < 1


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_skipped_rollouts_change_nothing(loss, toy_model, sampled_trajectories):
    """Departure 3: with a reference nothing is skipped, so a tiny weight of the KL must give the gradient of no KL."""
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    (skipped,), _ = gradient_of_update(model, trajectories, advantages, loss=loss)
    (whole,), statistics = gradient_of_update(model, trajectories, advantages, reference=copy.deepcopy(model),
                                              loss=loss, kl=1e-12)
    assert relative_difference(skipped, whole) < 1e-4 and statistics["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_the_kl_term_follows_equation_9(loss, toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    (gradient,), statistics = gradient_of_update(model, trajectories, advantages, reference, loss=loss, kl=0.5,
                                                 micro_batch_tokens=200)
    expected, _ = oracle_gradient(model, trajectories, advantages, loss, reference=reference, kl_weight=0.5)
    assert relative_difference(gradient, expected) < 1e-4 and statistics["kl"] > 0.01
    without, _ = oracle_gradient(model, trajectories, advantages, loss)
    assert relative_difference(without, expected) > 0.01  # the term is seen at all


def test_the_update_scores_at_the_sampling_temperature(toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    (gradient,), _ = gradient_of_update(model, trajectories, advantages, temperature=1.5)
    assert relative_difference(
        gradient, oracle_gradient(model, trajectories, advantages, "token-mean", temperature=1.5)[0]) < 1e-4


def test_mini_batches_epochs_and_learning_rate(toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    steps, statistics = gradient_of_update(model, trajectories, advantages, mini_batch=3, epochs=2)
    assert len(steps) == statistics["optimizer_steps"] == 2 * 3  # 8 rollouts are 3 + 3 + 2
    assert not any(torch.equal(a, b) for a, b in zip(steps, steps[3:]))  # another order in another epoch
    optimizer = Gradients(model)
    update(model, optimizer, None, trajectories, advantages, Config(mini_batch=3), 1)
    assert not any(torch.equal(a, b) for a, b in zip(steps, optimizer.steps, strict=False))  # and in another step
    rates = []
    for step in range(6):
        optimizer = Gradients(model)
        update(model, optimizer, None, trajectories, advantages,
               Config(mini_batch=8, learning_rate=0.3, warmup_steps=2), step)
        rates += optimizer.learning_rates
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3, 0.3])


def test_an_advantage_for_every_token_alone(toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    (expected,), _ = gradient_of_update(model, trajectories, advantages)
    longest = max(len(t.response_ids) for t in trajectories)
    (spread,), _ = gradient_of_update(model, trajectories, advantages[:, None].expand(-1, longest))
    assert relative_difference(spread, expected) < 1e-5
    tokens = torch.randn(8, longest, generator=torch.Generator().manual_seed(0))
    (gradient,), _ = gradient_of_update(model, trajectories, tokens)
    total = torch.zeros(())
    for row, t in zip(tokens, trajectories):
        ids, sampled = pad_trajectories([t], "cpu")
        ratio = (token_logprobs(model, ids, sampled)[0][0, len(t.prompt_ids) :] - torch.tensor(t.logprobs)).exp()
        a, mask = row[: len(t.sampled)], torch.tensor(t.sampled)
        total = total - (mask * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum()
    (total / sum(sum(t.sampled) for t in trajectories)).backward()
    assert relative_difference(gradient, torch.cat([p.grad.flatten() for p in model.parameters()])) < 1e-4
    model.zero_grad()


def test_only_equal_rewards_take_no_optimizer_step(toy_model, sampled_trajectories):
    model, (trajectories, _) = toy_model[0], sampled_trajectories
    steps, statistics = gradient_of_update(model, trajectories, torch.zeros(8))
    assert not steps and statistics["optimizer_steps"] == 0 and "loss" not in statistics


def test_weights_equal_under_micro_batching(toy_model, sampled_trajectories):
    trajectories, advantages = sampled_trajectories
    after = []
    for budget in (1, 10**6):
        model = copy.deepcopy(toy_model[0])
        config = Config(mini_batch=8, micro_batch_tokens=budget, learning_rate=1e-3, warmup_steps=0)
        update(model, MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0), None, trajectories, advantages, config, 0)
        after.append(torch.cat([p.detach().flatten() - q.detach().flatten()
                                for p, q in zip(model.parameters(), toy_model[0].parameters())]))
    # the first step of Adam has the size of the learning rate wherever the gradient is not lost in rounding
    assert after[0].abs().max() == pytest.approx(1e-3, rel=0.01) and relative_difference(*after) < 0.01


def test_statistics_are_means_over_the_tokens_that_were_run(toy_model, sampled_trajectories):
    model, (trajectories, advantages) = toy_model[0], sampled_trajectories
    _, statistics = gradient_of_update(model, trajectories, advantages, micro_batch_tokens=100)
    run = [t for t, a in zip(trajectories, advantages.tolist()) if a != 0]
    ids, sampled = pad_trajectories(run, "cpu")
    with torch.no_grad():
        logprobs, entropy = token_logprobs(model, ids, sampled)
    old = torch.zeros_like(logprobs)
    for row, t in enumerate(run):
        old[row, len(t.prompt_ids) : len(t)] = torch.tensor(t.logprobs)
    ratio = (logprobs - old).exp()[sampled]
    assert statistics["entropy"] == pytest.approx(entropy[sampled].mean().item(), rel=1e-4)
    assert statistics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-4)
    assert statistics["ratio_min"] == pytest.approx(ratio.min().item(), rel=1e-3)
    assert statistics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-3)
    assert statistics["approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-3)


def test_good_rollouts_become_likelier_and_bad_ones_less(toy_model):
    model = copy.deepcopy(toy_model[0])
    trajectories = rollout(model, toy_model[1], QUESTIONS[:1], FakeRetriever(), PROTOCOL, 8, max_context=160,
                           generator=torch.Generator().manual_seed(0))
    good, bad = (next(t for t in trajectories if t.answer == answer) for answer in ("golden", "wrong"))

    def likelihoods():
        with torch.no_grad():
            return [token_logprobs(model, *pad_trajectories([t], "cpu"))[0].sum().item() for t in (good, bad)]

    before = likelihoods()
    update(model, MasterAdamW(model, 1e-4, (0.9, 0.999), 0.0), None, [good, bad], torch.tensor([1.0, -1.0]),
           Config(learning_rate=1e-4, warmup_steps=0), 0)
    after = likelihoods()
    assert after[0] > before[0] + 1e-3 and after[1] < before[1] - 1e-3


def test_kl_pulls_the_policy_to_the_reference(toy_model, sampled_trajectories):
    trajectories, _ = sampled_trajectories
    reference, model = toy_model[0], copy.deepcopy(toy_model[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    optimizer = MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0)
    distances = [update(model, optimizer, reference, trajectories, torch.zeros(8),
                        Config(kl=1.0, learning_rate=1e-3), step)["kl"] for step in range(10)]
    assert distances[-1] < distances[0] / 2


# -----------------------------------------------------------------------------
# whole runs

def test_a_run_from_end_to_end(run, toy, capsys, monkeypatch):
    folder = run("--steps", 4, "--eval-every", 2)
    out = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-000000", "checkpoint-000004", "config.json", "eval.json", "lock", "metrics.jsonl",
        "trajectories.jsonl"]
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["steps"] == 4 and saved["model"] == f"{toy}/model"
            and set(saved) == {f.name for f in dataclasses.fields(Config)})

    rows = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and sum(row["optimizer_steps"] for row in rows) >= 4
    for row in rows:
        assert {"em", "f1", "searches", "by_searches", "strata", "var_group", "var_stratum", "dead_share", "tokens",
                "learning_rate", "optimizer_steps", *SECONDS} <= set(row)
        assert row["em"] == pytest.approx(sum(s["share"] * s["reward_mean"] for s in row["strata"].values()))
        if row["optimizer_steps"]:
            assert {"loss", "entropy", "clipfrac", "approx_kl", "ratio_min", "ratio_mean", "ratio_max",
                    "grad_norm"} <= set(row)
            assert row["ratio_min"] <= row["ratio_mean"] <= row["ratio_max"] and row["grad_norm"] > 0
    assert any(row["strata"].keys() >= {"0", "1"} for row in rows)  # the toy policy mixes search counts

    trajectories = read_lines(folder / "trajectories.jsonl")
    assert [t["step"] for t in trajectories] == [0] * 8 + [2] * 8  # --dump-every 2
    for t in trajectories:
        assert t["prompt"].startswith("Q: number ") and t["golden_answers"] == ["golden"]
        assert len(t["response_ids"]) == len(t["sampled"]) == len(t["logprobs"])
        assert t["segments"][0][0] == 1 and {s for s, _ in t["segments"]} <= {0, 1}
        assert all(a[0] != b[0] for a, b in zip(t["segments"], t["segments"][1:]))
        assert all(("<information>" in text) == (sampled == 0)
                   for sampled, text in t["segments"] if "again" not in text)
        assert t["reward"] == float(t["answer"] == "golden") and len(t["searches"]) == t["n_searches"]
    by_step = [t for t in trajectories if t["step"] == 0]
    for start in (0, 4):  # the advantages written are those of the rewards written
        rewards = [t["reward"] for t in by_step[start : start + 4]]
        if len(set(rewards)) == 1:
            assert not any(t["advantage"] for t in by_step[start : start + 4])

    scores = json.loads((folder / "eval.json").read_text())
    assert (list(scores) == ["0", "2", "4"]
            and all(s["em_interval"][0] <= s["em"] <= s["em_interval"][1] for s in scores.values()))
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("eval ", "step "))] == [
        ["eval", "0"], ["step", "1/4"], ["step", "2/4"], ["eval", "2"], ["step", "3/4"], ["step", "4/4"], ["eval", "4"]]

    final = folder / "checkpoint-000004"
    model = AutoModelForCausalLM.from_pretrained(final)
    start = AutoModelForCausalLM.from_pretrained(toy / "model")
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters()))
    assert json.loads((final / "protocol.json").read_text())["prompt"] == PROMPT
    # the command that the last line recommends works, and finds what the run found
    command = out.strip().splitlines()[-1].partition("python eval.py ")[2].split()
    monkeypatch.setattr(evaluation, "open_retriever", lambda *args, **kwargs: FakeRetriever())
    evaluation.main([*command, "--out", "scores"])
    (again,) = json.loads(pathlib.Path("scores/eval.json").read_text())["systems"][0]["benchmarks"].values()
    assert again["em"] == scores["4"]["em"] and again["by_searches"] == scores["4"]["by_searches"]


def test_resumed_runs_are_bit_equal(run, straight):
    halves = run("--steps", 2)
    assert all(row["optimizer_steps"] for row in metrics(straight))
    assert weights(straight) != weights(halves) and len(metrics(halves)) == 2
    run.resume("--steps", 4)
    assert_same_run(straight, halves)
    scores = [json.loads((folder / "eval.json").read_text()) for folder in (straight, halves)]
    assert scores[0]["4"] == scores[1]["4"] and scores[0]["0"] == scores[1]["0"]
    assert json.loads((halves / "config.json").read_text())["steps"] == 4


@pytest.mark.parametrize("flags", [
    ("--advantage", "ppo", "--critic-sees-searches", "--gae-lambda", 0.9), ("--strata", "auto"),
    ("--strata", "random", "--alpha", "0.9:0.3"), ("--resample", 2)])
def test_resumed_runs_of_other_estimators_are_bit_equal(flags, run):
    whole = run("--steps", 4, *flags, name="whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "step_line", on_call(3, interrupt, step_line))
        with pytest.raises(SystemExit):
            run("--steps", 4, *flags)
    run.resume()
    assert_same_run(whole, pathlib.Path("runs/run"))
    for name in ("critic.safetensors", "critic_optimizer.safetensors") if "ppo" in flags else ():
        files = [(latest_checkpoint(folder) / name).read_bytes() for folder in (whole, pathlib.Path("runs/run"))]
        assert files[0] == files[1]
    if "auto" in flags:
        assert read_lines(whole / "strata.jsonl") == read_lines(pathlib.Path("runs/run/strata.jsonl"))


def test_what_the_metrics_say_of_every_step(run):
    folder = run("--steps", 2, "--advantage", "ppo", "--log-kl")
    for row in read_lines(folder / "metrics.jsonl"):
        assert {"var_group", "var_stratum", "gap", "dead_share", "singleton_share", "grad_norm", "entropy", "kl",
                "approx_kl", "ratio_min", "ratio_max", "clipfrac", "response_tokens", "observation_tokens",
                "truncated_share", "invalid_share", "unanswered_share", "by_searches", "value_loss",
                "value_explained"} <= row.keys()
        assert row["theorem1_error"] < 1e-9 and row["rollouts"] == row["trained_rollouts"] == 8
        for stratum in row["strata"].values():
            assert {"count", "share", "reward_mean", "reward_std", "bias", "advantage_mean",
                    "advantage_var"} == stratum.keys()
    assert row["kl"] > 0  # of the second step: it is logged without being paid for
    for row in read_lines(folder / "trajectories.jsonl"):
        assert row["stratum"] == row["n_searches"] and row["advantage"] != 0


def test_log_kl_changes_nothing_but_the_log(run):
    """With a reference no rollout is skipped, which is the same gradient up to rounding."""
    a, b = run("--steps", 1, name="a"), run("--steps", 1, "--log-kl", name="b")
    first, second = (read_lines(folder / "metrics.jsonl")[0] for folder in (a, b))
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4) and second["loss"] == pytest.approx(
        first["loss"], abs=1e-6)


def test_a_policy_of_nan_stops_the_run(run, toy, monkeypatch, capsys):
    def poisoned(*arguments, **options):
        model, tokenizer = load_policy(*arguments, **options)
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")
        return model, tokenizer

    monkeypatch.setattr(train, "load_policy", poisoned)
    with pytest.raises(SystemExit) as stop:
        run("--steps", 9, "--eval-questions", "")
    assert stop.value.code == 1 and "3 steps in a row were dropped" in capsys.readouterr().err
    assert [row["dropped"] for row in read_lines(pathlib.Path("runs/run/metrics.jsonl"))] == [1, 2, 3]


def test_resumed_runs_with_a_reference_are_bit_equal(run):
    flags = ["--kl", 0.05, "--epochs", 2, "--loss", "sequence-mean", "--advantage", "san", "--eval-questions", ""]
    whole, halves = run("--steps", 2, *flags, name="whole"), run("--steps", 1, *flags, name="halves")
    run.resume("--steps", 2, name="halves")
    assert_same_run(whole, halves)
    # the reference is the model before training, not the resumed one
    assert metrics(whole)[1]["kl"] > metrics(whole)[0]["kl"] > 0


def test_slots_and_micro_batches_may_change_when_resuming(run):
    folder = run("--steps", 1)
    run.resume("--steps", 2, "--slots", 3, "--micro-batch-tokens", 100)
    assert [row["step"] for row in metrics(folder)] == [0, 1]


def on_call(number, before, function):
    """`function`, with `before()` called first on its `number`-th call (0, 1, ...)."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == number + 1:
            before()
        return function(*args, **kwargs)

    return wrapped


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("where, call, steps_done", [
    ("rollout", 0, 0),              # in the evaluation before training
    ("rollout", 3, 2),              # call 0 is that evaluation, call 1 step 0: in the rollouts of step 2
    ("update", 2, 3),               # in the update of step 2, which is finished first
    ("append_line", 1, None),       # in the writing of metrics
    ("save_checkpoint", 0, 0),      # in the first checkpoint
    ("step_line", 1, 2),
])
def test_interrupted_anywhere_and_resumed_is_the_same_run(where, call, steps_done, run, straight, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(train, where, on_call(call, interrupt, getattr(train, where)))
        with pytest.raises(SystemExit) as stop:
            run("--steps", 4)
    folder = pathlib.Path("runs/run")
    assert stop.value.code == 130 and "--resume runs/run" in capsys.readouterr().err
    done = int(latest_checkpoint(folder).name.removeprefix("checkpoint-"))
    assert steps_done in (None, done)
    rows = metrics(folder) if done else []
    assert [row["step"] for row in rows] == list(range(done))  # weights and metrics belong together
    assert ({path.name for path in folder.glob("checkpoint*")}
            == {"checkpoint-000000", latest_checkpoint(folder).name})  # the two newest
    run.resume()
    assert_same_run(straight, folder)


def test_an_evaluation_that_was_cut_off_is_made_up_for(run, monkeypatch):
    with monkeypatch.context() as patch:
        # evaluation, two steps, the last evaluation
        patch.setattr(train, "rollout", on_call(3, interrupt, train.rollout))
        with pytest.raises(SystemExit):
            run("--steps", 2)
    folder = pathlib.Path("runs/run")
    assert (list(json.loads((folder / "eval.json").read_text())) == ["0"]
            and latest_checkpoint(folder).name == "checkpoint-000002")
    run.resume()
    assert list(json.loads((folder / "eval.json").read_text())) == ["0", "2"]


def test_a_second_ctrl_c_does_not_break_the_checkpoint(run, monkeypatch):
    monkeypatch.setattr(train, "rollout", on_call(2, interrupt, train.rollout))
    # in the middle of writing the checkpoint that the first Ctrl-C caused
    monkeypatch.setattr(checkpoint, "save_protocol", on_call(1, interrupt, checkpoint.save_protocol))
    with pytest.raises(SystemExit) as stop:
        run("--steps", 3)
    assert (stop.value.code == 130
            and [path.name for path in checkpoints(pathlib.Path("runs/run"))] == ["checkpoint-000000",
                                                                                  "checkpoint-000001"])
    load_policy("runs/run/checkpoint-000001")


def test_hold_interrupts():
    done = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with hold_interrupts():
            interrupt()
            done.append("the rest of the block")
    assert done and signal.getsignal(signal.SIGINT) is handler
    with hold_interrupts():
        pass  # and nothing is raised without a Ctrl-C
    with pytest.raises(ValueError):  # an error is not hidden by an interrupt
        with hold_interrupts():
            interrupt()
            raise ValueError


# -----------------------------------------------------------------------------
# a full disk, no memory, a dead retriever: one line, and the last checkpoint is whole

def one_line_exit(stop):
    message = stop.value.code
    assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
    return message


def raising(error):
    def raise_it(*args, **kwargs):
        raise error
    return raise_it


@pytest.mark.parametrize("what", ["model", "tokenizer", "protocol", "optimizer"])
def test_a_full_disk_leaves_the_previous_checkpoint(what, run, monkeypatch):
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
    full = OSError(errno.ENOSPC, "No space left on device")
    target = {"model": (Qwen2ForCausalLM, "save_pretrained"), "tokenizer": (PreTrainedTokenizerFast, "save_pretrained"),
              "protocol": (checkpoint, "save_protocol"), "optimizer": (checkpoint, "save_file")}[what]
    error = SafetensorError("No space left on device (os error 28)") if what == "optimizer" else full
    original = getattr(*target)
    # the first checkpoint, at step 0, is written; the second one meets a full disk
    written = []

    def save(*args, **kwargs):
        written.append(1)
        return original(*args, **kwargs) if len(written) == 1 else raising(error)()

    with monkeypatch.context() as patch:
        patch.setattr(*target, save)
        with pytest.raises(SystemExit) as stop:
            run("--steps", 2, "--save-every", 1)
    message = one_line_exit(stop)
    assert "checkpoint-000001 could not be written" in message and "free some space" in message
    folder = pathlib.Path("runs/run")
    assert [path.name for path in folder.glob("checkpoint*")] == ["checkpoint-000000"]
    run.resume()
    assert latest_checkpoint(folder).name == "checkpoint-000002" and [row["step"] for row in metrics(folder)] == [0, 1]


def test_a_disk_that_is_really_full(tmp_path, toy_model):
    """A limit on the size of a file makes the real write calls of safetensors fail."""
    resource = pytest.importorskip("resource")
    model, tokenizer = toy_model
    optimizer = MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0)
    save_checkpoint(tmp_path, 1, model, tokenizer, SEARCH_R1, optimizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-000001").iterdir()}
    for parameter in model.parameters():  # an optimizer with moments is larger than the model
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-9, 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (30_000, len(before["model.safetensors"]) + 10_000):  # in the middle of the model; of the optimizer
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(SystemExit) as stop:
                save_checkpoint(tmp_path, 2, model, tokenizer, SEARCH_R1, optimizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "checkpoint-000002 could not be written" in one_line_exit(stop)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-000001").iterdir()}
    for step in (2, 3):
        save_checkpoint(tmp_path, step, model, tokenizer, SEARCH_R1, optimizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002", "checkpoint-000003"]


def test_a_full_disk_at_the_metrics(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train, "append_line", raising(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")))
        with pytest.raises(SystemExit) as stop:
            run("--steps", 2)
    assert "No space left" in one_line_exit(stop) and "--resume runs/run" in stop.value.code
    run.resume()
    assert [row["step"] for row in metrics(pathlib.Path("runs/run"))] == [0, 1]


def test_trim_drops_later_steps_and_torn_lines(tmp_path):
    path = tmp_path / "t.jsonl"
    trim(path, 3)  # no file, nothing to do
    append_line(path, {"step": 0, "text": "line\u2028separator\x85 \x0c\r\n"}, {"step": 1, "strata": {"0": {}}},
                {"step": 2})
    kept = path.read_bytes()
    append_line(path, {"step": 3})
    with open(path, "ab") as file:
        file.write('{"step": 1, "strata": {"0": {}'.encode() + "\u00e9".encode()[:1])  # cut off inside a character
    trim(path, 3)
    assert path.read_bytes() == kept and [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
    with open(path, "ab") as file:
        file.write(b'{"step": 1, "strata": {"0": {}')  # ends like a whole line does
    trim(path, 2)
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [0, 1]


def really_out_of_memory(*args, **kwargs):
    torch.empty(2**55)


@pytest.mark.parametrize("function, flag", [
    ("rollout", "--slots"), ("update", "--micro-batch-tokens"), ("warm_start", "--micro-batch-tokens")])
@pytest.mark.parametrize("error", [
    raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")), really_out_of_memory])
def test_out_of_memory_names_the_flag(function, flag, error, run, toy, monkeypatch, capsys):
    monkeypatch.setattr(train, function, error)
    demos = ["--demos", toy / "demos.jsonl", "--sft-steps", 1] if function == "warm_start" else []
    with pytest.raises(SystemExit) as stop:
        run("--steps", 1, *demos)
    (line,) = (capsys.readouterr().err.strip() or one_line_exit(stop)).splitlines()
    assert line.startswith(f"error: out of memory; lower {flag}")
    assert pathlib.Path("runs").exists() != (function == "warm_start")


def test_another_runtime_error_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr(train, "update", raising(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run("--steps", 1)


def test_a_retriever_that_dies_in_the_middle(run, straight, monkeypatch, capsys):

    def die():
        raise RetrieverError("no usable answer from http://host/retrieve in 4 attempts")

    with monkeypatch.context() as patch:
        patch.setattr(train, "rollout", on_call(3, die, train.rollout))
        with pytest.raises(SystemExit) as stop:
            run("--steps", 4)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (stop.value.code == 1 and line.startswith("error: no usable answer from http://host/retrieve")
            and "--resume runs/run" in line)
    run.resume()  # two steps were done and are not lost
    assert_same_run(straight, pathlib.Path("runs/run"))


# -----------------------------------------------------------------------------
# bad input: one line that says what and where, and no run folder

def write(name, text):
    pathlib.Path(name).write_text(text, encoding="utf-8")
    return name


GOOD_LINE = json.dumps({"id": "a", "question": "who?", "golden_answers": ["x"]}) + "\n"
PASSAGE = json.dumps({"id": "a", "contents": "T\ntext"}) + "\n"
BAD_INPUT = {
    "one rollout per question": (lambda toy: ["--rollouts-per-question", "1"], "--rollouts-per-question 1"),
    "question file missing": (lambda toy: ["--questions", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "question malformed": (
        lambda toy: ["--questions", write("q.jsonl", GOOD_LINE + "{\n")], "q.jsonl:2: not valid JSON"),
    "held-out question malformed": (
        lambda toy: ["--eval-questions", write("q.jsonl", GOOD_LINE + "[]\n")], "q.jsonl:2: "),
    "question without golden answers": (
        lambda toy: ["--questions", write("q.jsonl", GOOD_LINE.replace('["x"]', "[]"))], "q.jsonl:1: "),
    "no questions": (lambda toy: ["--questions", write("q.jsonl", "\n")], "q.jsonl: no questions"),
    "corpus missing": (lambda toy: ["--corpus", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "corpus empty": (lambda toy: ["--corpus", write("c.jsonl", "")], "c.jsonl: the corpus is empty"),
    "corpus malformed": (lambda toy: ["--corpus", write("c.jsonl", PASSAGE + "{\n")], "c.jsonl:2: "),
    "passage ids twice": (
        lambda toy: ["--corpus", write("c.jsonl", PASSAGE + PASSAGE)],
        "c.jsonl:2: passage id 'a' appears a second time"),
    "retriever down": (
        lambda toy: ["--corpus", "http://127.0.0.1:9/retrieve"], "no usable answer from http://127.0.0.1:9/retrieve"),
    "prompt file missing": (lambda toy: ["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    "prompt without its question": (
        lambda toy: ["--prompt-file", write("p.txt", "Q: question\n")], "--prompt-file p.txt"),
    "model missing": (lambda toy: ["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    "context too long": (
        lambda toy: ["--max-context", "513"], "--max-context 513 is longer than the model's context of 512"),
    "prompt does not fit": (lambda toy: ["--max-context", "12"], "does not fit --max-context 12"),
    "observations cannot hold anything": (lambda toy: ["--max-observation-tokens", "5"], "max_observation_tokens 5"),
    "demonstrations malformed": (
        lambda toy: ["--sft-steps", "1", "--demos", write("d.jsonl", GOOD_LINE)], "d.jsonl:1: field 'turns'"),
    "demonstration unfinished": (
        lambda toy: ["--sft-steps", "1", "--demos", write("d.jsonl", GOOD_LINE[:-2] + ', "turns": ["hm"]}\n')],
        "demonstration for question a"),
    "device missing": (lambda toy: ["--device", "nonsense"], "--device nonsense"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(what, run, toy, monkeypatch):
    flags, message = BAD_INPUT[what]
    cache = pathlib.Path("cache").absolute()  # Java keeps the working directory that it was started in
    if "corpus" in what or what in ("passage ids twice", "retriever down"):
        monkeypatch.setattr(train, "open_retriever", open_retriever)
        monkeypatch.setattr(retriever, "BACKOFF_SECONDS", 0.0)
    with pytest.raises(SystemExit) as stop:
        run("--cache", cache, *flags(toy))
    assert message in one_line_exit(stop)
    assert not pathlib.Path("runs").exists()
    assert all(path.suffix == ".lock" for path in cache.glob("*"))  # and no half-built index


def test_interrupted_set_up_leaves_nothing(run, monkeypatch):
    monkeypatch.setattr(train, "load_policy", on_call(0, interrupt, train.load_policy))
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 130 and not pathlib.Path("runs").exists()


def test_two_runs_started_together_do_not_share_a_folder(run, monkeypatch):
    other_run_begins = lambda: pathlib.Path("runs/run").mkdir(parents=True)
    monkeypatch.setattr(train, "load_policy", on_call(0, other_run_begins, train.load_policy))
    with pytest.raises(SystemExit) as stop:
        run("--steps", 1)
    assert "runs/run" in one_line_exit(stop) and not any(pathlib.Path("runs/run").iterdir())


# -----------------------------------------------------------------------------
# options

def test_no_search_control(run, monkeypatch):
    retriever = FakeRetriever()
    monkeypatch.setattr(train, "open_retriever", lambda *args, **kwargs: retriever)
    folder = run("--steps", 2, "--max-searches", 0)
    assert len(retriever.batches) <= 1  # at most the call that sees whether it is there
    assert all(list(row["strata"]) == ["0"] and row["searches"] == 0 for row in metrics(folder))
    assert json.loads((latest_checkpoint(folder) / "protocol.json").read_text())["max_searches"] == 0


def test_protocol_flags_reach_the_retriever_and_the_checkpoint(run, monkeypatch):
    asked = []

    class Counting(FakeRetriever):
        def search(self, queries, k):
            asked.append(k)
            return super().search(queries, k)

    monkeypatch.setattr(train, "open_retriever", lambda *args, **kwargs: Counting())
    folder = run("--steps", 1, "--passages", 2)
    assert set(asked[1:]) == {2}
    saved = json.loads((latest_checkpoint(folder) / "protocol.json").read_text())
    assert (saved["passages"], saved["max_turn_tokens"], saved["max_observation_tokens"],
            saved["max_searches"]) == (2, 24, 45, 2)


def test_a_resumed_run_keeps_its_prompt(run, toy, tmp_path):
    shutil.copy(toy / "prompt.txt", "prompt.txt")
    folder = run("--steps", 1, "--prompt-file", "prompt.txt")
    pathlib.Path("prompt.txt").write_text("something else, without its field")
    run.resume("--steps", 2)
    assert json.loads((latest_checkpoint(folder) / "protocol.json").read_text())["prompt"] == PROMPT


def test_without_held_out_questions_there_is_no_evaluation(run):
    folder = run("--steps", 1, "--eval-questions", "")
    assert not (folder / "eval.json").exists() and (folder / "checkpoint-000001").is_dir()


def test_no_steps_only_evaluates_the_start(run):
    folder = run("--steps", 0)
    assert list(json.loads((folder / "eval.json").read_text())) == ["0"] and (folder / "checkpoint-000000").is_dir()


def test_warm_start_before_training(run, toy):
    folder = run("--steps", 0, "--demos", toy / "demos.jsonl", "--sft-steps", 40, "--sft-batch", 6,
                 "--sft-learning-rate", 1e-2)
    start, warm = (AutoModelForCausalLM.from_pretrained(path) for path in (toy / "model", latest_checkpoint(folder)))
    _, tokenizer = load_policy(toy / "model")
    demonstrations = replay([["<answer> golden </answer>"]] * 6, QUESTIONS, tokenizer, FakeRetriever(), PROTOCOL, 160)
    with torch.no_grad():
        losses = [-token_logprobs(model, *pad_trajectories(demonstrations, "cpu"))[0].sum().item()
                  for model in (start, warm)]
    assert losses[1] < losses[0] / 2
    assert json.loads((folder / "eval.json").read_text())["0"]["em"] == 1.0  # every demonstration says golden


def test_gradient_checkpointing_in_a_run(run):
    plain, checkpointed = (run("--steps", 1, name="plain"),
                           run("--steps", 1, "--gradient-checkpointing", name="checkpointed"))
    a, b = (metrics(folder)[0] for folder in (plain, checkpointed))
    assert a["optimizer_steps"] and a["em"] == b["em"] and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_bfloat16_runs_and_resumes(run):
    straight = run("--steps", 2, "--dtype", "bfloat16", "--eval-questions", "", name="straight")
    halves = run("--steps", 1, "--dtype", "bfloat16", "--eval-questions", "", name="halves")
    run.resume("--steps", 2, name="halves")
    masters = [tensor for name, tensor in load_file(latest_checkpoint(halves) / "optimizer.safetensors").items()
               if name.endswith(".master")]
    assert len(masters) > 0 and all(master.dtype == torch.float32 for master in masters)
    assert_same_run(straight, halves)


def test_step_line_says_what_a_person_wants_to_know():
    metrics = {"step": 4, "em": 0.5, "searches": 1.25,
               "strata": {"0": {"share": 0.25, "reward_mean": 0.1}, "2": {"share": 0.75, "reward_mean": 0.6}},
               "optimizer_steps": 0, "tokens": 300, "rollout_seconds": 1.0, "update_seconds": 2.0}
    line = step_line(metrics, Config(steps=9))
    assert ("5/9" in line and "EM 0.500" in line and "searches 1.25" in line and "0:25%/0.10 2:75%/0.60" in line
            and "100 tok/s" in line)
    line = step_line({**metrics, "optimizer_steps": 1, "approx_kl": 0.5, "kl": 0.25, "clipfrac": 0.125, "entropy": 1.5},
                     Config(steps=9))
    assert "kl 0.2500" in line and "clip 0.125" in line and "entropy 1.50" in line and "\n" not in line


@pytest.mark.parametrize("advantage", ["stratified", "grpo"])
def test_reinforcement_learning_learns(advantage, run):
    """The warm-started toy says golden or wrong at even odds; only the reward tells it which is right."""
    folder = run("--steps", 15, "--questions-per-step", 6, "--rollouts-per-question", 8, "--mini-batch", 48,
                 "--learning-rate", 1e-3, "--advantage", advantage, "--eval-questions", "", name=advantage)
    em = [row["em"] for row in metrics(folder)]
    assert em[0] < 0.75 and sum(em[-3:]) / 3 > 0.85
