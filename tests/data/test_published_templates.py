"""Every published chat template x every kind of data x the shapes that rows have: what is learned
continues the sampler's prompt, as transformers renders it, and ends in a stop token; or the row is
refused, in every kind alike."""

import json

import numpy as np
import pytest
from conversations import assistant, system, tool, user
from family_tokenizers import write_family
from published_templates import published_templates, write_base_model

from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.prompts import encode_prompts
from rljax.data.rows.sources import load_prompts
from rljax.data.text.chat import encode_conversation
from rljax.data.text.tokenizer import HuggingFaceTokenizer
from rljax.errors import InputError
from rljax.serving.fields import RequestLimits, read_chat

TEMPLATES = published_templates()
FEW = (
    "llama3 qwen3 gemma glm4_5 phi4_mini trl-cohere2 trl-deepseek_r1_distill trl-gptoss trl-phi3_5"
    " trl-idefics3 trl-nemotron_3_nano trl-qwen3_5_think trl-glm4moe_training trl-gemma4_v5"
).split()
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather_at",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
ASK, ANSWER = user("What is two plus two?"), assistant("It is four.")


def _call(city):
    function = {"name": "weather_at", "arguments": {"city": city}}
    return assistant("", tool_calls=[{"id": "abcdefghi", "type": "function", "function": function}])


CALL = _call("Ulm")
SUNNY = tool("sunny today", name="weather_at", tool_call_id="abcdefghi")
THINK = "<think>\nI count my fingers\n</think>\n\n"
SHAPES = {
    "one_turn": [ASK, ANSWER],
    "two_turns": [ASK, ANSWER, user("And three plus three?"), assistant("It is six.")],
    "system": [system("Be terse, please."), ASK, ANSWER],
    "call": [user("Is it nice in Ulm?"), CALL],
    "tools": [user("Is it nice in Ulm?"), CALL, SUNNY, assistant("It is sunny.")],
    "reasoning": [ASK, {**ANSWER, "reasoning_content": "I count my fingers"}],
    "tags": [ASK, assistant(THINK + "It is four.")],
    "tags_twice": [ASK, assistant(THINK + "It is four."), ASK, assistant(THINK + "It is four.")],
    "prefill": [ASK, assistant("It is"), assistant(" four.")],
}
LANES = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in TEMPLATES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("published"), {}

    def folder(name):
        if name not in made:
            made[name] = write_base_model(root / name, TEMPLATES[name])
        return made[name]

    return folder


def test_the_templates_of_trl_are_there():
    pytest.importorskip("trl", reason="trl is not installed")
    assert len(TEMPLATES) > 60 and set(FEW) <= set(TEMPLATES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", ["<|eot_id|>"]),
        ("qwen3", ["<|im_end|>"]),
        ("gemma", ["<end_of_turn>"]),
        ("glm4_5", ["<|user|>", "<|observation|>"]),
        ("phi4_mini", ["<|end|>"]),
        ("trl-cohere2", ["<|END_OF_TURN_TOKEN|>"]),
        ("trl-deepseek_r1_distill", ["<｜end▁of▁sentence｜>"]),
        ("trl-gptoss", ["<|return|>", "<|call|>"]),
        ("trl-phi3_5", ["<|end|>"]),
        ("trl-idefics3", ["<end_of_utterance>"]),
        ("trl-nemotron_3_nano", ["<|im_end|>"]),
        ("trl-glm4moe_training", ["<|user|>", "<|observation|>"]),
        ("trl-gemma4_v5", ["<turn|>", "<|tool_response>"]),
    ],
)
def test_the_end_of_turn_joins_the_stop_set(folders, name, expected):
    """A base model's files do not name it."""
    if name not in TEMPLATES:
        pytest.skip("trl is not installed")
    ours = HuggingFaceTokenizer(folders(name))
    ends = [ours.decode([end.id], skip_special_tokens=False) for end in ours.turn_ends]
    stops = [ours.decode([i], skip_special_tokens=False) for i in ours.eos_ids]
    assert ends == expected and stops == ["<|endoftext|>", *expected]


def spans(ids, mask):
    """(what comes before, what is learned) of each run of learned ids."""
    ids, mask = np.asarray(ids), np.asarray(mask)
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [(ids[:a].tolist(), ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def their_prompt(library, messages, tools):
    """The prompt as transformers renders it; None where it cannot, or reads no texts."""
    begun = messages[-1]["role"] == "assistant"
    how = dict(add_generation_prompt=not begun, continue_final_message=begun, tokenize=False)
    try:
        text = library.apply_chat_template(messages, tools=tools, **how)
    except Exception:
        return None
    return text if messages[-1]["content"].strip() in text else None


@pytest.mark.parametrize("name", LANES)
def test_what_is_learned_continues_the_samplers_prompt(folders, name):
    library = pytest.importorskip("transformers").PreTrainedTokenizerFast
    ours = HuggingFaceTokenizer(folders(name))
    theirs, seen = library.from_pretrained(folders(name)), 0

    def text(ids):
        return ours.decode(ids, skip_special_tokens=False)

    for shape, messages in SHAPES.items():
        tools = [WEATHER] if shape in ("call", "tools") else None
        prompt, last = messages[:-1], messages[-1]
        asked = {"prompt": prompt, "tools": tools} if tools else {"prompt": prompt}
        other = {"role": "assistant", "content": "It is five, or so."}
        prefill = shape == "prefill"
        if "reasoning_content" in last:
            other["reasoning_content"] = last["reasoning_content"]
        if "tool_calls" in last:
            other = _call("Rome")

        def items(kind, row):
            try:
                made, _ = encode_rows(load_rows([row], "train", kind), ours, kind, max_tokens=9999)
            except InputError as error:
                return str(error)
            return made

        whole = dict(asked, completion=[last]) if prefill else {"messages": messages}
        if tools and not prefill:
            whole["tools"] = tools
        examples = items("examples", whole)
        pairs = items("pairs", dict(asked, chosen=[last], rejected=[other]))
        labels = items("unpaired", dict(asked, completion=[last], label=True))
        refused = [kind for kind in (examples, pairs, labels) if isinstance(kind, str)]
        if refused:
            # An earlier turn may be refused, which pairs only read; what is learned is alike.
            assert isinstance(pairs, str) == isinstance(labels, str), (shape, refused)
            assert isinstance(examples, str) or isinstance(pairs, list), (shape, refused)
            if isinstance(pairs, str):
                continue
        rows = load_prompts([dict(asked, answer="4")], "train")
        (record,), _ = encode_prompts(rows, ours, max_prompt_tokens=9999)
        expected = their_prompt(theirs, prompt, tools)
        if expected is not None:
            assert record.prompt_text == expected, shape
        given = record.token_ids.tolist()
        assert given == ours.encode(record.prompt_text), shape
        body = {"model": "m", "messages": prompt}
        served = read_chat(body, ours, "m", RequestLimits(9999, 1)) if not tools else None
        if served is not None:
            assert list(served.requests[0][0]) == given, shape
        (pair,), (label,) = pairs, labels
        assert pair.prompt_ids.tolist() == label.prompt_ids.tolist() == given, shape
        for ids, mask in (
            (pair.chosen_ids, pair.chosen_mask),
            (pair.rejected_ids, pair.rejected_mask),
            (label.completion_ids, label.completion_mask),
        ):
            assert mask.all() and int(ids[-1]) in ours.eos_ids, (shape, text(ids))
            assert not set(ids[:-1].tolist()) & set(ours.eos_ids), (shape, text(ids))
        if isinstance(examples, str):
            continue
        runs = [run for ids, mask in examples for run in spans(ids, mask)]
        turns = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        assert len(runs) == len([last] if prefill else turns), (shape, [text(x) for _, x in runs])
        for (before, learned), k in zip(runs, turns[-1:] if prefill else turns, strict=True):
            rows = load_prompts(
                [dict({"prompt": messages[:k]}, answer="4", **({"tools": tools} if tools else {}))],
                "train",
            )
            (record,), _ = encode_prompts(rows, ours, max_prompt_tokens=9999)
            assert text(before) == record.prompt_text, (shape, k)
            assert learned[-1] in ours.eos_ids, (shape, k, text(learned))
        assert runs[-1] == (given, pair.chosen_ids.tolist()), shape
        seen += 1
    assert seen >= 3


def test_the_calls_of_an_agent_keep_their_reasoning(folders):
    """gpt-oss renders a call without its reasoning once an answer follows: each turn is an example
    as the policy is asked for it."""
    if "trl-gptoss" not in TEMPLATES:
        pytest.skip("trl is not installed")
    ours = HuggingFaceTokenizer(folders("trl-gptoss"))
    row = {
        "messages": [
            ASK,
            {**CALL, "thinking": "look it up"},
            SUNNY,
            assistant("It is sunny.", thinking="now I know"),
        ],
        "tools": [WEATHER],
    }
    items, _ = encode_rows(load_rows([row], "train", "examples"), ours, "examples", max_tokens=9999)

    def text(ids):
        return ours.decode(ids, skip_special_tokens=False)

    runs = [text(learned) for ids, mask in items for _, learned in spans(ids, mask)]
    first, last = runs
    assert first.startswith("<|channel|>analysis<|message|>look it up<|end|>")
    assert first.endswith("<|call|>") and '"city": "Ulm"' in first
    assert last == (
        "<|channel|>analysis<|message|>now I know<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is sunny.<|return|>"
    )


def _learned(ours, row):
    items, _ = encode_rows(load_rows([row], "train", "examples"), ours, "examples", max_tokens=9999)
    return [
        ours.decode(learned, skip_special_tokens=False)
        for item in items
        for _, learned in spans(*item)
    ]


def test_words_beside_a_call_are_learned_as_reasoning_is(folders):
    """gpt-oss writes both on the channel analysis, and leaves both out behind a final answer."""
    if "trl-gptoss" not in TEMPLATES:
        pytest.skip("trl is not installed")
    ours, sunny = HuggingFaceTokenizer(folders("trl-gptoss")), assistant("It is sunny.")
    said, thought = {**CALL, "content": "Let me look."}, {**CALL, "thinking": "Let me look."}
    for more in ([], [user("And now?"), sunny]):
        rows = [
            {"messages": [ASK, first, SUNNY, sunny, *more], "tools": [WEATHER]}
            for first in (said, thought)
        ]
        words, reasoning = (_learned(ours, row) for row in rows)
        assert words == reasoning and words[0].count("Let me look.") == 1
        assert words[1:] == [FINAL.format("It is sunny.")] * (1 + bool(more))


FINAL = "<|channel|>final<|message|>{}<|return|>"


@pytest.mark.parametrize("weight", [0, 1])
def test_turns_that_gemma_joins_are_each_learned_alone(folders, weight):
    if "trl-gemma4_v5" not in TEMPLATES:
        pytest.skip("trl is not installed")
    ours = HuggingFaceTokenizer(folders("trl-gemma4_v5"))
    first = {**assistant("First."), "weight": weight}
    start = ["First.<turn|>"] * weight
    thought = {**assistant("Second."), "reasoning_content": "I see"}
    assert _learned(ours, {"messages": [ASK, first, thought]}) == [
        *start,
        "<|channel>thought\nI see\n<channel|>Second.<turn|>",
    ]
    agent = {"messages": [ASK, first, CALL, SUNNY, assistant("It is sunny.")], "tools": [WEATHER]}
    call = '<|tool_call>call:weather_at{city:<|"|>Ulm<|"|>}<tool_call|><|tool_response>'
    assert _learned(ours, agent) == [*start, call, "It is sunny.<turn|>"]
    beside = {**CALL, "content": "Let me look."}  # which it writes behind the tool's answer
    asked = [ASK, beside, SUNNY, CALL, SUNNY, assistant("It is sunny.")]
    with pytest.raises(InputError, match="as a message of its own before it"):
        _learned(ours, {"messages": asked, "tools": [WEATHER]})
    before = [ASK, assistant("Let me look."), CALL, *asked[2:]]
    texts = _learned(ours, {"messages": before, "tools": [WEATHER]})
    assert texts == ["Let me look.<turn|>", call, call, "It is sunny.<turn|>"]


def test_short_texts_of_templates_that_read_parts_alone(folders):
    """SmolVLM's kind: the "A" of "Assistant" is not the answer "A"."""
    if "trl-idefics3" not in TEMPLATES:
        pytest.skip("trl is not installed")
    ours = HuggingFaceTokenizer(folders("trl-idefics3"))
    text = ours.render_chat([user("A or B?"), assistant("A"), user("x")])
    assert "Assistant: A<end_of_utterance>" in text
    mixed = [user([{"type": "text", "text": "A or B?"}]), assistant("A"), user("x")]
    assert ours.render_chat(mixed) == text


# The template of Meta-Llama-3-8B-Instruct's first release: it opens an answer, asked for or not.
ALWAYS_OPEN = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def test_an_answer_that_a_template_always_opens_is_no_part_of_what_is_learned(tmp_path):
    folder = write_family(tmp_path / "llama3", "llama3", marked=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": ALWAYS_OPEN}))
    ours = HuggingFaceTokenizer(folder)
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    talk = [user("hi"), assistant("yo"), user("so"), assistant("no")]
    asked = ours.render_chat(talk[:1])
    assert asked.endswith("hi<|eot_id|>" + header)
    whole = ours.render_chat(talk, add_generation_prompt=False)
    assert whole.startswith(asked) and whole.endswith("no<|eot_id|>")
    ids, mask = encode_conversation(ours, talk)
    learned = [ours.decode(part, skip_special_tokens=False) for _, part in spans(ids, mask)]
    assert learned == ["yo<|eot_id|>", "no<|eot_id|>"]
    assert ours.decode(ids, skip_special_tokens=False) == whole


def _tokenizer(folder, template, *special, eos="<|endoftext|>", **config):
    """A tokenizer with this template, these special tokens and these further settings."""
    (folder / "t.jinja").write_text(template + "{# " + " ".join([eos, *special]) + " #}")
    made = write_base_model(folder / "model", folder / "t.jinja")
    path = made / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "eos_token": eos, **config}
    path.write_text(json.dumps(config))
    return HuggingFaceTokenizer(made)


def _turns(ours, row):
    """What is learned of each example of a row; each continues the sampler's prompt there."""
    (record,) = load_rows([row], "train", "examples")
    items, _ = encode_rows([record], ours, "examples", max_tokens=9999)
    runs = [run for item in items for run in spans(*item)]
    turns = [k for k, m in enumerate(record["messages"]) if m["role"] == "assistant"]
    # Stop tokens that follow each other are one run.
    if len(runs) == len(turns):
        for (before, _), k in zip(runs, turns, strict=True):
            asked = ours.render_chat(record["messages"][:k], tools=record.get("tools"))
            assert ours.decode(before, skip_special_tokens=False) == asked
    return [ours.decode(learned, skip_special_tokens=False) for _, learned in runs]


# Command R7B's for tools: it opens an answer, asked for or not, and writes calls.
CALLS_ALWAYS_OPEN = (
    "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Preamble<|END_OF_TURN_TOKEN|>"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}\n<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>\n"
    "{% elif m.role == 'tool' %}\n<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content | tojson }}"
    "<|END_OF_TURN_TOKEN|>\n"
    "{% else %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}<|START_ACTION|>"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|END_ACTION|>"
    "<|END_OF_TURN_TOKEN|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "<|END_OF_TURN_TOKEN|>{% endif %}\n    {% endif %}{% endfor %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
END = "<|END_OF_TURN_TOKEN|>"
USED = {"messages": [ASK, CALL, SUNNY, assistant("It is sunny."), ASK, ANSWER], "tools": [WEATHER]}


@pytest.mark.parametrize("eos", [END, "<|endoftext|>"], ids=["told", "base model"])
@pytest.mark.parametrize("kind", ["default", "tool_use"])
def test_a_call_ends_as_an_answer_does_where_the_next_answer_is_always_opened(tmp_path, eos, kind):
    template = CALLS_ALWAYS_OPEN
    if kind == "default":
        template = template.replace("in tools %}", "in tools or [] %}")
    else:
        template = [{"name": name, "template": template} for name in ("default", "tool_use")]
        template[0]["template"] = "{% for m in messages %}{{ m.content }}" + END + "{% endfor %}"
    ours = _tokenizer(tmp_path, CALLS_ALWAYS_OPEN, eos=eos, chat_template=template)
    ends = [ours.decode([end.id], skip_special_tokens=False) for end in ours.turn_ends]
    assert ends == [END]
    stops = [ours.decode([i], skip_special_tokens=False) for i in ours.eos_ids]
    assert stops == list(dict.fromkeys([eos, END]))
    call = "<|START_ACTION|>" + '{"name": "weather_at", "arguments": {"city": "Ulm"}}<|END_ACTION|>'
    answers = ["It is sunny.", "It is four."]
    assert _turns(ours, USED) == [
        call + END,
        *(f"<|START_RESPONSE|>{text}<|END_RESPONSE|>{END}" for text in answers),
    ]


@pytest.mark.parametrize(
    ("template", "end", "begun"),
    [
        (ALWAYS_OPEN, "<|eot_id|>", ""),
        ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>",)
        + ("<|user|>", "\n"),
    ],
    ids=["llama3", "ended by the next role"],
)
def test_the_end_of_turns_of_a_base_model_whose_template_always_opens_an_answer(
    tmp_path, template, end, begun
):
    ours = _tokenizer(tmp_path, template, "<|user|>", "<|assistant|>")
    assert [ours.decode([e.id], skip_special_tokens=False) for e in ours.turn_ends] == [end]
    learned = [f"{begun}It is four.{end}", f"{begun}It is six.{end}"]
    assert _turns(ours, {"messages": SHAPES["two_turns"]}) == learned


# Hermes 3's for tools: a line break is behind a tool's answer, or any message, if more follows.
MORE_BEHIND = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>tool\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
    "{% if m.role == 'user' and not loop.last %}{{ '\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("results", [1, 2])
def test_an_answer_behind_a_message_that_ends_otherwise_once_more_follows(tmp_path, results):
    ours = _tokenizer(tmp_path, MORE_BEHIND, "<|im_end|>", eos="<|im_end|>")
    call = {**CALL, "tool_calls": CALL["tool_calls"] * results}
    messages = [ASK, call, *[SUNNY] * results, assistant("It is sunny."), ASK, ANSWER]
    calls = '{"name": "weather_at", "arguments": {"city": "Ulm"}}' * results
    texts = [calls, "It is sunny.", "It is four."]
    learned = _turns(ours, {"messages": messages, "tools": [WEATHER]})
    assert learned == [f"{text}<|im_end|>" for text in texts]


# GLM 4.7: a turn without reasoning is its closing mark and the answer.
CLOSED_ALONE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.index0 > ns.last %}<think>"
    "{{ m.reasoning_content }}{% endif %}</think>{% endif %}{{ m.content.strip() }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
)
# Nemotron Nano 2: the last answer stands in the reasoning that the prompt opens, a call does not.
OPENED_FOR_WORDS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "<SPECIAL_11>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and m.content %}"
    "<think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{{ '\n<SPECIAL_12>\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>assistant\n<think>\n\n{% endif %}"
)
HAD = {"reasoning_content": "I count"}
CALLED = '{"name": "weather_at", "arguments": {"city": "Ulm"}}'


@pytest.mark.parametrize("reasoned", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize(
    ("template", "special", "closed", "call", "ends"),
    [
        (
            CLOSED_ALONE,
            "<|assistant|> <|user|>",
            "</think>",
            f"<tool_call>{CALLED}</tool_call>",
            ("<|observation|>", "<|user|>"),
        ),
        (OPENED_FOR_WORDS, "", "\n</think>\n\n", CALLED, ("\n<SPECIAL_12>",) * 2),
    ],
    ids=["glm 4.7", "nemotron nano 2"],
)
def test_a_turn_ends_the_reasoning_that_its_prompt_opens(
    tmp_path, template, special, closed, call, ends, reasoned
):
    eos = "<|endoftext|>" if special else "<SPECIAL_12>"
    ours = _tokenizer(tmp_path, template, *special.split(), "<|observation|>", eos=eos)
    turns = [CALL, assistant("It is sunny."), ANSWER]
    turns = [{**m, **HAD} if k in reasoned else m for k, m in enumerate(turns)]
    messages = [ASK, turns[0], SUNNY, turns[1], ASK, turns[2]]
    learned = _turns(ours, {"messages": messages, "tools": [WEATHER]})
    texts = [call + ends[0], "It is sunny." + ends[1], "It is four." + ends[1]]
    begun = ["I count" if k in reasoned else "" for k in range(3)]
    assert learned == [a + closed + b for a, b in zip(begun, texts, strict=True)]


# Ministral 3 and Magistral: reasoning is a part of the content.
THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.content is string %}{{ m.content + eos_token }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'thinking' %}"
    "[THINK]INSIDE[/THINK]{% else %}{{ raise_exception('Only text and thinking') }}{% endif %}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
INSIDE = {
    "text": "{{ part.thinking }}",
    "parts": "{% for t in part.thinking %}{{ t.text }}{% endfor %}",
}
THOUGHT = {"type": "thinking", "thinking": "I count"}
IT_IS = {"type": "text", "text": "It is four."}


@pytest.mark.parametrize("inside", INSIDE)
def test_reasoning_is_a_part_of_the_content_where_a_template_reads_it_there(tmp_path, inside):
    ours = _tokenizer(tmp_path, THINKING.replace("INSIDE", INSIDE[inside]), eos="</s>")
    nested = {**THOUGHT, "thinking": [{"type": "text", "text": "I count"}]}
    for turn in (
        assistant([THOUGHT, IT_IS]),
        assistant([nested, IT_IS]),
        assistant([{**THOUGHT, "thinking": "I "}, {**THOUGHT, "thinking": "count"}, IT_IS]),
        {**ANSWER, **HAD},
        {**ANSWER, "thinking": "I count"},
        {**assistant([THOUGHT, IT_IS]), **HAD},
    ):
        told = {"messages": [ASK, ANSWER, ASK, turn, ASK, ANSWER]}
        answer = "It is four.</s>"
        learned = _turns(ours, told)
        assert learned == [answer, f"[THINK]I count[/THINK]{answer}", answer]
        (pair,) = encode_rows(
            load_rows(
                [{"prompt": [ASK], "chosen": [turn], "rejected": [ANSWER]}], "train", "pairs"
            ),
            ours,
            "pairs",
            max_tokens=9999,
        )[0]
        chosen = ours.decode(pair.chosen_ids.tolist(), skip_special_tokens=False)
        assert chosen == f"[THINK]I count[/THINK]{answer}"
    text = ours.render_chat([ASK, assistant([THOUGHT])], add_generation_prompt=False)
    assert text.endswith("[/INST][THINK]I count[/THINK]</s>")
    begun = ours.render_chat([ASK, turn], add_generation_prompt=False, continue_final_message=True)
    assert begun.endswith("[THINK]I count[/THINK]It is four.")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "system", "content": [IT_IS, THOUGHT]}, "thinking in the role 'system'"),
        (user([THOUGHT, IT_IS]), "thinking in the role 'user'"),
        (assistant([IT_IS, THOUGHT]), "thinking behind another part"),
        (assistant([THOUGHT, IT_IS, THOUGHT]), "thinking behind another part"),
        (assistant([{**THOUGHT, "thinking": 5}, IT_IS]), "thinking that is not text"),
        (assistant([THOUGHT, IT_IS], thinking="I guess"), "thinking and another reasoning"),
    ],
)
def test_thinking_that_is_not_the_reasoning_of_a_turn(tmp_path, message, says):
    ours = _tokenizer(tmp_path, THINKING.replace("INSIDE", INSIDE["text"]), eos="</s>")
    with pytest.raises(InputError, match=f"message 0.*{says}"):
        ours.render_chat([message, ASK])
    with pytest.raises(InputError, match=f"row 0.*message 0.*{says}"):
        load_rows([{"messages": [message, ASK, ANSWER]}], "train", "examples")
