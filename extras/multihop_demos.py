"""
multihop_demos.py — demonstrations for a warm start, written from the look-ups that multi-hop questions come with.

    python -m extras.multihop_demos multihop_train.jsonl demos.jsonl --max-searches 2

Input: questions whose metadata.decomposition lists one {"query", "answer"} per hop, as 2WikiMultiHopQA and MuSiQue
provide them. Output: jsonl {id, question, golden_answers, turns} for `python train.py --demos`. Six in ten questions
are answered by their look-ups in order, a quarter by one search with the question itself, the rest without a search,
so that the policy starts with a mix of search counts. Questions with more hops than --max-searches are left to the
other two kinds. Deterministic in --seed.
"""
import argparse
import json
import random

from data import load_questions


def demonstrate(question, max_searches, generator):
    """-> the turns of one demonstration, ending in a golden answer."""
    hops, draw, answer = question.metadata.get("decomposition") or [], generator.random(), question.golden_answers[0]
    if draw < 0.15:
        return [f"<think> I know this. </think> <answer> {answer} </answer>"]
    if draw < 0.4 or not 0 < len(hops) <= max_searches:
        query = " ".join(question.question.rstrip("? ").split()[:30])
        return [f"<think> I search for the question. </think> <search> {query} </search>",
                f"<answer> {answer} </answer>"]
    turns, thought = [], ""
    for hop in hops:
        turns.append(f"<think>{thought} I need: {hop['query']}. </think> <search> {hop['query']} </search>")
        thought = f" {hop['query']}: {hop['answer']}."
    return turns + [f"<think>{thought} </think> <answer> {answer} </answer>"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions")
    parser.add_argument("out")
    parser.add_argument("--max-searches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    generator = random.Random(args.seed)
    questions = load_questions(args.questions)
    with open(args.out, "w", encoding="utf-8") as file:
        for question in questions:
            row = {"id": question.id, "question": question.question, "golden_answers": question.golden_answers}
            file.write(json.dumps({**row, "turns": demonstrate(question, args.max_searches, generator)},
                                  ensure_ascii=False) + "\n")
    print(f"{len(questions)} demonstrations -> {args.out}")


if __name__ == "__main__":
    main()
