"""Teachers: several of them by data_source, the sampled token as an advantage, what is refused."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import lanes
from golden_checks.common import response_batch
from preset_runs import preset_config
from test_distil import STUDENT, TEACHER, Algorithm, _copy, model_of, pair_of, rows
from tiny_run import metrics_rows, train_on_one

from rljax import setup as build
from rljax.config import AlgorithmConfig, Config, SFTConfig, with_overrides
from rljax.dataflows.algorithm import Algorithm as Cfg
from rljax.dataflows.distil import distil, early_weights, on_policy_distil
from rljax.dataflows.steps import compute_advantages, teacher_gap
from rljax.errors import InputError
from rljax.learn import Steps, token_mean
from rljax.learn.packing import packing_for
from rljax.losses.distillation import jsd_terms
from rljax.losses.policy import ppo_clip
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.roles import Reference, Teachers
from rljax.setup.role_table import abstract_roles
from rljax.training.sources import with_teachers
from rljax.validation import validate

KEY = jax.random.key(0)
VOCAB = 23
NUMBERS = np.array([1, 2, 0, 2, 1, 1, 2, 0])  # the teacher of each row


def teachers_of(vocab: int = VOCAB) -> Teachers:
    model = model_of(TEACHER, vocab)
    members = [Reference(model.init(jax.random.key(i)), model, 1.0) for i in (1, 2)]
    return Teachers(tuple(members), ("math*", "code"))


def taught_batch(count: int = 8, tokens: int = 9):
    """Rows of two teachers and of none, whose masks have holes."""
    batch = rows(count, tokens, VOCAB)
    numbers = jnp.asarray(np.resize(NUMBERS, count), jnp.int32)[:, None]
    return batch.replace(teacher=jnp.broadcast_to(numbers, batch.mask.shape))


def test_each_row_has_the_log_probs_of_its_own_teacher():
    """Also where passes are packed and where a row's other fields are garbage."""
    batch, teachers = taught_batch(), teachers_of()
    alone = [np.asarray(member.logprobs(batch)) for member in teachers.members]
    want = np.select([batch.teacher == 1, batch.teacher == 2], alone, 0.0)
    at = np.asarray(batch.mask) > 0
    assert np.abs(alone[0] - alone[1])[at].max() > 0.1
    np.testing.assert_allclose(np.asarray(teachers.logprobs(batch))[at], want[at], atol=1e-6)
    packing = packing_for(64, 96, 8, teachers.members[0].model.mesh)
    wide = taught_batch(64, 96)
    plain = np.asarray(teachers.logprobs(wide))
    packed = np.asarray(teachers.logprobs(wide, Steps(64, 8, packing=packing)))
    assert packing is not None
    at = np.asarray(wide.mask) > 0
    np.testing.assert_allclose(packed[at], plain[at], atol=2e-5)
    none = at & (np.asarray(wide.teacher) == 0)
    assert none.any() and not packed[none].any()


def test_rows_of_several_teachers_need_to_say_whose_they_are():
    with pytest.raises(InputError, match="several teachers needs batch field teacher"):
        teachers_of().logprobs(rows(4, 5, VOCAB))


def moved(actor, new) -> list:
    pairs = zip(jax.tree.leaves(actor.state.params), jax.tree.leaves(new), strict=True)
    return [np.asarray(a) - np.asarray(b) for a, b in pairs]


@pytest.mark.parametrize("packs", [False, True])
def test_whole_distributions_are_learned_from_each_rows_own_teacher(packs):
    """Loss and step are those of all logits: the token mean over rows that have a teacher."""
    count, tokens = (64, 96) if packs else (8, 9)
    batch, teachers, (actor, _) = taught_batch(count, tokens), teachers_of(), pair_of(VOCAB)
    start = jax.device_get(actor.state.params)
    taught = batch.mask * (batch.teacher > 0)

    def dense(params):
        def log_probs(model, params):
            z = jnp.pad(model.logits(params, batch)[:, :-1], ((0, 0), (1, 0), (0, 0)))
            return jax.nn.log_softmax(z)

        student = log_probs(actor.model, params)
        one, two = (log_probs(m.model, m.params) for m in teachers.members)
        whose = jnp.where((batch.teacher == 1)[..., None], one, two)
        terms = jnp.sum(jsd_terms(student, whose, beta=1.0), axis=-1)
        return jnp.sum(jnp.where(taught > 0, terms, 0.0)) / jnp.sum(taught)

    want, gradient = jax.jit(jax.value_and_grad(dense))(start)
    packing = packing_for(count, tokens, 8, actor.model.mesh) if packs else None
    assert (packing is not None) == packs
    cfg = Algorithm(Steps(count, 8, packing=packing))
    new, metrics = distil(batch, KEY, cfg, actor=_copy(actor), teacher=teachers, beta=1.0)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-4)
    untaught = 1 - float(jnp.sum(taught) / jnp.sum(batch.mask))
    assert float(metrics["teacher/none_fraction"]) == pytest.approx(untaught, abs=1e-6)
    assert 0.1 < untaught < 0.5
    steps = moved(actor, jax.device_get(new["actor"].state.params))
    for got, wanted in zip(steps, jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(got, wanted, atol=3e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_sampled_token_moves_the_policy_by_its_gap(gamma):
    """match="sampled": the step of REINFORCE whose advantage is log teacher - log policy."""
    batch, teachers, (actor, _) = taught_batch(), teachers_of(), pair_of(VOCAB)
    zeros = jnp.zeros(batch.mask.shape)
    old = actor.logprobs(batch)
    batch = batch.replace(
        sampler_logprobs=jnp.where(batch.mask > 0, old, jnp.nan),
        policy_version=zeros.astype(jnp.int32),
        finish_reason=jnp.zeros(8, jnp.int32),
        group=jnp.arange(8, dtype=jnp.int32),
        entropy=zeros,
    )
    taught = np.asarray(batch.mask * (batch.teacher > 0))
    gap = np.where(taught > 0, old - teachers.logprobs(batch), 0.0)

    weights = early_weights(jnp.asarray(gap), gamma)

    def surrogate(params):
        logprobs = actor.model.logprobs(params, batch, 1.0)[0]
        return jnp.sum(jnp.where(taught > 0, weights * gap * logprobs, 0.0)) / taught.sum()

    gradient = jax.jit(jax.grad(surrogate))(jax.device_get(actor.state.params))
    cfg = Cfg(None, ppo_clip, None, token_mean, Steps(8, 4))
    roles = dict(actor=_copy(actor), teacher=teachers)
    new, metrics = on_policy_distil(batch, KEY, cfg, **roles, match="sampled", prefix_gamma=gamma)
    for got, wanted in zip(
        moved(actor, jax.device_get(new["actor"].state.params)),
        jax.tree.leaves(gradient),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert float(metrics["teacher/gap"]) == pytest.approx(gap.sum() / taught.sum(), rel=1e-4)
    for number, name in enumerate(teachers.names, 1):
        own = taught * (np.asarray(batch.teacher) == number)
        mean = (own * gap).sum() / own.sum()
        assert float(metrics[f"teacher/gap/{name}"]) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("match", ["vocabulary", "sampled"])
def test_metrics_of_samples_are_of_all_of_them(match):
    """Also of those whose prompt has no teacher: they were sampled and scored like the others."""
    batch, teachers, (actor, _) = taught_batch(), teachers_of(), pair_of(VOCAB)
    zeros = jnp.zeros(batch.mask.shape)
    untaught = (batch.teacher == 0) & (jnp.cumsum(batch.mask, axis=1) == 1) & (batch.mask > 0)
    batch = batch.replace(
        sampler_logprobs=zeros,
        policy_version=zeros.astype(jnp.int32),
        finish_reason=jnp.zeros(8, jnp.int32),
        group=jnp.arange(8, dtype=jnp.int32),
        rewards=jnp.where(untaught, 1.0, 0.0),  # those alone are right
        entropy=zeros,
    )
    cfg = Cfg(None, ppo_clip, None, token_mean, Steps(8, 4))
    roles = dict(actor=_copy(actor), teacher=teachers)
    _, metrics = on_policy_distil(batch, KEY, cfg, **roles, match=match)
    count = float(jnp.sum(jnp.any(batch.mask > 0, axis=1)))
    right = float(jnp.sum(untaught)) / count
    assert float(metrics["reward/mean"]) == pytest.approx(right) and right > 0
    lengths = float(jnp.sum(batch.mask)) / count
    assert float(metrics["response_tokens/mean"]) == pytest.approx(lengths)


def test_the_gap_is_taken_off_the_advantage_of_every_token():
    """In float64, by hand, with garbage at mask 0, and without a change of the returns."""
    with jax.enable_x64(True):
        mask = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1]], np.float64)
        random = np.random.default_rng(0)
        old, taught = (np.where(mask > 0, random.normal(size=(3, 3)), np.nan) for _ in range(2))
        batch = response_batch(mask, jnp.float64, old_logprobs=old, teacher_logprobs=taught)
        plain = random.normal(size=(3, 3))
        cfg = dataclasses.replace(
            Cfg(lambda b: (jnp.asarray(plain), jnp.ones((3, 3))), None, None, None, Steps(3, 3)),
            teacher_coef=0.7,
        )
        result = compute_advantages(batch, batch, cfg)
        want = plain - 0.7 * np.where(mask > 0, old - taught, 0.0)
        np.testing.assert_allclose(result.advantages, want, rtol=1e-12)
        assert (np.asarray(result.returns) == 1).all()
        numbers = jnp.asarray([[0] * 3, [1] * 3, [2] * 3], jnp.int32)
        gap = np.asarray(teacher_gap(batch.replace(teacher=numbers)))
        assert not gap[0].any() and gap[1, 1] == old[1, 1] - taught[1, 1]
        off = compute_advantages(batch, batch, cfg.replace(teacher_coef=0.0))
        assert (np.asarray(off.advantages) == plain).all()


def test_early_tokens_weigh_more_as_the_published_code_has_it():
    """TRL's IWOPDTrainer: 1 + gamma (1 - prefix / total) of |A|, with holes and an empty row."""
    random = np.random.default_rng(0)
    advantages = random.normal(size=(4, 7)) * random.integers(0, 2, (4, 7))
    advantages[3] = 0.0
    want = np.ones((4, 7))
    for i, row in enumerate(np.abs(advantages)):
        for t in range(7):
            want[i, t] += 0.5 * (1 - row[:t].sum() / max(row.sum(), 1e-8))
    with jax.enable_x64(True):
        np.testing.assert_allclose(early_weights(jnp.asarray(advantages), 0.5), want, rtol=1e-12)


# -- whose prompt it is --


@dataclasses.dataclass
class Record:
    data_source: str


def numbered(sources, **fields) -> list[int]:
    """The teacher of each row of a batch: prompt i has rows 2i and 2i + 1, and the last row, whose
    reward failed, a group of its own and no policy token."""
    config = dataclasses.replace(Config(), **fields)
    mesh = make_mesh(devices=jax.devices()[:2])
    setup = SimpleNamespace(config=config, model=SimpleNamespace(mesh=mesh))
    rows = 2 * len(sources)
    group = np.repeat(np.arange(len(sources), dtype=np.int32), 2)
    group[-1] = rows + 5
    mask = np.ones((rows, 3), np.float32) * (np.arange(rows) < rows - 1)[:, None]
    batch = response_batch(mask, jnp.float32, group=group)
    found = with_teachers(batch, [Record(source) for source in sources], setup).teacher
    if found is None:
        return []
    assert (np.asarray(found)[:, 1:] == np.asarray(found)[:, :1]).all()
    return np.asarray(found)[:, 0].tolist()


def test_the_first_pattern_that_fits_the_data_source_names_the_teacher():
    sources = ["math/a", "code", "chat", "math"]
    several = dict(teachers=("one", "two"), teacher_sources=("math*", "*/a"))
    assert numbered(sources, **several) == [1, 1, 0, 0, 0, 0, 1, 0]
    assert numbered(sources, **several, teacher_model="rest") == [1, 1, 3, 3, 3, 3, 1, 0]
    turned = dict(teachers=("two", "one"), teacher_sources=("*/a", "math*"))
    assert numbered(sources, **turned) == [1, 1, 0, 0, 0, 0, 2, 0]
    assert numbered(sources, teacher_model="rest") == []


def test_teachers_without_prompts_are_told(tmp_path, caplog):
    """By the data_source of the data, before weights are made."""
    build.build(two_teachers(tmp_path, teacher_sources=("lower", "uper")), jax.devices()[:1])
    (told,) = (t for t in map(logging.LogRecord.getMessage, caplog.records) if "no prompt has" in t)
    assert "'uper'" in told and "'lower', 'upper'" in told
    nobody = dict(teacher_sources=("math*", "code*"))
    with pytest.raises(InputError, match="the data_source of the data is 'lower', 'upper'"):
        build.build(two_teachers(tmp_path, **nobody), jax.devices()[:1])
    folder = write_teacher(tmp_path / "teacher5", 5)
    rest = two_teachers(tmp_path, **nobody, teacher_model=folder)
    # In the order of their numbers, which the rows have.
    setup = build.build(rest, jax.devices()[:1])
    assert abstract_roles(setup)["teacher"].names == ("math*", "code*", "teacher_model")


# -- runs --


def two_teachers(tmp_path, run="run", **fields):
    """A run over two sources of prompts, each with a teacher."""
    config = preset_config("grpo")
    config.model, config.steps, config.run_dir = STUDENT, 2, str(tmp_path / run)
    config.dataflow = "on_policy_distil(match='sampled')"
    config.algorithm, config.sft, config.export = AlgorithmConfig(), SFTConfig(), False
    config.data.train = "first_letter(data_source='lower')"
    config.data.sources = ("first_letter(letters=2, kinds=4, test=4, data_source='upper')",)
    config.teachers = tuple(write_teacher(tmp_path / f"teacher{i}", i) for i in (5, 6))
    config.teacher_sources = ("low*", "*")
    config.evaluate.every_steps = 0
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return with_overrides(config, changes, "the test")


def write_teacher(folder, seed: int, vocab: int = 7) -> str:
    if not folder.exists():
        model = model_of(TEACHER, vocab)
        params = model.init(jax.random.key(seed))
        save_params(folder, model, params, bos_id=None, eos_ids=(1,), pad_id=0)
    return str(folder)


@pytest.mark.parametrize("staleness", lanes([0], [2]))
def test_a_run_learns_from_two_teachers(tmp_path, staleness):
    """Also from samples in flight, whose prompts come in another order: the gap to each falls."""
    config = two_teachers(
        tmp_path, steps=40, rollouts__max_staleness=staleness, actor_optimizer__lr=1e-2
    )
    train_on_one(config)
    found = metrics_rows(config.run_dir)
    for name in ("low*", "*"):
        gaps = [row[f"teacher/gap/{name}"] for row in found]
        first, last = np.mean(gaps[:5]), np.mean(gaps[-10:])
        assert first > 0.05 and last < 0.8 * first, (name, first, last)
    assert all(row["teacher/none_fraction"] == 0 for row in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(dataflow="grpo"),
        dict(dataflow="ppo", algorithm__advantage="gae()"),
        dict(dataflow="reinforce", algorithm__advantage="reinforce()"),
        dict(dataflow="remax", algorithm__advantage="remax()"),
        dict(dataflow="vapo(value_pretraining_steps=1)", algorithm__advantage="vapo_gae()"),
        dict(dataflow="on_policy_distil(top_k=3, top_k_of='teacher', tail=False)"),
    ],
    ids=lambda fields: fields["dataflow"].partition("(")[0],
)
def test_beside_a_reward(tmp_path, fields):
    """One pattern fits nothing: prompts of the other source have the reward alone."""
    beside = {} if "distil" in fields["dataflow"] else dict(algorithm__teacher_coef=0.5)
    config = two_teachers(tmp_path, teacher_sources=("low*", "none"), **fields, **beside)
    train_on_one(config)
    found = metrics_rows(config.run_dir)
    assert 0 < found[-1]["teacher/none_fraction"] < 1
    if "distil" in fields["dataflow"]:
        assert 0 < found[-1]["top_k_overlap"] <= 1
    else:
        assert found[-1]["teacher/gap/low*"] > 0 and "teacher/gap/none" not in found[-1]


@pytest.mark.slow
def test_one_teacher_of_a_program_of_several_steps(tmp_path):
    """The same run as step by step."""
    one = dict(teachers=(), teacher_sources=(), steps=4, dataflow="grpo")
    one |= dict(algorithm__teacher_coef=0.5, teacher_model=write_teacher(tmp_path / "teacher5", 5))
    one |= dict(reward__function="exact_match()")
    found = {}
    for steps in (1, 4):
        config = two_teachers(tmp_path, f"run{steps}", **one, program_steps=steps)
        train_on_one(config)
        found[steps] = [row["teacher/gap"] for row in metrics_rows(config.run_dir)]
    assert len(found[1]) == 4 and found[1] == found[4]


REFUSED = {
    "one pattern for two": (dict(teacher_sources=("low*",)), "1 patterns of data_source for 2"),
    "a pattern twice": (dict(teacher_sources=("*", "*")), "stands twice"),
    "a pattern with the name of the rest": (
        dict(teacher_sources=("teacher_model", "*"), teacher_model="tests"),
        "stands twice",
    ),
    "patterns without teachers": (dict(teachers=()), "teacher_sources"),
    "no coefficient": (dict(dataflow="grpo"), "nothing reads it while algorithm.teacher_coef is 0"),
    "no teacher": (
        dict(dataflow="grpo", algorithm__teacher_coef=1.0, teachers=(), teacher_sources=()),
        "the folder of a teacher is needed",
    ),
    "a coefficient below 0": (dict(dataflow="grpo", algorithm__teacher_coef=-1.0), "must be >= 0"),
    "a coefficient without a reward": (
        dict(algorithm__teacher_coef=1.0),
        "learns from the teacher alone",
    ),
    "a dataflow without one": (
        dict(dataflow="raft", algorithm__teacher_coef=1.0),
        "takes no teacher beside its reward",
    ),
    "a folder that is not there": (dict(teachers=("tests", "/no/folder")), "/no/folder"),
    "options of whole distributions": (
        dict(dataflow="on_policy_distil(match='sampled', top_k=3)"),
        "compares the sampled token alone",
    ),
    "a weight of whole distributions": (
        dict(dataflow="on_policy_distil(prefix_gamma=0.5)"),
        "it weighs the advantages of sampled tokens",
    ),
    "several steps in a program": (dict(program_steps=2), "the host finds the teacher"),
    "stored rollouts": (dict(rollouts__replay="rows.jsonl"), "of which data_source"),
    "rows of a file": (
        dict(dataflow="distil", data__train="letter_feedback()", data__sources=()),
        "teachers",
    ),
    "several seats": (
        dict(dataflow="grpo", algorithm__teacher_coef=1.0, environment__function="kuhn_poker()"),
        "several seats",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said(tmp_path, case):
    fields, words = REFUSED[case]
    assert validate(two_teachers(tmp_path)) == []
    with pytest.raises(InputError) as raised:
        validate(two_teachers(tmp_path, **fields))
    assert words in str(raised.value)
