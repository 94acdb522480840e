"""
checkpoint.py — the files of a run: written aside and renamed, so that an interruption or a full disk loses nothing.

runs/NAME/checkpoint-STEP/ is a Hugging Face folder (model.safetensors, tokenizer, protocol.json) plus optimizer.pt.
STEP counts the finished steps. Exactly the newest is kept, and the older one until the newer is whole.
"""
import contextlib
import json
import os
import shutil
import signal
import sys

import torch
from safetensors import SafetensorError

from rollout import save_protocol


@contextlib.contextmanager
def hold_interrupts():
    """Ctrl-C inside the block waits for its end, so that weights, optimizer, metrics and files always belong
    together."""
    caught = []

    def note(*_):
        caught.append(True)
        os.write(2, b"\ninterrupted; finishing the step and the files first\n")  # print is not safe in a signal handler

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        raise KeyboardInterrupt


def latest_checkpoint(folder):
    return max(folder.glob("checkpoint-" + "[0-9]" * 6), default=None)


def append_line(path, *rows):
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path):
    """The rows of a jsonl file of this run; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]  # bytes: see trim


def write_json(path, value):
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def save_checkpoint(folder, step, model, tokenizer, protocol, optimizer, critic=None):
    """Write checkpoint-STEP aside, rename it, then remove older ones: at any moment there is a whole one, or none
    yet."""
    target, aside = folder / f"checkpoint-{step:06d}", folder / "checkpoint.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        save_protocol(protocol, aside)
        torch.save(optimizer.state_dict(), aside / "optimizer.pt")
        if critic:
            torch.save(critic.state_dict(), aside / "critic.pt")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(aside, ignore_errors=True)
        sys.exit(f"error: {target} could not be written ({error}); free some space. The previous checkpoint, if any, "
                 "is intact")
    for old in folder.glob("checkpoint-" + "[0-9]" * 6):
        if old != target:
            shutil.rmtree(old)


def trim(path, step):
    """Drop the lines of steps at or after `step`, written after the checkpoint that a resumed run starts from."""
    if path.exists():
        with open(path, "rb") as file:  # bytes: splitlines() would split at a U+2028 that the policy sampled
            # an interrupted write leaves a last line without its end
            kept = [line for line in file if line.endswith(b"\n") and json.loads(line)["step"] < step]
        aside = path.with_suffix(".tmp")
        aside.write_bytes(b"".join(kept))
        os.replace(aside, path)
