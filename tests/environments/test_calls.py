"""Tool calls: what a template renders is read back, and so is what models really write; what is no
call is told in words and never raises."""

import random

import pytest
from tool_families import (
    FORMATS,
    ONE_CALL,
    SCHEMAS,
    calls_message,
    random_arguments,
    write_tool_family,
)

from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments.calls import parser

QUESTION = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {family: load_tokenizer(write_tool_family(root / family, family)) for family in FORMATS}


def written(tokenizer, message) -> str:
    """What the template writes for the assistant's turn, with its end."""
    options = dict(tools=SCHEMAS)
    text = tokenizer.render_chat([QUESTION, message], add_generation_prompt=False, **options)
    before = tokenizer.render_chat([QUESTION], add_generation_prompt=True, **options)
    common = next((i for i, (a, b) in enumerate(zip(text, before)) if a != b), len(before))  # noqa: B905
    return text[text.rfind("<", 0, common + 1) if common < len(before) else common :]


@pytest.mark.parametrize("family", FORMATS)
def test_auto_is_the_format_that_the_template_writes(tokenizers, family):
    assert parser("auto", tokenizers[family]).name == FORMATS[family]


@pytest.mark.parametrize("family", FORMATS)
def test_what_a_template_renders_is_read_back(tokenizers, family):
    """Ids of the rendered turn, decoded as a reply is, give names and arguments again."""
    tokenizer, rng = tokenizers[family], random.Random(family)
    form = parser(FORMATS[family], tokenizer)
    for round_ in range(40):
        count = 1 if family in ONE_CALL else 1 + round_ % 3
        calls = [
            (rng.choice(["weather", "look_up", "a1"]), random_arguments(rng)) for _ in range(count)
        ]
        ids = tokenizer.encode(written(tokenizer, calls_message(calls)))
        parsed = form.parse(form.decode(tokenizer, ids), SCHEMAS)
        assert not parsed.problem, (calls, parsed)
        assert [(call.name, call.arguments) for call in parsed.calls] == calls
        assert all(len(call.id) == 9 for call in parsed.calls)
