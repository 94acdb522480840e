"""Questions in, golden answers, and the scores: exact match (EM), F1, and a bootstrap interval for their mean.

A questions file is jsonl in the FlashRAG layout, one object a line:
    {"id": "q1", "question": "who is ...?", "golden_answers": ["Jan Koum", ...], "metadata": {...}}
metadata is optional. Try it: python -m doctest -v data.py

Answers are compared after the SQuAD normalisation that Search-R1 and its successors use. Departures:
 1. an answer that normalises to '' ("the", "...") matches nothing and has F1 0; in SQuAD's script '' matches ''
 2. F1, like EM, is the best over all golden answers, and EM <= F1 always
 3. only text that the policy sampled is scored, see extract_answer; Search-R1 scans prompt and passages, too
"""

import collections
import json
import os
import re
import reprlib
import string
from dataclasses import dataclass, field

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError


@dataclass
class Question:
    id: str
    question: str
    golden_answers: list  # of str, at least one; matching any of them is right
    metadata: dict = field(default_factory=dict)


def resolve_questions(names, split, limit=0):
    """Comma-separated files or benchmark names (nq, hotpotqa, ...) -> list of Question, one after the other; the
    first `limit` of each, 0: all.

    A name that is no file is looked up in the hub dataset RUC-NLPIR/FlashRAG_datasets, as NAME/SPLIT.jsonl or, where
    there is no test split, NAME/dev.jsonl; huggingface_hub downloads it once. Raises ValueError as load_questions, or
    if nothing is found.
    """
    questions = []
    for name in names.split(","):
        path = name
        if not os.path.exists(name):
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"{name}: no such file, and no benchmark name such as nq or hotpotqa")
            for part in [split, "dev"] if split == "test" else [split]:
                try:
                    path = hf_hub_download("RUC-NLPIR/FlashRAG_datasets", f"{name}/{part}.jsonl", repo_type="dataset")
                    break
                except RemoteEntryNotFoundError:  # musique and others have no test split
                    continue
                except (HfHubHTTPError, OSError) as error:
                    raise ValueError(f"{name}: no such file, and the hub dataset could not be reached "
                                     f"({type(error).__name__}); give a jsonl file") from error
            else:
                raise ValueError(f"{name}: no such file, and the hub dataset RUC-NLPIR/FlashRAG_datasets has no "
                                 f"{name}/{split}.jsonl")
        questions += load_questions(path)[: limit or None]
    return questions


def load_questions(path, extra=()):
    """Read a jsonl file of questions -> list of Question, in file order. Fields named in `extra` are required, too,
    and go into metadata.

    Blank lines and a UTF-8 byte order mark are skipped, unknown fields ignored. Ids must be unique, because results
    are reported by id.
    Raises ValueError "file:line: what is wrong" for malformed JSON (strict_json), a missing field, a wrong type, no
    golden answer, a repeated id, a line that is not UTF-8, a file without questions; FileNotFoundError when there is no
    such file.
    """
    questions, first_line = [], {}
    with open(path, "rb") as file:  # bytes, so that a decoding error knows its line
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 ({error.reason})") from None
            if not line:
                continue
            question = _parse_question(line, where, extra)
            if question.id in first_line:
                raise ValueError(f"{where}: id {reprlib.repr(question.id)} was already used on line "
                                 f"{first_line[question.id]}")
            first_line[question.id] = number
            questions.append(question)
    if not questions:
        raise ValueError(f"{path}: no questions in this file")
    return questions


def strict_json(text):
    """json.loads, but everything wrong is a one-line ValueError, also what Python lets through or trips over: NaN and
    infinity, a key that appears twice, half a surrogate pair (no tokenizer or file takes it), nesting too deep."""
    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key appears twice in one object")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _parse_question(line, where, extra):
    try:
        row = strict_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with id, question, golden_answers")
    for name in ("id", "question", "golden_answers", *extra):
        if name not in row:
            raise ValueError(f"{where}: field {name!r} is missing")
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
