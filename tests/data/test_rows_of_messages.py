"""Keys of rows and messages: which turns are learned, who speaks, calls, tools, and nulls that a
table filled in. Each is honoured in every kind of row, or refused by name."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from test_trl_formats import config_of
from tiny_refusal import refused

from rljax.data.offline.rows import load_rows, load_stored_rows
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.data.rows.prepare import PrepareOptions, prepare
from rljax.data.rows.sources import load_demonstrations, load_endless_prompts, load_prompts
from rljax.data.text.messages import for_template, template_view
from rljax.errors import InputError

S = {"role": "system", "content": "s"}
U, V = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
A, B = {"role": "assistant", "content": "bad"}, {"role": "assistant", "content": "good"}
CONTEXT = {**A, "learn": False}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def messages_of(row, kind="examples", name="messages"):
    return load_rows([row], "train", kind)[0][name]


# -- which turns are learned --

FLAGS = [
    *[{name: 0} for name in ("weight", "loss_mask", "step_loss_mask", "loss_weight")],
    *[{name: False} for name in ("train", "training", "trainable", "loss", "learn", "isTrainable")],
    {"weight": 0.0},
    {"lossMask": 0},
    {"weight": 0, "train": False},
    {"train": False, "loss": None},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_turn_that_is_context_only(flags, tmp_path):
    other = {name: True for name, value in flags.items() if value is not None}
    want = [U, CONTEXT, V, B]
    assert messages_of({"messages": [U, {**A, **flags}, V, {**B, **other}]}) == want
    spoken = {"user": "human", "assistant": "gpt"}

    def said(m, **more):
        return {"from": spoken[m["role"]], "value": m["content"], **more}

    row = {"conversations": [said(U), said(A, **flags), said(V), said(B)]}
    assert messages_of(row) == want
    assert load_demonstrations(write(tmp_path / "a.jsonl", [row]), "train")[0]["messages"] == want
    row = {"prompt": [U], "completion": [{**A, **flags}, V, B]}
    assert messages_of(row) == want
    pair = {"prompt": [U], "chosen": [{**A, **flags}, V, B], "rejected": [B]}
    assert messages_of(pair, "pairs", "chosen") == [CONTEXT, V, B]
    label = {"prompt": [U], "completion": [{**A, **flags}, V, B], "label": True}
    assert messages_of(label, "unpaired", "completion") == [CONTEXT, V, B]
    trajectory = {"prompt": [U], "completion": [{**A, **flags}, V, B], "reward": 1.0}
    assert messages_of(trajectory, "trajectories", "completion") == [CONTEXT, V, B]


def test_what_a_prompt_says_of_its_turns_is_no_matter(tmp_path):
    prompt = [U, {**A, "weight": 0}, V]
    for kind, more in [
        ("pairs", {"chosen": "a", "rejected": "b"}),
        ("unpaired", {"completion": "a", "label": 1}),
        ("stepwise", {"completions": ["a"], "labels": [1]}),
    ]:
        assert messages_of({"prompt": prompt, **more}, kind, "prompt") == [U, A, V]
    rows = [{"prompt": prompt, "answer": "1"}, {"messages": [*prompt, B]}]
    records = load_prompts(write(tmp_path / "a.jsonl", rows), "train")
    assert [record["prompt"] for record in records] == [[U, A, V], [U, A, V]]
    # The same turn, learned in one of two conversations: the prompt is what they share.
    row = {"chosen": [U, {**A, "weight": 0}, V, B], "rejected": [U, A, V, A]}
    (record,) = load_rows([row], "train", "pairs")
    assert (record["prompt"], record["chosen"]) == ([U, A, V], [B])


@pytest.mark.parametrize(
    ("columns", "messages"),
    [
        ({"loss_mask": [0, 0, 0, 1]}, [U, A, V, B]),
        ({"weights": [0, 1]}, [U, A, V, B]),
        ({"loss_mask": [None, 0, None, 1]}, [U, A, V, B]),
        (
            {"train": [False, False, False, True]},
            [S, U, A, V, B],
        ),  # the column `system` is in front
    ],
)
def test_a_column_with_a_value_for_each_message(columns, messages):
    context = [{**m, "learn": False} if m == A else m for m in messages]
    assert messages_of({"messages": messages, **columns}) == context


REFUSED = [
    ({"messages": [U, {**A, "weight": 0.5}]}, "'weight' is neither 0 nor 1: got 0.5"),
    ({"messages": [U, {**A, "train": "no"}]}, "'train' is neither 0 nor 1"),
    ({"messages": [U, {**A, "loss": [0, 1]}]}, "'loss' is neither 0 nor 1"),
    ({"messages": [U, {**A, "mask": 1}]}, "'mask' is not understood"),
    ({"messages": [U, {**A, "is_masked": True}]}, "'is_masked' is not understood"),
    ({"messages": [U, {**A, "train_on_turn": 0}]}, "'train_on_turn' is not understood"),
    ({"messages": [U, {**A, "ignore": True}]}, "'ignore' is not understood"),
    ({"messages": [U, {**A, "is_target": 0}]}, "'is_target' is not understood"),
    ({"messages": [U, {**A, "no_loss": "true"}]}, "'no_loss' is not understood"),
    (
        {
            "messages": [
                U,
                {**A, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": 0}]},
            ]
        },
        "'train_detail' is not understood",
    ),
    ({"messages": [{**U, "train": True}, A]}, "'train' asks to learn a turn of 'user'"),
    ({"messages": [{**S, "weight": 1}, U, A]}, "'weight' asks to learn a turn of 'system'"),
    ({"messages": [U, {**A, "weight": 0, "train": True}]}, "contradicts itself"),
    ({"messages": [U, {**A, "weight": 0}]}, "to learn: each is context only"),
    ({"messages": [U, A], "loss_mask": [0, 0]}, "to learn: each is context only"),
    ({"messages": [U, A], "loss_mask": [1, 1]}, "'loss_mask' asks to learn a turn of 'user'"),
    ({"messages": [U, A], "loss_mask": [0, 1, 1]}, "'loss_mask' has 3 values for 2 messages"),
    ({"messages": [U, A], "loss_mask": [0, 0.5]}, "'loss_mask' is neither 0 nor 1"),
    ({"messages": [U, CONTEXT, V, B], "weights": [1, 1]}, "'weights' contradicts message 1"),
    ({"messages": [U, A], "train_on": [0, 1]}, "'train_on' is not understood"),
    ({"messages": [U, A], "weight": 0.5}, "'weight' is a weight of the whole row"),
    ({"messages": [U, A], "weight": "0.5"}, "'weight' is a weight of the whole row"),
    ({"messages": [U, A], "weight": 10**400}, "'weight' is a weight of the whole row"),
    ({"messages": [U, A], "mask": "Assistant"}, "'mask' is not understood"),
    ({"messages": [U, A], "mask": [1, 0]}, "'mask' is not understood"),
    (
        {"messages": [U, {**A, "content": [{"type": "text", "text": "x", "train": False}]}]},
        "'train' leaves out a part of a turn",
    ),
    ({"messages": [U, A], "train": False}, "'train' is a weight of the whole row"),
    ({"prompt": [U], "completion": [{**A, "weight": 0}]}, "says nothing that is learned"),
    ({"prompt": [U, {**A, "weight": 1}, V], "completion": [B]}, "'weight' asks to learn a turn of"),
    ({"prompt": [U, A, V], "completion": [B], "loss_mask": [0, 1, 0, 1]}, "turn of the prompt"),
    ({"prompt": "a", "completion": "b", "loss_mask": [0, 1]}, "has a value for each message"),
    ({"text": "a", "weights": [0, 1]}, "has a value for each message"),
]


@pytest.mark.parametrize(("row", "says"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_key_and_row(tmp_path, row, says):
    path = write(tmp_path / "rows.jsonl", [{"messages": [U, A]}, row])
    for load in (load_demonstrations, lambda p, s: load_rows(p, s, "examples")):
        refused(lambda load=load: load(path, "train"), "row 1 (line 2)", says)


def test_other_kinds_refuse_a_column_that_they_do_not_read():
    pair = {"prompt": [U], "chosen": [B], "rejected": [A]}
    for columns in ({"loss_mask": [0, 1]}, {"weight": 0.25}):
        refused(lambda columns=columns: load_rows([{**pair, **columns}], "train", "pairs"), "row 0")
    assert load_rows([{**pair, "weight": 1.0, "context": "x"}], "train", "pairs")


def test_keys_that_say_nothing_of_learning_pass():
    more = {"constraints": [1], "weight": None, "context": "long text", "id": 3, "skipped": []}
    columns = {"loss": 1.7, "training": "v2", "weight": "70 kg", "mask": "User"}
    assert messages_of({"messages": [U, {**A, **more}], **columns})[1] == {
        **A,
        **{name: value for name, value in more.items() if value is not None},
    }


# -- who speaks --


@pytest.mark.parametrize("role", ["User", "HUMAN", "human", "USER ", "Prompter"])
def test_roles_of_any_case(tmp_path, role):
    rows = [{"prompt": [{**U, "role": role}], "answer": "1"}]

    def load():
        return load_prompts(write(tmp_path / "a.jsonl", rows), "train")

    if role == "Prompter":
        refused(load, "row 0", "message 0 has an unknown role: got 'Prompter'")
        return
    assert load()[0]["prompt"] == [U]
    assistant = {**A, "role": "GPT" if role == "HUMAN" else "Assistant"}
    assert messages_of({"messages": [{**U, "role": role}, assistant]}) == [U, A]
    assert messages_of({"messages": [{"from": role, "value": "q"}, A]}) == [U, A]


@pytest.mark.parametrize("kind", ["prompts", "messages", "pairs"])
def test_unknown_roles_are_refused_by_name(tmp_path, kind):
    critic = {"role": "critic", "content": "x"}
    row = {
        "prompts": {"prompt": [critic, U], "answer": "1"},
        "messages": {"messages": [critic, U], "answer": "1"},
        "pairs": {"prompt": [critic, U], "chosen": "a", "rejected": "b"},
    }[kind]
    path = write(tmp_path / "a.jsonl", [row])
    load = (
        (lambda: load_rows(path, "train", kind))
        if kind == "pairs"
        else (lambda: load_prompts(path, "train"))
    )
    refused(load, "row 0 (line 1)", "unknown role: got 'critic'")


def test_a_conversation_as_json_text_is_one(tmp_path):
    rows = [{"prompt": json.dumps([U]), "answer": "1"}]
    assert load_prompts(write(tmp_path / "a.jsonl", rows), "train")[0]["prompt"] == [U]
    assert messages_of({"messages": json.dumps([U, A])}) == [U, A]
    rows = [{"prompt": str([U]), "answer": "1"}]
    refused(lambda: load_prompts(write(tmp_path / "b.jsonl", rows), "train"), "row 0", "repr")


# -- calls --


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def asks(name, arguments):
    return {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("{}", {}),
        (None, {}),
        ({"a": "1"}, {"a": "1"}),
        ('{"a": null}', {"a": None}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
    ],
)
def test_arguments_are_an_object_whatever_they_are_written_as(written, read):
    assert messages_of({"messages": [U, asks("f", written)]})[1] == asks("f", read)
    pair = {"prompt": [U], "chosen": [asks("f", written)], "rejected": [A]}
    assert messages_of(pair, "pairs", "chosen") == [asks("f", read)]
    other = {"function": {"name": "f", "parameters": written}}  # Llama's name of them
    asked = {"role": "assistant", "content": "", "tool_calls": [other]}
    (told,) = messages_of({"messages": [U, asked]})[1]["tool_calls"]
    assert told == {"function": {"name": "f", "arguments": read}}
    older = {"role": "assistant", "content": None, "function_call": call("f", written)["function"]}
    answer = {"role": "function", "name": "f", "content": "5"}
    told = messages_of({"messages": [U, older, answer, A]})
    assert told[1] == {"role": "assistant", "tool_calls": [call("f", read)]}
    assert told[2] == {**answer, "role": "tool"}
    text = {"role": "assistant", "content": "", "tool_calls": json.dumps([call("f", written)])}
    assert messages_of({"messages": [U, text]})[1] == asks("f", read)


def test_a_template_sees_arguments_as_an_object_also_of_messages_that_no_file_held():
    """As `encode_prompt_messages` gets them from a program of the user's."""
    for arguments in ('{"a": 1}', {"a": 1}):
        said = [{"role": "user", "content": "1?"}, asks("f", arguments)]
        assert template_view(said)[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("written", ["{", "[1]", "1", '"a"', "{'a': 1}", '{"a": NaN}', [1], 3])
def test_arguments_that_are_none_are_refused(written):
    refused(
        lambda: messages_of({"messages": [U, asks("f", written)]}),
        "row 0",
        "message 1, call 0 of 'f'",
        "no JSON object",
    )
    refused(lambda: for_template([asks("f", written)]), "no JSON object")


def test_a_tools_answer_has_the_name_of_its_call():
    called = {"role": "assistant", "tool_calls": [{"id": "c", **call("f", "{}")}]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "5"}
    assert for_template([called, answer])[1] == {**answer, "name": "f"}
    assert for_template([called, {**answer, "name": "g"}])[1]["name"] == "g"
    for calls in ([], None):
        assert for_template([{**A, "tool_calls": calls}]) == [A]
    both = {**called, "function_call": {"name": "f", "arguments": "{}"}}
    refused(lambda: for_template([both]), "'function_call' and 'tool_calls'")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {**A, "reasoning_content": "one", "thinking": "two"},
            "'reasoning_content' and 'thinking'",
        ),
        ({**A, "thinking": "one", "reasoning": "two"}, "'thinking' and 'reasoning'"),
        (
            {**A, "tool_calls": [{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}]},
            "call 0 of 'f' has arguments that differ in 'arguments' and 'parameters'",
        ),
        ({"from": "gpt", "value": "a", "content": "b"}, "'value' and 'content'"),
    ],
)
def test_a_field_that_differs_under_two_of_its_names_is_refused(message, says):
    refused(lambda: messages_of({"messages": [U, message]}), "row 0", "message 1", says)
    if "from" not in message:
        refused(lambda: template_view([U, message]), "message 1", says)
    else:
        turns = [{"from": "human", "value": "q"}, message]
        refused(lambda: messages_of({"conversations": turns}), "row 0", "turn 1", says)


def test_a_field_under_two_of_its_names_that_agree_or_say_nothing():
    reasoning = {**A, "reasoning_content": "why", "thinking": " why\n", "reasoning": ""}
    assert template_view([reasoning])[0]["reasoning_content"] == "why"
    called = {**A, "tool_calls": [{"name": "f", "arguments": {}, "input": {"a": 1}}]}
    assert template_view([called])[0]["tool_calls"] == [call("f", {"a": 1})]
    for turn in ({"value": "bad", "content": None}, {"value": None, "content": "bad"}):
        turns = [{"from": "human", "value": "q"}, {"from": "gpt", **turn}]
        assert messages_of({"conversations": turns}) == [U, A]


# -- tools --


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [tool("f")]},
        {"tools": json.dumps([tool("f")])},
        {"tool_defs": [tool("f")]},
        {"functions": [tool("f")["function"]]},
        {"functions": json.dumps([tool("f")["function"]])},
        {"tool_defs": [tool("f")["function"]]},
        {"tools": [tool("f")["function"]]},
        {"tools": json.dumps([{"type": "function", **tool("f")["function"]}])},
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"tool_defs": [{"name": "f", "inputSchema": {}}], "tools": [tool("f")]},
        {"tools": None, "extra_info": {"tools": [tool("f")]}},
        {"tools": [tool("f")], "extra_info": {"tools": None}},
        {"tools": [tool("f")], "extra_info": {"tools": [], "functions": None}},
        {"tools": [tool("f")], "tool_defs": json.dumps([tool("f")])},
    ],
)
def test_tools_under_all_their_names(tmp_path, columns):
    path = write(tmp_path / "a.jsonl", [{"prompt": [U], "answer": "1", **columns}])
    (record,) = load_prompts(path, "train")
    assert record["extra_info"] == {"tools": [tool("f")]}
    pair = {"prompt": [U], "chosen": [A], "rejected": [B], **columns}
    assert messages_of(pair, "pairs", "tools") == [tool("f")]
    assert messages_of({"messages": [U, A], **columns}, name="tools") == [tool("f")]
    assert load_rows([{"messages": [U, A], **columns}], "train", "examples")[0]["messages"] == [
        U,
        A,
    ]


def test_a_tool_of_another_type_stays_as_it_is():
    builtin = {"type": "web_search", "name": "web_search"}
    assert messages_of({"messages": [U, A], "tools": [builtin]}, name="tools") == [builtin]


def test_tools_that_contradict_each_other_are_refused(tmp_path):
    row = {"prompt": [U], "answer": "1", "tools": [tool("f")], "extra_info": {"tools": [tool("g")]}}
    path = write(tmp_path / "a.jsonl", [row])
    refused(lambda: load_prompts(path, "train"), "row 0", "'tools' than in 'extra_info.tools'")


def test_a_column_called_functions_may_be_an_environments(tmp_path):
    row = {"prompt": [U], "answer": "1", "functions": ["my_tools.multiply"]}
    (record,) = load_prompts(write(tmp_path / "a.jsonl", [row]), "train")
    assert record["extra_info"] == {"functions": ["my_tools.multiply"]}


def test_tools_that_an_environment_reads_beside_a_text(tmp_path):
    rows = [{"prompt": "q", "answer": "1", "extra_info": {"tools": t}} for t in ([WEATHER], [ADD])]
    records = load_prompts(as_table(tmp_path, rows, "parquet"), "train")
    assert [r["extra_info"]["tools"] for r in records] == [[WEATHER], [ADD]]
    row = {"prompt": "q", "answer": ["1", "2"], "tools": ["search"], "functions": "python"}
    (record,) = load_prompts(write(tmp_path / "a.jsonl", [row]), "train")
    assert record["extra_info"] == {"tools": ["search"], "functions": "python"}


def test_a_null_of_extra_info_hides_no_column(tmp_path):
    row = {"prompt": "q", "answer": "1", "level": 3, "extra_info": {"level": None, "own": None}}
    (record,) = load_prompts(write(tmp_path / "a.jsonl", [row]), "train")
    assert record["extra_info"] == {"level": 3, "own": None}


# -- nulls that a table filled in --


def schema(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


WEATHER = tool("weather", schema(["city"], city={"type": "string"}, unit={"type": "string"}))
ADD = tool("add", schema(["a"], a={"type": "integer"}, b={"type": ["integer", "null"]}))
ROWS = [
    {"messages": [U, asks("weather", {"city": "Ulm"})], "tools": [WEATHER]},
    {"messages": [U, asks("weather", {"city": "Bonn", "unit": "C"})], "tools": [WEATHER]},
    {"messages": [U, asks("add", {"a": 1, "b": 2})], "tools": [ADD]},
]
PROMPTS = [{"prompt": row["messages"], "answer": "1", "tools": row["tools"]} for row in ROWS]
NESTED = [
    {"messages": [U, asks("find", {"where": {"x": 1}, "of": [{"k": 1}, {"l": 2}]})]},
    {"messages": [U, asks("find", {"where": {"y": 2}})]},
    {"messages": [U, B]},
]


def as_table(tmp_path, rows, how):
    table = pyarrow.Table.from_pylist(rows)
    if how == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")
    filled = table.to_pylist()
    assert "null" in json.dumps(filled)
    if how == "json":
        (tmp_path / "a.json").write_text(json.dumps(filled))
        return str(tmp_path / "a.json")
    return filled if how == "list" else write(tmp_path / "a.jsonl", filled)


@pytest.mark.parametrize("how", ["parquet", "jsonl", "json", "list"])
@pytest.mark.parametrize("rows", [ROWS, NESTED], ids=["tools", "nested"])
def test_what_a_table_filled_in_is_not_learned(tmp_path, rows, how):
    source = as_table(tmp_path, rows, how)
    assert load_rows(source, "train", "examples") == load_rows(rows, "train", "examples")
    if how != "list":
        demonstrations = load_demonstrations(source, "train")
        assert demonstrations == load_rows(rows, "train", "examples")
    pairs = [
        {
            "prompt": r["messages"][:1],
            "chosen": r["messages"][1:],
            "rejected": [A],
            **{n: v for n, v in r.items() if n == "tools"},
        }
        for r in rows
    ]
    source = as_table(tmp_path, pairs, how)
    assert load_rows(source, "train", "pairs") == load_rows(pairs, "train", "pairs")


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("how", ["parquet", "jsonl"])
def test_what_a_table_filled_in_is_in_no_prompt(tmp_path, how, extra):
    rows = PROMPTS
    if extra:
        rows = [{**r, "extra_info": {"tools": r["tools"], "n": 1}} for r in rows]
        rows = [{n: v for n, v in r.items() if n != "tools"} for r in rows]
    want = load_prompts(write(tmp_path / "plain.jsonl", rows), "train")
    assert want[0]["extra_info"]["tools"] == [WEATHER] and want[2]["extra_info"]["tools"] == [ADD]
    got = load_prompts(as_table(tmp_path, rows, how), "train")
    assert [{**r, "data_source": "plain"} for r in got] == want


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_that_are_read_as_they_are_drawn(tmp_path, suffix):
    source = as_table(tmp_path, ROWS, suffix)
    records = load_stored_rows(source, "examples").first(3)
    want = load_rows(ROWS, "train", "examples")
    assert sorted(json.dumps(r["messages"]) for r in records) == sorted(
        json.dumps(r["messages"]) for r in want
    )
    drawn = load_endless_prompts(as_table(tmp_path, PROMPTS, suffix), stored=True).first(3)
    assert sorted(r["extra_info"]["tools"][0]["function"]["name"] for r in drawn) == [
        "add",
        "weather",
        "weather",
    ]
    assert all("null" not in json.dumps(r).replace('"null"', "") for r in drawn)


def learned_arguments(rows):
    records = load_rows(rows, "train", "examples")
    return [r["messages"][1]["tool_calls"][0]["function"]["arguments"] for r in records]


def test_a_null_that_a_row_wrote_stays():
    wrote = {"a": 1, "b": None}
    row = {"messages": [U, asks("add", wrote)], "tools": [ADD]}
    assert learned_arguments([row]) == [wrote]  # one call: nobody filled anything in
    assert learned_arguments([row, row]) == [wrote, wrote]  # no call has a value there
    # Another call lacks the key: no table has written these rows.
    other = {"messages": [U, asks("add", {"a": 1})], "tools": [ADD]}
    full = {"messages": [U, asks("add", {"a": 1, "b": 2})], "tools": [ADD]}
    assert learned_arguments([row, other, full]) == [wrote, {"a": 1}, {"a": 1, "b": 2}]
    bare = [{"messages": r["messages"]} for r in (row, other, full)]
    assert learned_arguments(bare) == [wrote, {"a": 1}, {"a": 1, "b": 2}]
    # A required argument cannot have been left out.
    needs = tool("add", schema(["a", "b"], a={"type": "integer"}, b={"type": ["integer", "null"]}))
    rows = [{**r, "tools": [needs]} for r in (row, full)]
    assert learned_arguments(rows) == [wrote, {"a": 1, "b": 2}]
    # Where the key is optional, and all calls have it, it was filled in.
    assert learned_arguments([row, full]) == [{"a": 1}, {"a": 1, "b": 2}]
    # What the tool does not declare was.
    row = {"messages": [U, asks("add", {"a": 1, "city": None})], "tools": [ADD]}
    assert learned_arguments([row]) == [{"a": 1}]
    # In JSON text nothing is filled in.
    rows = [{"messages": [U, asks("add", json.dumps(wrote))], "tools": [ADD]}, full]
    assert learned_arguments(rows) == [wrote, {"a": 1, "b": 2}]


def test_a_null_of_several_tools_that_the_row_does_not_describe():
    """Nobody can tell which of them wrote it: in a table an absent key is null."""
    calls = [asks("f", {"a": 1, "b": None}), asks("g", {"c": 2})]
    rows = [{"messages": [U, one]} for one in calls]
    assert learned_arguments(rows) == [{"a": 1, "b": None}, {"c": 2}]
    table = pyarrow.Table.from_pylist(rows).to_pylist()
    assert learned_arguments(table) == [{"a": 1}, {"c": 2}]


def tools_read(*rows):
    return [
        r["tools"]
        for r in load_rows(
            [{"messages": [U, A], "tools": tools} for tools in rows], "train", "examples"
        )
    ]


def test_nulls_of_schemas_that_are_meant():
    meant = [
        schema(unit={"type": "string", "default": None}),
        schema(unit={"enum": ["C", None], "const": None}),
        schema(unit={"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}),
        schema(default={"type": "string"}, null={"type": "null", "examples": [None]}),
    ]
    for parameters in meant:
        assert tools_read([tool("f", parameters)]) == [[tool("f", parameters)]]
    # Beside a null that nobody writes, it is meant where the schema takes null.
    for kind, kept in (({"type": "string"}, {}), ({"type": ["string", "null"]}, {"default": None})):
        filled = schema(unit={**kind, "default": None}, default=None, other=None)
        ((read,),) = tools_read([tool("f", filled)])
        assert read == tool("f", schema(unit={**kind, **kept}))
    # Another row has a value where this one has null.
    one, two = ({"unit": {"type": "string", "default": d}} for d in ("C", None))
    read = tools_read([tool("f", schema(**one))], [tool("f", schema(**two))])
    assert read[1] == [tool("f", schema(unit={"type": "string"}))]


# -- what a run warns of, and what is prepared --


def warned(tmp_path, caplog, rows, dataflow="sft"):
    config = config_of(tmp_path, dataflow, rows)
    with caplog.at_level(logging.WARNING, "rljax"):
        load_data(
            config, load_run_tokenizer(config), "examples" if dataflow == "sft" else "rollouts"
        )
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


def test_keys_that_the_template_does_not_read_are_warned_of_once(tmp_path, caplog):
    rows = [
        {"messages": [U, A]},
        {"messages": [U, {**A, "mood": "glad", "id": 4}, V, {**B, "mood": False}]},
    ]
    (said,) = warned(tmp_path, caplog, rows)
    assert "2 messages have the key 'mood'" in said and "in row 1" in said
    rows = [{"messages": [U, {**A, "mood": None, "weight": 0}, V, {**B, "thinking": ""}]}]
    assert not [text for text in warned(tmp_path, caplog, rows) if "have the key" in text]
    rows = [{"prompt": [{**U, "mood": "glad"}], "answer": "1"}]
    (said,) = warned(tmp_path, caplog, rows, "grpo")
    assert "1 messages have the key 'mood'" in said


def test_tools_beside_a_text_are_warned_of(tmp_path, caplog):
    row = {"prompt": "q", "answer": "1", "tools": [tool("f")]}
    assert any("1 rows have tools" in text for text in warned(tmp_path, caplog, [row], "grpo"))
    row = {"prompt": "q", "completion": "1", "tools": [tool("f")]}
    assert any("1 rows have tools" in text for text in warned(tmp_path, caplog, [row]))


def test_what_is_prepared_reads_as_its_source(tmp_path):
    nullable = tool("add", schema(a={"type": ["integer", "null"], "default": None}))
    rows = [
        {"messages": [{**U, "role": "User"}, asks("add", {"a": None})], "tools": [nullable]},
        {"messages": [V, asks("add", {"a": 3}), B, U, asks("add", {})], "tools": [nullable]},
        {"messages": [S, asks("go", "{}")], "functions": [tool("go", schema())["function"]]},
        {"messages": [{**U, "content": "third"}, A]},
    ]
    rows = [{**r, "messages": [*r["messages"], B], "answer": "1"} for r in rows]
    path = write(tmp_path / "a.jsonl", rows)
    prepare(PrepareOptions(source=path, out=str(tmp_path / "out")))
    read = load_prompts(str(tmp_path / "out"), "train")
    want = load_prompts(path, "train")
    assert want[0]["prompt"][1] == asks("add", {"a": None})
    assert [r["prompt"] for r in read] == [r["prompt"] for r in want]
    tools = [r["extra_info"].get("tools") for r in read]
    assert tools == [r["extra_info"].get("tools") for r in want] and tools[0] == [nullable]


def test_messages_are_refused_before_a_model_is_opened(tmp_path):
    config = config_of(tmp_path, "sft", [{"messages": [U, asks("f", "{")]}])
    with pytest.raises(InputError, match="row 0.*no JSON object"):
        load_data(config, load_run_tokenizer(config), "examples")


@pytest.mark.parametrize(
    "columns",
    [
        {"loss_mask": "0,0,0,1"},
        {"trainable_turns": [3]},
        {"ignore_turns": [1]},
        {"loss_turns": [1]},
    ],
)
def test_columns_that_list_turns_are_refused(columns):
    with pytest.raises(InputError, match=next(iter(columns))):
        load_rows([{"messages": [U, A, V, B], **columns}], "train", "examples")


def test_a_loss_mask_as_json_text():
    (record,) = load_rows(
        [{"messages": [U, A, V, B], "loss_mask": "[0, 0, 0, 1]"}], "train", "examples"
    )
    assert [m.get("learn") for m in record["messages"]] == [None, False, None, None]


# -- reasoning in a column of its own --

THOUGHT = {"reasoning": "I think"}
PAIR = {"chosen": "yes", "rejected": "no"}
REASONED = [
    ("examples", {"prompt": "q", "completion": "a", **THOUGHT}, "reasoning"),
    ("examples", {"prompt": [U], "completion": [B], "thinking": "I think"}, "thinking"),
    ("examples", {"instruction": "q", "output": "a", "Thinking": "I think"}, "Thinking"),
    ("examples", {"question": "q", "answer": "a", "reasoning_content": "I think"}, "_content"),
    ("examples", {"messages": [U, A, V, B], "reasoning": [None, "I think"]}, "reasoning"),
    ("examples", {"conversations": [U, A], **THOUGHT}, "reasoning"),
    ("examples", {"text": "q a", **THOUGHT}, "reasoning"),
    # What stands in a prompt by chance, or is the name of a role.
    ("examples", {"prompt": "I think?", "completion": "a", **THOUGHT}, "reasoning"),
    ("examples", {"extra_info": {"question": "q", "answer": "a", **THOUGHT}}, "reasoning"),
    ("pairs", {"prompt": "q", **PAIR, **THOUGHT}, "reasoning"),
    ("pairs", {"chosen": [U, A], "rejected": [U, B], **THOUGHT}, "reasoning"),
    ("pairs", {"prompt": "q", **PAIR, "chosen_reasoning": "I think"}, "chosen_reasoning"),
    ("unpaired", {"prompt": "q", "completion": "a", "label": True, **THOUGHT}, "reasoning"),
    ("stepwise", {"prompt": "q", "completions": ["a"], "labels": [1], **THOUGHT}, "reasoning"),
    ("trajectories", {"prompt": "q", "steps": ["a"], "reward": 1, **THOUGHT}, "reasoning"),
]


@pytest.mark.parametrize(("kind", "row", "column"), REASONED)
def test_reasoning_in_a_column_is_not_left_out_without_a_word(tmp_path, kind, row, column):
    bare = {name: value for name, value in row.items() if column not in name}
    bare |= {"extra_info": {"question": "q", "answer": "a"}} if "extra_info" in row else {}
    rows = [bare, {**row, "a": None}]
    says = rf"row 1.*{column}' is not learned: got 'I think'.*reasoning_content"
    path = write(tmp_path / "rows.jsonl", rows)
    assert load_rows([bare], "train", kind)
    ways = [lambda: load_rows(path, "train", kind), lambda: load_stored_rows(path, kind).first(2)]
    if kind == "examples":
        ways.append(lambda: load_demonstrations(path, "train"))
        ways.append(lambda: load_demonstrations(path, "train", stored=True).first(2))
    for read in ways:
        with pytest.raises(InputError, match=says):
            read()


@pytest.mark.parametrize(
    "row",
    [
        {"completion": "<think>\nI  think\n</think> a", **THOUGHT},
        {"messages": [U, {**A, "reasoning_content": "I think"}], **THOUGHT},
        {"completion": "a", "reasoning": None, "thinking": " "},
        {
            "prompt": "Judge: 'one and one are two, so yes'.",
            "completion": "a",
            "reasoning": "one and one are two, so yes",
        },
        {"completion": "a", "reasoning": "on", "thinking": True},  # says that the model shall think
        {"completion": "a", "reasoning_effort": "high"},
    ],
)
def test_reasoning_that_is_learned_may_stand_in_a_column_too(row):
    assert load_rows([{"prompt": "q", **row}], "train", "examples")


@pytest.mark.parametrize("thought", ["assistant", "t", "role"])
def test_a_short_reasoning_is_not_taken_for_the_words_of_a_role(thought):
    with pytest.raises(InputError, match="'thinking' is not learned"):
        load_rows(
            [{"messages": [U, {**A, "content": "a"}], "thinking": thought}], "train", "examples"
        )


def test_a_reward_reads_reasoning_in_a_column():
    row = {"prompt": "q", "answer": "a", **THOUGHT}
    assert load_prompts([row], "train")[0]["extra_info"]["reasoning"] == "I think"
