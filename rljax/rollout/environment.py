"""Environment: what plays the episodes of a step, in place of a reward.

It has the face of a `Reward`: a rollout hands it to `sample_scored`, which plays episodes with it
instead of sampling one response to each prompt. So every rollout, dataflow, evaluation and filter
is agentic with an environment, and knows nothing of it.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import jax
import numpy as np

from rljax import hosts
from rljax.arrays import fetch, place
from rljax.batch import Batch
from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.environments.crew import EpisodeCrew
from rljax.environments.messages import Step
from rljax.errors import InputError
from rljax.rewards.pool.pool import RewardPool, Score
from rljax.rollout.episode_rows import episode_metrics, rows_of, summaries
from rljax.rollout.episodes import Driver, Episode, Rules
from rljax.rollout.report import RewardReport, ScoredRow
from rljax.rollout.reward import Reward, of_all_hosts, parts_of, sample_of
from rljax.sampler import Sampler
from rljax.sampler.host_rollout import engine_of_rows
from rljax.tracking.timing import timed

_PREFILL_TOKENS, _PREFILL_ROWS = 256, 16  # of a prompt, and prompts, that are read at once
_TRIED = 2**30  # the number of an episode that is played before a run
_SHOWN = 3  # failures in an error


class Environment:
    """Episodes of the environment that `crew` plays. `open_reward` makes the Reward that scores
    episodes which return None; it is called when the first one does."""

    pool = model = process = None

    def __init__(
        self,
        crew: EpisodeCrew,
        rules: Rules,
        tokenizer,
        mesh,
        open_reward: Callable[[], Reward],
        *,
        mask_bad_turns: bool = False,
        max_failed: float = 0.05,
        correct_at: float = 1.0,
    ):
        self.crew, self.rules, self.tokenizer, self.mesh = crew, rules, tokenizer, mesh
        self.mask_bad_turns, self.max_failed = mask_bad_turns, max_failed
        self.correct_at, self._open = correct_at, open_reward
        self._reward: Reward | None = None

    def open_reward(self) -> Reward:
        """What scores the episodes that do not score themselves, opened once."""
        if self._reward is None:
            self._reward = self._open()
        return self._reward

    @property
    def rubrics(self):
        """Those of the reward that was opened, if it has any."""
        return None if self._reward is None else self._reward.rubrics

    def outcome_alone(self) -> "Environment":
        """For evaluation: the same episodes."""
        return self

    def learn(self, report: RewardReport) -> dict[str, float]:
        """Updates the rubrics of the reward by a step's report -> metrics."""
        return {} if self._reward is None else self._reward.learn(report)

    def close(self) -> None:
        self.crew.close()
        if self._reward is not None:
            self._reward.close()

    def play(self, actor, prompts: Prompts, key, sampling, *, n: int) -> tuple[Batch, RewardReport]:
        """Plays n / rows episodes on each prompt, `rows` those of an episode -> the batch of
        prompts x n rows and the report, as `Reward` returns them."""
        if prompts.images is not None:
            raise InputError(
                "rows with images cannot be played in episodes", fix="rows of text alone"
            )
        each = self._episodes_of_a_prompt(n)
        with timed("generate"):
            rows = len(prompts.records) * n
            sampler = self._sampler(actor, key, rows)
            driver = Driver(sampler, self.crew, self._rules(sampling))
            early = _Outcomes(self, prompts)
            self._admit_all(driver, prompts, key, each)
            try:
                weights = actor.decoding.weights(actor.model, actor.state.weights)
                episodes = driver.run(weights, int(fetch(actor.state.step)), early.ended)
            except BaseException:  # a Ctrl-C, say
                driver.close()
                early.cancel()
                raise
        self._refuse_failures(episodes)
        with timed("reward"):
            scores = early.scores(episodes, actor)
            return self._reported(driver, episodes, scores, prompts)

    def first_exchange(self, record: PromptRecord) -> list[Step]:
        """One exchange on a row with a scripted policy, whose reply is the row's ground truth, as
        far as the tokenizer can write it: what the environment says before it and after it. Raises
        InputError where it fails, or begins with more than an episode may hold."""
        ids, limits = self._scripted(record), self.rules.limits
        steps: list[Step] = []
        prompt = dict(prompt_ids=record.token_ids.tolist(), messages=_messages_of(record))
        self.crew.admit(_TRIED, _fields(record), seed=0, sample_seed=0, **prompt)
        try:
            while True:
                step = next(iter(self.crew.news(1.0)), None)
                if step is None or step.episode != _TRIED:
                    continue
                if step.failure:
                    raise InputError(
                        f"environment.function={self.crew.text!r} was tried on row "
                        f"{record.index} and failed", value=step.kind, rule=step.failure,
                        fix="rljax play plays it alone, by hand",
                    )  # fmt: skip
                steps = [step] if step.restart else [*steps, step]
                if step.ended or len(steps) == 2:
                    return steps
                left = limits.max_tokens - len(step.ids) - len(ids)
                self.crew.reply(_TRIED, ids, "stop", limits.max_turns - 1, left)
        finally:
            self.crew.drop(_TRIED)
            self.crew.take_counts()

    def _scripted(self, record: PromptRecord) -> list[int]:
        try:
            ids = self.tokenizer.encode(str(record.ground_truth))
        except InputError:  # letters that the alphabet lacks
            ids = []
        most = self.rules.sampling.max_response_tokens - 1
        return [*ids[:most], *self.tokenizer.eos_ids[:1]]

    def _episodes_of_a_prompt(self, n: int) -> int:
        if n % self.rules.rows:
            seats, rows = len(self.rules.seats), self.rules.max_rows
            raise InputError(
                "samples per prompt of an environment", value=n,
                rule=f"a multiple of the rows of an episode: {seats} seats x {rows} rows",
                fix=f"batch.samples_per_prompt={-(-n // self.rules.rows) * self.rules.rows}",
            )  # fmt: skip
        return n // self.rules.rows

    def _rules(self, sampling) -> Rules:
        """The rules of a rollout whose turns are sampled so: greedy ones, say."""
        own = self.rules.sampling
        stops = dict(stop_ids=own.stop_ids, stop_strings=own.stop_strings)
        turn = dataclasses.replace(sampling, **stops)
        return dataclasses.replace(self.rules, sampling=turn)

    def _sampler(self, actor, key, rows: int) -> Sampler:
        decoding, rules = actor.decoding, self.rules
        engine = engine_of_rows(
            decoding.of(actor.model), rows, rules.limits.max_tokens, rules.sampling, decoding
        )
        text = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
        return Sampler(
            engine, key=key, chunk_tokens=_PREFILL_TOKENS, prefill_rows=min(rows, _PREFILL_ROWS),
            decode=text,
        )  # fmt: skip

    def _admit_all(self, driver: Driver, prompts: Prompts, key, each: int) -> None:
        """Siblings start from one seed, and each has one of its own, all functions of the key."""
        drawn = np.asarray(fetch(jax.random.key_data(key))).tobytes()
        for p, record in enumerate(prompts.records):
            fields, messages = _fields(record), _messages_of(record)
            ids = prompts.tokens[p, : prompts.lengths[p]].tolist()
            for s in range(each):
                driver.admit(
                    p * each + s, p, fields, seed=_seed(drawn, p), sample_seed=_seed(drawn, p, s),
                    prompt_ids=ids, messages=messages,
                )  # fmt: skip

    def _refuse_failures(self, episodes: list[Episode]) -> None:
        """Raises InputError, the same on all hosts, where too many episodes have failed."""
        broken = [episode for episode in episodes if episode.failure]
        most = self.max_failed * len(episodes)
        one = len(broken) == 1 < len(episodes) and self.max_failed > 0
        if len(broken) <= most or one:  # one of a few is more than any small share
            return
        reasons = {f"{one.kind}: {one.failure}" for one in broken}
        raise InputError(
            f"{len(broken)} of {len(episodes)} episodes failed, each "
            f"{'once' if not self.crew.retries else f'{1 + self.crew.retries} times'}",
            rule="\n".join(sorted(reasons)[:_SHOWN]),
            fix="mend the environment (rljax play plays it alone), or raise environment.max_failed",
        )

    def _reported(
        self, driver: Driver, episodes: list[Episode], scores: dict, prompts: Prompts
    ) -> tuple[Batch, RewardReport]:
        rules, rows = self.rules, len(episodes) * self.rules.rows
        values, found = np.zeros(rows, np.float32), []
        every: list[Score] = []
        for episode in episodes:
            for seat in range(len(rules.seats)):
                first = episode.number * rules.rows + seat * rules.max_rows
                score, sample = scores[episode.number, seat]
                own = slice(first, first + rules.max_rows)
                values[own] = score.value if score.status == "ok" else 0.0
                every += [score] * rules.max_rows
                record = prompts.records[episode.prompt]
                group = episode.prompt * len(rules.seats) + seat
                found.append(ScoredRow(sample, score, record, group))
                if score.status != "ok" and not episode.failure:
                    episode.failure, episode.kind = score.message or score.status, "reward"
        batch = rows_of(
            episodes, rules, values, parts_of(every), len(prompts.records),
            mask_bad_turns=self.mask_bad_turns,
        )  # fmt: skip
        returns = [float(scores[episode.number, 0][0].value) for episode in episodes]
        metrics = episode_metrics(episodes, returns, self.correct_at) | self._counts(driver)
        totals = {which: score.value for which, (score, _) in scores.items()}
        shown = summaries(episodes, rules, totals, self.tokenizer)
        return place(batch, self.mesh), RewardReport(tuple(found), (metrics,), shown)

    def _counts(self, driver: Driver) -> dict[str, float]:
        """What the workers of all hosts did again, and how slots were used."""
        told = hosts.gather(self.crew.take_counts())
        again = ("retried", "replayed", "killed")
        found = {f"env/{name}": float(sum(counts[name] for counts in told)) for name in again}
        dispatches = max(driver.dispatches, 1)
        return found | {
            "slots/live": driver.live / dispatches,
            "slots/held": driver.held / dispatches,
            "slots/parked": driver.parked / dispatches,
            "slots/reread_tokens": float(driver.sampler.reread_tokens),
            **driver.sampler.page_metrics(),
            **driver.sampler.draft_metrics(),
        }


class _Outcomes:
    """The score of every episode and seat. Those that a reward function gives are asked for as
    episodes end, by the host that played them."""

    def __init__(self, environment: Environment, prompts: Prompts):
        self.environment, self.prompts = environment, prompts
        self._pending: dict[int, tuple] = {}  # episode -> (pending, sample)

    def ended(self, episode: Episode) -> None:
        """Submits an episode that a reward function scores."""
        if episode.failure or episode.outcome is not None:
            return
        reward = self.environment.open_reward()
        early = isinstance(reward.pool, RewardPool) and reward.model is None
        if early and not reward.pool.grouped and episode.number in hosts.mine(episode.number + 1):
            sample = self._sample(episode)
            self._pending[episode.number] = reward.pool.submit([sample]), sample

    def cancel(self) -> None:
        for pending, _ in self._pending.values():
            pending.cancel()

    def scores(self, episodes: list[Episode], actor) -> dict[tuple[int, int], tuple]:
        """{(episode, seat): (its Score: the total return with its parts, its sample)}."""
        asked = [e for e in episodes if not e.failure and e.outcome is None]
        of_reward = self._of_reward(asked) if asked else {}
        found = {}
        for episode in episodes:
            sample = self._sample(episode)
            for seat, name in enumerate(self.environment.rules.seats):
                found[episode.number, seat] = _score(episode, seat, name, of_reward), sample
        return found

    def _of_reward(self, asked: list[Episode]) -> dict[int, Score]:
        reward = self.environment.open_reward()
        if not isinstance(reward.pool, RewardPool) or reward.model is not None:
            raise InputError(
                "a reward model or a judge on the mesh cannot score episodes",
                value=reward.pool and type(reward.pool).__name__,
                rule="it reads whole batches of single responses",
                fix="a reward function, a judge that asks a server, or an outcome of the "
                "environment's own",
            )
        mine = [e for e in asked if e.number in hosts.mine(e.number + 1)]
        if reward.pool.grouped:  # a group is scored where its first sample is
            mine = [e for e in asked if e.prompt in hosts.mine(e.prompt + 1)]
        late = [e for e in mine if e.number not in self._pending]
        scored = reward.pool.score([self._sample(e) for e in late])
        own = {e.number: score for e, score in zip(late, scored, strict=True)}
        own |= {number: of.result()[0] for number, (of, _) in self._pending.items()}
        return own if hosts.count() == 1 else of_all_hosts(own)

    def _sample(self, episode: Episode):
        """What a reward function may read of an episode: its last turn, and the whole of it."""
        log = episode.speaker
        ids = [] if log is None or not log.turns else log.sample.ids[log.turns[-1].start :]
        environment, record = self.environment, self.prompts.records[episode.prompt]
        text = lambda: environment.tokenizer.decode([int(i) for i in ids])  # noqa: E731
        sample = sample_of(
            record, text, len(ids), episode.finish, episode.prompt, environment.rubrics
        )
        turns = [turn for one in episode.logs for turn in one.turns]
        said = [
            message
            for turn in turns
            for message in (*turn.observation, {"role": "assistant", "content": turn.text})
        ]
        return sample.adding(conversation=said, turns=len(turns), calls=episode.calls)


def _score(episode: Episode, seat: int, name: str, of_reward: dict[int, Score]) -> Score:
    """The total return of a seat: the rewards of its turns, and the outcome."""
    if episode.failure:
        why = f"{episode.kind}: {episode.failure}"
        return Score(np.nan, {}, "error", episode.seconds, why)
    parts, turns = dict(episode.parts), [
        turn.reward for log in episode.logs if log.seat == seat for turn in log.turns
    ]  # fmt: skip
    if episode.outcome is not None:
        outcome = float(episode.outcome.get(name, 0.0))
    elif of_reward[episode.number].status != "ok":
        return of_reward[episode.number]
    else:
        outcome = of_reward[episode.number].value
        parts |= of_reward[episode.number].parts
    parts |= {"outcome": outcome, "turn_rewards": float(sum(turns))}
    return Score(outcome + sum(turns), parts, "ok", episode.seconds)


def _fields(record: PromptRecord) -> dict:
    """What an environment may declare of a row: its own columns, too."""
    return {
        **record.extra_info, "prompt": record.prompt, "ground_truth": record.ground_truth,
        "data_source": record.data_source, "extra_info": record.extra_info,
    }  # fmt: skip


def _messages_of(record: PromptRecord) -> list[dict] | None:
    return None if record.messages is None else [dict(one) for one in record.messages]


def _seed(drawn: bytes, *numbers: int) -> int:
    """A seed of 32 bits that the key and these numbers decide."""
    text = b"%s %s" % (drawn.hex().encode(), repr(numbers).encode())
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
