"""Rollouts: prompts -> scored trajectories. `algorithm.collect` names one of their functions.

sample: what a rollout samples by, made of a player and a reward. players: responses, episodes of an
environment, searched responses. flight: trajectories that outlive the step in which they began.
rules: the rollouts. scoring: rewards, judges, scores of lines, reports.
"""

from rljax.rollout.players.episodes.episodes import Episodes
from rljax.rollout.players.episodes.log import EpisodeRules
from rljax.rollout.players.responses import Responses
from rljax.rollout.players.searched import SearchActor
from rljax.rollout.rollout import Rollout, RolloutConfig, check_rows, run_rollout, widened
from rljax.rollout.rules.against import AgainstOpponent, GeometricMixture, against, sampled_by_actor
from rljax.rollout.rules.baseline_response import with_baseline_response
from rljax.rollout.rules.collect import active, dynamic, first_live, once
from rljax.rollout.rules.demonstration import with_demonstration
from rljax.rollout.rules.greedy import greedy_baseline
from rljax.rollout.rules.hinted import with_hint
from rljax.rollout.rules.search import critic_search, guided_search, search
from rljax.rollout.rules.special_token import smallest_advantage, special_token
from rljax.rollout.rules.turn_tree import turn_tree
from rljax.rollout.rules.vine import vine
from rljax.rollout.sample import Landed, Player, TrajectorySampler, make_sample, player_of
from rljax.rollout.scoring.best_seen import BestSeen
from rljax.rollout.scoring.judge import MeshJudge
from rljax.rollout.scoring.process import ProcessScorer, TokenTexts
from rljax.rollout.scoring.report import (
    RewardInput,
    RewardReport,
    ScoredRow,
    extraction_failed_fraction,
)
from rljax.rollout.scoring.reward import EarlyScores, ModelScorer, Reward

__all__ = [
    "AgainstOpponent",
    "BestSeen",
    "EarlyScores",
    "Episodes",
    "GeometricMixture",
    "Landed",
    "MeshJudge",
    "ModelScorer",
    "Player",
    "ProcessScorer",
    "Responses",
    "Reward",
    "RewardReport",
    "Rollout",
    "RolloutConfig",
    "EpisodeRules",
    "RewardInput",
    "ScoredRow",
    "SearchActor",
    "TokenTexts",
    "TrajectorySampler",
    "active",
    "against",
    "check_rows",
    "critic_search",
    "dynamic",
    "extraction_failed_fraction",
    "first_live",
    "greedy_baseline",
    "guided_search",
    "make_sample",
    "once",
    "player_of",
    "run_rollout",
    "sampled_by_actor",
    "search",
    "smallest_advantage",
    "special_token",
    "turn_tree",
    "vine",
    "widened",
    "with_baseline_response",
    "with_demonstration",
    "with_hint",
]
