"""Questions in, golden answers, and the scores: exact match (EM), F1, and a bootstrap interval for their mean.

A questions file is jsonl in the FlashRAG layout, one object a line, or in any other layout of layouts.py:
    {"id": "q1", "question": "who is ...?", "golden_answers": ["Jan Koum", ...], "metadata": {...}}
metadata is optional. Try it: python -m doctest -v data.py

Answers are compared after the SQuAD normalisation that Search-R1 and its successors use. Departures:
 1. an answer that normalises to '' ("the", "...") matches nothing and has F1 0; in SQuAD's script '' matches ''
 2. F1, like EM, is the best over all golden answers, and EM <= F1 always
 3. only text that the policy sampled is scored, see extract_answer; Search-R1 scans prompt and passages, too
"""

import collections
import os
import re
import reprlib
import string
from dataclasses import dataclass, field

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HTTPError, RemoteEntryNotFoundError

from layouts import check_values, question_rows

HUB_DATASET = "RUC-NLPIR/FlashRAG_datasets"
# the benchmarks of the paper and their training sets; source: the table in FlashRAG's README
BENCHMARK_SIZES = {
    "nq/test": 3610, "triviaqa/test": 11313, "popqa/test": 14267, "hotpotqa/dev": 7405, "2wikimultihopqa/dev": 12576,
    "musique/dev": 2417, "bamboogle/test": 125, "nq/train": 79168, "triviaqa/train": 78785, "hotpotqa/train": 90447,
    "2wikimultihopqa/train": 15000, "musique/train": 19938,
}


@dataclass
class Question:
    id: str
    question: str
    golden_answers: list  # of str, at least one; matching any of them is right
    metadata: dict = field(default_factory=dict)


def resolve_questions(names, split, limit=0, layout="auto"):
    """Comma-separated files or benchmark names (nq, hotpotqa, ...) -> list of Question, one after the other; the
    first `limit` of each, 0: all.

    A name that is no file is looked up in the hub dataset RUC-NLPIR/FlashRAG_datasets, as NAME/SPLIT.jsonl or, where
    there is no test split, NAME/dev.jsonl; huggingface_hub downloads it once (HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE
    are its). Raises ValueError as load_questions, if nothing is found, or if a benchmark has not all its questions.
    """
    questions = []
    for name in names.split(","):
        if os.path.isfile(name):
            questions += load_questions(name, limit=limit, layout=layout)
            continue
        if not re.fullmatch(r"\w+", name):
            raise ValueError(f"{name}: no such file, and no benchmark name such as nq or hotpotqa")
        parts = [split, "dev"] if split == "test" else [split]
        parts = [part for part in parts if f"{name}/{part}" in BENCHMARK_SIZES] or parts
        for part in parts:
            try:
                path = hf_hub_download(HUB_DATASET, f"{name}/{part}.jsonl", repo_type="dataset")
                break
            except RemoteEntryNotFoundError:  # no such split, as far as we know without BENCHMARK_SIZES
                continue
            except (HTTPError, OSError) as error:  # a connection that breaks off is no OSError
                raise ValueError(f"{name}: no such file, and the hub dataset could not be reached "
                                 f"({type(error).__name__}); give a file, or fill huggingface_hub's cache") from error
        else:
            raise ValueError(f"{name}: no such file, and the hub dataset {HUB_DATASET} has no {name}/{parts[-1]}.jsonl")
        found, expected = load_questions(path), BENCHMARK_SIZES.get(f"{name}/{part}")
        if expected and len(found) != expected:
            raise ValueError(f"{name}: {len(found)} questions in {path}, but {HUB_DATASET} should have {expected}; to "
                             "use these all the same, give the file instead of the name")
        questions += found[: limit or None]
    return questions


def load_questions(path, extra=(), limit=0, layout="auto"):
    """Read a file of questions -> list of Question, in file order; all is read and checked, the first `limit` are given
    (0: all). Fields named in `extra` are required, too, and go into metadata. layout: see layouts.py.

    Blank lines and a UTF-8 byte order mark are skipped, unknown fields ignored. Ids must be unique, because results
    are reported by id.
    Raises ValueError "file:line: what is wrong" for malformed JSON, a missing field, a wrong type, no
    golden answer, a repeated id, a line that is not UTF-8, a file without questions; FileNotFoundError when there is no
    such file.
    """
    questions, first = [], {}
    for where, row in question_rows(path, layout):
        question = _parse_question(row, where, extra)
        if question.id in first:
            raise ValueError(f"{where}: id {reprlib.repr(question.id)} was already used on line {first[question.id]}")
        first[question.id] = where.removeprefix(f"{path}:")
        questions.append(question)
    if not questions:
        raise ValueError(f"{path}: no questions in this file")
    return questions[: limit or None]


def _parse_question(row, where, extra):
    try:
        check_values(row)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    for name in ("id", "question", "golden_answers", *extra):
        if name not in row:
            raise ValueError(f"{where}: field {name!r} is missing; layouts.py lists the layouts understood")
    for name in ("id", "question"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{where}: {name!r} must be a non-empty string, not {reprlib.repr(row[name])}")
    if not row["id"].isprintable() or len(row["id"]) > 200:  # it ends up in messages and tables, in a line
        raise ValueError(f"{where}: 'id' must be at most 200 printable characters, not {reprlib.repr(row['id'])}")
    answers = row["golden_answers"]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where}: 'golden_answers' must be a list of strings, not {reprlib.repr(answers)}")
    if not answers:
        raise ValueError(f"{where}: 'golden_answers' is empty, so no answer could ever be right")
    metadata = row.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{where}: 'metadata' must be an object, not {reprlib.repr(metadata)}")
    return Question(row["id"], row["question"], answers, metadata | {name: row[name] for name in extra})


# ----------------------------------------------------------------------------------------------------------------------
# scores, each a float in [0, 1]


PUNCTUATION = str.maketrans("", "", string.punctuation)  # for str.translate: deletes it


def normalize_answer(text):
    """'The  Beatles!' -> 'beatles'; 'U.S.A.' -> 'usa'; 'a-b' -> 'ab'; 'the' -> ''.

    Lower-case, delete ASCII punctuation, a / an / the -> space, squeeze white space, in this order.
    Source: the SQuAD v1.1 evaluation script, via Search-R1 verl/utils/reward_score/qa_em.py.
    """
    words = text.lower().translate(PUNCTUATION).split()
    text = " ".join(word for word in words if word not in ("a", "an", "the"))  # for speed: most of what the next finds
    return " ".join(re.sub(r"\b(?:an?|the)\b", " ", text).split())


def exact_match(prediction, golden_answers):
    """1.0 if the normalised prediction equals any normalised golden answer, else 0.0; 0.0 for None and for ''."""
    if prediction is None:
        return 0.0
    prediction = normalize_answer(prediction)
    return float(prediction != "" and any(prediction == normalize_answer(golden) for golden in golden_answers))


def f1_score(prediction, golden_answers):
    """Best F1 between the bags of normalised words, over the golden answers; 0.0 for None and for ''.

    Source: HotpotQA's hotpot_evaluate_v1.py, yes / no / noanswer rule included ("yes it is" against "yes" has F1 0).
    """
    if prediction is None:
        return 0.0
    prediction = normalize_answer(prediction)
    return max((_f1(prediction, normalize_answer(golden)) for golden in golden_answers), default=0.0)


def _f1(prediction, golden):
    if prediction != golden and {prediction, golden} & {"yes", "no", "noanswer"}:
        return 0.0
    predicted_words, golden_words = prediction.split(), golden.split()
    common = sum((collections.Counter(predicted_words) & collections.Counter(golden_words)).values())
    # 2PR / (P + R) with precision P = common / predicted and recall R = common / golden; a match gives exactly 1.0
    return 2 * common / (len(predicted_words) + len(golden_words)) if common else 0.0


def extract_answer(sampled_text, open_tag="<answer>", close_tag="</answer>"):
    """The last closed answer, stripped, or None: from the last open tag that is closed to its close tag.

    Pass only text the policy sampled: Search-R1's prompt holds "<answer> Beijing </answer>" as its example.

    >>> extract_answer("<answer> Paris </answer> no, wait <answer> Rome </answer> or <answer> Ber")
    'Rome'
    """
    before = sampled_text.rpartition(close_tag)[0]  # '' without a close tag
    _, opened, answer = before.rpartition(open_tag)
    if not opened:
        return None
    return answer.partition(close_tag)[0].strip()  # "<answer> a </answer> b </answer>" answers a


def bootstrap_interval(values, confidence=0.95, resamples=2000, seed=0):
    """Percentile bootstrap of the mean of values, one score per question -> (low, high). One seed, one interval.

    It speaks of the choice of questions only; training seeds are another source of spread.
    Raises ValueError for no values, a value that is not finite, confidence outside (0, 1), resamples < 1.
    Source: Efron and Tibshirani 1993, chapter 13.
    """
    values = np.asarray(values, dtype=np.float64)  # (n,)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError("values must be a non-empty 1-D list of finite scores")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1, for example 0.95")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}: it must be at least 1")
    generator = np.random.default_rng(seed)
    # one resample at a time: all at once would be 200 MB for the 11,313 questions of TriviaQA
    means = [values[generator.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def score(questions, trajectories, interval=True):
    """Scores of trajectories[i] on questions[i] -> dict ready for json: em, f1, em_interval, f1_interval (95 %
    bootstrap), by_searches {"n": {count, share, em, f1}}, and means per rollout: searches, invalid (turns), hit (share
    of rollouts with a golden answer in a passage), finished {how: share}, response and observation tokens; tokens is
    the sum of both over all rollouts.
    """
    em = np.array([exact_match(t.answer, q.golden_answers) for q, t in zip(questions, trajectories, strict=True)])
    f1 = np.array([f1_score(t.answer, q.golden_answers) for q, t in zip(questions, trajectories)])
    searches = np.array([t.n_searches for t in trajectories])
    sampled = np.array([sum(t.sampled) for t in trajectories])
    forced = np.array([len(t.sampled) for t in trajectories]) - sampled
    finished = collections.Counter(t.finish for t in trajectories)
    return {
        "em": em.mean().item(), "f1": f1.mean().item(), "searches": searches.mean().item(),
        **({"em_interval": bootstrap_interval(em), "f1_interval": bootstrap_interval(f1)} if interval else {}),
        "by_searches": {
            str(n): {"count": int((searches == n).sum()), "share": (searches == n).mean().item(),
                     "em": em[searches == n].mean().item(), "f1": f1[searches == n].mean().item()}
            for n in np.unique(searches).tolist()
        },
        "invalid": float(np.mean([t.n_invalid for t in trajectories])),
        "hit": float(np.mean([any(search.hit for search in t.searches) for t in trajectories])),
        "finished": {how: finished[how] / len(trajectories) for how in sorted(finished)},
        "response_tokens": sampled.mean().item(), "observation_tokens": forced.mean().item(),
        "tokens": sum(len(t.response_ids) for t in trajectories),
    }
