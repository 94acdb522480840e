"""
methods.py — the paper's baselines, each a few lines on the sampler and the retriever of the agent.

    python eval.py --method agent,direct,cot,rag,ircot,search-o1,r1,research --model X --benchmarks nq --corpus C

A method answers a list of questions: it returns, for each of them, the trajectory that holds the answer and then the
second passes that helped, if any. Prompts are data, the Protocols below; all wording is ours. Those in PROTOCOLS can be
trained, too: python train.py --protocol r1.

Departures from the methods' own code:
 1. every method sees the same passages: top-k, cut to the protocol's tokens; every method may search equally often.
 2. ircot (Trivedi et al. 2023): passages follow the sentence that found them, in one growing context; theirs are
    collected in front of the question, and the prompt, which has worked examples, is read again for every sentence.
 3. search-o1 (Li et al. 2025): the second pass sees the reasoning since the last search, not all of it; a search too
    many ends the rollout unanswered, as it does for the agent.
 4. research (Chen et al. 2025): a turn that neither searches nor answers is answered by a retry message, as for the
    agent; under its reward (rewards.py) such a rollout earns 0, as there.
"""
import re
from dataclasses import dataclass, replace

from data import Question
from policy import stop_ids
from retriever import Passage
from rollout import SEARCH_R1, Codec, Protocol, Row, Trajectory, answer_searches, begin, rollout, sample_rows

UNTAGGED = dict(retry="", search=("", ""), answer=("", ""), max_searches=0)  # the end of the text ends the answer

DIRECT = Protocol(
    prompt="Answer the question with a few words, from what you know. Give the answer alone, without explanation.\n"
    "Question: {question}\nAnswer:",
    max_turn_tokens=64, **UNTAGGED)

COT = Protocol(
    prompt="Answer the question. Think step by step first. Then write the answer, a few words without explanation, on "
    "a last line that starts with \"So the answer is:\", for example\nSo the answer is: Beijing\n"
    "Question: {question}\n",
    **UNTAGGED | {"answer": ("So the answer is:", "")})

RAG = Protocol(
    prompt="Answer the question at the end with a few words. The passages in front of it may help. Give the answer "
    "alone, without explanation.\n\n{question}\nAnswer:",
    max_turn_tokens=64, information=("", ""), **UNTAGGED)

IRCOT = Protocol(
    prompt="Answer the question. Reason in short sentences, one at a time: each is looked up, and what is found is "
    "shown to you between <information> and </information>. As soon as you know the answer, write it, a few words "
    "without explanation, in a last sentence that starts with \"So the answer is:\", for example\n"
    "So the answer is: Beijing.\nQuestion: {question}\n",
    **UNTAGGED | {"answer": ("So the answer is:", ""), "max_searches": 4})

SEARCH_O1 = Protocol(
    prompt="Answer the question; reason step by step. Whenever you are not sure of a fact, look it up: write "
    "<|begin_search_query|> query <|end_search_query|>, and what is known about it is given to you between "
    "<|begin_search_result|> and <|end_search_result|>; then reason on. You may search several times. At the end, "
    "write the answer, a few words, as \\boxed{answer}.\nQuestion: {question}\n",
    **UNTAGGED | {"search": ("<|begin_search_query|>", "<|end_search_query|>"), "max_searches": 4}, boxed=True,
    information=("\n\n<|begin_search_result|>", "<|end_search_result|>\n\n"), passage="{text}",
    other_tags=("<|begin_search_result|>", "<|end_search_result|>"))

CONDENSE = Protocol(  # the second pass of search-o1
    prompt="Somebody who reasons about a question has just searched. Read the passages and write down, in one to three "
    "sentences, what they say that helps to go on, and nothing else. If nothing in them helps, write: No helpful "
    "information found.\n\n{question}\n",
    max_turn_tokens=200, **UNTAGGED)

R1 = Protocol(
    prompt="Answer the question below. First reason about it between <think> and </think>. Then give the answer "
    "between <answer> and </answer>, short and without explanation, for example <answer> Beijing </answer>. "
    "Question: {question}\n",
    retry="", search=("", ""), max_searches=0)

RESEARCH = Protocol(
    prompt="Answer the question below with the help of a Wikipedia search. Reason between <think> and </think>. When "
    "you need a fact, write <search> query </search>; what is found is returned between <result> and </result>. You "
    "may think and search several times. At the end give the answer between <answer> and </answer>, with the exact "
    "answer, a few words, inside \\boxed{}, for example <answer> The capital is \\boxed{Beijing} </answer>. "
    "Question: {question}\n",
    retry="\nMy last action was not valid. To search, I put the query between <search> and </search>. To answer, I put "
    "\\boxed{answer} between <answer> and </answer>. I try again.\n",
    boxed=True, information=("\n\n<result>", "</result>\n\n"),
    other_tags=("<think>", "</think>", "<result>", "</result>"))

PROTOCOLS = {"search-r1": SEARCH_R1, "r1": R1, "research": RESEARCH, "direct": DIRECT, "cot": COT}


@dataclass
class Sampler:
    """What every method works with: rollout()'s arguments that do not depend on the method."""
    model: object
    tokenizer: object
    retriever: object
    temperature: float = 0.0
    slots: int = 64
    max_context: int = 4096
    generator: object = None


# -----------------------------------------------------------------------------
# the methods

def agent(sampler, protocol, questions):
    """A whole rollout under one protocol: agent, direct, cot, r1, research."""
    trajectories = rollout(sampler.model, sampler.tokenizer, questions, sampler.retriever, protocol, 1,
                           sampler.temperature, sampler.slots, sampler.max_context, sampler.generator)
    return [[trajectory] for trajectory in trajectories]


def rag(sampler, protocol, questions):
    """Search once, for the question, and answer with the passages in the prompt."""
    found = look_up(sampler, protocol, questions, [question.question for question in questions])
    asked = [Question(question.id, f"{text}\nQuestion: {question.question}", question.golden_answers)
             for question, (_, text) in zip(questions, found)]
    results = agent(sampler, protocol, asked)
    for (trajectory,), (search, _) in zip(results, found):
        trajectory.searches.append(search)
    return results


def ircot(sampler, protocol, questions):
    """Search for the question, write a sentence, search for the sentence, ... until one names the answer."""
    codec = Codec(sampler.tokenizer, protocol)
    trajectories = begin_all(sampler, codec, questions)
    asking = list(zip(trajectories, questions, [question.question for question in questions]))
    for turn in range(protocol.max_searches + 1):
        last_turn = turn == protocol.max_searches
        if not last_turn:
            search(sampler, codec, asking)
        writing = [(trajectory, question) for trajectory, question, _ in asking if not trajectory.finish]
        asking = []
        texts = write(sampler, codec, [trajectory for trajectory, _ in writing], not last_turn and sentence_ended)
        for (trajectory, question), (text, how) in zip(writing, texts):
            trajectory.answer = codec.answer(text)
            if how == "stop" and trajectory.answer is None:
                asking.append((trajectory, question, text.strip()))
            else:
                finish(trajectory, how)
    return [[trajectory] for trajectory in trajectories]


def search_o1(sampler, protocol, questions):
    """Search inside the reasoning; a second pass condenses the passages before they enter it."""
    codec, condense = Codec(sampler.tokenizer, protocol), Codec(sampler.tokenizer, CONDENSE)
    trajectories = begin_all(sampler, codec, questions)
    passes = [[trajectory] for trajectory in trajectories]
    opening, closing = protocol.search
    for turn in range(protocol.max_searches + 1):
        asking = []
        writing = [i for i, trajectory in enumerate(trajectories) if not trajectory.finish]
        texts = write(sampler, codec, [trajectories[i] for i in writing], lambda text: closing in text)
        for i, (text, how) in zip(writing, texts):
            reasoning, opened, query = text.partition(closing)[0].rpartition(opening)
            if how == "stop" and opened and turn < protocol.max_searches:
                asking.append((i, reasoning, query.strip()))
            else:
                trajectories[i].answer = codec.answer(text) if how != "stop" else None
                finish(trajectories[i], "end" if how == "stop" and not opened else how)  # a closing tag alone: invalid
        found = look_up(sampler, protocol, [questions[i] for i, _, _ in asking], [query for _, _, query in asking])
        tasks = []
        for (i, reasoning, query), (_, text) in zip(asking, found):
            task = (f"Passages:\n{text}\nReasoning so far: {reasoning.strip()}\nSearch query: {query}\n"
                    f"Question: {questions[i].question}")
            tasks.append(Question(questions[i].id, task, questions[i].golden_answers))
        second_passes = begin_all(sampler, condense, tasks)
        for (i, _, _), second_pass in zip(asking, second_passes):
            passes[i].append(second_pass)
        notes = write(sampler, condense, second_passes)
        search(sampler, codec, [(trajectories[i], questions[i], query) for i, _, query in asking],
               Known([Passage(id, "", "" if rank else note, 0.0) for rank, id in enumerate(its_search.passage_ids)]
                     for (its_search, _), (note, _) in zip(found, notes)))
    return passes


METHODS = {
    "agent": (agent, None),  # the protocol that the model was trained with, else Search-R1's
    "direct": (agent, DIRECT), "cot": (agent, COT), "rag": (rag, RAG), "ircot": (ircot, IRCOT),
    "search-o1": (search_o1, SEARCH_O1), "r1": (agent, R1), "research": (agent, RESEARCH),
}
SEARCHLESS = {"direct", "cot", "r1"}  # these need no corpus


# -----------------------------------------------------------------------------
# their steps

def begin_all(sampler, codec, questions):
    return [begin(codec, question, i, sampler.max_context) for i, question in enumerate(questions)]


class Writer:
    """A row of the sampler that writes one text behind `context`: until stop(text), end of sequence, or a limit."""

    def __init__(self, context, group, codec, stop, max_context, stop_tokens):
        self.trajectory, self.codec, self.stop = Trajectory("", group, context), codec, stop
        self.max_context, self.stop_tokens = max_context, stop_tokens
        self.feed, self.length = [], len(context)

    def accept(self, token, logprob):
        text = self.trajectory
        text.append(token, 1, logprob)
        self.feed = [token]
        if token in self.stop_tokens:
            text.finish = "end"
        elif self.stop and self.stop(self.codec.decode(text.response_ids)):
            text.finish = "stop"
        elif len(text.response_ids) >= self.codec.protocol.max_turn_tokens:
            text.finish = "limit"
        elif len(text) >= self.max_context:
            text.finish = "length"


def write(sampler, codec, trajectories, stop=None):
    """Sample one text at the end of every trajectory. -> (text without the end-of-sequence token, how it ended) each:
    "stop", "end", "limit" (max_turn_tokens) or "length" (max_context)."""
    if not trajectories:
        return []
    stop_tokens = frozenset(stop_ids(sampler.model, sampler.tokenizer))
    rows = [Writer(trajectory.prompt_ids + trajectory.response_ids, i, codec, stop, sampler.max_context, stop_tokens)
            for i, trajectory in enumerate(trajectories)]
    sample_rows(sampler.model, rows, lambda rows: None, sampler.temperature, sampler.slots, sampler.max_context,
                sampler.generator)
    texts = []
    for trajectory, row in zip(trajectories, rows):
        ids, how = row.trajectory.response_ids, row.trajectory.finish
        for token, logprob in zip(ids, row.trajectory.logprobs):
            trajectory.append(token, 1, logprob)
        texts.append((codec.decode(ids[:-1] if how == "end" else ids), how))
    return texts


def finish(trajectory, how):
    """The last text ended like this: close the trajectory as rollout.Row would."""
    trajectory.finish = "answer" if trajectory.answer is not None else "length" if how == "length" else "turns"
    trajectory.n_invalid += trajectory.finish == "turns" and how != "stop"


def search(sampler, codec, asking, retriever=None):
    """For each (trajectory, question, query), all in one batch: append what is found, forced, to the trajectory."""
    rows = [Row(trajectory, question, codec, sampler.max_context, frozenset()) for trajectory, question, _ in asking]
    for row, (_, _, query) in zip(rows, asking):
        row.query = query
    answer_searches(rows, retriever or sampler.retriever, codec)


def look_up(sampler, protocol, questions, queries):
    """-> for each query its rollout.Search and the text of the passages, cut to the protocol's limit."""
    codec = Codec(sampler.tokenizer, replace(protocol, information=("", ""), passage=SEARCH_R1.passage))
    notes = [Trajectory(question.id, 0, []) for question in questions]
    wide_enough = replace(sampler, max_context=1 + protocol.max_observation_tokens)
    search(wide_enough, codec, list(zip(notes, questions, queries)))
    return [(note.searches[0], codec.decode(note.response_ids)) for note in notes]


class Known:
    """A retriever that has the passages already, one list for each query, in order."""

    def __init__(self, results):
        self.results = list(results)

    def search(self, queries, k):
        return self.results


def answer_demonstrations(questions, tokenizer, protocol, max_context=4096):
    """The paper's SFT baseline, question -> first golden answer: trajectories for policy.warm_start that answer at
    once, as the protocol wants it written. ValueError if one does not fit max_context tokens."""
    codec, (opening, closing), trajectories = Codec(tokenizer, protocol), protocol.answer, []
    for i, question in enumerate(questions):
        answer = codec.neutralise(question.golden_answers[0].strip())
        written = f"\\boxed{{{answer}}}" if protocol.boxed else answer
        text = f"{opening} {written} {closing}".strip()
        trajectory = Trajectory(question.id, i, codec.prompt(question.question), finish="answer", answer=answer)
        for token in codec.encode(text) + ([] if closing else [tokenizer.eos_token_id]):
            trajectory.append(token, 1)
        if len(trajectory) > max_context:
            raise ValueError(f"question {question.id}: prompt and answer do not fit --max-context {max_context}")
        trajectories.append(trajectory)
    return trajectories


SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[DMJS][rst])(?<!^\d)[.!?][\"')*]*$")  # not after J., Dr., St., 1.


def sentence_ended(text):
    """Whether the text, of which more is to come, has reached the end of its sentence: a full stop, or a new line that
    does not follow a colon.

    >>> [sentence_ended(text) for text in ("It was J. K.", "1.", "The answer is:\\n", "It was Rowling.", "Yes\\n")]
    [False, False, False, True, True]
    """
    sentence = text.strip()
    line_ended = text.endswith("\n") and not sentence.endswith(":")
    return bool(re.search(r"\w", sentence)) and (line_ended or bool(SENTENCE_END.search(sentence)))
