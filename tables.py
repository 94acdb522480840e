"""
tables.py — predictions in, scores with intervals, averages and paired differences out, and the tables made of them.

eval.py shows how it is used. An interval is a percentile bootstrap over the questions, so it speaks of the choice of
questions only; "±" is the standard deviation over --samples. An average is the mean over benchmarks, as in the paper,
whatever their sizes; a difference is paired, because both systems answered the same questions.
"""
import pathlib

import numpy as np

from data import bootstrap_interval, score

SINGLE_HOP, MULTI_HOP = ("nq", "triviaqa", "popqa"), ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
AVERAGES = {"single-hop": SINGLE_HOP, "multi-hop": MULTI_HOP, "all seven": SINGLE_HOP + MULTI_HOP}


def scores(questions, predictions):
    """predictions[i][j]: the slim row of answer j to questions[i]. -> data.score's dict, with intervals over questions,
    and more that is ready for json; "values" are the EM and F1 of each question, mean over its answers, (n,) each."""
    samples = len(predictions[0])
    flat = [p for answers in predictions for p in answers]
    trajectories = [p["trajectory"] for p in flat]
    result = score([q for q in questions for _ in range(samples)], trajectories, interval=False)
    result |= {"n": len(questions), "tokens": float(np.mean([p["tokens"] for p in flat])), "values": {},
               "share_invalid": float(np.mean([t.n_invalid > 0 for t in trajectories])),
               "share_truncated": float(np.mean([p["truncated"] for p in flat])),
               "share_unanswered": float(np.mean([t.answer is None for t in trajectories]))}
    for name in ("em", "f1"):
        values = np.array([[p[name] for p in answers] for answers in predictions])     # (n, samples)
        result["values"][name] = values.mean(1)
        result[f"{name}_interval"] = bootstrap_interval(values.mean(1))
        if samples > 1:  # a sample is a whole run over the questions
            result |= {f"{name}_by_sample": values.mean(0).tolist(), f"{name}_std": float(values.mean(0).std(ddof=1))}
    strata = {}
    for p in flat:  # the same number of searches, and whether a passage held a golden answer
        t = p["trajectory"]
        hit = ", hit" if any(search.hit for search in t.searches) else ", no hit"
        label = str(t.n_searches) + (hit if t.searches else "")
        strata.setdefault(label, []).append((p["em"], p["f1"]))
    result["by_stratum"] = {label: {"count": len(rows), "share": len(rows) / len(flat),
                                    "em": float(np.mean(rows, 0)[0]), "f1": float(np.mean(rows, 0)[1])}
                            for label, rows in strata.items()}
    return result


def benchmark(name):
    """"data/nq_test.jsonl" -> "nq": the benchmark a file belongs to, if its name begins with one; else its stem."""
    stem = pathlib.Path(name).stem
    return stem.split("_")[0] if stem.split("_")[0] in AVERAGES["all seven"] else stem


def interval_of_average(columns, resamples=2000, seed=0):
    """95 % percentile bootstrap of the mean of the columns' means, the questions of each resampled on their own."""
    generator = np.random.default_rng(seed)
    means = [np.mean([c[generator.integers(len(c), size=len(c))].mean() for c in columns]) for _ in range(resamples)]
    return tuple(np.quantile(means, [0.025, 0.975]).tolist())


def summary(benchmarks, first=None):
    """Scores of one system -> what eval.json keeps of it: benchmarks, averages over them, and, given the scores of the
    first system, difference {name or average: EM minus the first one's}."""
    out = {"benchmarks": {name: {k: v for k, v in b.items() if k != "values"} for name, b in benchmarks.items()},
           "averages": {}}
    groups = {name: [name] for name in benchmarks}
    for label, members in AVERAGES.items():
        present = [name for name in benchmarks if benchmark(name) in members]
        if len(present) > 1:
            groups[label] = present
            row = {key: float(np.mean([benchmarks[name][key] for name in present]))
                   for key in ("em", "f1", "searches", "tokens")}
            intervals = {f"{key}_interval": interval_of_average([benchmarks[name]["values"][key] for name in present])
                         for key in ("em", "f1")}
            out["averages"][label] = {**row, **intervals, "of": present, "missing": len(members) - len(present)}
    if first:
        out["difference"] = {}
        for label, members in groups.items():
            columns = [benchmarks[name]["values"]["em"] - first[name]["values"]["em"] for name in members]
            out["difference"][label] = {"em": float(np.mean([column.mean() for column in columns])),
                                        "em_interval": interval_of_average(columns)}
    return out


# -----------------------------------------------------------------------------
# tables: lists of rows of text, the first of them the head

def tables(systems):
    """-> scores of every system; for one system its strata, for several EM side by side and the paired differences."""
    models = {s["model"] for s in systems}
    short = {model: pathlib.Path(model).name for model in models}
    if len(set(short.values())) < len(models):  # checkpoints of the same step
        short = {model: model for model in models}
    label = {id(s): s["method"] if len(models) == 1 else f"{s['method']} {short[s['model']]}" for s in systems}

    def mean(row, key):
        spread = f" ± {row[f'{key}_std']:.3f}" if f"{key}_std" in row else ""
        return f"{row[key]:.3f}{spread} [{row[f'{key}_interval'][0]:.3f}, {row[f'{key}_interval'][1]:.3f}]"

    def average_name(name, row):
        return f"{name} average" + (f" ({row['missing']} missing)" if row["missing"] else "")

    rows = [["method", "questions", "n", "EM [95 %]", "F1 [95 %]", "searches", "tokens", "invalid", "truncated",
             "unanswered"]]
    for s in systems:
        for name, b in s["benchmarks"].items():
            shares = [f"{b[f'share_{key}']:.0%}" for key in ("invalid", "truncated", "unanswered")]
            rows.append([label[id(s)], benchmark(name), str(b["n"]), mean(b, "em"), mean(b, "f1"),
                         f"{b['searches']:.2f}", f"{b['tokens']:.0f}", *shares])
        for name, a in s["averages"].items():
            rows.append([label[id(s)], average_name(name, a), "", mean(a, "em"), mean(a, "f1"), f"{a['searches']:.2f}",
                         f"{a['tokens']:.0f}", "", "", ""])
    if len(systems) == 1:
        strata = [["questions", "searches", "share", "EM", "F1"]]
        for name, b in systems[0]["benchmarks"].items():
            cells = {**b["by_searches"], **b["by_stratum"]}
            for stratum in sorted(cells, key=lambda stratum: (int(stratum.split(",")[0]), stratum)):
                row = cells[stratum]
                strata.append([benchmark(name), stratum, f"{row['share']:.1%}", f"{row['em']:.3f}", f"{row['f1']:.3f}"])
        return [rows, strata]
    columns = {**{name: benchmark(name) for name in systems[0]["benchmarks"]},
               **{name: average_name(name, a) for name, a in systems[0]["averages"].items()}}
    comparison = [["EM", *columns.values()]]
    differences = [[f"EM minus {label[id(systems[0])]}", *columns.values()]]
    for s in systems:
        values = {**s["benchmarks"], **s["averages"]}
        comparison.append([label[id(s)], *(f"{values[name]['em']:.3f}" for name in columns)])
        if "difference" in s:
            cells = [(s["difference"][name]["em"], *s["difference"][name]["em_interval"]) for name in columns]
            differences.append([label[id(s)], *(f"{d:+.3f} [{low:+.3f}, {high:+.3f}]" for d, low, high in cells)])
    return [rows, comparison, differences]


def plain(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]
                               ).rstrip() for row in rows)


def markdown(rows):
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]])


def latex(rows):
    def escape(cell):
        return "".join({"±": "$\\pm$"}.get(c, f"\\{c}" if c in "%_&#$" else c) for c in cell)

    lines = [" & ".join(map(escape, row)) + r" \\" for row in rows]
    head = r"\begin{tabular}{l" + "r" * (len(rows[0]) - 1) + "}"
    return "\n".join([head, r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", r"\end{tabular}"])


STYLES = {"plain": plain, "markdown": markdown, "latex": latex}
