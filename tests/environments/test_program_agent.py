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


# -- the end of an episode is the end of its program

CHILDREN = f"""{PLAIN}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ask(json.dumps([os.getpid(), child.pid]))
import time
time.sleep(600)
"""


def ended(pids, within_s=10.0):
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
