"""Environments of other libraries, played through `Episode` as a worker plays them."""

import asyncio
import collections
import contextlib
import importlib
import json
import random
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.components import resolve
from rljax.contracts import spec
from rljax.data.text.tokenizer import CharTokenizer
from rljax.environments.adapters.gymnasium_text import action_in
from rljax.environments.adapters.shared import Session, followed, with_prompt
from rljax.environments.contract import Reply
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits
from rljax.errors import InputError

try:
    import gymnasium
except ImportError:
    gymnasium = None

CHARS = CharTokenizer("".join(map(chr, range(32, 127))) + "\n♠♥♦♣")
LIMITS = EpisodeLimits(calls="hermes", max_tokens=20_000)
GYM = "gymnasium(id='FrozenLake-v1', options=(('is_slippery', False),))"


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def component(text):
    return resolve(text, "rljax.environments")


def opened(text, *, seed=3, number=0, **row):
    return Episode(
        number,
        component(text),
        {"prompt": "", **row},
        CHARS,
        LIMITS,
        seed=seed,
        sample_seed=number,
        prompt_ids=CHARS.encode("Go."),
    )


def play(text, replies, **row):
    """The steps of an episode: replies until it ends, or until there are no more."""
    game = opened(text, **row)
    steps = [game.begin()]
    for reply in replies:
        if steps[-1].ended:
            break
        steps.append(game.reply(CHARS.encode(reply)))
    game.close()
    assert not steps[-1].failure, steps[-1].failure
    return steps


def texts(steps):
    return [CHARS.decode(step.ids) for step in steps if not step.ended]


# -- gymnasium


def test_a_gymnasium_environment_is_played_by_numbers():
    pytest.importorskip("gymnasium")
    walk = ["2", "I go 0, no: 2", "left", "1", "9", "1", "1", "2"]
    steps = play(GYM, walk, prompt="Reach G.")
    assert texts(steps)[0] == "Reach G.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert texts(steps)[3] == "This is no action: 0 of the 1 numbers that it takes"
    assert texts(steps)[5] == "This is no action: it is none of Discrete(4)"
    assert texts(steps)[4] == "  (Down)\nSFFF\nFH[F]H\nFFFH\nHFFG"
    assert steps[-1].ended and steps[-1].outcome == {"": 1.0}
    assert steps[2].state == steps[3].state != steps[4].state  # nothing has happened


def test_observations_are_written_whole_and_alike_by_both_adapters():
    gym = pytest.importorskip("gymnasium")
    from rljax.environments.adapters.gymnasium_text import observation_text

    board = np.zeros((40, 40), np.int64)
    board[20, 20] = 7
    pair = collections.namedtuple("Pair", "left right")(np.float32(0.1), (np.int64(1),))
    for seen, said in [
        (np.array([1, 2]), "[1 2]"),
        (np.int64(3), "3"),
        ("text", "text"),
        (np.str_("text"), "text"),
        ((11, np.int64(10), np.bool_(True)), "(11, 10, True)"),
        (
            {"at": np.int64(3), "on": [np.array([1, 2]), "a"], 4: None},
            "{'at': 3, 'on': [[1 2], 'a'], 4: None}",
        ),
        (pair, "Pair(left=0.1, right=(1,))"),
        ((np.str_("a"),), "('a',)"),
    ]:
        assert observation_text(None, seen) == said
    for seen in (board, {"board": board}, (jnp.asarray(board),)):
        said = observation_text(None, seen)
        assert "7" in said and "..." not in said and said.count("0") == 1599
    if "Table-v0" not in gym.registry:
        gym.register("Table-v0", Table)
    alone = texts(play("gymnasium(id='Table-v0')", ["0"]))
    together = [texts(steps) for steps in lanes("gymnasium_vector(id='Table-v0')", [["0"]])]
    assert together == [alone] and alone[0].count("0") == 1600 and "..." not in alone[0]


def test_an_environment_of_ones_own_need_not_take_render_mode():
    gym = pytest.importorskip("gymnasium")
    for name in ("Grid", "Printing"):
        if f"{name}-v0" not in gym.registry:
            gym.register(f"{name}-v0", f"{__name__}:{name}")
    assert texts(play("gymnasium(id='Grid-v0')", ["1"])) == ["at5", "at1"]
    assert texts(play("gymnasium(id='Grid-v0', options=(('size', 3),))", [])) == ["at3"]
    assert texts(play("gymnasium(id='Printing-v0')", [])) == ["at5"]
    own = "gymnasium(id='FrozenLake-v1', options=(('render_mode', 'ansi'),))"
    assert texts(play(own, []))[0].startswith("[S]")
    plain = "gymnasium(id='FrozenLake-v1', options=(('render_mode', 'rgb_array'),))"
    assert texts(play(plain, [])) == ["0"]


def test_a_number_in_the_reasoning_is_no_action():
    gym = pytest.importorskip("gymnasium")
    said = ["<think>2 or 1?</think>Hm.", "<think>Maybe 1, or 2", "<think>0</think>Action 2"]
    steps = play(GYM, said)
    assert [text[:17] for text in texts(steps)[1:3]] == ["This is no action"] * 2
    assert texts(steps)[3].startswith("  (Right)")
    assert action_in(Reply("<think>north or south?</think>south"), gym.spaces.Text(9)) == "south"
    with pytest.raises(ValueError):
        action_in(Reply("<think>north"), gym.spaces.Text(9))


def test_siblings_start_alike_and_another_seed_does_not():
    pytest.importorskip("gymnasium")
    starts = [texts(play("gymnasium(id='CartPole-v1')", [], seed=seed)) for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]


def test_rewards_of_turns_and_actions_of_numbers_texts_and_ones_own():
    gym = pytest.importorskip("gymnasium")
    steps = play("gymnasium(id='CartPole-v1')", ["0", "1"])
    assert [step.reward for step in steps] == [0.0, 1.0, 1.0]
    box = gym.spaces.Box(-1.0, 1.0, (2,))
    assert action_in("from 9 to [0.5, -1e-1]", box).tolist() == pytest.approx([0.5, -0.1])
    assert action_in("abc", gym.spaces.Text(5)) == "abc"
    assert action_in("1 0 2", gym.spaces.MultiDiscrete([2, 2, 3])).tolist() == [1, 0, 2]
    for reply, space in [("1.5", gym.spaces.Discrete(3)), ("0 7", box), ("xx", gym.spaces.Text(1))]:
        with pytest.raises(ValueError):
            action_in(reply, space)
    with pytest.raises(TypeError, match="act='my_module.act'"):
        action_in("1", gym.spaces.Dict({"a": box}))
    own = f"{GYM[:-1]}, act='{__name__}.by_name', render='{__name__}.where')"
    steps = play(own, ["right", "north"])
    assert texts(steps) == ["at 0", "at 1", "This is no action: left, down, right or up"]


class Grid(gymnasium.Env if gymnasium else object):
    """As in Gymnasium's tutorial: its __init__ has no render_mode."""

    def __init__(self, size: int = 5):
        self.size = size
        self.observation_space = gymnasium.spaces.Text(9)
        self.action_space = gymnasium.spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        return f"at{self.size}", {}

    def step(self, action):
        return f"at{action}", 1.0, False, False, {}


class Printing(Grid):
    metadata = {"render_modes": ["ansi"]}


class Table(Grid):
    def __init__(self, render_mode=None):
        self.observation_space = gymnasium.spaces.Dict(
            at=gymnasium.spaces.Discrete(9), of=gymnasium.spaces.Box(0, 9, (40, 40), np.int64)
        )
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return {"at": np.int64(3), "of": np.zeros((40, 40), np.int64)}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


def by_name(reply, space):
    names = ["left", "down", "right", "up"]
    if reply not in names:
        raise ValueError("left, down, right or up")
    return names.index(reply)


def where(env, observation):
    return f"at {observation}"


def lanes(text, replies):
    """Episodes that share a loop, as in a worker; their steps."""

    async def begun(number):
        game = opened(text, number=number, seed=number)
        assert game.start() is None
        return game, [await game.begin_async()]

    async def play_one(game, steps, said):
        for reply in said:
            if steps[-1].ended:
                break
            steps.append(await game.reply_async(CHARS.encode(reply), "stop", 9, 999))
        await game._generator.aclose()
        return steps

    async def play_all():
        all_begun = await asyncio.gather(*map(begun, range(len(replies))))
        playing = [play_one(*one, said) for one, said in zip(all_begun, replies, strict=True)]
        return await asyncio.gather(*playing)

    return asyncio.run(play_all())


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_batch_of_episodes_is_the_batch_of_a_vector_environment(mode):
    """Sub-environments say what an environment of its own says; five episodes take two of four."""
    pytest.importorskip("gymnasium")
    said = [["1"] * 60, ["0", "1"] * 40, ["0"] * 3, ["x", "1", "7"] + ["0"] * 60, ["1", "0"]]
    steps = lanes(f"gymnasium_vector(id='CartPole-v1', lanes=4, mode='{mode}')", said)
    alone = [play("gymnasium(id='CartPole-v1')", s, seed=n) for n, s in enumerate(said)]
    for ours, theirs in zip(steps, alone, strict=True):
        assert texts(ours) == texts(theirs)
        assert [s.reward for s in ours] == [s.reward for s in theirs]
        assert (ours[-1].ended, ours[-1].outcome) == (theirs[-1].ended, theirs[-1].outcome)
    assert sum(s[-1].ended for s in steps) == 3


def test_a_vector_environment_steps_all_of_its_episodes_at_once():
    gym = pytest.importorskip("gymnasium")
    stepped = []

    class Counted(gym.vector.SyncVectorEnv):
        def step(self, actions):
            stepped.append(len(actions))
            return super().step(actions)

    gym.register(
        "Counted-v0",
        entry_point="gymnasium.envs.classic_control:CartPoleEnv",
        vector_entry_point=lambda num_envs, **options: Counted(
            [lambda: gym.make("CartPole-v1")] * num_envs
        ),
    )
    text = "gymnasium_vector(id='Counted-v0', lanes=6, mode='vector_entry_point')"
    steps = lanes(text, [["1", "0", "1"], ["0", "0"], ["1"], []])
    assert stepped == [6] * 3 and [len(s) for s in steps] == [4, 3, 2, 1]
    assert not spec(component(text)).repeatable


# -- TextArena


def test_a_textarena_game_of_one_and_of_two():
    pytest.importorskip("textarena")
    game = "textarena(game='GuessTheNumber-v0')"
    steps = play(game, ["[5]", "[20]", "no"])
    assert "between 1 and 20" in texts(steps)[0] and "[5]" not in texts(steps)[1]
    assert texts(steps)[1:3] == ["The target number is higher.", "The target number is lower."]
    others = play(game, ["<think>[7]?</think>[5]", "[20]", "no"])
    assert texts(others) == texts(steps)
    two = "textarena(game='TicTacToe-v0', players=2)"
    assert spec(component(two)).seats == ("0", "1")
    steps = play(two, ["[4]", "[0]", "[1]", "[8]", "[7]"])
    assert [s.seat for s in steps[:-1]] == ["0", "1", "0", "1", "0"]
    assert steps[-1].outcome == {"0": 1.0, "1": -1.0}
    assert "[Player 0] [4]" in texts(steps)[1] and "[Player 1] [0]" in texts(steps)[2]


def test_games_side_by_side_draw_for_themselves():
    """TextArena draws from `random` itself: each game has a state of its own."""
    pytest.importorskip("textarena")
    game = "textarena(game='Blackjack-v0')"
    alone = [texts(play(game, ["[Hit]"] * 4, seed=seed)) for seed in (1, 2)]
    one, two = opened(game, seed=1), opened(game, seed=2)
    mixed = [[one.begin()], [two.begin()]]
    for turn in range(4):
        random.seed(turn)  # the worker's own generator is where it is
        mixed[0].append(one.reply(CHARS.encode("[Hit]")))
        mixed[1].append(two.reply(CHARS.encode("[Hit]")))
    assert [texts(steps) for steps in mixed] == alone and alone[0] != alone[1]


# -- classes


class Increment:
    """As in TRL's documentation."""

    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, **kwargs) -> str | None:
        self.counter, self.row = self.start, kwargs
        return f"Count to {kwargs['goal']}."

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == self.row["goal"])


class Walk:
    def reset(self, goal):
        self.goal, self.at = goal, 0
        return "at 0", {}

    def step(self, reply):
        self.at += int(reply)
        return f"at {self.at}", -0.1, self.at == self.goal

    def close(self):
        CLOSED.append(self)


class Gymlike(Walk):
    def step(self, reply):
        seen, reward, ended = super().step(reply)
        return seen, reward, ended, self.at > 9, {}


class Waiting(Increment):
    """Each method is async, and they share a lock, which belongs to one event loop."""

    async def reset(self, **kwargs):
        self.lock = asyncio.Lock()
        async with self.lock:
            return super().reset(**kwargs)

    async def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.
        """
        async with self.lock:
            return super().increment(step)

    async def get_reward(self):
        async with self.lock:
            return super().get_reward()

    async def close(self):
        CLOSED.append(self)


class WaitingWalk(Walk):
    async def step(self, reply):
        await asyncio.sleep(0)
        return super().step(reply)


CLOSED: list = []


def test_public_methods_of_a_class_are_tools():
    text = f"of_class(cls='{__name__}.Increment(start=1)')"
    steps = play(text, [call("increment", step=2), call("reset"), "Done."], goal=3, prompt="Hi.")
    assert texts(steps)[0] == "Hi.\n\nCount to 3." and texts(steps)[1] == "3"
    assert "there is no tool reset; there are increment" in texts(steps)[2]
    assert steps[-1].outcome == {"": 1.0}
    assert play(text, ["Done."], goal=3)[-1].outcome == {"": 0.0}


def test_async_methods_of_a_class_are_awaited():
    CLOSED.clear()
    text = f"of_class(cls='{__name__}.Waiting(start=1)')"
    steps = play(text, [call("increment", step=2), "Done."], goal=3, prompt="Hi.")
    assert texts(steps) == ["Hi.\n\nCount to 3.", "3"]
    assert steps[-1].outcome == {"": 1.0} and len(CLOSED) == 1
    steps = play(f"of_class(cls='{__name__}.WaitingWalk')", ["1", "2"], goal=3, prompt="Walk.")
    assert texts(steps) == ["Walk.\n\nat 0", "at 1"] and steps[-1].outcome == {"": -0.1}


def test_a_class_with_reset_and_step():
    CLOSED.clear()
    steps = play(f"of_class(cls='{__name__}.Walk')", ["1", "2"], goal=3, prompt="Walk.")
    assert texts(steps) == ["Walk.\n\nat 0", "at 1"] and steps[1].reward == -0.1
    assert steps[-1].outcome == {"": -0.1} and len(CLOSED) == 1
    steps = play(f"of_class(cls='{__name__}.Gymlike')", ["5", "6"], goal=3)
    assert steps[-1].ended and steps[-1].outcome == {"": -0.1}
    with pytest.raises(InputError, match="has no reset"):
        next(component(f"of_class(cls='{__name__}.Lossy(port=1)')")())


class Mover:
    """As TRL reads it: a property, a static tool and a tool called close."""

    first: object = None

    def reset(self, **row):
        self.moves = []
        return self.first

    @property
    def score(self):
        return self.moves[-1]

    @staticmethod
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def close(self, door: str) -> str:
        """Closes a door.

        Args:
            door: Which.
        """
        return f"closed {door}"

    def move(self, to: str) -> str:
        """Moves.

        Args:
            to: Where to.
        """
        self.moves.append(to)
        return f"moved {to}"


class Optional(Mover):
    def close(self, quietly=True):
        CLOSED.append(self)


class Texts(Mover):
    first = "start"


class Parts(Mover):
    first = [{"type": "text", "text": "start"}]


class Messages(Mover):
    first = [{"role": "user", "content": "start"}]


class StepIsATool(Walk):
    def step(self, direction: str) -> str:
        return f"moved {direction}"


class StepOfTwo(Walk):
    def step(self, direction: str, far: int) -> str:
        return direction


class OldStep(Walk):
    def step(self, reply):
        return *super().step(reply), {}


def test_tools_of_a_class_are_those_of_trl():
    CLOSED.clear()
    text = f"of_class(cls='{__name__}.Mover')"
    opening = next(component(text)(prompt="Hi."))
    assert [one["function"]["name"] for one in opening.tools] == ["add", "close", "move"]
    said = [call("add", a=1, b=2), call("close", door="left"), call("move", to="up"), "Done."]
    assert texts(play(text, said, prompt="Hi."))[1:] == ["3", "closed left", "moved up"]
    opening = next(component(f"of_class(cls='{__name__}.Optional')")(prompt="Hi."))
    assert [one["function"]["name"] for one in opening.tools] == ["add", "move"]
    play(f"of_class(cls='{__name__}.Optional')", ["Done."])
    assert CLOSED


@pytest.mark.parametrize("name", ["StepIsATool", "StepOfTwo"])
def test_a_step_that_is_a_tool_is_an_error_of_the_class(name):
    game = opened(f"of_class(cls='{__name__}.{name}')", goal=3)
    game.begin()
    end = game.reply(CHARS.encode("up"))
    game.close()
    assert end.kind == "raised" and f"{name}.step is no step of an environment" in end.failure
    assert "observation, reward, ended" in end.failure and "another name" in end.failure
    assert play(f"of_class(cls='{__name__}.OldStep')", ["1"], goal=3)[1].reward == -0.1


def test_the_first_observation_of_trls_classes_ends_the_last_message():
    def first(name, *prompt):
        made = component(f"of_class(cls='{__name__}.{name}')")
        opening = next(made(prompt=list(prompt), goal=3))
        return getattr(opening, "messages", opening)

    def part(text):
        return {"type": "text", "text": text}

    asked, told = {"role": "user", "content": "Q. "}, {"role": "system", "content": "S. "}
    in_parts = {"role": "user", "content": [part("Q. ")], "name": "n"}
    assert first("Texts", told, asked) == [told, {"role": "user", "content": "Q. start"}]
    assert first("Texts", told) == [{"role": "system", "content": "S. start"}]
    both = [part("Q. "), part("start")]
    assert first("Parts", asked) == [{"role": "user", "content": both}]
    assert first("Texts", in_parts) == first("Parts", in_parts) == [{**in_parts, "content": both}]
    assert first("Messages", asked) == Messages.first and first("Mover", asked) is None
    assert first("Walk", asked) == [{"role": "user", "content": "Q. \n\nat 0"}]
    assert in_parts["content"] == [part("Q. ")] and Parts.first == [part("start")]


# -- Tinker's cookbook


def guess(gold, renderer):
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv

    return GuessNumberEnv(gold, renderer)


def echoes(prompt):
    from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult

    class Echo(MessageEnv):
        async def initial_observation(self):
            self.history = [{"role": "user", "content": prompt}]
            return list(self.history)

        async def step(self, message):
            self.history += [message, {"role": "user", "content": f"{message['content']}?"}]
            done = len(self.history) > 6
            if message["content"] == "forget":
                self.history = self.history[-1:]
            return MessageStepResult(0.5, done, list(self.history), {"length": 3.0})

    return Echo()


def test_an_environment_of_tinkers_cookbook():
    pytest.importorskip("tinker_cookbook")
    steps = play(f"tinker(env='{__name__}.guess')", ["Guess: 5", "hm", "Guess: 7"], gold=7)
    assert "guess a integer between 0 and 1024" in texts(steps)[0]
    assert texts(steps)[1] == "Too low" and "Failed to parse" in texts(steps)[2]
    assert [s.reward for s in steps[1:3]] == [0.0, -1.0] and steps[-1].outcome == {"": 1.0}


def test_a_message_environment_of_tinkers_cookbook():
    pytest.importorskip("tinker_cookbook")
    steps = play(f"tinker(env='{__name__}.echoes')", ["a", "forget", "b", "c", "d"], prompt="Hi")
    assert texts(steps) == ["Hi", "a?", "forget?", "b?", "c?"]
    # What does not go on from what was read is a row of its own.
    assert [s.new_row for s in steps[:-1]] == [True, False, True, False, False]
    assert [s.reward for s in steps[1:-1]] == [0.5] * 4
    assert steps[-1].outcome == {"": 0.5} and steps[-1].outcome_parts == {"length": 3.0}


# -- verifiers

TASKSET = """
import verifiers.v1 as vf

class Words(vf.TaskData):
    answer: str

class WordsTask(vf.Task[Words]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "break":
            raise ValueError("no luck")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class WordsTaskset(vf.Taskset[WordsTask, vf.TasksetConfig]):
    def load(self):
        for word in ("red", "blue", "break"):
            yield WordsTask(Words(prompt=f"Say {word}.", answer=word), self.config.task)

__all__ = ["WordsTaskset"]
"""
HARNESS = """
import sys
import verifiers.v1 as vf

PROGRAM = '''
import sys
from openai import OpenAI
url, key, model, prompt = sys.argv[1:]
client, log = OpenAI(base_url=url, api_key=key), [{"role": "user", "content": prompt}]
for _ in range(2):
    said = client.chat.completions.create(model=model, messages=log).choices[0].message.content
    log += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
'''

class DirectConfig(vf.HarnessConfig):
    pass

class Direct(vf.Harness[DirectConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        command = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run(command, {})

__all__ = ["Direct"]
"""


def test_a_taskset_of_verifiers(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    (tmp_path / "words_taskset.py").write_text(TASKSET)
    (tmp_path / "direct_harness.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(tmp_path)
    text = "verifiers(id='words_taskset', harness='direct_harness')"
    steps = play(text, ["red", "blue"], task=1)
    assert texts(steps) == ["Say blue.", "Sure?"] and not steps[1].new_row
    assert steps[-1].outcome == {"": 1.0} and steps[-1].outcome_parts == {"length": 4.0}
    game = opened(text, task=2)
    game.begin(), game.reply(CHARS.encode("a"))
    end = game.reply(CHARS.encode("b"))
    game.close()
    assert end.kind == "raised" and "no luck" in end.failure


# -- OpenEnv


@contextlib.contextmanager
def served(app):
    """The URL of an ASGI application on a port of its own."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_an_openenv_server_has_a_session_for_each_episode():
    pytest.importorskip("openenv.core")
    with served(openenv_app()) as url:
        one, two = (opened(f"openenv(url='{url}')", seed=s, prompt="Hi") for s in (1, 2))
        first = [one.begin(), two.begin()]
        assert [s.failure for s in first] == ["", ""]
        assert [CHARS.decode(s.ids) for s in first] == [
            'Hi\n\n{"text": "seed 1"}',
            'Hi\n\n{"text": "seed 2"}',
        ]
        steps = [one.reply(CHARS.encode("<think>c</think>a")), two.reply(CHARS.encode("b"))]
        assert [CHARS.decode(s.ids) for s in steps] == ['{"text": "a"}', '{"text": "b"}']
        assert [s.reward for s in steps] == [1.0, 1.0]
        assert one.reply(CHARS.encode("stop")).outcome == {"": 4.0}
        one.close(), two.close()


def openenv_app():
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            return Heard(text=f"seed {seed}", done=False, reward=0.0)

        def step(self, action, **_):
            done = action.message == "stop"
            return Heard(text=action.message, done=done, reward=float(len(action.message)))

        @property
        def state(self):
            return State()

    return create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)


# -- MCP

SERVER = """
import sys
try:
    from mcp.server import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("notes")
notes = []

@server.tool()
def write(note: str, times: int = 1) -> str:
    "Writes a note."
    notes.extend([note] * times)
    return f"{len(notes)} notes"

@server.tool()
def fail() -> str:
    "Fails."
    raise ValueError("no luck")

if __name__ == "__main__":
    server.run()
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    (tmp_path / "notes_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "notes_server", raising=False)
    return tmp_path / "notes_server.py"


@pytest.mark.slow
def test_an_mcp_server_that_each_episode_starts(notes):
    text = f"mcp(server='{sys.executable} {notes}')"
    said = [call("write", note="a", times=2) + call("write", note="b"), call("fail"), call("x")]
    steps = play(text, [*said, "Done."])
    assert texts(steps)[:2] == ["Go.", "2 notes3 notes"]
    assert "Error: Error executing tool fail" in texts(steps)[2]
    assert "there is no such tool, only write, fail" in texts(steps)[3]
    assert [s.failed_calls for s in steps] == [0, 0, 1, 0, 0]
    assert [s.unknown_calls for s in steps[:4]] == [0, 0, 0, 1]
    assert steps[-1].ended and steps[-1].outcome is None
    assert texts(play(text, [call("write", note="c")]))[1] == "1 notes"  # a session of its own


def test_what_an_mcp_tool_returns_beside_text_is_read():
    types = pytest.importorskip("mcp_types")
    from rljax.environments.adapters.mcp_servers import _read

    def resource(**held):
        kind = types.TextResourceContents if "text" in held else types.BlobResourceContents
        return types.EmbeddedResource(type="resource", resource=kind(uri="repo://a", **held))

    def result(*parts, **more):
        return _read(types.CallToolResult(content=list(parts), **more))

    text = types.TextContent(type="text", text="found")
    link = types.ResourceLink(type="resource_link", uri="file:///a.txt", name="a.txt")
    image = types.ImageContent(type="image", data="QUJD", mime_type="image/png")
    data = {"temperature": 21, "of": ["a", None]}
    assert result(text, resource(text="42")) == ("found\n42", "")
    assert result(link) == ("a.txt: file:///a.txt", "")
    assert result(structured_content=data) == (json.dumps(data), "")
    assert result(text, structured_content=data) == ("found", "")
    assert result(text, is_error=True) == ("found", "failed")
    said, failure = result(text, image)
    assert said == "found\n[image: image/png, which cannot be shown as text]" and not failure
    assert result(image)[1] == result(resource(blob="QUJD"))[1] == "failed"
    assert "repo://a" in result(resource(blob="QUJD"))[0]
    assert result() == ("", "")


class Lossy:
    """A proxy that cuts every second connection on which a tool is called: before the server has
    read the call, or before the client has read the answer, in turn."""

    def __init__(self, port: int):
        self.port, self.called, self.cut = port, 0, 0

    async def serve(self, reader, writer):
        there = await asyncio.open_connection("127.0.0.1", self.port)
        doomed = asyncio.Event()
        ways = [self.pump(reader, there[1], doomed, True), self.pump(there[0], writer, doomed)]
        await asyncio.wait(map(asyncio.create_task, ways), return_when=asyncio.FIRST_COMPLETED)
        for one in (writer, there[1]):
            one.transport.abort()

    async def pump(self, reader, writer, doomed, calls=False):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if calls and b'"tools/call"' in data:
                    self.called += 1
                    if self.called % 2 == 0:
                        self.cut += 1
                        if self.cut % 2 == 0:
                            return
                        doomed.set()
                elif doomed.is_set() and not calls:
                    return
                writer.write(data)
                await writer.drain()


def test_a_connection_that_is_lost_is_an_answer_and_no_call_is_made_twice(notes):
    """Study, test 17: half of the calls lose their connection, before or after they were made."""
    server = importlib.import_module("notes_server")
    made = []

    @server.server.tool()
    def mark(number: int) -> str:
        made.append(number)
        return f"marked {number}"

    answers, lost = [], []

    async def episodes(port, reconnect):
        proxy = Lossy(port)
        listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"

        async def one(number):
            game = opened(f"mcp(server='{url}', reconnect={reconnect})", number=number)
            game.start()
            steps = [await game.begin_async()]
            for turn in range(5):
                said = call("mark", number=10 * number + turn)
                steps.append(await game.reply_async(CHARS.encode(said), "stop", 9, 9999))
                if steps[-1].ended:
                    lost.append(steps[-1].kind)
                    return
                answers.append((10 * number + turn, texts(steps)[-1], steps[-1].failed_calls))
            assert (await game.reply_async(CHARS.encode("Done."), "stop", 9, 9999)).ended

        await asyncio.gather(*[one(n) for n in range(6)])
        listening.close()
        return proxy

    with served(server.server.streamable_http_app()) as url:
        port = int(url.rpartition(":")[2])
        proxy = asyncio.run(episodes(port, reconnect=True))
        failed = {number for number, _, failed in answers if failed}
        assert len(made) == len(set(made)), "a call was made twice"
        assert len(answers) == 30 and proxy.called == 30 and len(failed) == proxy.cut == 15
        assert all((f"marked {n}" == text) != bool(failed) for n, text, failed in answers)
        assert {n for n, _, failed in answers if not failed} <= set(made) and not lost
        assert 0 < len(failed & set(made)) < 15  # made before the connection was lost, or not
        # A server that remembers its sessions: one whose connection was lost is not gone on with.
        made.clear(), answers.clear()
        proxy = asyncio.run(episodes(port, reconnect=False))
        assert len(made) == len(set(made)) and proxy.called == len(answers) > proxy.cut > 0
        assert sum(failed for *_, failed in answers) == proxy.cut and lost == ["raised"] * len(lost)
        assert 0 < len(lost) <= proxy.cut


def test_a_server_that_is_not_there_is_a_failed_episode():
    pytest.importorskip("mcp")
    game = opened("mcp(server='http://127.0.0.1:9/mcp')")
    assert game.begin().kind == "raised"
    game.close()


# -- what they share


def test_a_first_observation_stands_behind_the_prompt():
    assert with_prompt("Hi.", "x") == "Hi.\n\nx" and with_prompt("", "x") == "x"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert with_prompt(chat, "x") == [chat[0], {"role": "user", "content": "u\n\nx"}]
    assert with_prompt(chat[:1], "x") == [chat[0], {"role": "user", "content": "x"}]
    parts = [{"type": "text", "text": text} for text in ("u", "\n\n", "x")]
    for one, other in [(parts[:1], "x"), ("u", parts[2:]), (parts[:1], parts[2:])]:
        assert with_prompt([{"role": "user", "content": one}], other)[0]["content"] == parts


def test_a_history_goes_on_however_it_is_written():
    called = {"name": "f", "arguments": '{"a": 1}'}
    before = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": called}]},
    ]
    called_otherwise = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    after = [
        {"role": "user", "content": [{"type": "text", "text": "u"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [called_otherwise], "refusal": None},
        {"role": "tool", "content": "2"},
    ]
    assert followed(before, after) == after[2:]
    assert followed(after, before) is None and followed(before[1:], after) is None


def test_a_session_is_left_by_the_task_that_entered_it():
    tasks = []

    @contextlib.asynccontextmanager
    async def held():
        tasks.append(asyncio.current_task())
        yield 5
        tasks.append(asyncio.current_task())

    async def ask(session, what):
        return await asyncio.create_task(session.ask(what))

    async def main():
        async with Session(held) as session:

            async def double(x):
                return 2 * x

            async def fails(x):
                raise KeyError(x)

            assert await ask(session, double) == 10
            with pytest.raises(KeyError):
                await ask(session, fails)
            assert await ask(session, double) == 10
        assert tasks[0] is tasks[1] is not asyncio.current_task()

    asyncio.run(main())


@pytest.mark.parametrize(
    "text, library, install",
    [
        ("gymnasium(id='x')", "gymnasium", "pip install 'gymnasium>="),
        ("mcp(server='x')", "mcp", "pip install 'mcp>="),
        ("openenv(url='http://x')", "openenv.core", "pip install openenv-core"),
        ("textarena(game='x')", "textarena", "pip install textarena"),
        ("tinker(env='x.y')", "tinker_cookbook.renderers.base", "pip install tinker-cookbook"),
        ("verifiers(id='x')", "verifiers.v1", "pip install verifiers"),
    ],
)
def test_a_library_that_is_missing_says_what_to_install(text, library, install, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    step = opened(text).begin()
    assert step.kind == "raised" and "InputError" in step.failure
    with pytest.raises(InputError, match=install):
        raise InputError.of_text(step.failure)
