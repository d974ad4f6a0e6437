"""Policies on disk: one way to sample them, in one shape, with the options of their run."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.batch import FinishReason, batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.online.prompts import PromptRecord
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.preferences import sample_comparisons
from rljax.datagen.trajectories import continued
from rljax.errors import InputError
from rljax.evaluation.policy import no_answer
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import (
    Policy,
    SavedPolicy,
    filled_chunks,
    load_named_policy,
    sample_all,
    sampling,
    warn_of_failed_rewards,
)
from rljax.rewards.pool.pool import Score
from rljax.rollout import Reward
from rljax.sampler import Sampling, memory

CHARS = CharTokenizer("abcd>")
TEXT = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, init_std=0.3)"


def key(seed=0):
    return jax.random.key(seed)


def records(*texts):
    """Encoded prompts."""
    return [
        PromptRecord(
            token_ids=np.array(CHARS.encode(text), np.int32),
            prompt_text=text,
            ground_truth=text[0],
            data_source="letters",
            extra_info={},
            index=i,
        )
        for i, text in enumerate(texts)
    ]


class Repeats:
    """An actor that answers with the prompt's first letter, its second one forced (mask 0), then
    the end token; the first sample of a prompt is cut off before that."""

    def __init__(self):
        self.shapes, self.keys = [], []

    def generate(self, prompts, key, sampling, *, n):
        self.shapes.append((*prompts.tokens.shape, n))
        self.keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        rows, lengths, mask, finish = [], [], [], []
        for ids, length in zip(prompts.tokens, prompts.lengths, strict=True):
            for s in range(n):
                answer = [ids[0], ids[0]] + [1] * (s > 0)
                row = np.zeros(prompts.tokens.shape[1] + 3, np.int32)
                row[:length], row[length : length + len(answer)] = ids[:length], answer
                rows.append(row)
                lengths.append(length + len(answer))
                mask.append(
                    [length <= i < lengths[-1] and i != length + 1 for i in range(len(row))]
                )
                finish.append(int(FinishReason.STOP if s else FinishReason.LENGTH))
        batch = batch_from_rows(
            jnp.asarray(np.stack(rows)),
            jnp.asarray(lengths),
            jnp.asarray(mask, jnp.float32),
            finish_reason=jnp.asarray(finish, jnp.int32),
            group=jnp.arange(len(rows), dtype=jnp.int32) // n,
        )
        return batch.replace(sampler_logprobs=-0.5 * batch.mask)


class Pool:
    """Scores in this process: 1 where the response begins with the truth; "d" fails."""

    def __init__(self):
        self.samples = []

    def score(self, samples):
        self.samples += samples
        return [
            Score(float("nan"), {}, "error", 0.0, "d")
            if s["ground_truth"] == "d"
            else Score(
                float(s["response"].startswith(s["ground_truth"])),
                {"format/extracted": float("c" in s["response"])},
                "ok",
                0.0,
            )
            for s in samples
        ]


def policy(width=3) -> Policy:
    return Policy(Repeats(), CHARS, Sampling(max_response_tokens=3, stop_ids=(1,)), width)


def test_every_call_has_one_shape_and_the_filling_is_dropped():
    prompts, one = records("ab>", "b>", "ca>", "d>", "a>"), policy()
    samples = sample_all(one, prompts, 2, key=key(), prompts_per_call=2)
    assert one.actor.shapes == [(2, 3, 2)] * 3
    assert len({*one.actor.keys}) == 3  # each call draws anew
    assert [s.prompt for s in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [s.text for s in samples] == [c for c in ("aa", "bb", "cc", "dd", "aa") for _ in "12"]
    assert [s.finish_reason for s in samples] == ["length", "stop"] * 5
    assert [s.truncated for s in samples] == [True, False] * 5
    whole = samples[1]
    assert whole.ids == (*CHARS.encode("aa"), 1) and len(whole.logprobs) == 3
    np.testing.assert_array_equal(whole.logprobs, [-0.5, np.nan, -0.5])  # NaN: it was forced
    assert np.isnan([s.reward for s in samples]).all()
    assert list(filled_chunks("abcde", 2)) == [(0, ["a", "b"]), (2, ["c", "d"]), (4, ["e", "e"])]
    with pytest.raises(InputError, match="no prompts"):
        sample_all(one, [], key=key())


@pytest.mark.smoke
def test_rewards_are_those_of_the_prompts_and_a_failed_one_is_nan(caplog):
    prompts, pool = records("ab>", "d>", "ca>"), Pool()
    prompts[2] = dataclasses.replace(prompts[2], ground_truth="a")
    reward = Reward(pool, CHARS, make_mesh())
    before = dict(vars(reward))
    samples = sample_all(policy(), prompts, 2, reward, key=key(), prompts_per_call=2)
    np.testing.assert_array_equal([s.reward for s in samples], [1, 1, np.nan, np.nan, 0, 0])
    assert [s.ids[:2] for s in samples] == [tuple(CHARS.encode(x * 2)) for x in "aaddcc"]
    assert vars(reward) == before  # nothing stays for a later call
    assert [s.parts for s in samples[::2]] == [
        {"format/extracted": 0.0},
        {},
        {"format/extracted": 1.0},
    ]
    assert no_answer(samples, "eval/") == {"eval/extraction_failed_fraction": 0.5}
    assert no_answer(samples[2:4]) == {}  # both failed
    assert [s.failure for s in samples] == ["", "", "error: d", "error: d", "", ""]
    with caplog.at_level("WARNING", "rljax"):
        warn_of_failed_rewards(samples[:2], prompts)
        warn_of_failed_rewards(samples, prompts)
    (line,) = caplog.messages
    assert line.startswith("2 of 6 rewards failed, and their samples are left out: error: d.")
    assert line.endswith("The first is of the prompt 'd>'")


def test_a_response_that_goes_on_is_scored_from_its_start():
    """The prompt "ca>" and the beginning "ab" of its response: the reward reads all of it."""
    (prompt,), pool = records("ca>"), Pool()
    begun = dataclasses.replace(continued(prompt, CHARS.encode("ab")), ground_truth="a")
    reward = Reward(pool, CHARS, make_mesh())
    (sample,) = sample_all(policy().continuing(5), [begun], 1, reward, key=key(), starts=[3])
    assert pool.samples[0]["response"] == "abcc" and sample.reward == 1.0
    assert sample.text == "cc"  # the completion alone


@functools.cache
def made():
    """A model on two devices, and its weights."""
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    model = Model(resolve(TEXT, NAMESPACES["model"])(CHARS.vocab_size), mesh)
    return model, model.init(key())


def saved(**sampler) -> SavedPolicy:
    config = Config()
    for name, value in sampler.items():
        setattr(config.sampler, name, value)
    return SavedPolicy(config, *made(), CHARS, None)


def test_a_policy_samples_as_its_config_says():
    options = dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, max_response_tokens=9)
    found = saved(**options, stop_strings=("b>",)).sampling()
    assert {name: getattr(found, name) for name in options} == options
    assert found.stop_strings == ("b>",) and found.stop_ids == tuple(CHARS.eos_ids)
    changed = saved(**options).sampling(temperature=2.0, max_response_tokens=4)
    assert (changed.temperature, changed.max_response_tokens, changed.top_k) == (2.0, 4, 5)
    with pytest.raises(InputError, match="no room for an answer"):
        thinks = dict(thinking_tokens=(1, 8), interrupt_phrase="ab", end_of_thinking=">")
        saved(**thinks).sampling(max_response_tokens=8)


def ready_with_little_memory(monkeypatch):
    """(a policy, prompts, its sampler where there is room for all, and where there is little)."""
    one = saved(max_response_tokens=4, temperature=1.5)
    prompts = records(*(f"{a}{b}>" for a in "abcd" for b in "abcd"))
    ready = one.ready(prompts)
    monkeypatch.setattr(memory, "device_capacity", lambda _: 1)
    return one, prompts, ready, one.ready(prompts)


def test_fewer_slots_where_memory_is_short(monkeypatch):
    one, prompts, ready, short = ready_with_little_memory(monkeypatch)
    assert ready.actor.decoding.slots == 0
    assert short.actor.decoding.slots == one.model.mesh.size
    one.config.sampler.slots = 3  # what a config says is kept
    assert one.ready(prompts).actor.decoding.slots == 3


@pytest.mark.slow
def test_fewer_slots_draw_the_same_samples(monkeypatch):
    _, prompts, ready, short = ready_with_little_memory(monkeypatch)
    whole, few = (sample_all(one, prompts, 2, key=key()) for one in (ready, short))
    assert [s.ids for s in few] == [s.ids for s in whole]


def test_calls_share_the_prompts_evenly(monkeypatch):
    """Nine prompts in calls of at most eight: two calls of five, not eight and one."""
    monkeypatch.setattr(sampling, "ROWS_PER_CALL", 8)
    prompts, one = records(*["ab>"] * 9), policy()
    assert len(sample_all(one, prompts, 1, key=key())) == 9
    assert [shape[0] for shape in one.actor.shapes] == [5, 5]


@pytest.mark.slow
def test_comparisons_of_a_policy_end_at_its_stop_strings():
    """A run that stops at "a" never answers anything behind it: RLAIF lost that."""
    options = dict(max_response_tokens=6, temperature=1.5)
    task = "first_letter(letters=2, kinds=4, test=4)"
    free = sample_comparisons(saved(**options), task, samples=4)
    assert any("a" in c["first"][:-1] for c in free)  # without the stop string it goes on
    pairs = sample_comparisons(saved(**options, stop_strings=("a",)), task, samples=4)
    texts = [c[name] for c in pairs for name in ("first", "second")]
    assert len(texts) > 8 and any("a" in text for text in texts)
    assert not any("a" in text[:-1] for text in texts)


@pytest.mark.slow
def test_a_reward_of_a_policy_reads_the_reward_model_of_its_run(tmp_path):
    one, text = saved(max_response_tokens=3), "mixture(rewards=('reward_model()',), weights=(2.0,))"
    with pytest.raises(InputError, match="reward.model is ''.*or another reward"):
        one.player(text)
    scalar = Model(dataclasses.replace(one.model.config, labels=1), make_mesh(), "scalar")
    rng = np.random.default_rng(0)

    def noise(x):
        return x + 0.3 * rng.normal(size=x.shape).astype(x.dtype)

    params = jax.tree.map(noise, scalar.init(key(1)))  # a new head is zero
    save_params(tmp_path, scalar, params, bos_id=None, eos_ids=CHARS.eos_ids, pad_id=CHARS.pad_id)
    one.config.reward.model = str(tmp_path)
    prompts = records("ab>", "ca>")
    with contextlib.closing(one.player(text)) as reward:
        samples = sample_all(one.ready(prompts), prompts, 2, reward, key=key())
    assert len({s.reward for s in samples}) > 1
    for sample in samples:
        ids = np.array([[*prompts[sample.prompt].token_ids, *sample.ids]], np.int32)
        batch = batch_from_rows(jnp.asarray(ids), jnp.asarray([ids.shape[1]]), jnp.ones(ids.shape))
        assert sample.reward == pytest.approx(2 * float(scalar.scores(params, batch)[0, 0]), 1e-4)
    with contextlib.closing(one.player("exact_match()")) as reward:
        assert reward.reward.model is None  # it reads no score


def test_a_folder_may_have_an_at_sign_in_its_name(tmp_path):
    (tmp_path / "odd@name").mkdir()
    with pytest.raises(InputError, match="odd@name/config.json does not exist"):
        load_named_policy(f"{tmp_path}/odd@name")
    with pytest.raises(InputError, match="no such folder: got '.*odd'"):
        load_named_policy(f"{tmp_path}/odd@other")
