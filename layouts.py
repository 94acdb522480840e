"""
layouts.py: the files of the field as they are published, read row by row: question sets and corpora.

    for where, row in question_rows("hotpot_dev_fullwiki_v1.json"):     # {"id", "question", "golden_answers", ...}
    for where, row in corpus_rows("psgs_w100.tsv.gz"):                  # {"id", "contents"} or {"id", "title", "text"}

`where` is "file:line" (in a JSON array "file:line record n", in parquet "file:row"): error messages begin with it.

Layouts of questions, told apart by what is in the first row, or named:
    flashrag   {"id", "question", "golden_answers": [...]}      FlashRAG, and our own
    verl       {"reward_model": {"ground_truth": x}, ...}       verl, Search-R1; x is "a", ["a"] or {"target": ["a"]}
    hotpotqa   {"_id", "question", "answer"}                    HotpotQA, 2WikiMultiHopQA
    musique    {"id", "question", "answer", "answer_aliases"}   MuSiQue
    dpr        question TAB ['answer', 'another']               DPR's nq-test.csv and the like
A corpus has rows {"id", "contents"} (Search-R1's wiki-18, Anserini's JsonCollection) or {"id", "title", "text"}, as in
DPR's psgs_w100.tsv, which has a header line. It is a file, or a folder with *.json, *.jsonl and *.gz files.

Either may be JSON (an object a line, objects that go over several lines, or an array of objects), parquet, or separated
by tabs; gzipped or not. At no time more than one piece of the file is in memory. Nothing is skipped but blank lines.
"""
import ast
import codecs
import csv
import gzip
import json
import os
import re
import zlib
from pathlib import Path

from tqdm import tqdm

PIECE_BYTES = 2**20     # read at a time
RECORD_CHARS = 2**24    # a JSON object longer than that is taken for one that is never closed
BAR_BYTES = 2**26       # reading a larger file shows a progress bar, on a terminal
SPACE = r"[ \t\r\n]*"


# -----------------------------------------------------------------------------
# json, without what Python's json lets through

class KeyTwice(ValueError):
    pass


def unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise KeyTwice("a key appears twice in one object")
    return dict(pairs)


def check_values(value):
    """ValueError for NaN and infinity, for half a surrogate pair (no tokenizer or file takes it), for nesting too
    deep."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def strict_json(text):
    """json.loads, but everything wrong is a one-line ValueError."""
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_values(value)
    return value


# -----------------------------------------------------------------------------
# a file -> rows

def read_rows(path):
    """Yields (where, row). A row is a tuple of strings if the file is separated by tabs, else what JSON or parquet
    hold, which should be a dict. ValueError "file:line: ..." for bytes that cannot be read as what they seem to be."""
    start = next(pieces(path), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"PAR1"):
        return parquet_rows(path)
    return tab_rows(path) if start[:1] not in b"{[" else json_rows(path)    # an empty file is JSON without objects


def pieces(path):
    """Yields the bytes of a file, unpacked if they are gzip's."""
    size = os.path.getsize(path)
    with open(path, "rb") as file, tqdm(desc=os.path.basename(path), total=size, unit="B", unit_scale=True, leave=False,
                                        disable=None if size > BAR_BYTES else True) as bar:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        unpacked = gzip.open(file) if packed else file
        try:
            while piece := unpacked.read(PIECE_BYTES):
                yield piece
                bar.update(file.tell() - bar.n)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from None


def text_pieces(path):
    """Yields the text of a file in UTF-8, with or without byte order mark."""
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    try:
        for piece in pieces(path):
            text = decoder.decode(piece)
            yield text
            line += text.count("\n")
        decoder.decode(b"", final=True)                                     # raises if half a character is left
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")
        raise ValueError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def json_rows(path):
    """The JSON values in a file, one after the other, or those of the one array it holds."""
    more, decode = text_pieces(path), json.JSONDecoder(object_pairs_hook=unique).raw_decode
    text, ended, record = next(more, ""), False, 0
    array = re.match(SPACE + r"\[", text)
    gap = re.compile(SPACE + ",?" + SPACE if array else SPACE)
    at = array.end() if array else 0
    line = 1 + text.count("\n", 0, at)
    while True:                                                             # text[at:] is what is not used yet
        begin = gap.match(text, at).end()
        line += text.count("\n", at, begin)
        where = f"{path}:{line}" + (f" record {record + 1}" if array else "")
        if begin == len(text) and ended and not array:
            return
        if array and text.startswith("]", begin):
            if text[begin + 1 :].strip() or any(piece.strip() for piece in more):
                raise ValueError(f"{where}: not valid JSON (there is more after the end of the array)")
            return
        try:
            row, end = decode(text, begin)
        except KeyTwice as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from None
        except (ValueError, RecursionError) as error:
            if not ended and len(text) - at < RECORD_CHARS:                 # perhaps it goes on in the next piece
                piece = next(more, None)
                text, at, ended = text[begin:] + (piece or ""), 0, piece is None
                continue
            problem = f"{error.msg}: {text[error.pos :][:20]!r}" if isinstance(error, json.JSONDecodeError) else (
                "nested too deeply" if isinstance(error, RecursionError) else error)
            raise ValueError(f"{where}: not valid JSON ({problem})") from None
        yield where, row
        line, at, record = line + text.count("\n", begin, end), end, record + 1


def tab_rows(path):
    """Tuples of strings. Python's csv reader, as in DPR's own loader: a text in quotes, with quotes in it doubled."""
    reader, line = csv.reader(lines(path), delimiter="\t"), 1
    try:
        for row in reader:
            if row:
                yield f"{path}:{line}", tuple(row)
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: {error}") from None


def lines(path):
    rest = ""
    for text in text_pieces(path):
        *whole, rest = (rest + text).split("\n")
        yield from (line + "\n" for line in whole)
    if rest:
        yield rest


def parquet_rows(path):
    import pyarrow                                                          # slow to load, and few files are parquet
    import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged parquet file ({str(error).splitlines()[0]})") from None


# -----------------------------------------------------------------------------
# questions

def question_rows(path, layout="auto"):
    """Yields (where, row), row as in the layout flashrag whatever the file's is; what is in the layout flashrag already
    is not checked. ValueError "file:line: what is wrong with which field"."""
    if layout not in ("auto", *LAYOUTS):
        raise ValueError(f"layout {layout!r}: must be auto, {', '.join(LAYOUTS)}")
    for number, (where, row) in enumerate(read_rows(path), 1):
        layout = guess_layout(row) if layout == "auto" else layout          # one layout a file
        try:
            if not isinstance(row, tuple if layout == "dpr" else dict):
                expected = "a question, a tab and a list of answers" if layout == "dpr" else "a JSON object"
                raise ValueError(f"expected {expected}, not {row!r:.80}")
            row = LAYOUTS[layout](row, number)
        except ValueError as error:
            raise ValueError(f"{where}: {error} (layout {layout})") from None
        yield where, row


def guess_layout(row):
    if isinstance(row, tuple):
        return "dpr"
    marks = {"reward_model": "verl", "golden_answers": "flashrag", "_id": "hotpotqa", "answer_aliases": "musique"}
    return next((layout for mark, layout in marks.items() if isinstance(row, dict) and mark in row), "flashrag")


def flashrag(row, number):
    return row


def verl(row, number):
    """Search-R1's test.parquet joins benchmarks that number their questions alike, so data_source goes into the id."""
    truth, info = row.get("reward_model"), row.get("extra_info") or {}
    if not isinstance(truth, dict) or not isinstance(info, dict):
        raise ValueError("fields 'reward_model' and 'extra_info' must be objects")
    truth = truth.get("ground_truth")
    truth = truth.get("target") if isinstance(truth, dict) else truth
    question = {"question": row.get("question") or info.get("question")}    # verl's prompt holds instructions as well
    id = row.get("id") or f"{info.get('split', 'row')}_{info.get('index', number)}"
    source = f"{row['data_source']}/" if row.get("data_source") else ""
    return {"id": f"{source}{id}", "question": text(question, "question"),
            "golden_answers": strings([truth] if isinstance(truth, str) else truth, "reward_model.ground_truth")}


def hotpotqa(row, number):
    return {"id": text(row, "_id"), "question": text(row, "question"), "golden_answers": [text(row, "answer")]}


def musique(row, number):
    """An alias is as good as the answer, as in MuSiQue's own evaluation."""
    if row.get("answerable") is False:
        raise ValueError("field 'answerable' is false: only questions with an answer can be scored, take MuSiQue-Ans")
    answers = [text(row, "answer")] + strings(row.get("answer_aliases"), "answer_aliases", least=0)
    return {"id": text(row, "id"), "question": text(row, "question"), "golden_answers": answers}


def dpr(row, number):
    """There is no id: questions are numbered from 1."""
    if len(row) != 2:
        raise ValueError(f"expected 2 columns, a question and a list of answers, not {len(row)}")
    try:
        answers = ast.literal_eval(row[1])                                  # DPR itself calls eval
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        answers = row[1]
    return {"id": str(number), "question": text({"question": row[0]}, "question"),
            "golden_answers": strings(answers, "answers")}


LAYOUTS = {"flashrag": flashrag, "verl": verl, "hotpotqa": hotpotqa, "musique": musique, "dpr": dpr}


def text(row, field):
    value = row.get(field)
    if value is None:
        raise ValueError(f"field {field!r} is missing")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r} must be a non-empty string, not {value!r:.80}")
    return value


def strings(value, field, least=1):
    if not isinstance(value, list) or len(value) < least or not all(isinstance(item, str) for item in value):
        raise ValueError(f"field {field!r} must be a list of at least {least} strings, not {value!r:.80}")
    return value


# -----------------------------------------------------------------------------
# corpora

def corpus_files(path):
    """The files of a corpus, in a fixed order: itself, or those with Anserini's suffixes in and below a folder."""
    if not Path(path).is_dir():
        return [path]
    return sorted(file for file in Path(path).rglob("*.*") if file.suffix in (".json", ".jsonl", ".gz"))


def corpus_rows(path):
    """Yields (where, row), which should be a dict {"id", "contents"} or {"id", "title", "text"}; retriever.read_corpus
    checks that. ValueError for a tab-separated file without header, or with a column too many or too few."""
    for file in corpus_files(path):
        header = None
        for where, row in read_rows(file):
            if isinstance(row, tuple):
                if header is None:
                    header = row
                    if sorted(header) != ["id", "text", "title"]:
                        raise ValueError(f"{where}: expected JSON, or a header id, text, title separated by tabs, "
                                         f"not {' '.join(row)[:80]!r}")
                    continue
                if len(row) != 3:
                    raise ValueError(f"{where}: expected 3 columns separated by tabs, not {len(row)}")
                row = dict(zip(header, row))
            yield where, row


class Ids:
    """Which ids were there already: a bit each for numbers below 10^9, as of wiki-18's 21 million, else a string in a
    set, about 100 bytes."""

    def __init__(self):
        self.bits, self.others = bytearray(), set()

    def add(self, id):
        """-> whether the id is new."""
        if re.fullmatch("0|[1-9][0-9]{0,8}", id):
            byte, bit = divmod(int(id), 8)
            self.bits.extend(bytes(max(0, byte + 1 - len(self.bits))))
            new = not self.bits[byte] >> bit & 1
            self.bits[byte] |= 1 << bit
        else:
            new = id not in self.others
            self.others.add(id)
        return new
