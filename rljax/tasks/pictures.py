"""Tasks about pictures that are drawn here: an image in the prompt, and an answer about it."""

import random

import numpy as np

from rljax.contracts import contract
from rljax.data.images.columns import MARK
from rljax.data.online.stream import Stream
from rljax.tasks.task import Task, check_range

# The first four characters of the alphabet of a task with images for a built-in model: an image's
# token, a video's, and what stands before and after an image.
IMAGE_CHARACTERS = "\u25a3\u25a4\u27e6\u27e7"

# Segments of a display: top, two upper sides, middle, two lower sides, bottom, as (row, column,
# height, width) in a box of 5 x 3.
_SEGMENTS = [tuple(map(int, s)) for s in "0013 0031 0231 2013 2031 2231 4013".split()]
_LIT = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011".split()


@contract(safe=True)
def drawn_digits(
    *,
    digits: int = 1,
    kinds: int = 10,
    pixels: int = 16,
    noise: int = 40,
    test: int = 128,
    worked_examples: int = 512,
    seed: int = 0,
) -> Task:
    """A picture of `digits` digits, each one of the first `kinds`, and the question what they are.

    Each stands in a square of `pixels` x `pixels`, at a random position, in random colours, under
    noise of up to `noise` of 255 levels. A picture is a function of (seed, split, index); training
    is an endless stream.
    """
    check_range("drawn_digits", "digits", digits, 1, 16)
    check_range("drawn_digits", "kinds", kinds, 2, 10)
    check_range("drawn_digits", "pixels", pixels, 8, 512)
    check_range("drawn_digits", "noise", noise, 0, 127)
    check_range("drawn_digits", "test", test, 1, 2**20)
    check_range("drawn_digits", "worked_examples", worked_examples, 0, 2**20)

    def row(split: str, index: int) -> dict:
        draw = random.Random(f"drawn_digits/{seed}/{split}/{index}")
        text = "".join(str(draw.randrange(kinds)) for _ in range(digits))
        picture = np.concatenate([_digit(int(d), pixels, noise, draw) for d in text], axis=1)
        fields = dict(prompt=f"{MARK}?", images=[picture], ground_truth=text)
        return dict(fields, data_source="drawn_digits", extra_info={}, index=index)

    def demonstrations(split: str, count: int) -> list[dict]:
        rows = [row(split, index) for index in range(count)]
        names = ("prompt", "images")
        return [{**{n: r[n] for n in names}, "completion": r["ground_truth"]} for r in rows]

    return Task(
        alphabet=IMAGE_CHARACTERS + "0123456789?",
        train=Stream(lambda index: row("train", index)),
        test=[row("test", index) for index in range(test)],
        worked_examples=demonstrations("train", worked_examples),
        worked_test=demonstrations("test", test),
    )


def _digit(digit: int, size: int, noise: int, draw: random.Random) -> np.ndarray:
    """Draws a digit: [size, size, 3] uint8."""
    step = max(size // 8, 1)
    ground = np.array([draw.randrange(128, 256) for _ in range(3)])
    ink = np.array([draw.randrange(0, 96) for _ in range(3)])
    down, right = draw.randrange(size - 5 * step + 1), draw.randrange(size - 3 * step + 1)
    picture = np.broadcast_to(ground, (size, size, 3)).copy()
    for lit, (row, column, height, width) in zip(_LIT[digit], _SEGMENTS, strict=True):
        if lit == "1":
            top, left = down + row * step, right + column * step
            picture[top : top + height * step, left : left + width * step] = ink
    rng = np.random.default_rng(draw.randrange(2**32))
    picture = picture + rng.integers(-noise, noise + 1, picture.shape)
    return np.clip(picture, 0, 255).astype(np.uint8)
