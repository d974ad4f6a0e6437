"""Tasks and rewards of the experiments in claims.py, by which a config names them."""

import dataclasses
import itertools
import random
from collections.abc import Callable

from rljax.contracts import contract
from rljax.rewards.on_device import DeviceForm
from rljax.rewards.on_device.form import bytes_of, inside
from rljax.tasks import Task

RULES: dict[str, Callable[[list[int]], int]] = {
    "first": lambda digits: digits[0],
    "last": lambda digits: digits[-1],
    "sum": lambda digits: sum(digits) % 10,
}


def bracketed_reward(response: str, ground_truth: str) -> dict[str, float]:
    """1 for the right answer in brackets, as verl scores GSM8K without a score for the form;
    `extracted` is the form alone: brackets around one digit."""
    well_formed = len(response) == 3 and response[0] + response[2] == "[]" and response[1].isdigit()
    return {"score": float(response == f"[{ground_truth}]"), "extracted": float(well_formed)}


def bracketed(
    rule: str = "first",
    digits: int = 3,
    kinds: int = 10,
    test: int = 200,
    worked_examples: int = 96,
    seed: int = 0,
) -> Task:
    """ "417>" -> "[4]" by rule="first": a digit of the prompt, or the sum of all modulo 10."""
    numbers = list(itertools.product(range(kinds), repeat=digits))
    random.Random(seed).shuffle(numbers)
    rows = [
        {
            "prompt": "".join(map(str, number)) + ">",
            "ground_truth": str(RULES[rule](list(number))),
            "data_source": rule,
        }
        for number in numbers
    ]

    def demonstrations(part):
        return [{"prompt": row["prompt"], "completion": f"[{row['ground_truth']}]"} for row in part]

    return Task(
        alphabet="0123456789>[]",
        train=rows[test:],
        test=rows[:test],
        worked_examples=demonstrations(rows[test : test + worked_examples]),
        worked_test=demonstrations(rows[:test]),
        reward="claims_tasks.bracketed_reward()",
    )


def first_digit(begins: int, kinds: int = 4, test: int = 16, seed: int = 0) -> Task:
    """ "2013>" -> "2" of prompts that all begin with one digit: alone they are solved without
    reading."""
    numbers = [(begins, *digits) for digits in itertools.product(range(kinds), repeat=3)]
    random.Random(seed).shuffle(numbers)
    rows = [
        {"prompt": "".join(map(str, number)) + ">", "ground_truth": str(begins)}
        for number in numbers
    ]
    return Task(alphabet="0123456789>", train=rows[test:], test=rows[:test])


LETTERS = "abcdef"


def wanted_on_device(responses, fields):
    """Computes `wanted_letters` on the device."""
    is_wanted = (responses.text[:, :, None] == fields["wanted"][:, None, :]).any(axis=2)
    return (is_wanted & inside(responses.text, responses.length))[:, :4].sum(axis=1) / 4


@contract(
    on_device=DeviceForm(wanted_on_device, lambda ground_truth: {"wanted": bytes_of(ground_truth)})
)
def wanted_letters(response: str, ground_truth: str) -> float:
    """The share of four letters that are among those of the ground truth."""
    return sum(letter in ground_truth for letter in response[:4]) / 4


def many_answers(prompts: int = 128, length: int = 4, seed: int = 0) -> Task:
    """Prompts whose demonstrations are any four letters: half of all letters are wanted, so that
    there are 81 best answers."""
    rng = random.Random(seed)

    def random_word():
        return "".join(rng.choices(LETTERS, k=length))

    names = list(dict.fromkeys(random_word() for _ in range(2 * prompts)))[:prompts]
    rows = [{"prompt": f"{name}>", "ground_truth": LETTERS[:3]} for name in names]
    demonstrations = [
        {"prompt": f"{rng.choice(names)}>", "completion": random_word()} for _ in range(512)
    ]
    return Task(
        alphabet=LETTERS + ">",
        train=rows[16:],
        test=rows[:16],
        worked_examples=demonstrations,
        reward="claims_tasks.wanted_letters()",
    )


def sorted_pairs(digits: int = 6, prompts: int = 400, test: int = 64, seed: int = 0) -> Task:
    """Digits to sort: the chosen response is right, the rejected one has two neighbours swapped.
    The two have nearly all their tokens in common."""
    rng = random.Random(seed)
    rows = []
    for number in rng.sample(range(10**digits), prompts + test):
        text = str(number).zfill(digits)
        chosen = "".join(sorted(text))
        positions = [i for i in range(digits - 1) if chosen[i] != chosen[i + 1]]
        if not positions:
            continue
        i = rng.choice(positions)
        rejected = chosen[:i] + chosen[i + 1] + chosen[i] + chosen[i + 2 :]
        rows.append({"prompt": f"{text}>", "chosen": chosen, "rejected": rejected})
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows[test:]]
    return dataclasses.replace(
        Task(alphabet="0123456789>", train=rows[test:], test=rows[:test]),
        worked_examples=demonstrations,
    )
