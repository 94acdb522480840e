"""
config.py — every setting of a training run: one flat dataclass whose fields are the flags of train.py, its presets,
and the checks that name the flag.

    python train.py --help
"""
import argparse
import dataclasses
import json
import pathlib
from dataclasses import dataclass, field

import strata
from checkpoint import latest_checkpoint
from methods import PROTOCOLS
from rewards import REWARDS
from stratgrpo import SMALL_STRATA


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
    advantage: str = flag("stratified", "stratified: alpha SAN + (1 - alpha) GRPO; the others are its rivals",
                          choices=["stratified", "san", "grpo", "dr-grpo", "rloo", "reinforce", "ppo"])
    alpha: str = flag("0.6", "share of SAN in the stratified advantage, in [0, 1]; 0.9:0.3 goes linearly from the "
                      "first step to the last of --steps")
    strata: str = flag("searches", f"what is the same structure: {', '.join(strata.NAMES)}, or module:function")
    min_stratum: int = flag(2, "strata with fewer rollouts are small")
    small_strata: str = flag("zero", "their SAN advantage. zero; center: not divided by the std; pool: with the "
                             "nearest stratum; shrink: towards the group by n / (n + tau)", choices=SMALL_STRATA)
    shrink_tau: float = flag(4.0, "tau of --small-strata shrink")
    ddof: int = flag(0, "0: stds divide by n, for which the paper's theorems hold; 1: by n - 1, as verl and TRL do",
                     choices=[0, 1])
    resample: int = flag(0, "DAPO: drop groups whose rollouts all earn the same, and fill up with other questions, "
                         "in at most this many rounds")
    gae_lambda: float = flag(1.0, "ppo: lambda of generalised advantage estimation, in [0, 1]")
    critic_learning_rate: float = flag(1e-3, "ppo: AdamW learning rate of the value head")
    critic_sees_searches: bool = flag(False, "ppo: the value may depend on the number of searches so far")
    loss: str = flag("token-mean", "mean over the tokens, or over the rollouts, of a mini-batch",
                     choices=["token-mean", "sequence-mean"])
    clip_low: float = flag(0.2, "PPO: ratios below 1 - clip_low earn nothing more")
    clip_high: float = flag(0.2, "PPO: ratios above 1 + clip_high earn nothing more; DAPO: 0.28")
    kl: float = flag(0.0, "weight of the k3 KL to the frozen initial policy; 0: no reference model")
    log_kl: bool = flag(False, "keep the reference model, to log that KL, though --kl is 0")
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
    micro_batch_tokens: int = flag(2048, "padded tokens per forward and backward; the fewer, the less memory")
    learning_rate: float = flag(3e-4, "AdamW learning rate, constant after the warm-up")
    warmup_steps: int = flag(5, "RL steps of linear learning-rate warm-up")
    weight_decay: float = flag(0.0, "AdamW weight decay")
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this")
    max_dropped: int = flag(3, "stop after so many steps in a row that were dropped because a reward, a log-prob or a "
                            "gradient was not finite")
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
        gradient_checkpointing=True, device="auto", threads=0, eval_every=100, eval_limit=500, save_every=50,
        dump_every=50,
    ),
}
PAPER_DATA = dict(model="Qwen/Qwen2.5-3B", questions="nq,hotpotqa", eval_questions="nq,hotpotqa",
                  corpus="wikipedia-dpr-100w")
CHANGEABLE = ("steps", "slots", "micro_batch_tokens", "max_dropped", "eval_every", "eval_limit", "save_every",
              "dump_every", "threads", "device", "cache")


def parse_config(arguments, description=None):
    """Flags -> (Config, run folder, whether it is resumed). Defaults < preset < saved config of --resume < flags."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--resume", metavar="RUN",
                        help="run folder to go on with; only these flags may change: "
                        + ", ".join(CHANGEABLE).replace("_", "-"))
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
        saved = saved_config(folder)
        fixed = [key for key in given if key not in CHANGEABLE and given[key] != saved[key]]
        if ":" in saved["alpha"] and given.get("steps", saved["steps"]) != saved["steps"]:
            fixed.append("steps")  # they are what the schedule of alpha runs over
        if fixed:
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


def saved_config(folder):
    try:
        saved = dataclasses.asdict(Config(**json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    except (ValueError, TypeError) as error:  # damaged, or a setting that this version does not have
        raise ValueError(f"{folder}/config.json: not the settings of a run of this version ({error})") from None
    return saved


def check_config(config):
    def require(condition, name, fix):
        if not condition:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: {fix}")

    require(config.rollouts_per_question >= 2, "rollouts_per_question",
            "an advantage compares rollouts, give at least 2")
    try:
        valid = all(0 <= alpha <= 1 for alpha in alpha_ends(config))
    except ValueError:
        valid = False
    require(valid, "alpha", "must lie in [0, 1], or be a schedule of two such numbers, 0.9:0.3")
    if ":" in config.strata:
        strata.load_function(config.strata)
    else:
        require(config.strata in strata.NAMES, "strata", f"give one of {', '.join(strata.NAMES)}, or module:function")
    require(0 <= config.gae_lambda <= 1, "gae_lambda", "must lie in [0, 1]")
    require(not config.critic_sees_searches or config.advantage == "ppo", "critic_sees_searches",
            "needs --advantage ppo")
    require(config.temperature > 0, "temperature", "must be above 0 in training")
    for name in ("questions_per_step", "slots", "mini_batch", "micro_batch_tokens", "epochs", "max_context",
                 "sft_batch", "dump_every", "min_stratum", "max_dropped"):
        require(getattr(config, name) >= 1, name, "must be at least 1")
    require(config.clip_low <= 1, "clip_low", "must lie in [0, 1]")
    for name, least in (("max_searches", 0), ("passages", 1), ("max_turn_tokens", 1), ("max_observation_tokens", 1)):
        value = getattr(config, name)
        require(value >= least or value == -1, name, f"must be at least {least}, or -1: as the protocol says")
    for name in ("steps", "sft_steps", "warmup_steps", "eval_every", "eval_limit", "save_every", "threads", "kl",
                 "weight_decay", "clip_low", "clip_high", "shrink_tau", "resample"):
        require(getattr(config, name) >= 0, name, "must not be negative")
    for name in ("learning_rate", "sft_learning_rate", "max_grad_norm", "critic_learning_rate"):
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


def alpha_ends(config):
    """"0.6" -> [0.6]; "0.9:0.3" -> [0.9, 0.3]. ValueError: not one or two numbers."""
    start, *end = map(float, config.alpha.split(":"))
    if len(end) > 1:
        raise ValueError(f"alpha {config.alpha}")
    return [start, *end]


def alpha_at(config, step):
    """Alpha of step 0, 1, ...: linear between the ends, which the first and the last step of --steps have exactly."""
    start, end = alpha_ends(config)[0], alpha_ends(config)[-1]
    return start + (end - start) * step / max(1, config.steps - 1)
