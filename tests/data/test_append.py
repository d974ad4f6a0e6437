"""A log of ids that only grows: turns are appended, what was sampled is never tokenized again."""

import re

import pytest
from conversations import (
    ANSWERED,
    CALLS,
    CORPUS,
    HEBREW,
    THINK,
    TOOLS,
    assistant,
    system,
    tool,
    user,
)
from family_tokenizers import (
    FAMILIES,
    byte_level_bpe,
    sentencepiece_bpe,
    write_family,
    write_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.data.text.chat import (
    Rerendering,
    append_messages,
    encode_after,
    encode_conversation,
    encode_last_turn,
)
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.errors import InputError

SAME, RETOKENIZED, REWRITTEN = Rerendering
KEEPS_HISTORY = ("llama3", "qwen2_5", "gemma", "deepseek")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {
        family: HuggingFaceTokenizer(write_family(root / family, family, marked=False))
        for family in FAMILIES
    }


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def written_calls(message):
    """Calls as text, in a form of no template."""
    return "".join(str(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def played(tokenizer, messages, cut=False, **options):
    """Plays a conversation as a rollout does; yields (k, log before, appended, messages so far).

    Every assistant turn is sampled as the template would write it, with `cut` without its last
    token, and everything up to the next one is appended.
    """
    turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
    log = tokenizer.encode_chat(messages[: turns[0]], **options)
    for k, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        try:
            ids, mask = encode_last_turn(tokenizer, messages[: k + 1], **options)
            sampled = [i for i, learned in zip(ids, mask, strict=True) if learned]
        except InputError as error:  # a policy may write what its template leaves out
            assert re.search("leaves out the|nothing of the tools", str(error))
            text = text_of(tokenizer, tokenizer.eos_ids[:1])
            text = (messages[k].get("content") or "") + written_calls(messages[k]) + text
            sampled = encode_after(tokenizer, log[-1], text)[0]
        log = log + (sampled[:-1] if cut else sampled)
        new = messages[k + 1 : following]
        appended = append_messages(tokenizer, log, messages[: k + 1], new, **options)
        yield k, list(log), appended, messages[:following]
        log = log + appended.ids


def playable(family):
    for name, case in CORPUS.items():
        roles = [m["role"] for m in case["messages"]]
        # A message that Gemma's own template refuses, or a turn that answers no one.
        if "assistant" not in roles or roles[0] == "assistant":
            continue
        if family == "gemma" and (name.startswith(("tool_", "system_")) or "twice" in name):
            continue
        if name in ("unknown_role", "assistant_twice", "system_late", "special_in_text", "parts"):
            continue
        if (family, name) == ("llama3", "tool_calls_together"):
            continue
        yield name, {**case, "messages": case["messages"][:8]}


@pytest.mark.parametrize("family", KEEPS_HISTORY)
def test_a_rollout_is_the_conversation_rendered_at_once(ours, family):
    tokenizer, steps = ours[family], 0
    for name, case in playable(family):
        options = {key: value for key, value in case.items() if key != "messages"}
        for _k, log, appended, so_far in played(tokenizer, **case):
            text = tokenizer.render_chat(so_far, **options)
            grown = log + appended.ids
            written = text_of(tokenizer, grown)
            if appended.rerendering is REWRITTEN:
                assert "think" in name or name.startswith("tool"), name
            else:
                assert written == (text.replace("▁", " ") if family == "gemma" else text), name
            same = appended.rerendering is SAME
            assert same == (grown == tokenizer.encode(text))
            assert same == (appended.first_difference is None)
            assert appended.closing == 0
            if tokenizer.bos_id is not None and "bos" not in text[5:].lower():
                assert grown.count(tokenizer.bos_id) == 1
            steps += 1
    assert steps > 30


def test_a_template_that_rewrites_loses_nothing_of_the_log(ours):
    tokenizer = ours["qwen3"]
    messages = [user("a"), assistant(THINK + "b"), user("c"), assistant(THINK + "d"), user("e")]
    turn = "<|im_start|>assistant\n<think>\nfirst this,\n\nthen that\n</think>\n\n%s<|im_end|>\n"
    expected = "<|im_start|>user\na<|im_end|>\n" + turn % "b"
    expected += "<|im_start|>user\nc<|im_end|>\n" + turn % "d"
    expected += "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    (_, _, first, _), (_, log, second, _) = played(tokenizer, messages)
    assert text_of(tokenizer, log + second.ids) == expected
    assert first.rerendering is second.rerendering is REWRITTEN
    rendered = tokenizer.encode_chat(messages)
    at = second.first_difference
    assert rendered[:at] == log[:at] and rendered[at] != log[at]
    without = [user("a"), assistant("b"), user("c")]
    ((_, _, plain, _),) = played(tokenizer, without)
    assert plain.ids == first.ids


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_tool_answers_follow_a_thinking_turn(ours, family):
    tokenizer = ours[family]
    calls = {**CALLS[0], "content": THINK + "Let me see."}
    messages = [user("a"), calls, tool("5.5"), assistant(THINK + "b"), user("c")]
    (_, _, first, _), (_, _, second, _) = played(tokenizer, messages, tools=TOOLS)
    bare = [user("a"), {**CALLS[0], "content": "Let me see."}, tool("5.5")]
    ((_, _, plain, _),) = played(tokenizer, bare, tools=TOOLS)
    assert first.ids == plain.ids
    assert "5.5" in text_of(tokenizer, first.ids) and "think" not in text_of(tokenizer, second.ids)
    expected = {
        "qwen3": "\n<|im_start|>user\n<tool_response>\n5.5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
        "deepseek": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>5.5<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>",
    }
    assert text_of(tokenizer, first.ids) == expected[family]


CLOSING = {
    "llama3": "<|eot_id|>",
    "qwen2_5": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "gemma": "<end_of_turn>\n",
    "deepseek": "<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_was_cut_is_ended_for_it(ours, family):
    tokenizer = ours[family]
    messages = [user("1"), assistant("a b"), user("2"), assistant("c"), user("3")]
    for (_, log, cut, _), (_, whole, full, _) in zip(
        played(tokenizer, messages, cut=True), played(tokenizer, messages), strict=True
    ):
        assert text_of(tokenizer, cut.ids[: cut.closing]) == CLOSING[family]
        stop = cut.ids[0]
        assert stop in tokenizer.eos_ids and whole[-1] == stop and log[-1] != stop
        assert cut.ids == [stop, *full.ids]


def test_a_tool_call_that_was_cut_is_ended_for_it(ours):
    tokenizer = ours["deepseek"]
    (_, _, cut, _), _ = played(tokenizer, [*ANSWERED, assistant("5.5")], cut=True, tools=TOOLS)
    assert text_of(tokenizer, cut.ids[: cut.closing]) == "<｜end▁of▁sentence｜>"
    # Cut in the middle of its call, the turn is what could be read of it: a text.
    messages = [user("a"), assistant("<｜tool▁calls▁begin｜>add")]
    log = [*tokenizer.encode_chat(messages[:1]), *tokenizer.encode("<｜tool▁calls▁begin｜>add")]
    appended = append_messages(tokenizer, log, messages, [user("Go on.")])
    assert (
        text_of(tokenizer, appended.ids) == "<｜end▁of▁sentence｜><｜User｜>Go on.<｜Assistant｜>"
    )


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "qwen3", "gemma"])
def test_any_stop_token_ends_the_turn_once(ours, family):
    tokenizer = ours[family]
    prompt = tokenizer.encode_chat([user("1")])
    found = []
    for stop in tokenizer.eos_ids:
        log = [*prompt, *tokenizer.encode("a"), stop]
        appended = append_messages(tokenizer, log, [user("1"), assistant("a")], [user("2")])
        assert not set(appended.ids[:2]) & set(tokenizer.eos_ids)
        found.append(appended)
    assert len(found) >= 2 and all(a.ids == found[0].ids for a in found)
    assert sorted(a.rerendering is SAME for a in found)[-2:] == [False, True]


def test_sampled_tokens_are_never_merged(ours):
    tokenizer = ours["qwen2_5"]
    messages = [user("1"), assistant("apples are left")]
    letters = [i for c in messages[1]["content"] for i in tokenizer.encode(c)]
    assert letters != tokenizer.encode(messages[1]["content"])
    prompt = tokenizer.encode_chat(messages[:1])
    log = [*prompt, *letters, tokenizer.eos_ids[0]]
    appended = append_messages(tokenizer, log, messages, [user("2")])
    assert appended.rerendering is RETOKENIZED
    assert len(prompt) <= appended.first_difference < len(log)
    messages = [*messages, user("2")]
    assert text_of(tokenizer, log + appended.ids) == tokenizer.render_chat(messages)
    # What was parsed from the turn may be another text than what was sampled.
    other = append_messages(tokenizer, log, [user("1"), assistant("pears")], [user("2")])
    assert other.ids == appended.ids and other.rerendering is REWRITTEN


def test_nothing_new_but_a_generation_prompt(ours):
    tokenizer, messages = ours["llama3"], [user("1"), assistant("a")]
    ((_, log, _, _),) = played(tokenizer, messages)
    for prompt in (True, False):
        appended = append_messages(tokenizer, log, messages, [], add_generation_prompt=prompt)
        expected = tokenizer.encode_chat(messages, add_generation_prompt=prompt)
        assert log + appended.ids == expected


LINES = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# Ends a turn only where another one follows.
LAZY = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ ':' ~ m.content }}"
    "{% if not loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|><|im_start|>assistant:' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}"
    "{{ ' ' ~ m.content ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)


def write(folder, library, template, bos=None, eos="<|im_end|>"):
    config = {"bos_token": bos, "eos_token": eos, "chat_template": template}
    return HuggingFaceTokenizer(write_folder(folder, library, config))


def test_templates_without_an_end_token(tmp_path):
    tokenizer = write(tmp_path, byte_level_bpe(["<|im_end|>", "<|im_start|>"]), LINES)
    messages, prompt = [user("1"), assistant(" a")], tokenizer.encode("user: 1\nassistant:")
    for end, expected in (([], "\nuser: 2\nassistant:"), ([0], "\nuser: 2\nassistant:")):
        log = [*prompt, *tokenizer.encode(" a"), *end]
        appended = append_messages(tokenizer, log, messages, [user("2")])
        assert text_of(tokenizer, appended.ids) == expected
        assert appended.closing == (0 if end else 1)


def test_templates_that_end_a_turn_only_when_another_follows(tmp_path):
    tokenizer = write(tmp_path, byte_level_bpe(["<|im_end|>", "<|im_start|>"]), LAZY)
    messages = [user("1"), assistant("a"), user("2")]
    prompt = tokenizer.encode_chat(messages[:1])
    for end in ([], [0]):
        log = [*prompt, *tokenizer.encode("a"), *end]
        appended = append_messages(tokenizer, log, messages[:2], messages[2:])
        assert log + appended.ids == tokenizer.encode_chat(messages)
        assert appended.closing == 1 - len(end) and appended.rerendering is SAME


@pytest.mark.parametrize("llama2", [True, False])
def test_sentencepiece_puts_no_space_where_turns_meet(tmp_path, llama2):
    library = sentencepiece_bpe(["<s>", "</s>"], llama2=llama2)
    tokenizer = write(tmp_path, library, LLAMA2, "<s>", "</s>")
    messages = [user("1"), assistant("a b"), user("2"), assistant(HEBREW), user("3")]
    steps = list(played(tokenizer, messages))
    assert len(steps) == 2
    for _k, log, appended, so_far in steps:
        assert log + appended.ids == tokenizer.encode_chat(so_far)
        assert (log + appended.ids).count(tokenizer.bos_id) == 1
    ids, mask = encode_conversation(tokenizer, messages[:-1])
    assert ids == tokenizer.encode(
        tokenizer.render_chat(messages[:-1], add_generation_prompt=False)
    )
    assert text_of(tokenizer, [i for i, m in zip(ids, mask, strict=True) if m][:3]).strip()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    question=st.text(max_size=12),
    answers=st.lists(st.text(max_size=12), min_size=1, max_size=3),
    sampled=st.lists(st.integers(0, 10_000), max_size=12),
    ended=st.booleans(),
    opening=st.none() | st.text(max_size=5),
)
def test_whatever_is_sampled(ours, family, question, answers, sampled, ended, opening):
    tokenizer = ours[family]
    # Any ids but special ones: half characters and parts that merge among them.
    words = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    head = [system(opening), user(question)] if opening is not None else [user(question)]
    log, messages = tokenizer.encode_chat(head), head
    for answer in answers:
        before = list(log)
        log = log + [words[i % len(words)] for i in sampled] + [tokenizer.eos_ids[0]] * ended
        said = assistant(tokenizer.decode(log[len(before) :]))
        new = [user(answer)]
        appended = append_messages(tokenizer, log, [*messages, said], new)
        # The ids depend on nothing that was sampled, but on whether it ended.
        plain = append_messages(tokenizer, log, [*head, assistant("x")], new)
        assert plain.ids == appended.ids
        assert (appended.closing == 0) == ended
        again = tokenizer.encode_chat([*messages, said, *new])
        assert (appended.rerendering is SAME) == (log + appended.ids == again)
        log, messages = log + appended.ids, [*messages, said, *new]
    if tokenizer.bos_id is not None:
        assert log.count(tokenizer.bos_id) == 1 and log[0] == tokenizer.bos_id


def test_what_cannot_be_appended_to(ours):
    tokenizer = ours["llama3"]
    with pytest.raises(InputError, match="not the assistant's"):
        append_messages(tokenizer, [1], [user("1")], [user("2")])
    with pytest.raises(InputError, match="empty"):
        append_messages(tokenizer, [], [user("1"), assistant("2")], [user("3")])


def test_a_template_whose_turns_end_anew(tmp_path):
    template = "{% for m in messages %}{{ m.content ~ loop.revindex }}{% endfor %}"
    tokenizer = write(tmp_path, byte_level_bpe(["<|im_end|>"]), template)
    with pytest.raises(InputError, match="changes how a turn ends"):
        append_messages(tokenizer, [1], [user("1"), assistant("2")], [user("3")])
