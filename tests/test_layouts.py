"""layouts.py: every layout on real files and by hand, every way to be malformed, memory, and names on a local hub."""
import gzip
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from conftest import serving
from hypothesis import given, settings, strategies as st

import data
import layouts
import retriever
from data import Question, load_questions
from retriever import BM25Retriever, RetrieverError

ROOT = pathlib.Path(__file__).parents[1]
LAYOUTS = pathlib.Path(__file__).parents[2] / "shared/data/layouts"
needs_shared = pytest.mark.skipif(not LAYOUTS.exists(), reason="the shared real data is not here")


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# -----------------------------------------------------------------------------
# questions: published files

@needs_shared
@pytest.mark.parametrize("file, layout, count, first", [
    ("hotpotqa_original.json", "hotpotqa", 5, Question(
        "5a7f6fd75542992e7d278cfa", 'Which Canadian rock band released a song called "Counterparts" and had a drummer '
        "who was inducted into the Modern Drummer Hall of Fame?", ["Rush"])),
    ("musique_original.jsonl", "musique", 3, Question(
        "2hop__574419_270105", "What is the seat of the county where Van Hook Township is located?", ["Stanley"])),
    ("verl_qa.jsonl", "verl", 20, Question(
        "chiayewken/bamboogle/test_0", "Who was president of the United States in the year that Citibank was founded?",
        ["james madison"])),
    ("search_r1_nq.parquet", "verl", 50, Question(
        "nq/test_0", "who got the first nobel prize in physics?", ["Wilhelm Conrad Röntgen"])),
    ("dpr_qa.tsv", "dpr", 50, Question("1", "who sings does he love me with reba", ["Linda Davis"])),
])
def test_real_files(file, layout, count, first):
    questions = load_questions(LAYOUTS / file)
    assert len(questions) == count and questions[0] == first
    assert load_questions(LAYOUTS / file, layout=layout) == questions
    assert load_questions(LAYOUTS / file, limit=2) == questions[:2]
    for other in set(layouts.LAYOUTS) - {layout, "flashrag"}:
        with pytest.raises(ValueError, match=f"{file}:1.* \\(layout {other}\\)"):
            load_questions(LAYOUTS / file, layout=other)


@needs_shared
def test_answers_in_real_files():
    aliases = load_questions(LAYOUTS / "musique_original.jsonl")[2].golden_answers
    assert aliases == ["Pittsburgh Pirates", "Orioles", "Pirates", "Baltimore Orioles", "New York Mets", "Mets"]
    dpr = {question.question: question.golden_answers for question in load_questions(LAYOUTS / "dpr_qa.tsv")}
    assert dpr["where was the mona lisa kept during ww2"] == [
        "the Ingres Museum", "Château d'Amboise", "Château de Chambord", "the Loc - Dieu Abbey"]
    rows = pyarrow.parquet.read_table(LAYOUTS / "search_r1_nq.parquet").to_pylist()
    assert [question.golden_answers for question in load_questions(LAYOUTS / "search_r1_nq.parquet")] == [
        row["golden_answers"] for row in rows]
    # without id and data_source it could be FlashRAG's own; read as such, it gives FlashRAG's ids
    assert load_questions(LAYOUTS / "search_r1_nq.parquet", layout="flashrag")[0].id == "test_0"


@needs_shared
def test_golden_answers_of_popqa_hold_the_aliases_already():
    """FlashRAG's golden_answers are what Search-R1 scores against; so nothing has to be taken from the metadata."""
    questions = load_questions(LAYOUTS.parent / "questions/popqa_test.jsonl")
    aliases = [(q, alias) for q in questions for alias in json.loads(q.metadata["o_aliases"])]
    assert len(aliases) > 500 and all(alias in question.golden_answers for question, alias in aliases)


# -----------------------------------------------------------------------------
# questions: every variant by hand

def verl(truth, **changes):
    return {"data_source": "nq", "prompt": [{"role": "user", "content": "Answer the given question. ..."}],
            "reward_model": {"ground_truth": truth, "style": "rule"}, "extra_info": {"index": 3, "split": "dev"},
            "question": "who?"} | changes


@pytest.mark.parametrize("row, expected", [
    (verl("Ann"), Question("nq/dev_3", "who?", ["Ann"])),
    (verl(["Ann", "Anna"]), Question("nq/dev_3", "who?", ["Ann", "Anna"])),
    (verl({"target": "Ann"}), Question("nq/dev_3", "who?", ["Ann"])),
    (verl({"target": ["Ann", "Anna"]}), Question("nq/dev_3", "who?", ["Ann", "Anna"])),
    (verl("Ann", id="test_7", golden_answers=["not what verl scores"]), Question("nq/test_7", "who?", ["Ann"])),
    (verl("Ann", id=7, data_source=None), Question("7", "who?", ["Ann"])),
    (verl("Ann", extra_info=None), Question("nq/row_1", "who?", ["Ann"])),
    (verl("Ann", question=None, extra_info={"question": "why?"}), Question("nq/row_1", "why?", ["Ann"])),
    ({"_id": "2w", "type": "comparison", "question": "who?", "context": [["T", ["x"]]], "evidences": [["a", "b", "c"]],
      "supporting_facts": [["T", 0]], "answer": "Ann"}, Question("2w", "who?", ["Ann"])),                 # 2Wiki
    ({"id": "m", "question": "who?", "answer": "Ann", "answer_aliases": ["A."], "answerable": True, "paragraphs": []},
     Question("m", "who?", ["Ann", "A."])),
    ({"id": "f", "question": "who?", "golden_answers": ["Ann"], "metadata": {"hops": 2}},
     Question("f", "who?", ["Ann"], {"hops": 2})),
])
def test_one_row_in_every_container(tmp_path, row, expected):
    texts = {"a.jsonl": json.dumps(row), "b.json": json.dumps([row], indent=1), "c.json": json.dumps(row, indent=2),
             "d.jsonl": "\ufeff\n" + json.dumps(row) + "\r\n\r\n"}
    for name, text in texts.items():
        assert load_questions(write(tmp_path / name, text)) == [expected]
        assert load_questions(write(tmp_path / f"{name}.gz", gzip.compress(text.encode()))) == [expected]
    columns = {name: value for name, value in row.items() if name not in ("context", "supporting_facts")}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns]), tmp_path / "e.parquet")
    assert load_questions(tmp_path / "e.parquet") == [expected]


def test_dpr_quotes_and_blank_lines(tmp_path):
    path = write(tmp_path / "q.tsv", 'who?\t["Ann"]\r\n\r\n"who ""is"" it?"\t"[\'B\', ""O\'C""]"\n')
    assert load_questions(path) == [Question("1", "who?", ["Ann"]), Question("2", 'who "is" it?', ["B", "O'C"])]
    marker = tmp_path / "run"
    bad = write(tmp_path / "bad.tsv", f"who?\t[open({str(marker)!r}, 'w').name]\n")     # data, never code
    with pytest.raises(ValueError, match="bad.tsv:1: field 'answers' must be a list"):
        load_questions(bad)
    assert not marker.exists()


# -----------------------------------------------------------------------------
# questions: malformed

HOTPOT = {"_id": "h", "question": "who?", "answer": "Ann"}
MUSIQUE = {"id": "m", "question": "who?", "answer": "Ann", "answer_aliases": []}


@pytest.mark.parametrize("text, message", [
    (lines(HOTPOT, HOTPOT | {"_id": "i", "answer": ""}), ":2: field 'answer' must be a non-empty string, not ''"),
    (lines(HOTPOT, {"_id": "i", "question": "who?"}), ":2: field 'answer' is missing"),         # as in test splits
    (lines(HOTPOT, HOTPOT), ":2: id 'h' was already used on line 1"),
    (lines(HOTPOT, {"id": "f", "question": "who?", "golden_answers": ["Ann"]}), ":2: field '_id' is missing"),
    (json.dumps([HOTPOT, {"_id": "i", "answer": "Ann"}]), ":1 record 2: field 'question' is missing"),
    (json.dumps([HOTPOT, 3]), ":1 record 2: expected a JSON object, not 3"),
    (json.dumps([HOTPOT, HOTPOT], indent=1), ":7 record 2: id 'h' was already used on line 2 record 1"),
    (json.dumps([HOTPOT])[:-1], ":1 record 2: not valid JSON"),
    (json.dumps([HOTPOT])[:-5], ":1 record 1: not valid JSON"),
    (json.dumps([HOTPOT]) + " x", ":1 record 2: not valid JSON .*more after the end"),
    ("[]", ": no questions"),
    (lines(MUSIQUE, MUSIQUE | {"id": "n", "answer_aliases": None}), ":2: field 'answer_aliases' must be a list"),
    (lines(MUSIQUE, MUSIQUE | {"id": "n", "answerable": False}), ":2: field 'answerable' is false"),
    (lines(verl("Ann"), verl(3)), ":2: field 'reward_model.ground_truth' must be a list of at least 1 strings, not 3"),
    (lines(verl([])), r":1: field 'reward_model.ground_truth' must be a list of at least 1 strings, not \[\]"),
    (lines(verl({"target": None})), ":1: field 'reward_model.ground_truth' must be"),
    (lines(verl("Ann", reward_model="Ann")), ":1: fields 'reward_model' and 'extra_info' must be objects"),
    (lines(verl("Ann"), verl("Ann", extra_info=[1])), ":2: fields 'reward_model' and 'extra_info' must be objects"),
    (lines(verl("Ann", question=None)), ":1: field 'question' is missing"),
    ("who?\t['Ann']\nwhy?\n", ":2: expected 2 columns, a question and a list of answers, not 1"),
    ("who?\t['Ann']\nwhy?\tAnn\n", ":2: field 'answers' must be a list of at least 1 strings, not 'Ann'"),
    ("who?\t['Ann']\nwhy?\t[3]\n", r":2: field 'answers' must be a list of at least 1 strings, not \[3\]"),
    ("who?\t['Ann']\n \t['Ann']\n", ":2: field 'question' must be a non-empty string"),
    ("who?\t['Ann']\n\"" + "x" * 200_000, ":2: field larger than field limit"),
    ("who?\t['Ann']\n".encode() + b"wh\xff?", ":2: not UTF-8"),
    ("who?\t['Ann']\n".encode() + "é".encode()[:1], ":2: not UTF-8"),
    (lines({"question": "who?", "answer": "Ann"}), ":1: field 'id' is missing; layouts.py lists"),
    (lines(HOTPOT)[:-2] + "\n" + lines(HOTPOT), ":1: not valid JSON .*delimiter"),
    (lines(HOTPOT) + "{}}", ":2: field '_id' is missing"),
    (lines(HOTPOT) + "[" * 100_000, ":2: not valid JSON .nested too deeply"),
    (b"PAR1 and no more", ": damaged parquet file"),
    (gzip.compress(lines(HOTPOT).encode())[:-9], ": damaged gzip file"),
])
def test_malformed_questions(tmp_path, text, message):
    path = write(tmp_path / "bad", text)
    with pytest.raises(ValueError, match=f"^{path}{message}") as caught:
        load_questions(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_parquet_names_the_row_and_layouts_are_checked(tmp_path):
    rows = [verl(["Ann"], id=str(i)) for i in range(1500)] + [verl([], id="bad")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match="q.parquet:1501: field 'reward_model.ground_truth' must be"):
        load_questions(tmp_path / "q.parquet")
    with pytest.raises(ValueError, match="layout 'hotpot': must be auto, flashrag, verl, hotpotqa, musique, dpr"):
        load_questions(tmp_path / "q.parquet", layout="hotpot")
    path = write(tmp_path / "q.jsonl", lines(HOTPOT | {"id": "h2", "golden_answers": ["Bob"]}))     # both at once
    assert load_questions(path)[0].golden_answers == ["Bob"]
    assert data.resolve_questions(str(path), "test", layout="hotpotqa")[0].golden_answers == ["Ann"]


# -----------------------------------------------------------------------------
# any size of piece gives the same rows

values = st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(max_size=2), inner, max_size=3), max_leaves=6)
objects = st.dictionaries(st.text(max_size=3), values, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(objects, max_size=4), st.sampled_from(["lines", "array", "pretty"]), st.integers(1, 40), st.booleans())
def test_rows_do_not_depend_on_the_pieces(tmp_path_factory, rows, style, size, ascii):
    path = tmp_path_factory.mktemp("pieces") / "rows.json"
    if style == "array":
        text = json.dumps(rows, ensure_ascii=ascii, indent=1)
    else:
        text = "\n".join(json.dumps(row, ensure_ascii=ascii, indent=None if style == "lines" else 1) for row in rows)
    write(path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "PIECE_BYTES", size)
        found = list(layouts.read_rows(path))
    assert [row for _, row in found] == rows
    for where, row in found:            # the line is the one on which the object begins
        number = int(where.removeprefix(f"{path}:").split(" ")[0])
        rest = "\n".join(text.split("\n")[number - 1 :])
        assert json.dumps(row, ensure_ascii=ascii)[:2].strip('"') in rest and number <= text.count("\n") + 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=5), min_size=2, max_size=3),
                min_size=1, max_size=4), st.integers(1, 20))
def test_tab_rows_do_not_depend_on_the_pieces(tmp_path_factory, rows, size):
    path = tmp_path_factory.mktemp("pieces") / "rows.tsv"
    quoted = ["\t".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    write(path, "".join(line + "\n" for line in quoted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "PIECE_BYTES", size)
        assert list(layouts.read_rows(path)) == [(f"{path}:{i}", tuple(row)) for i, row in enumerate(rows, 1)]


# -----------------------------------------------------------------------------
# corpora

PASSAGES = [{"id": "1", "contents": '"Aaron"\nAaron ( or "Ahärôn") is a prophet.'},
            {"id": "2", "contents": '"Heroes "x""\nHeroes is an\talbum.'}]
TITLED = [{"id": "1", "title": "Aaron", "text": 'Aaron ( or "Ahärôn") is a prophet.'},
          {"id": "2", "title": 'Heroes "x"', "text": "Heroes is an\talbum."}]
TSV = ('id\ttext\ttitle\n1\t"Aaron ( or ""Ahärôn"") is a prophet."\tAaron\n'
       '2\t"Heroes is an\talbum."\t"Heroes ""x"""\n')


def read(path):
    return [json.loads(passage) for passage in retriever.read_corpus(path)]


def test_every_layout_of_a_corpus_is_the_same_corpus(tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    write(folder / "a.json", json.dumps(PASSAGES[0], indent=1))
    write(folder / "below/b.jsonl.gz", gzip.compress(lines(PASSAGES[1]).encode()))
    write(folder / "README.txt", "not a passage")
    files = {"a.jsonl": lines(*PASSAGES), "b.jsonl": lines(*TITLED), "c.json": json.dumps(PASSAGES, ensure_ascii=False),
             "d.json": "\n".join(json.dumps(p, indent=2) for p in PASSAGES), "psgs_w100.tsv": TSV,
             "psgs_w100.tsv.gz": gzip.compress(TSV.encode()), "e.jsonl.gz": gzip.compress(lines(*TITLED).encode())}
    paths = [folder] + [write(tmp_path / name, text) for name, text in files.items()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PASSAGES), tmp_path / "f.parquet")
    for path in paths + [tmp_path / "f.parquet"]:
        assert read(path) == PASSAGES, path


def test_index_of_a_folder_and_of_a_tsv(tmp_path):
    folder = tmp_path / "collection"
    folder.mkdir()
    write(folder / "a.json", json.dumps(PASSAGES))
    found = BM25Retriever(folder, cache_dir=tmp_path / "cache").search(["prophet", "album"], 3)
    assert [[(p.id, p.title) for p in answer] for answer in found] == [[("1", "Aaron")], [("2", 'Heroes "x"')]]
    tsv = write(tmp_path / "psgs_w100.tsv.gz", gzip.compress(TSV.encode()))
    assert BM25Retriever(tsv, cache_dir=tmp_path / "cache").search(["prophet", "album"], 3) == found
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
    write(folder / "b.json", json.dumps({"id": "3", "contents": "an album more"}))              # follows the folder
    assert len(BM25Retriever(folder, cache_dir=tmp_path / "cache").search(["album"], 3)[0]) == 2
    (tmp_path / "other").mkdir()
    write(tmp_path / "other/notes.txt", "text")
    with pytest.raises(RetrieverError, match="is it a Lucene index or json"):
        BM25Retriever(tmp_path / "other", cache_dir=tmp_path / "cache")


@needs_shared
def test_real_corpora():
    for i, expected in enumerate(
            [["contents of document 1.", 'Some more "blah" text in document2!']] + 2 * [
             ["this is the contents 1.", "this is the contents 2."]], 1):
        passages = read(LAYOUTS / f"json_collection/collection{i}")
        assert [p["id"] for p in passages] == ["doc1", "doc2"] and [p["contents"] for p in passages] == expected
    passages = read(LAYOUTS / "search_r1_corpus.jsonl")
    assert passages[0]["id"] == "0" and passages[0]["contents"].startswith('"Evan Morris"\nEvan Morris Evan L. Morris')
    assert len(passages) == len((LAYOUTS / "search_r1_corpus.jsonl").read_bytes().splitlines())


@needs_shared
def test_the_two_broken_documents():
    broken = LAYOUTS / "json_collection/collection_errors"
    with pytest.raises(ValueError, match='id_missing.json:2 record 1: no "id"; a passage is'):
        read(broken / "id_missing.json")
    with pytest.raises(ValueError, match="contents_missing.json:2 record 1: passage 'doc2' needs a non-empty"):
        read(broken / "contents_missing.json")
    with pytest.raises(ValueError, match='contents_missing.json:2 record 1: passage .doc2'):     # the first by name
        read(broken)
    with pytest.raises(ValueError, match="segment1.json:2 record 1: passage id .doc1. appears a second time"):
        read(LAYOUTS / "json_collection")


@pytest.mark.parametrize("text, message", [
    ("just a text\n", ":1: expected JSON, or a header id, text, title separated by tabs, not 'just a text'"),
    ("1\tx\tT\n2\ty\tU\n", ":1: expected JSON, or a header id, text, title"),
    (TSV + "3\tno title\n", ":4: expected 3 columns separated by tabs, not 2"),
    (TSV + "3\ta\tb\tc\n", ":4: expected 3 columns separated by tabs, not 4"),
    (TSV + "2\tx\tT\n", ":4: passage id '2' appears a second time"),
    ("id\ttext\ttitle\n", ": the corpus is empty"),
    (json.dumps(PASSAGES + [{"id": "3"}]), ":1 record 3: passage '3' needs a non-empty"),
    (json.dumps(PASSAGES + [PASSAGES[0]]), ":1 record 3: passage id '1' appears a second time"),
    (lines(*PASSAGES) + '{"id": "3", "contents": "x', ":3: not valid JSON"),
    (gzip.compress(TSV.encode())[:-4], ": damaged gzip file"),
])
def test_malformed_corpora(tmp_path, text, message):
    path = write(tmp_path / "bad", text)
    with pytest.raises(ValueError, match=f"^{path}{message}"):
        read(path)


def test_ids_in_any_order():
    seen, ids = layouts.Ids(), ["0", "1", "7", "999999", "8", "00", "01", "1000000000", "-1", "", "x", "１", "1\n"]
    assert all(seen.add(id) for id in ids) and not any(seen.add(id) for id in reversed(ids))


@pytest.mark.parametrize("name", ["psgs_w100.tsv.gz", "array.json"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch, name):
    monkeypatch.setattr(layouts, "PIECE_BYTES", 2**14)
    count, text = 20_000, "Aaron is a prophet, high priest, and the brother of Moses in the Abrahamic religions. " * 2
    if name == "array.json":
        path = write(tmp_path / name, json.dumps([{"id": str(i), "contents": text} for i in range(count)]))
    else:
        with gzip.open(tmp_path / name, "wt", compresslevel=1) as file:
            file.write("id\ttext\ttitle\n" + "".join(f'{i}\t"{text}"\tAaron\n' for i in range(count)))
        path = tmp_path / name
    tracemalloc.start()
    assert sum(1 for _ in retriever.read_corpus(path)) == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000 < count * 50 < count * len(text)      # bytes: less than a set of the ids would take


# -----------------------------------------------------------------------------
# names: a hub on this machine

FLASHRAG = [{"id": f"dev_{i}", "question": f"q{i}?", "golden_answers": ["Ann"]} for i in range(5)]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers the resolve URLs of one dataset repository as the hub does."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(f"{self.command} {self.path}")
        file = self.path.removeprefix("/datasets/RUC-NLPIR/FlashRAG_datasets/resolve/main/")
        body = self.server.files.get(file)
        self.send_response(404 if body is None else 200)
        if body is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", "0123456789" * 4)
        self.send_header("ETag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    with serving(Hub) as server:
        server.asked, server.files, server.home = [], {}, str(tmp_path / "home")
        yield server


def resolve(hub, *names, **environment):
    """The questions' ids for each of names, "benchmark/split", or the error; in a new process, because huggingface_hub
    reads its settings from the environment once. The benchmarks are small here."""
    code = """if True:
        import sys, data
        data.BENCHMARK_SIZES = dict.fromkeys(data.BENCHMARK_SIZES, 5)
        for name in sys.argv[1:]:
            try:
                print([question.id for question in data.resolve_questions(*name.split("/"), limit=2)])
            except ValueError as error:
                print("error:", error)"""
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": hub.home, "no_proxy": "127.0.0.1",
                   "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        environment.setdefault(name, "")
    process = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=60,
                             env={name: value for name, value in (os.environ | environment).items() if value})
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_benchmarks_by_name(hub):
    good = lines(*FLASHRAG).encode()
    hub.files = {"nq/test.jsonl": good, "nq/train.jsonl": good, "nq/dev.jsonl": b"", "musique/dev.jsonl": good,
                 "asqa/dev.jsonl": lines(*FLASHRAG[:3]).encode(), "popqa/test.jsonl": lines(*FLASHRAG[:3]).encode()}
    names = ["nq/test", "nq/train", "musique/test", "asqa/test", "popqa/test", "bamboogle/train"]
    answers = resolve(hub, *names)
    assert answers[:4] == 4 * ["['dev_0', 'dev_1']"]
    assert answers[4].startswith("error: popqa: 3 questions in ") and "should have 5; to use these" in answers[4]
    assert answers[5] == "error: bamboogle: no such file, and the hub dataset RUC-NLPIR/FlashRAG_datasets has no " \
                         "bamboogle/train.jsonl"
    asked = [line.split("/main/")[1] for line in hub.asked if line.startswith("HEAD")]
    assert asked == ["nq/test.jsonl", "nq/train.jsonl", "musique/dev.jsonl", "asqa/test.jsonl", "asqa/dev.jsonl",
                     "popqa/test.jsonl", "bamboogle/train.jsonl"]          # no guessing where the split is known
    hub.asked.clear()
    assert resolve(hub, *names[:3], HF_HUB_OFFLINE="1") == 3 * ["['dev_0', 'dev_1']"]      # from the cache alone
    missing, = resolve(hub, "hotpotqa/test", HF_HUB_OFFLINE="1")
    assert missing.startswith("error: hotpotqa: no such file, and the hub dataset could not be reached (LocalEntryNot")
    assert hub.asked == []
    assert resolve(hub, "nq/test") == ["['dev_0', 'dev_1']"]
    assert not any(line.startswith("GET /datasets") for line in hub.asked)                  # downloaded once


def test_a_hub_that_breaks_off(monkeypatch):
    def broken(*args, **kwargs):
        raise data.HTTPError("peer closed connection")      # httpx2.RemoteProtocolError is one, and no OSError

    monkeypatch.setattr(data, "hf_hub_download", broken)
    with pytest.raises(ValueError, match="nq: no such file, and the hub dataset could not be reached .HTTPError"):
        data.resolve_questions("nq", "test")


def test_sizes_are_those_of_the_paper():
    paper = {"nq": 3610, "triviaqa": 11313, "popqa": 14267, "hotpotqa": 7405, "2wikimultihopqa": 12576, "musique": 2417,
             "bamboogle": 125}
    sizes = {name.split("/")[0]: size for name, size in data.BENCHMARK_SIZES.items() if not name.endswith("train")}
    assert sizes == paper and sum(size for size in paper.values()) == 51713
    assert data.BENCHMARK_SIZES["nq/train"] + data.BENCHMARK_SIZES["hotpotqa/train"] == 169615     # Search-R1's
