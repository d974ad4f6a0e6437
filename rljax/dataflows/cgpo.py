"""CGPO: policy optimization under the constraints of judges, for several tasks at once, each with
its own optimizer and weight (arXiv 2409.20370)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax.batch import Batch, masked_mean
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import PlainText, component_in, contract, is_zero, spec
from rljax.correction import bypass_old_logprobs
from rljax.dataflows.online_dpo import rows_at, with_reference
from rljax.dataflows.steps import rescaled_steps
from rljax.errors import InputError
from rljax.learn.metrics import reference_kl, sample_metrics
from rljax.losses.constrained import constrained_policy_loss
from rljax.metric import Metric
from rljax.roles import program
from rljax.shaping.constrained import GroupedResponses, Targets

_OF_A_STEP = {
    "cgpo/compliant_fraction": Metric("samples that satisfy all judges", "share", "rises to 1"),
    "cgpo/calibrated_reward": Metric(
        "sigmoid(reward - reward of the baseline response)", "0 to 1", "rises above 0.5"
    ),
    "cgpo/skipped_prompts": Metric("prompts that nothing is learned from", "prompts", "falls"),
    "cgpo/baseline_compliant_fraction": Metric(
        "baseline responses that satisfy all judges", "share"
    ),
    "cgpo/kl_factor": Metric(
        "factor max(1 - log-ratio / kl_max, 0) on the reward (crpg)",
        "x",
        "1, falling slowly; at 0 the policy is kl_max from the reference",
    ),
    "cgpo/regularised_reward": Metric(
        "mean of the calibrated reward x KL factor, 0 where a judge fails (crpg)", "", "rises"
    ),
    "cgpo/violating_rejected_fraction": Metric(
        "pairs whose rejected sample fails a judge (codpo)", "share", "falls"
    ),
    "cgpo/within_kl_fraction": Metric(
        "samples whose log-ratio is at most kl_max (crraft)", "share", "above 0.5"
    ),
    "cgpo/grad_norm": Metric(
        "gradient norm of a task's own loss, before its weight",
        "",
        "of one order in all tasks, else see task_weights",
    ),
    "cgpo/baseline_fallbacks": Metric(
        "prompts learned from by their baseline response (crraft)", "prompts", "falls to 0"
    ),
}
METRICS = _OF_A_STEP | {
    f"{name}/*": dataclasses.replace(metric, meaning=f"{metric.meaning}, in task {{}}")
    for name, metric in _OF_A_STEP.items()
}
ConstrainedText = component_in(NAMESPACES["constrained"])


def _rollout(options: dict) -> str:
    # The page refuses tasks that are no pairs.
    names = tuple(pair[0] for pair in options["tasks"] if isinstance(pair, tuple) and pair)
    return f"with_baseline_response(tasks={names!r})"


@contract(
    safe=True,
    reads=("rewards", "scores", "group", "reward_parts", "task"),
    fills=(),
    rollout=_rollout,
    one_version=True,
)
@program
def cgpo(
    batch,
    key,
    cfg,
    *,
    actor,
    reference,
    optimizer: ConstrainedText = "crpg()",
    tasks: tuple[tuple[PlainText, ConstrainedText], ...] = (),
    task_weights: tuple[float, ...] = (),
    gradient_norms: bool = False,
):
    """The gradient of sum_l rho_l g_l, g_l the mean of what the optimizer of task l learns from.

    `optimizer` (rljax.shaping.constrained: crpg, codpo, crraft) is that of all prompts, or of each
    of `tasks`, pairs (pattern of data_source, optimizer); "" is `optimizer`. rho: task_weights,
    none = equal. A sample complies where all parts of its reward are 1 (rljax.rewards.with_judges).
    The last row of each prompt is its baseline response (rljax.rollout.with_baseline_response).
    `gradient_norms`: the metric |g_l| of each task, by one more backward pass for each of them.
    """
    names, optimizers, weights = _tasks(optimizer, tasks, task_weights)
    sampled, batch = batch, with_reference(batch, cfg, reference)
    batch, load = _with_old_logprobs(batch, cfg, actor)
    chosen = choose(batch, cfg.samples_per_prompt, optimizers, weights)
    examples = chosen.examples
    if cfg.old_logprobs == "sampler":  # a baseline response has none of the policy's
        examples = examples.replace(old_logprobs=None)
    sizes = batch.rows, examples.rows, spec(chosen.loss).rows
    cfg = cfg.replace(steps=rescaled_steps(cfg.steps, *sizes, actor.row_unit))
    examples = actor.balanced(examples)
    norms = _gradient_norms(actor, examples, chosen, cfg) if gradient_norms else ({},) * len(names)
    new_actor, learned = actor.update(examples, chosen.loss, **cfg.update_options())
    is_baseline = jnp.arange(batch.rows) % cfg.samples_per_prompt == cfg.samples_per_prompt - 1
    samples = sampled.replace(
        mask=batch.mask * ~is_baseline[:, None], ref_logprobs=batch.ref_logprobs
    )
    metrics = sample_metrics(samples, actor.state.step, correct_at=cfg.correct_at)
    metrics |= reference_kl(samples, batch.old_logprobs)
    metrics |= _task_metrics(chosen, names, norms)
    return {"actor": new_actor}, {**metrics, **load, **learned}


def _tasks(optimizer: str, tasks, task_weights):
    """Returns the names of the tasks, "" for a single one without a name; their optimizers; their
    weights."""
    pairs = tasks or (("", ""),)
    if not all(isinstance(p, tuple) and [type(x) for x in p] == [str, str] for p in pairs):
        raise InputError(
            "cgpo(tasks)",
            value=tasks,
            rule="pairs of a data source and its optimizer",
            fix="tasks=(('my_set', 'crpg(kl_max=5.0)'),): one pair needs the comma behind it",
        )
    weights = task_weights or (1 / len(pairs),) * len(pairs)
    numbers = all(isinstance(w, int | float) and w >= 0 for w in weights)
    if len(weights) != len(pairs) or not numbers or not sum(weights):
        rule = f"one number of at least 0 for each of the {len(pairs)} tasks, one of them above"
        raise InputError(
            "cgpo(task_weights)",
            value=task_weights,
            rule=rule,
            fix=f"task_weights={(1.0,) * len(pairs)}, or leave it out: all tasks count alike",
        )
    home = NAMESPACES["constrained"]
    return [n for n, _ in pairs], [resolve(text or optimizer, home) for _, text in pairs], weights


def _with_old_logprobs(batch, cfg, actor):
    """Returns the batch with the log-probs of the policy that it begins with, and the load of its
    experts."""
    if cfg.old_logprobs == "sampler":
        if not is_zero(cfg.trust_region):
            raise InputError(
                "algorithm.trust_region",
                value=cfg.trust_region,
                rule="a baseline response has no log-probs of the sampler",
                fix="algorithm.old_logprobs='recomputed'",
            )
        return bypass_old_logprobs(batch), {}
    old_logprobs, load = actor.logprobs_and_load(batch, cfg.steps)
    return batch.replace(old_logprobs=old_logprobs), load


def responses_of(batch, rows: int):
    """Returns (the samples and the baseline responses of a batch with `rows` rows for each of P
    prompts, fields [P, rows - 1] and [P]; the task of each prompt [P]). Prompts whose baseline has
    no known reward are not live. Raises InputError for a batch of episodes, and for one without
    reward_parts, task, ref_logprobs or old_logprobs."""
    batch.require("reward_parts", "task", "ref_logprobs", "old_logprobs", by="cgpo")
    if batch.episode is not None:
        raise InputError(
            "cgpo of an environment",
            rule="it learns from single responses",
            fix="clear environment.function, or use dataflow=grpo, which learns from episodes",
        )

    def of(x):
        return x.reshape(-1, rows)

    policy = batch.mask > 0
    parts = batch.reward_parts
    compliant = of(jnp.all(jnp.isnan(parts) | (parts >= 1), axis=1))
    gap = jnp.where(policy, batch.old_logprobs - batch.ref_logprobs, 0.0)
    live, tokens = of(jnp.any(policy, axis=1)), of(jnp.sum(policy, axis=1))
    has_baseline, scores = live[:, -1], of(batch.scores)
    log_ratios = of(jnp.sum(gap, axis=1))
    responses = GroupedResponses(
        rewards=scores[:, :-1],
        compliant=compliant[:, :-1],
        log_ratios=log_ratios[:, :-1],
        tokens=tokens[:, :-1],
        live=live[:, :-1] & has_baseline[:, None],
        baseline_rewards=scores[:, -1],
        baseline_compliant=compliant[:, -1] & has_baseline,
    )
    return jax.lax.stop_gradient(responses), of(batch.task)[:, 0]


class Chosen(NamedTuple):
    """The examples of a batch: the rows that the targets of the tasks name, k for each of P
    prompts, with their weights as advantages [P k, S]; their loss; the mask [P, k] of those
    that are kept."""

    examples: Batch
    loss: Callable
    keep: jax.Array
    responses: GroupedResponses
    task: jax.Array
    targets: list[Targets]


def choose(batch: Batch, samples_per_prompt: int, optimizers, weights) -> Chosen:
    """Asks the optimizer of each task for examples of its prompts. Returns them with a loss whose
    mean over all examples is sum_l weights_l (the mean over the examples of task l)."""
    responses, task = responses_of(batch, samples_per_prompt)
    targets = [optimise(responses.where(task == i)) for i, optimise in enumerate(optimizers)]
    width = max(target.rows.shape[1] for target in targets)

    def of_own_task(arrays):
        padded = jnp.stack([jnp.pad(x, [(0, 0), (0, width - x.shape[1])]) for x in arrays])
        return padded[task, jnp.arange(task.shape[0])]

    rows, advantages, keep = map(of_own_task, list(zip(*targets, strict=True))[:3])
    offsets = jnp.arange(task.shape[0])[:, None] * samples_per_prompt
    examples = rows_at(batch, (offsets + rows).reshape(-1), keep.reshape(-1))
    advantages = jnp.broadcast_to(advantages.reshape(-1, 1), examples.mask.shape)
    pair_betas = tuple(target.pair_beta for target in targets)
    rows_per_example = width if any(pair_betas) else 1
    count = jnp.sum(jnp.any(keep.reshape(-1, rows_per_example), axis=1))
    counts = jnp.stack([jnp.maximum(target.count, 1) for target in targets])
    loss = functools.partial(
        constrained_policy_loss,
        scales=jnp.asarray(weights) * count / counts,
        pair_betas=pair_betas,
        rows_per_example=rows_per_example,
    )
    examples = examples.replace(advantages=advantages)
    return Chosen(examples, loss, keep, responses, task, targets)


def _gradient_norms(actor, examples: Batch, chosen: Chosen, cfg) -> list[dict]:
    """Returns |g_l| of each task at the weights that the batch begins with: g_l is the gradient of
    the mean of the loss over the examples of task l alone, whatever the weight of the task."""
    steps = dataclasses.replace(cfg.steps, rows=examples.rows, epochs=1)
    counted = jnp.any(chosen.keep.reshape(len(chosen.task), -1, spec(chosen.loss).rows), axis=2)
    norms = []
    for i, target in enumerate(chosen.targets):
        task_examples = examples.replace(mask=examples.mask * (examples.task == i)[:, None])
        # An update divides by the examples that are live, a task by what its optimizer counts.
        live = jnp.sum(counted & (chosen.task == i)[:, None])
        scale = live / jnp.maximum(target.count, 1)
        loss = functools.partial(chosen.loss, scales=jnp.full(len(chosen.targets), scale))
        # The new actor is dropped: what is left of the update in the program is the gradient.
        _, update_metrics = actor.update(task_examples, loss, steps=steps, reduction=cfg.reduction)
        norms.append({"grad_norm": update_metrics[f"{actor.prefix}grad_norm"]})
    return norms


def _task_metrics(chosen: Chosen, names, norms) -> dict:
    """Returns metrics of the samples and the baseline responses of all tasks, and of each that has
    a name."""
    metrics, as_float = {}, lambda x: x.astype(jnp.float32)
    responses, skipped = chosen.responses, ~jnp.any(chosen.keep, axis=1)

    def add(of_task: str, in_task, extra: dict):
        live = responses.live & in_task[:, None]
        values = {
            "compliant_fraction": masked_mean(as_float(responses.compliant), live),
            "calibrated_reward": masked_mean(responses.calibrated, live),
            "skipped_prompts": jnp.sum(as_float(skipped & in_task)),
            "baseline_compliant_fraction": masked_mean(
                as_float(responses.baseline_compliant), jnp.any(live, axis=1)
            ),
            **extra,
        }
        metrics.update({f"cgpo/{name}{of_task}": value for name, value in values.items()})

    several = bool(names[0])
    add("", jnp.ones_like(skipped), {} if several else {**chosen.targets[0].metrics, **norms[0]})
    for i, name in enumerate(names if several else ()):
        add(f"/{name}", chosen.task == i, {**chosen.targets[i].metrics, **norms[i]})
    return metrics
