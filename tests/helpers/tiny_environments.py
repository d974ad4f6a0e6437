"""Environments of a few letters, and rows for them: what tests of episodes play."""

import os
import time

from rljax.contracts import contract
from rljax.environments import Call, Opening, Turn
from rljax.environments.calls import Format, Parsed

LETTERS = "abcdefgh"


def rows(count: int = 8):
    """A task of rows "a>" to "h>", whose ground truth is the letter."""
    from rljax.tasks import Task  # imports JAX, which a worker does not need

    made = [
        {
            "prompt": f"{LETTERS[i % 8]}>",
            "ground_truth": LETTERS[i % 8],
            "data_source": "letters",
            "extra_info": {"letter": LETTERS[i % 8]},
            "index": i,
        }
        for i in range(count)
    ]
    return Task(LETTERS + ">.!", made, made[:4])


def count_letter(letter, *, turns: int = 3):
    """Each reply earns its share of the letter; told how many there were. 1 where one was found."""
    found, reply = 0, (yield f"{letter}>")
    for turn in range(turns):
        share = reply.whole.count(letter) / max(len(reply.whole), 1)
        found += share > 0
        if turn < turns - 1:
            reply = yield Turn("!" * min(reply.whole.count(letter), 3) + ">", share, state=found)
    return {"score": float(found > 0), "found": float(found)}


def last_turn(letter, *, turns: int = 2):
    """Returns nothing: a reward function scores the last turn."""
    for _ in range(turns):
        yield f"{letter}>"


def fails(letter, sample_seed, *, share: float = 0.5):
    """Raises after the first reply of a share of the samples."""
    yield f"{letter}>"
    if sample_seed % 1000 < 1000 * share:
        raise ValueError("no such world")
    return 1.0


@contract(seats=("first", "second"))
def two_seats(letter):
    """Both write in turn, twice; the first is paid for the letter, the second pays."""
    score = 0.0
    for turn in range(2):
        for seat in ("first", "second"):
            reply = yield Turn(f"{letter}>" if turn == 0 else "!", seat=seat)
            if seat == "first":
                score += reply.count(letter)
    return {"first": score, "second": -score}


@contract(seats=("first", "second"))
def toll(letter):
    """The second pays the first 1, and 1 for each character that the first writes."""
    reply = yield Turn(f"{letter}>", seat="first")
    yield Turn(f"{letter}>", seat="second")
    return {"first": 1.0 + len(reply.whole), "second": -1.0 - len(reply.whole)}


def limited(letter):
    """Its first turn ends with the letters a, b, c or d, its second has two tokens at most."""
    yield Turn(f"{letter}>", stop=list(LETTERS[:4]))
    yield Turn("!", max_tokens=2)
    return 1.0


def endless(letter):
    """Never ends by itself."""
    while True:
        yield "!"


def begins_anew(letter):
    """Four turns; before the third its history is written anew. The same states in each episode."""
    for turn in range(4):
        shown = f"{letter}>"
        reply = yield (
            Opening(shown, state=turn) if turn == 2 else Turn(shown, 0.5 * (turn > 0), state=turn)
        )
    return 1.0 + reply.whole.count(letter)


def slow(letter, *, seconds: float = 0.3):
    """Each turn takes its time."""
    for _ in range(8):
        yield "!"
        time.sleep(seconds)
    return 1.0


def wants_more(letter, world):
    """Declares a column that rows lack."""
    yield f"{letter}{world}"


def first_letter_and_turns(response, turns, conversation) -> float:
    """A reward: ten for each turn, one for each a of the last."""
    assert conversation[-1]["role"] == "assistant"
    return 10.0 * turns + response.count("a")


def pays_and_fails(letter):
    """A reward for each turn, and then no end."""
    for turn in range(3):
        yield Turn(f"{letter}>", reward=float(turn > 0))
    raise ValueError("no such world")


def every() -> Format:
    """Each reply is a call."""
    return Format("every", lambda text, schemas: Parsed("", (Call("f", {}),)))


def unreadable() -> Format:
    """Each reply is a call that cannot be read."""
    return Format("unreadable", lambda text, schemas: Parsed(text, (), "no brackets"))


def until_no_call():
    """Answers calls while there are any."""
    reply = yield "a>"
    while reply.calls:
        reply = yield "!"
    return 7.0


def pays_then_anew():
    """Five for the first reply, which is in a log of its own, one for all."""
    yield "a>"
    yield Opening("b>", reward=5.0)
    return 1.0


@contract(repeatable=False)
def lives(letter, sample_seed):
    """`uneven`, which says that it may answer otherwise each time."""
    return (yield from uneven(letter, sample_seed))


def uneven(letter, sample_seed):
    """`count_letter` of 1 to 5 turns, by the sample."""
    return (yield from count_letter(letter, turns=1 + sample_seed % 5))


def exits(letter, sample_seed, *, share: float = 0.2):
    """Ends its worker after the second reply of a share of the samples."""
    yield f"{letter}>"
    yield "!"
    if sample_seed % 1000 < 1000 * share:
        os._exit(3)
    yield "!"
    return 1.0


def some_dead(letter, seed, sample_seed, *, fail: bool = False):
    """Two turns; 1 for all samples of some prompts, which may fail; else 0 or 1 by the sample."""
    yield f"{letter}>"
    yield "!"
    if fail and seed % 3 == 0:
        raise ValueError("no such world")
    return 1.0 if seed % 3 == 0 else float(sample_seed % 2)


def fails_once(letter, *, folder: str, after: int = 2):
    """`count_letter` that raises once behind its reply number `after`, for every history of its
    own: what is known of that lies in the folder."""
    played, said, replies = count_letter(letter), None, []
    while True:
        try:
            said = next(played) if not replies else played.send(replies[-1])
        except StopIteration as end:
            return end.value
        replies.append((yield said))
        history = "_".join(str(ord(c)) for reply in replies for c in f"{reply.whole} ")
        if len(replies) == after and not os.path.exists(f"{folder}/{history}"):
            open(f"{folder}/{history}", "w").close()
            raise ValueError("not yet")


def fails_by_reply(letter, *, wrong: str = "abcd"):
    """Two turns; raises where the second reply begins with one of these letters."""
    yield f"{letter}>"
    reply = yield ">"
    if reply.whole[:1] in tuple(wrong):
        raise ValueError("no such world")
    return float(len(reply.whole))
