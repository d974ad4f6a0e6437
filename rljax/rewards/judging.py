"""Judges of two completions, and the call of one in a worker of the reward pool.

What lives here: the contract of a judge, and judges that are rules. What does not: both orders,
ties, counts, files (rljax.rlaif). A judge is a function of texts that config text names,
"my_judges.ask(model='...')": judge(prompt, first, second) -> P(first is better), from 0 to 1, or a
dict of named numbers with that as "score". `prompt` is a text or a list of messages.
"""

import functools

from rljax.components import Component, resolve
from rljax.errors import InputError

HOME = "rljax.rewards.judging"


def shorter(prompt, first: str, second: str) -> float:
    """The one of fewer characters: how far a judge's labels are those of length alone."""
    return 0.5 if len(first) == len(second) else float(len(first) < len(second))


@functools.cache
def judge_of(text: str) -> Component:
    """The judge that `text` names. Raises InputError if it cannot be called as one."""
    judge = resolve(text, HOME)
    try:
        judge.signature.bind("prompt", "first", "second", **judge.options)
    except TypeError as error:
        raise InputError(
            f"judge {text!r} cannot be called",
            rule=f"judge(prompt, first, second): {error}",
            fix="its other parameters need defaults, or options in the text",
        ) from None
    return judge


def judged(prompt, response: str, extra_info: dict, *, judge: str) -> dict:
    """As a reward of `response`: what the judge says of it as the first and extra_info["second"] as
    the second."""
    found = judge_of(judge)(prompt, response, extra_info["second"])
    found = found if isinstance(found, dict) else {"score": found}
    if "score" in found and not 0 <= found["score"] <= 1:
        raise ValueError(f"the judge returned {found['score']!r}: a probability is from 0 to 1")
    return found
