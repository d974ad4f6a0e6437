"""Rewards that keep a record of who asked them, and that fail on some prompts."""

import os
import time
import zlib


def logged(response, prompt, ground_truth, *, file: str = "") -> dict:
    """1 for the truth as the first letter; parts that not every sample has. Each call is a line in
    a file of its host."""
    if file:
        with open(f"{file}.{os.environ.get('RLJAX_HOST', '0')}", "a") as lines:
            lines.write(f"{prompt}\t{response}\n")
    right = float(response[:1] == ground_truth)
    return {"score": right, "hit" if right else "miss": 1.0}


def failing(response, prompt, ground_truth, *, fails: tuple = ()) -> float:
    """`fails` are prompts: the first one's samples raise, the second's hang, the third's end the
    process."""
    how = fails.index(prompt) if prompt in fails else None
    if how == 0:
        raise RuntimeError(f"no score for {response!r}")
    if how == 1:
        time.sleep(600)
    if how == 2:
        os._exit(9)
    return float(response[:1] == ground_truth)


def by_rubric(response, prompt, extra_info) -> dict:
    """Verdicts on the rubrics of the prompt, made up from their texts."""
    rubrics = extra_info["rubrics"]
    values = [zlib.crc32(f"{r['description']} {response}".encode()) % 3 / 2 for r in rubrics]
    score = sum(v * r["weight"] for v, r in zip(values, rubrics, strict=True))
    return {"score": score, **{f"rubric/{k}": v for k, v in enumerate(values)}}


def generator(prompt, responses, rubrics) -> dict:
    n = len(rubrics)
    return {"positive": [f"new {n} of {prompt}"], "negative": [f"bad {n} {min(responses)}"]}
