"""What others publish against what we compute: Search-R1's scores, pyserini's BM25, the SQuAD normalisation."""
import collections
import json
import pathlib
import re
import string
import sys

import pytest

from data import exact_match, extract_answer, f1_score, normalize_answer
from extras.bm25_parity import differences

SHARED = pathlib.Path(__file__).parents[2] / "shared/data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the shared real data is not here")


def load(name):
    return [json.loads(line) for line in (SHARED / name).read_text(encoding="utf-8").split("\n") if line]


# -----------------------------------------------------------------------------
# published rollouts of Search-R1 3B, with their EM, F1 and predicted answer

@needs_shared
def test_published_em_f1_and_answer_of_every_rollout():
    rollouts = load("rollouts/search_r1.jsonl")
    assert len(rollouts) == 300
    for rollout in rollouts:
        sampled = re.sub(r"<information>.*?</information>", "", rollout["response"], flags=re.DOTALL)
        answer = extract_answer(sampled)
        assert (answer or "") == rollout["pred"]
        assert exact_match(answer, rollout["golden_answers"]) == rollout["em"]
        assert f1_score(answer, rollout["golden_answers"]) == pytest.approx(rollout["f1"], abs=1e-6)


def search_r1_answer(text):
    """The recipe of Search-R1's reward, qa_em.extract_solution, over prompt and response: the last of all answers, and
    none if there is only one, which it takes for the prompt's."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    return answers[-1].strip() if len(answers) > 1 else None


@needs_shared
def test_every_difference_from_search_r1s_reward_has_a_name():
    """Rule "example": a response without an answer has none; Search-R1's reward reads the prompt's "Beijing" instead.
    It is data.py's departure 3, and the only difference in these rollouts."""
    differences = collections.Counter()
    for rollout in load("rollouts/search_r1.jsonl"):
        ours, theirs = extract_answer(rollout["response"]), search_r1_answer(rollout["prompt"] + rollout["response"])
        if ours != theirs:
            differences["example" if (ours, theirs) == (None, "Beijing") else f"{ours} against {theirs}"] += 1
            assert "</answer>" not in rollout["response"] and rollout["em"] == 0
    assert differences == {"example": 32}


# -----------------------------------------------------------------------------
# pyserini's own indexer and searcher

@needs_shared
def test_bm25_is_pyserinis(tmp_path):
    """A part of what extras/bm25_parity.py compares: all 2,000 questions over both corpora take longer."""
    queries = [row["question"] for row in load("questions/nq_test.jsonl")][:200]
    assert differences(SHARED / "corpus/wiki18_sample.jsonl", queries, tmp_path) == []


# -----------------------------------------------------------------------------
# the normalisation of the SQuAD v1.1 evaluation, which Search-R1 took over, written anew from its description:
# "lower text and remove punctuation, articles and extra whitespace", where punctuation is Python's string.punctuation
# and an article is the whole word a, an or the

def squad_normalize(text):
    kept = [character for character in text.lower() if not (character.isascii() and character.isprintable()
                                                            and not character.isalnum() and character != " ")]
    words = re.split(r"(\w+)", "".join(kept))
    return " ".join("".join(" " if word in ("a", "an", "the") else word for word in words).split())


ODD = [
    "", " ", "the", "A", "an a the", "...", "!?", "the.", "(the)", "a-b", "the-end", "The  Beatles!",
    "U.S.A.", "O'Neill", "rock 'n' roll", "1,000", "$1,000.00", "1.5", "-5", "5%", "3/4", "½", "²",
    "１２", "Ⅳ", "٣", "“the”", "the—end", "the–end", "l’été", "d'an", "¿qué?", "«a»", "a…b", "東京。", "Éa",
    "ÉA", "İstanbul", "Straße", "ΣΑΣ", "ﬁn", "a\u0301", "the\u0301", "e\u0301", "\u00a0the\u00a0end",
    "a\u200bb", "the\u200bend", "\ufeffthe", "\tthe\nend\r", "x\x00the", "x\x1cy", "\u2028a\u2028",
    "the_end", "_the_", "C++", "C#", "@the", "A*", "an-a", "a.b", "a b a", "theatre", "bathe", "anthem",
    "AThe", "the1", "1the", "🇵🇪", "🎉 the party", "Beyoncé", "“a” or ‘an’", "the 'a' team", "`the`",
    "^a^", "\\the",
]


@pytest.mark.parametrize("text", ODD)
def test_normalisation_of_odd_strings(text):
    assert normalize_answer(text) == squad_normalize(text)


def test_normalisation_of_single_characters():
    for code in [*range(0x3100), *range(0x3100, sys.maxunicode + 1, 251)]:
        text = f"{chr(code)} the{chr(code)}end"
        assert normalize_answer(text) == squad_normalize(text), hex(code)


def test_normalisation_by_hand():
    """Worked out by hand, so that not even two mistakes of one kind agree."""
    for text, normal in [("“the”", "“ ”"), ("the—end", "—end"), ("the-end", "theend"), ("½", "½"),
                         ("the_end", "theend"), ("l’été", "l’été"), ("$1,000.00", "100000"), ("-5", "5"), ("a-b", "ab"),
                         ("an a the", ""),
                         ("ΣΑΣ", "σας"), ("İstanbul", "i̇stanbul"), ("x\x1cy", "x y"), ("\u00a0the\u00a0end", "end"),
                         ("the\u200bend", "\u200bend"), ("東京。", "東京。"), ("the 'a' team", "team"), ("AThe", "athe"),
                         ("C++", "c"), ("5%", "5"), ("rock 'n' roll", "rock n roll"), ("1.5", "15"),
                         ("x\x00the", "x\x00")]:
        assert normalize_answer(text) == normal and squad_normalize(text) == normal
    assert set(string.punctuation) == {chr(i) for i in range(33, 127) if not chr(i).isalnum()}


def test_empty_results_differ_from_squad_by_rule():
    """Rule "empty", data.py's departure 1: by SQuAD's script "the" would be an exact match for "a"."""
    for prediction, golden in [("the", ["a"]), ("...", ["!"]), ("", [""])]:
        assert squad_normalize(prediction) == squad_normalize(golden[0]) == ""
        assert exact_match(prediction, golden) == f1_score(prediction, golden) == 0
