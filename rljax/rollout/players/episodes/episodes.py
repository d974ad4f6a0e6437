"""Episodes: trajectories of several turns, in which an environment answers the policy.

A rollout, a dataflow, a filter and an evaluation ask a player for samples and know nothing of the
environment.
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
from rljax.metric import Metric
from rljax.rewards.pool.pool import Score
from rljax.rollout.players.episodes.driver import AT_ONCE, Driver
from rljax.rollout.players.episodes.log import EpisodeRules, Trajectory
from rljax.rollout.players.episodes.outcomes import Outcomes, episode_sample, seat_scores
from rljax.rollout.players.episodes.rows import episode_metrics, rows_of, summaries
from rljax.rollout.players.episodes.tree import TurnTree, tree_rows
from rljax.rollout.scoring.report import RewardInput, RewardReport, ScoredRow
from rljax.rollout.scoring.reward import Reward, parts_of
from rljax.sampler import Engine, Sampler
from rljax.sampler.host_rollout import engine_of_rows
from rljax.sampler.inputs import RequestKeys
from rljax.tracking.timing import timed

METRICS = {
    "turn_tree/leaves": Metric(
        "episodes of a prompt's trees, mean",
        "episodes",
        "the roots where no episode goes on after the turns that branch",
    ),
    "env/failed/*": Metric("episodes that failed by {}", "episodes", "0"),
    "env/retried": Metric("episodes that failed and were played again", "episodes", "few"),
    "env/replayed": Metric(
        "episodes played again from their record, as a neighbour ended their worker",
        "episodes",
        "0",
    ),
    "env/killed": Metric("workers ended, as a step hung or crashed", "workers", "0"),
}

_PREFILL_TOKENS, _PREFILL_ROWS = 256, 16  # tokens of a prompt, and prompts, that are read at once
_TRIED = AT_ONCE.stop  # the number of an episode that is played before a run
_SHOWN = 3  # failures in an error
MENDING = {  # kind of a failure -> what mends the environment
    "raised": "correct that line of the environment",
    "unreadable": "correct that line of the parser of calls",
    "not a generator": "yield what the policy reads: reply = yield observation",
    "bad yield": "correct what it yields: a text, a message, a list of messages, or a Turn",
    "bad outcome": "return a number, a dict of numbers with 'score', or None",
    "timeout": "make the step faster, or raise environment.turn_timeout_s",
    "killed": "raise environment.memory_gb, or leave out what ends the process (os._exit, a crash)",
    "not repeatable": "draw from the seeds that it is given alone, or declare repeatable=False",
}


class Episodes:
    """The player of episodes of the environment in the processes of `crew`. `open_reward` makes the
    Reward that scores episodes which return None; it is called when the first one does."""

    has_turns = True

    def __init__(
        self,
        crew: EpisodeCrew,
        rules: EpisodeRules,
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
        self.reward: Reward | None = None

    def open_reward(self) -> Reward:
        """Opens the reward of the episodes that do not score themselves, once."""
        if self.reward is None:
            self.reward = self._open()
        return self.reward

    @property
    def rows(self) -> int:
        """Rows of the batch that an episode takes."""
        return self.rules.rows

    def outcome_alone(self) -> "Episodes":
        """Returns the same episodes: evaluation scores them as training does."""
        return self

    def beside(self, reference) -> "Episodes":
        """Returns the same episodes: scores are known before their batch is."""
        return self

    def learn(self, report: RewardReport) -> dict[str, float]:
        """Updates the rubrics of the reward by a step's report. Returns metrics."""
        return {} if self.reward is None else self.reward.learn(report)

    def close(self) -> None:
        """Ends the processes of the environment and of the reward."""
        self.crew.close()
        if self.reward is not None:
            self.reward.close()

    def play(
        self,
        actor,
        prompts: Prompts,
        key,
        sampling,
        *,
        n: int,
        enough=None,
        tree: TurnTree | None = None,
    ) -> tuple[Batch, RewardReport]:
        """Plays n / rows episodes on each prompt, `rows` those of an episode.

        Args:
          actor: the policy.
          prompts: P prompts.
          key: decides the draws, and the seeds of environments.
          sampling: the options of a turn.
          n: rows per prompt.
          enough: not asked; all episodes are played to their ends.
          tree: its leaves are the episodes, and the batch has the rows of its nodes.

        Returns the batch of P x n rows and the report, as `Reward` returns them. Raises InputError
        if too many episodes fail, or n is no whole number of episodes.
        """
        per_prompt, waiting = self.episodes_of_a_prompt(n), {}
        branches = None
        if tree is not None:

            def branches(e):
                start = e.prompt * per_prompt
                leaves = tree.siblings(e.number - start, e.turns)
                return [waiting.pop(start + leaf) for leaf in leaves]

        with timed("generate"):
            sampler = self.sampler(self.engine(actor, len(prompts.records) * n))
            rules = self.rules_of(sampling)
            driver, early = Driver(sampler, self.crew, rules, branches=branches), Outcomes(self)
            keys = RequestKeys(key)
            for p in range(len(prompts.records)):
                for number, episode in enumerate(self.episodes(prompts.select([p]), p, p, keys, n)):
                    if tree is None or number % tree.leaves == 0:
                        driver.admit(episode)
                    else:
                        waiting[episode.number] = episode
            try:
                weights = actor.decoding.weights(actor.model, actor.state.weights)
                episodes = driver.run(weights, int(fetch(actor.state.step)), early.ended)
            except BaseException:  # a Ctrl-C, say
                driver.close()
                early.cancel()
                raise
        self.refuse_failures(episodes)
        episodes.sort(key=lambda episode: episode.number)
        with timed("reward"):
            scores, groups = early.scores(episodes), [episode.prompt for episode in episodes]
            return self.reported(driver, episodes, scores, groups, tree, per_prompt)

    def score(self, *_):
        """Raises InputError: a row is not a response."""
        fix = "a rollout that samples all of its rows"
        raise InputError("rewards of responses with an environment", fix=fix)

    def completions(
        self, batch: Batch, report: RewardReport, prompts: Prompts, n: int
    ) -> tuple[Batch, np.ndarray, tuple[ScoredRow, ...]]:
        """Returns the first seat's row of each episode, the column where its tokens begin [rows],
        and its score."""
        rows = list(range(0, batch.rows, self.rows))
        first = jax.tree.map(lambda x: x[rows], fetch(batch))
        return first, np.argmax(first.mask > 0, axis=1), report.rows[:: len(self.rules.seats)]

    def first_exchange(self, record: PromptRecord) -> list[Step]:
        """Plays one exchange on a row with a scripted policy, whose reply is the row's ground
        truth, as far as the tokenizer can write it. Returns what the environment says before it and
        after it. Raises InputError if it fails, or begins with more than an episode may hold."""
        ids, limits = self._scripted(record), self.rules.limits
        steps: list[Step] = []
        prompt = dict(prompt_ids=record.token_ids.tolist(), messages=_messages_of(record))
        self.crew.admit(_TRIED, _fields(record), seed=0, sample_seed=0, **prompt)
        try:
            while True:
                step = next(iter(self.crew.news(1.0, range(_TRIED, _TRIED + 1))), None)
                if step is None:
                    continue
                if step.failure:
                    raise InputError(
                        f"environment.function={self.crew.text!r} was tried on row "
                        f"{record.index} and failed",
                        value=step.kind,
                        rule=step.failure,
                        fix=MENDING.get(step.kind, "try it by hand: rljax play"),
                    )
                steps = [step] if step.restart else [*steps, step]
                if step.ended or len(steps) == 2:
                    return steps
                tokens_left = limits.max_tokens - len(step.ids) - len(ids)
                self.crew.reply(_TRIED, ids, "stop", limits.max_turns - 1, tokens_left)
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

    def fields(self, episode: Trajectory) -> RewardInput:
        """Returns what a reward function may read of an episode."""
        rubrics = None if self.reward is None else self.reward.rubrics
        return episode_sample(episode, self.tokenizer, rubrics)

    def episodes(
        self, prompts: Prompts, group: int, at: int, keys: RequestKeys, n: int
    ) -> list[Trajectory]:
        """Returns the n / rows episodes of one prompt, still to be played.

        Siblings start from one seed, and each has one of its own: functions of the key of the step
        and of `at`, the prompt's number in it. `group`: its number among all prompts whose episodes
        are played together. Raises InputError if n is no whole number of episodes.
        """
        if prompts.images is not None:
            raise InputError(
                "rows with images cannot be played in episodes", fix="rows of text alone"
            )
        per_prompt, rows = self.episodes_of_a_prompt(n), self.rules.rows
        drawn = np.asarray(fetch(jax.random.key_data(keys.root))).tobytes()
        record = prompts.records[0]
        start = dict(
            fields=_fields(record),
            messages=_messages_of(record),
            seed=_seed(drawn, at),
            prompt_ids=prompts.tokens[0, : prompts.lengths[0]].tolist(),
        )
        episodes = []
        for s in range(per_prompt):
            first = (at * per_prompt + s) * rows
            row_keys = np.stack([keys.of(first + row) for row in range(rows)])
            episode_start = {**start, "sample_seed": _seed(drawn, at, s)}
            episodes.append(
                Trajectory(group * per_prompt + s, group, record, episode_start, row_keys)
            )
        return episodes

    def episodes_of_a_prompt(self, n: int) -> int:
        """Returns the number of episodes that n rows are. Raises InputError if it is
        no whole number."""
        if n % self.rules.rows:
            seats, rows = len(self.rules.seats), self.rules.max_rows
            raise InputError(
                "samples per prompt of an environment",
                value=n,
                rule=f"a multiple of the rows of an episode: {seats} seats x {rows} rows",
                fix=f"batch.samples_per_prompt={-(-n // self.rules.rows) * self.rules.rows}",
            )
        return n // self.rules.rows

    def rules_of(self, sampling) -> EpisodeRules:
        """Returns the rules of a rollout whose turns are sampled so, such as greedy ones."""
        turn_sampling = self.rules.sampling
        stops = dict(stop_ids=turn_sampling.stop_ids, stop_strings=turn_sampling.stop_strings)
        turn = dataclasses.replace(sampling, **stops)
        return dataclasses.replace(self.rules, sampling=turn)

    def engine(self, actor, rows: int) -> Engine:
        """Returns slots for `rows` logs, or as many as the config says."""
        model, rules = actor.decoding.of(actor.model), self.rules
        return engine_of_rows(model, rows, rules.limits.max_tokens, rules.sampling, actor.decoding)

    def sampler(self, engine: Engine) -> Sampler:
        """Returns a sampler that has read nothing."""

        def text(ids):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return Sampler(
            engine,
            chunk_tokens=_PREFILL_TOKENS,
            prefill_rows=min(engine.slots, _PREFILL_ROWS),
            decode=text,
        )

    def refuse_failures(self, episodes: list[Trajectory]) -> None:
        """Raises InputError, the same on all hosts, if too many episodes have failed."""
        broken = [e for e in episodes if e.failure and e.kind != "abstained"]
        most = self.max_failed * len(episodes)
        single = len(broken) == 1 < len(episodes) and self.max_failed > 0
        if len(broken) <= most or single:  # one of a few is more than any small share
            return
        reasons = {f"{episode.kind}: {episode.failure}" for episode in broken}
        raise InputError(
            f"{len(broken)} of {len(episodes)} episodes failed, each "
            f"{'once' if not self.crew.retries else f'{1 + self.crew.retries} times'}",
            rule="\n".join(sorted(reasons)[:_SHOWN]),
            fix=f"{MENDING.get(broken[0].kind, 'try it by hand: rljax play')}; or raise "
            "environment.max_failed",
        )

    def reported(
        self,
        driver: Driver,
        episodes: list[Trajectory],
        of_reward: dict[int, Score],
        groups: list[int],
        tree: TurnTree | None = None,
        each: int = 0,
    ) -> tuple[Batch, RewardReport]:
        """Returns the batch and the report of the episodes, in their order.

        `of_reward` has the scores of those that a reward function scores, `groups` is equal for
        those that are compared. Those of a `tree` are leaves of prompts that have `each` of
        them at most.
        """
        rules, seats, scored = self.rules, len(self.rules.seats), []
        episode_scores = [seat_scores(episode, rules, of_reward) for episode in episodes]
        for episode, group, scores in zip(episodes, groups, episode_scores, strict=True):
            sample = self.fields(episode)
            for seat, score in enumerate(scores):
                scored.append(ScoredRow(sample, score, episode.record, group * seats + seat))
                if score.status != "ok" and not episode.failure:
                    kind = "abstained" if score.status == "abstained" else "reward"
                    episode.failure, episode.kind = score.message or score.status, kind
        ok = np.array([[score.status == "ok" for score in scores] for scores in episode_scores])
        totals = np.array([[score.value for score in scores] for scores in episode_scores])
        parts = parts_of([score for scores in episode_scores for score in scores])
        if tree is None:
            seat_totals = np.where(ok, totals, 0.0).astype(np.float32).reshape(-1)
            row_values = [
                x if x is None else x.repeat(rules.max_rows, 0) for x in (seat_totals, parts)
            ]
            batch = rows_of(
                episodes, rules, *row_values, groups, mask_bad_turns=self.mask_bad_turns
            )
        else:
            values = np.where(ok, totals, np.nan)
            batch = self._rows_of_tree(tree, episodes, values, parts, each)
        metrics = episode_metrics(episodes, groups, totals[:, 0].tolist(), self.correct_at)
        metrics |= self._counts(driver)
        if tree is not None:
            metrics["turn_tree/leaves"] = len(episodes) / len({*groups})
        transcripts = summaries(episodes, rules, groups, totals, self.tokenizer)
        return place(batch, self.mesh), RewardReport(tuple(scored), (metrics,), transcripts)

    def _rows_of_tree(
        self,
        tree: TurnTree,
        episodes: list[Trajectory],
        totals: np.ndarray,
        parts: np.ndarray | None,
        per_prompt: int,
    ) -> Batch:
        """Returns the rows of the nodes, given the totals [E, seats] and parts [E
        seats, K] of the leaves."""
        prompts = episodes[-1].prompt + 1
        leaves = [{} for _ in range(prompts)]
        leaf_totals = np.full((prompts * per_prompt, totals.shape[1]), np.nan)
        numbers = [episode.number for episode in episodes]
        leaf_totals[numbers] = totals
        leaf_parts = None
        if parts is not None:
            leaf_parts = np.full((*leaf_totals.shape, parts.shape[-1]), np.nan)
            leaf_parts[numbers] = parts.reshape(*totals.shape, -1)
            leaf_parts[np.isnan(leaf_totals)] = np.nan
            leaf_parts = leaf_parts.reshape(prompts, per_prompt, *leaf_parts.shape[1:])
        for episode in episodes:
            leaves[episode.prompt][episode.number - episode.prompt * per_prompt] = episode
        values, masks = leaf_totals.reshape(prompts, per_prompt, -1), self.mask_bad_turns
        return tree_rows(
            tree, leaves, per_prompt, self.rules, values, leaf_parts, mask_bad_turns=masks
        )

    def _counts(self, driver: Driver) -> dict[str, float]:
        """Counts what the workers of all hosts did again, and how slots were used."""
        host_counts = hosts.gather(self.crew.take_counts())
        names = ("retried", "replayed", "killed")
        metrics = {
            f"env/{name}": float(sum(counts[name] for counts in host_counts)) for name in names
        }
        sampler = driver.sampler
        return metrics | driver.take_use() | sampler.page_metrics() | sampler.draft_metrics()


def _fields(record: PromptRecord) -> dict:
    """Names the fields of a row that an environment may declare: its own columns, too."""
    return {
        **record.extra_info,
        "prompt": record.prompt,
        "ground_truth": record.ground_truth,
        "data_source": record.data_source,
        "extra_info": record.extra_info,
    }


def _messages_of(record: PromptRecord) -> list[dict] | None:
    return None if record.messages is None else [dict(message) for message in record.messages]


def _seed(drawn: bytes, *numbers: int) -> int:
    """Returns a seed of 32 bits that is a function of the key and these numbers."""
    text = b"%s %s" % (drawn.hex().encode(), repr(numbers).encode())
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
