"""extras/experiments.py: every arm is a valid command, finished runs are not repeated, and the tables by hand."""
import json
import pathlib

import pytest

from checkpoint import append_line, read_lines
from config import parse_config
from extras import experiments


def row(arm, seed, em, part=2, regime=experiments.BAD):
    curves = {"em": [0.0] * 10 + [em] * 10, "searches": [2.0] * 10 + [1.0] * 10}
    return {"part": part, "regime": regime, "arm": arm, "seed": seed, "em_before": 0.0, "em": em,
            "searches_before": 2.0, "searches": 1.0, "seconds": 1.0, "curves": curves}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments.regimes, "prepare", lambda regime, cache: tmp_path / regime)
    return experiments.plan({2, 3}, 2, "")


def test_every_arm_is_a_valid_command(planned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({experiments.key(task) for task, _ in planned}) == len(planned) == 2 * (2 * 10 + 14)
    assert [task["seed"] for task, _ in planned] == sorted(task["seed"] for task, _ in planned)
    for task, flags in planned:
        config, _, _ = parse_config(flags)
        assert config.questions_per_step * config.rollouts_per_question == 64 and config.steps == 50
        assert task["regime"] in config.model and task["regime"] in config.corpus
    by_arm = {task["arm"]: parse_config(flags)[0] for task, flags in planned}
    assert by_arm["stratified 0.9:0.3"].alpha == "0.9:0.3" and by_arm["random strata 0.6"].strata == "random"
    assert by_arm["grpo, group of 32"].rollouts_per_question == 32 and by_arm["ppo, sees searches"].critic_sees_searches


def test_only_what_is_missing_is_run(planned, tmp_path, monkeypatch):
    """With all rows but one there is one run left; with all of them, none."""
    results, asked = tmp_path / "results.jsonl", []

    class Pool:
        def __init__(self, workers): pass
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def imap_unordered(self, function, tasks):
            for task, flags, logs in tasks:
                asked.append(experiments.key(task))
                yield {**row("", 0, 0.5), **task}

    monkeypatch.setattr(experiments.multiprocessing, "get_context", lambda how: type("Context", (), {"Pool": Pool}))
    monkeypatch.setattr("sys.argv", ["experiments", "run", "--parts", "2,3", "--seeds", "2", "--results", str(results)])
    append_line(results, *(row(t["arm"], t["seed"], 0.5, t["part"], t["regime"]) for t, _ in planned[1:]))
    experiments.main()
    assert asked == [experiments.key(planned[0][0])] and len(read_lines(results)) == len(planned)
    experiments.main()
    assert len(asked) == 1


def test_part_4_makes_its_warm_start_once_and_every_run_from_it(tmp_path, monkeypatch):
    import train
    called = []

    def warm_start(flags):
        config, folder, _ = parse_config(flags)
        called.append((config, pathlib.Path(config.demos).exists()))
        (folder / "checkpoint-000000").mkdir(parents=True)

    monkeypatch.setattr(train, "main", warm_start)
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions/multihop_train.jsonl").write_text(json.dumps(
        {"id": "a", "question": "who?", "golden_answers": ["b"],
         "metadata": {"decomposition": [{"query": "x", "answer": "b"}]}}) + "\n")
    for _ in (0, 1):
        tasks = experiments.plan_real("model", tmp_path, 2, tmp_path / "results.jsonl")
    ((warm, has_demos),) = called
    assert has_demos and warm.steps == 0 and warm.sft_steps == 32 and warm.max_searches == 2
    monkeypatch.chdir(tmp_path)
    assert [experiments.key(task) for task, _ in tasks] == [
        (4, "real", arm, seed) for seed in (0, 1) for arm in ("grpo", "stratified")]
    for task, flags in tasks:
        config, _, _ = parse_config(flags)
        assert config.advantage == task["arm"] and config.steps == 12 and pathlib.Path(config.model).is_dir()


def test_a_failed_run_stops_with_its_traceback(planned, tmp_path, monkeypatch):
    import train
    monkeypatch.setattr(train, "main", lambda flags: 1 / 0)
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    message = experiments.one_run((*planned[0], tmp_path / "logs"))
    assert "ZeroDivisionError" in message and str(tmp_path / "logs") in message


def test_tables_by_hand(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    append_line(results, *(row("grpo", seed, em) for seed, em in ((0, 0.4), (1, 0.5))),
                *(row("san", seed, em) for seed, em in ((1, 0.8), (0, 0.6))))
    monkeypatch.setattr("sys.argv", ["experiments", "table", "--results", str(results)])
    experiments.main()
    lines = capsys.readouterr().out.splitlines()
    # two seeds: half-width = 12.71 std / sqrt 2 = 12.71 |a - b| / 2
    assert "| grpo | 2 | 0.00 0.45 | 0.45 ± 0.64 |  | 0.45 ± 0.64 | 1.00 ± 0.00 | 1/2 |" in lines
    assert "| san | 2 | 0.00 0.70 | 0.70 ± 1.27 | 0.25 ± 0.64 | 0.70 ± 1.27 | 1.00 ± 0.00 | 0/2 |" in lines
    monkeypatch.setattr("sys.argv", ["experiments", "table", "--results", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit, match="no such file or no rows"):
        experiments.main()


def test_summary_of_a_run_folder(tmp_path):
    evaluations = {"0": {"em": 0.1, "searches": 2.0}, "10": {"em": 0.9, "searches": 1.0}}
    (tmp_path / "eval.json").write_text(json.dumps(evaluations))
    step = {"em": 0.5, "searches": 1.5, "by_searches": {"2": {"share": 0.25}}, "rollout_seconds": 1.0,
            "update_seconds": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**step, "grad_norm": 3.0}) + "\n" + json.dumps(
        {**step, "by_searches": {"0": {"share": 1.0}}}) + "\n")
    found = experiments.summarise(pathlib.Path(tmp_path))
    assert (found["em_before"], found["em"], found["seconds"]) == (0.1, 0.9, 6.0)
    assert found["curves"]["grad_norm"] == [3.0, None] and found["curves"]["two_searches"] == [0.25, 0.0]


@pytest.mark.parametrize("arguments", [["--parts", "5"], ["--parts", "x"], ["--parts", "4"], ["--seeds", "0"]])
def test_bad_flags(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["experiments", "run", *arguments])
    with pytest.raises(SystemExit) as stop:
        experiments.main()
    assert stop.value.code == 2
