"""Games as generators: their rules by hand, the exact value of Kuhn poker, repair by the tests."""

import itertools
import json

import pytest

from rljax.contracts import spec
from rljax.environments import guess_number, kuhn_poker, repair, tic_tac_toe
from rljax.environments.functions import calc
from rljax.environments.games import chips
from rljax.environments.kuhn import SITUATIONS, exploitability, log_of
from rljax.errors import InputError


def play(environment, policy):
    """(the outcome, what was yielded) where `policy(yielded)` replies."""
    yields, reply = [], None
    while True:
        try:
            told = environment.send(reply)
        except StopIteration as end:
            return end.value, yields
        yields.append(told)
        reply = policy(told)


def scripted(*replies):
    left = iter(replies)
    return lambda told: next(left)


# -- guess a number


def halving(high):
    low, top, last = 1, high, 0

    def policy(told):
        nonlocal low, top, last
        low, top = (last + 1 if told == "higher" else low), (last - 1 if told == "lower" else top)
        last = (low + top) // 2
        return f"{last}\n"

    return policy


def test_halving_finds_15_of_16_numbers_in_four_guesses_and_deaf_guessing_a_quarter():
    found = [play(guess_number(n, high=16, turns=4), halving(16))[0] for n in range(1, 17)]
    assert sum(score > 0 for score in found) == 15 and found[7] == 1.0 and max(found) == 1.0
    assert sorted({round(s, 2) for s in found}) == [0.0, 0.85, 0.9, 0.95, 1.0]
    deaf = [play(guess_number(n, high=16, turns=4), scripted(*"1234"))[0] for n in range(1, 17)]
    assert sum(score > 0 for score in deaf) == 4


def test_what_is_no_number_is_a_wrong_guess():
    replies = ("seven", "9" * 5000, "", "٧")  # the last is the Arabic 7
    score, told = play(guess_number(7, high=64, turns=4), scripted(*replies))
    assert score == pytest.approx(0.85) and told[1:] == ["higher"] * 3


# -- tic-tac-toe


def test_tic_tac_toe_against_oneself_by_hand():
    outcome, told = play(tic_tac_toe(0, 0, style="short"), scripted("1", "5\n", "2", "9", "3"))
    assert outcome == {"x": 1.0, "o": -1.0}
    assert [turn.observation for turn in told] == [
        ".........x",
        "x........o",
        "x...o....x",
        "xx..o....o",
        "xx..o...ox",
    ]
    assert [turn.seat for turn in told] == ["x", "o", "x", "o", "x"]
    draw, _ = play(tic_tac_toe(0, 0), scripted(*"159287364"))
    assert draw == {"x": 0.0, "o": 0.0}
    assert spec(tic_tac_toe).seats == ("x", "o")


@pytest.mark.parametrize("move", ["1", "0", "", "10", "12", "²", "x"])
def test_a_move_that_is_none_loses_and_wins_nothing_for_the_other(move):
    outcome, _ = play(tic_tac_toe(0, 0), scripted("1", move))
    assert outcome == {"x": 0.0, "o": -1.0}


def test_against_a_random_player_both_marks_are_played_and_draws_depend_on_the_sample_alone():
    def legal(told):
        board = told.observation[:9]
        return str(board.index(".") + 1)

    marks, games = set(), {}
    for seed, sample_seed in itertools.product(range(8), range(4)):
        outcomes = [
            play(tic_tac_toe(seed, sample_seed, opponent="random", style="short"), legal)
            for _ in range(2)
        ]
        assert outcomes[0] == outcomes[1]
        score, told = outcomes[0]
        marks.add(told[0].observation[9])
        games[seed, sample_seed] = score
        assert {turn.seat for turn in told} == {""} and score in (-1.0, 0.0, 1.0)
    assert marks == {"x", "o"} and len(set(games.values())) > 1


def test_options_that_are_none():
    with pytest.raises(InputError, match="self or random"):
        next(tic_tac_toe(0, 0, opponent="best"))
    with pytest.raises(InputError, match="words or short"):
        next(kuhn_poker("KQ", style="long"))
    with pytest.raises(InputError, match="line"):
        next(repair("x", '{"inputs": [[1]], "outputs": [1], "fn_name": "f"}', around="def f(x):"))


# -- Kuhn poker


def test_kuhn_poker_by_hand():
    outcome, told = play(kuhn_poker("KQ", style="short"), scripted("p", "b", "b"))
    assert outcome == {"first": 2.0, "second": -2.0}
    assert [(t.seat, t.observation) for t in told] == [
        ("first", "K"),
        ("second", "Qp"),
        ("first", "Kpb"),
    ]
    assert log_of("K", "pb") == "KpKpb"
    assert play(kuhn_poker("JK"), scripted("b", "p"))[0] == {"first": 1.0, "second": -1.0}
    assert play(kuhn_poker("JK"), scripted("p", "raise"))[0] == {"first": 2.0, "second": -2.0}
    assert [chips(h, "JK") for h in ("pp", "bp", "pbp", "bb", "pbb", "pb")] == [
        -1.0,
        1.0,
        -1.0,
        -2.0,
        -2.0,
        None,
    ]


def equilibrium(alpha):
    """Kuhn's family of equilibria (1950): the first seat bets a jack with probability alpha."""
    bet = {
        ("J", ""): alpha,
        ("Q", ""): 0.0,
        ("K", ""): 3 * alpha,
        ("J", "pb"): 0.0,
        ("Q", "pb"): alpha + 1 / 3,
        ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3,
        ("Q", "p"): 0.0,
        ("K", "p"): 1.0,
        ("J", "b"): 0.0,
        ("Q", "b"): 1 / 3,
        ("K", "b"): 1.0,
    }
    return {at: (1 - bet[at], bet[at]) for at in SITUATIONS}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_exploitability_is_zero_at_kuhns_equilibria(alpha):
    assert exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)


def test_exploitability_of_known_policies():
    half = {at: (0.5, 0.5) for at in SITUATIONS}
    assert exploitability(half) == pytest.approx(11 / 24)  # OpenSpiel's NashConv is 11/12
    passing = {at: (1.0, 0.0) for at in SITUATIONS}
    assert exploitability(passing) == pytest.approx(1.0)  # a bet always wins the ante
    off = equilibrium(0.2) | {("J", "pb"): (0.0, 1.0)}
    assert exploitability(off) > 0.05
    no_move = {at: (0.0, 0.0) for at in SITUATIONS}
    assert exploitability(no_move) == pytest.approx(2.0)


# -- a tool and repair


def test_the_calculator():
    asked = {"37*58": "2146", "(3 + 4) * 12": "84", "7/2": "3.5", "-2*-3": "6", "8/2": "4"}
    assert {text: calc(text) for text in asked} == asked
    refused = ("", "9**9", "a+1", "1/0", "(" * 300, "__import__('os')", "9" * 99, "True+1", "1 2")
    for text in refused:
        with pytest.raises(ValueError):
            calc(text)


TRUTH = json.dumps({"inputs": [[2], [3]], "outputs": [6, 9], "fn_name": "f"})
AROUND = "def f(x):\n    return $line"


def test_repair_tells_the_test_that_fails_until_all_pass():
    short = repair("x+3 2:6>", TRUTH, around=AROUND, style="short")
    outcome, told = play(short, scripted("x+4", "x**", "x*3"))
    assert outcome == {"score": 1.0, "first_try": 0.0}
    assert [turn.observation for turn in told] == ["x+3 2:6>", "3:9>", "2:6>"]
    assert play(repair("", TRUTH, around=AROUND), scripted("x*3"))[0]["first_try"] == 1.0
    wrong = scripted("x+1", "import os", "1/0")
    outcome, told = play(repair("?", TRUTH, around=AROUND), wrong)
    assert outcome == {"score": 0.0, "first_try": 0.0}
    assert "f(2) should be 6" in told[1].observation and "SyntaxError" in told[2].observation


def test_repair_of_a_whole_program_and_of_asserts():
    fenced = "Of course:\n```python\ndef f(x):\n    return 3 * x\n```"
    asserts = json.dumps({"asserts": ["assert f(2) == 6"]})
    assert play(repair("p", asserts), scripted(fenced))[0]["score"] == 1.0
    printed = json.dumps({"inputs": ["2\n"], "outputs": ["6\n"]})
    outcome, told = play(repair("p", printed), scripted("print(5)", "print(6)"))
    assert outcome == {"score": 1.0, "first_try": 0.0} and "should print" in told[1].observation
