"""Section H: shaping by length, filters, rounds of sampling, curricula, length rewards, forced
interruption."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Compiled, compiled, worked_example
from golden_checks.common import response_batch

from rljax.batch import FinishReason, batch_from_rows, last_token
from rljax.components import resolve
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.prompts import Prompts
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.builtin import decoder
from rljax.models.model import Model
from rljax.rewards.pool.calling import HOME, call_reward
from rljax.rollout import RewardReport, RolloutConfig, make_sample
from rljax.rollout.rules import collect
from rljax.sampler import Sampling, generate
from rljax.shaping import filters as op_by_op
from rljax.shaping import scores

shaping, filters = Compiled(scores), Compiled(op_by_op)

# -- shaping ------------------------------------------------------------------------------------


def with_rewards(batch):
    """The batch, its scores as rewards on the last token of each row."""
    last = np.asarray(jax.jit(last_token)(batch))
    return batch.replace(rewards=jnp.asarray(last * np.asarray(batch.scores)[:, None]))


def rows_of(lengths, scores, dtype=jnp.float32):
    lengths = np.asarray(lengths)
    mask = np.arange(lengths.max())[None] < lengths[:, None]
    return with_rewards(response_batch(mask, dtype, scores=scores, rewards=np.zeros(mask.shape)))


@pytest.mark.parametrize("name", ["dapo.soft_overlong", "dapo.soft_overlong_small"])
def test_soft_overlong_worked_examples(name):
    example = worked_example(name)
    lengths, p = example["inputs"]["length"], example["params"]
    batch = rows_of(lengths, np.ones(len(lengths)))
    found = shaping.soft_overlong(batch, max_tokens=p["L_max"], cache_tokens=p["L_cache"])
    np.testing.assert_allclose(np.asarray(found) - 1, example["outputs"]["reward"], atol=1e-6)
    half = shaping.soft_overlong(
        batch, max_tokens=p["L_max"], cache_tokens=p["L_cache"], penalty=0.5, floor=False
    )
    half = np.asarray(half)
    assert float(half[0]) == 1 and float(half[-1]) <= 0.5


@pytest.mark.parametrize("floor", [True, False])
def test_an_overlong_cache_of_zero_is_a_hard_limit(floor):
    batch = rows_of([1, 4, 5, 9], np.ones(4))
    options = {"max_tokens": 4, "cache_tokens": 0}
    found = shaping.soft_overlong(batch, **options, penalty=2.0, floor=floor)
    np.testing.assert_array_equal(found, [1, 1, -1, -1])
    found = shaping.length_penalty_when_right(batch, **options)
    np.testing.assert_array_equal(found, [1, 1, 0, 0])
    with pytest.raises(InputError, match="cache_tokens"):
        shaping.soft_overlong(batch, max_tokens=4, cache_tokens=-1)


def test_length_penalty_touches_correct_rows_only():
    example = worked_example("scalerl.length_penalty")
    lengths, p = example["inputs"]["n"], example["params"]
    options = dict(max_tokens=p["L_max"], cache_tokens=p["L_cache"])
    right = shaping.length_penalty_when_right(rows_of(lengths, np.ones(5)), **options)
    np.testing.assert_allclose(np.asarray(right) - 1, example["outputs"]["penalty"], atol=1e-6)
    wrong = shaping.length_penalty_when_right(rows_of(lengths, np.zeros(5)), **options)
    assert (np.asarray(wrong) == 0).all()


def test_what_a_row_kept_of_another_counts_towards_its_length():
    batch = rows_of([3, 3], np.zeros(2))
    np.testing.assert_array_equal(shaping.response_tokens(batch), [3, 3])
    longer = batch.replace(kept_tokens=jnp.array([0, 2], jnp.int32))
    np.testing.assert_array_equal(shaping.response_tokens(longer), [3, 5])
    options = dict(max_tokens=4, cache_tokens=0)
    np.testing.assert_array_equal(shaping.soft_overlong(longer, **options), [0, -1])


def test_scaling_clipping_and_normalising_scores():
    batch = rows_of([2, 3, 1, 2], [0.0, 1.0, 1.0, 0.5])
    np.testing.assert_allclose(shaping.scaled(batch, scale=2.0, shift=-0.5), [-1, 1, 1, 0])
    np.testing.assert_allclose(shaping.clipped(batch, low=0.2, high=0.6), [0.2, 0.6, 0.6, 0.5])
    normal = np.asarray(shaping.normalised(batch))
    assert abs(normal.mean()) < 1e-6 and normal.std(ddof=1) == pytest.approx(1, rel=1e-4)


# -- filters ------------------------------------------------------------------------------------


def test_a_truncated_row_leaves_the_loss_and_stays_in_the_baseline():
    from rljax.advantages import group_relative

    example = worked_example("overlong_filter")
    x, reasons = example["inputs"], {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    batch = response_batch(
        x["mask"],
        jnp.float32,
        scores=x["rewards"],
        group=[0, 0, 0],
        rewards=np.zeros((3, 3)),
        finish_reason=[reasons[r] for r in x["finish"]],
    )
    batch = with_rewards(batch)
    kept = np.asarray(batch.mask) * np.asarray(filters.overlong(batch))[:, None]
    np.testing.assert_array_equal(kept, example["outputs"]["loss_mask"])
    advantages = np.asarray(compiled(group_relative)(batch, std="none"))[:, 0]
    want = np.array(example["outputs"]["adv_centered"])
    np.testing.assert_allclose(advantages[[0, 2]], want[[0, 2]], atol=1e-6)


def test_dead_groups_and_pass_rates():
    scores = [1.0, 1, 0, 1, 0, 0, 0.3]
    batch = response_batch(np.ones((7, 2)), jnp.float32, scores=scores, group=[5, 5, 2, 2, 9, 9, 7])
    np.testing.assert_array_equal(filters.live_groups(batch), [0, 0, 1, 1, 0, 0, 1])
    np.testing.assert_array_equal(filters.pass_rate(batch), [0, 0, 1, 1, 0, 0, 0])
    every = filters.pass_rate(batch, low=0.0, high=1.0)
    np.testing.assert_array_equal(every, np.ones(7))


# -- rounds of sampling -------------------------------------------------------------------------


@dataclasses.dataclass
class FakeActor:
    """Answers of a table: prompt i is answered as outcomes[i] says. 20 lines, no model."""

    outcomes: list
    model: object

    def generate(self, prompts, key, sampling, *, n):
        rows = len(prompts.records) * n
        tokens = np.repeat(prompts.tokens, n, axis=0)
        return batch_from_rows(
            jnp.asarray(tokens),
            jnp.asarray(np.full(rows, 3)),
            jnp.asarray(np.tile([0.0, 1, 1], (rows, 1)).astype(np.float32)),
            group=jnp.asarray(np.repeat(np.arange(len(prompts.records), dtype=np.int32), n)),
        )


def fake_step(outcomes, wanted, n):
    """(prompts, roles, position) over a stream of prompts 0, 1, 2, ..."""
    position = [0]

    def more(count):
        first = position[0]
        position[0] += count
        records = tuple({"index": i} for i in range(first, first + count))
        return Prompts(np.zeros((count, 3), np.int32), np.full(count, 1, np.int32), records)

    def reward(batch, prompts):
        table = np.array([outcomes[r["index"]] for r in prompts.records], np.float32).reshape(-1)
        failed = np.isnan(table)
        scores = jnp.asarray(np.where(failed, 0, table))
        mask = jnp.asarray(np.asarray(batch.mask) * ~failed[:, None])
        scored = with_rewards(batch.replace(scores=scores))
        return scored.replace(mask=mask), RewardReport()

    mesh = make_mesh(devices=jax.devices()[:1])
    actor = FakeActor(outcomes, type("M", (), {"mesh": mesh}))
    sample = make_sample(actor, reward, None)
    return more(wanted), dict(actor=actor, sample=sample, draw=more), position


CFG = RolloutConfig(prompts_per_step=4, samples_per_prompt=4, sampling=None)


def test_dynamic_sampling_worked_example():
    example = worked_example("dapo.dynamic_sampling")
    acc, wanted = example["inputs"]["acc"], example["params"]["train_batch"]
    prompts, roles, drawn = fake_step(acc, wanted, 4)
    done = collect.dynamic(prompts, jax.random.key(0), CFG, **roles, oversample=2.5)
    batch, used, metrics = done.batch, done.prompts, done.metrics
    assert [r["index"] for r in used.records] == example["outputs"]["used_groups"]
    assert metrics["collect/solved_groups"] == example["outputs"]["solved"]
    assert metrics["collect/zero_groups"] == example["outputs"]["zero"]
    assert metrics["collect/live_fraction"] == pytest.approx(example["outputs"]["efficiency"])
    assert drawn[0] == 5 and batch.rows == 8
    np.testing.assert_array_equal(batch.group, np.repeat([0, 1], 4))
    want = np.array(acc, np.float32)[example["outputs"]["used_groups"]].reshape(-1)
    np.testing.assert_array_equal(batch.scores, want)


def test_rounds_go_on_until_the_batch_is_full_and_then_stop():
    dead, live = [0, 0, 0, 0], [1, 0, 0, 0]
    prompts, roles, drawn = fake_step([dead, live, dead, dead, live, live, dead], 3, 4)
    done = collect.active(prompts, jax.random.key(0), CFG, **roles, refill=0.4)
    batch, used, metrics = done.batch, done.prompts, done.metrics
    assert [r["index"] for r in used.records] == [1, 4, 5] and batch.rows == 12
    assert metrics["collect/rounds"] == 4 and drawn[0] == 6
    assert metrics["collect/generations_per_kept_sample"] == 2


def test_too_few_live_groups_are_an_error_or_filled_up():
    dead, live = [1, 1, 1, 1], [1, 0, 0, 0]
    table = [dead, live] + [dead] * 30
    prompts, roles, _ = fake_step(table, 2, 4)
    with pytest.raises(InputError, match="only 1 of 2 groups are live after 3 rounds.*all right"):
        collect.dynamic(prompts, jax.random.key(0), CFG, **roles, max_rounds=3)
    prompts, roles, _ = fake_step(table, 2, 4)
    short = dict(max_rounds=3, if_short="fill")
    done = collect.dynamic(prompts, jax.random.key(0), CFG, **roles, **short)
    batch, used, metrics = done.batch, done.prompts, done.metrics
    assert [r["index"] for r in used.records] == [1, 0] and batch.rows == 8
    assert metrics["collect/filled_groups"] == 1


@pytest.mark.smoke
def test_a_failed_reward_neither_enlivens_nor_joins_a_group():
    nan = float("nan")
    prompts, roles, _ = fake_step([[1, 1, nan, 1], [0, 1, nan, 0], [0, 1, 1, 0]], 1, 4)
    done = collect.dynamic(prompts, jax.random.key(0), CFG, **roles, oversample=3.0)
    batch, used = done.batch, done.prompts
    assert [r["index"] for r in used.records] == [1]
    np.testing.assert_array_equal(batch.group, [0, 0, 3, 0])
    assert float(batch.mask[2].sum()) == 0


def test_seats_are_compared_apart_and_episodes_of_rounds_do_not_mix():
    """Two episodes of two seats a prompt: a game that both lose as the first seat is dead, though
    its four scores differ."""
    dead, live = [1, -1, 1, -1], [1, -1, -1, 1]
    prompts, roles, _ = fake_step([dead, live, live, dead], 2, 4)
    plain = roles["sample"].score

    def reward(batch, prompts):
        batch, report = plain(batch, prompts)
        rows = jnp.arange(batch.rows, dtype=jnp.int32)
        group = batch.group * 2 + rows % 2
        return batch.replace(seat=rows % 2, episode=rows, group=group), report

    roles["sample"] = make_sample(roles["actor"], reward, None)
    done = collect.active(prompts, jax.random.key(0), CFG, **roles, refill=0.5)
    assert [r["index"] for r in done.prompts.records] == [1, 2]
    np.testing.assert_array_equal(done.batch.group, [0, 1, 0, 1, 2, 3, 2, 3])
    assert sorted(np.asarray(done.batch.episode).tolist()) == list(range(8))
    np.testing.assert_array_equal(done.batch.seat, [0, 1] * 4)


# -- which prompts ------------------------------------------------------------------------------


def source(first, count):
    return [{"prompt_id": i, "name": f"p{i}"} for i in range(first, first + count)]


def ids(prompts):
    return [p["prompt_id"] for p in prompts]


def test_a_solved_prompt_is_not_drawn_again_from_the_next_epoch_on():
    example = worked_example("scalerl.npr")
    order = Curriculum([source(0, 4)], batch_size=4, seed=0, retire_at=0.9)
    assert sorted(ids(next(order))) == [0, 1, 2, 3]
    for prompt, (right, n) in enumerate(example["inputs"]["pass_counts"]):
        order.record([(prompt, 1.0)] * right + [(prompt, 0.0)] * (n - right), correct_at=1.0)
    active = [i for i, on in enumerate(example["outputs"]["active_next_epoch"]) if on]
    assert set(ids(order.take(12))) == set(active) and order.skipped == 2


def test_when_everything_is_solved_everything_is_drawn(caplog):
    order = Curriculum([source(0, 3)], batch_size=3, seed=0, retire_at=0.5)
    next(order)
    order.record([(i, 1.0) for i in range(3)], correct_at=1.0)
    assert sorted(ids(next(order))) == [0, 1, 2]
    assert "every prompt" in caplog.text


def test_sources_are_mixed_by_weights_that_move():
    order = Curriculum(
        [source(0, 50), source(50, 50)],
        batch_size=1,
        seed=1,
        weights=(0.9, 0.1),
        final_weights=(0.1, 0.9),
        horizon_prompts=4000,
    )
    drawn = np.array(ids(order.take(6000))) >= 50
    assert drawn[:400].mean() == pytest.approx(0.14, abs=0.05)
    assert drawn[1800:2200].mean() == pytest.approx(0.5, abs=0.08)
    assert drawn[4000:].mean() == pytest.approx(0.9, abs=0.02)
    with pytest.raises(InputError, match="2 weights >= 0"):
        Curriculum([source(0, 5), source(5, 5)], batch_size=1, seed=0, weights=(1.0,))


def test_a_curriculum_resumes_where_it_was():
    def made():
        return Curriculum([source(0, 7), source(7, 5)], batch_size=3, seed=3, retire_at=0.5)

    order = made()
    order.take(9)
    order.record([(1, 1.0), (2, 0.0), (9, 1.0)], correct_at=1.0)
    order.take(6)
    state = order.get_state()
    import json

    again = made()
    again.set_state(json.loads(json.dumps(state)))
    assert [ids(next(order)) for _ in range(20)] == [ids(next(again)) for _ in range(20)]
    with pytest.raises(InputError, match="not a curriculum's state"):
        again.set_state({"position": 3})
    one = Curriculum([source(0, 12)], batch_size=3, seed=3, retire_at=0.5)
    with pytest.raises(InputError, match="another number of sources: got 2; the data have 1"):
        one.set_state(state)


def test_easy_prompts_are_dropped_beforehand():
    order = Curriculum([source(0, 4)], batch_size=4, seed=0)
    order.record([(0, 1.0)] * 6 + [(0, 0.0)] * 2 + [(1, 1.0)] * 5 + [(1, 0.0)] * 3, correct_at=1.0)
    assert order.drop_above(0.625) == 1
    assert set(ids(order.take(12))) == {1, 2, 3}
    order.record([(i, 1.0) for i in range(1, 4)], correct_at=1.0)
    with pytest.raises(InputError, match="without prompts"):
        order.drop_above(0.5)


def test_parts_are_normalised_one_by_one_before_they_are_weighed():
    """Parts of scales 1 and 1000: (0, 1, 1) less 2/3 over sqrt(1/3), and (1000, 0) of two rows."""
    parts = np.array([[0.0, 1000.0], [1.0, 0.0], [1.0, np.nan], [7.0, 7.0]], np.float32)
    batch = rows_of([2, 1, 3, 2], np.zeros(4)).replace(reward_parts=jnp.asarray(parts))
    batch = batch.replace(mask=batch.mask.at[3].set(0.0))  # a failed row
    first = (np.array([0, 1, 1]) - 2 / 3) / np.sqrt(1 / 3)
    second = np.array([500, -500, 0]) / np.sqrt(500_000)
    found = np.asarray(shaping.mixed_parts(batch, weights=(2.0, -1.0)))
    np.testing.assert_allclose(found[:3], 2 * first - second, rtol=1e-5)
    np.testing.assert_allclose(shaping.mixed_parts(batch)[:3], first + second, rtol=1e-5)
    assert found[3] == 0
    with pytest.raises(InputError, match="each of the 2 parts"):
        shaping.mixed_parts(batch, weights=(1.0,))
    with pytest.raises(ValueError, match="reward_parts"):
        shaping.mixed_parts(batch.replace(reward_parts=None))


# -- rewards for a requested length -------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["l1.exact", "l1.max"])
def test_length_rewards_worked_examples(name):
    example = worked_example(name)
    x, p = example["inputs"], example["params"]
    options = ", ".join(f"{k}={v}" for k, v in p.items())
    component = resolve(f"{name.replace('.', '_')}({options})", HOME)
    for i, want in enumerate(example["outputs"]["reward"]):
        sample = {
            "response": "yes" if x["correct"][i] else "no",
            "ground_truth": "yes",
            "prompt": "?",
            "extra_info": {"target_tokens": x["n_gold"][i]},
            "num_tokens": x["n"][i],
            "data_source": "toy",
            "finish_reason": "stop",
        }
        score, parts = call_reward(component, sample)
        assert score == pytest.approx(want, abs=1e-9)
        assert parts["length_error"] == abs(x["n"][i] - x["n_gold"][i])
        assert parts["correct"] == x["correct"][i]
        assert parts["over_budget"] == (x["n"][i] > x["n_gold"][i])


def test_a_length_reward_without_a_target_says_what_to_set():
    component = resolve("l1_exact()", HOME)
    sample = {"response": "a", "ground_truth": "a", "num_tokens": 3, "extra_info": {}}
    with pytest.raises(ValueError, match="target_tokens"):
        call_reward(component, sample)


# -- forced interruption ------------------------------------------------------------------------

PROMPTS = np.array([[1, 2, 3, 0], [4, 5, 6, 7], [9, 0, 0, 0]], np.int32)
LENGTHS = np.array([3, 4, 1], np.int32)
PLAIN = Sampling(max_response_tokens=24, stop_ids=(5,))
FORCED = dataclasses.replace(
    PLAIN, thinking_tokens=(4, 9), end_of_thinking_ids=(7, 8), interrupt_ids=(9, 10, 7, 8)
)


@pytest.fixture(scope="module")
def sampler():
    config = decoder(24, layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.2)
    model = Model(config, make_mesh(devices=jax.devices()[:1]))
    params = model.init(jax.random.key(0))

    def sampled(sampling, prompts=PROMPTS, lengths=LENGTHS, key=7, n=8):
        batch = generate(model, params, prompts, lengths, jax.random.key(key), sampling, n=n)
        return jax.device_get(batch), model, params

    return sampled


def find(row, phrase):
    row = list(row)
    return [i for i in range(len(row)) if row[i : i + len(phrase)] == list(phrase)]


@pytest.mark.slow
def test_forced_tokens_are_not_the_policys(sampler):
    batch, model, params = sampler(FORCED)
    plain, _, _ = sampler(PLAIN)
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    starts = np.repeat(LENGTHS, 8)
    interrupted = 0
    for b in range(batch.rows):
        end = int((np.asarray(batch.segment_ids[b]) > 0).sum())
        response, chosen = tokens[b, starts[b] : end], mask[b, starts[b] : end]
        forced = np.flatnonzero(chosen == 0)
        if forced.size == 0:
            thought = find(response, (7, 8))
            assert len(response) <= 9 or (thought and thought[0] + 2 <= 9)
            continue
        interrupted += 1
        np.testing.assert_array_equal(response[forced], [9, 10, 7, 8])
        assert (np.diff(forced) == 1).all() and 4 <= forced[0] <= 9
        assert not find(response[: forced[0]], (7, 8))
        # Until the interruption the row is the one that is sampled without it.
        same = int(starts[b] + forced[0])
        np.testing.assert_array_equal(tokens[b, :same], np.asarray(plain.tokens)[b, :same])
        assert int(batch.finish_reason[b]) in (FinishReason.INTERRUPT, FinishReason.LENGTH)
        assert (np.asarray(batch.sampler_logprobs)[b] == 0)[starts[b] + forced].all()
    assert 5 < interrupted < 24
    # Attention sees the forced tokens: the log-probs of what follows are the trainer's.
    logp = model.logprobs(params, batch)[0]
    np.testing.assert_allclose(
        np.where(mask > 0, logp, 0), np.where(mask > 0, batch.sampler_logprobs, 0), atol=2e-5
    )
    assert set(np.unique(batch.finish_reason)) >= {FinishReason.STOP, FinishReason.INTERRUPT}


@pytest.mark.slow
def test_a_row_that_ends_its_thinking_itself_is_not_interrupted(sampler):
    plain, _, _ = sampler(PLAIN)
    tokens, starts = np.asarray(plain.tokens), np.repeat(LENGTHS, 8)
    spans = (np.asarray(plain.segment_ids) > 0).sum(axis=1) - starts
    pairs = [tuple(tokens[b, starts[b] + 1 : starts[b] + 3]) for b in range(plain.rows)]
    marker = pairs[int(np.argmax(spans))]  # two tokens that a row says early, and goes on
    wish = dict(end_of_thinking_ids=marker, interrupt_ids=(9, 10, *marker))
    batch, _, _ = sampler(dataclasses.replace(FORCED, **wish))
    said = [b for b, pair in enumerate(pairs) if pair == marker and spans[b] > 3]
    for b in said:
        end = int((np.asarray(batch.segment_ids[b]) > 0).sum())
        assert np.all(np.asarray(batch.mask)[b, starts[b] : end] == 1)
        np.testing.assert_array_equal(tokens[b], np.asarray(batch.tokens)[b])
    # Some of them went on past any budget, where another row is interrupted.
    assert max(spans[said]) > 12
    others = [b for b in range(plain.rows) if not find(tokens[b, starts[b] :], marker)]
    forced = (np.asarray(batch.mask) == 0) & (np.asarray(batch.segment_ids) > 0)
    assert any(forced[b, starts[b] :].any() for b in others)


def test_the_budget_of_a_row_is_its_own(sampler):
    whole, _, _ = sampler(FORCED)
    # The same requests, one of the prompts longer by padding columns: nothing moves.
    wide, _, _ = sampler(FORCED, prompts=np.pad(PROMPTS, ((0, 0), (0, 3))))
    for b in range(whole.rows):
        n = int((np.asarray(whole.segment_ids[b]) > 0).sum())
        np.testing.assert_array_equal(whole.tokens[b, :n], wide.tokens[b, :n])
        np.testing.assert_array_equal(whole.mask[b, :n], wide.mask[b, :n])
    budgets = {
        int(np.flatnonzero(m == 0)[0])
        for m in [
            np.asarray(
                whole.mask[b, np.repeat(LENGTHS, 8)[b] : int((whole.segment_ids[b] > 0).sum())]
            )
            for b in range(whole.rows)
        ]
        if (m == 0).any()
    }
    assert len(budgets) >= 3  # drawn per sample, not one for all


def test_interruption_worked_example():
    """Thinking budget 4: tokens 0-3 sampled, 4-6 forced, then the answer."""
    example = worked_example("interrupt.mask")
    config = decoder(24, layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8)
    model = Model(config, make_mesh(devices=jax.devices()[:1]))
    sampling = Sampling(
        max_response_tokens=9,
        thinking_tokens=(4, 4),
        end_of_thinking_ids=(23,),
        interrupt_ids=(20, 21, 23),
    )
    batch = generate(
        model, model.init(jax.random.key(1)), PROMPTS[:1], LENGTHS[:1], jax.random.key(0), sampling
    )
    np.testing.assert_array_equal(batch.mask[0, 3:12], example["outputs"]["loss_mask"])
    np.testing.assert_array_equal(batch.segment_ids[0, 3:12], example["outputs"]["attention_mask"])
