"""Gymnasium's vector environments: the batch of episodes that a worker plays is the batch of one
vector environment, stepped at once."""

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from rljax.contracts import contract
from rljax.environments.adapters.gymnasium_text import gym, observation_text, written
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
    """As `gymnasium`, each episode in a sub-environment of a vector environment that all share.

    It steps when every episode in it has acted, so `environment.turn_timeout_s` must be longer than
    a turn of the whole batch. `lanes`: sub-environments of one; more episodes take another. `mode`:
    gymnasium.make_vec's vectorization_mode, "sync" or "async" (a process for each sub-environment).
    `render` gets the vector environment; its default is the observation.
    """
    show, action_of = written(render or f"{observation_text.__module__}.observation_text", act)
    vector, index = Vector.free(id, lanes, mode, options)
    try:
        observation = vector.reset(index, seed)
        reply = yield Turn(with_prompt(prompt, show(vector.env, observation)), state=observation)
        while True:
            try:
                action = action_of(reply, vector.env.single_action_space)
            except ValueError as error:
                reply = yield Turn(f"This is no action: {error}", state=observation)
                continue
            observation, reward, ended = await vector.act(index, action)
            if ended:
                break
            reply = yield Turn(show(vector.env, observation), reward=reward, state=observation)
    finally:
        vector.leave(index)
    yield Done(reward)


class Vector:
    """A vector environment whose sub-environments are given to episodes: for each that is in use,
    by its index, None or (action, future of its result)."""

    made: dict[tuple, list["Vector"]] = {}

    def __init__(self, id: str, size: int, mode: str, options: tuple):
        self.env = gym().make_vec(id, size, vectorization_mode=mode, **dict(options))
        self.env.reset(seed=0)
        self.used: dict[int, tuple | None] = {}
        self.broken = False

    @classmethod
    def free(cls, *options) -> tuple["Vector", int]:
        """Returns (a vector environment of this process with a free sub-environment, the index of
        that, now in use)."""
        vectors = cls.made.setdefault(options, [])
        vector = next((v for v in vectors if v._has_room()), None)
        if vector is None:
            vector = cls(*options)
            vectors.append(vector)
        index = next(i for i in range(vector.env.num_envs) if i not in vector.used)
        vector.used[index] = None
        return vector, index

    def reset(self, index: int, seed: int):
        """Resets a sub-environment and returns its first observation; the others stay as they
        are."""
        mask = np.arange(self.env.num_envs) == index
        seeds = [seed if selected else None for selected in mask]
        return self._of(index, self.env.reset(seed=seeds, options={"reset_mask": mask})[0])

    async def act(self, index: int, action) -> tuple[object, float, bool]:
        """Returns (observation, reward, whether it has ended) once every episode here has acted."""
        future = asyncio.get_running_loop().create_future()
        self.used[index] = action, future
        self._step()
        return await future

    def leave(self, index: int) -> None:
        """Frees a sub-environment; the others no longer wait for it."""
        del self.used[index]
        self._step()

    def _step(self) -> None:
        if not self.used or None in self.used.values():
            return
        filler = next(iter(self.used.values()))[0]  # one that nobody plays does as another
        actions = [self.used[i][0] if i in self.used else filler for i in range(self.env.num_envs)]
        acted, self.used = self.used, dict.fromkeys(self.used)
        waiting = {index: future for index, (_, future) in acted.items() if not future.done()}
        try:
            observations, rewards, terminated, truncated, _ = self.env.step(np.asarray(actions))
        except Exception as error:  # it fails for all of them
            self.broken = True
            for future in waiting.values():
                future.set_exception(error)
            return
        for index, future in waiting.items():
            ended = bool(terminated[index] or truncated[index])
            future.set_result((self._of(index, observations), float(rewards[index]), ended))

    def _has_room(self) -> bool:
        return not self.broken and len(self.used) < self.env.num_envs

    def _of(self, index: int, observations):
        rows = gym().vector.utils.iterate(self.env.observation_space, observations)
        return list(rows)[index]
