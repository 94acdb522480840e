"""Loading and its errors; scoring against a naive oracle; micro-batches; the optimizer's masters; the warm start."""
import copy
import json
import shutil

import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import policy
from data import Question
from policy import (MasterAdamW, check_context, check_vocabulary_logits, choose_device, last_hidden_states, load_policy,
                    micro_batches, pad_trajectories, stop_ids, token_logprobs, warm_start)
from rollout import Protocol, Trajectory, replay, rollout

PROTOCOL = Protocol(prompt="Q: {question}\n", retry="again\n", max_searches=2, max_turn_tokens=24,
                    max_observation_tokens=60)
QUESTIONS = [Question(str(i), "what is " + "x" * (3 * i) + "?", ["foo"]) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trajectories(model, tokenizer):
    return rollout(model, tokenizer, QUESTIONS, FakeRetriever(), PROTOCOL, 2, max_context=250,
                   generator=torch.Generator().manual_seed(0))


def gradients(model):
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return found


def relative_difference(a, b):
    return ((a - b).norm() / b.norm()).item()


# -----------------------------------------------------------------------------
# loading

def test_a_saved_model_comes_back_in_train_mode_with_its_tokenizer(folder, model, tokenizer):
    loaded, loaded_tokenizer = load_policy(folder, max_context=512)
    assert loaded.training and loaded.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    text = "Q: number 3?\n</search>\n x  <answer>\u00e9"  # AutoTokenizer would split it after Qwen2's rules
    assert loaded_tokenizer.encode(text) == tokenizer.encode(text) and len(loaded_tokenizer) == len(tokenizer)
    assert load_policy(folder, dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_word_level_tokenizer_survives_a_qwen2_model(tmp_path):
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "who": 2, "founded": 3, "it": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    make_model(words).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    assert load_policy(tmp_path)[1].encode("who founded it") == [2, 3, 4]


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def change_config(path, **changes):
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))


def fewer_embeddings(path):
    make_model(make_tokenizer(), vocab_size=100).save_pretrained(path)


BROKEN_FOLDERS = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not json": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], "has no tokenizer"),
    "tokenizer settings without the tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer is not json": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be loaded"),
    "weights missing": (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded"),
    "weights cut off": (lambda f: cut(f / "model.safetensors", 20_000), "cannot be loaded"),
    "weights empty": (lambda f: cut(f / "model.safetensors", 0), "cannot be loaded"),
    "tokenizer of another model": (fewer_embeddings, "do not belong together"),
}


@pytest.mark.parametrize("what", BROKEN_FOLDERS)
def test_a_broken_folder_is_a_one_line_error(what, folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    breaks, message = BROKEN_FOLDERS[what]
    breaks(broken)
    with pytest.raises(ValueError) as error:
        load_policy(str(broken))
    assert message in str(error.value) and f"--model {broken}" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_folder_is_a_one_line_error(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_policy(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="--model no-such-model: cannot be loaded"):  # offline: see conftest.py
        load_policy("no-such-model")


def test_a_context_that_the_model_cannot_hold_is_an_error(folder, model, tokenizer):
    with pytest.raises(ValueError, match="--max-context 513 .* context of 512"):
        load_policy(folder, max_context=513)
    sliding = make_model(tokenizer, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    check_context(sliding, 64)
    check_context(sliding, None)
    with pytest.raises(ValueError, match="--max-context 65 .* context of 64"):
        check_context(sliding, 65)
    # a window that is switched off
    check_context(make_model(tokenizer, use_sliding_window=False, sliding_window=64), 512)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, n_positions=32, bos_token_id=0,
                                      eos_token_id=0))
    with pytest.raises(ValueError, match="context of 32"):
        check_context(gpt2, 33)


def test_dropout_is_off(tmp_path, tokenizer):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    gpt2.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_policy(tmp_path)
    ids, sampled = torch.arange(1, 21)[None], torch.arange(20)[None] >= 10
    assert loaded.training and torch.equal(token_logprobs(loaded, ids, sampled)[0],
                                           token_logprobs(loaded, ids, sampled)[0])
    gpt2.train()  # the oracle sees the dropout that the file asks for
    assert not torch.equal(token_logprobs(gpt2, ids, sampled)[0], token_logprobs(gpt2, ids, sampled)[0])


def test_logits_changed_after_the_embedding_are_refused(model):
    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = 2 * out.logits
            return out

    scaled = Scaled(model.config)
    with pytest.raises(ValueError, match="Scaled changes its logits"):
        check_vocabulary_logits(scaled)
    check_vocabulary_logits(model)


def test_choose_device():
    assert choose_device("cpu", "auto") == ("cpu", torch.float32)
    assert choose_device("cpu", "bfloat16") == ("cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="--device nonsense"):
        choose_device("nonsense")
    if not torch.cuda.is_available():
        assert choose_device() == ("cpu", torch.float32)
        with pytest.raises(ValueError, match="--device cuda: not usable"):
            choose_device("cuda")


def test_stop_ids_of_model_and_tokenizer(tokenizer):
    model = make_model(tokenizer)
    model.generation_config.eos_token_id = [7, 9]
    assert stop_ids(model, tokenizer) == {7, 9, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == {tokenizer.eos_token_id}


# -----------------------------------------------------------------------------
# scoring

def test_pad_trajectories():
    a = Trajectory("a", 0, [5, 6], [7, 8, 9], [1, 0, 1], [-1.0, 0.0, -2.0])
    b = Trajectory("b", 1, [3], [4], [1], [-0.5])
    ids, sampled = pad_trajectories([a, b], "cpu")
    assert ids.shape == sampled.shape == (2, 5) and ids.dtype == torch.long and sampled.dtype == torch.bool
    assert ids[0].tolist() == [5, 6, 7, 8, 9] and sampled[0].tolist() == [False, False, True, False, True]
    assert ids[1, :2].tolist() == [3, 4] and sampled[1].tolist() == [False, True, False, False, False]


def oracle_logprobs(model, trajectory, temperature):
    """Whole sequence, whole vocabulary, the model's own forward, float64 softmax, one trajectory at a time."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    table = torch.log_softmax(model(input_ids=ids).logits[0].double() / temperature, -1)        # (T, V)
    first = len(trajectory.prompt_ids)
    places = [i for i, s in enumerate(trajectory.sampled) if s]
    logprobs = torch.stack([table[first + i - 1, trajectory.response_ids[i]] for i in places])
    entropy = torch.stack([-(table[first + i - 1].exp() * table[first + i - 1]).sum() for i in places])
    return places, logprobs, entropy


# one position a chunk; several positions, several chunks; one chunk
@pytest.mark.parametrize("chunk", [1, 1000, 2**25])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_the_oracle_in_value_and_gradient(chunk, temperature, model, trajectories, monkeypatch):
    monkeypatch.setattr(policy, "CHUNK_ELEMENTS", chunk)
    trajectories = trajectories[:3]
    model.zero_grad()
    weights = torch.randn(len(trajectories), max(map(len, trajectories)),
                          generator=torch.Generator().manual_seed(1))  # (B, T)
    ids, sampled = pad_trajectories(trajectories, "cpu")
    logprobs, entropy = token_logprobs(model, ids, sampled, temperature)
    assert logprobs.dtype == torch.float32 and not entropy.requires_grad
    assert not logprobs[~sampled].any() and not entropy[~sampled].any()  # forced tokens and padding are 0
    (logprobs * weights).sum().backward()
    ours = gradients(model)
    for row, trajectory in enumerate(trajectories):
        places, expected, expected_entropy = oracle_logprobs(model, trajectory, temperature)
        columns = [len(trajectory.prompt_ids) + i for i in places]
        assert torch.allclose(logprobs[row, columns].double(), expected, atol=1e-4)
        assert torch.allclose(entropy[row, columns].double(), expected_entropy, atol=1e-4)
        (expected * weights[row, columns]).sum().backward()
    assert relative_difference(ours, gradients(model)) < 1e-4


@pytest.fixture
def tokens_run(model):
    """Padded tokens of every forward of the trunk."""
    found = []
    handle = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True)
    yield found
    handle.remove()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 5), width=st.integers(2, 24), shared=st.integers(0, 24), padding=st.integers(0, 3))
def test_a_common_prefix_is_run_once_with_the_same_values_and_gradient(model, tokens_run, batch, width, shared,
                                                                       padding):
    generator = torch.Generator().manual_seed(100 * batch + width)
    ids = torch.randint(200, (batch, width), generator=generator)                               # (B, T)
    ids[1:, :shared] = ids[0, :shared]
    real = torch.ones(batch, width, 1)
    if padding < width:
        ids[-1, width - padding :], real[-1, width - padding :] = 0, 0
    weights = torch.randn(batch, width, 1, generator=generator) * real                          # (B, T, 1)
    model.zero_grad()
    plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state                  # (B, T, D)
    (plain * weights).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.base_model.parameters()])
    model.zero_grad()
    tokens_run.clear()
    hidden = last_hidden_states(model, ids)
    (hidden * weights).sum().backward()
    assert torch.allclose(hidden * real, plain * real, atol=1e-4)
    assert relative_difference(torch.cat([p.grad.flatten() for p in model.base_model.parameters()]), expected) < 1e-4
    model.zero_grad()
    common = 0
    while common < width - 1 and len(set(ids[:, common].tolist())) == 1:
        common += 1
    saved = (batch - 1) * common
    assert sum(tokens_run) == batch * width - (saved if saved >= batch * width / 8 else 0)


def test_the_prompt_of_a_group_is_run_once(model, tokens_run):
    group = [Trajectory("q", 0, [7] * 30, [i] * 10, [1] * 10, [0.0] * 10) for i in range(8)]
    token_logprobs(model, *pad_trajectories(group, "cpu"))
    assert tokens_run == [30, 8 * 10]


def test_a_forced_token_is_context_only(model, trajectories):
    """Its own log-prob is no part of the loss, but it changes the log-probs of the sampled tokens behind it."""
    trajectory = next(t for t in trajectories if 0 in t.sampled and t.sampled[-1])
    ids, sampled = pad_trajectories([trajectory], "cpu")
    changed = ids.clone()
    place = len(trajectory.prompt_ids) + trajectory.sampled.index(0)
    changed[0, place] = (changed[0, place] + 1) % 200
    with torch.no_grad():
        before, after = token_logprobs(model, ids, sampled)[0], token_logprobs(model, changed, sampled)[0]
    assert (torch.equal(before[0, : place + 1], after[0, : place + 1])
            and not torch.equal(before[0, place + 1 :], after[0, place + 1 :]))


def test_gradient_checkpointing_gives_the_same_gradient_and_the_same_rollouts(tokenizer, trajectories):
    model = make_model(tokenizer).train()
    batches = [pad_trajectories(rows, "cpu") for rows in (trajectories, 3 * trajectories[:1])]  # the second: one prefix
    expected = []
    for ids, sampled in batches:
        token_logprobs(model, ids, sampled)[0].sum().backward()
        expected.append(gradients(model))
    model.activation_checkpointing_enable()
    for (ids, sampled), gradient in zip(batches, expected):
        token_logprobs(model, ids, sampled)[0].sum().backward()
        assert relative_difference(gradients(model), gradient) < 1e-5
    again = rollout(model, tokenizer, QUESTIONS, FakeRetriever(), PROTOCOL, 2, max_context=250,
                    generator=torch.Generator().manual_seed(0))
    assert [t.response_ids for t in again] == [t.response_ids for t in trajectories]  # its cache is not switched off


# -----------------------------------------------------------------------------
# micro-batches

def with_length(length):
    return Trajectory("q", 0, [0], [1] * (length - 1), [1] * (length - 1), [0.0] * (length - 1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_are_a_partition_within_the_budget(lengths, budget):
    trajectories = [with_length(length) for length in lengths]
    batches = micro_batches(trajectories, budget)
    assert sorted(id(t) for batch in batches for t in batch) == sorted(map(id, trajectories))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= budget
    # greedy: no batch could have taken the first of the next one
    for batch, following in zip(batches, batches[1:]):
        assert (len(batch) + 1) * max(map(len, batch)) > budget and min(map(len, batch)) >= len(following[0])


@pytest.mark.parametrize("budget", [1, 150, 10**6])
def test_the_gradient_does_not_depend_on_the_micro_batches(budget, model, trajectories):
    model.zero_grad()
    ids, sampled = pad_trajectories(trajectories, "cpu")
    token_logprobs(model, ids, sampled)[0].sum().backward()
    whole = gradients(model)
    parts = micro_batches(trajectories, budget)
    assert len(parts) == len(trajectories) if budget == 1 else len(parts) == 1 if budget == 10**6 else 1 < len(parts)
    for part in parts:
        ids, sampled = pad_trajectories(part, "cpu")
        token_logprobs(model, ids, sampled)[0].sum().backward()
    assert relative_difference(gradients(model), whole) < 1e-4


# -----------------------------------------------------------------------------
# the optimizer

def run_optimizer(dtype, steps, learning_rate, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8).to(dtype)
    start = copy.deepcopy(model)
    optimizer = MasterAdamW(model, learning_rate, (0.9, 0.999), 0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(2):  # two micro-batches
            for parameter in model.parameters():
                # exact in both types
                gradient = torch.randn(parameter.shape, generator=generator).bfloat16().to(dtype) * 2**-6
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            optimizer.accumulate()
        optimizer.step(learning_rate, 1.0)
    return start, model, optimizer


def test_bfloat16_follows_float32_adamw_on_float32_masters():
    learning_rate, steps = 1e-5, 40  # far below the spacing of bfloat16 around these weights
    start, model, optimizer = run_optimizer(torch.bfloat16, steps, learning_rate)
    reference = [p.detach().float().requires_grad_() for p in start.parameters()]
    adamw = torch.optim.AdamW(reference, lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in reference:
            p.grad = torch.zeros_like(p)
        for _ in range(2):
            for p in reference:
                p.grad += torch.randn(p.shape, generator=generator).bfloat16().float() * 2**-6
        torch.nn.utils.clip_grad_norm_(reference, 1.0)
        adamw.step()
    for parameter, master, expected, first in zip(model.parameters(), optimizer.masters, reference, start.parameters()):
        assert master.dtype == torch.float32 and torch.allclose(master, expected, rtol=1e-6, atol=1e-8)
        assert not torch.equal(master, first.float())                                   # the small steps are not lost
        assert torch.equal(parameter, master.bfloat16()) and parameter.grad is None     # what the model computes with


def test_float32_models_are_their_own_masters():
    start, model, optimizer = run_optimizer(torch.float32, 3, 1e-3)
    assert all(master is parameter for master, parameter in zip(optimizer.masters, model.parameters()))
    assert optimizer.state_dict()["masters"] == []
    reference = copy.deepcopy(start)
    adamw = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        adamw.zero_grad()
        for _ in range(2):
            for p in reference.parameters():
                gradient = torch.randn(p.shape, generator=generator).bfloat16().float() * 2**-6
                p.grad = gradient if p.grad is None else p.grad + gradient
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        adamw.step()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(model.parameters(), reference.parameters()))


def test_step_clips_and_returns_the_norm_before_clipping():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = MasterAdamW(model, 1.0, (0.0, 0.0), 0.0)
    seen = []
    optimizer.adamw.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.accumulate()
    assert optimizer.step(1.0, 1.0) == pytest.approx(5.0)
    assert torch.allclose(seen[0], torch.tensor([[0.6, 0.8]]), atol=1e-5) and model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_goes_on_bit_for_bit(dtype):
    _, model, optimizer = run_optimizer(dtype, 4, 1e-4)
    saved, resumed = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    other = MasterAdamW(resumed, 1e-4, (0.9, 0.999), 0.01)
    other.load_state_dict(saved)
    for m, o in ((model, optimizer), (resumed, other)):
        for parameter in m.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        o.accumulate()
        o.step(1e-4, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.masters, other.masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


# -----------------------------------------------------------------------------
# the warm start

@pytest.fixture(scope="module")
def demonstrations(tokenizer):
    turns = [["<search> x </search>", "<answer> foo </answer>"], ["<answer> foo </answer>"]] * 2
    return replay(turns, QUESTIONS, tokenizer, FakeRetriever(), PROTOCOL, 250)


def test_warm_start_lowers_the_loss(tokenizer, demonstrations):
    model, lines = make_model(tokenizer), []
    losses = warm_start(model, demonstrations, 30, 4, 1e-2, 10**6, 0, log_every=10, log=lines.append)
    assert len(losses) == 30 and len(lines) == 3 and losses[-1] < losses[0] / 4
    ids, sampled = pad_trajectories(demonstrations, "cpu")
    with torch.no_grad():
        after = -token_logprobs(model, ids, sampled)[0].sum() / sampled.sum()
    assert after < losses[0] / 4
    fresh = make_model(tokenizer)  # the loss is nats per sampled token, before the step
    with torch.no_grad():
        assert losses[0] == pytest.approx(
            (-token_logprobs(fresh, ids, sampled)[0].sum() / sampled.sum()).item(), rel=1e-4)


def test_warm_start_does_not_depend_on_the_micro_batches(tokenizer, demonstrations):
    losses = [warm_start(make_model(tokenizer), demonstrations, 4, 3, 1e-3, budget, 0, log=lambda line: None)
              for budget in (1, 10**6)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_warm_start_trains_sampled_tokens_only(tokenizer, demonstrations, monkeypatch):
    """Passages are observed, not imitated: the gradient is the oracle's over the sampled tokens."""
    model, seen = make_model(tokenizer), []
    monkeypatch.setattr(MasterAdamW, "step", lambda self, rate, norm: seen.append(gradients(model)) or 0.0)
    warm_start(model, demonstrations, 1, len(demonstrations), 1e-3, 10**6, 0, log=lambda line: None)
    assert any(0 in t.sampled for t in demonstrations)
    total = sum(sum(t.sampled) for t in demonstrations)
    for trajectory in demonstrations:
        (-oracle_logprobs(model, trajectory, 1.0)[1].sum() / total).backward()
    assert relative_difference(seen[0], gradients(model)) < 1e-4


def test_warm_start_sees_every_demonstration_once_per_epoch(tokenizer, demonstrations, monkeypatch):
    seen = []
    pad = policy.pad_trajectories
    monkeypatch.setattr(policy, "pad_trajectories",
                        lambda part, device: (seen.extend(map(id, part)), pad(part, device))[1])
    warm_start(make_model(tokenizer), demonstrations, 4, 2, 1e-3, 10**6, 0, log=lambda line: None)
    first, second = seen[:4], seen[4:]
    assert sorted(first) == sorted(second) == sorted(map(id, demonstrations)) and first != second
    seen.clear()
    # None: a curriculum, in the order given
    warm_start(make_model(tokenizer), demonstrations, 3, 2, 1e-3, 1, None, log=lambda line: None)
    batches = [set(seen[i : i + 2]) for i in (0, 2, 4)]
    expected = [set(map(id, demonstrations[i : i + 2])) for i in (0, 2)]
    assert batches == [*expected, expected[0]]


def test_warm_start_without_demonstrations_is_an_error(model):
    with pytest.raises(ValueError, match="no demonstrations"):
        warm_start(model, [], 1, 1, 1e-3, 100, 0)


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = make_model(make_tokenizer())
    optimizer = MasterAdamW(model, 0.1, (0.9, 0.999), 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        optimizer.step(0.1, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
