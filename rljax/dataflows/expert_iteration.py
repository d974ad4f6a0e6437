"""Expert iteration: the policy learns the result of a search by itself, and a critic, if the search
uses one, learns the returns (arXiv 1705.08439; AlphaZero, 1712.01815)."""

from typing import Literal

from rljax.contracts import contract
from rljax.dataflows.steps import compute_advantages, filter_rows, shape_rewards
from rljax.learn.metrics import batch_metrics
from rljax.losses.policy import negative_log_likelihood
from rljax.losses.visit_counts import visit_cross_entropy
from rljax.roles import program


def _reads(options: dict) -> tuple[str, ...]:
    visits = ("target_ids", "target_probs") if options["targets"] == "visits" else ()
    return ("rewards", "scores", "group", *visits)


@contract(safe=True, reads=_reads, fills=("values",))
@program
def expert_iteration(
    batch,
    key,
    cfg,
    *,
    actor,
    critic=None,
    reference=None,
    targets: Literal["visits", "tokens"] = "visits",
):
    """The policy learns the search's choices. targets "visits": the cross-entropy to the shares of
    the visits; "tokens": the negative log-likelihood of the tokens that the search chose. The
    advantage is used only for the critic's returns."""
    if reference is not None:
        batch = batch.replace(ref_logprobs=reference.logprobs(batch, cfg.steps))
    if critic is not None:
        batch = batch.replace(values=critic.values(batch, cfg.steps))
    rewarded = shape_rewards(batch, cfg)
    batch = compute_advantages(batch, rewarded, cfg)
    metrics = batch_metrics(batch, rewarded, actor.state.step, correct_at=cfg.correct_at)
    learned, filtering = filter_rows(batch, batch, cfg)
    roles = {}
    if critic is not None:
        roles["critic"], fitted = critic.update(learned, cfg.value_loss, **cfg.critic_options)
        metrics |= fitted
    loss = visit_cross_entropy if targets == "visits" else negative_log_likelihood
    actor, fitted = actor.update(learned, loss, **cfg.update_options(None))
    return {**roles, "actor": actor}, {**metrics, **filtering, **fitted}
