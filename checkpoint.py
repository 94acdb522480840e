"""
checkpoint.py — the files of a run. Killed, interrupted, out of memory or out of disk: nothing finished is lost.

runs/NAME/checkpoint-STEP/ is a Hugging Face folder (model.safetensors, tokenizer, protocol.json), optimizer.safetensors
and optimizer.json (AdamW's moments and the float32 masters; its settings), and manifest.json with the size and SHA-256
of every other file; with ppo, the same for the critic. safetensors and JSON only: nothing that could run code when it
is read. STEP counts the finished steps.

A checkpoint is written aside, synced to the disk, and renamed: what has the name is whole. The two newest are kept, so
that there is one to go back to should the newest be damaged later. The older one goes before a new one is written:
the disk never holds more than two, each of 12 bytes a parameter in float32, 14 in bfloat16.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollout import save_protocol


@contextlib.contextmanager
def hold_interrupts():
    """Ctrl-C and SIGTERM inside the block wait for its end, so that weights, optimizer, metrics and files always belong
    together."""
    caught = []

    def note(*_):
        caught.append(True)
        os.write(2, b"\ninterrupted; finishing the step and the files first\n")  # print is not safe in a signal handler

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


@contextlib.contextmanager
def whole_or_nothing(optimizer):
    """An exception inside the block leaves the weights and the MasterAdamW as they were before it, bit for bit.

    A step has several optimizer steps, and any of them may fail. The copy lies in main memory, 12 bytes a parameter (14
    in bfloat16), because a GPU has no room for it.
    """
    def copies(tensors):
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    weights = optimizer.parameters + optimizer.own_masters()
    state = optimizer.adamw.state                       # parameter -> {"step", "exp_avg", "exp_avg_sq"}
    before, moments = copies(weights), {p: copies(tensors.values()) for p, tensors in state.items()}
    learning_rate = optimizer.adamw.param_groups[0]["lr"]
    try:
        yield
    except BaseException:
        optimizer.adamw.param_groups[0]["lr"] = learning_rate
        for weight, value in zip(weights, before):
            weight.data.copy_(value)
            weight.grad = None
        for parameter in list(state):
            if parameter in moments:
                for tensor, value in zip(state[parameter].values(), moments[parameter]):
                    tensor.copy_(value)
            else:                                       # made inside the block
                del state[parameter]
        raise


@contextlib.contextmanager
def lock(folder):
    """Only one process at a time writes a run folder; ValueError in the others. The kernel opens the lock when its
    holder ends, however it ends."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is writing this run; stop it, or wait for its end") from None
        yield


# -----------------------------------------------------------------------------
# single files

def sync(*paths):
    """What was written to these files and folders survives a power cut."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def append_line(path, *rows):
    # backslashreplace: half a surrogate pair, which is no UTF-8, becomes \ud800, which is JSON
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path):
    """The rows of a jsonl file of this run; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]  # bytes: see trim


def write_json(path, value):
    aside = path.with_suffix(".tmp")
    try:
        aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8",
                         errors="backslashreplace")
        sync(aside)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def trim(path, step):
    """Cut off the lines of steps at or after `step`, written after the checkpoint that a resumed run starts from."""
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as file:  # bytes: splitlines() would split at a U+2028 that the policy sampled
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # an interrupted write
                break
            try:
                if json.loads(line)["step"] >= step:
                    break
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number}: damaged, not a line that this run wrote; move the file away, and "
                                 "--resume goes on without it") from None
            end += len(line)
    os.truncate(path, end)


# -----------------------------------------------------------------------------
# checkpoints

def checkpoints(folder):
    """Oldest first."""
    return sorted(folder.glob("checkpoint-" + "[0-9]" * 6))


def latest_checkpoint(folder):
    return max(checkpoints(folder), default=None)


def save_optimizer(optimizer, folder, name="optimizer"):
    state = optimizer.state_dict()
    tensors = {f"{i}.{name}": tensor.contiguous() for i, tensors in state["adamw"]["state"].items()
               for name, tensor in tensors.items()}     # "0.exp_avg": the first moment of the first parameter
    tensors.update({f"{i}.master": master.contiguous() for i, master in enumerate(state["masters"])})
    save_file(tensors, folder / f"{name}.safetensors")
    write_json(folder / f"{name}.json", {"param_groups": state["adamw"]["param_groups"]})


def load_optimizer(optimizer, folder, name="optimizer"):
    state, masters = {}, {}
    for key, tensor in load_file(folder / f"{name}.safetensors").items():
        i, key = key.split(".")
        if key == "master":
            masters[int(i)] = tensor
        else:
            state.setdefault(int(i), {})[key] = tensor
    settings = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    optimizer.load_state_dict({"adamw": {"state": state, **settings}, "masters": [masters[i] for i in sorted(masters)]})


def save_critic(critic, folder):
    save_file(critic.head.state_dict(), folder / "critic.safetensors")
    save_optimizer(critic.optimizer, folder, "critic_optimizer")


def load_critic(critic, folder):
    critic.head.load_state_dict(load_file(folder / "critic.safetensors"))
    load_optimizer(critic.optimizer, folder, "critic_optimizer")


def fingerprint(path):
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def save_checkpoint(folder, step, model, tokenizer, protocol, optimizer, critic=None):
    """Write checkpoint-STEP aside, sync, rename: at any moment the newest checkpoint is whole."""
    target, aside = folder / f"checkpoint-{step:06d}", folder / "checkpoint.tmp"
    try:
        for path in [aside, *checkpoints(folder)[:-1]]:
            shutil.rmtree(path, ignore_errors=True)
        model.save_pretrained(aside)
        try:
            tokenizer.save_pretrained(aside)
        except Exception as error:  # the tokenizers library has nothing narrower for a full disk
            raise OSError(error) from error
        save_protocol(protocol, aside)
        save_optimizer(optimizer, aside)
        if critic:
            save_critic(critic, aside)
        files = {path.relative_to(aside).as_posix(): fingerprint(path) for path in sorted(aside.rglob("*"))
                 if path.is_file()}
        write_json(aside / "manifest.json", {"step": step, "files": files})
        sync(*aside.rglob("*"), aside, *folder.glob("*.jsonl"))  # its metrics must not be younger than a checkpoint
        os.replace(aside, target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        sys.exit(f"error: {target} could not be written ({error}); free some space. The previous checkpoint, if any, "
                 "is intact")


def damage(checkpoint):
    """What is wrong with a checkpoint by its manifest, "" if nothing is. Reads all of it: seconds for gigabytes."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        if checkpoint.name != f"checkpoint-{manifest['step']:06d}":
            return f"it holds step {manifest['step']}"
        for name, expected in manifest["files"].items():
            if (size := (checkpoint / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if fingerprint(checkpoint / name) != expected:
                return f"the content of {name} has changed"
    except FileNotFoundError as error:
        name = pathlib.Path(error.filename).name
        return f"{name} is missing" + (", an earlier version wrote this" if name == "manifest.json" else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is damaged"
    return ""


def whole_checkpoint(folder):
    """The newest checkpoint if it is whole. ValueError names what is wrong with it, and the whole one to go on from."""
    newest, *older = reversed(checkpoints(folder))
    if wrong := damage(newest):
        good = next((checkpoint for checkpoint in older if not damage(checkpoint)), None)
        raise ValueError(f"{newest} cannot be used: {wrong}; " + (
            f"delete it, and --resume goes on from {good}, which is whole" if good else
            "no other checkpoint is whole, start again"))
    return newest
