"""Rollouts: prompts -> scored trajectories. `algorithm.collect` names one of these functions.

collect: once, dynamic, active, first_live. turn_tree: episodes that branch where turns end.
greedy: the greedy response's score as a baseline. searched: samples by tree search.
vine: values of states by sampling from them. special_token: responses anew from their weakest
token.
against: half of the samples from an opponent. baseline_response: a row of each prompt that is its
baseline response. reward, judge, process: rewards of samples.
best_seen: the best score of each prompt in the run.
environment, episodes, episode_rows: episodes of several turns in place of samples.
"""

from rljax.rollout.against import AgainstOpponent, GeometricMixture, against, sampled_by_actor
from rljax.rollout.baseline_response import with_baseline_response
from rljax.rollout.beside import BesideReference
from rljax.rollout.best_seen import BestSeen
from rljax.rollout.branch import branch_scored
from rljax.rollout.collect import active, dynamic, first_live, once
from rljax.rollout.environment import Environment
from rljax.rollout.episodes import Rules
from rljax.rollout.greedy import greedy_baseline
from rljax.rollout.judge import MeshJudge
from rljax.rollout.process import ProcessScorer, TokenTexts
from rljax.rollout.report import RewardReport, Sample, ScoredRow, extraction_failed_fraction
from rljax.rollout.reward import EarlyScores, ModelScorer, Reward
from rljax.rollout.rollout import Rollout, RolloutConfig, run_rollout, widened
from rljax.rollout.scored import sample_scored
from rljax.rollout.searched import Searching, critic_search, guided_search, search
from rljax.rollout.special_token import smallest_advantage, special_token
from rljax.rollout.turn_tree import turn_tree
from rljax.rollout.vine import vine

__all__ = [
    "AgainstOpponent",
    "BesideReference",
    "BestSeen",
    "EarlyScores",
    "Environment",
    "GeometricMixture",
    "MeshJudge",
    "ModelScorer",
    "ProcessScorer",
    "Reward",
    "RewardReport",
    "Rollout",
    "RolloutConfig",
    "Rules",
    "Sample",
    "ScoredRow",
    "Searching",
    "TokenTexts",
    "active",
    "against",
    "branch_scored",
    "critic_search",
    "dynamic",
    "extraction_failed_fraction",
    "first_live",
    "greedy_baseline",
    "guided_search",
    "once",
    "run_rollout",
    "sample_scored",
    "sampled_by_actor",
    "search",
    "smallest_advantage",
    "special_token",
    "turn_tree",
    "vine",
    "widened",
    "with_baseline_response",
]
