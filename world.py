"""
world.py — the embedded default: a small made-up world, its tokenizer, and a tiny policy with a warm start of two
minutes.

    python world.py --seed 0        # builds it (train.py does so by itself) and shows a few demonstrations

People live in towns and work for companies; towns have mayors and lie in countries; companies have founders. 3,400
passages and two kinds of questions: one look-up ("Where was Marta Venker born?") or two ("Who is the mayor of the town
where ... was born?").
  - names are two words and every word is shared by many names, so half a name finds namesakes and both words must be
    copied.
  - train and held-out questions share no person, town or company: no fact can be known by heart, and guessing does not
    pay.
  - the warm start is supervised learning on noisy demonstrations: guesses, half names, giving up after one look-up, a
    search too many. After it the policy copies well and searches 0 to 3 times, but is right less than half the time;
    RL has to find out when to stop.

The same world, policy and warm start serve every estimator; nothing here knows which one will be used.
"""
import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from data import load_questions
from policy import warm_start
from retriever import cache_folder, one_builder, open_retriever
from rollout import Protocol, load_demonstrations, save_protocol

TINY = Protocol(prompt="{question}\n", retry="\nThat was not valid .\n", passage="{text}\n", max_searches=3,
                max_turn_tokens=40, max_observation_tokens=120)

# names have two words. every word is shared by many names, so a query must hold both, and both must be copied
FIRST = [a + b for a in "Mar Tol Bel Vin Sel Dor Kel Lor Fen Jas Nor Pel".split()
               for b in "a o in ette ric win dan us".split()]
LAST = [a + b for a in "Bran Ven Hol Kar Lind Mor Quil Rast Sten Tam Ulv Wes Yar Zel Gar Dun".split()
              for b in "dish ker low man ner ford by stone wick gate".split()]
TOWNS = (
    "Amber Ashen Birch Bramble Cedar Clover Crystal Dusty Eagle Elder Falcon Fern Foggy Frosty Golden Granite Hazel "
    "Heather Hidden Hollow Ivory Juniper Kestrel Larch Lilac Linden Lonely Maple Marble Meadow Misty Mossy Narrow "
    "Nettle Oaken Otter Pebble Pine Quartz Quiet Raven Rocky Rowan Russet Sandy Shady Silver Snowy Sparrow Sunny "
    "Swallow Thistle Timber Umber Velvet Violet Walnut Willow Windy Winter".split(),
    "Abbey Bank Bay Beach Bend Bluff Bridge Brook Canyon Castle Cliff Corner Cove Creek Crossing Dale Falls Ferry "
    "Field Ford Forest Gate Glen Grove Harbor Haven Heath Hill Island Lake Landing Lodge Manor Market Mill Moor Park "
    "Pass Point Pond Port Ridge Rock Shore Spring Station Tower Vale Valley Well".split())
COMPANIES = (
    "Alpine Anchor Arctic Atlas Bronze Cobalt Comet Copper Coral Cosmic Crimson Delta Diamond Eastern Ember Emerald "
    "Empire Galaxy Global Grand Imperial Indigo Iron Jade Jupiter Liberty Lunar Magnet Mercury Meteor Neptune Nickel "
    "Northern Onyx Orbit Pacific Phoenix Pioneer Polar Regal Royal Ruby Sapphire Saturn Scarlet Solar Southern Steel "
    "Titan Western".split(),
    "Anvil Arrow Basket Bell Bicycle Blanket Boot Bottle Button Candle Canvas Carpet Chair Clock Compass Cradle Cup "
    "Drum Engine Feather Fiddle Flute Glass Glove Hammer Hat Kettle Ladder Lamp Lantern Loom Mirror Needle Oven Paper "
    "Pencil Piano Pillow Plough Pottery Razor Ribbon Saddle Soap Spoon Tea Thread Tractor Umbrella Wheel".split())
PEOPLE = (FIRST, LAST)
COUNTRIES = ("Norland Sudmark Ostria Westmere Galdia Brevonia Kastel Lumeria Morvia Pellas Quorin Rhodavia Sarnia "
             "Tavora Ulmania Vostok Yelland Zamora Arvania Delmark").split()

# a fact: (kind of subject, relation) -> the sentence that states it
SENTENCES = {
    ("person", "birthplace"): "{s} was born in {o}.",
    ("person", "employer"): "{s} works for {o}.",
    ("town", "country"): "{s} is a town in {o}.",
    ("town", "mayor"): "The mayor of {s} is {o}.",
    ("company", "founder"): "{s} was founded by {o}.",
}
OBJECTS = {"birthplace": "town", "employer": "company", "country": "country", "mayor": "person", "founder": "person"}
# the relations followed from the person named in the question -> the question
QUESTIONS = {
    ("birthplace",): "Where was {s} born?",
    ("employer",): "Which company does {s} work for?",
    ("birthplace", "mayor"): "Who is the mayor of the town where {s} was born?",
    ("employer", "founder"): "Who founded the company that {s} works for?",
    ("birthplace", "country"): "In which country is the town where {s} was born?",
}
SHARES = (0.2, 0.2, 0.24, 0.24, 0.12)  # few questions with a country: twenty answers would make guessing pay


@dataclass
class World:
    passages: list      # of {"id", "title", "text"}
    train: list         # of {"id", "question", "golden_answers", "metadata"};
                        # metadata.chain: the subject, then the answer of each hop
    heldout: list
    facts: dict         # (subject, relation) -> object
    kinds: dict         # subject -> "person", "town" or "company"


def build_world(seed=0, people=2000, towns=700, companies=700, heldout_share=0.2, train_questions=4000,
                heldout_questions=300):
    """A world as a function of the seed. Held-out people live in held-out towns and work for held-out companies, so
    that no fact, and above all no second-hop fact, is shared between the two kinds of questions."""
    rng = random.Random(seed)
    names, kinds, facts = {}, {}, {}
    for kind, (first, second), count in (("person", PEOPLE, people), ("town", TOWNS, towns),
                                         ("company", COMPANIES, companies)):
        drawn = rng.sample([f"{a} {b}" for a in first for b in second], count)
        cut = int(count * heldout_share)
        names["heldout", kind], names["train", kind] = drawn[:cut], drawn[cut:]
        kinds.update(dict.fromkeys(drawn, kind))
    for split in ("train", "heldout"):
        names[split, "country"] = COUNTRIES
        for kind, relation in SENTENCES:
            for subject in names[split, kind]:
                facts[subject, relation] = rng.choice(names[split, OBJECTS[relation]])
    passages = []
    for subject, kind in kinds.items():
        sentences = [text.format(s=subject, o=facts[subject, r]) for (k, r), text in SENTENCES.items() if k == kind]
        passages.append({"title": subject, "text": " ".join(sentences)})
    rng.shuffle(passages)
    passages = [{"id": f"p{i}", **passage} for i, passage in enumerate(passages)]
    questions = {}
    for split, count in (("train", train_questions), ("heldout", heldout_questions)):
        asked = {}
        while len(asked) < count:
            path, subject = rng.choices(list(QUESTIONS), SHARES)[0], rng.choice(names[split, "person"])
            if (path, subject) in asked:
                continue
            chain = [subject]
            for relation in path:
                chain.append(facts[chain[-1], relation])
            asked[path, subject] = {
                "id": f"{split}-{len(asked)}", "question": QUESTIONS[path].format(s=subject),
                "golden_answers": [chain[-1]], "metadata": {"hops": len(path), "path": path, "chain": chain}}
        questions[split] = list(asked.values())
    return World(passages, questions["train"], questions["heldout"], facts, kinds)


# -----------------------------------------------------------------------------
# tokenizer and policy

TAGS = ["<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
THOUGHTS = {
    "guess": "I know this .", "look": "First I look up the person .", "hasty": "Let me try .",
    "nothing": "Nothing about that .", "check": "I check once more .",
}


def build_tokenizer():
    """Word-level: every word and punctuation mark of the world is a token, tags are ordinary tokens, anything else is
    <unk>."""
    text = " ".join([*SENTENCES.values(), *QUESTIONS.values(), *THOUGHTS.values(), TINY.retry,
                     *map(" ".join, (*PEOPLE, *TOWNS, *COMPANIES)), *COUNTRIES])
    pieces = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")])
    words = sorted({word for word, _ in pieces.pre_tokenize_str(text.replace("{s}", "").replace("{o}", ""))})
    vocabulary = ["<pad>", "<eos>", "<unk>", *TAGS, *words]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pieces
    backend.add_tokens(TAGS)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_policy(tokenizer, seed, **changes):
    """A Qwen2 of about a million random parameters, random in a way that makes copying quick to learn.

    A two-minute warm start cannot afford to discover from scratch how to attend to "the word after the last time this
    word occurred". So keys start out correlated with queries and outputs with values (mimetic initialisation, Trockman
    and Kolter 2023, arXiv 2305.09828), and the biases of one head of the first layer start out as attention to the
    previous token.
    """
    torch.manual_seed(seed)
    settings = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
                    intermediate_size=448, tie_word_embeddings=True, max_position_embeddings=512,
                    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, initializer_range=0.05,
                    vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id)
    model = Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes})).float()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.copy_(attention.q_proj.weight)
            attention.o_proj.weight.copy_(0.6 * attention.v_proj.weight.T
                                          / (attention.v_proj.weight.std() * len(attention.v_proj.weight) ** 0.5))
        head_dim = model.config.hidden_size // model.config.num_attention_heads
        frequencies = 10000.0 ** (-torch.arange(4) * 2 / head_dim)                  # the four fastest of RoPE
        first = model.model.layers[0].self_attn
        first.q_proj.bias[:4] = 5.0                                                 # q.k = 25 sum cos(f (distance - 1))
        first.k_proj.bias[:4] = 5.0 * frequencies.cos()
        first.k_proj.bias[head_dim // 2 : head_dim // 2 + 4] = 5.0 * frequencies.sin()
    return model


# -----------------------------------------------------------------------------
# demonstrations

NOISE = {"guess": 0.12, "hasty": 0.3, "stop": 0.55, "check": 0.2}  # chance of each mistake where it can be made


def demonstrate(world, question, retriever, rng, noise):
    """The turns of one demonstration: look up each subject in turn, state the fact read, search on or answer; with
    mistakes."""
    path, chain, turns = question["metadata"]["path"], question["metadata"]["chain"], []

    def take(thought, query=None, answer=None):
        turns.append(f"<think> {thought} </think> "
                     + (f"<search> {query} </search>" if query else f"<answer> {answer} </answer>"))

    def happens(mistake):
        return rng.random() < noise.get(mistake, 0)

    if happens("guess"):
        take(THOUGHTS["guess"], answer=world.facts[rng.choice([s for s, r in world.facts if r == path[-1]]), path[-1]])
        return turns
    thought, query = THOUGHTS["look"], chain[0]
    if happens("hasty"):  # half a name finds namesakes
        query = rng.choice(query.split())
        thought = THOUGHTS["hasty"]
    for hop, relation in enumerate(path):
        take(thought, query=query)
        if chain[hop] not in [passage.title for passage in retriever.search([query], TINY.passages)[0]]:
            query, thought = chain[0], THOUGHTS["nothing"]
            take(thought, query=query)
        thought = SENTENCES[world.kinds[chain[hop]], relation].format(s=chain[hop], o=chain[hop + 1])
        query = chain[hop + 1]
        if hop + 1 < len(path) and happens("stop"):
            break
    if happens("check") and len(turns) < TINY.max_searches:
        take(THOUGHTS["check"], query=chain[hop])
    take(thought, answer=chain[hop + 1])
    return turns


def demonstrations(world, questions, retriever, seed, count, noise=NOISE):
    """`count` demonstrations on questions drawn with replacement: -> list of {"id", "question", "golden_answers",
    "turns"}."""
    rng = random.Random(seed)
    drawn = rng.choices(questions, k=count)
    return [{"id": f"demo-{i}", "question": q["question"], "golden_answers": q["golden_answers"],
             "turns": demonstrate(world, q, retriever, rng, noise)} for i, q in enumerate(drawn)]


# -----------------------------------------------------------------------------
# everything, once

SHORT_COURSE, FULL_COURSE, BATCH, LEARNING_RATE = 2048, 4480, 8, 3e-3


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def similar_lengths_together(trajectories, rng):
    """Sort within runs of eight batches, then shuffle the batches: less padding, still every demonstration once."""
    batches = []
    for start in range(0, len(trajectories), 8 * BATCH):
        run = sorted(trajectories[start : start + 8 * BATCH], key=len)
        batches.append([run[i : i + BATCH] for i in range(0, len(run), BATCH)])
        rng.shuffle(batches[-1])
    return [trajectory for run in batches for batch in run for trajectory in batch]


def made_once(name, sources, cache, log, make):
    """-> folder NAME-HASH in the cache, filled by make(folder), once. The hash is that of the sources, files beside
    this one, so that an edit makes a new folder. Made aside, then renamed: a half-made one is never used. Of processes
    that want the same folder at once, one makes it and the others wait."""
    root, here = cache_folder(cache), pathlib.Path(__file__).parent
    source = b"".join((here / path).read_bytes() for path in sources)
    folder = root / f"{name}-{hashlib.sha256(source).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with one_builder(folder, lambda: log(f"another process is making {folder}; waiting for it")):
        if not folder.is_dir():
            aside = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(aside, ignore_errors=True)  # left by a kill -9
            aside.mkdir(mode=0o700)
            try:
                make(aside)
                os.replace(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder


def prepare(cache="", seed=0, log=print):
    """-> folder with the world of this seed and its warm-started policy, see made_once: corpus.jsonl, train.jsonl,
    heldout.jsonl, demos.jsonl, protocol.json, model and tokenizer.

    The warm start is one pass: first right demonstrations with one passage a search (a short course in reading and
    copying), then noisy ones with the protocol's three.
    """
    def make(folder):
        world, tokenizer = build_world(seed), build_tokenizer()
        for name, rows in (("corpus", world.passages), ("train", world.train), ("heldout", world.heldout)):
            write_lines(folder / f"{name}.jsonl", rows)
        tokenizer.save_pretrained(folder)
        save_protocol(TINY, folder)
        log(f"embedded world {seed}: {len(world.passages)} passages, {len(world.train)} training questions; "
            "warm start, once")
        retriever = open_retriever(str(folder / "corpus.jsonl"), cache_dir=folder / "index")
        course = []
        for count, noise, protocol in ((SHORT_COURSE, {}, dataclasses.replace(TINY, passages=1)),
                                       (FULL_COURSE, NOISE, TINY)):
            write_lines(folder / "demos.jsonl", demonstrations(world, world.train, retriever, seed, count, noise))
            course += similar_lengths_together(
                load_demonstrations(folder / "demos.jsonl", tokenizer, retriever, protocol), random.Random(seed))
        policy = build_policy(tokenizer, seed)
        warm_start(policy, course, len(course) // BATCH, BATCH, LEARNING_RATE, 1600, seed=None, log_every=100, log=log)
        policy.save_pretrained(folder)
        shutil.rmtree(folder / "index", ignore_errors=True)

    return made_once(f"world-{seed}", ("world.py", "policy.py", "rollout.py"), cache, log, make)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    made = prepare(seed=parser.parse_args().seed)
    print(made)
    for question in load_questions(made / "demos.jsonl", extra=("turns",))[:5]:
        print(f"\n{question.question}  ({question.golden_answers[0]})\n  " + "\n  ".join(question.metadata["turns"]))
