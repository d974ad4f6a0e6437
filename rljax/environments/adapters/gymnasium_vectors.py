"""Gymnasium's vector environments, whose lanes are given to episodes. A lane is
one sub-environment."""

import asyncio

import numpy as np

from rljax.environments.adapters.gymnasium_text import gym


class Vector:
    """A vector environment, and for each lane in use None or (action, future of its result)."""

    made: dict[tuple, list["Vector"]] = {}

    def __init__(self, id: str, lanes: int, mode: str, options: tuple):
        self.env = gym().make_vec(id, lanes, vectorization_mode=mode, **dict(options))
        self.env.reset(seed=0)
        self.used: dict[int, tuple | None] = {}
        self.broken = False

    @classmethod
    def free(cls, *options) -> tuple["Vector", int]:
        """(a vector environment of this process with a free lane, that lane, now in use)."""
        vectors = cls.made.setdefault(options, [])
        vector = next((v for v in vectors if v._has_room()), None)
        if vector is None:
            vector = cls(*options)
            vectors.append(vector)
        lane = next(i for i in range(vector.env.num_envs) if i not in vector.used)
        vector.used[lane] = None
        return vector, lane

    def reset(self, lane: int, seed: int):
        """Resets a lane and returns its first observation; the other lanes stay as they are."""
        mask = np.arange(self.env.num_envs) == lane
        seeds = [seed if here else None for here in mask]
        return self._of(lane, self.env.reset(seed=seeds, options={"reset_mask": mask})[0])

    async def act(self, lane: int, action) -> tuple[object, float, bool]:
        """(observation, reward, whether the episode has ended), once every episode here
        has acted."""
        future = asyncio.get_running_loop().create_future()
        self.used[lane] = action, future
        self._step()
        return await future

    def leave(self, lane: int) -> None:
        """Frees a lane; the others no longer wait for it."""
        del self.used[lane]
        self._step()

    def _step(self) -> None:
        if not self.used or None in self.used.values():
            return
        some = next(iter(self.used.values()))[0]  # a lane that nobody plays does as another
        actions = [self.used[i][0] if i in self.used else some for i in range(self.env.num_envs)]
        acted, self.used = self.used, dict.fromkeys(self.used)
        waiting = {lane: future for lane, (_, future) in acted.items() if not future.done()}
        try:
            seen, rewards, terminated, truncated, _ = self.env.step(np.asarray(actions))
        except Exception as error:  # it fails for all of them
            self.broken = True
            for future in waiting.values():
                future.set_exception(error)
            return
        for lane, future in waiting.items():
            ended = bool(terminated[lane] or truncated[lane])
            future.set_result((self._of(lane, seen), float(rewards[lane]), ended))

    def _has_room(self) -> bool:
        return not self.broken and len(self.used) < self.env.num_envs

    def _of(self, lane: int, observations):
        rows = gym().vector.utils.iterate(self.env.observation_space, observations)
        return list(rows)[lane]
