"""
bm25_parity.py: our BM25 against pyserini's own: index by pyserini's indexer, search by its LuceneSearcher.

    python -m extras.bm25_parity corpus.jsonl questions.jsonl [more.jsonl ...] [--limit 1000]

Prints how many questions get the same ten passages with the same scores in the same order, and each that does not.
"""
import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from data import load_questions
from retriever import BM25Retriever, anserini_jar, java_home, start_java


def differences(corpus, queries, folder, k=10):
    """-> [(query, ours, theirs)] of the queries whose [(id, score)] differ. corpus: a jsonl {"id", "contents"}; folder:
    an empty one, for the indexes."""
    start_java()                                        # before pyserini does
    os.environ.setdefault("OPENAI_API_KEY", "none")     # importing the searcher imports a client that insists on one
    from pyserini.search.lucene import LuceneSearcher
    folder = Path(folder)
    (folder / "input").mkdir()
    (folder / "input/corpus.jsonl").symlink_to(Path(corpus).absolute())
    subprocess.run([                                    # what python -m pyserini.index.lucene runs
        f"{java_home()}/bin/java", "-cp", anserini_jar(), "io.anserini.index.IndexCollection", "-storeRaw",
        "-collection", "JsonCollection", "-input", folder / "input", "-index", folder / "index",
        "-generator", "DefaultLuceneDocumentGenerator", "-threads", "1"], check=True, capture_output=True)
    searcher, retriever = LuceneSearcher(str(folder / "index")), BM25Retriever(corpus, cache_dir=folder / "cache")
    if searcher.num_docs != retriever.n_passages:
        raise ValueError(f"{corpus}: {searcher.num_docs} passages in pyserini's index, {retriever.n_passages} in ours")
    ours = [[(passage.id, passage.score) for passage in passages] for passages in retriever.search(queries, k)]
    theirs = [[(hit.docid, hit.score) for hit in searcher.search(query, k)] for query in queries]
    return [row for row in zip(queries, ours, theirs, strict=True) if row[1] != row[2]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--limit", type=int, default=1000)
    args = parser.parse_args()
    queries = [question.question for path in args.questions for question in load_questions(path)][: args.limit]
    with tempfile.TemporaryDirectory() as folder:
        different = differences(args.corpus, queries, folder)
    for query, ours, theirs in different:
        print(f"{query}\n  ours   {ours}\n  theirs {theirs}")
    print(f"{args.corpus}: {len(queries) - len(different)} of {len(queries)} questions the same")


if __name__ == "__main__":
    main()
