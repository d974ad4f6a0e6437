"""Advantages, whitening and PF-PPO weights against verl and TRL."""

import functools

import jax.numpy as jnp
import numpy as np
from conftest import Compiled

from golden_checks.common import response_batch
from rljax import advantages as op_by_op
from rljax import batch as batches
from rljax.losses.kl import kl_estimate
from rljax.shaping import resampling

# Traced once for cases of one shape; and one program where a check computes on the host in between.
advantages = Compiled(op_by_op)


def mask_of(case):
    return np.asarray(case.inputs["response_mask"]) > 0


def carried(case, dtype, scores=None, **fields):
    """A batch whose rows carry verl's score: the sum of ALL token rewards, also those off the mask.

    Ours reads rewards on policy tokens alone, and `scores` where a row has none: the sum is put on
    the first policy token, which leaves every estimator of whole rows its own work.
    """
    mask = mask_of(case)
    if scores is None:
        scores = np.asarray(case.inputs["token_level_rewards"], np.float64).sum(axis=1)
    first = (np.cumsum(mask, axis=1) == 1) & mask
    rewards = np.where(first, np.asarray(scores)[:, None], 0.0)
    return response_batch(mask, dtype, rewards=rewards, scores=scores, **fields)


def alone(group):
    _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
    return counts[inverse] == 1


def both(got, keep=None):
    """verl returns an outcome advantage twice, the second time as `returns`."""
    got = got if keep is None else (got, keep)
    return {"output/advantages": got, "output/returns": got}


# -- later rewards


def gae(case, dtype):
    x, p, mask = case.inputs, case.params, mask_of(case)
    batch = response_batch(mask, dtype, rewards=x["token_level_rewards"], values=x["values"])
    options = {k: p[k] for k in ("gamma", "lam") if k in p}
    raw, returns = advantages.gae(batch, **options, whiten=False)
    whitened, _ = advantages.gae(batch, **options)
    # verl leaves numbers off the mask.
    return {
        "output/advantages": (whitened, mask),
        "output/advantages_raw": (raw, mask),
        "output/returns": (returns, mask),
    }


def reinforce_plus_plus(case, dtype):
    x, mask = case.inputs, mask_of(case)
    gamma = case.params.get("gamma", 1.0)
    batch = response_batch(mask, dtype, rewards=x["token_level_rewards"])
    returns = advantages.reinforce(batch, gamma=gamma)
    return {
        "output/advantages": (advantages.reinforce_plus_plus(batch, gamma=gamma), mask),
        "output/advantages_raw": (returns, mask),
        "output/returns": (returns, mask),
    }


def remax(case, dtype):
    x, mask = case.inputs, mask_of(case)
    batch = response_batch(mask, dtype, rewards=x["token_level_rewards"])
    greedy = jnp.broadcast_to(jnp.asarray(x["reward_baselines"], dtype)[:, None], mask.shape)
    returns = advantages.reinforce(batch)
    got = advantages.remax(batch.replace(values=greedy))
    return {"output/advantages": (got, mask), "output/returns": (returns, mask)}


# -- groups. Ours gives a group of one 0; verl mostly its raw score: singleton="raw" there.


def grpo(case, dtype, group="index"):
    p, index = case.params, case.inputs[group]
    eps = p.get("epsilon")
    eps = 1e-6 if eps is None else eps
    std = "sample" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    batch = carried(case, dtype, group=index)
    got = advantages.group_relative(batch, std=std, eps=eps, singleton="raw")
    if std == "sample":
        # verl: mean 0 and std 1 in a group of one, so score / (1 + eps); ours is the score.
        got = jnp.where(jnp.asarray(alone(index))[:, None], got / (1 + eps), got)
    return both(got)


def grpo_passk(case, dtype):
    std = "sample" if case.params.get("norm_adv_by_std_in_grpo", True) else "none"
    eps = case.params.get("epsilon") or 1e-6
    batch = carried(case, dtype, group=case.inputs["index"])
    return both(advantages.best_of_group(batch, std=std, eps=eps))


def rloo(case, dtype, singleton="raw"):
    batch = carried(case, dtype, group=case.inputs["index"])
    return both(advantages.rloo(batch, singleton=singleton))


def opo(case, dtype):
    batch = carried(case, dtype, group=case.inputs["index"])
    return both(advantages.opo(batch, singleton="raw"))


def gpg(case, dtype):
    f_norm = case.params.get("f_norm")
    batch = carried(case, dtype, group=case.inputs["index"])
    f_norm = 1.0 if f_norm is None else f_norm
    return both(advantages.gpg(batch, f_norm=f_norm, alpha="nonzero", singleton="raw"))


def reinforce_plus_plus_baseline(case, dtype):
    batch = carried(case, dtype, group=case.inputs["index"])
    raw = advantages.group_relative(batch, std="none", singleton="raw")
    whitened = advantages.reinforce_plus_plus_baseline(batch, singleton="raw")
    kept = {"output/advantages_raw": raw} if "advantages_raw" in case.outputs else {}
    return {**both(whitened), **kept}


def gdpo(case, dtype):
    x, p, mask = case.inputs, case.params, mask_of(case)
    eps = p.get("epsilon")
    eps = 1e-6 if eps is None else eps
    std = "sample" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    weights = p.get("weights")
    weights = () if weights is None else tuple(float(w) for w in np.asarray(weights).ravel())
    parts = np.asarray(x["components"]).T
    batch = response_batch(mask, dtype, group=x["index"], reward_parts=parts)
    options = dict(weights=weights, std=std, eps=eps)
    raw = advantages.gdpo(batch, **options, singleton="raw", whiten=False)
    whitened = advantages.gdpo(batch, **options, singleton="raw")
    if std == "sample":
        # As in `grpo`: verl divides a group of one by 1 + eps.
        zero = advantages.gdpo(batch, **options, whiten=False)
        raw = zero + (raw - zero) / (1 + eps)
        whitened = batches.whiten(raw, batch.mask)
    return {**both(whitened), "output/advantages_raw": raw}


def multi_trajectory(case, dtype):
    """GRPO over the last row of each session (uid, session); its scalar goes to all of its rows."""
    x, mask = case.inputs, mask_of(case)
    uid, session, order = (np.asarray(x[k]) for k in ("uid", "session", "trajectory"))
    same = (uid[:, None] == uid[None, :]) & (session[:, None] == session[None, :])
    last = np.array([max(np.flatnonzero(row), key=lambda j: order[j]) for row in same])
    chosen = np.unique(last)
    scores = np.asarray(x["token_level_rewards"], np.float64).sum(axis=1)
    p = case.params
    std = "sample" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    eps = p.get("epsilon", 1e-6)
    # One token per session.
    batch = response_batch(
        np.ones((len(chosen), 1)), dtype, group=uid[chosen], rewards=scores[chosen][:, None]
    )
    scalar = advantages.group_relative(batch, std=std, eps=eps, singleton="raw")[:, 0]
    if std == "sample":
        scalar = jnp.where(jnp.asarray(alone(uid[chosen])), scalar / (1 + eps), scalar)
    got = scalar[np.searchsorted(chosen, last)][:, None] * jnp.asarray(mask, dtype)
    return both(got)


def optimal_token_baseline(case, dtype, multi_turn):
    x, p, mask = case.inputs, case.params, mask_of(case)
    batch = response_batch(
        mask,
        dtype,
        rewards=x["token_level_rewards"],
        group=x["index"],
        old_logprobs=x["old_log_probs"],
        sum_pi_squared=x["sum_pi_squared"],
        weights=x.get("rollout_is_weights"),
    )
    options = dict(multi_turn=multi_turn, singleton="raw", eps=p.get("epsilon", 1e-8))
    returns = advantages.reinforce(batch)
    tail = bool(p.get("handle_zero_tail", True))
    length = mask.sum(axis=1)
    holes = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    if not (tail and holes and not multi_turn):
        got = advantages.optimal_token_baseline(batch, zero_tail=tail, **options)
        if multi_turn:
            # verl's multi-turn variant leaves rows without tokens out of a group before it looks
            # for groups of one.
            index = np.asarray(x["index"])
            mates = ((index[:, None] == index[None, :]) & (length > 0)[None, :]).sum(axis=1)
            got = jnp.where((mates == 1)[:, None], returns, got)
        return {"output/advantages": (got, mask), "output/returns": (returns, mask)}
    # verl compares columns with counts of tokens, which holes set apart; ours looks which rows have
    # a token in the column. Its rule: the one longest row has no baseline from the second greatest
    # count on.
    got = advantages.optimal_token_baseline(batch, zero_tail=False, **options)
    free = np.zeros(mask.shape, bool)
    for g in np.unique(x["index"]):
        rows = np.flatnonzero(np.asarray(x["index"]) == g)
        ordered = np.sort(length[rows])
        if len(rows) > 1 and ordered[-1] > ordered[-2]:
            free[rows[np.argmax(length[rows])], ordered[-2] :] = True
    got = jnp.where(free & mask, returns, got)
    return {"output/advantages": (got, mask), "output/returns": (returns, mask)}


def prime(case, dtype):
    x, p, mask = case.inputs, case.params, mask_of(case)
    acc = np.asarray(x["acc"], np.float64)
    group = np.arange(len(acc)) // int(p["n_samples"])
    last = (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1) & mask
    batch = response_batch(
        mask, dtype, group=group, process_rewards=x["rm_scores"], rewards=last * acc[:, None]
    )
    options = dict(process_coef=p["reward_dpo_coef"], outcome_coef=p["reward_gt_coef"])
    returns = advantages.prime(batch, **options, whiten=False)
    got = advantages.prime(batch, **options)
    return {"output/advantages": (got, mask), "output/returns": (returns, mask)}


# -- statistics and weights


def masked_stats(case, dtype):
    mask = np.asarray(case.inputs["mask"]) > 0
    x, m = jnp.asarray(case.inputs["values"], dtype), jnp.asarray(mask, dtype)
    n, rows = np.sum(mask), np.sum(mask, axis=1)
    # verl divides by n + 1e-8.
    share, row_share = n / (n + 1e-8), rows / (rows + 1e-8)
    return {
        "output/masked_sum": batches.masked_sum(x, m),
        "output/masked_sum_rows": batches.masked_sum(x, m, axis=1),
        "output/masked_mean": batches.masked_mean(x, m) * share,
        "output/masked_mean_rows": batches.masked_mean(x, m, axis=1) * row_share,
        "output/masked_var_biased": batches.masked_variance(x, m) * share,
        "output/masked_var_unbiased": batches.masked_variance(x, m, ddof=1),
        "output/masked_whiten": (batches.whiten(x, m), mask),
        "output/masked_whiten_keep_mean": (batches.whiten(x, m, shift_mean=False), mask),
    }


def pf_ppo_weights(case, dtype):
    scores = jnp.sum(jnp.asarray(case.inputs["token_level_scores"], dtype), axis=1)
    p = case.params
    got = resampling.score_weights(
        scores, method=p["reweight_method"], power=p.get("weight_pow", 2.0)
    )
    return {"output/weights": got}


# -- TRL


def one_token_rows(values, group, dtype, **fields):
    """A batch of rows of one token with these rewards; a NaN leaves its group, as a failed reward
    does here."""
    values, group = np.asarray(values, np.float64), np.array(group)
    failed = np.isnan(values)
    group[failed] = group.max() + 1 + np.arange(failed.sum())
    return response_batch(
        np.ones((len(values), 1)),
        dtype,
        group=group,
        rewards=np.where(failed, 0.0, values)[:, None],
        **fields,
    )


def trl_zero_std(rewards, group):
    """Share of rows in groups whose sample std is 0; NaN where fewer than two rewards are."""
    zero = []
    for g in group:
        known = rewards[(group == g) & ~np.isnan(rewards)]
        zero.append(len(known) > 1 and np.std(known, ddof=1) < 1e-8)
    return np.mean(zero)


def nan_std(x):
    x = np.asarray(x, np.float64)
    return np.nanstd(x, ddof=1)


def trl_grpo_advantages(case, dtype):
    p, parts = case.params, np.asarray(case.inputs["rewards_per_func"], np.float64)
    weights = np.asarray(case.inputs.get("reward_weights", np.ones(parts.shape[1])), np.float64)
    group = np.arange(len(parts)) // int(p["num_generations"])
    nothing = np.isnan(parts).all(axis=1)
    total = np.where(nothing, np.nan, np.nansum(parts * weights, axis=1))
    scale = p.get("scale_rewards", "group")
    if p.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        batch = one_token_rows(total, group, dtype, reward_parts=parts).replace(
            group=jnp.asarray(group, jnp.int32)
        )
        got = advantages.gdpo(batch, weights=tuple(map(float, weights)), eps=1e-4, whiten=False)[
            :, 0
        ]
        # TRL then normalises over rows; ours whitens over tokens.
        known = np.where(nothing, np.nan, np.asarray(got, np.float64))
        got = jnp.where(nothing, 0.0, (got - np.nanmean(known)) / (nan_std(known) + 1e-4))
        zero = float(nan_std(known) < 1e-8)
    else:
        batch = one_token_rows(total, group, dtype)
        std = "sample" if scale == "group" else "none"
        got = advantages.group_relative(batch, std=std, eps=1e-4)[:, 0]
        zero = trl_zero_std(total, group)
        if scale == "batch":
            # The std of the rewards themselves; batch_normalised (ScaleRL) takes that of the
            # centred ones.
            got = got / (nan_std(total) + 1e-4)
            zero = float(nan_std(total) < 1e-8)
    out = {
        "output/advantages": got,
        "metric/reward": np.nanmean(total),
        "metric/reward_std": nan_std(total),
        "metric/frac_reward_zero_std": zero,
    }
    for k in range(parts.shape[1]):
        out[f"metric/rewards.r{k}.mean"] = np.nanmean(parts[:, k])
        out[f"metric/rewards.r{k}.std"] = nan_std(parts[:, k])
    return out


def trl_rloo_advantages(case, dtype):
    x, p = case.inputs, case.params
    rewards = np.asarray(x["rewards"], np.float64)
    low, high = p.get("reward_clip_low"), p.get("reward_clip_high")
    if low is not None or high is not None:
        rewards = np.clip(rewards, low, high)
    batch = response_batch(x["completion_mask"], dtype)
    old = jnp.asarray(x["old_per_token_logps"], dtype)
    old_logps = batches.row_sum(old, batch)
    unclipped = np.asarray(x["rewards"], np.float64)
    out = {"output/old_logps": old_logps, "metric/reward": np.nanmean(unclipped)}
    out["metric/reward_std"] = nan_std(unclipped)
    group = np.arange(len(rewards)) // int(p["num_generations"])
    beta = p.get("beta") or 0.0
    if beta:
        kl = kl_estimate(old, jnp.asarray(x["ref_per_token_logps"], dtype), "k1")
        rewards = rewards - beta * np.asarray(batches.row_sum(kl, batch), np.float64)
        out["metric/kl"] = batches.masked_mean(kl, batch.mask)
    out["metric/frac_reward_zero_std"] = trl_zero_std(rewards, group)
    got = advantages.rloo(one_token_rows(rewards, group, dtype))[:, 0]
    if p.get("normalize_advantages"):
        failed = np.isnan(rewards)
        known = np.where(failed, np.nan, np.asarray(got, np.float64))
        got = jnp.where(failed, 0.0, (got - np.nanmean(known)) / (nan_std(known) + 1e-4))
    return {**out, "output/advantages": got}


def trl_ppo_gae(case, dtype):
    """TRL gives the score to the position behind the last token, which has a value of its own."""
    x, p = case.inputs, case.params
    tokens, positions = ~np.asarray(x["padding_mask"]), ~np.asarray(x["padding_mask_p1"])
    logprobs, ref = jnp.asarray(x["logprobs"], dtype), jnp.asarray(x["ref_logprobs"], dtype)
    penalty = -p["kl_coef"] * kl_estimate(logprobs, ref, p["kl_estimator"])
    width, end = tokens.shape[1], np.asarray(x["sequence_lengths"])
    end = np.where(end + 1 < width, end + 1, end)
    scores = jnp.asarray(x["scores"], dtype)
    rewards = penalty.at[np.arange(len(end)), end].add(scores)
    batch = response_batch(positions, dtype, rewards=rewards, values=x["values"])
    if p.get("whiten_rewards"):
        rewards = batches.whiten(rewards, batch.mask, shift_mean=False)
        batch = batch.replace(rewards=rewards)
    raw, returns = advantages.gae(batch, gamma=p["gamma"], lam=p["lam"], whiten=False)
    return {
        "output/non_score_reward": penalty,
        "output/rewards": rewards,
        "output/advantages_raw": raw,
        "output/returns": returns,
        "output/advantages": batches.whiten(raw, jnp.asarray(tokens, dtype)),
    }


def trl_minillm_advantage(case, dtype):
    """Discounted sum of log teacher - log student from t on, or its mean over those tokens."""
    x, p = case.inputs, case.params
    batch = response_batch(x["mask"], dtype)
    teacher, student = (jnp.asarray(x[k], dtype) for k in ("teacher_logps", "student_logps"))
    gamma = p.get("gamma", 1.0)
    got = advantages.reinforce(batch.replace(rewards=teacher - student), gamma=gamma)
    if not p.get("length_normalization"):
        # TRL discounts from the first token, not from t, unless gamma is 0.
        start = jnp.asarray(gamma or 1.0, dtype) ** jnp.arange(got.shape[1])[None, :]
        return {"output/advantages": got * start}
    # TRL counts a token of padding as 1e-4 of a token.
    everything = response_batch(
        jnp.ones_like(batch.mask), dtype, rewards=jnp.maximum(batch.mask, 1e-4)
    )
    return {"output/advantages": got / advantages.reinforce(everything, gamma=gamma)}


CHECKS = {
    "verl/adv_gae": gae,
    "verl/adv_gdpo": gdpo,
    "verl/adv_gpg": gpg,
    "verl/adv_grpo": grpo,
    "verl/adv_grpo_multi_trajectory": multi_trajectory,
    "verl/adv_grpo_passk": grpo_passk,
    "verl/adv_grpo_vectorized": grpo,
    "verl/adv_opo": opo,
    "verl/adv_optimal_token_baseline": functools.partial(optimal_token_baseline, multi_turn=False),
    "verl/adv_reinforce_plus_plus": reinforce_plus_plus,
    "verl/adv_reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "verl/adv_remax": remax,
    "verl/adv_rloo": rloo,
    "verl/adv_rloo_vectorized": functools.partial(rloo, singleton="zero"),
    "verl/adv_tir_optimal_token_baseline": functools.partial(
        optimal_token_baseline, multi_turn=True
    ),
    "verl/masked_stats": masked_stats,
    "verl/pf_ppo_weights": pf_ppo_weights,
    "verl/recipe_prime_advantage": prime,
    "trl/grpo_advantages": trl_grpo_advantages,
    "trl/minillm_advantage": trl_minillm_advantage,
    "trl/ppo_gae": trl_ppo_gae,
    "trl/rloo_advantages": trl_rloo_advantages,
}
