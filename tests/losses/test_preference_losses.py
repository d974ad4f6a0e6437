"""Preference losses: worked examples, and what holds for every one of them.

Values and gradients of other projects are compared in test_golden.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes, worked_example
from explained import unexplained
from golden_checks.common import response_batch
from namespaces import public_functions, unwrapped

from rljax.components import resolve
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.losses import implicit_reward, preference
from rljax.losses.policy import PolicyOutputs
from rljax.losses.preference import games, pairwise, unpaired
from rljax.losses.preference.dpo import divergence_score

ROWS, TOKENS = 12, 6  # 12 rows: pairs, triples and single rows divide it


@functools.wraps(preference.kto)
def with_kl(policy, batch):
    return preference.kto(policy, batch, 0.3, undesirable_weight=1.3)


@functools.wraps(preference.bco)
def with_delta(policy, batch):
    probability = jnp.linspace(0.1, 0.9, batch.rows, dtype=batch.mask.dtype)
    return preference.bco(policy, batch, 0.1, probability, beta=0.5)


@functools.wraps(preference.xpo)
def with_winners(policy, batch):
    # Rows of a pair are exchanged with it: who won follows from the pair's own scores.
    won = batch.scores[::2] > batch.scores[1::2]
    return preference.xpo(policy, batch, won, alpha=0.01)


PART = functools.partial
OPTIONS = dict(beta=0.5, label_smoothing=0.1, delta=0.05)
LOSSES = {
    **{
        f"dpo_{name}": PART(preference.dpo, losses=(name,), **OPTIONS) for name in pairwise.PER_PAIR
    },
    "dpo_mixed": PART(preference.dpo, losses=("sigmoid", "rpo"), loss_weights=(1.0, 0.3)),
    "dpo_alpha": PART(preference.dpo, divergence="alpha_divergence", divergence_alpha=0.3),
    "dpo_js": PART(preference.dpo, divergence="js_divergence", losses=("ipo",)),
    "dpo_ld": PART(preference.dpo, ld_alpha=0.3, losses=("ipo_sum",)),
    "dpo_wpo": PART(preference.dpo, wpo_weighting=True),
    "dpo_aot": PART(preference.dpo, losses=("aot",), label_smoothing=0.1),
    "dpo_aot_unpaired": PART(preference.dpo, losses=("aot_unpaired",)),
    "dpo_sft": PART(preference.dpo, losses=("sigmoid", "sft")),
    "spin": preference.spin,
    "simpo": PART(preference.simpo, alpha=0.2),
    "cpo": preference.cpo,
    "orpo": PART(preference.orpo, prompt_nll=False),
    "tpo": preference.tpo,
    "kto": with_kl,
    "apo_zero_unpaired": preference.apo_zero_unpaired,
    "bco": with_delta,
    "sppo": PART(preference.sppo, eta=2.0),
    "sppo_online": preference.sppo_online,
    "xpo": with_winners,
    "nash_md": preference.nash_md,
    "implicit_ce": implicit_reward.implicit_reward_classification,
    "implicit_contrast": PART(implicit_reward.implicit_reward_contrast, weighting="rewards"),
}


def sample(seed=0, garbage=0.0, dtype=np.float64):
    """(log-probs, batch) of ROWS rows: a prompt of one token, responses of 1 to 5 tokens, a hole in
    one of them; what is at mask 0 is `garbage`."""
    rng = np.random.default_rng(seed)
    lengths = np.array([5, 3, 2, 5, 4, 1, 3, 3, 5, 2, 4, 5])
    mask = (np.arange(TOKENS)[None] > 0) & (np.arange(TOKENS)[None] <= lengths[:, None])
    mask[0, 2] = False  # a tool's token

    def draw(low, high):
        return np.where(mask, rng.uniform(low, high, mask.shape), garbage)

    logps, ref, old = draw(-3, -0.1), draw(-3, -0.1), draw(-3, -0.1)
    batch = response_batch(
        mask,
        dtype,
        ref_logprobs=ref,
        old_logprobs=old,
        sum_pi_squared=draw(0.1, 0.9),
        scores=rng.uniform(-1, 1, ROWS),
        group=np.arange(ROWS) // 6,
    )
    return jnp.asarray(logps, dtype), batch


CONSTANTS = ("ref_logprobs", "old_logprobs", "scores", "sum_pi_squared")


@functools.cache
def compiled(loss):
    """One program per loss and shape, for all tests that ask for it."""

    def total(logps, fields, batch):
        losses, metrics = loss(PolicyOutputs(logps, jnp.zeros_like(logps)), batch.replace(**fields))
        return jnp.sum(losses), (losses, metrics)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def differentiate(loss, logps, batch):
    """(losses, metrics, d sum / d log-probs, d sum / d each of CONSTANTS)."""
    fields = {n: batch.__dict__[n] for n in CONSTANTS if batch.__dict__[n] is not None}
    (_, (losses, metrics)), (gradient, rest) = compiled(loss)(logps, fields, batch)
    return losses, metrics, gradient, rest


def evaluate(loss, logps, batch):
    """(losses, d sum / d log-probs, metrics)."""
    losses, metrics, gradient, _ = differentiate(loss, logps, batch)
    return losses, gradient, metrics


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def close(a, b, tolerance=1e-9):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


def take(tree, rows):
    """Rows of a batch or of an array."""
    return jax.tree.map(lambda x: x[np.asarray(rows)], tree)


every_loss = pytest.mark.parametrize("name", LOSSES)
# One of each way to read rows; what else differs is compared in test_golden.py.
FEW = ("dpo_sigmoid", "dpo_exo_pair", "dpo_wpo", "orpo", "kto", "nash_md", "implicit_ce")
WHOLE_STEP = ("dpo_aot", "bco", "implicit_contrast")
FEW += WHOLE_STEP
of_few = pytest.mark.parametrize("name", lanes(FEW, [n for n in LOSSES if n not in FEW]))


def test_every_loss_has_a_row():
    """A new loss of the namespace, or of the implicit reward, gets a row in LOSSES."""
    rows = {unwrapped(loss) for loss in LOSSES.values()} | {implicit_reward.group_accuracy}
    for module in (preference, implicit_reward):
        assert [f.__name__ for f in public_functions(module) if f not in rows] == []


# -- what holds for every loss


@every_loss
def test_shapes_and_garbage_at_mask_0(name):
    loss = LOSSES[name]
    wanted = evaluate(loss, *sample())
    examples = ROWS // spec(loss).rows
    assert wanted[0].shape == (examples,)
    assert {m.shape for m in wanted[2].values()} == {(examples,)}
    assert unexplained(wanted[2]) == set()
    assert np.isfinite(wanted[0]).all() and float(jnp.abs(wanted[1]).max()) > 1e-4
    logps, batch = sample(garbage=np.nan)
    got = evaluate(loss, logps, batch)
    close(got, wanted)
    assert not np.asarray(got[1])[np.asarray(batch.mask) == 0].any()


@of_few
def test_columns_of_padding_change_nothing(name):
    logps, batch = sample()

    def widen(x):
        return jnp.pad(x, ((0, 0), (0, 3))) if x.ndim == 2 else x

    wide = evaluate(LOSSES[name], widen(logps), jax.tree.map(widen, batch))
    short = evaluate(LOSSES[name], logps, batch)
    close((wide[0], wide[1][:, :TOKENS], wide[2]), short)


@of_few
def test_examples_permute_and_split(name):
    """Examples permute. A loss splits into halves of the step unless it declares `whole_step`."""
    loss, (logps, batch) = LOSSES[name], sample()
    k = spec(loss).rows
    order = np.array([2, 0, 3, 1, 5, 4, 9, 8, 7, 6, 11, 10])
    order = np.array([i for i in order if i < ROWS // k])
    rows = (order[:, None] * k + np.arange(k)).ravel()
    losses, gradient, _ = evaluate(loss, logps, batch)
    shuffled = evaluate(loss, take(logps, rows), take(batch, rows))
    if "aot" in name:  # a loss of ranks: their order does not matter
        close(jnp.sort(shuffled[0]), jnp.sort(losses))
    elif name != "bco":  # its weights stand beside the batch
        close(shuffled[0], losses[order])
    if name != "bco":
        close(shuffled[1], gradient[rows])
        halves = [
            evaluate(loss, take(logps, half), take(batch, half))[1]
            for half in (np.arange(6), np.arange(6, 12))
        ]
        same = np.allclose(jnp.concatenate(halves), gradient, atol=1e-12)
        # The group's losses split between groups, which these halves are.
        assert same == (not spec(loss).whole_step or name == "implicit_contrast")


@pytest.mark.smoke
@every_loss
def test_only_the_policy_learns(name):
    """No gradient to the reference, the old policy, the scores or the energies."""
    rest = differentiate(LOSSES[name], *sample())[3]
    assert rest.keys() == set(CONSTANTS) and not any(np.asarray(g).any() for g in rest.values())


@every_loss
def test_a_missing_reference_is_named_and_only_read_where_declared(name):
    logps, batch = sample()
    bare = batch.replace(ref_logprobs=None)
    if "ref_logprobs" in spec(LOSSES[name]).reads:
        with pytest.raises(InputError, match="ref_logprobs"):
            LOSSES[name](PolicyOutputs(logps, logps), bare)
    else:
        close(evaluate(LOSSES[name], logps, bare)[0], evaluate(LOSSES[name], logps, batch)[0])


@pytest.mark.parametrize("name", lanes(FEW, [n for n in LOSSES if n not in FEW]))
def test_float32_agrees(name):
    wanted = evaluate(LOSSES[name], *sample())
    got = evaluate(LOSSES[name], *sample(dtype=np.float32))
    assert got[0].dtype == jnp.float32 and got[1].dtype == jnp.float32
    close(got[:2], wanted[:2], 2e-5)


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("sppo_online",)])
def test_an_empty_response_is_finite(name):
    """Its Delta is 0: the pair still says something of the other row."""
    logps, batch = sample()
    mask = batch.mask.at[1].set(0.0).at[4].set(0.0)
    losses, gradient, _ = evaluate(LOSSES[name], logps, batch.replace(mask=mask))
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()
    assert not np.asarray(gradient)[[1, 4]].any()


# -- DPO


def sums(*sides, tokens=None, ref=None, dtype=np.float64, **fields):
    """Rows of given sums of log-probs, side by side: (log-probs, batch). tokens: how many each."""
    total = np.stack(sides, axis=1).ravel()
    count = np.ones(total.shape, int) if tokens is None else np.stack(tokens, axis=1).ravel()
    mask = np.arange(count.max())[None] < count[:, None]

    def spread(x):
        return np.where(mask, x[:, None] / count[:, None], 0.0)

    if ref is not None:
        fields["ref_logprobs"] = spread(np.stack(ref, axis=1).ravel())
    return jnp.asarray(spread(total), dtype), response_batch(mask, dtype, **fields)


def test_worked_example_dpo():
    example = worked_example("dpo.basic")
    x, p, want = (example[k] for k in ("inputs", "params", "outputs"))
    logps, batch = sums(
        x["logp_chosen"],
        x["logp_rejected"],
        ref=(x["ref_chosen"], x["ref_rejected"]),
        tokens=(np.int32(x["len_chosen"]), np.int32(x["len_rejected"])),
    )

    def run(*names, **options):
        return evaluate(PART(preference.dpo, beta=p["beta"], losses=names, **options), logps, batch)

    losses, gradient, metrics = run("sigmoid")
    close(losses, np.array(want["per_pair"]), 1e-6)
    close(gradient[::2, 0] / 2, np.array(want["grad_logp_chosen"]), 1e-6)
    close(gradient[1::2, 0] / 2, np.array(want["grad_logp_rejected"]), 1e-6)
    close(metrics["rewards/chosen"], np.array(want["reward_chosen"]), 1e-6)
    close(metrics["rewards/rejected"], np.array(want["reward_rejected"]), 1e-6)
    close(metrics["logps/chosen"], np.array(x["logp_chosen"]), 1e-6)
    close(metrics["logps/rejected"], np.array(x["logp_rejected"]), 1e-6)
    assert float(jnp.mean(metrics["rewards/accuracies"])) == want["accuracy"]
    assert float(jnp.mean(metrics["rewards/margins"])) == pytest.approx(want["margin"])
    noise = p["label_smoothing"]
    for key, got in {
        "cdpo_ls01": run("sigmoid", label_smoothing=noise),
        "robust_ls01": run("robust", label_smoothing=noise),
        "rpo_sft1": run("sigmoid", "rpo", loss_weights=(1.0, p["sft_coef"])),
        "ipo": run("ipo"),
        "ipo_sum": run("ipo_sum"),
    }.items():
        assert float(jnp.mean(got[0])) == pytest.approx(want[key], rel=1e-5), key


def test_dpo_at_the_reference_is_log_2_and_an_identical_pair_pulls_nowhere():
    logps, batch = sample()
    same = batch.replace(ref_logprobs=logps)
    close(evaluate(preference.dpo, logps, same)[0], np.full(6, np.log(2.0)))
    twice = np.repeat(np.arange(0, ROWS, 2), 2)
    logps, batch = take(logps, twice), take(batch, twice)
    losses, gradient, _ = evaluate(preference.dpo, logps, batch)
    close(losses, np.full(6, np.log(2.0)))
    # The two rows' gradients cancel, as they describe the same answer.
    close(gradient[::2] + gradient[1::2], np.zeros((6, TOKENS)))


def test_dpo_finds_the_optimum_of_the_regularised_objective():
    """With Bradley-Terry preferences, pi* = ref exp(r / beta) / Z."""
    beta, reward = 0.5, np.array([1.0, 0.0, -0.5])
    ref = np.log([0.2, 0.5, 0.3])
    win = np.array([(i, j) for i in range(3) for j in range(3) if i != j])
    rows = win.ravel()
    share = 1 / (1 + np.exp(-(reward[win[:, 0]] - reward[win[:, 1]])))
    batch = response_batch(np.ones((12, 1)), np.float64, ref_logprobs=ref[rows][:, None])

    def total(logits):
        logps = jax.nn.log_softmax(logits)[rows][:, None]
        return jnp.sum(share * preference.dpo(PolicyOutputs(logps, logps), batch, beta=beta)[0])

    def descend(logits, _):
        return logits - 3.0 * jax.grad(total)(logits), None

    found = jax.nn.softmax(jax.lax.scan(descend, jnp.asarray(ref), length=400)[0])
    best = np.exp(ref + reward / beta)
    close(found, best / best.sum(), 1e-4)


def test_f_divergences_meet_at_the_reference_and_alpha_joins_the_two_kls():
    ratio = jnp.linspace(-2.0, 2.0, 9)
    for name in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"):
        score = divergence_score(ratio, name)
        assert float(score[4]) == pytest.approx(0.0, abs=1e-12)  # f'(1) = 0
        assert (np.diff(score) > 0).all()  # f is convex
    alpha = PART(divergence_score, ratio, "alpha_divergence")
    close(alpha(1.0), ratio)
    close(alpha(1.0 + 1e-5), ratio, 1e-4)
    close(alpha(0.0), divergence_score(ratio, "forward_kl"))
    far = jnp.array([-1e4, 1e4], jnp.float32)
    assert np.isfinite(divergence_score(far, "forward_kl")).all()


def test_length_desensitised_dpo_leaves_tails_out():
    """ld_alpha = 0 is DPO on the first min(|y_w|, |y_l|) policy tokens, holes not counted."""
    logps, batch = sample()
    order = np.cumsum(np.asarray(batch.mask), axis=1)
    count = np.asarray(batch.mask).sum(axis=1)
    shared = np.repeat(np.minimum(count[::2], count[1::2]), 2)[:, None]
    cut = batch.replace(mask=batch.mask * (order <= shared))
    wanted = evaluate(preference.dpo, logps, cut)
    got = evaluate(PART(preference.dpo, ld_alpha=0.0), logps, batch)
    close(got[:2], wanted[:2])


def test_wpo_weighs_by_what_the_policy_would_write():
    logps, batch = sample()
    sure = batch.replace(sum_pi_squared=jnp.exp(logps))  # log pi - log energy = 0: weight 1
    plain, weighed = preference.dpo, PART(preference.dpo, wpo_weighting=True)
    close(evaluate(weighed, logps, sure)[:2], evaluate(plain, logps, batch)[:2])
    # Energies e times larger: the mean falls by 1 for each row.
    wide = batch.replace(sum_pi_squared=jnp.exp(logps + 1.0))
    close(evaluate(weighed, logps, wide)[0], evaluate(plain, logps, batch)[0] * np.exp(-2.0))


def test_the_supervised_term_runs_over_all_tokens_of_the_step():
    logps, batch = sample()
    chosen = np.asarray(batch.mask)[::2] > 0
    wanted = -np.asarray(logps)[::2][chosen].mean()
    losses, _, _ = evaluate(PART(preference.dpo, losses=("sft",)), logps, batch)
    assert float(jnp.mean(losses)) == pytest.approx(wanted)
    assert float(jnp.mean(evaluate(preference.cpo, logps, batch)[2]["nll"])) == pytest.approx(
        wanted
    )
    gold = np.asarray(batch.mask)[::3] > 0
    nll = evaluate(preference.tpo, logps, batch)[2]["nll"]
    assert float(jnp.mean(nll)) == pytest.approx(-np.asarray(logps)[::3][gold].mean())


def test_orpo_reads_the_prompt_but_no_padding():
    logps, batch = sample()
    lengths = np.array([5, 3, 2, 5, 4, 1, 3, 3, 5, 2, 4, 5])
    inside = (np.arange(TOKENS)[None] <= lengths[:, None]).astype(np.int32)
    batch = batch.replace(segment_ids=jnp.asarray(inside))
    full = jnp.where(batch.mask > 0, logps, -2.0)
    nll = evaluate(preference.orpo, full, batch)[2]["nll"]
    keep = inside[::2].astype(bool)
    keep[:, 0] = False  # nothing predicts the first token
    assert float(jnp.mean(nll)) == pytest.approx(-np.asarray(full)[::2][keep].mean())
    spoilt = jnp.where(jnp.asarray(inside) > 0, full, jnp.nan).at[:, 0].set(jnp.nan)
    close(evaluate(preference.orpo, spoilt, batch), evaluate(preference.orpo, full, batch))


# -- rows with a label


def test_worked_example_kto():
    example = worked_example("kto")
    x, p, want = (example[k] for k in ("inputs", "params", "outputs"))
    zero = np.zeros(4)
    mismatched, other = sums(x["mismatched_logratio"], ref=(zero,))
    kl = unpaired.mismatched_kl(mismatched, other)
    assert float(kl) == pytest.approx(want["kl"])
    logps, batch = sums(x["logratio"], ref=(zero,), scores=x["desirable"])
    loss = PART(preference.kto, kl=kl, beta=p["beta"])
    losses, gradient, _ = evaluate(loss, logps, batch)
    close(losses, np.array(want["per_example"]), 1e-6)
    close(gradient[:, 0] / 4, np.array(want["grad_logratio"]), 1e-6)
    weighed = evaluate(PART(loss, undesirable_weight=p["w_u_alt"]), logps, batch)[0]
    assert float(jnp.mean(weighed)) == pytest.approx(want["loss_wd_wu"], rel=1e-6)


def test_the_kl_of_mismatched_rows_is_clamped_constant_and_skips_empty_rows():
    logps, batch = sample()
    counted = np.asarray(logps - batch.ref_logprobs).sum(axis=1)
    shifted = logps + batch.mask  # above the reference by more than a token's worth
    kl, gradient = jax.value_and_grad(unpaired.mismatched_kl)(shifted, batch)
    tokens = np.asarray(batch.mask).sum(axis=1)
    assert float(kl) == pytest.approx(max(0.0, np.mean(counted + tokens)))
    assert not np.asarray(gradient).any()
    assert float(unpaired.mismatched_kl(logps - 9.0 * batch.mask, batch)) == 0.0
    empty = batch.replace(mask=batch.mask.at[3:].set(0.0))
    assert float(unpaired.mismatched_kl(shifted, empty)) == pytest.approx(
        max(0.0, np.mean((counted + tokens)[:3]))
    )
    nothing = batch.replace(mask=0 * batch.mask)
    assert float(unpaired.mismatched_kl(shifted, nothing)) == 0.0


def test_running_mean_is_the_mean_of_all_that_was_seen():
    values = np.random.default_rng(0).normal(size=12)
    mean, count = 0.0, 0.0
    for part in (values[:5], values[5:5], values[5:6], values[6:]):
        step = part.mean() if part.size else 0.0
        mean, count = unpaired.running_mean(mean, count, step, part.size)
    assert float(mean) == pytest.approx(values.mean()) and float(count) == 12


def test_parts_of_the_labelled_rows_add_up():
    logps, batch = sample()
    metrics = evaluate(with_kl, logps, batch)[2]
    good = np.asarray(batch.scores) > 0
    share = float(jnp.mean(metrics["desirable"]))
    mean = float(jnp.mean(metrics["rewards/desirable_part"])) / share
    assert mean == pytest.approx(np.asarray(metrics["rewards"])[good].mean())
    mean = float(jnp.mean(metrics["rewards/undesirable_part"])) / (1 - share)
    assert mean == pytest.approx(np.asarray(metrics["rewards"])[~good].mean())


# -- games


def test_worked_examples_sppo_and_spin():
    example = worked_example("sppo")
    x, want = example["inputs"], example["outputs"]
    zero = np.zeros(1)
    logps, batch = sums(
        x["logratio_w"],
        x["logratio_l"],
        ref=(zero, zero),
        scores=[x["win_prob_w"][0], x["win_prob_l"][0]],
    )
    losses, gradient, _ = evaluate(PART(preference.sppo, **example["params"]), logps, batch)
    assert float(losses[0]) == pytest.approx(want["loss"])
    assert float(gradient[0, 0]) == pytest.approx(want["grad_logratio_w"])
    assert float(gradient[1, 0]) == pytest.approx(want["grad_logratio_l"])
    example = worked_example("spin")
    x, want = example["inputs"], example["outputs"]
    logps, batch = sums(x["logratio_real"], x["logratio_generated"], ref=(zero, zero))
    losses, gradient, _ = evaluate(PART(preference.spin, **example["params"]), logps, batch)
    assert float(losses[0]) == pytest.approx(want["loss"], rel=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(want["grad_logratio_real"], rel=1e-6)


def test_worked_example_sppo_online():
    example = worked_example("sppo.online")
    x, p, want = (example[k] for k in ("inputs", "params", "outputs"))
    rewards = jnp.array(x["rewards"])
    centre = games.soft_mean(rewards, p["beta"], "weighted_mean")
    assert float(centre) == pytest.approx(want["softmean"])
    logps, batch = sums(x["logratio_to_old"], old_logprobs=np.zeros((4, 1)))
    batch = batch.replace(scores=rewards - centre)
    losses, _, _ = evaluate(PART(preference.sppo_online, eta=p["eta"]), logps, batch)
    assert float(jnp.mean(losses)) == pytest.approx(want["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["log_mean_exp", "weighted_mean"])
def test_a_soft_mean_lies_between_mean_and_maximum_and_shifts_with_the_rewards(kind):
    rewards = jnp.array([0.3, -1.0, 2.0, 0.4])
    found = [float(games.soft_mean(rewards, beta, kind)) for beta in (0.0, 1e-6, 1.0, 60.0)]
    assert found[0] == pytest.approx(float(jnp.mean(rewards)))
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[0] < found[2] < found[3] <= 2.0 and found[3] == pytest.approx(2.0, abs=0.05)
    shifted = games.soft_mean(rewards + 5.0, 1.0, kind)
    assert float(shifted) == pytest.approx(found[2] + 5.0)


# -- refusals


@pytest.mark.parametrize(
    "call,words",
    [
        (PART(preference.dpo, losses=("sigmod",)), "did you mean 'sigmoid'"),
        (PART(preference.dpo, losses="sigmoid"), "a tuple of names"),
        (PART(preference.dpo, losses=("sigmoid", "rpo"), loss_weights=(1.0,)), "one per loss"),
        (PART(preference.dpo, losses=("exo_pair",)), "> 0 where exo_pair"),
        (PART(preference.dpo, losses=("robust",), label_smoothing=0.5), "< 0.5"),
        (PART(preference.dpo, label_smoothing=0.7), "0 to 0.5"),
        (PART(preference.dpo, beta=0.0), "> 0"),
        (PART(preference.dpo, divergence="kl"), "one of reverse_kl"),
        (PART(preference.dpo, losses=("aot",), divergence="forward_kl"), "reverse_kl for aot"),
        (PART(preference.cpo, loss="sigmoidal"), "did you mean 'sigmoid'"),
        (PART(preference.bco, delta=0.0, min_density_ratio=3.0, max_density_ratio=2.0), "ratio"),
        (PART(preference.xpo, chosen_is_policy=jnp.ones(3)), "one per pair"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    logps, batch = sample()
    with pytest.raises(InputError, match=words):
        call(PolicyOutputs(logps, logps), batch)


def test_the_old_name_of_dpo_with_losses_of_the_whole_step_says_what_to_take():
    with pytest.raises(InputError, match="did you mean dpo"):
        resolve("dpo_whole_step(losses=('aot',))", "rljax.losses.preference")


def test_rows_that_make_no_whole_examples_are_refused():
    logps, batch = take(sample(), np.arange(11))
    for loss, k in ((preference.dpo, 2), (preference.simpo, 2), (preference.tpo, 3)):
        with pytest.raises(InputError, match=f"a multiple of {k}"):
            loss(PolicyOutputs(logps, logps), batch)
