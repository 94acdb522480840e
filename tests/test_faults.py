"""What must not lose anything: kill -9, signals, full and read-only disks, no memory, NaN, damaged files, two processes
at once, a dying search server, odd environments. And what must not get in: code from a model folder, the network.

The processes that are killed are forked from one that has imported everything already (multiprocessing's forkserver),
so that a start costs milliseconds.
"""
import contextlib
import functools
import http.server
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer
from test_train import (assert_same_run, interrupt, make_command, metrics, on_call, raising, read_lines,
                        really_out_of_memory, run, straight, toy)

import checkpoint
import retriever
import train
import world
from checkpoint import checkpoints, damage, latest_checkpoint, load_optimizer, save_checkpoint, whole_or_nothing
from policy import MasterAdamW, load_policy
from retriever import Passage
from rollout import SEARCH_R1

KILLS = 20
ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]
FLAGS = ["--steps", 4]                                  # those of the fixture `straight`


def flip(path, place=-1):
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def one_line(stop, capsys):
    """The one line on stderr, whether main printed it or sys.exit will."""
    printed = [line for line in capsys.readouterr().err.splitlines() if line and "interrupted; finishing" not in line]
    if isinstance(stop.value.code, str):
        printed += stop.value.code.splitlines()
    (line,) = printed
    assert stop.value.code == 1 or line.startswith("error: ")
    return line


# -----------------------------------------------------------------------------
# other processes

@pytest.fixture(scope="module")
def forks():
    """fork(function, *arguments) -> a started process with a Python that has imported all of this."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_faults"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        context.Process(target=print).start()           # starts the server

    def fork(function, *arguments):
        process = context.Process(target=function, args=arguments)
        process.start()
        return process

    return fork


def command_in_child(toy, folder, flags, before=None):
    """python train.py in `folder`, with its output in output.txt; `before` is called first."""
    output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    with pytest.MonkeyPatch.context() as patch:
        command = make_command(toy, folder, patch)
        if before:
            before()
        command(*flags) if "--resume" not in flags else train.main([str(flag) for flag in flags])


def kill_at_event(number, folder):
    """kill -9 at the `number`-th time that Python opens, makes, renames, truncates or removes something in `folder`."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if (event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
                and str(folder) in os.path.abspath(os.fsdecode(arguments[0])
                                                   if isinstance(arguments[0], (str, bytes, os.PathLike)) else "")):
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


def test_killed_at_20_random_moments_and_resumed_is_the_same_run(toy, tmp_path, forks):
    """Half of them at a random time, half at a random change of the run folder."""
    flags = ["--steps", 6, "--save-every", 1, "--eval-every", 3]
    whole = forks(command_in_child, toy, tmp_path, [*flags, "--name", "whole"])
    started = time.perf_counter()
    whole.join()
    longest = time.perf_counter() - started
    assert whole.exitcode == 0
    rng, kills, finished, resumes, torn = random.Random(0), 0, 0, 0, 0
    while True:
        folder, spared = tmp_path / "runs" / f"run{finished}", kills == KILLS
        if latest_checkpoint(folder):
            arguments, resumes = ["--resume", f"runs/{folder.name}"], resumes + 1
        else:                                           # killed before the first checkpoint: nothing to lose yet
            shutil.rmtree(folder, ignore_errors=True)
            arguments = [*flags, "--name", folder.name]
        at_event = functools.partial(kill_at_event, rng.randrange(150), folder) if kills % 2 and not spared else None
        process = forks(command_in_child, toy, tmp_path, arguments, at_event)
        process.join(None if at_event or spared else rng.uniform(0, longest / 2))
        process.kill()
        process.join()
        if process.exitcode == 0:
            assert_same_run(tmp_path / "runs/whole", folder)
            scores = [(tmp_path / "runs" / name / "eval.json").read_bytes() for name in ("whole", folder.name)]
            assert scores[0] == scores[1]
            finished += 1
            if spared:
                break
        else:
            assert process.exitcode == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
            kills, torn = kills + 1, torn + (folder / "checkpoint.tmp").exists()
    assert resumes >= KILLS / 2 and torn >= KILLS / 5   # in the middle of a run, of a checkpoint


def save_in_child(folder, event):
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    kill_at_event(event, folder)
    model = make_model(tokenizer, seed=3)
    save_checkpoint(folder, 3, model, tokenizer, SEARCH_R1, MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0))


def test_killed_at_every_event_of_the_checkpoint_write(tmp_path, forks):
    tokenizer = make_tokenizer()
    for step in (1, 2):
        model = make_model(tokenizer, seed=step)
        save_checkpoint(tmp_path, step, model, tokenizer, SEARCH_R1, MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0))
    shutil.copytree(tmp_path, tmp_path / "kept")
    newest, event, exitcode = [], 0, None
    while exitcode != 0:
        shutil.rmtree(folder := tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", folder)
        process = forks(save_in_child, folder, event)
        process.join()
        exitcode, event = process.exitcode, event + 1
        assert exitcode in (0, -signal.SIGKILL)
        newest.append(checkpoint.whole_checkpoint(folder).name)     # ValueError if it is not whole
    assert len(newest) > 30 and newest == sorted(newest)
    assert set(newest[:-1]) == {"checkpoint-000002", "checkpoint-000003"}
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-000002", "checkpoint-000003"]


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited for 30 seconds")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside(number, toy, tmp_path, forks, run, straight):
    process = forks(command_in_child, toy, tmp_path, [*FLAGS, "--name", "run"])
    wait_for(lambda: (tmp_path / "runs/run/metrics.jsonl").exists())
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode in (130, 0)                 # 0 where the run was faster
    output = (tmp_path / "output.txt").read_text()
    assert "Traceback" not in output
    if process.exitcode == 130:
        assert "interrupted after step" in output and "python train.py --resume runs/run" in output
        run.resume()
    assert_same_run(straight, tmp_path / "runs/run")


def terminate():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("where, call, done", [
    ("load_policy", 0, None),       # set-up: nothing is left
    ("rollout", 0, 0),              # the evaluation before training
    ("rollout", 3, 2),              # the rollouts of step 2
    ("update", 2, 3),               # the update of step 2, finished first
    ("append_line", 1, None),       # the metrics and trajectories
    ("save_checkpoint", 0, 0), ("save_checkpoint", 1, 4),
    ("evaluate", 1, 4),
])
def test_sigterm_is_ctrl_c_in_every_phase(where, call, done, run, straight, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(train, where, on_call(call, terminate, getattr(train, where)))
        with pytest.raises(SystemExit) as stop:
            run(*FLAGS)
    assert stop.value.code == 130 and signal.getsignal(signal.SIGTERM) is handler
    if where == "load_policy":
        assert not pathlib.Path("runs").exists()
        return
    folder = pathlib.Path("runs/run")
    assert done in (None, int(latest_checkpoint(folder).name[-6:])) and not damage(latest_checkpoint(folder))
    assert "--resume runs/run" in capsys.readouterr().err
    run.resume()
    assert_same_run(straight, folder)


def sleep_where_seen():
    pathlib.Path("asleep").touch()
    time.sleep(60)


def slowly():
    train.rollout = on_call(2, sleep_where_seen, train.rollout)


def test_two_processes_cannot_write_one_run(toy, tmp_path, forks, run, straight):
    process = forks(command_in_child, toy, tmp_path, [*FLAGS, "--name", "run"], slowly)
    wait_for(lambda: (tmp_path / "asleep").exists())     # it writes nothing from here on
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="error: runs/run: another process is writing this run") as stop:
        run.resume()
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    process.kill()                                      # the lock of a dead process is none
    process.join()
    run.resume()
    assert_same_run(straight, tmp_path / "runs/run")


def world_in_child(cache):
    def slow_warm_start(*arguments, **options):
        with open(cache / "made", "a") as file:
            file.write("x")
        time.sleep(0.5)

    world.open_retriever = lambda *arguments, **options: None
    world.demonstrations = lambda *arguments, **options: []
    world.load_demonstrations = lambda *arguments, **options: []
    world.warm_start = slow_warm_start
    folder = world.prepare(cache, 0, log=lambda line: open(cache / "log", "a").write(line + "\n"))
    sys.exit(0 if (folder / "model.safetensors").is_file() else 1)


def test_two_processes_make_one_world(tmp_path, forks):
    processes = [forks(world_in_child, tmp_path) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0] and (tmp_path / "made").read_text() == "x"
    assert "another process is making" in (tmp_path / "log").read_text()
    assert sorted(path.suffix for path in tmp_path.glob("world-*")) == ["", ".lock"]    # nothing half-made is left


def test_a_world_half_made_by_a_dead_process_is_made_again(tmp_path, forks):
    process = forks(world_in_child, tmp_path)
    wait_for(lambda: (tmp_path / "made").exists())
    process.kill()
    process.join()
    (aside,) = tmp_path.glob("world-*.tmp")
    assert aside.stat().st_mode & 0o777 == 0o700        # private while it is made
    process = forks(world_in_child, tmp_path)
    process.join()
    assert process.exitcode == 0 and not aside.exists()


# -----------------------------------------------------------------------------
# damaged files

DAMAGE = {
    "weights truncated": (lambda folder: os.truncate(folder / "model.safetensors", 100_000),
                          "model.safetensors has 100000 bytes instead of"),
    "a byte of the weights": (lambda folder: flip(folder / "model.safetensors"),
                              "the content of model.safetensors has changed"),
    "a byte of the optimizer": (lambda folder: flip(folder / "optimizer.safetensors", -1000),
                                "the content of optimizer.safetensors has changed"),
    "a beta edited": (lambda folder: (folder / "optimizer.json").write_bytes(
        (folder / "optimizer.json").read_bytes().replace(b"0.9,", b"0.8,")),
        "the content of optimizer.json has changed"),
    "optimizer missing": (lambda folder: (folder / "optimizer.safetensors").unlink(),
                          "optimizer.safetensors is missing"),
    "tokenizer missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "manifest cut off": (lambda folder: os.truncate(folder / "manifest.json", 50), "manifest.json is damaged"),
    "manifest of zeros": (lambda folder: (folder / "manifest.json").write_bytes(bytes(99)), "manifest.json is damaged"),
    "manifest a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    "an earlier version": (lambda folder: (folder / "manifest.json").unlink(),
                           "manifest.json is missing, an earlier version wrote this"),
    "another step's": (lambda folder: folder.rename(folder.with_name("checkpoint-000009")), "it holds step 4"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_offered(what, tmp_path, monkeypatch, halves):
    change, message = DAMAGE[what]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(halves, "runs/run")
    change(pathlib.Path("runs/run/checkpoint-000004"))
    newest = latest_checkpoint(pathlib.Path("runs/run"))
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", "runs/run"])
    assert stop.value.code == (f"error: {newest} cannot be used: {stop.value.code.split('used: ')[1]}")
    assert message in stop.value.code and "\n" not in stop.value.code
    assert "delete it, and --resume goes on from runs/run/checkpoint-000003, which is whole" in stop.value.code
    flip(pathlib.Path("runs/run/checkpoint-000003/model.safetensors"))
    with pytest.raises(SystemExit, match="no other checkpoint is whole, start again"):
        train.main(["--resume", "runs/run"])


@pytest.fixture(scope="module")
def halves(toy, tmp_path_factory):
    """A finished run of 4 steps, with its checkpoints 3 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        return make_command(toy, tmp_path_factory.mktemp("halves"), patch)(*FLAGS, "--save-every", 1)


def test_going_back_to_the_last_good_checkpoint_is_the_same_run(run, halves, straight):
    shutil.copytree(halves, "runs/run")
    shutil.rmtree("runs/run/checkpoint-000004")
    (pathlib.Path("runs/run") / "config.json").write_bytes((straight / "config.json").read_bytes())
    run.resume()
    assert_same_run(straight, pathlib.Path("runs/run"))


@pytest.mark.parametrize("file, content, message", [
    ("config.json", b"{", "runs/run/config.json: not the settings of a run of this version"),
    ("config.json", b"[]", "runs/run/config.json: not the settings of a run of this version"),
    ("config.json", b'{"nonsense": 1}', "runs/run/config.json: not the settings of a run of this version"),
    ("metrics.jsonl", b'{"step": 0}\n\x00\x00\n', "runs/run/metrics.jsonl:2: damaged"),
    ("trajectories.jsonl", b"[0]\n", "runs/run/trajectories.jsonl:1: damaged"),
])
def test_other_damaged_files_are_named(file, content, message, run, halves):
    shutil.copytree(halves, "runs/run")
    pathlib.Path("runs/run", file).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run.resume("--steps", 5)
    assert message in stop.value.code and "\n" not in stop.value.code


def test_a_checkpoint_is_safetensors_and_json(halves):
    assert {path.suffix for path in latest_checkpoint(halves).rglob("*")} == {".safetensors", ".json"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_survives_the_round_trip_bit_for_bit(dtype, tmp_path):
    model = make_model(make_tokenizer()).to(dtype)
    optimizer = MasterAdamW(model, 1e-3, (0.9, 0.98), 0.01)
    for seed in range(2):
        some_gradients(model, optimizer, seed)
        optimizer.step(1e-3 / (seed + 3), 1.0)
    checkpoint.save_optimizer(optimizer, tmp_path)
    again = MasterAdamW(model, 7.0, (0.5, 0.5), 0.5)
    load_optimizer(again, tmp_path)
    for a, b in ((optimizer, again),):
        assert a.adamw.param_groups[0]["lr"] == b.adamw.param_groups[0]["lr"] == 1e-3 / 4
        assert tuple(a.adamw.param_groups[0]["betas"]) == tuple(b.adamw.param_groups[0]["betas"])
        assert len(b.adamw.state) == len(a.masters)
        for x, y in zip(a.masters, b.masters):
            assert torch.equal(x, y) and all(torch.equal(a.adamw.state[x][key], b.adamw.state[y][key])
                                             for key in ("step", "exp_avg", "exp_avg_sq"))


# -----------------------------------------------------------------------------
# disks

def mount(*arguments):
    if not shutil.which("mount") or subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 4 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    yield folder
    os.chdir(tmp_path)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def leave_free(disk, pages):
    """Fill the disk up to `pages` of 4 KiB."""
    (disk / "ballast").write_bytes(b"")
    (disk / "ballast").write_bytes(bytes(4096 * max(0, os.statvfs(disk).f_bavail - pages)))


def test_a_disk_full_at_every_place_of_a_checkpoint(small_disk):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = MasterAdamW(model, 1e-3, (0.9, 0.999), 0.0)
    some_gradients(model, optimizer, 0)
    optimizer.step(1e-9, 1.0)
    save_checkpoint(small_disk, 1, model, tokenizer, SEARCH_R1, optimizer)
    pages, failures = 0, set()
    while len(checkpoints(small_disk)) == 1:
        leave_free(small_disk, pages)
        try:
            save_checkpoint(small_disk, 2, model, tokenizer, SEARCH_R1, optimizer)
        except SystemExit as stop:
            assert re.fullmatch("error: .*checkpoint-000002 could not be written .*; free some space.*", stop.code)
            assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "checkpoint-000001"]
            failures.add(pages)
        pages += 1
    assert len(failures) > 100 and not any(map(damage, checkpoints(small_disk)))


def test_a_run_whose_disk_fills_up(toy, small_disk, straight, monkeypatch, capsys):
    run = make_command(toy, small_disk, monkeypatch)
    for place, call in (("append_line", 1), ("save_checkpoint", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(train, place, on_call(call, lambda: leave_free(small_disk, 0), getattr(train, place)))
            with pytest.raises(SystemExit) as stop:
                run(*FLAGS, "--save-every", 1, name=place)
        assert "No space left on device" in one_line(stop, capsys)
        (small_disk / "ballast").unlink()
        run.resume("--save-every", 0, name=place)
        assert_same_run(straight, small_disk / "runs" / place)
        shutil.rmtree(small_disk / "runs")


def test_a_run_folder_that_becomes_read_only(toy, small_disk, straight, monkeypatch, capsys):
    run, folder = make_command(toy, small_disk, monkeypatch), small_disk / "runs/run"

    def read_only():                                    # as a failing disk: also for the files of a running process
        mount("--bind", folder, folder)
        mount("-o", "remount,bind,ro", folder)

    with monkeypatch.context() as patch:
        patch.setattr(train, "rollout", on_call(3, read_only, train.rollout))       # in step 2
        with pytest.raises(SystemExit) as stop:
            run(*FLAGS, "--save-every", 1)
    assert "Read-only file system" in one_line(stop, capsys)
    with pytest.raises(SystemExit) as stop:
        run.resume()
    assert "Read-only file system" in one_line(stop, capsys)
    subprocess.run(["umount", str(folder)], check=True)
    assert latest_checkpoint(folder).name == "checkpoint-000002"
    run.resume("--save-every", 0)
    assert_same_run(straight, folder)
    mount("-o", "remount,ro", small_disk)
    with pytest.raises(SystemExit) as stop:
        run(name="new")
    assert "Read-only file system" in one_line(stop, capsys)


# -----------------------------------------------------------------------------
# no memory

@pytest.mark.parametrize("where, call, done, flag", [
    ("rollout", 0, 0, "--slots"),                       # the evaluation before training
    ("rollout", 3, 2, "--slots"),
    ("token_logprobs", 0, 0, "--micro-batch-tokens"),
    ("token_logprobs", 5, 2, "--micro-batch-tokens"),   # two a step: after the first optimizer step of step 2
])
def test_out_of_memory_saves_what_is_finished(where, call, done, flag, run, straight, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(train, where, on_call(call, really_out_of_memory, getattr(train, where)))
        with pytest.raises(SystemExit) as stop:
            run(*FLAGS)
    assert re.fullmatch(f"error: out of memory; lower {flag}; stopped after step {done}; go on with: "
                        "python train.py --resume runs/run", one_line(stop, capsys))
    assert int(latest_checkpoint(pathlib.Path("runs/run")).name[-6:]) == done
    run.resume()
    assert_same_run(straight, pathlib.Path("runs/run"))


@pytest.mark.parametrize("call", [0, 1])                # the policy; the reference
def test_out_of_memory_in_set_up_leaves_nothing(call, run, monkeypatch, capsys):
    monkeypatch.setattr(train, "load_policy", on_call(call, really_out_of_memory, train.load_policy))
    with pytest.raises(SystemExit) as stop:
        run("--steps", 1, "--kl", 0.1)
    assert "out of memory; " in (line := one_line(stop, capsys)) and "--model" in line and ("--kl 0" in line) == call
    assert not any(pathlib.Path().glob("runs/*"))


# -----------------------------------------------------------------------------
# nan and infinity

def some_gradients(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.accumulate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_whole_or_nothing(dtype, steps_before):
    model = make_model(make_tokenizer()).to(dtype)
    optimizer = MasterAdamW(model, 1e-3, (0.9, 0.999), 0.01)

    def take(*seeds):
        for seed in seeds:
            some_gradients(model, optimizer, seed)
            optimizer.step(1e-3, 1.0)

    def everything():
        return [tensor.clone() for tensor in (*model.parameters(), *optimizer.masters,
                                              *(t for state in optimizer.adamw.state.values() for t in state.values()))]

    take(*range(steps_before))
    before = everything()
    with pytest.raises(KeyError), whole_or_nothing(optimizer):
        take(8, 9)
        some_gradients(model, optimizer, 10)
        raise KeyError
    after = everything()
    assert len(before) == len(after) and all(map(torch.equal, before, after))
    assert all(tensor.grad is None for tensor in (*model.parameters(), *optimizer.masters))
    take(20)
    expected = everything()
    other = make_model(make_tokenizer()).to(dtype)      # and the next step is that of a run without the failure
    model, optimizer = other, MasterAdamW(other, 1e-3, (0.9, 0.999), 0.01)
    take(*range(steps_before), 20)
    assert all(map(torch.equal, expected, everything()))


def nan_reward(patch, calls):
    rewards = iter(range(10**6))
    original = train.reward
    patch.setattr(train, "reward", lambda *arguments: math.nan if next(rewards) in calls else original(*arguments))


def infinite_logprob(patch, calls):
    rollouts = iter(range(-8, 10**6, 8))                # the first call is the evaluation
    original = train.rollout

    def rollout(*arguments):
        trajectories = original(*arguments)
        first = next(rollouts)
        for i, trajectory in enumerate(trajectories):
            if first + i in calls and first >= 0:
                trajectory.logprobs[-1] = -math.inf
        return trajectories

    patch.setattr(train, "rollout", rollout)


def nan_gradient(patch, calls):
    """In the second mini-batch of the step of that rollout, when the first has changed the weights already."""
    original, steps = MasterAdamW.step, iter(range(10**6))

    def step(self, *arguments):
        if next(steps) in [2 * (call // 8) + 1 for call in calls]:
            self.masters[0].grad[0] = math.nan
        return original(self, *arguments)

    patch.setattr(MasterAdamW, "step", step)


@pytest.mark.parametrize("fault, because, suspects", [
    (nan_reward, r"question \d: the reward \(nan\) or a log-prob of a rollout is not finite", 1),
    (infinite_logprob, r"question \d: the reward \(\d.0\) or a log-prob of a rollout is not finite", 1),
    (nan_gradient, "the gradient norm is nan", 8),
])
def test_a_step_that_is_not_finite_is_dropped_whole(fault, because, suspects, run, toy, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        fault(patch, [8 + 5])                           # rollout 5 of step 1
        folder = run("--steps", 2, "--save-every", 1, "--dump-every", 1)
    before, after = checkpoints(folder)
    assert (before.name, after.name) == ("checkpoint-000001", "checkpoint-000002")
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (before / file).read_bytes() == (after / file).read_bytes()
    rows = metrics(folder)
    assert [row["dropped"] for row in rows] == [0, 1] and rows[1]["optimizer_steps"] == 0
    assert re.fullmatch(because, rows[1]["dropped_because"]) and "NaN" not in (folder / "metrics.jsonl").read_text()
    assert "dropped, 1 in a row: " + rows[1]["dropped_because"] in capsys.readouterr().out
    written = read_lines(folder / "dropped.jsonl")
    assert len(written) == suspects and all(row["step"] == 1 and row["segments"] for row in written)
    assert {row["step"] for row in read_lines(folder / "trajectories.jsonl")} == {0}
    run.resume("--steps", 3)                            # training goes on
    assert metrics(folder)[2]["dropped"] == 0 and metrics(folder)[2]["optimizer_steps"]


def test_steps_dropped_in_a_row_stop_the_run(run, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        nan_reward(patch, [9, 17, 25])                  # steps 1, 2 and 3
        with pytest.raises(SystemExit) as stop:
            run("--steps", 6, "--max-dropped", 2)
        folder = pathlib.Path("runs/run")
        assert re.fullmatch(r"error: 2 steps in a row were dropped \(question .* not finite\); their trajectories are "
                            "in runs/run/dropped.jsonl; stopped after step 3; go on with: python train.py --resume "
                            "runs/run",
                            one_line(stop, capsys))
        assert latest_checkpoint(folder).name == "checkpoint-000003"
        assert [row["dropped"] for row in metrics(folder)] == [0, 1, 2]
        with pytest.raises(SystemExit) as stop:         # a resumed run has not forgotten them
            run.resume()
        assert "error: 3 steps in a row were dropped" in one_line(stop, capsys)
    run.resume()
    assert [row["dropped"] for row in metrics(folder)] == [0, 1, 2, 3, 0, 0]
    assert [row["step"] for row in read_lines(folder / "dropped.jsonl")] == [1, 2, 3]


# -----------------------------------------------------------------------------
# the search server in the middle of a step, over real sockets

@contextlib.contextmanager
def server(fault, at):
    """A /retrieve server that answers as FakeRetriever does, and as `fault` says from its `at`-th request on."""
    class Handler(http.server.BaseHTTPRequestHandler):
        count = 0

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            Handler.count += 1
            if Handler.count > at and fault == "dies":
                self.connection.close()
                return
            if Handler.count > at and fault == "hangs":
                time.sleep(1)
                return
            found = [[{"document": {"id": str(i), "contents": f'"Title"\nabout {query}'}, "score": 1.0}
                      for i in range(asked["topk"])] for query in asked["queries"]]
            body = json.dumps({"result": found}).encode()
            if Handler.count > at:
                body = fault
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/retrieve"
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("fault", [
    "dies", "hangs", b"", b"<html>busy</html>", b'{"result": []}', b'{"result": 7}', b"\xff\xfe", b"[1, 2]", b"null"])
def test_a_search_server_that_fails_in_the_middle(fault, run, straight, monkeypatch, capsys):
    monkeypatch.setattr(retriever, "BACKOFF_SECONDS", 0.0)
    with monkeypatch.context() as patch, server(fault, at=4) as url:
        patch.setattr(train, "open_retriever",
                      lambda *arguments, **options: retriever.HTTPRetriever(url, timeout=0.2, retries=1))
        with pytest.raises(SystemExit) as stop:
            run(*FLAGS)
    line = one_line(stop, capsys)
    assert re.fullmatch(r"error: no usable answer from http://127.0.0.1:\d+/retrieve in 2 attempts .*; stopped after "
                        r"step \d; go on with: python train.py --resume runs/run", line)
    run.resume()                                        # with a server that works
    assert_same_run(straight, pathlib.Path("runs/run"))


def test_lucene_that_fails_in_the_middle(run, toy, tmp_path, monkeypatch, capsys):
    bm25 = retriever.open_retriever(str(toy / "corpus.jsonl"), cache_dir=tmp_path / "cache")
    lookup, calls = bm25.lookup, []

    def lookup_in_a_closed_index(queries, k):
        calls.append(1)
        if len(calls) == 4:
            bm25.searcher.close()
        return lookup(queries, k)

    bm25.search = retriever.QueryCache(lookup_in_a_closed_index).search
    capsys.readouterr()
    monkeypatch.setattr(train, "open_retriever", lambda *arguments, **options: bm25)
    with pytest.raises(SystemExit) as stop:
        run(*FLAGS)
    assert re.match(r"error: the search .*; stopped after step \d; go on with", one_line(stop, capsys))
    assert not damage(latest_checkpoint(pathlib.Path("runs/run")))


# -----------------------------------------------------------------------------
# odd environments

def test_paths_with_spaces_and_unicode(toy, tmp_path, straight, monkeypatch, capsys):
    name, folder = "mein Lauf é 日本 🎉", tmp_path / "ein Ordner ü"
    folder.mkdir()
    shutil.copytree(toy, folder / "tôy 2")
    run = make_command(folder / "tôy 2", folder, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(train, "rollout", on_call(3, interrupt, train.rollout))
        with pytest.raises(SystemExit):
            run(*FLAGS, name=name)
    command = capsys.readouterr().err.strip().partition("go on with: ")[2]
    assert shlex.split(command)[:2] == ["python", "train.py"]
    train.main(shlex.split(command)[2:])                # the command that was printed works
    assert metrics(folder / "runs" / name) == metrics(straight)


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_any_umask(mask, run, straight):
    previous = os.umask(mask)
    try:
        folder = run(*FLAGS)
    finally:
        os.umask(previous)
    assert_same_run(straight, folder)
    assert all(path.stat().st_mode & mask == 0 for path in folder.rglob("*"))


def test_an_ascii_locale_and_no_network(toy, tmp_path):
    """A real `python train.py` under LC_ALL=C with an ASCII terminal. Neither it nor the import of any module may touch
    the network."""
    modules = [path.stem for path in ROOT.glob("*.py")] + [f"extras.{path.stem}" for path in ROOT.glob("extras/*.py")]
    (tmp_path / "run.py").write_text(
        "import importlib, runpy, sys\n"
        "def hook(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.bind', 'socket.sendto'):\n"
        "        sys.exit(f'network: {event} {arguments}')\n"
        "sys.addaudithook(hook)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        "sys.argv[0] = 'train.py'\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(
        [sys.executable, "run.py", "--name", "Lauf é", "--preset", "tiny", "--model", toy / "model", "--steps", "1",
         "--questions", toy / "train.jsonl", "--corpus", toy / "corpus.jsonl", "--prompt-file", toy / "prompt.txt",
         "--questions-per-step", "2", "--rollouts-per-question", "2", "--max-turn-tokens", "24",
         "--max-observation-tokens", "45", "--max-context", "160", "--cache", "cache"],
        cwd=tmp_path, env=environment, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    assert rb"done: runs/Lauf \xe9" in ran.stdout and (tmp_path / "runs" / "Lauf é" / "metrics.jsonl").exists()


def test_text_that_is_not_unicode(run, tmp_path, monkeypatch):
    """Half a surrogate pair: in a file name it is one line, in what a run writes it is an escape."""
    with pytest.raises(SystemExit, match="^error: .*surrogates not allowed"):
        run(*FLAGS, name="a\udcff")
    assert not any(pathlib.Path().glob("runs/*"))
    checkpoint.append_line(tmp_path / "t.jsonl", {"text": "a\ud800 \udcffé"})
    checkpoint.write_json(tmp_path / "t.json", {"text": "a\ud800 \udcffé"})
    assert read_lines(tmp_path / "t.jsonl") == [{"text": "a\ud800 \udcffé"}]
    assert json.loads((tmp_path / "t.json").read_bytes()) == {"text": "a\ud800 \udcffé"}


def test_time_is_measured_with_a_clock_that_never_goes_back():
    for path in SOURCES:
        assert not re.search(r"\btime\.(time|localtime|ctime|strftime)\b|\bdatetime\b", path.read_text()), path


# -----------------------------------------------------------------------------
# nothing gets in

@pytest.mark.parametrize("model_type", ["qwen2", "unheard_of"])
def test_code_in_a_model_folder_is_never_run(model_type, toy, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(toy / "model", folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n"
                                    "from transformers import Qwen2Config as C, Qwen2ForCausalLM as M\n"
                                    "from transformers import PreTrainedTokenizerFast as T\n")
    for file, changes in (("config.json", {"model_type": model_type, "auto_map": {"AutoConfig": "code.C",
                                                                                  "AutoModelForCausalLM": "code.M"}}),
                          ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.T", "code.T"]},
                                                     "tokenizer_class": "T"})):
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
    monkeypatch.setattr("builtins.input", raising(AssertionError("asked a person whether to run it")))
    with contextlib.suppress(ValueError):               # the unknown type must be refused, a known one may be loaded
        load_policy(folder)
        assert model_type == "qwen2"
    assert not (tmp_path / "ran").exists()


def test_requirements_are_pinned():
    lines = (ROOT / "requirements.txt").read_text().split("\n")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line) and len(lines) > 3


def test_no_shell_no_pickle_no_eval_no_predictable_temporary_names():
    forbidden = (r"shell\s*=\s*True|os\.system|os\.popen|\bpickle\b|torch\.(load|save)\(|(?<![\w.])(eval|exec)\(|"
                 r"trust_remote_code\s*=\s*True|tempfile\.mktemp\b|/tmp/|verify\s*=\s*False|_create_unverified_context")
    for path in SOURCES:
        assert not re.search(forbidden, path.read_text()), path
