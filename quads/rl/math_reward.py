"""Is the final answer of a response equal to the gold answer? Runs inside a judge (judge.py), which may be killed."""

import re

from math_verify import parse, verify

FINAL = re.compile(r"(?:answer|result)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)


def math_reward(gold: str, response: str, percent_as_unit: bool = False) -> float:
    """1.0 if the response's final answer equals `gold`, else 0.0."""
    answer = extract_answer(response)
    if answer is None:
        return 0.0
    ours = parse(f"$\\boxed{{{answer}}}$", parsing_timeout=None)
    return float(verify(parse(f"${gold}$", parsing_timeout=None), ours, timeout_seconds=None))


def is_readable(gold: str) -> bool:
    """Can this gold answer be compared with anything?"""
    return bool(parse(f"${gold}$", parsing_timeout=None))


def extract_answer(response: str) -> str | None:
    """The last boxed answer, else the last `answer is ...`."""
    start = response.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for i in range(begin, len(response)):
            depth += {"{": 1, "}": -1}.get(response[i], 0)
            if depth == 0:
                return response[begin + 1 : i]
    found = FINAL.findall(response)
    return found[-1].strip(" .$") if found else None
