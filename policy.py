"""
policy.py — the policy: load a causal language model, score sampled tokens, warm-start it on demonstrations.

    model, tokenizer = load_policy("Qwen/Qwen2.5-3B", device="cuda")
    logprobs, entropy = token_logprobs(model, ids, sampled)        # (B, T), zero where nothing was sampled

One rule runs through this file: the distribution that is scored is the one that was sampled. Dropout is off, padding
is on the right (a causal model never looks at it), temperature divides the logits here exactly as in rollout.py.
What all rows of a batch begin with, a group's prompt, is run once. The vocabulary projection is computed only at
sampled positions, a chunk at a time, and again in the backward pass, so a (B, T, V) tensor never exists.
"""
import contextlib
import json
import pathlib

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # one for every load and save would drown the one line a step
CHUNK_ELEMENTS = 2**25  # logits held at a time: 128 MiB of float32


# -----------------------------------------------------------------------------
# loading

class OutOfMemory(Exception):
    """The message says which flag helps."""


@contextlib.contextmanager
def out_of_memory_names(name, change="lower"):
    """Out of memory -> OutOfMemory, one line that says which flag to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if (isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
                and "can't allocate memory" not in str(error)):
            raise
        raise OutOfMemory(f"out of memory; {change} --{name}") from error


def choose_device(device="auto", dtype="auto"):
    """Flags -> (device, torch dtype). auto: a GPU if there is one; bfloat16 where the GPU has it, float32 otherwise.

    On a CPU auto is float32: without AVX512_BF16 or AMX, bfloat16 matrix products are many times slower. ValueError: no
    such device.
    """
    if device.startswith("mps"):
        raise ValueError("--device mps: sampling needs float64, which mps lacks; use cpu or cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: not usable here ({str(error).splitlines()[0]})") from error
    if dtype == "auto":
        has_bfloat16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_bfloat16 else "float32"
    return device, getattr(torch, dtype)


def load_policy(name, device="cpu", dtype=torch.float32, max_context=None):
    """A Hugging Face folder or hub name -> (model in train mode without dropout, tokenizer).

    ValueError: no such folder, a folder without model or tokenizer, a context the model cannot hold, or logits that
    are not the output embedding of the last hidden state (such models need a line in `vocabulary_logits`).
    """
    folder = pathlib.Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {name}: no config.json in this folder; give a Hugging Face model folder or a "
                             "hub name")
        if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(f"--model {name}: the folder has no tokenizer; save one there with "
                             "tokenizer.save_pretrained")
    elif str(name).startswith((".", "/", "~")):
        raise ValueError(f"--model {name}: no such folder")
    try:
        # trust_remote_code=False: with the default, None, transformers asks at a terminal whether to run a model's code
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # a tokenizer without a class of its own is its tokenizer.json to the letter. AutoTokenizer rebuilds it after
        # Qwen2's rules if the model is a qwen2: other ids for the same text, and a word-level vocabulary is lost
        generic = get_tokenizer_config(name).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        tokenizer = (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
            name, trust_remote_code=False)
        for key, value in vars(config).items():
            if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
                setattr(config, key, 0.0)  # the sampler has no dropout, so scoring must have none either
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, trust_remote_code=False)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:  # SafetensorError: cut off in a download or copy
        raise ValueError(f"--model {name}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(f"--model {name}: the tokenizer has {len(tokenizer)} tokens, the model embeds only "
                         f"{model.get_input_embeddings().num_embeddings}; they do not belong together")
    check_context(model, max_context)
    check_vocabulary_logits(model)
    return model.to(device).train(), tokenizer


def context_limit(model):
    """Tokens the model (or its sliding window) can hold, None if its config does not say."""
    limits = [getattr(model.config, key, None) for key in ("max_position_embeddings", "n_positions")]
    if getattr(model.config, "use_sliding_window", True):
        limits.append(getattr(model.config, "sliding_window", None))
    return min((value for value in limits if value), default=None)


def check_context(model, max_context):
    """ValueError if `max_context` tokens are more than the model can hold; None checks nothing."""
    limit = context_limit(model)
    if max_context and limit and max_context > limit:
        raise ValueError(f"--max-context {max_context} is longer than the model's context of {limit}; lower the flag")


def stop_ids(model, tokenizer):
    """The set of end-of-sequence ids: the tokenizer's and those of the model's generation config."""
    ids = model.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return {*ids, tokenizer.eos_token_id} - {None}


def vocabulary_logits(model, hidden):
    """Last hidden states (N, D) -> float32 logits (N, V). What a model's own forward does after its last layer."""
    logits = model.get_output_embeddings()(hidden).float()                          # (N, V)
    softcap = getattr(model.config, "final_logit_softcapping", None)                # gemma 2, 3
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / getattr(model.config, "logits_scaling", 1.0)                    # granite


@torch.no_grad()
def check_vocabulary_logits(model):
    """ValueError unless `vocabulary_logits` gives the model's own logits; one forward of two tokens."""
    ids = torch.tensor([[0, 1]], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]  # (2, D)
    ours, theirs = vocabulary_logits(model, hidden), model(input_ids=ids, use_cache=False).logits[0].float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-2):
        raise ValueError(f"{type(model).__name__} changes its logits after the output embedding; add that to "
                         "vocabulary_logits")


# -----------------------------------------------------------------------------
# scoring

def pad_trajectories(trajectories, device):
    """-> ids (B, T) long, sampled (B, T) bool: prompt + response, padded on the right with 0 (never looked at)."""
    rows = [(t.prompt_ids + t.response_ids, [0] * len(t.prompt_ids) + t.sampled) for t in trajectories]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)                      # (B, T)
    sampled = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows], device=device, dtype=torch.bool)
    return ids, sampled                                                                                         # (B, T)


def chunk_logprobs(model, hidden, targets, temperature):
    logits = vocabulary_logits(model, hidden) / temperature                         # (n, V)
    log_normaliser = logits.logsumexp(-1)                                           # (n,)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normaliser           # (n,)
    with torch.no_grad():
        entropy = log_normaliser - (logits.softmax(-1) * logits).sum(-1)            # (n,)
    return logprobs, entropy


def last_hidden_states(model, ids):
    """ids (B, T) long, padded on the right -> last hidden states (B, T, D). What all rows begin with (rollouts of a
    question, and in part of others: their prompt) is run once, and its gradient is the sum of theirs."""
    batch, width = ids.shape
    shared = min((ids == ids[0]).all(0).long().cumprod(0).sum().item(), width - 1)
    # an eighth less to run pays for attention that goes by a mask; gradient checkpointing would lose the prefix's keys
    if 8 * (batch - 1) * shared < batch * width or model.is_activation_checkpointing:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    prefix = model.base_model(input_ids=ids[:1, :shared], use_cache=True)
    prefix.past_key_values.batch_repeat_interleave(batch)
    rest = model.base_model(input_ids=ids[:, shared:], cache=prefix.past_key_values, use_cache=True)
    return torch.cat([prefix.last_hidden_state.expand(batch, -1, -1), rest.last_hidden_state], 1)


def token_logprobs(model, ids, sampled, temperature=1.0):
    """Log-probability of every sampled token given all tokens before it, and the entropy of the distribution it came
    from.

    ids (B, T) long, sampled (B, T) bool, first column not sampled. Returns two float32 (B, T) tensors, zero where
    nothing was sampled; the entropy carries no gradient. Forced tokens (prompt, passages) are context only.
    """
    hidden = last_hidden_states(model, ids)                                         # (B, T, D)
    # hidden t predicts token t+1
    rows, columns = sampled[:, 1:].nonzero(as_tuple=True)                           # (n,), (n,)
    hidden, targets = hidden[rows, columns], ids[rows, columns + 1]                 # (n, D), (n,)
    size = max(1, CHUNK_ELEMENTS // model.config.vocab_size)
    parts = []
    for part, target in zip(hidden.split(size), targets.split(size)):
        if torch.is_grad_enabled() and len(hidden) > size:                          # a single chunk is cheaper kept
            parts.append(checkpoint(chunk_logprobs, model, part, target, temperature, use_reentrant=False))
        else:
            parts.append(chunk_logprobs(model, part, target, temperature))
    logprobs, entropy = (torch.cat(values) for values in zip(*parts))
    blank = torch.zeros(ids.shape, device=ids.device)                               # (B, T)
    where = (rows, columns + 1)
    return blank.index_put(where, logprobs), blank.index_put(where, entropy)


def micro_batches(trajectories, token_budget):
    """Split into lists of at most `token_budget` padded tokens, similar lengths together; one too long alone is its
    own list."""
    batches, longest = [], 0
    for trajectory in sorted(trajectories, key=len, reverse=True):
        if not batches or (len(batches[-1]) + 1) * longest > token_budget:
            batches.append([])
            longest = len(trajectory)                                               # sorted: the first is the longest
        batches[-1].append(trajectory)
    return batches


# -----------------------------------------------------------------------------
# optimizing

class MasterAdamW:
    """AdamW on float32 master weights: in bfloat16 a step of 1e-6 would round to nothing. float32 models are their own
    masters.

    accumulate() after every backward adds the gradients in float32; step() clips, updates, clears, and returns the
    gradient norm, or raises FloatingPointError and changes nothing if that is not finite.
    """

    def __init__(self, model, learning_rate, betas, weight_decay):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
                        for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=learning_rate, betas=betas, weight_decay=weight_decay,
                                       fused=True)

    def own_masters(self):
        return [master for parameter, master in zip(self.parameters, self.masters) if master is not parameter]

    def accumulate(self):
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def step(self, learning_rate, max_grad_norm):
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        if not norm.isfinite():  # one such step would make every weight NaN
            raise FloatingPointError(f"the gradient norm is {norm.item()}")
        self.adamw.param_groups[0]["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter:
                parameter.data.copy_(master)
        return norm.item()

    def state_dict(self):
        return {"adamw": self.adamw.state_dict(), "masters": [master.data for master in self.own_masters()]}

    def load_state_dict(self, state):
        self.adamw.load_state_dict(state["adamw"])
        for master, saved in zip(self.own_masters(), state["masters"], strict=True):
            master.data.copy_(saved)


# -----------------------------------------------------------------------------
# supervised warm start

def warm_start(model, demonstrations, steps, batch_size, learning_rate, token_budget, seed, log_every=20, log=print):
    """Maximum likelihood on the sampled tokens of demonstration trajectories (see rollout.replay), in place.

    AdamW (0.9, 0.95), linear warm-up over the first tenth, constant `learning_rate` to two fifths, then linear decay.
    The loss is the mean over the tokens of the whole batch, whatever the micro-batches. seed None takes the
    demonstrations in the order given (a curriculum), else every epoch is a new permutation. Returns the loss of every
    step (nats per token).
    """
    if not demonstrations:
        raise ValueError("no demonstrations to learn from")
    optimizer = MasterAdamW(model, learning_rate, (0.9, 0.95), 0.01)
    generator, order, losses = torch.Generator().manual_seed(seed or 0), [], []
    for step in range(steps):
        batch = []
        while len(batch) < batch_size:                                              # every demonstration once per epoch
            order = order or (list(reversed(range(len(demonstrations)))) if seed is None else
                              torch.randperm(len(demonstrations), generator=generator).tolist())
            batch.append(demonstrations[order.pop()])
        total = sum(sum(t.sampled) for t in batch)
        progress = (step + 1) / steps
        losses.append(0.0)
        for part in micro_batches(batch, token_budget):
            ids, sampled = pad_trajectories(part, model.device)
            loss = -token_logprobs(model, ids, sampled)[0].sum() / total
            loss.backward()
            optimizer.accumulate()
            losses[-1] += loss.item()
        optimizer.step(learning_rate * min(10 * progress, 1.0, max(0.05, (1.0 - progress) / 0.6)), 1.0)
        if (step + 1) % log_every == 0 or step + 1 == steps:
            log(f"warm start {step + 1:4d}/{steps} | loss {sum(losses[-log_every:]) / len(losses[-log_every:]):.3f}")
    return losses
