"""The benchmark measures what it says: the same work for all, counted FLOPs, a padded update with our gradient."""
import json
import pathlib
import statistics
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import FakeRetriever, make_model
from data import Question
from extras import bench
from policy import MasterAdamW
from rollout import SEARCH_R1, Codec, Trajectory, answer_searches
from test_train import toy  # noqa: F401  a fixture

needs_proc = pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="no Linux")
QUESTIONS = [Question(str(i), f"who {i}", ["nobody"]) for i in range(2)]


def rows_and_end(tokenizer, count=5):
    codec = Codec(tokenizer, SEARCH_R1)
    retriever = FakeRetriever()
    rows = bench.forced_rows(codec, QUESTIONS, count, 3, 4096)
    return rows, lambda rows: answer_searches(rows, retriever, codec)


def shape(trajectories):
    return [(t.group, t.sampled, [(s.query, s.position) for s in t.searches], t.finish) for t in trajectories]


def test_all_engines_do_the_same_forced_work(tokenizer):
    model = make_model(tokenizer, max_position_embeddings=4096)
    ours = bench.our_rollouts(model, *rows_and_end(tokenizer))
    theirs = bench.turn_by_turn(lambda conversations, n: bench.transformers_generate(model, conversations, n),
                                *rows_and_end(tokenizer))
    assert shape(ours) == shape(theirs)
    assert [t.n_searches for t in ours] == [0, 1, 2, 3, 0] * 2          # i mod 4
    assert [sum(t.sampled) for t in ours] == [3 * (t.n_searches + 1) for t in ours]
    assert ours[1].searches[0].query == "who 0" and ours[6].searches[0].query == "who 1"


def test_turn_by_turn_sends_whole_conversations(tokenizer):
    seen = []

    def generate(conversations, new_tokens):
        seen.append([list(c) for c in conversations])
        return [[7] * new_tokens for _ in conversations]

    trajectories = bench.turn_by_turn(generate, *rows_and_end(tokenizer))
    assert [len(turn) for turn in seen] == [10, 6, 4, 2]
    longest = trajectories[3]
    assert seen[3][0] == longest.prompt_ids + longest.response_ids[:-3]


def test_padding_on_the_left_changes_nothing_for_generate(tokenizer):
    model = make_model(tokenizer)
    conversations = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11]]
    greedy = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4, "pad_token_id": 0}
    original = model.generate
    model.generate = lambda ids, **options: original(ids, **{"attention_mask": options["attention_mask"], **greedy})
    together = bench.transformers_generate(model, conversations, 4)
    alone = [original(torch.tensor([c]), **greedy)[0, len(c) :].tolist() for c in conversations]
    assert together == alone


def test_work_is_the_flops_that_torch_counts(tokenizer):
    model = make_model(tokenizer, attn_implementation="eager")      # 2 layers, 4 heads of 8, 2 of keys, hidden 32
    ids = list(range(2, 22))
    t = Trajectory("q", 0, ids[:12], ids[12:], [0] * 7 + [1], [0.0] * 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.base_model(input_ids=torch.tensor([ids[:-1]]))
    full, causal = 4 * 2 * 32 * 19 * 19, 4 * 2 * 32 * sum(range(1, 20))   # torch computes the square, half is work
    work = bench.work(model, [t])
    assert work["read"] == counter.get_total_flops() - full + causal
    vocabulary = model.get_output_embeddings().weight.numel()
    assert work["decode"] == 2 * vocabulary                         # one sampled token, never read
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)     # of which embedding looks up a row
    assert work["bytes"] == 4 * (matrices - (0 if model.config.tie_word_embeddings else vocabulary))
    again = bench.work(model, [t, t])                               # the second of a group does not read its prompt
    assert again["read"] - work["read"] == work["read"] - bench.work(
        model, [Trajectory("q", 0, ids[:12], ids[12:13], [0], [0.0])])["read"]


def test_roofline_by_hand():
    work = {"read": 600.0, "decode": 100.0, "bytes": 50.0}
    assert bench.roofline(work, 100.0, 100.0) == (6.0, 1.0)         # decoding bound by products
    assert bench.roofline(work, 100.0, 10.0) == (6.0, 5.0)          # by memory


def test_ratio_exponent_and_turns():
    assert bench.ratio([1.0, 2.0, 4.0], [2.0, 2.0, 20.0]) == statistics.median([2, 1, 5])
    assert bench.exponent([1, 2, 4, 8], [3.0 * size**1.5 for size in (1, 2, 4, 8)]) == pytest.approx(1.5)
    order = []
    seconds = bench.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == list("ababab") and {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


@needs_proc
def test_peak_memory_sees_what_was_allocated_and_freed():
    found = {}
    with bench.peak_memory(found):
        torch.ones(2**24).sum()                                     # 64 MiB
    assert 60 * 2**20 < found["bytes"] < 200 * 2**20


def test_padded_update_learns_as_adamw_does(tokenizer):
    """The peer of the update part is a whole one: its step moves the weights as our optimizer does."""
    ours, theirs = (make_model(tokenizer, max_position_embeddings=4096) for _ in range(2))
    trajectories = bench.our_rollouts(ours, *rows_and_end(tokenizer, 2))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    config = bench.Config(learning_rate=1e-3, mini_batch=4, warmup_steps=0)
    optimizer = MasterAdamW(ours, 1e-3, (0.9, 0.999), 0.0)
    bench.train.update(ours, optimizer, None, trajectories, advantages, config, 0)
    before = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0)
    bench.padded_update(theirs, adamw, trajectories, advantages)
    a, b = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (ours, theirs))
    assert (a - before).norm() > 0.01 and (a - b).norm() < 1e-2 * (a - before).norm()


@needs_proc
def test_the_table_on_a_toy(toy, tmp_path, capsys):  # noqa: F811
    flags = ["--model", toy / "model", "--questions", toy / "train.jsonl", "--corpus", toy / "corpus.jsonl", "--cache",
             tmp_path / "cache", "--max-context", 512, "--asked", 2, "--rollouts", 2, "--turn-tokens", 3,
             "--repeats", 1, "--threads", 1, "--parts", "update,advantages", "--json", tmp_path / "rows.json"]
    bench.main(list(map(str, flags)))
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    gradient = rows["gradient, relative difference"]
    assert 0 < gradient["value"] < 1e-4 and gradient["met"] == "yes"
    assert rows["ours over a padded batch with all logits"]["goal"] == [">=", 2]
    assert all(row["value"] > 0 for row in rows.values())
    printed = capsys.readouterr().out
    assert all(f"| {what} |" in printed for what in rows)


@pytest.mark.parametrize("flags, message", [
    ("--parts rollout,lunch", "no part is called lunch; there are rollout, update"),
    ("--repeats 0", "--repeats must be at least 1"),
    ("--model somewhere", "--model needs --questions and --corpus"),
    ("--model ./nowhere --questions F --corpus F", "--model ./nowhere: no such folder"),
])
def test_errors_are_one_line(flags, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        bench.main(flags.split())


def test_a_peer_that_cannot_start_says_where_to_look(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    fake.chmod(0o700)
    with pytest.raises(SystemExit, match="--with-vllm .*python: the process ended; what it said is in .*log"):
        bench.start_peer(fake, "vllm", "model", {"threads": 1})


def test_a_peer_answers_line_by_line(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nimport json, sys\nfor line in sys.stdin:\n"
                    "    print(json.dumps({'version': '1', 'got': json.loads(line)}), flush=True)\n")
    fake.chmod(0o700)
    ask, stop = bench.start_peer(fake, "trl", "model", {"threads": 1})
    assert ask(go=True) == {"version": "1", "got": {"go": True}}
    stop()
