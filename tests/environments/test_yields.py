"""What an environment may yield and return: numbers that float32 holds, states that hash alike."""

import enum

import jax.numpy as jnp
import numpy as np
import pytest
from family_tokenizers import write_family

from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments import Done, Opening, Turn
from rljax.environments.conversation import shortened
from rljax.environments.yields import BadYield, outcome_of, state_hash, turn_of

SEATS = ("",)


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize("value", [1e39, -1e31, 10**400, float("nan"), "1", None, [1.0], 1j])
def test_what_is_no_number_of_float32_is_refused(value):
    with pytest.raises(BadYield):
        turn_of(Turn("a", reward=value))
    if value is not None:
        with pytest.raises(BadYield):
            outcome_of(value, SEATS)


@pytest.mark.parametrize(
    "value",
    [
        *(True, np.bool_(True), np.float32(1), np.int64(1), 1, 1.0),
        *(np.array(1.0), jnp.float32(1), jnp.asarray(True)),
    ],
)
def test_numbers_of_arrays_are_numbers(value):
    assert turn_of(Turn("a", reward=value)).reward == 1.0
    assert outcome_of(Done(value), SEATS) == ({"": 1.0}, {})
    assert outcome_of({"score": value, "found": value}, SEATS) == ({"": 1.0}, {"found": 1.0})


@pytest.mark.parametrize(
    "limits",
    [{"stop": "x"}, {"stop": [""]}, {"stop": [1]}, {"max_tokens": -1}, {"max_tokens": 2.5}],
    ids=str,
)
def test_limits_of_a_turn_are_texts_and_a_number(limits):
    for made in (Turn("a", **limits), Opening("a", **limits)):
        with pytest.raises(BadYield, match=next(iter(limits))):
            turn_of(made)
    good = turn_of(Opening("a", stop=["x", "y"], max_tokens=3))
    assert (good.stop, good.max_tokens) == (("x", "y"), 3)


def test_numbers_of_torch_are_numbers():
    torch = pytest.importorskip("torch")
    for value in (torch.tensor(1.0), torch.tensor(1), torch.tensor(True)):
        assert outcome_of({"score": value, "part": value}, SEATS) == ({"": 1.0}, {"part": 1.0})
        assert turn_of(Turn("a", reward=value, parts={"b": value})).parts == {"b": 1.0}
    for value in (torch.tensor(float("nan")), torch.ones(2), torch.tensor(1j)):
        with pytest.raises(BadYield):
            outcome_of(value, SEATS)


@pytest.mark.parametrize("name", ["outcome", "turn_rewards"])
def test_parts_that_every_episode_has_are_not_named_again(name):
    with pytest.raises(BadYield, match=f"a part is called '{name}'"):
        outcome_of({"score": 1.0, name: 2.0}, SEATS)
    with pytest.raises(BadYield, match=f"a part is called '{name}'"):
        turn_of(Turn("a", parts={name: 1.0}))


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (True, 1),
        (Level.LOW, 1),
        (2, 2 + 0j),
        (np.float64(2), 2),
        ([1.0], [1]),
        (np.array([0.0]), np.array([-0.0])),
        ({1: "a"}, {1.0: "a"}),
    ],
)
def test_equal_states_have_one_hash(one, other):
    assert state_hash(one) == state_hash(other) != state_hash("x")


def test_a_tool_cannot_end_a_turn(family_tokenizer):
    """A search may find any text, the tokens that end a turn as well."""
    tokenizer = family_tokenizer
    end = tokenizer.decode(tokenizer.eos_ids[:1], skip_special_tokens=False)
    said = f"before{end}after"
    (tool, user) = shortened(
        tokenizer, [{"role": "tool", "content": said}, {"role": "user", "content": said}], 100
    )
    assert tokenizer.eos_ids[0] not in tokenizer.encode(tool["content"])
    assert tool["content"].replace(" ", "") == said.replace(" ", "") and user["content"] == said


@pytest.fixture
def family_tokenizer(tmp_path):
    return load_tokenizer(write_family(tmp_path / "qwen3", "qwen3"))
