"""Shared by the tests: a tiny byte-level tokenizer whose merges straddle tags, tiny random models, a retriever without
Java."""
import contextlib
import http.server
import os
import pathlib
import signal
import sys
import threading

os.environ["HF_HUB_OFFLINE"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)    # scripts start background jobs with SIGINT ignored
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from retriever import Passage


def make_tokenizer(pad_is_eos=False):
    """Byte-level BPE without pre-tokenisation at punctuation, so that "</search>\\n" or "><" become single tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    text = ["x</search>\n", "y</answer>.\n", " <search> <answer>"] * 50
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", "<pad>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>",
                                   pad_token="<eos>" if pad_is_eos else "<pad>")


def make_model(tokenizer, seed=0, **changes):
    torch.manual_seed(seed)
    settings = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None,
                    eos_token_id=tokenizer.eos_token_id, initializer_range=0.3)
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes})).float()


@contextlib.contextmanager
def serving(handler):
    """A server on a free port of this machine that answers with `handler`, until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FakeRetriever:
    """Answers every query with k passages that quote it, and keeps the batches it was asked."""

    def __init__(self, text="about {query}", title="Title"):
        self.text, self.title, self.batches = text, title, []

    def search(self, queries, k):
        self.batches.append(list(queries))
        return [[Passage(str(i), self.title, self.text.format(query=query), 1.0) for i in range(k)]
                for query in queries]


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    return make_model(tokenizer)
