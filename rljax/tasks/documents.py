"""JSON extraction: a text with facts in it -> one JSON object. An endless stream unless
`prompts` is set.

Kinds of documents, their facts and the sentences that say them.
"""

import json
import random
from collections.abc import Callable
from typing import Literal

from rljax.contracts import contract
from rljax.tasks.task import TEXT, Problem, Task, check_choice, check_range, procedural

_NAMES = "Ada Ben Cleo Dana Emil Farah Gita Hugo Ines Jonas Kira Liam Mona Nils Olga Pavel".split()
_SURNAMES = "Abel Brandt Costa Duval Eriksen Fischer Garcia Haas Ito Jensen Kaya Lopez".split()
_CITIES = "Athens Bergen Cairo Delft Evora Florence Ghent Hanoi Izmir Jaipur Kyoto Lima".split()
_GOODS = "lamps chairs kettles bicycles notebooks jackets mugs clocks tents violins".split()
_MONTHS = "January March May July August October December".split()  # months of 31 days
_TOPICS = "gardening astronomy pottery chess sailing typography bread robotics".split()

# field -> (its value, sentences that say it); `{}` is the value.
Field = tuple[Callable[[random.Random], object], tuple[str, ...]]


def _person(rng: random.Random) -> str:
    return f"{rng.choice(_NAMES)} {rng.choice(_SURNAMES)}"


def _price(rng: random.Random) -> float:
    return rng.randint(100, 99_999) / 100


_KINDS: dict[str, dict[str, Field]] = {
    "order": {
        "customer": (_person, ("The order was placed by {}.", "{} is the customer.")),
        "item": (lambda rng: rng.choice(_GOODS), ("What was ordered are {}.", "They bought {}.")),
        "quantity": (lambda rng: rng.randint(1, 500), ("The quantity is {}.", "{} were sent.")),
        "total": (_price, ("The total came to {} euros.", "The invoice says {} euros.")),
        "city": (lambda rng: rng.choice(_CITIES), ("It ships to {}.", "The parcel goes to {}.")),
        "paid": (lambda rng: rng.random() < 0.5, ("The invoice is {}.",)),
    },
    "event": {
        "speaker": (_person, ("The talk is given by {}.", "{} will speak.")),
        "topic": (lambda rng: rng.choice(_TOPICS), ("It is about {}.", "The topic is {}.")),
        "city": (lambda rng: rng.choice(_CITIES), ("The venue is in {}.", "We meet in {}.")),
        "day": (lambda rng: rng.randint(1, 31), ("It is on day {} of the month.",)),
        "month": (lambda rng: rng.choice(_MONTHS), ("It happens in {}.", "The month is {}.")),
        "seats": (lambda rng: rng.randint(5, 900), ("There are {} seats.", "It seats {}.")),
    },
    "person": {
        "name": (_person, ("My name is {}.", "They call me {}.")),
        "age": (lambda rng: rng.randint(18, 99), ("I am {} years old.", "I turned {} this year.")),
        "city": (lambda rng: rng.choice(_CITIES), ("I live in {}.", "My home is {}.")),
        "hobby": (lambda rng: rng.choice(_TOPICS), ("My hobby is {}.", "I spend weekends on {}.")),
        "children": (lambda rng: rng.randint(0, 5), ("Number of children: {}.",)),
        "member": (lambda rng: rng.random() < 0.5, ("My membership is {}.",)),
    },
}
_WORDS = {"paid": ("paid", "not paid yet"), "member": ("active", "not active")}  # True, False
_NOISE = (
    "The weather was fine.",
    "Thank you for your patience.",
    "A colleague wrote to us 3 times about something else.",
    "Please keep this message.",
)


@contract(safe=True)
def json_extraction(
    *,
    fields: int = 4,
    noise: int = 1,
    style: Literal["words", "short"] = "words",
    chat: bool = False,
    prompts: int = 0,
    test: int = 512,
    worked_examples: int = 256,
    seed: int = 0,
) -> Task:
    """ "... {} is the customer. The quantity is 12." -> {"customer": ..., "quantity": 12}.

    `fields` facts about an order, an event or a person in random order, between `noise` sentences
    that do not matter; the prompt names the keys and their types. "short" writes "k1=v1;k2=v2>" for
    models of a few layers. Reward: json_match(), the share of the values; evaluation: all of them.
    Raises InputError unless 1 <= fields <= 6 and 0 <= noise <= 4, and for another style.
    """
    check_range("json_extraction", "fields", fields, 1, 6)
    check_range("json_extraction", "noise", noise, 0, len(_NOISE))
    check_choice("json_extraction", "style", style, "words", "short")

    def draw(rng: random.Random) -> Problem:
        if style == "short":
            keys = rng.sample("abcdefgh", fields)
            record = {key: rng.randint(0, 99) for key in keys}
            text = ";".join(f"{k}={v}" for k, v in record.items()) + ">"
            truth = json.dumps(record, separators=(",", ":"), sort_keys=True)
            return Problem(text, truth, truth)
        kind = rng.choice(sorted(_KINDS))
        names = rng.sample(sorted(_KINDS[kind]), fields)
        values = {name: _KINDS[kind][name][0](rng) for name in names}
        sentences = [_sentence(rng, kind, name, values[name]) for name in names]
        sentences += rng.sample(_NOISE, noise)
        rng.shuffle(sentences)
        keys = ", ".join(f"{n} ({_TYPES[type(v)]})" for n, v in sorted(values.items()))
        instruction = f"Write what this text says as one JSON object with the keys {keys}."
        prompt = f"{' '.join(sentences)}\n\n{instruction}\n"
        truth = json.dumps(values, sort_keys=True)
        return Problem(prompt, truth, f"```json\n{truth}\n```")

    scores = dict(reward="json_match()", evaluation="json_match(partial=False)")
    alphabet = '0123456789abcdefgh=;>{}":,' if style == "short" else TEXT
    sizes = dict(prompts=prompts, test=test, worked_examples=worked_examples, seed=seed)
    return procedural("json_extraction", draw, alphabet=alphabet, chat=chat, **scores, **sizes)


_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _sentence(rng: random.Random, kind: str, name: str, value: object) -> str:
    if isinstance(value, bool):
        value = _WORDS[name][not value]
    return rng.choice(_KINDS[kind][name][1]).format(value)
