"""sample: prompts -> scored trajectories. A player makes trajectories, and a reward scores them.

A rollout is handed `sample` and knows neither: with an environment a sample is an episode, and in
flight it has been decoded already.
"""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import numpy as np

from rljax.arrays import fetch
from rljax.batch import Batch
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError, location_of
from rljax.rollout.players.episodes.episodes import Episodes
from rljax.rollout.players.episodes.tree import TurnTree
from rljax.rollout.players.responses import Responses
from rljax.rollout.scoring.report import RewardReport
from rljax.rollout.scoring.reward import EarlyScores, FunctionReward, Reward
from rljax.sampler import Sampling

Player = Responses | Episodes


@dataclasses.dataclass(eq=False)
class Landed:
    """Trajectories of `prompts`, n of `actor` by `sampling`, that were decoded in flight. They are
    handed out once."""

    prompts: Prompts
    actor: object
    sampling: Sampling
    n: int
    result: tuple[Batch, RewardReport]
    taken: bool = False

    def is_of(self, actor, prompts: Prompts, sampling: Sampling, n: int) -> bool:
        """Returns whether these are the trajectories that somebody asks for. (Greedy responses to
        the same prompts, and those of an opponent, are not.)"""
        matches = actor is self.actor and prompts is self.prompts
        return matches and (sampling, n) == (self.sampling, self.n) and not self.taken


@dataclasses.dataclass(frozen=True)
class TrajectorySampler:
    """`sample` of a rollout: the player, and the actor and the sampling where a call names none.
    `landed`: the trajectories of this step that were decoded in flight. `function`: what a call
    calls in place of the player (`wrapped`)."""

    player: Player
    actor: object
    sampling: Sampling
    landed: Landed | None = None
    function: Callable | None = None

    def __call__(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        n: int,
        sampling: Sampling | None = None,
        actor=None,
        enough: Callable[[EarlyScores], bool] | None = None,
        tree: TurnTree | None = None,
    ) -> tuple[Batch, RewardReport]:
        """n scored trajectories of each prompt, one after another, and their report.

        Args:
          n: rows of each prompt; an episode takes one for each seat and row of its log.
          sampling: how tokens are drawn; default: by the config.
          actor: who draws them; default: the policy.
          enough: enough(early_scores) -> bool stops decoding; rows that have not ended are aborted
            and not scored. On several hosts it reads its argument alone, so that all hosts stop at
            the same dispatch. Episodes, and rewards that score whole batches, go on to their ends.
          tree: where episodes branch; n counts the rows of its leaves then, and the rows that are
            returned are those of its nodes.
        """
        if self.function is not None:
            options = dict(sampling=sampling, actor=actor, enough=enough, tree=tree)
            arguments = {name: value for name, value in options.items() if value is not None}
            return _call_wrapper(self.function, prompts, key, n=n, **arguments)
        actor, sampling = self._asked(actor, sampling)
        landed = self.landed if tree is None else None  # no tree is decoded in flight
        if landed is not None and landed.is_of(actor, prompts, sampling, n):
            self.landed.taken = True
            return self.landed.result
        return self.player.play(actor, prompts, key, sampling, n=n, enough=enough, tree=tree)

    def branch(
        self,
        prompts: Prompts,
        batch: Batch,
        rows,
        at,
        key: jax.Array,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        actor=None,
    ) -> tuple[Batch, RewardReport]:
        """Samples n continuations of rows [M] of `batch` [B, S] behind the first at [M] tokens of
        their responses (`Actor.branch`), and scores them as whole responses.

        Args:
          prompts: the prompts that `batch` answers.
          batch: B rows of S tokens.
          rows: [M], the rows to go on with.
          at: [M], how many tokens of the row's response are kept.
          key: row r draws with fold_in(key, r).
          n: continuations per branch.
          sampling: None = the rollout's.
          actor: None = the step's.

        Returns the batch of M n rows, whose `group` is the index into `prompts`, and the report.
        Another M is another program. Raises InputError with an environment, and for rows whose
        prompt is not in `prompts`.
        """
        if self.player.has_turns:
            fix = "algorithm.collect='turn_tree()' branches episodes"
            raise InputError("branches of responses with an environment", fix=fix)
        group = fetch(batch.group)
        is_known = group < len(prompts.records)
        if not is_known[np.asarray(rows)].all():
            row = np.asarray(rows)[~is_known[np.asarray(rows)]].tolist()[:8]
            raise InputError(
                "branches of rows whose prompt is not known",
                value=row,
                fix="continue rows of this step's own prompts alone",
            )
        starts = np.asarray(prompts.response_starts)[np.where(is_known, group, 0)]
        actor, sampling = self._asked(actor, sampling)
        return self.score(actor.branch(batch, rows, at, starts, key, sampling, n=n), prompts)

    def score(self, batch: Batch, prompts: Prompts) -> tuple[Batch, RewardReport]:
        """Scores a batch [B, S] of responses that others made. Returns it with rewards,
        and its report."""
        return self.player.score(batch, prompts)

    def wrapped(self, function: Callable) -> "TrajectorySampler":
        """Returns the sampler that calls function(prompts, key, *, n, ...) -> (batch, report) when
        it is called, with those of the options `sampling`, `actor`, `enough` and `tree` that the
        caller names. The function asks this sampler, and changes what it returns.

        `branch`, `score`, `outcome_alone` and `player` stay as they are, so that a rollout that
        needs more than the call, such as `vine`, may be handed the result.
        """
        return dataclasses.replace(self, function=function)

    def outcome_alone(self) -> "TrajectorySampler":
        """Returns the sampler that scores as an evaluation does: without scores of lines, rubrics
        that evolve, costs, and the function of `wrapped`."""
        player = self.player.outcome_alone()
        return dataclasses.replace(self, player=player, landed=None, function=None)

    def _asked(self, actor, sampling: Sampling | None) -> tuple:
        return self.actor if actor is None else actor, sampling or self.sampling


def require_sampler(sample: Callable, by: str) -> TrajectorySampler:
    """Returns `sample`, of which the rollout `by` needs more than the call. Raises InputError for a
    plain function, which has no more."""
    if isinstance(sample, TrajectorySampler):
        return sample
    raise InputError(
        f"{by} is handed a plain function as `sample`",
        value=getattr(sample, "__name__", type(sample).__name__),
        rule="it asks for more than trajectories of prompts: sample.branch, sample.score or "
        "sample.player, which a function does not have",
        fix="hand on sample.wrapped(function)",
    )


def _call_wrapper(function: Callable, prompts, key, **options) -> tuple[Batch, RewardReport]:
    """Calls the function of `TrajectorySampler.wrapped`. Raises InputError if it does not take the
    options, or returns something else."""
    label = f"sample.wrapped({getattr(function, '__name__', type(function).__name__)})"
    try:
        inspect.signature(function).bind(prompts, key, **options)
    except TypeError as error:
        raise InputError(
            f"{label} does not take what it is called with",
            value=", ".join(options),
            rule=f"{error}{location_of(function)}",
            fix="def function(prompts, key, **options): ... sample(prompts, key, **options)",
        ) from error
    result = function(prompts, key, **options)
    match result:
        case (Batch(), RewardReport()):
            return result
    raise InputError(
        f"{label} returns the wrong thing",
        value=type(result).__name__,
        rule=f"it returns (batch, report), as sample does{location_of(function)}",
        fix="return batch, report",
    )


def player_of(scorer: Player | Reward | Callable | None) -> Player:
    """Returns a player as it is; the player of responses that a Reward or a function (batch,
    prompts) -> (batch, report) scores, or nobody if that is None."""
    if isinstance(scorer, Player):
        return scorer
    if isinstance(scorer, Reward):
        return Responses(scorer)
    return Responses(FunctionReward(_unscored if scorer is None else scorer))


def _unscored(batch: Batch, prompts: Prompts) -> tuple[Batch, RewardReport]:
    return batch, RewardReport()


def make_sample(
    actor,
    scorer: Player | Reward | Callable | None,
    sampling: Sampling,
    landed: Landed | None = None,
) -> TrajectorySampler:
    """Returns the `sample` of a player, or of responses that a reward scores (`player_of`)."""
    return TrajectorySampler(player_of(scorer), actor, sampling, landed)
