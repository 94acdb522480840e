"""eval.py: every question once, greedy, under the protocol that the model folder was trained with; the table and
--out."""
import json
import pathlib
import shutil

import eval as evaluation
import pytest
import torch
from conftest import FakeRetriever, make_model, make_tokenizer

from data import Question, score
from policy import load_policy
from retriever import RetrieverError
from rollout import SEARCH_R1, Protocol, Search, Trajectory, rollout, save_protocol

PROTOCOL = Protocol(prompt="Q: {question}\n", retry="again\n", max_searches=1, max_turn_tokens=20,
                    max_observation_tokens=60, passages=2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two question files, and a model folder with a protocol of its own."""
    folder = tmp_path_factory.mktemp("toy")
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save_protocol(PROTOCOL, folder / "model")
    for name, count in (("first", 7), ("second", 3)):
        rows = [{"id": f"{name}{i}", "question": f"number {i}?", "golden_answers": ["golden"], "extra": 1}
                for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(toy, tmp_path, monkeypatch):
    """run("--limit", 3) = python eval.py on the toy folder, in tmp_path; run.retriever was asked."""
    monkeypatch.chdir(tmp_path)
    retriever = FakeRetriever()
    monkeypatch.setattr(evaluation, "open_retriever", lambda *args, **kwargs: retriever)

    def command(*flags, questions="first"):
        names = ",".join(f"{toy}/{name}.jsonl" for name in questions.split(","))
        evaluation.main(["--model", f"{toy}/model", "--questions", names, "--corpus", "c.jsonl",
                         "--max-context", "200", *map(str, flags)])

    command.retriever = retriever
    return command


def read_lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def one_line_exit(stop):
    message = stop.value.code
    assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
    return message


def test_every_question_once_and_the_files_of_out(run, toy, capsys):
    run("--out", "out", "--slots", 1, questions="first,second")  # slots 1: batches of 4 questions, the last one shorter
    rows = read_lines(pathlib.Path("out/trajectories.jsonl"))
    assert [(pathlib.Path(row["questions"]).stem, row["question_id"]) for row in rows] == [
        *(("first", f"first{i}") for i in range(7)), *(("second", f"second{i}") for i in range(3))]
    assert all(row["prompt"] == f"Q: {row['question']}\n" and row["golden_answers"] == ["golden"] for row in rows)
    saved = json.loads(pathlib.Path("out/eval.json").read_text())
    assert (saved["protocol"]["max_searches"] == 1 and saved["settings"]["slots"] == 1
            and saved["torch"] == torch.__version__)
    assert list(saved["results"]) == [f"{toy}/first.jsonl", f"{toy}/second.jsonl"]
    for name, count in (("first", 7), ("second", 3)):
        result = saved["results"][f"{toy}/{name}.jsonl"]
        assert sum(row["count"] for row in result["by_searches"].values()) == count
        assert result["searches"] == pytest.approx(
            sum(row["n_searches"] for row in rows if row["questions"].endswith(f"{name}.jsonl")) / count)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["questions", "n", "EM"]
    assert [line.split()[:2] for line in lines if not line.startswith(" ")][1:] == [["first", "7"], ["second", "3"]]


def test_it_is_the_greedy_rollout_under_the_folder_s_protocol(run, toy):
    run("--out", "out", "--slots", 3)
    model, tokenizer = load_policy(toy / "model")
    questions = [Question(f"first{i}", f"number {i}?", ["golden"]) for i in range(7)]
    expected = rollout(model, tokenizer, questions, FakeRetriever(), PROTOCOL, 1, 0.0, 7, 200)
    assert [row["response_ids"] for row in read_lines(pathlib.Path("out/trajectories.jsonl"))] == [
        t.response_ids for t in expected]


def test_limit_takes_the_first_questions_of_each_file(run):
    run("--limit", 2, "--out", "out", questions="first,second")
    assert [row["question_id"] for row in read_lines(pathlib.Path("out/trajectories.jsonl"))] == [
        "first0", "first1", "second0", "second1"]


def test_a_folder_without_a_protocol_is_asked_for_search_r1(run, toy, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluation, "rollout", lambda *args: (seen.append(args), rollout(*args))[1])
    shutil.copytree(toy / "model", "foreign")
    pathlib.Path("foreign/protocol.json").unlink()
    run("--limit", 1)
    run("--limit", 1, "--model", "foreign", "--max-context", 512)
    (_, _, _, _, own, rollouts, temperature, *_), (_, _, _, _, foreign, *_) = seen
    assert own == PROTOCOL and foreign == SEARCH_R1 and (rollouts, temperature) == (1, 0.0)


def test_max_searches_overrides_the_protocol(run, monkeypatch):
    def scripted(model, tokenizer, questions, retriever, protocol, *rest):
        return [Trajectory(q.id, i, [1], [2], [1], [0.0], searches=[Search("a", [], False)] * protocol.max_searches,
                           finish="answer", answer="golden") for i, q in enumerate(questions)]

    monkeypatch.setattr(evaluation, "rollout", scripted)
    for flags, searches in (([], 1), (["--max-searches", 0], 0), (["--max-searches", 3], 3)):
        run("--out", f"out{searches}", *flags)
        saved = json.loads(pathlib.Path(f"out{searches}/eval.json").read_text())
        (result,) = saved["results"].values()
        assert result["searches"] == searches and saved["protocol"]["max_searches"] == searches and result["em"] == 1.0


def test_the_table(capsys):
    questions = [Question(str(i), "q?", ["right answer"]) for i in range(4)]
    answers = ["right answer", "right", "wrong", None]
    trajectories = [Trajectory(q.id, i, [1], [2], [1], [0.0], answer=a, finish="answer")
                    for i, (q, a) in enumerate(zip(questions, answers))]
    for trajectory, count in zip(trajectories, (2, 2, 0, 0)):
        trajectory.searches = [Search("q", [], False)] * count
    evaluation.print_table({"some/folder/dev.jsonl": score(questions, trajectories)})
    head, total, none, two = capsys.readouterr().out.splitlines()
    assert total.split()[:3] == ["dev", "4", "0.250"] and "[0.000, 0.750]" in total
    assert float(total.split()[-1]) == 1.0 and "0.417" in total  # F1: (1 + 2/3 + 0 + 0) / 4
    assert (none.split() == ["0", "searches", "2", "0.000", "0.000"]
            and two.split() == ["2", "searches", "2", "0.500", "0.833"])
    ends = [head.index(" EM") + 3, head.index(" F1") + 3]
    for line in (total, none, two):  # right-aligned under their heads
        assert all(line[end - 1].isdigit() and (len(line) == end or line[end] == " ") for end in ends)


def test_an_existing_out_is_refused_and_left_alone(run):
    pathlib.Path("out").mkdir()
    pathlib.Path("out/eval.json").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        run("--out", "out")
    assert "--out out: exists" in one_line_exit(stop) and pathlib.Path("out/eval.json").read_text() == "precious"


def test_without_out_nothing_is_written(run):
    run("--limit", 1)
    assert not list(pathlib.Path(".").iterdir())


BAD_INPUT = [
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    (["--max-context", "513"], "--max-context 513 is longer than the model's context of 512"),
    (["--max-context", "10"], "does not fit --max-context 10"),
    (["--slots", "0"], "--slots 0"), (["--limit", "-1"], "--limit -1"), (["--max-searches", "-2"], "--max-searches -2"),
    (["--corpus", ""], "--questions and --corpus go together"), (["--device", "nonsense"], "--device nonsense"),
]


@pytest.mark.parametrize("flags, message", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(flags, message, run):
    with pytest.raises(SystemExit) as stop:
        run("--out", "out", *flags)
    assert message in one_line_exit(stop) and not pathlib.Path("out").exists()


@pytest.mark.parametrize("error, message", [
    (RetrieverError("server gone"), "server gone"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory; lower --slots")])
def test_what_goes_wrong_in_the_middle_is_one_line(error, message, run, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(evaluation, "rollout", fail)
    with pytest.raises(SystemExit) as stop:
        run("--out", "out")
    assert message in one_line_exit(stop) and not pathlib.Path("out").exists()


def test_malformed_questions_name_file_and_line(run):
    pathlib.Path("q.jsonl").write_text(json.dumps({"id": "a", "question": "q", "golden_answers": ["x"]}) + "\n{\n")
    with pytest.raises(SystemExit) as stop:
        run("--questions", "q.jsonl")
    assert "q.jsonl:2: not valid JSON" in one_line_exit(stop)


def test_unknown_flags_and_a_missing_model_are_errors(capsys):
    for arguments in ([], ["--model", "m", "--nonsense"], ["--model", "m", "--lim", "3"]):
        with pytest.raises(SystemExit) as stop:
            evaluation.main(arguments)
        assert stop.value.code == 2


def test_without_questions_the_world_of_the_run_is_used(run, toy, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no checkpoint of the embedded world; give --questions and --corpus"):
        evaluation.main(["--model", f"{toy}/model"])
    made = tmp_path / "world-7"
    made.mkdir()
    shutil.copy(toy / "second.jsonl", made / "heldout.jsonl")
    asked = []
    monkeypatch.setattr(evaluation.world, "prepare", lambda cache, seed: asked.append((cache, seed)) or made)
    shutil.copytree(toy / "model", tmp_path / "runs/a/checkpoint-000001")
    (tmp_path / "runs/a/config.json").write_text(json.dumps({"model": "", "seed": 7, "cache": "c"}))
    evaluation.main(["--model", f"{tmp_path}/runs/a/checkpoint-000001", "--max-context", "200"])
    assert asked == [("c", 7)]
