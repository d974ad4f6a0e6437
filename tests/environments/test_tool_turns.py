"""Turns with tools over the families: a call is read, its answer is appended, and the log is what
the template makes of the whole conversation."""

import textwrap

import pytest
from tool_families import FORMATS, SCHEMAS, calls_message, write_tool_family

from rljax.components import resolve
from rljax.data.online.prompts import encode_prompt
from rljax.data.text.chat import Rerendering, append_messages, encode_last_turn
from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits
from rljax.errors import InputError

QUESTION = {"role": "user", "content": "How is the weather?"}
CALL = calls_message([("weather", {"town": "Ulm", "n": 2})])
ANSWER = {"role": "tool", "name": "weather", "tool_call_id": "id0000000", "content": "21 °C"}
# What a turn's rendering has at its end and the same turn in a history has not.
THOUGHTS = {"qwen3": "<think>\n\n</think>\n\n", "deepseek_text": "<think>\n"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: load_tokenizer(write_tool_family(root / family, family)) for family in FORMATS}


def sampled_call(tokenizer) -> tuple[list[int], list[int]]:
    """The prompt's ids, and those of a turn that calls, as the template writes it."""
    prompt = tokenizer.encode_chat([QUESTION], tools=SCHEMAS)
    try:
        ids, mask = encode_last_turn(tokenizer, [QUESTION, CALL], tools=SCHEMAS)
        return prompt, [i for i, chosen in zip(ids, mask, strict=True) if chosen]
    except InputError:  # the prompt ends with <think>, which a turn without thoughts does not have
        text = tokenizer.render_chat([QUESTION, CALL], tools=SCHEMAS, add_generation_prompt=False)
        return prompt, tokenizer.encode(text[text.index("<｜tool▁calls▁begin｜>") :])


@pytest.mark.parametrize("family", FORMATS)
def test_an_answer_is_appended_to_a_call(tokenizers, family):
    tokenizer = tokenizers[family]
    prompt, turn = sampled_call(tokenizer)
    appended = append_messages(tokenizer, prompt + turn, [QUESTION, CALL], [ANSWER], tools=SCHEMAS)
    log = tokenizer.decode([*prompt, *turn, *appended.ids], skip_special_tokens=False)
    whole = tokenizer.render_chat([QUESTION, CALL, ANSWER], tools=SCHEMAS)
    assert "21 °C" in tokenizer.decode(appended.ids) and appended.closing == 0
    if family in THOUGHTS:
        assert log.replace(THOUGHTS[family], "", 1) == whole
    else:
        assert log == whole and appended.rerendering is not Rerendering.REWRITTEN


@pytest.mark.parametrize("family", FORMATS)
def test_an_episode_with_tools(tokenizers, family, tmp_path):
    """The environment `tools` gets the call that the family wrote, and its answer is read next."""
    (tmp_path / "my_tools.py").write_text(
        textwrap.dedent(
            '''
            def weather(town: str, n: int) -> str:
                """Tells the weather.

                Args:
                    town: A town.
                    n: Days.
                """
                return f"{n * 21} in {town}"
            '''
        )
    )
    tokenizer = tokenizers[family]
    functions = f"('{tmp_path}/my_tools.py:weather',)"
    component = resolve(f"tools(functions={functions})", "rljax.environments")
    episode = Episode(
        0,
        component,
        {"prompt": "?"},
        tokenizer,
        EpisodeLimits(),
        seed=0,
        sample_seed=0,
        messages=[QUESTION],
    )
    first = episode.begin()
    assert "Tells the weather" in tokenizer.decode(first.ids) or family == "deepseek_text"
    _, turn = sampled_call(tokenizer)
    step = episode.reply(turn, "stop", 7, 1000)
    assert not step.failure and (step.calls, step.unknown_calls, step.bad_turn) == (1, 0, False)
    assert "42 in Ulm" in tokenizer.decode(step.ids) and step.messages[0]["role"] == "tool"
    last = episode.reply([*tokenizer.encode("It is 42."), tokenizer.eos_ids[0]], "stop", 6, 900)
    assert last.ended and not last.failure and last.text == "It is 42."


def test_a_prompt_shows_the_tools_of_its_row(tokenizers):
    tokenizer = tokenizers["qwen2_5"]
    row = {"prompt": [QUESTION], "ground_truth": "", "data_source": "", "index": 3}
    with_tools, _ = encode_prompt(
        row | {"extra_info": {"tools": SCHEMAS}}, tokenizer, max_prompt_tokens=4000
    )
    assert with_tools.token_ids.tolist() == tokenizer.encode_chat([QUESTION], tools=SCHEMAS)
    without, _ = encode_prompt(row | {"extra_info": {}}, tokenizer, max_prompt_tokens=4000)
    assert without.token_ids.tolist() == tokenizer.encode_chat([QUESTION])
    with pytest.raises(InputError, match="row 3.*tools"):
        encode_prompt(row | {"extra_info": {"tools": ["weather"]}}, tokenizer, max_prompt_tokens=9)
