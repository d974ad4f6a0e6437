"""Chat templates of the newer families, as published in their form: text, ids and masks equal to
those of `transformers`, and a log that grows by `append_messages` equal to the conversation that is
rendered at once."""

import pytest
from conversations import CORPUS, THINK, assistant, system, tool, user
from family_tokenizers import NEWER, write_family
from test_append import text_of
from test_chat_templates import MODES, READ_OTHERWISE, our_text, their_text

from rljax.data.text.chat import (
    Rerendering,
    RewrittenTurn,
    append_messages,
    encode_conversation,
    encode_last_turn,
)
from rljax.data.text.messages import for_template
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.errors import InputError

FEW = [
    "two_turns",
    "system_first",
    "system_twice",
    "blanks",
    "emoji",
    "tool_call_bare",
    "parts",
    "special_in_text",
    "empty_assistant",
    "user_twice",
]


_NO_CALLS = (
    "tool_call tool_answer tool_turns tool_call_with_text tool_call_empty_text tool_calls_together"
    " tool_call_text_arguments tool_call_bare tool_call_nested tool_loop tool_loop_with_reasoning"
    " tool_by_ipython"
)
_NO_REASONING = "thinking_field thinking_other_names"
_NO_TOOLS = f"{_NO_CALLS} tools_unused tools_and_system tools_in_system"
# Rows of which the template leaves something out, or that hold a stop token within a turn.
REFUSED_ROWS = {
    "olmo2": f"assistant_twice {_NO_REASONING} {_NO_TOOLS}",
    "olmo3": f"special_in_text {_NO_REASONING} tool_loop_with_reasoning",
    "phi4": f"special_in_text {_NO_REASONING} {_NO_TOOLS}",
    "phi4_mini": f"{_NO_REASONING} {_NO_TOOLS}",
    "smollm3": f"system_twice system_late special_in_text {_NO_REASONING} {_NO_CALLS}",
    "granite": f"{_NO_REASONING} tool_loop_with_reasoning",
    "glm4": f"{_NO_REASONING} tool_call_with_text tool_loop tool_loop_with_reasoning",
    "glm4_5": f"{_NO_REASONING} thinking_odd tool_loop_with_reasoning",
    "llama4": f"{_NO_REASONING} tool_loop_with_reasoning",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("newer")
    return {family: write_family(root / family, family) for family in NEWER}


@pytest.fixture(scope="module")
def ours(folders):
    return {family: HuggingFaceTokenizer(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders):
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    load = library.PreTrainedTokenizerFast.from_pretrained
    return {family: load(folder) for family, folder in folders.items()}


def compare(ours, theirs, family, names):
    """The conversations `names` in each mode; how many of them transformers renders."""
    rendered = 0
    for name in names:
        if name == "unknown_role":  # which is refused by name, whatever a template makes of it
            continue
        # Calls in the one form in which a template is given them: see test_chat_templates.
        case = {**CORPUS[name], "messages": for_template(CORPUS[name]["messages"])}
        for mode in MODES:
            mine = our_text(ours[family], **case, **mode)
            other = their_text(theirs[family], **case, **mode)
            if isinstance(other, Exception):
                # Ours joins parts of text, and reads a missing content as an empty one.
                if name == "parts" or "no attribute 'content'" in str(other):
                    continue
                assert isinstance(mine, InputError), (name, other, mine)
                continue
            if name == "parts" and ("{'type': 'text'" in other or "user\n<|im_end|>" in other):
                continue  # lists of parts for a template that reads texts only: ours joins them
            rendered += 1
            assert mine == other, (name, mode)
            ids = theirs[family](other, add_special_tokens=False)["input_ids"]
            assert ours[family].encode(mine) == ids, name
        refused = isinstance(their_text(theirs[family], **case), Exception)
        if name == "parts" or refused or isinstance(our_text(ours[family], **case), InputError):
            continue
        given = dict(case, **case.get("variables", {}))
        given.pop("variables", None)
        there = theirs[family].apply_chat_template(
            given.pop("messages"), return_assistant_tokens_mask=True, return_dict=True, **given
        )
        try:
            ids, mask = encode_conversation(ours[family], **case)
        except InputError as error:
            rewritten = isinstance(error, RewrittenTurn)
            assert rewritten or name in REFUSED_ROWS[family].split(), (name, error)
            continue
        assert name not in REFUSED_ROWS[family].split(), name
        if name in READ_OTHERWISE:
            continue
        ids, mask = without_next_roles(ours[family], ids, mask, there["input_ids"])
        assert (ids, mask) == (there["input_ids"], there["assistant_masks"]), name
    return rendered


def without_next_roles(tokenizer, ids, mask, whole):
    """GLM's turns are learned with the next role's token; the template marks it as no one's, and
    writes none behind the last turn."""
    ends = {end.id for end in tokenizer.turn_ends if end.next_role}
    if ends and len(ids) == len(whole) + 1 and ids[-1] in tokenizer.eos_ids:
        ids, mask = ids[:-1], mask[:-1]
    return ids, [
        m * (not ends or i not in tokenizer.eos_ids) for i, m in zip(ids, mask, strict=True)
    ]


@pytest.mark.parametrize("family", NEWER)
def test_a_few_conversations_are_those_of_transformers(ours, theirs, family):
    assert compare(ours, theirs, family, FEW) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("family", NEWER)
def test_all_conversations_are_those_of_transformers(ours, theirs, family):
    assert compare(ours, theirs, family, CORPUS) >= 100


ANSWER = tool("5.5", name="add", tool_call_id="c")
PLAYED = [
    [user("1"), assistant("a\nb"), user("2"), assistant("é😀"), user("3")],
    [system("S"), user("1"), assistant("a"), user("2")],
    [user("1"), assistant("a"), ANSWER, assistant("b"), user("2")],
]


@pytest.mark.parametrize("family", NEWER)
@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "cut"])
def test_a_log_grows_to_the_conversation(ours, theirs, family, stops):
    """As a rollout plays it: each assistant turn is sampled as the template would write it, with
    the token that stopped it or cut before, and what stands before the next turn is appended."""
    tokenizer, shown = ours[family], 0
    for messages in PLAYED:
        if family in ("phi4", "olmo2") and any(m["role"] == "tool" for m in messages):
            continue  # their templates write no tool's answer
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        log = tokenizer.encode_chat(messages[: turns[0]])
        for k, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            ids, mask = encode_last_turn(tokenizer, messages[: k + 1])
            sampled = [i for i, learned in zip(ids, mask, strict=True) if learned]
            if family.startswith("glm4") and messages[k + 1]["role"] == "tool":
                sampled[-1:] = tokenizer.encode("<|observation|>")  # as behind a call
            if not stops:
                sampled = sampled[:-1]
            log, new = log + sampled, messages[k + 1 : following]
            log = log + append_messages(tokenizer, log, messages[: k + 1], new).ids
            whole = theirs[family].apply_chat_template(
                messages[:following], tokenize=False, add_generation_prompt=True
            )
            assert text_of(tokenizer, log) == whole, (messages[k], whole)
            shown += 1
    assert shown >= 3


@pytest.mark.parametrize("family", ["glm4_5"])
def test_thinking_of_earlier_turns_stays_in_the_log(ours, family):
    tokenizer = ours[family]
    messages = [user("a"), assistant(THINK + "b"), user("c")]
    ids, mask = encode_last_turn(tokenizer, messages[:2])
    appended = append_messages(tokenizer, ids, messages[:2], messages[2:])
    assert appended.rerendering is Rerendering.REWRITTEN
    grown = text_of(tokenizer, ids + appended.ids)
    assert "first this,\n\nthen that" in grown and grown.endswith("<|user|>\nc<|assistant|>")
