"""Tools over the server, asked by the `openai` client: requests render as the template says, and
what the model writes comes back as calls, whole or streamed."""

import contextlib
import json
import types
from concurrent.futures import Future

import numpy as np
import pytest
from tiny_server import NAME, tiny_server
from tiny_tokenizer import write_json
from tool_families import FORMATS, SCHEMAS, calls_message, write_tool_family

from rljax.batch import FinishReason
from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments.calls import parser
from rljax.serving.call_stream import CallStream
from rljax.serving.worker import TokenChunk

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

ASK = [{"role": "user", "content": "How is the weather?"}]
TELLS = {"role": "system", "content": "Tools: weather(town, n), look_up(town), a1(town)."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm", "n": 2}}\n</tool_call>'


class Scripted:
    """A worker that writes what a test says, `size` tokens at a time, and keeps what it was
    asked."""

    failure, room = None, 64
    sampler = types.SimpleNamespace(engine=types.SimpleNamespace(tokens=4096, request_tokens=4096))

    def __init__(self, size: int = 1):
        self.size, self.ids, self.asked = size, [], []

    def submit(self, ticket, requests, n) -> Future:
        self.asked.append(requests[0])
        pieces = [self.ids[i : i + self.size] for i in range(0, len(self.ids), self.size)]
        for sample in range(n):
            for number, piece in enumerate(pieces, 1):
                reason = FinishReason.STOP if number == len(pieces) else None
                ticket.deliver(TokenChunk(sample, piece, [-0.5] * len(piece), 0, reason))
        done: Future = Future()
        done.set_result(None)
        return done

    def abort(self, ticket) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """family -> (client, worker, tokenizer): one server each, started where a test asks for it."""
    from rljax.serving.app import in_background, make_app

    root, running = tmp_path_factory.mktemp("served"), {}
    with contextlib.ExitStack() as stack:

        def of(family: str, calls: str = "auto"):
            if (family, calls) not in running:
                tokenizer = load_tokenizer(write_tool_family(root / family, family))
                worker = Scripted()
                address = stack.enter_context(
                    in_background(make_app(worker, tokenizer, NAME, calls=calls))
                )
                client = stack.enter_context(
                    openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
                )
                running[family, calls] = client, worker, tokenizer
            return running[family, calls]

        yield of


def streamed(client, **request) -> tuple[str, list[dict], str, list[str]]:
    """(content, calls, finish reason, the pieces of content) of a streamed chat completion."""
    pieces, calls, reason = [], {}, None
    for chunk in client.chat.completions.create(model=NAME, stream=True, **request):
        choice = chunk.choices[0]
        pieces += [choice.delta.content] if choice.delta.content else []
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            assert call.index not in calls
            calls[call.index] = (call.function.name, json.loads(call.function.arguments))
    return "".join(pieces), [calls[i] for i in sorted(calls)], reason, pieces


def asked(client, **request) -> tuple[str, list, str]:
    choice = client.chat.completions.create(model=NAME, **request).choices[0]
    calls = choice.message.tool_calls or []
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return choice.message.content or "", made, choice.finish_reason


@pytest.mark.parametrize("size", [1, 3, 999])
def test_calls_come_back_whole_and_streamed(served, size):
    client, worker, tokenizer = served("qwen2_5")
    worker.size = size
    made = ("weather", {"town": "Ulm", "n": 2})
    for text, content, calls, reason in [
        (f"I look.\n{CALL}", "I look.", [made], "tool_calls"),
        (f"{CALL}\n{CALL}", "", [made, made], "tool_calls"),
        ("No need: < 3 apples.\n", "No need: < 3 apples.\n", [], "stop"),
        ("Bad: <tool_call>{</tool_call>", "Bad: <tool_call>{</tool_call>", [], "stop"),
        (f"{CALL}\n<tool_call>{{", "\n<tool_call>{", [made], "tool_calls"),
    ]:
        worker.ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        assert asked(client, messages=ASK, tools=SCHEMAS) == (content, calls, reason), text
        *whole, pieces = streamed(client, messages=ASK, tools=SCHEMAS)
        assert tuple(whole) == (content, calls, reason), text
        begun = content.lstrip().startswith("<tool")
        assert len(pieces) > 1 or size == 999 or len(content) < 10 or begun
        # Without tools the text is what it is.
        assert asked(client, messages=ASK) == (text, [], "stop")
        assert asked(client, messages=ASK, tools=SCHEMAS, tool_choice="none")[1:] == ([], "stop")


@pytest.mark.parametrize("family", FORMATS)
def test_a_conversation_with_calls_is_what_the_template_renders(served, family):
    """An answer with calls goes back with the tool's answer, as agents send it."""
    client, worker, tokenizer = served(family)
    form = parser("auto", tokenizer)
    ask = [TELLS, *ASK] if family == "deepseek_text" else ASK  # its template writes no tools
    message = calls_message([("weather", {"town": "Ulm", "n": 2})])
    before = tokenizer.render_chat(ask, tools=SCHEMAS)
    text = tokenizer.render_chat([*ask, message], tools=SCHEMAS, add_generation_prompt=False)
    start = len(before) if text.startswith(before) else text.index("<｜tool▁calls▁begin｜>")
    worker.ids = tokenizer.encode(text[start:])
    made = client.chat.completions.create(model=NAME, messages=ask, tools=SCHEMAS).choices[0]
    thought = "<think>\n\n</think>" if family == "qwen3" else None
    assert (made.finish_reason, made.message.content) == ("tool_calls", thought)
    assert worker.asked[-1][0] == tokenizer.encode_chat(ask, tools=SCHEMAS)
    assert set(worker.asked[-1][1].stop_ids) == set(form.stop_ids(tokenizer))
    (call,) = made.message.tool_calls
    assert json.loads(call.function.arguments) == {"town": "Ulm", "n": 2}
    answer = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    history = [*ask, made.message.model_dump(exclude_none=True), answer]
    client.chat.completions.create(model=NAME, messages=history, tools=SCHEMAS)
    message["tool_calls"][0]["id"], message["content"] = call.id, thought or ""
    expected = [*ask, message, {**answer, "name": "weather"}]
    assert tokenizer.decode(worker.asked[-1][0], skip_special_tokens=False) == (
        tokenizer.decode(tokenizer.encode_chat(expected, tools=SCHEMAS), skip_special_tokens=False)
    )


DRAFT = f"<think>\nI could {CALL}\n</think>\n\n"


@pytest.mark.parametrize("size", [1, 3, 999])
def test_a_draft_comes_back_as_text(served, size):
    client, worker, tokenizer = served("qwen2_5")
    worker.size, made = size, ("weather", {"town": "Ulm", "n": 2})
    for text, content, calls, reason in [
        (f"{DRAFT}It is warm.", f"{DRAFT}It is warm.", [], "stop"),
        (f"{DRAFT}{CALL}", DRAFT.rstrip(), [made], "tool_calls"),
        (f"{DRAFT}I look.\n{CALL}", f"{DRAFT}I look.", [made], "tool_calls"),
        ("I use the <tool_call> tag: no.", "I use the <tool_call> tag: no.", [], "stop"),
    ]:
        worker.ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        assert asked(client, messages=ASK, tools=SCHEMAS) == (content, calls, reason), text
        *whole, pieces = streamed(client, messages=ASK, tools=SCHEMAS)
        assert tuple(whole) == (content, calls, reason), text
        if size == 1 and text.startswith(DRAFT):  # reasoning is sent as it comes, drafts and all
            assert len(pieces) > 10 and "tool" in "".join(pieces[:-1])


def test_a_prompt_that_begins_the_reasoning(served):
    """A call in what the prompt has begun is a draft, for the client that continues a turn, too."""
    client, worker, tokenizer = served("qwen2_5")
    begun = [*ASK, {"role": "assistant", "content": "<think>\nhm"}]
    made = ("weather", {"town": "Ulm", "n": 2})
    for text, calls in [(f"maybe {CALL}", []), (f"maybe {CALL}\n</think>\n{CALL}", [made])]:
        worker.ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        content, got, _ = asked(client, messages=begun, tools=SCHEMAS)
        assert got == calls and content == text.removesuffix(f"\n{CALL}" if calls else "")
        assert streamed(client, messages=begun, tools=SCHEMAS)[:2] == (content, calls)
        prompt = tokenizer.decode(worker.asked[-1][0], skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\n<think>\nhm")


def test_flags_of_a_decoder_are_not_told(served):
    client, worker, tokenizer = served("qwen2_5")
    worker.ids = [tokenizer.eos_ids[0]]
    plain = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    flags = [
        {"strict": False},
        {"strict": None},
        {"description": None},
        {"cache_control": {"type": "ephemeral"}},
    ]
    prompts = set()
    for tool in [
        plain,
        *({**plain, "function": {**plain["function"], **more}} for more in flags),
        *({**plain, **more} for more in flags),
    ]:
        client.chat.completions.create(model=NAME, messages=ASK, tools=[tool])
        prompts.add(tuple(worker.asked[-1][0]))
    assert len(prompts) == 1


def test_harmony_is_read_with_and_without_tools(served):
    client, worker, tokenizer = served("gpt_oss")
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    worker.ids = [*tokenizer.encode(said), tokenizer.eos_ids[0]]
    for more in ({}, {"tools": SCHEMAS}):
        answer = client.chat.completions.create(model=NAME, messages=ASK, **more).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("4", "stop")
        assert answer.message.reasoning_content == "hm"
        assert streamed(client, messages=ASK, **more)[0] == "4"


def test_a_tag_of_ones_own(served):
    client, worker, tokenizer = served("qwen3", "tag(name='look_up')")
    worker.ids = tokenizer.encode("So <look_up>Ulm</look_up>")
    request = dict(messages=ASK, tools=SCHEMAS, stop=["zzz"])
    assert asked(client, **request) == ("So ", [("look_up", {"town": "Ulm"})], "tool_calls")
    assert worker.asked[-1][1].stop_strings == ("zzz", "</look_up>")


SEARCH = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": SEARCH}}
LOOK_UP = {"type": "function", "function": {"name": "look-up"}}


@pytest.mark.parametrize("calls", ["auto", "hermes"])
@pytest.mark.parametrize(
    "messages, tools, untold",
    [
        ([("user", "Weather in Bonn?")], [SEARCH], ["search"]),
        ([("user", "Please search for Bonn.")], [SEARCH], ["search"]),  # a word of the question
        ([("user", "You have search(query). Find Bonn.")], [SEARCH], []),
        ([("system", "Call search to find pages."), ("user", "Bonn?")], [SEARCH], []),
        ([("system", "Call research."), ("user", "Bonn?")], [SEARCH], ["search"]),
        ([("system", "Call look-up(town)."), ("user", "Bonn?")], [SEARCH, LOOK_UP], ["search"]),
        ([("system", "look it up"), ("user", "Bonn?")], [LOOK_UP], ["look-up"]),
        (
            [("user", "Hi"), ("assistant", "I call search(query)"), ("user", "Bonn?")],
            [SEARCH],
            ["search"],
        ),
    ],
)
def test_tools_that_the_model_never_hears_of_are_refused(served, messages, tools, untold, calls):
    """Gemma's template writes no tools: a message has to tell of them."""
    client, worker, tokenizer = served("gemma", calls)
    worker.ids = [tokenizer.eos_ids[0]]
    messages = [{"role": role, "content": text} for role, text in messages]
    if not untold:
        assert asked(client, messages=messages, tools=tools)[2] == "stop"
        return
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=messages, tools=tools)
    assert f"tools: got {untold}" in caught.value.body["message"]
    assert asked(client, messages=messages, tools=tools, tool_choice="none")[2] == "stop"


@pytest.mark.parametrize(
    "family, variables, lost",
    [
        ("qwen3", {"enable_thinking": False}, []),
        ("qwen3", {"enable_think": False}, ["enable_think"]),  # a part of a name that it reads
        ("qwen3", {"enable_thinking": False, "thinking_budget": 9}, ["thinking_budget"]),
        ("qwen2_5", {"enable_thinking": False}, ["enable_thinking"]),
        ("qwen2_5", {"enable_thinking": None}, []),
        ("qwen2_5", {}, []),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(served, family, variables, lost):
    client, worker, tokenizer = served(family)
    worker.ids = [tokenizer.eos_ids[0]]
    request = dict(model=NAME, messages=ASK, extra_body={"chat_template_kwargs": variables})
    if not lost:
        assert client.chat.completions.create(**request)
        return
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert f"chat_template_kwargs: got {lost}" in caught.value.body["message"]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "more, words",
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "at most 128"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "not empty"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "not constrained",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served, more, words):
    client, worker, tokenizer = served("qwen2_5")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=ASK, extra_body=more)
    assert words in caught.value.body["message"]


def test_hostile_calls_in_messages_are_answered(served):
    client, worker, tokenizer = served("qwen2_5")
    worker.ids = [tokenizer.eos_ids[0]]
    for calls in [
        3,
        "x",
        [],
        [3],
        [{}],
        [{"id": 3}],
        [{"function": 3}],
        [{"function": {"arguments": "{"}}],
        [{"id": "a", "function": {"name": "f", "arguments": "[" * 99999}}],
        [{"id": "a", "function": {"name": ["f"], "arguments": {}}}],
    ]:
        messages = [
            *ASK,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": ["a"], "content": "1"},
        ]
        try:
            client.chat.completions.create(model=NAME, messages=messages, tools=SCHEMAS)
        except openai.BadRequestError as error:
            assert error.body["message"]


@pytest.mark.slow
def test_a_model_that_calls(tmp_path):
    """The engine's own tokens: a bias makes one token certain, whose text is a call."""
    folder = write_tool_family(tmp_path / "family", "qwen2_5")
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {**content["added_tokens"][-1], "id": load_tokenizer(folder).vocab_size}
    content["added_tokens"].append({**token, "content": CALL, "special": False})
    write_json(folder / "tokenizer.json", content)
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"  # noqa: E501
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"chat_template": template})
    tokenizer = load_tokenizer(folder)
    (call,) = tokenizer.encode(CALL)
    with tiny_server(tokenizer) as (_, _, worker, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            request = dict(messages=ASK, tools=SCHEMAS, logit_bias={str(call): 100}, max_tokens=2)
            made = ("weather", {"town": "Ulm", "n": 2})
            assert asked(client, **request) == ("", [made, made], "length")
            assert streamed(client, **request)[:3] == ("", [made, made], "length")
            answer = client.chat.completions.create(model=NAME, logprobs=True, **request)
    assert [one.token for one in answer.choices[0].logprobs.content] == [CALL, CALL]


def test_a_stream_shows_what_is_no_call_at_once(served):
    _, _, tokenizer = served("qwen2_5")
    text = f"One two.\n\n{CALL} "
    stream = CallStream(tokenizer, parser("hermes", tokenizer), (), SCHEMAS)
    shown = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(shown) == "One two." and stream.finish() == "" and len(stream.calls) == 1
    stream = CallStream(tokenizer, parser("hermes", tokenizer), ("two",), SCHEMAS)
    shown = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(shown) + stream.finish() == "One " and not stream.calls
    rng = np.random.default_rng(0)
    pieces = ["<tool_call>", "</tool_call>", "{", "}", '{"name": "f"}', " ", "\n", "a", "<", "é"]
    for _ in range(300):  # whatever it is, what was sent is the beginning of the content
        text = "".join(rng.choice(pieces, size=rng.integers(1, 12)))
        stream = CallStream(tokenizer, parser("hermes", tokenizer), (), SCHEMAS)
        sent = "".join(stream.push(token) for token in tokenizer.encode(text)) + stream.finish()
        parsed = parser("hermes", tokenizer).parse(text, SCHEMAS)
        bad = parsed.problem and not parsed.calls
        assert sent == (text if bad else parsed.said), repr(text)
