"""Generators of rubrics for tests."""

import os
import time


def _number(rubrics) -> int:
    """1 at the first visit: how many rubrics there are beside the persistent ones, and 1."""
    return 1 + sum(rubric["kind"] != "persistent" for rubric in rubrics)


def two_by_visit(prompt, responses, rubrics) -> dict:
    assert prompt and len(responses) > 1
    n = _number(rubrics)
    return {"positive": [f"good {n}"], "negative": [{"description": f"bad {n}", "weight": 5}]}


def five_by_visit(prompt, responses, rubrics) -> dict:
    n = _number(rubrics)
    return {"positive": [f"new {n + i}" for i in range(5)]}


def broken(prompt, responses, rubrics, how: str):
    if how == "hang":
        time.sleep(3600)
    if how == "exit":
        os._exit(1)
    if how == "raise":
        raise RuntimeError("no idea")
    return {"nonsense": ["be good"], "nothing": {}}[how]
