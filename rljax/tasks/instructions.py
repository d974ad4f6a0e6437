"""Instructions about the form of an answer, which a program verifies: the number of words, the
ending, repetition. For pretrained models, which can often do a part of them."""

import json
import random
from typing import Literal

from rljax.contracts import contract
from rljax.tasks.task import Problem, Task, check_choice, procedural

_TOPICS = (
    "book bridge bus cat chair city cloud coat desert dog door dream farm field fire fish flower "
    "forest friend garden ghost guitar hat hill horse house king lake lamp library market mirror "
    "monkey mountain mouse museum nurse painter park pencil piano pirate planet rabbit river robot "
    "school shadow ship shop snake spoon storm table teacher tiger tower train tree village window"
).split()
_ENDINGS = (
    "and that is all, as everybody knows, before the sun rises, every single day, "
    "for the first time, like never before, no matter what, once and for all, or so they say, "
    "until the very end, when nobody is looking, with a big smile"
).split(", ")


def _exactly(kind: str, argument: str, count: int, **options) -> list[tuple[str, dict]]:
    """The two instructions that together ask for a count."""
    bounds = {"at least": count, "less than": count + 1}
    return [(kind, {**options, argument: n, "relation": bound}) for bound, n in bounds.items()]


def _words(topic: str, rng: random.Random) -> tuple[str, list, str]:
    count = rng.randint(4, 9)
    prompt = f"Write exactly {count} words about a {topic}."
    answer = " ".join(f"A {topic} stands there all alone and waits today".split()[:count])
    return prompt, _exactly("length_constraints:number_words", "num_words", count), answer


def _ending(topic: str, rng: random.Random) -> tuple[str, list, str]:
    phrase = rng.choice(_ENDINGS)
    prompt = f'Write a short sentence about a {topic} that ends with "{phrase}"'
    constraints = [("startend:end_checker", {"end_phrase": phrase})]
    return prompt, constraints, f"There is a {topic} {phrase}"


def _repeat(topic: str, rng: random.Random) -> tuple[str, list, str]:
    count = rng.randint(2, 9)
    prompt = f'Write the word "{topic}" exactly {count} times.'
    constraints = _exactly("keywords:frequency", "frequency", count, keyword=topic)
    return prompt, constraints, " ".join([topic] * count)


_KINDS = {"words": _words, "ending": _ending, "repeat": _repeat}


@contract(safe=True)
def instructions(
    *,
    kind: Literal["words", "ending", "repeat"],
    chat: bool = False,
    prompts: int = 0,
    test: int = 200,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "Write exactly 6 words about a river." -> "A river stands there all alone", or others.

    `kind`: words, a number of words; ending, a last phrase; repeat, a word that stands there so
    many times. There are between 390 and 800 prompts of each. Reward: instruction_following().

    Raises InputError for another kind.
    """
    check_choice("instructions", "kind", kind, *_KINDS)

    def draw(rng: random.Random) -> Problem:
        prompt, constraints, answer = _KINDS[kind](rng.choice(_TOPICS), rng)
        names, arguments = zip(*constraints, strict=True)
        truth = json.dumps({"instruction_id_list": names, "kwargs": arguments})
        return Problem(prompt, truth, answer)

    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    return procedural("instructions", draw, reward="instruction_following()", chat=chat, **sizes)
