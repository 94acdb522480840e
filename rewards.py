"""
rewards.py — what a rollout earns: exact match, and two rewards that look at its form, too. Pure functions of text.

    python train.py --reward search-r1-format        # research is the default under --protocol research

`response` is the whole response, passages included. Tags inside passages were neutralised (rollout.py), so every tag in
it is the sampler's or the policy's own.

Departures:
 1. Search-R1 and ReSearch extract the answer from text; here it is trajectory.answer, of sampled text only.
 2. research: a small F1 is raised to the floor, too; in ReSearch an F1 of 0.05 earns less than an F1 of 0.
"""
import re

from data import exact_match, f1_score
from rollout import last_boxed

INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"  # text without any tag
SEARCH_R1_FORM = re.compile(
    rf"\s*(?:<think>{INSIDE}</think>\s*<search>{INSIDE}</search>\s*<information>{INSIDE}</information>\s*)*"
    rf"<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)


def search_r1_format_reward(response, answer, golden_answers, hit, structure=0.2, final=0.1, retrieval=0.0):
    """Exact match with partial credit: 1 right and well-formed, 1 - structure right but ill-formed; wrong but
    well-formed structure, + retrieval if a passage held a golden answer; otherwise final for any answer, 0 for none.

    Well-formed: think, search, information, any number of times, then think, answer, and nothing between them. Source:
    Search-R1 verl/utils/reward_score/qa_em_format.py; 0.2, 0.1, 0 are the values of its scripts.
    """
    well_formed = SEARCH_R1_FORM.fullmatch(response) is not None
    if exact_match(answer, golden_answers):
        return 1.0 if well_formed else 1.0 - structure
    if well_formed:
        return structure + (retrieval if hit else 0.0)
    return 0.0 if answer is None else final


def research_reward(response, answer, golden_answers, floor=0.1):
    """F1, at least `floor`, if the response is well-formed, else 0.

    Well-formed: <think> at least once and always closed, one <answer>, a \\boxed{} in it, and every <search> followed
    by </search>, <result>, </result>. Source: ReSearch (arXiv 2503.19470), section 2.4.
    """
    counts = {tag: response.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")}
    if not counts["<think>"] == counts["</think>"] >= 1 or not counts["<answer>"] == counts["</answer>"] == 1:
        return 0.0
    position = 0
    while (position := response.find("<search>", position)) >= 0:
        for tag in ("</search>", "<result>", "</result>"):
            following = response.find(tag, position)
            if following < 0 or "<search>" in response[position + 1 : following]:
                return 0.0
            position = following
    if answer is None or last_boxed(response.partition("<answer>")[2].partition("</answer>")[0]) is None:
        return 0.0
    return max(floor, f1_score(answer, golden_answers))


REWARDS = ("em", "search-r1-format", "research")


def reward(name, trajectory, question, tokenizer):
    """The reward `name` of REWARDS for one rollout, in [0, 1]."""
    if name == "em":
        return exact_match(trajectory.answer, question.golden_answers)
    response = tokenizer.decode(trajectory.response_ids, clean_up_tokenization_spaces=False)
    if name == "research":
        return research_reward(response, trajectory.answer, question.golden_answers)
    hit = any(search.hit for search in trajectory.searches)
    return search_r1_format_reward(response, trajectory.answer, question.golden_answers, hit)
