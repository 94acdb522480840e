"""The baselines: what is prompted, retrieved, forced and sampled, token by token; the rewards against hand cases."""
import dataclasses
import json
import pathlib
import types

import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

import methods
import rollout
from data import Question
from methods import COT, DIRECT, METHODS, PROTOCOLS, Sampler, answer_demonstrations, sentence_ended
from policy import load_policy, pad_trajectories, token_logprobs
from retriever import Passage
from rewards import research_reward, reward, search_r1_format_reward
from rollout import SEARCH_R1, Codec, last_boxed

EOS = "<eos>"


@pytest.fixture(scope="module")
def wide(tokenizer):
    return make_model(tokenizer, max_position_embeddings=8192)


@pytest.fixture
def play(tokenizer, wide, monkeypatch):
    """play("rag", ["text<eos>", ...]) runs a method on one question, for which the model writes these texts, one after
    the other; -> [trajectory, *second passes]. play.retriever was asked."""
    def run(name, texts, question="who wrote it", golden="golden", **changes):
        script = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]

        def scripted(logits, temperature, generator):
            ids = torch.tensor([script.pop(0)])
            return ids, torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]

        monkeypatch.setattr(rollout, "sample", scripted)
        function, protocol = METHODS[name]
        protocol = dataclasses.replace(protocol or SEARCH_R1, **changes)
        sampler = Sampler(wide, tokenizer, run.retriever, slots=4, max_context=8000)
        (result,) = function(sampler, protocol, [Question("q", question, [golden])])
        assert not script  # everything was written, and nothing more
        for t in result:  # every sampled token was scored in the context that the trajectory holds
            ids, mask = pad_trajectories([t], "cpu")
            with torch.no_grad():
                ours = token_logprobs(wide, ids, mask)[0][0, len(t.prompt_ids) :]
            assert torch.allclose(ours, torch.tensor(t.logprobs), atol=1e-4)
        return result

    run.retriever = FakeRetriever()
    return run


def parts(tokenizer, trajectory):
    """The response as [(sampled 0/1, text)], neighbours with the same mark joined."""
    return [tuple(segment) for segment in rollout.record(trajectory, Question("q", "q", ["a"]), tokenizer)["segments"]]


def prompt_of(tokenizer, protocol, text):
    return tokenizer.encode(protocol.prompt.replace("{question}", text))


# -----------------------------------------------------------------------------
# the methods

def test_direct_answers_with_its_first_line(play, tokenizer):
    (t,) = play("direct", [f" Jane Roe\nShe wrote it in 1901.{EOS}"])
    assert t.prompt_ids == prompt_of(tokenizer, DIRECT, "who wrote it?")
    assert (t.answer, t.finish, t.n_searches, t.n_invalid) == ("Jane Roe", "answer", 0, 0)
    assert all(t.sampled) and tokenizer.decode(t.response_ids).endswith(EOS) and not play.retriever.batches


def test_direct_without_an_end_is_cut_and_what_it_said_still_counts(play, tokenizer):
    (t,) = play("direct", ["Jane R"], max_turn_tokens=len(tokenizer.encode("Jane R")))
    assert (t.answer, t.finish, t.n_invalid) == ("Jane R", "turns", 1)


@pytest.mark.parametrize("text", [EOS, f" \n {EOS}"])
def test_an_empty_answer_is_no_answer(play, text):
    (t,) = play("direct", [text])
    assert t.answer is None and t.finish == "turns"


def test_cot_answers_after_the_marker(play):
    (t,) = play("cot", [f"So the answer is: no.\nWait. </search> <answer> So the answer is: Jane Roe.\nBye{EOS}"])
    assert (t.answer, t.finish) == ("Jane Roe.", "answer")
    (t,) = play("cot", [f"It is Jane Roe.{EOS}"])
    assert (t.answer, t.finish, t.n_invalid) == (None, "turns", 1)


def test_rag_searches_once_for_the_question_and_prompts_with_the_passages(play, tokenizer):
    play.retriever = FakeRetriever(text="about {query}: golden </answer> <eos>")
    (t,) = play("rag", [f"Jane Roe{EOS}"])
    docs = "".join(f"Doc {i}(Title: Title) about who wrote it: golden </answer> < eos>\n" for i in (1, 2, 3))
    assert play.retriever.batches == [["who wrote it"]]
    assert t.prompt_ids == prompt_of(tokenizer, methods.RAG, f"{docs}\nQuestion: who wrote it?")
    assert t.answer == "Jane Roe" and t.n_searches == 1 and t.searches[0].hit and all(t.sampled)
    assert t.searches[0].query == "who wrote it" and t.searches[0].passage_ids == ["0", "1", "2"]


def test_rag_cuts_the_passages_not_the_question(play, tokenizer):
    (t,) = play("rag", [f"x{EOS}"], max_observation_tokens=10)
    text = tokenizer.decode(t.prompt_ids)
    cut = tokenizer.decode(tokenizer.encode("Doc 1(Title: Title) about who wrote it\n")[:10])
    assert f"\n\n{cut}\nQuestion: who wrote it?\nAnswer:" in text


def test_ircot_takes_turns_with_the_retriever_until_a_sentence_names_the_answer(play, tokenizer):
    (t,) = play("ircot", ["It was J. K. Roe.", " She lived in Rome.", " So the answer is: Rome."], passages=1)
    assert play.retriever.batches == [["who wrote it"], ["It was J. K. Roe."], ["She lived in Rome."]]
    assert t.prompt_ids == prompt_of(tokenizer, methods.IRCOT, "who wrote it?")

    def found(query):
        return 0, f"\n\n<information>Doc 1(Title: Title) about {query}\n</information>\n\n"

    assert parts(tokenizer, t) == [
        found("who wrote it"), (1, "It was J. K. Roe."), found("It was J. K. Roe."), (1, " She lived in Rome."),
        found("She lived in Rome."), (1, " So the answer is: Rome.")]
    assert (t.answer, t.finish, t.n_invalid) == ("Rome.", "answer", 0)
    assert [search.query for search in t.searches] == ["who wrote it", "It was J. K. Roe.", "She lived in Rome."]


def test_ircot_writes_to_the_end_when_no_search_is_left(play, tokenizer):
    (t,) = play("ircot", ["One two.", f"Three. Four.\nSo the answer is: five\n{EOS}"], max_searches=1)
    assert play.retriever.batches == [["who wrote it"]] and (t.answer, t.finish) == ("five", "answer")
    (t,) = play("ircot", [f"Three. So the answer is: no. Four.{EOS}"], max_searches=0)
    assert len(play.retriever.batches) == 1 and (t.answer, t.n_searches) == ("no. Four.", 0)


def test_ircot_that_stops_without_an_answer_is_unanswered(play):
    (t,) = play("ircot", [f"I do not know{EOS}"])
    assert (t.answer, t.finish, t.n_invalid, t.n_searches) == (None, "turns", 1, 1)


def test_sentences():
    ended = ["It was Rowling.", "Really?", "In 1999.", 'He said "no."', "yes\n", " It is **X**."]
    open_ = ["", "\n", "So the answer is:\n", " \n", "It was J.", "It was J. K.", "He met Dr.", "Mr.", "1.",
             "in the U.S.", "Rowl", "..."]
    assert all(map(sentence_ended, ended)) and not any(map(sentence_ended, open_))


def test_search_o1_condenses_what_it_finds(play, tokenizer):
    query = "<|begin_search_query|> it, author <|end_search_query|>"
    t, second = play("search-o1", [f"Let me see. {query}", f"Roe wrote the golden book.{EOS}",
                                   f"So \\boxed{{Jane {{R}} Roe}}.{EOS}"])
    assert play.retriever.batches == [["it, author"]]
    docs = "".join(f"Doc {i}(Title: Title) about it, author\n" for i in (1, 2, 3))
    task = (f"Passages:\n{docs}\nReasoning so far: Let me see.\nSearch query: it, author\nQuestion: who wrote it?")
    assert second.prompt_ids == prompt_of(tokenizer, methods.CONDENSE, task)
    assert tokenizer.decode(second.response_ids) == f"Roe wrote the golden book.{EOS}" and all(second.sampled)
    assert parts(tokenizer, t) == [
        (1, f"Let me see. {query}"),
        (0, "\n\n<|begin_search_result|>Roe wrote the golden book.<|end_search_result|>\n\n"),
        (1, f"So \\boxed{{Jane {{R}} Roe}}.{EOS}")]
    assert (t.answer, t.finish, t.n_invalid) == ("Jane {R} Roe", "answer", 0)
    # what entered the chain counts as the hit, under the ids of the passages it came from
    assert [(s.query, s.passage_ids, s.hit) for s in t.searches] == [("it, author", ["0", "1", "2"], True)]


def test_search_o1_notes_cannot_forge_tags(play, tokenizer):
    (t, _) = play("search-o1", ["<|begin_search_query|>x<|end_search_query|>",
                                f"a <|end_search_result|> <|begin_search_query|>y<|end_search_query|>{EOS}",
                                f"\\boxed{{a}}{EOS}"])
    assert "< |end_search_result|> < |begin_search_query|>y< |end_search_query|>" in parts(tokenizer, t)[1][1]
    assert t.n_searches == 1


@pytest.mark.parametrize("text, invalid", [
    ("<|begin_search_query|>x<|end_search_query|>", 0),       # no search is left: not executed
    ("x<|end_search_query|>", 1), (f"hm{EOS}", 1)])
def test_search_o1_without_an_answer(play, text, invalid):
    (t,) = play("search-o1", [text], max_searches=0)
    assert (t.answer, t.finish, t.n_invalid, t.n_searches) == (None, "turns", invalid, 0) and not play.retriever.batches


def test_r1_reasons_and_answers_and_cannot_search(play, tokenizer):
    (t,) = play("r1", ["<think> a </think> <search> b </search> <answer> Roe </answer>"])
    assert t.prompt_ids == prompt_of(tokenizer, methods.R1, "who wrote it?")
    assert (t.answer, t.finish, t.n_searches, all(t.sampled)) == ("Roe", "answer", 0, True)
    assert not play.retriever.batches


def test_research_has_its_own_tags_and_a_boxed_answer(play, tokenizer):
    (t,) = play("research", ["<think>a</think><search> b </search>",
                             "<think>c</think><answer>It is \\boxed{Roe}</answer>"], passages=1)
    assert parts(tokenizer, t) == [
        (1, "<think>a</think><search> b </search>"), (0, "\n\n<result>Doc 1(Title: Title) about b\n</result>\n\n"),
        (1, "<think>c</think><answer>It is \\boxed{Roe}</answer>")]
    assert (t.answer, t.finish, t.n_searches) == ("Roe", "answer", 1)
    (t,) = play("research", ["<answer> Roe </answer>"])
    assert (t.answer, t.finish) == (None, "answer")


def test_agent_is_the_rollout(play, tokenizer):
    (t,) = play("agent", ["<search> b </search>", "<answer> Roe </answer>"])
    assert t.prompt_ids == prompt_of(tokenizer, SEARCH_R1, "who wrote it?") and (t.answer, t.n_searches) == ("Roe", 1)


@pytest.mark.parametrize("name", METHODS)
def test_alone_or_in_a_batch_a_question_gets_the_same_answer(name, tokenizer, wide):
    function, protocol = METHODS[name]
    protocol = dataclasses.replace(protocol or SEARCH_R1, max_turn_tokens=12, max_observation_tokens=80)
    questions = [Question(str(i), f"number {i} " * (i + 1), ["golden"]) for i in range(4)]

    def ids(questions, slots):
        sampler = Sampler(wide, tokenizer, FakeRetriever(), slots=slots, max_context=4000)
        return [[t.response_ids for t in result] for result in function(sampler, protocol, questions)]

    assert ids(questions, 3) == [ids([question], 1)[0] for question in questions]


@pytest.mark.parametrize("name", ["rag", "ircot", "search-o1", "direct"])
def test_a_prompt_that_does_not_fit_is_named(name, tokenizer, wide):
    function, protocol = METHODS[name]
    with pytest.raises(ValueError, match="question q: prompt of .* does not fit --max-context 100"):
        function(Sampler(wide, tokenizer, FakeRetriever(), max_context=100), protocol, [Question("q", "x", ["a"])])


def test_a_full_context_ends_the_chain(tokenizer, wide):
    function, protocol = METHODS["ircot"]
    question = Question("q", "x", ["a"])
    prompt = len(Codec(tokenizer, protocol).prompt("x"))
    for room, searches in ((20, 0), (200, 1)):  # the passages do not fit; the sentences do not
        sampler = Sampler(wide, tokenizer, FakeRetriever(), max_context=prompt + room)
        ((t,),) = function(sampler, dataclasses.replace(protocol, max_turn_tokens=1000), [question])
        assert (t.finish, t.answer, t.n_searches) == ("length", None, searches) and len(t) <= prompt + room


def test_chat_templates_are_applied(wide):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
                               "{% if add_generation_prompt %}[assistant]{% endif %}")
    for name, (function, protocol) in METHODS.items():
        protocol = dataclasses.replace(protocol or SEARCH_R1, max_turn_tokens=4)
        ((t, *_),) = function(Sampler(wide, tokenizer, FakeRetriever(), max_context=4000), protocol,
                              [Question("q", "x", ["a"])])
        text = tokenizer.decode(t.prompt_ids)
        assert text.startswith("[user]") and text.endswith("[assistant]") and "x?" in text, name


def test_last_boxed():
    assert last_boxed("\\boxed{a} or \\boxed{ b {c} }d}") == "b {c}"
    assert last_boxed("\\boxed{\\text{New York}}") == "New York"
    assert last_boxed("boxed{a}") is None and last_boxed("\\boxed{a") is None and last_boxed("\\boxed{}") == ""


@given(st.text())
def test_last_boxed_finds_what_was_boxed(content):
    if content.count("{") == content.count("}") == 0 and "\\boxed" not in content:
        assert last_boxed(f"x \\boxed{{{content}}} y") == content.strip()


# -----------------------------------------------------------------------------
# rewards

THINK, SEARCH, INFORMATION = "<think> t </think>", "<search> q </search>", "\n\n<information>d</information>\n\n"
ANSWER = "<answer> x </answer>"
WELL = [f"{THINK}{ANSWER}", f"{THINK} {SEARCH}{INFORMATION}{THINK}\n{ANSWER}\n",
        2 * (THINK + SEARCH + INFORMATION) + THINK + ANSWER]
ILL = [ANSWER, f"{THINK} so {ANSWER}", f"{THINK}{SEARCH}{INFORMATION}{ANSWER}", f"{SEARCH}{INFORMATION}{THINK}{ANSWER}",
       f"{THINK}{ANSWER}.", f"{THINK}{THINK}{ANSWER}", f"{THINK}{SEARCH}{THINK}{ANSWER}",
       f"<think> {THINK}{ANSWER}", f"{THINK}{INFORMATION}{THINK}{ANSWER}", THINK, "", f"{THINK}{ANSWER}{ANSWER}",
       f"{THINK}{SEARCH}\nMy last action was not valid.{THINK}{ANSWER}"]


@pytest.mark.parametrize("response, well", [*((text, True) for text in WELL), *((text, False) for text in ILL)])
def test_search_r1_format_reward(response, well):
    weights = dict(structure=0.2, final=0.1, retrieval=0.05)
    assert search_r1_format_reward(response, "X.", ["x"], False, **weights) == (1.0 if well else 0.8)
    assert search_r1_format_reward(response, "b", ["x"], False, **weights) == (0.2 if well else 0.1)
    assert search_r1_format_reward(response, "b", ["x"], True, **weights) == (0.25 if well else 0.1)
    assert search_r1_format_reward(response, None, ["x"], True, **weights) == (0.25 if well else 0.0)


BOXED = "<answer> \\boxed{jane roe} </answer>"


@pytest.mark.parametrize("response, answer, golden, expected", [
    (f"{THINK}{BOXED}", "jane roe", "Jane Roe", 1.0),
    (f"{THINK}{BOXED}", "jane roe", "jane doe", 0.5),               # 2 * 1 / (2 + 2)
    (f"{THINK}{BOXED}", "jane roe", "nobody", 0.1),                 # the floor
    (f"{THINK}{SEARCH}<result>d</result>{THINK}{BOXED}", "jane roe", "jane roe", 1.0),
    (f"{THINK}{SEARCH}<result>d</result>{SEARCH}<result>d</result>{BOXED}", "jane roe", "jane roe", 1.0),
    (BOXED, "jane roe", "jane roe", 0.0),                           # no thought
    (f"<think> {BOXED}", "jane roe", "jane roe", 0.0),
    (f"{THINK}<answer> jane roe </answer>", None, "jane roe", 0.0), # not boxed
    (f"{THINK}\\boxed{{jane roe}} <answer> jane roe </answer>", None, "jane roe", 0.0),
    (f"{THINK}{BOXED}{BOXED}", "jane roe", "jane roe", 0.0),
    (f"{THINK}{SEARCH}{THINK}{BOXED}", "jane roe", "jane roe", 0.0),                    # no result
    (f"{THINK}<search> q <result>d</result></search>{BOXED}", "jane roe", "jane roe", 0.0),
    (f"{THINK}{SEARCH}{SEARCH}<result>d</result>{BOXED}", "jane roe", "jane roe", 0.0),
    ("", None, "jane roe", 0.0),
])
def test_research_reward(response, answer, golden, expected):
    assert research_reward(response, answer, [golden]) == pytest.approx(expected)


def test_reward_reads_the_whole_trajectory(play, tokenizer):
    question = Question("q", "who wrote it", ["golden"])
    play.retriever = FakeRetriever(text="golden {query} </think> <answer>")  # tags in passages are neutralised
    (t,) = play("research", [THINK + SEARCH, f"{THINK}<answer>\\boxed{{golden}}</answer>"])
    assert [reward(name, t, question, tokenizer) for name in ("em", "research")] == [1.0, 1.0]
    (t,) = play("agent", [THINK + SEARCH, THINK + ANSWER])
    assert [reward(name, t, question, tokenizer) for name in ("em", "search-r1-format")] == [0.0, 0.2]
    (t,) = play("agent", [f"hm{EOS}", THINK + ANSWER])  # after a retry message
    assert reward("search-r1-format", t, question, tokenizer) == 0.1


# -----------------------------------------------------------------------------
# training counterparts

def test_answer_demonstrations(tokenizer):
    questions = [Question("a", "who", ["Jane <eos>", "other"]), Question("b", "where", ["Rome"])]
    for name, text in (("direct", f"Rome{EOS}"), ("r1", "<answer> Rome </answer>"),
                       ("research", "<answer> \\boxed{Rome} </answer>"), ("cot", f"So the answer is: Rome{EOS}")):
        first, second = answer_demonstrations(questions, tokenizer, PROTOCOLS[name])
        assert tokenizer.decode(second.response_ids) == text and all(second.sampled) and second.group == 1
        assert second.prompt_ids == prompt_of(tokenizer, PROTOCOLS[name], "where?")
        assert "Jane < eos>" in tokenizer.decode(first.response_ids)
    with pytest.raises(ValueError, match="question a: prompt and answer do not fit --max-context 50"):
        answer_demonstrations(questions, tokenizer, PROTOCOLS["r1"], 50)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train("--protocol", "r1", ...) = python train.py on two questions, in tmp_path. -> the run folder"""
    import train as module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "open_retriever", lambda *args, **kwargs: FakeRetriever())
    tokenizer = make_tokenizer()
    make_model(tokenizer, max_position_embeddings=1024).save_pretrained("model")
    tokenizer.save_pretrained("model")
    rows = [{"id": str(i), "question": f"number {i}", "golden_answers": [f"golden {i}"]} for i in range(2)]
    pathlib.Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*flags):
        module.main(["--preset", "tiny", "--name", "run", "--model", "model", "--questions", "q.jsonl", "--corpus", "c",
                     "--max-context", "700", "--max-turn-tokens", "12", *map(str, flags)])
        return pathlib.Path("runs/run")

    return run


def test_sft_on_answers_teaches_the_answers(train, tmp_path):
    folder = train("--protocol", "direct", "--demos", "answers", "--sft-steps", 60, "--sft-batch", 2,
                   "--sft-learning-rate", 3e-3, "--steps", 0, "--eval-questions", "q.jsonl")
    assert json.loads((folder / "eval.json").read_text())["0"]["em"] == 1.0
    model, tokenizer = load_policy(folder / "checkpoint-000000")
    sampler = Sampler(model, tokenizer, FakeRetriever(), max_context=700)
    (t,), _ = METHODS["direct"][0](sampler, rollout.load_protocol(folder / "checkpoint-000000"),
                                   [Question(str(i), f"number {i}", ["x"]) for i in range(2)])
    assert t.answer == "golden 0"


@pytest.mark.parametrize("flags, name, searches", [
    (["--protocol", "research"], "research", 4), (["--protocol", "r1"], "em", 0),
    (["--reward", "search-r1-format"], "search-r1-format", 4), ([], "em", 4),
    (["--protocol", "research", "--reward", "em"], "em", 4)])
def test_protocol_and_reward_flags(train, flags, name, searches, monkeypatch):
    import train as module

    seen = []

    def fake(name, trajectory, question, tokenizer):
        seen.append((name, question.id, trajectory.question_id))
        return float(len(seen) % 2)

    monkeypatch.setattr(module, "reward", fake)
    folder = train(*flags, "--steps", 1, "--questions-per-step", 2, "--rollouts-per-question", 2)
    assert len(seen) == 4 and all(s[0] == name and s[1] == s[2] for s in seen)
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_bytes().splitlines()]
    assert sorted(row["reward"] for row in rows) == [0.0, 0.0, 1.0, 1.0]
    saved = rollout.load_protocol(folder / "checkpoint-000001")
    expected = PROTOCOLS[flags[1]] if flags and flags[0] == "--protocol" else SEARCH_R1
    assert saved == dataclasses.replace(expected, max_turn_tokens=12) and saved.max_searches == searches
