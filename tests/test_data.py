"""data.py: the normalisation vectors, EM and F1 as properties, every loader error, and the real files when present."""

import doctest
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import Question, bootstrap_interval, exact_match, extract_answer, f1_score, load_questions, normalize_answer

SHARED = pathlib.Path(__file__).parents[2] / "shared/data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the shared real data is not here")
# texts in which matches, articles, punctuation and yes / no are common
words = st.sampled_from(["yes", "no", "noanswer", "the", "a", "An", "Paris", "paris!", "U.S.A.", "...", "x-y", "1,000"])
texts = st.one_of(st.lists(words, max_size=4).map(" ".join), st.text(max_size=12))
property_test = settings(max_examples=100, deadline=None)


# ----------------------------------------------------------------------------------------------------------------------
# scores


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The  Beatles!", "beatles"), ("U.S.A.", "usa"), ("a-b", "ab"), ("1,000", "1000"), ("the", ""), ("", ""),
        ("a theatre in an anthem", "theatre in anthem"), ("\tNew\n York ", "new york"), ("Éa", "éa"), ("“the”", "“ ”"),
        ("the-end", "theend"), ("O'Neill", "oneill"),
    ],
)
def test_normalize_by_hand(text, normal):
    assert normalize_answer(text) == normal


@property_test
@given(texts)
def test_normal_form(text):
    normal = normalize_answer(text)
    assert normal == " ".join(normal.split()) and not set(normal) & set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    assert not {"a", "an", "the"} & set(normal.split())
    if text.isascii():
        assert normalize_answer(normal) == normal == normalize_answer(text.upper())


def test_exact_match_by_hand():
    assert exact_match("The Beatles!", ["Stones", "beatles"]) == 1.0
    assert exact_match("Beatles band", ["beatles"]) == 0.0  # equal, not contained
    assert exact_match(None, ["beatles"]) == 0.0
    assert isinstance(exact_match("x", ["x"]), float)


@pytest.mark.parametrize("empty", ["", "the", "...", " The a ", None])
def test_an_empty_answer_never_matches(empty):
    for golden in (["the"], [""], ["...", "an"], ["Paris"]):
        assert exact_match(empty, golden) == 0.0 and f1_score(empty, golden) == 0.0
    assert exact_match("Paris", ["the"]) == 0.0 and f1_score("Paris", ["the"]) == 0.0


def test_f1_by_hand():
    assert f1_score("Barack Hussein Obama", ["Obama"]) == pytest.approx(0.5)  # P 1/3, R 1
    assert f1_score("Obama", ["Barack Hussein Obama", "Barack Obama"]) == pytest.approx(2 / 3)  # the better of .5, 2/3
    assert f1_score("to be or not to be", ["to to to be"]) == pytest.approx(0.6)  # bags: common to to be; P 1/2, R 3/4
    assert f1_score("Rome", ["Paris"]) == 0.0


def test_f1_yes_no_rule():
    assert f1_score("Yes.", ["yes"]) == 1.0
    assert f1_score("yes it is", ["yes"]) == 0.0 and f1_score("yes", ["yes it is"]) == 0.0
    assert f1_score("no", ["yes"]) == f1_score("no way", ["no"]) == f1_score("noanswer", ["noanswer at all"]) == 0.0
    assert f1_score("yes it is", ["yes", "yes it was"]) == pytest.approx(2 / 3)  # the rule is per golden answer


@property_test
@given(texts, st.lists(texts, min_size=1, max_size=4))
def test_exact_match_never_exceeds_f1(prediction, golden):
    em, f1 = exact_match(prediction, golden), f1_score(prediction, golden)
    assert em in (0.0, 1.0) and 0.0 <= em <= f1 <= 1.0


@property_test
@given(texts, st.lists(texts, min_size=1, max_size=4), texts)
def test_another_golden_answer_never_hurts_and_order_is_nothing(prediction, golden, extra):
    for score in (exact_match, f1_score):
        assert score(prediction, golden + [extra]) >= score(prediction, golden)
        assert score(prediction, golden) == score(prediction, golden[::-1])
        assert score(prediction, golden) == score(f"  The {prediction} !", golden)
    expected = 1.0 if normalize_answer(prediction) else 0.0
    assert exact_match(prediction, [prediction]) == f1_score(prediction, [prediction]) == expected


# ----------------------------------------------------------------------------------------------------------------------
# extract_answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<think> it </think>\n<answer>\nNew\nYork\n</answer> bye", "New\nYork"),
        ("<answer> a </answer> <answer> b </answer>", "b"),
        ("<answer> a </answer> <answer> b", "a"),  # the last *closed* one
        ("<answer> a <answer> b </answer>", "b"),
        ("<answer> a </answer> b </answer>", "a"),  # a stray close tag
        ("<answer></answer>", ""),
        ("a </answer> <answer> b", None),
        ("</answer>", None),
        ("<answer> b", None),
        ("", None),
    ],
)
def test_extract_by_hand(text, answer):
    assert extract_answer(text) == answer


def test_extract_with_other_tags():
    assert extract_answer(r"so \boxed{42} it is", r"\boxed{", "}") == "42"
    assert extract_answer("[a] <answer> b </answer>", "[", "]") == "a"


def test_extract_has_no_example_to_fall_back_on():
    # Search-R1 scores prompt + response, so that a response without answer counts as answering the prompt's "Beijing"
    assert extract_answer("<think> I do not know </think>") is None
    assert exact_match(extract_answer("<think> I do not know </think>"), ["Beijing"]) == 0.0


plain = st.text(alphabet="ab <>/\n", max_size=10)


@property_test
@given(plain, plain, plain)
def test_extract_finds_what_was_written(before, answer, after):
    assert extract_answer(f"{before}<answer>{answer}</answer>{after}") == answer.strip()


# ----------------------------------------------------------------------------------------------------------------------
# bootstrap


def test_bootstrap_of_a_normal_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=2000)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / len(values) ** 0.5
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(2)
    samples = generator.random((200, 60)) < 0.4  # 200 evaluations of 60 questions, true EM .4
    covered = sum(low <= 0.4 <= high for low, high in (bootstrap_interval(row, 0.8, 300) for row in samples))
    assert 140 <= covered <= 180  # 160 expected, standard deviation 5.7


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 5))
def test_bootstrap_properties(values, seed):
    low, high = bootstrap_interval(values, resamples=50, seed=seed)
    assert isinstance(low, float) and min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert (low, high) == bootstrap_interval(values, resamples=50, seed=seed)
    narrow = bootstrap_interval(values, confidence=0.5, resamples=50, seed=seed)
    assert low <= narrow[0] <= narrow[1] <= high


def test_bootstrap_seed_matters_and_bad_arguments():
    values = list(range(30))
    assert bootstrap_interval(values, seed=0) != bootstrap_interval(values, seed=1)
    for name, keywords in [("values", {"values": []}), ("values", {"values": [1.0, float("nan")]}),
                           ("values", {"values": [[1.0]]}), ("confidence", {"confidence": 95}),
                           ("confidence", {"confidence": 0}), ("resamples", {"resamples": 0})]:
        with pytest.raises(ValueError, match=name):
            bootstrap_interval(**{"values": values, **keywords})


# ----------------------------------------------------------------------------------------------------------------------
# loader


def row(**changes):
    return {"id": "q1", "question": "who?", "golden_answers": ["Ann"], **changes}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_load_questions(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [json.dumps(row()), "", "   ", json.dumps(row(id="q2", metadata={"hops": 2}, split="dev"))]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())  # byte order mark, blank lines, Windows line ends
    assert load_questions(path) == [
        Question("q1", "who?", ["Ann"], {}),
        Question("q2", "who?", ["Ann"], {"hops": 2}),
    ]
    assert load_questions(str(path))[1].metadata == {"hops": 2}


def test_line_separators_inside_a_string_do_not_break_lines(tmp_path):
    path = write(tmp_path / "q.jsonl", json.dumps(row(question="who\u2028is\x85it?"), ensure_ascii=False))
    assert load_questions(path)[0].question == "who\u2028is\x85it?"


def test_metadata_is_not_shared(tmp_path):
    first, second = load_questions(write(tmp_path / "q.jsonl", row(), row(id="q2", metadata=None)))
    first.metadata["x"] = 1
    assert second.metadata == {}


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('"text"', "object"),
        ({"question": "who?", "golden_answers": ["Ann"]}, "'id' is missing"),
        ({"id": "q2", "golden_answers": ["Ann"]}, "'question' is missing"),
        ({"id": "q2", "question": "who?"}, "'golden_answers' is missing"),
        (row(id=7), "'id'"),
        (row(id="q2", question=" "), "'question'"),
        (row(id="q\n2"), "'id' must be at most 200 printable characters"),
        (row(id="q" * 201), "'id' must be at most 200 printable characters"),
        (row(id="q2", question="\ud800"), "surrogates not allowed"),
        (row(id="q2", metadata={"x": float("nan")}), "not JSON compliant"),
        ('{"id": "q2", "id": "q3", "question": "who?", "golden_answers": ["Ann"]}', "a key appears twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"id": ' + "9" * 5000 + "}", "Exceeds the limit"),
        (row(id="q2", golden_answers="x" * 10**6), "'golden_answers' must be a list of strings, not 'xxx"),
        (row(id="q2", question=None), "'question'"),
        (row(id="q2", golden_answers=[]), "'golden_answers' is empty"),
        (row(id="q2", golden_answers="Ann"), "'golden_answers' must be a list of strings"),
        (row(id="q2", golden_answers=["Ann", 3]), "'golden_answers' must be a list of strings"),
        (row(id="q2", metadata=[1]), "'metadata'"),
        (row(), "'q1' was already used on line 1"),
    ],
)
def test_loader_errors_name_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "q.jsonl", row(), "", bad)
    with pytest.raises(ValueError) as error:
        load_questions(path)
    assert str(error.value).startswith(f"{path}:3: ") and message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_loader_errors_without_a_line(tmp_path):
    with pytest.raises(ValueError, match="no questions"):
        load_questions(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(FileNotFoundError):
        load_questions(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(row()).encode() + b"\n\xe9\n")
    with pytest.raises(ValueError, match=r"latin.jsonl:2: not UTF-8"):
        load_questions(tmp_path / "latin.jsonl")


def test_doctests():
    results = doctest.testmod(data)
    assert results.attempted > 0 and results.failed == 0


# ----------------------------------------------------------------------------------------------------------------------
# real input


@needs_shared
def test_shared_question_files():
    counts = {path.stem: len(load_questions(path)) for path in sorted((SHARED / "questions").glob("*.jsonl"))}
    assert counts["multihop_train"] == 700 and counts["2wikimultihopqa_dev"] == 500 and counts["bamboogle_test"] == 62
    for path in (SHARED / "questions").glob("*.jsonl"):
        for question in load_questions(path):
            golden = question.golden_answers[-1]
            expected = float(normalize_answer(golden) != "")  # one NQ golden answer is ")", which nothing can match
            assert exact_match(golden, question.golden_answers) == f1_score(golden, question.golden_answers) == expected


def test_questions_by_name_and_by_file(tmp_path, monkeypatch):
    rows = [{"id": str(i), "question": f"q{i}", "golden_answers": ["a"]} for i in range(3)]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = f"{tmp_path}/one.jsonl,{tmp_path}/two.jsonl"
    assert [q.id for q in data.resolve_questions(both, "test")] == ["0", "1", "2"] * 2
    assert [q.id for q in data.resolve_questions(both, "test", limit=1)] == ["0", "0"]  # the first of each file
    with pytest.raises(ValueError, match="nowhere.jsonl: no such file, and no benchmark name"):
        data.resolve_questions("nowhere.jsonl", "train")
    with pytest.raises(ValueError, match="nq: no such file, and the hub dataset could not be reached"):
        data.resolve_questions("nq", "train")  # the tests run offline

    def hub(repo, file, repo_type):
        if file.endswith("test.jsonl"):
            raise data.RemoteEntryNotFoundError.__new__(data.RemoteEntryNotFoundError)  # its __init__ wants a response
        return f"{tmp_path}/one.jsonl"

    monkeypatch.setattr(data, "hf_hub_download", hub)
    assert len(data.resolve_questions("asqa", "test")) == 3  # no test split: dev
