"""Gymnasium's vector environments: the episodes of a worker share one vector environment, and are
stepped at once."""

from collections.abc import AsyncGenerator

from rljax.contracts import contract
from rljax.environments.adapters.gymnasium_text import written
from rljax.environments.adapters.gymnasium_vectors import Vector
from rljax.environments.adapters.shared import with_prompt
from rljax.environments.contract import Done, Reply, Turn


@contract(repeatable=False)  # an episode cannot be stepped without its neighbours
async def gymnasium_vector(
    seed: int,
    prompt: object = "",
    *,
    id: str,
    lanes: int = 64,
    mode: str = "sync",
    options: tuple[tuple[str, object], ...] = (),
    render: str = "",
    act: str = "",
) -> AsyncGenerator[Turn | Done, Reply]:
    """An environment as `gymnasium` makes it, in a lane of a vector environment that all
    episodes share.

    It steps when every episode in it has acted, so `environment.turn_timeout_s` must be longer than
    a turn of the whole batch. `lanes`: sub-environments of one; more episodes take another. `mode`:
    gymnasium.make_vec's vectorization_mode, "sync" or "async" (a process for each lane). `render`
    gets the vector environment; its default is the observation.
    """
    show, action_of = written(render or f"{__name__}.observation_text", act)
    vector, lane = Vector.free(id, lanes, mode, options)
    try:
        seen = vector.reset(lane, seed)
        reply = yield Turn(with_prompt(prompt, show(vector.env, seen)), state=seen)
        while True:
            try:
                action = action_of(reply, vector.env.single_action_space)
            except ValueError as error:
                reply = yield Turn(f"This is no action: {error}", state=seen)
                continue
            seen, reward, ended = await vector.act(lane, action)
            if ended:
                break
            reply = yield Turn(show(vector.env, seen), reward=reward, state=seen)
    finally:
        vector.leave(lane)
    yield Done(reward)


def observation_text(env, observation) -> str:
    """The observation as text, in NumPy's notation."""
    return str(observation)
