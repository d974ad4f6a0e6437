"""Agents that speak OpenAI's API, as programs of their own whose model is the policy."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rljax.components import resolve
from rljax.contracts import spec
from rljax.data.text.tokenizer import CharTokenizer
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits

CHARS = CharTokenizer("".join(map(chr, range(32, 127))) + "\n")
LIMITS = EpisodeLimits(calls="hermes", max_tokens=20_000)
# An agent with the real client: a tool, then a summary of its own that rewrites the history.
WITH_OPENAI = """
import json, sys
from openai import OpenAI
row, client = json.loads(sys.stdin.readline()), OpenAI()
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters":
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]
log = [{"role": "user", "content": row["prompt"]}]
while True:
    answer = client.chat.completions.create(model="any", messages=log, tools=tools, temperature=0.3)
    choice = answer.choices[0]
    log.append(choice.message)
    if choice.finish_reason != "tool_calls":
        break
    for call in choice.message.tool_calls:
        sum_ = sum(json.loads(call.function.arguments).values())
        log.append({"role": "tool", "tool_call_id": call.id, "content": str(sum_)})
short = [{"role": "user", "content": "Summary: " + choice.message.content}]
events = client.chat.completions.create(model="any", messages=short, stream=True)
said = "".join(event.choices[0].delta.content or "" for event in events)
print("some log line")
print(json.dumps({"score": float(said == row["ground_truth"]), "turns": len(log)}))
"""
PLAIN = """
import json, os, subprocess, sys, urllib.error, urllib.request
row = json.loads(sys.stdin.readline())
def ask(*messages, path="/chat/completions", body=None):
    body = body or json.dumps({"messages": [{"role": "user", "content": m} for m in messages]})
    url = os.environ["OPENAI_BASE_URL"] + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body.encode())) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code
"""


@pytest.fixture
def agent(tmp_path):
    def written(code, options="", **row):
        (tmp_path / "agent.py").write_text(code)
        text = f"program(command='{sys.executable} {tmp_path}/agent.py'{options})"
        component = resolve(text, "rljax.environments")
        row = {"prompt": "2+3?", "ground_truth": "five", **row}
        return Episode(0, component, row, CHARS, LIMITS, seed=1, sample_seed=2)

    return written


def played(game, *replies):
    steps = [game.begin()]
    for reply in replies:
        assert not steps[-1].ended, steps[-1]
        steps.append(game.reply(CHARS.encode(reply)))
    game.close()
    return steps


def text(step):
    return CHARS.decode(step.ids)


@pytest.mark.slow
def test_an_agent_of_openais_client_is_played_by_the_policy(agent):
    pytest.importorskip("openai")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    steps = played(agent(WITH_OPENAI), f"Let me add. {call}", "It is 5.", "five")
    assert [text(s) for s in steps[:-1]] == ["2+3?", "5", "Summary: It is 5."]
    # What the tool said is appended to the log; the summary is read in a row of its own.
    assert [s.new_row for s in steps[:-1]] == [True, False, True]
    assert [s.calls for s in steps] == [0, 1, 0, 0]
    assert steps[-1].outcome == {"": 1.0} and steps[-1].outcome_parts == {"turns": 4.0}
    component = resolve("program(command='x')", "rljax.environments")
    assert not spec(component).repeatable


@pytest.mark.parametrize(
    "ending, outcome",
    [
        ("print(0.25)", {"": 0.25}),
        ('print(\'{"score": 2, "style": 1}\')', {"": 2.0}),
        ("print('done')", None),
        ("print('{\"style\": 1}')", None),
        ("", None),
        ("print('x' * 10**6); print(1)", {"": 1.0}),
    ],
)
def test_the_last_line_is_the_outcome(agent, ending, outcome):
    end = played(agent(f"{PLAIN}ask('a')\n{ending}"), "b")[-1]
    assert end.ended and not end.failure and end.outcome == outcome


def test_a_program_that_fails(agent):
    broken = f"{PLAIN}ask('a')\nraise KeyError('of mine')"
    end = played(agent(broken), "b")[-1]
    assert end.kind == "raised" and "status 1" in end.failure and "of mine" in end.failure
    assert played(agent(broken, ", failed=-1.0"), "b")[-1].outcome == {"": -1.0}
    assert "asked nothing" in played(agent("print(1)"))[-1].failure
    gone = Episode(
        0,
        resolve("program(command='/no/such/agent')", "rljax.environments"),
        {},
        CHARS,
        LIMITS,
        seed=1,
        sample_seed=2,
    )
    assert "/no/such/agent" in played(gone)[-1].failure


def test_what_cannot_be_asked_is_refused_and_read_by_nobody(agent):
    code = f"""{PLAIN}
codes = [ask(body=body) for body in ("x", "[]", "{{}}", '{{"messages": []}}',
         '{{"messages": [{{"role": "user", "content": "x"}}], "n": 2}}')]
codes += [ask("x", path="/completions"), ask(body="[" * 10**6)]
print(ask("Codes: " + str(codes)) == "Good.", file=sys.stderr)
print(1)
"""
    steps = played(agent(code), "Good.")
    assert text(steps[0]) == f"Codes: {[400] * 7}" and steps[-1].outcome == {"": 1.0}


def test_a_request_that_goes_on_is_appended_and_another_is_a_row(agent):
    code = f"""{PLAIN}
def log(*texts):
    roles = ["user", "assistant"] * len(texts)
    return json.dumps({{"messages": [{{"role": r, "content": t}} for r, t in zip(roles, texts)]}})
ask(body=log("a"))
ask(body=log("a", " b", "c"))       # its own white space does not matter
ask(body=log("a", "b", "c", "X", "e"))  # not what the policy wrote
ask(body=log("a", "b", "c", "X", "e", "f", "g"))
ask(body=log("a", "b", "c", "X", "e", "f", "g"))  # the same again
print(3)
"""
    steps = played(agent(code), "b ", "d", "f", "h", "i")
    assert [s.new_row for s in steps[:-1]] == [True, False, True, False, True]
    assert [text(s) for s in steps[:-1]] == ["a", "c", "abcXe", "g", "abcXefg"]
    assert steps[-1].outcome == {"": 3.0}


# -- what a request asks for

ASKED = f"""{PLAIN}
def whole(text, **fields):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    log.append({{"role": "user", "content": text}})
    body = json.dumps({{"messages": log, **fields}}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
            said = answer.read().decode()
    except urllib.error.HTTPError as error:
        log.pop()
        return json.loads(error.read())["error"]["message"]
    if fields.get("stream"):
        events = [json.loads(line[6:]) for line in said.split("\\n\\n")[:-2]]
        log.append(dict(role="assistant", content=events[0]["choices"][0]["delta"]["content"]))
        return events
    answer = json.loads(said)
    log.append(answer["choices"][0]["message"])
    return answer
log = []
"""


def test_stop_strings_and_limits_of_a_request_are_those_of_the_turn(agent):
    code = f"""{ASKED}
first = whole("Q", stop=["Observation:", "END"], max_tokens=30)["choices"][0]["message"]["content"]
last = whole("seen", stop="END", max_completion_tokens=3, max_tokens=9)["choices"][0]
print(json.dumps({{"score": first == "Thought: a " and last["finish_reason"] == "length"}}))
"""
    game = agent(code)
    steps = played(game, "Thought: a Observation:")
    assert (steps[0].stop, steps[0].max_tokens) == (("Observation:", "END"), 30)
    assert not steps[1].new_row and text(steps[1]) == "seen"
    assert (steps[1].stop, steps[1].max_tokens) == (("END",), 3)
    game = agent(code)
    game.begin(), game.reply(CHARS.encode("Thought: a Observation:"))
    end = game.reply(CHARS.encode("abc"), "length")
    assert end.outcome == {"": 1.0}, end.failure


def test_a_call_that_cannot_be_read_leaves_the_limits_of_its_turn(agent):
    game = agent(f"{ASKED}whole('Q', stop=['X'], max_tokens=50)\nprint(1)")
    first = game.begin()
    second = game.reply(CHARS.encode("<tool_call>{</tool_call>"))
    assert second.bad_turn and (second.stop, second.max_tokens) == (first.stop, 50) == (("X",), 50)
    game.close()


def test_usage_counts_the_tokens_of_the_row(agent):
    code = f"""{ASKED}
used = whole("12345")["usage"]
events = whole("678", stream=True, stream_options={{"include_usage": True}})
each = {{"include_usage": True, "continuous_usage_stats": True}}
every = whole("9", stream=True, stream_options=each)
none = whole("0", stream=True)
told = [[event.get("usage") for event in some] for some in (events, every, none)]
print(json.dumps([used, told]), file=sys.stderr)
sys.exit(3)
"""
    end = played(agent(code), "ab", "c", "d", "e")[-1]
    used, told = json.loads(end.failure[end.failure.index("[{") :].split("\n")[0])
    assert used == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    last = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    assert told[0] == [None, None, last]
    assert told[1] == [{"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}] * 3
    assert told[2] == [None, None]


def test_with_tool_choice_none_calls_are_text_and_the_log_goes_on(agent):
    code = f"""{ASKED}
tools = [{{"type": "function", "function": {{"name": "f", "parameters": {{}}}}}}]
first = whole("Q", tools=tools)["choices"][0]
log.append({{"role": "tool", "content": "4"}})
last = whole("go on", tools=tools, tool_choice="none")["choices"][0]
good = first["finish_reason"] == "tool_calls" and last["finish_reason"] == "stop"
good = good and "tool_calls" not in last["message"] and "<tool_call>" in last["message"]["content"]
print(float(good))
"""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    steps = played(agent(code), call, f"Now. {call}")
    assert [s.new_row for s in steps[:-1]] == [True, False]
    assert steps[-1].outcome == {"": 1.0}, steps[-1].failure


def test_what_an_episode_cannot_do_is_refused_by_its_name(agent):
    fields = [
        {"logprobs": True},
        {"top_logprobs": 2},
        {"logit_bias": {"3": 1}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"presence_penalty": 0.5},
        {"stream_options": {"include_everything": True}},
        {"max_tokens": 0},
        {"max_completion_tokens": -1},
        {"stop": [""]},
        {"stop": 3},
        {"stop_token_ids": [3]},
        {"temperature": "hot"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"n": 2},
        {"no_such_field": 1},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ]
    neutral = {"logprobs": False, "logit_bias": {}, "seed": 5, "temperature": 0, "user": "me"}
    neutral |= {"response_format": {"type": "text"}, "top_p": 0.9, "max_tokens": None, "n": 1}
    code = f"""{ASKED}
for fields in json.loads({json.dumps(fields)!r}):
    said, (name,) = whole("x", **fields), fields
    if not isinstance(said, str) or name not in said:
        sys.exit(f"{{fields}}: {{said}}")
whole("y", **json.loads({json.dumps(neutral)!r}))
print(1)
"""
    steps = played(agent(code), "z")
    assert text(steps[0]) == "y" and steps[-1].outcome == {"": 1.0}, steps[-1].failure


# -- the end of an episode is the end of its program

CHILDREN = f"""{PLAIN}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ask(json.dumps([os.getpid(), child.pid]))
import time
time.sleep(600)
"""


def ended(pids, within_s=120.0):
    """Whether none of the processes runs any more."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(map(runs, pids)):
            return True
        time.sleep(0.02)
    return False


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_ends_with_its_episode_and_so_do_its_children(agent):
    game = agent(CHILDREN)
    pids = json.loads(text(game.begin()))
    assert all(map(runs, pids))
    game.close()
    assert ended(pids)


def test_a_program_ends_with_its_worker(tmp_path):
    (tmp_path / "agent.py").write_text(CHILDREN)
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from test_program_agent import CHARS, Episode, LIMITS, resolve
component = resolve("program(command='{sys.executable} {tmp_path}/agent.py')", "rljax.environments")
game = Episode(0, component, {{}}, CHARS, LIMITS, seed=1, sample_seed=2)
print(CHARS.decode(game.begin().ids), flush=True)
import time; time.sleep(600)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = json.loads(worker.stdout.readline())
    assert all(map(runs, pids))
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(), worker.stdout.close()
    assert ended(pids)
