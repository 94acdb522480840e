"""eval.py and tables.py: every question once, under the protocol that the model folder was trained with; --out and
going on with it; scores, averages, paired differences and tables against hand-made cases."""
import json
import pathlib
import shutil

import eval as evaluation
import methods
import numpy as np
import pytest
import tables
import torch
from conftest import FakeRetriever, make_model, make_tokenizer

from data import Question, bootstrap_interval, f1_score
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
    rows = read_lines(pathlib.Path("out/predictions.jsonl"))
    assert [(pathlib.Path(row["questions"]).stem, row["question_id"]) for row in rows] == [
        *(("first", f"first{i}") for i in range(7)), *(("second", f"second{i}") for i in range(3))]
    assert all(row["prompt"] == f"Q: {row['question']}\n" and row["golden_answers"] == ["golden"] for row in rows)
    saved = json.loads(pathlib.Path("out/eval.json").read_text())
    assert saved["config"]["slots"] == 1 and saved["versions"]["torch"] == torch.__version__
    (system,) = saved["systems"]
    assert system["protocol"]["max_searches"] == 1 and system["method"] == "agent"
    assert list(system["benchmarks"]) == [f"{toy}/first.jsonl", f"{toy}/second.jsonl"]
    for name, count in (("first", 7), ("second", 3)):
        result = system["benchmarks"][f"{toy}/{name}.jsonl"]
        mine = [row for row in rows if row["questions"].endswith(f"{name}.jsonl")]
        assert result["n"] == count and result["tokens"] == pytest.approx(
            sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in mine) / count)
        assert result["share_unanswered"] == sum(row["answer"] is None for row in mine) / count
        assert sum(row["count"] for row in result["by_searches"].values()) == count
        assert result["searches"] == pytest.approx(
            sum(row["n_searches"] for row in rows if row["questions"].endswith(f"{name}.jsonl")) / count)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["method", "questions", "n", "EM"]
    assert [line.split()[:3] for line in lines[1:3]] == [["agent", "first", "7"], ["agent", "second", "3"]]


def test_it_is_the_greedy_rollout_under_the_folder_s_protocol(run, toy):
    run("--out", "out", "--slots", 3)
    model, tokenizer = load_policy(toy / "model")
    questions = [Question(f"first{i}", f"number {i}?", ["golden"]) for i in range(7)]
    expected = rollout(model, tokenizer, questions, FakeRetriever(), PROTOCOL, 1, 0.0, 7, 200)
    assert [row["response_ids"] for row in read_lines(pathlib.Path("out/predictions.jsonl"))] == [
        t.response_ids for t in expected]


def test_limit_takes_the_first_questions_of_each_file(run):
    run("--limit", 2, "--out", "out", questions="first,second")
    assert [row["question_id"] for row in read_lines(pathlib.Path("out/predictions.jsonl"))] == [
        "first0", "first1", "second0", "second1"]


def test_a_folder_without_a_protocol_is_asked_for_search_r1(run, toy, monkeypatch):
    seen = []
    monkeypatch.setattr(methods, "rollout", lambda *args: (seen.append(args), rollout(*args))[1])
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

    monkeypatch.setattr(methods, "rollout", scripted)
    for flags, searches in (([], 1), (["--max-searches", 0], 0), (["--max-searches", 3], 3)):
        run("--out", f"out{searches}", *flags)
        saved = json.loads(pathlib.Path(f"out{searches}/eval.json").read_text())
        (result,) = saved["systems"][0]["benchmarks"].values()
        assert result["searches"] == searches and result["em"] == 1.0
        assert saved["systems"][0]["protocol"]["max_searches"] == searches


def test_an_existing_out_is_refused_and_left_alone(run):
    pathlib.Path("out").mkdir()
    pathlib.Path("out/eval.json").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        run("--out", "out")
    assert "--out out: exists, and is no evaluation" in one_line_exit(stop)
    assert pathlib.Path("out/eval.json").read_text() == "precious"


def test_without_out_nothing_is_written(run):
    run("--limit", 1)
    assert not list(pathlib.Path(".").iterdir())


BAD_INPUT = [
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    (["--max-context", "513"], "--max-context 513 is longer than the model's context of 512"),
    (["--max-context", "10"], "does not fit --max-context 10"),
    (["--slots", "0"], "--slots 0"), (["--limit", "-1"], "--limit -1"), (["--max-searches", "-2"], "--max-searches -2"),
    (["--samples", "0"], "--samples 0"), (["--samples", "2"], "--samples 2: greedy answers are all the same"),
    (["--temperature", "-1"], "--temperature -1"), (["--temperature", "nan"], "--temperature nan"),
    (["--method", "agent,magic"], "--method magic: not one of agent, direct"),
    (["--method", "cot,cot"], "--method cot: given twice"), (["--layout", "x"], "layout 'x'"),
    (["--model", "m,./nowhere"], "--model ./nowhere: no such folder"),
    (["--corpus", ""], "--corpus: is needed with --questions"),
    (["--questions", ""], "--corpus: needs --questions"), (["--device", "nonsense"], "--device nonsense"),
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

    monkeypatch.setattr(methods, "rollout", fail)
    with pytest.raises(SystemExit) as stop:
        run("--out", "out")
    assert message in one_line_exit(stop) and not pathlib.Path("out").exists()


def test_malformed_questions_name_file_and_line(run):
    pathlib.Path("q.jsonl").write_text(json.dumps({"id": "a", "question": "q", "golden_answers": ["x"]}) + "\n{\n")
    with pytest.raises(SystemExit) as stop:
        run("--questions", "q.jsonl")
    assert "q.jsonl:2: not valid JSON" in one_line_exit(stop)


def test_methods_that_do_not_search_need_no_corpus(run, monkeypatch):
    monkeypatch.setattr(evaluation, "open_retriever", None)  # would fail
    run("--corpus", "", "--method", "direct,cot,r1", "--max-turn-tokens", 5, "--limit", 1, "--max-context", 500)


def test_benchmarks_by_name_are_searched_for_in_the_paper_s_corpus(run, monkeypatch):
    opened = []
    monkeypatch.setattr(evaluation, "resolve_questions", lambda *args: [Question(args[0], "q?", ["a"])])
    monkeypatch.setattr(evaluation, "open_retriever", lambda spec, **kwargs: opened.append(spec) or run.retriever)
    run("--benchmarks", "nq,musique", "--corpus", "")
    run("--benchmarks", "nq,musique", "--corpus", "mine.jsonl")
    assert opened == ["wikipedia-dpr-100w", "mine.jsonl"]


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


# -----------------------------------------------------------------------------
# going on with --out

def without_time(path):
    return json.loads(pathlib.Path(path, "eval.json").read_text())["systems"]


@pytest.mark.parametrize("sampling", [[], ["--samples", 2, "--temperature", 1.0]])
def test_a_killed_run_goes_on_and_gives_the_same_scores(sampling, run, monkeypatch):
    flags = ["--slots", 1, "--method", "agent,direct", "--limit", 5, "--max-turn-tokens", 5, *sampling]
    run("--out", "whole", *flags, questions="first,second")
    asked, answer = [], evaluation.answer

    def dying(*args):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(args)
        return answer(*args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "answer", dying)
        with pytest.raises(SystemExit) as stop:
            run("--out", "half", *flags, questions="first,second")
    assert stop.value.code == 130
    path = pathlib.Path("half/predictions.jsonl")
    finished = path.read_bytes()
    assert finished.count(b"\n") == sum(len(args[5]) for args in asked)
    path.write_bytes(finished + b'{"model": "torn')
    run("--out", "half", *flags, questions="first,second")
    assert path.read_bytes().startswith(finished)
    keys = [evaluation.row_key(row) for row in read_lines(path)]
    assert len(keys) == len(set(keys)) == 2 * 8 * (2 if sampling else 1)  # every question once, none twice
    assert path.read_bytes() == pathlib.Path("whole/predictions.jsonl").read_bytes()
    assert without_time("half") == without_time("whole")


def test_a_finished_run_only_prints_its_table_again(run, monkeypatch, capsys):
    run("--out", "out")
    before = capsys.readouterr().out
    monkeypatch.setattr(evaluation, "load_policy", None)  # would fail
    run("--out", "out", "--slots", 5, "--table", "markdown")
    run("--out", "out")
    assert capsys.readouterr().out.endswith(before)


def test_another_config_does_not_mix(run, toy):
    run("--out", "out", "--limit", 2)
    before = pathlib.Path("out/predictions.jsonl").read_bytes(), pathlib.Path("out/eval.json").read_bytes()
    for flags, name in ((["--limit", 3], "limit"), (["--method", "cot"], "method"),
                        (["--max-searches", 0], "max_searches")):
        with pytest.raises(SystemExit) as stop:
            run("--out", "out", *["--limit", 2] * ("--limit" not in flags), *flags)
        message = one_line_exit(stop)
        assert message.startswith("error: --out out: holds a run with other settings (") and name in message
    questions = (toy / "first.jsonl").read_text()
    (toy / "first.jsonl").write_text(questions.replace('"golden"', '"olden"', 1))  # the same name, another content
    try:
        with pytest.raises(SystemExit, match="other settings .benchmarks.;"):
            run("--out", "out", "--limit", 2)
    finally:
        (toy / "first.jsonl").write_text(questions)
    assert before == (pathlib.Path("out/predictions.jsonl").read_bytes(), pathlib.Path("out/eval.json").read_bytes())


def test_a_spoiled_line_is_named(run):
    run("--out", "out")
    path = pathlib.Path("out/predictions.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{}\n" + b"".join(lines[2:]))
    with pytest.raises(SystemExit) as stop:
        run("--out", "out")
    assert "out/predictions.jsonl:2: not a line of an evaluation" in one_line_exit(stop)


def test_several_models_and_methods_make_one_comparison(run, toy, capsys):
    shutil.copytree(toy / "model", "other")
    run("--model", f"{toy}/model,other", "--method", "agent,direct", "--out", "out", "--max-turn-tokens", 5,
        questions="first,second")
    rows = read_lines(pathlib.Path("out/predictions.jsonl"))
    assert len(rows) == 4 * 10 and len({evaluation.row_key(row) for row in rows}) == 40
    systems = without_time("out")
    assert [(s["method"], s["model"]) for s in systems] == [
        ("agent", f"{toy}/model"), ("direct", f"{toy}/model"), ("agent", "other"), ("direct", "other")]
    assert "difference" not in systems[0] and all(
        set(s["difference"]) == {f"{toy}/first.jsonl", f"{toy}/second.jsonl"} for s in systems[1:])
    out = capsys.readouterr().out.split("\n\n")
    assert out[1].splitlines()[0].split() == ["EM", "first", "second"]
    assert [line.split()[:2] for line in out[2].splitlines()[1:]] == [["direct", "model"], ["agent", "other"],
                                                                     ["direct", "other"]]


def test_samples_differ_and_are_reproducible(run):
    for out in ("a", "b"):
        run("--out", out, "--samples", 3, "--temperature", 1.0, "--seed", 5)
    run("--out", "c", "--samples", 3, "--temperature", 1.0, "--seed", 6)
    a, b, c = (pathlib.Path(out, "predictions.jsonl").read_bytes() for out in "abc")
    assert a == b != c
    rows = read_lines(pathlib.Path("a/predictions.jsonl"))
    first = [row["response_ids"] for row in rows if row["question_id"] == "first0"]
    assert len(first) == 3 and first[0] != first[1] != first[2]
    (result,) = without_time("a")[0]["benchmarks"].values()
    assert len(result["f1_by_sample"]) == 3
    assert result["f1_std"] == pytest.approx(np.std(result["f1_by_sample"], ddof=1))


# -----------------------------------------------------------------------------
# scores and tables

def prediction(answer, golden, searches=0, hit=False, tokens=10, truncated=False, invalid=0):
    trajectory = Trajectory("q", 0, [], b"\1", b"\1", [], [Search("q", [], hit)] * searches, invalid,
                            "turns" if answer is None else "answer", answer)
    return {"trajectory": trajectory, "tokens": tokens, "truncated": truncated, "em": float(answer == golden),
            "f1": f1_score(answer, [golden])}


QUESTIONS = [Question(str(i), "q?", ["right answer"]) for i in range(4)]


def four(*answers, **changes):
    return tables.scores(QUESTIONS, [[prediction(answer, "right answer", **changes)] for answer in answers])


def test_scores():
    rows = [prediction("right answer", "right answer", 2, True, 10), prediction("right", "right answer", 2, False, 20),
            prediction("wrong", "right answer", 0, False, 30, truncated=True),
            prediction(None, "right answer", 0, False, 40, invalid=3)]
    result = tables.scores(QUESTIONS, [[row] for row in rows])
    assert (result["em"], result["tokens"], result["searches"], result["n"]) == (0.25, 25, 1.0, 4)
    assert result["f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert (result["share_invalid"], result["share_truncated"], result["share_unanswered"]) == (0.25, 0.25, 0.25)
    assert {k: (v["count"], v["em"]) for k, v in result["by_searches"].items()} == {"0": (2, 0.0), "2": (2, 0.5)}
    assert {k: (v["count"], v["share"], v["em"]) for k, v in result["by_stratum"].items()} == {
        "2, hit": (1, 0.25, 1.0), "2, no hit": (1, 0.25, 0.0), "0": (2, 0.5, 0.0)}
    assert result["em_interval"] == bootstrap_interval([1, 0, 0, 0]) and "em_std" not in result


def test_samples_give_mean_and_spread():
    right, wrong = prediction("right answer", "right answer"), prediction("x", "right answer")
    result = tables.scores(QUESTIONS[:2], [[right, wrong], [right, right]])  # runs over the questions: EM 1 and 0.5
    assert result["em"] == 0.75 and result["em_by_sample"] == [1.0, 0.5]
    assert result["em_std"] == pytest.approx(0.5 / 2**0.5) and result["values"]["em"].tolist() == [0.5, 1.0]
    assert result["em_interval"] == bootstrap_interval([0.5, 1.0])  # over questions, not over answers


def test_the_interval_of_one_column_is_the_bootstrap_of_data():
    values = np.random.default_rng(1).random(50)
    assert tables.interval_of_average([values]) == bootstrap_interval(values)


def test_the_interval_of_an_average_against_the_normal_one():
    generator = np.random.default_rng(1)
    columns = [generator.random(400) * scale for scale in (1, 5)]
    low, high = tables.interval_of_average(columns)
    width = 1.96 * np.sqrt(sum(c.var() / len(c) for c in columns)) / 2  # the standard error of a mean of two means
    assert high - low == pytest.approx(2 * width, rel=0.1)
    assert low < np.mean([c.mean() for c in columns]) < high


def test_averages_and_paired_differences():
    right, wrong = "right answer", "wrong"
    first = {"nq_test.jsonl": four(right, right, wrong, wrong), "popqa": four(wrong, wrong, wrong, wrong),
             "musique": four(right, wrong, wrong, wrong), "mine": four(right, right, right, right)}
    second = {"nq_test.jsonl": four(right, right, right, wrong, tokens=20), "popqa": four(right, right, right, right),
              "musique": four(right, wrong, wrong, wrong), "mine": four(wrong, right, right, right)}
    averages = tables.summary(first)["averages"]
    assert {k: (v["em"], v["of"], v["missing"]) for k, v in averages.items()} == {
        "single-hop": (0.25, ["nq_test.jsonl", "popqa"], 1),           # (0.5 + 0) / 2
        "all seven": (0.25, ["nq_test.jsonl", "popqa", "musique"], 4)}  # one multi-hop benchmark alone is no average
    summary = tables.summary(second, first)
    assert {k: v["em"] for k, v in summary["difference"].items()} == {
        "nq_test.jsonl": 0.25, "popqa": 1.0, "musique": 0.0, "mine": -0.25, "single-hop": 0.625,
        "all seven": pytest.approx(1.25 / 3)}
    # pairing: where every question gains the same there is no doubt about the gain, whatever the questions
    assert summary["difference"]["popqa"]["em_interval"] == (1.0, 1.0)
    assert summary["difference"]["musique"]["em_interval"] == (0.0, 0.0)
    low, high = summary["difference"]["nq_test.jsonl"]["em_interval"]   # differences 0 0 1 0: at most 3 of 4 drawn ones
    assert low == 0.0 and high == 0.75
    assert summary["averages"]["single-hop"]["tokens"] == 15.0
    json.dumps(summary)


def system(method, benchmarks, first=None):
    return {"model": "folder/m_1", "method": method, "protocol": {}, **tables.summary(benchmarks, first)}


@pytest.fixture
def two_systems():
    first = {"nq_test.jsonl": four("right answer", "wrong", None, "wrong"), "popqa": four(*["wrong"] * 4)}
    second = {name: four(*["right answer"] * 4, searches=1, hit=True) for name in first}
    return [system("direct", first), system("rag", second, first)]


ALL_RIGHT = ["1.000 [1.000, 1.000]", "1.000 [1.000, 1.000]", "1.00", "10"]


def test_tables_of_one_system(two_systems):
    scores, strata = tables.tables(two_systems[1:])
    assert scores == [
        ["method", "questions", "n", "EM [95 %]", "F1 [95 %]", "searches", "tokens", "invalid", "truncated",
         "unanswered"],
        ["rag", "nq", "4", *ALL_RIGHT, "0%", "0%", "0%"], ["rag", "popqa", "4", *ALL_RIGHT, "0%", "0%", "0%"],
        ["rag", "single-hop average (1 missing)", "", *ALL_RIGHT, "", "", ""],
        ["rag", "all seven average (5 missing)", "", *ALL_RIGHT, "", "", ""]]
    assert strata == [["questions", "searches", "share", "EM", "F1"],
                      ["nq", "1", "100.0%", "1.000", "1.000"], ["nq", "1, hit", "100.0%", "1.000", "1.000"],
                      ["popqa", "1", "100.0%", "1.000", "1.000"], ["popqa", "1, hit", "100.0%", "1.000", "1.000"]]


def test_tables_of_several_systems(two_systems):
    scores, comparison, differences = tables.tables(two_systems)
    assert scores[1] == ["direct", "nq", "4", "0.250 [0.000, 0.750]", "0.250 [0.000, 0.750]", "0.00", "10", "0%", "0%",
                         "25%"] and len(scores) == 9
    columns = ["nq", "popqa", "single-hop average (1 missing)", "all seven average (5 missing)"]
    assert comparison == [["EM", *columns], ["direct", "0.250", "0.000", "0.125", "0.125"],
                          ["rag", "1.000", "1.000", "1.000", "1.000"]]
    assert differences[0] == ["EM minus direct", *columns]
    assert differences[1][:3] == ["rag", "+0.750 [+0.250, +1.000]", "+1.000 [+1.000, +1.000]"]
    assert differences[1][3].startswith("+0.875 [") and len(differences) == 2


def test_models_of_one_name_are_told_apart(two_systems):
    for models, labels in ((["a/checkpoint-1", "b/checkpoint-1"], ["direct a/checkpoint-1", "rag b/checkpoint-1"]),
                           (["a/one", "b/two"], ["direct one", "rag two"])):
        systems = [{**s, "model": model} for s, model in zip(two_systems, models)]
        assert [row[0] for row in tables.tables(systems)[1][1:]] == labels


def test_styles():
    rows = [["a_b", "EM [95 %]"], ["x", "0.5 ± 0.1"], ["longer", "1"]]
    assert tables.plain(rows) == "a_b     EM [95 %]\nx       0.5 ± 0.1\nlonger          1"
    assert tables.markdown(rows) == "| a_b | EM [95 %] |\n|---|---:|\n| x | 0.5 ± 0.1 |\n| longer | 1 |"
    assert tables.latex(rows) == "\n".join([
        r"\begin{tabular}{lr}", r"\hline", r"a\_b & EM [95 \%] \\", r"\hline", r"x & 0.5 $\pm$ 0.1 \\",
        r"longer & 1 \\", r"\hline", r"\end{tabular}"])


def test_benchmarks_are_known_by_the_beginning_of_their_file_s_name():
    names = ["nq", "data/nq_test.jsonl", "2wikimultihopqa_dev.jsonl", "mine_test.jsonl", "nqx.jsonl"]
    assert [tables.benchmark(name) for name in names] == ["nq", "nq", "2wikimultihopqa", "mine_test", "nqx"]
