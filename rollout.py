"""
rollout.py — the search agent: protocol, trajectory, and a batched sampler that keeps tokens exact.

    trajectories = rollout(model, tokenizer, questions, retriever, SEARCH_R1, rollouts_per_question=8)

Reading order: Protocol (what the agent is told) -> Trajectory (what it did) -> Codec (text <-> ids) -> Row (one
rollout's turns) -> SlotCache and rollout() (many rollouts through a fixed number of slots). replay() turns
demonstrations into trajectories.

Token-in, token-out: ids are never decoded and encoded again. Text is decoded only to look for tags and to extract the
answer.

Departures from Search-R1 (commit a14dc3a), each pinned by a test:
 1. the ids trained on are the ids sampled; the tag or end-of-sequence token that ends a turn is among them, also when
    pad == eos.
 2. only text the policy sampled is scored: not the prompt, a passage or a retry message.
 3. passages are cut to the token limit first and wrapped in <information> afterwards, so the closing tag always
    survives.
 4. a trajectory that does not fit the context stops (finish "length"); nothing slides off, sampled and scored contexts
    are equal.
 5. tags and special tokens inside passages and questions are neutralised; an <information> the policy writes is text
    like any other.
 6. a query runs from the last <search> before </search>, an answer from the last <answer> before </answer>.
"""
import dataclasses
import functools
import json
import pathlib
import re
import reprlib
from dataclasses import dataclass, field

import torch
from transformers import Cache

from data import extract_answer, load_questions, normalize_answer
from layouts import strict_json
from policy import stop_ids, vocabulary_logits

PREFILL_TOKENS = 2048   # padded tokens in one forward: enough for a GPU, and a CPU keeps the activations in its cache
SAMPLING_BLOCK = 256    # tokens of the vocabulary summed up at once
TOKEN_CHARACTERS = 128  # more than a token of text holds; what lies beyond so many per token allowed is not even read


@dataclass(frozen=True)
class Protocol:
    """The agent's rules as data; another protocol is another value. Limits are in tokens of the policy's tokenizer."""
    prompt: str                         # with {question}; wrapped in the chat template if the tokenizer has one
    retry: str                          # forced after a turn that neither searched nor answered
    search: tuple[str, str] = ("<search>", "</search>")
    answer: tuple[str, str] = ("<answer>", "</answer>")     # no closing tag: the end of the turn closes the answer
    boxed: bool = False                 # the answer is what \\boxed{...} holds there
    information: tuple[str, str] = ("\n\n<information>", "</information>\n\n")
    # neutralised in passages, too
    other_tags: tuple[str, ...] = ("<think>", "</think>", "<information>", "</information>")
    passage: str = "Doc {i}(Title: {title}) {text}\n"   # one passage of an observation
    passages: int = 3                   # top-k of a search
    max_searches: int = 4               # turns that may search; an invalid turn uses one up; one more follows to answer
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500   # passages and their wrapping


SEARCH_R1 = Protocol(
    prompt="Answer the question below. Each time you receive new information, first reason about it between <think> "
    "and </think>. If you then find that some knowledge is missing, call a search engine with <search> query "
    "</search>; its top results are returned between <information> and </information>. You may search as often as you "
    "like. As soon as nothing more is needed, give the answer between <answer> and </answer>, short and without "
    "explanation, for example <answer> Beijing </answer>. Question: {question}\n",
    retry="\nMy last action was not valid. To search, I put the query between <search> and </search>. To answer, I put "
    "the answer between <answer> and </answer>. I try again.\n",
)


def save_protocol(protocol, folder):
    text = json.dumps(dataclasses.asdict(protocol), indent=2, ensure_ascii=False) + "\n"
    (pathlib.Path(folder) / "protocol.json").write_text(text, encoding="utf-8")


def load_protocol(folder):
    """The protocol a model folder was trained with (protocol.json), else SEARCH_R1, which a foreign model is asked to
    follow. ValueError names the file and the value that is wrong."""
    path = pathlib.Path(folder) / "protocol.json"
    if not path.is_file():
        return SEARCH_R1
    try:
        values = strict_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    types = {field.name: field.type for field in dataclasses.fields(Protocol)}
    if not isinstance(values, dict) or not {"prompt", "retry"} <= values.keys() <= types.keys():
        raise ValueError(f"{path}: a protocol is an object with prompt, retry and, if wanted, {', '.join(types)}")
    for name, value in values.items():
        if types[name] is int:
            least = 0 if name == "max_searches" else 1
            right, wanted = type(value) is int and value >= least, f"a whole number, at least {least}"
        elif types[name] in (str, bool):
            right, wanted = isinstance(value, types[name]), "a string" if types[name] is str else "true or false"
        else:  # an empty tag is one that the protocol does without
            right = isinstance(value, list) and all(isinstance(tag, str) and (tag.strip() or not tag) for tag in value)
            right, wanted = right and (len(value) == 2 or name == "other_tags"), "a list of tags, opening and closing"
        if not right:
            raise ValueError(f"{path}: {name} must be {wanted}, not {reprlib.repr(value)}")
    if "{question}" not in values["prompt"]:
        raise ValueError(f"{path}: prompt must contain {{question}}")
    return Protocol(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass
class Search:
    """One executed search: the query, the ids of the passages returned, whether one of them contains a golden answer,
    and where in the response they begin."""
    query: str
    passage_ids: list[str]
    hit: bool
    position: int = 0                   # index into response_ids of the first forced token


@dataclass
class Trajectory:
    """One rollout. response_ids, sampled and logprobs always have equal lengths: only `append` writes them."""
    question_id: str
    group: int                          # which question occurrence of the batch: the GRPO group
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)        # the loss mask. 1: sampled, 0: forced (passages, retry)
    logprobs: list[float] = field(default_factory=list)     # from the forward pass that sampled it; 0.0 where forced
    searches: list[Search] = field(default_factory=list)
    n_invalid: int = 0
    finish: str = ""                    # "answer", "turns" (none left) or "length" (context full)
    answer: str | None = None
    reward: float = 0.0
    stratum: int = 0                    # set with the advantage, for those who look; nothing is computed from them
    advantage: float = 0.0

    @property
    def n_searches(self):
        return len(self.searches)

    def append(self, token, sampled, logprob=0.0):
        self.response_ids.append(token)
        self.sampled.append(sampled)
        self.logprobs.append(logprob)

    def __len__(self):
        return len(self.prompt_ids) + len(self.response_ids)


# -----------------------------------------------------------------------------
# text <-> ids

@functools.lru_cache(maxsize=4)
def ids_containing(tokenizer, characters):
    """Ids whose text contains one of `characters` (the last ones of the closing tags) or a piece of a character: only
    these can complete a tag, so only after these is a turn decoded and searched for one."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return frozenset(i for i, text in enumerate(texts) if (characters | {"\ufffd"}) & set(text))


class Codec:
    """Text to ids and back for one tokenizer and protocol. Forced text cannot contain a working tag or special
    token."""

    def __init__(self, tokenizer, protocol):
        self.tokenizer, self.protocol = tokenizer, protocol
        tags = {*protocol.search, *protocol.answer, *protocol.other_tags, *map(str.strip, protocol.information)}
        tags |= {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
        tags -= {tokenizer.unk_token} - {tokenizer.eos_token}   # any unknown word becomes <unk>
        tags = sorted((tag for tag in tags if len(tag.strip()) > 1), key=len, reverse=True)  # no letters, no blanks
        self.tags = re.compile("|".join(map(re.escape, tags)), re.IGNORECASE)
        self.information = [self.encode(text) for text in protocol.information]
        self.retry = self.encode(protocol.retry)
        closing_tags = protocol.search[1], protocol.answer[1]
        self.closing_ids = ids_containing(tokenizer, frozenset("".join(tag[-1:] for tag in closing_tags)))
        self.closing_tokens = max(len(tag.encode()) for tag in closing_tags)  # a token holds a byte or more
        self.passage_tokens = protocol.max_observation_tokens - sum(map(len, self.information))
        if self.passage_tokens < 1:
            raise ValueError(f"max_observation_tokens {protocol.max_observation_tokens} leaves no room for passages; "
                             "raise it")

    def neutralise(self, text):
        """"</information>" -> "< /information>": still readable, no longer a tag or a special token."""
        text = text.encode("utf-8", "replace").decode()     # no tokenizer takes half a surrogate pair
        return self.tags.sub(lambda match: match[0][0] + " " + match[0][1:], text)

    def harmless(self, text, limit=None):
        """A text from outside -> (the text neutralised, its ids cut to `limit`). What the tokenizer made of it is
        looked at, too: one that normalises unicode makes a tag of a full-width "＜/search＞". A text that cannot be
        helped is dropped."""
        for _ in range(3):
            text = self.neutralise(text)
            ids = self.encode(text)[:limit]
            seen = self.decode(ids)
            if not self.tags.search(seen):
                return text, ids
            text = seen
        return "", []

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt(self, question):
        question, _ = self.harmless(question.strip())
        text = self.protocol.prompt.replace("{question}", question if question.endswith("?") else question + "?")
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            return self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        return self.tokenizer.encode(text)  # with the tokenizer's own beginning-of-sequence token, if it has one

    def answer(self, turn):
        """The answer in the text of a turn, or None. Without a closing tag it is the line behind the opening one."""
        opening, closing = self.protocol.answer
        if closing:
            answer = extract_answer(turn, opening, closing)
        else:
            start = turn.rfind(opening) + len(opening) if opening else 0
            answer = turn[start:].strip() or None if opening in turn else None
        if answer and self.protocol.boxed:
            return last_boxed(answer)
        return answer.partition("\n")[0].strip() if answer and not closing else answer

    def observation(self, passages):
        """Passages cut to the limit first and wrapped afterwards, so the closing tag is always there."""
        texts = []
        for i, passage in enumerate(passages, 1):  # not str.format: that would also follow {text.__class__}
            values = {"{i}": str(i), "{title}": passage.title, "{text}": passage.text}
            texts.append(re.sub(r"\{(i|title|text)\}", lambda match: values[match[0]], self.protocol.passage))
        text = "".join(texts)[: TOKEN_CHARACTERS * (self.passage_tokens + 1)]
        opening, closing = self.information
        return opening + self.harmless(text, self.passage_tokens)[1] + closing


def last_boxed(text):
    """The content of the last \\boxed{...} or \\boxed{\\text{...}}, braces matched, stripped; None without one."""
    _, opened, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            content = rest[:i].strip()
            inner = re.fullmatch(r"\\text\s*\{(.*)\}", content, re.DOTALL)
            return inner[1].strip() if inner else content
    return None


# -----------------------------------------------------------------------------
# one rollout

def begin(codec, question, group, max_context):
    """-> a trajectory that holds the prompt and nothing else. ValueError if the prompt does not fit."""
    trajectory = Trajectory(question.id, group, codec.prompt(question.question))
    if len(trajectory) >= max_context:
        raise ValueError(f"question {question.id}: prompt of {len(trajectory)} tokens does not fit "
                         f"--max-context {max_context}")
    return trajectory


class Row:
    """A trajectory under way. `feed` holds the ids of the trajectory that are not in the KV cache yet, `length` those
    that are."""

    def __init__(self, trajectory, question, codec, max_context, stop_tokens):
        self.trajectory, self.question, self.codec = trajectory, question, codec
        self.max_context, self.stop_tokens = max_context, stop_tokens
        self.feed, self.length = [], len(trajectory.prompt_ids)
        self.turn, self.turn_start, self.query, self.invalid = 0, 0, None, False

    def accept(self, token, logprob):
        """Append a sampled token and see whether it ends the turn: sets finish, query or invalid."""
        trajectory, protocol = self.trajectory, self.codec.protocol
        trajectory.append(token, 1, logprob)
        self.feed = [token]
        last_turn = self.turn == protocol.max_searches
        closing_tags, ids = (protocol.search[1], protocol.answer[1]), trajectory.response_ids
        # the last few tokens first: decoding the whole turn after every ">" would take quadratic time
        tail = ids[max(self.turn_start, len(ids) - self.codec.closing_tokens) :]
        if token in self.codec.closing_ids and any(tag and tag in self.codec.decode(tail) for tag in closing_tags):
            # a tag's ">" may be merged with what follows it, so tags are found in text, never in ids
            text = self.codec.decode(ids[self.turn_start :])
            ends = [(text.find(tag), tag) for tag in closing_tags if tag and tag in text]
            if ends:
                end, tag = min(ends)
                opening = protocol.search[0] if tag == protocol.search[1] else protocol.answer[0]
                if opening not in text[:end]:
                    self.invalid = True
                elif tag == protocol.answer[1]:
                    trajectory.answer, trajectory.finish = self.codec.answer(text[: end + len(tag)]), "answer"
                elif last_turn:
                    trajectory.finish = "turns"  # no search is left: not executed, so it counts in no stratum
                else:
                    self.query = text[text.rfind(opening, 0, end) + len(opening) : end].strip()
        if not (trajectory.finish or self.query is not None):
            stopped = token in self.stop_tokens
            ended = stopped or len(ids) - self.turn_start >= protocol.max_turn_tokens
            if ended and not protocol.answer[1]:
                turn_ids = ids[self.turn_start : len(ids) - stopped]
                trajectory.answer = self.codec.answer(self.codec.decode(turn_ids))
                trajectory.finish = "answer" if stopped and trajectory.answer is not None else ""
            self.invalid |= ended and not trajectory.finish
            if self.invalid:
                trajectory.n_invalid += 1
                trajectory.finish = "turns" if last_turn else ""
            elif len(trajectory) >= self.max_context:
                trajectory.finish = "length"

    def observe(self, ids):
        """Append forced ids and begin the next turn, or finish if they and one more token do not fit the context."""
        self.query, self.invalid = None, False
        if len(self.trajectory) + len(ids) >= self.max_context:
            self.trajectory.finish = "length"
            return
        for token in ids:
            self.trajectory.append(token, 0)
        self.feed = self.feed + ids
        self.turn, self.turn_start = self.turn + 1, len(self.trajectory.response_ids)


def answer_searches(rows, retriever, codec):
    """End the turn of every row that searched (all queries in one batch) or was invalid."""
    searching = [row for row in rows if row.query is not None]
    results = retriever.search([row.query for row in searching], codec.protocol.passages) if searching else []
    for row, passages in zip(searching, results, strict=True):
        golden = [answer for answer in map(normalize_answer, row.question.golden_answers) if answer]
        texts = [f" {normalize_answer(passage.title + ' ' + passage.text)} " for passage in passages]
        search = Search(row.query, [passage.id for passage in passages],
                        any(f" {g} " in text for g in golden for text in texts),
                        len(row.trajectory.response_ids))
        row.observe(codec.observation(passages))
        if not row.trajectory.finish:  # passages that did not fit were never seen: not executed
            row.trajectory.searches.append(search)
    for row in rows:
        if row.invalid and not row.trajectory.finish:
            row.observe(codec.retry)


# -----------------------------------------------------------------------------
# many rollouts

class SlotCache(Cache):
    """One preallocated KV cache per slot; token t of a row always lies at index t of its slot, so no left padding, no
    holes.

    The next forward reads and writes the slots `rows` (a slice, or a tensor of R slot indices) at `positions` (R, T).
    """

    def __init__(self, slots, max_context):
        super().__init__(layers=[])
        self.slots, self.max_context, self.capacity, self.keys, self.values = slots, max_context, 0, [], []

    def reserve(self, length):
        if length > self.capacity:  # doubling: a short run never pays for the longest context allowed
            extra = max(length, min(2 * self.capacity, self.max_context)) - self.capacity
            for tensors in (self.keys, self.values):
                for i, tensor in enumerate(tensors):  # one by one: all at once would hold the cache twice
                    tensors[i] = torch.nn.functional.pad(tensor, (0, 0, 0, extra))
            self.capacity += extra

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if layer_idx == len(self.keys):  # zeros, not empty: masked positions still enter a product with weight 0
            for tensors, new in ((self.keys, keys), (self.values, values)):
                tensors.append(new.new_zeros(self.slots, new.shape[1], self.capacity, new.shape[3]))
        for tensors, new in ((self.keys, keys), (self.values, values)):                 # new (R, heads, T, head_dim)
            tensors[layer_idx][self.row_ids[:, None], :, self.positions] = new.transpose(1, 2)
        return self.keys[layer_idx][self.rows, :, : self.read], self.values[layer_idx][self.rows, :, : self.read]

    def get_seq_length(self, layer_idx=0):
        return 0  # positions are given explicitly

    def load(self, slot, length):
        return [tensor[slot, :, :length].clone() for tensor in self.keys + self.values]

    def store(self, slot, prefix):
        for tensor, part in zip(self.keys + self.values, prefix):
            tensor[slot, :, : part.shape[1]] = part


def encode(model, cache, slots, feeds, lengths):
    """Run the R lists of ids `feeds` behind the `lengths` ids already cached in `slots`; -> last hidden state of each
    (R, D)."""
    if len(feeds) > 1 and len(feeds) * max(map(len, feeds)) > PREFILL_TOKENS:
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i]))  # similar lengths together: less padding
        parts = order[: len(order) // 2], order[len(order) // 2 :]
        hidden = [encode(model, cache, *([values[i] for i in part] for values in (slots, feeds, lengths)))
                  for part in parts]
        return torch.cat(hidden)[torch.tensor(order, device=model.device).argsort()]
    width, device = max(map(len, feeds)), model.device
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in feeds], device=device)                 # (R, T)
    starts = torch.tensor(lengths, device=device)                                                        # (R,)
    cache.row_ids = torch.tensor(slots, device=device)                                                   # (R,)
    # all slots in order are a view, without copying the cache
    cache.rows = slice(len(slots)) if slots == list(range(len(slots))) else cache.row_ids
    cache.read = max(length + len(ids) for length, ids in zip(lengths, feeds))
    # padding writes where later tokens of the row will overwrite it; nothing real is ever that far, so no query sees it
    cache.positions = starts[:, None] + torch.arange(width, device=device)                               # (R, T)
    cache.positions = cache.positions.clamp(max=cache.read)
    cache.reserve(cache.read + 1)
    hidden_keys = torch.arange(cache.read, device=device) > cache.positions[:, None, :, None]            # (R, 1, T, S)
    # additive: every attention implementation takes it
    mask = torch.zeros(hidden_keys.shape, dtype=model.dtype, device=device)
    mask.masked_fill_(hidden_keys, torch.finfo(model.dtype).min)
    positions = cache.positions.clamp(max=cache.read - 1)
    out = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
    last = torch.tensor([len(ids) - 1 for ids in feeds], device=device)                                  # (R,)
    return out.last_hidden_state[torch.arange(len(feeds), device=device), last]                          # (R, D)


def invert(cdf, u):
    """Rising sums (R, N), not normalised, and u (R, 1) -> the first index whose sum is above u (R, 1), and what u is
    above the sum before it (R, 1). With a NaN among the sums the last index, for the caller to see the NaN there."""
    total = cdf[:, -1:]
    u = torch.minimum(u, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, u, right=True).clamp(max=cdf.shape[1] - 1)
    return index, u - torch.nn.functional.pad(cdf, (1, 0)).gather(1, index)


def sample(logits, temperature, generator):
    """Logits (R, V) float32 -> ids (R,) and their log-probs (R,). Temperature 0 is greedy, scored at temperature 1.

    Inverse-CDF sampling: much cheaper than torch.multinomial. In two levels, as summing up a large vocabulary token by
    token would cost more than all else here: which block of tokens, then which token of it. Sums are float64, and a
    token of probability 0 is never drawn.
    """
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)                                  # (R, V)
    if temperature == 0:
        ids = logits.argmax(-1)
    else:
        blocks = torch.nn.functional.pad(logprobs.exp(), (0, -logits.shape[-1] % SAMPLING_BLOCK))
        blocks = blocks.view(len(logits), -1, SAMPLING_BLOCK)                                            # (R, N, B)
        sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)                                            # (R, N)
        u = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator)   # (R, 1)
        block, u = invert(sums, u * sums[:, -1:])                                                        # (R, 1) x 2
        inside = blocks[torch.arange(len(logits), device=logits.device), block[:, 0]].double()           # (R, B)
        ids = block * SAMPLING_BLOCK + invert(inside.cumsum(-1), u)[0]                                   # (R, 1)
        ids = ids[:, 0].clamp(max=logits.shape[-1] - 1)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def rollout(model, tokenizer, questions, retriever, protocol, rollouts_per_question=1, temperature=1.0, slots=64,
            max_context=4096, generator=None):
    """Sample `rollouts_per_question` trajectories for every question; -> list[Trajectory], question by question.

    questions: objects with id, question, golden_answers (data.Question). retriever: `search(queries, k)`
    (retriever.py). temperature 0 is greedy. At most `slots` rollouts are in flight, each with at most `max_context`
    tokens: they bound the memory. The prompt is encoded once per group, every later token once; ValueError if a prompt
    does not fit.
    """
    codec, stop_tokens = Codec(tokenizer, protocol), frozenset(stop_ids(model, tokenizer))
    rows = []
    for group, question in enumerate(questions):
        first = begin(codec, question, group, max_context)
        for _ in range(rollouts_per_question):
            trajectory = Trajectory(question.id, group, first.prompt_ids)
            rows.append(Row(trajectory, question, codec, max_context, stop_tokens))
    sample_rows(model, rows, functools.partial(answer_searches, retriever=retriever, codec=codec), temperature, slots,
                max_context, generator)
    return [row.trajectory for row in rows]


@torch.no_grad()
def sample_rows(model, rows, end_turns, temperature, slots, max_context, generator=None):
    """Run every row until its trajectory has a `finish`; rows of a group are neighbours and share their prompt.

    A row takes its next token by `accept(token, logprob)` and leaves ids to be read in `feed`; end_turns(rows) is
    called with the rows that have just sampled.
    """
    pending = rows[::-1]  # pop from the end
    active = []           # active[i] lives in slot i
    cache, prefixes = SlotCache(min(slots, len(pending)), max_context), {}

    def advance(rows, hidden):
        ids, logprobs = sample(vocabulary_logits(model, hidden), temperature, generator)
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist()):
            row.accept(token, logprob)
        end_turns(rows)

    while pending or active:
        if pending and len(active) < cache.slots:
            new = [pending.pop() for _ in range(min(cache.slots - len(active), len(pending)))]
            fresh = {row.trajectory.group: row for row in new if row.trajectory.group not in prefixes}
            if fresh:  # a question is encoded once, in a free slot, and copied to the slots of its group
                free = list(range(len(active), len(active) + len(fresh)))
                hidden = encode(model, cache, free, [row.trajectory.prompt_ids for row in fresh.values()],
                                [0] * len(free))
                for slot, group, state in zip(free, fresh, hidden):
                    prefixes[group] = cache.load(slot, fresh[group].length), state
            for slot, row in enumerate(new, len(active)):
                cache.store(slot, prefixes[row.trajectory.group][0])
            hidden = torch.stack([prefixes[row.trajectory.group][1] for row in new])                     # (R, D)
            prefixes = {g: prefixes[g] for g in prefixes if pending and pending[-1].trajectory.group == g}
            active += new
            advance(new, hidden)
        else:
            # rows with passages to read wait until they are an eighth of the batch, then are encoded together;
            # until then, like rows that decode, they feed one id a step
            reading = [i for i, row in enumerate(active) if len(row.feed) > 1]
            together = 8 * len(reading) >= len(active) and reading
            chosen = reading if together else list(range(len(active)))
            rows = [active[i] for i in chosen]
            feeds = [row.feed if together else row.feed[:1] for row in rows]
            hidden = encode(model, cache, chosen, feeds, [row.length for row in rows])
            for row, ids in zip(rows, feeds):
                row.length, row.feed = row.length + len(ids), row.feed[len(ids) :]
            ready = [i for i, row in enumerate(rows) if not row.feed]  # logits only for rows that sample
            if ready:
                advance([rows[i] for i in ready], hidden[ready])
        for slot in reversed(range(len(active))):  # a finished row leaves; the last one takes its slot
            if active[slot].trajectory.finish:
                last = active.pop()
                if slot < len(active):
                    cache.store(slot, cache.load(len(active), last.length))
                    active[slot] = last


# -----------------------------------------------------------------------------
# demonstrations

def replay(demonstrations, questions, tokenizer, retriever, protocol, max_context=4096):
    """Demonstrations -> trajectories, as if the policy had sampled them: turns are sampled text, observations come from
    the retriever.

    demonstrations: one list of turn texts per question, each turn ending in a search or, the last, in an answer.
    ValueError naming the question if a turn does not end with its text or turns are left over.
    """
    codec, under_way = Codec(tokenizer, protocol), []
    for group, (turns, question) in enumerate(zip(demonstrations, questions, strict=True)):
        trajectory = Trajectory(question.id, group, codec.prompt(question.question))
        under_way.append((Row(trajectory, question, codec, max_context, frozenset()),
                          [codec.encode(turn) for turn in turns]))
    trajectories = [row.trajectory for row, _ in under_way]
    while under_way:
        for row, turns in under_way:
            ended = False
            for token in turns.pop(0) if turns else []:
                if ended:
                    raise ValueError(f"demonstration for question {row.question.id}: a turn goes on after "
                                     f"its closing tag, or is longer than --max-turn-tokens {protocol.max_turn_tokens}")
                row.accept(token, 0.0)
                ended = row.trajectory.finish or row.invalid or row.query is not None
            if not ended or row.trajectory.finish == "turns" or (turns and row.trajectory.finish):
                raise ValueError(f"demonstration for question {row.question.id}: each turn must end in "
                                 "</search>, the last in </answer>, within --max-searches")
        answer_searches([row for row, _ in under_way], retriever, codec)
        for row, _ in under_way:
            if row.trajectory.finish == "length":
                raise ValueError(f"demonstration for question {row.question.id}: longer than "
                                 f"--max-context {max_context}")
        under_way = [(row, turns) for row, turns in under_way if not row.trajectory.finish]
    return trajectories


def load_demonstrations(path, tokenizer, retriever, protocol, max_context=4096):
    """jsonl {id, question, golden_answers, turns: [text of each sampled turn]} -> trajectories for
    policy.warm_start."""
    questions = load_questions(path, extra=("turns",))
    for question in questions:
        turns = question.metadata["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{path}: question {question.id}: 'turns' must be a list of strings, one per sampled "
                             "turn")
    try:
        return replay([question.metadata["turns"] for question in questions], questions, tokenizer, retriever, protocol,
                      max_context)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# -----------------------------------------------------------------------------
# for people

def record(trajectory, question, tokenizer):
    """A trajectory as a json-ready dict: ids, mask, and the response as segments [sampled 0/1, text] that show the
    mask."""
    segments, start, ids, sampled = [], 0, trajectory.response_ids, trajectory.sampled
    for end in range(1, len(ids) + 1):
        if end == len(ids) or sampled[end] != sampled[start]:
            segments.append([sampled[start], tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)])
            start = end
    row = dataclasses.asdict(trajectory)
    return {**row, "n_searches": trajectory.n_searches, "question": question.question,
            "golden_answers": question.golden_answers, "prompt": tokenizer.decode(trajectory.prompt_ids),
            "segments": segments}
