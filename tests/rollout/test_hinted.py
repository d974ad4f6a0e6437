"""Samples that a teacher reads with a hint: its prompts, its log-probs of the samples, who is not
taught, a teacher that follows the policy, and what is refused."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_runs import preset_config
from tiny_run import metrics_rows, train_on, train_on_one

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES, with_overrides
from rljax.contracts import spec
from rljax.data.online.prompts import PromptRecord
from rljax.errors import InputError
from rljax.models.huggingface import save_params
from rljax.roles import Reference, SelfTeacher
from rljax.rollout.rules.hinted import _filled
from rljax.rollout.rules.hints import HintSample
from rljax.setup import build
from rljax.setup.dry_run import check_fields_read
from rljax.setup.weights import initial_params
from rljax.training.run import Run
from rljax.validation import validate

OWN = '''
def of_some(prompt, samples, number, *, long=False):
    """The ground truth for texts that begin with a or b, and the number of the sample."""
    if prompt.prompt_text[0] in "cd":
        return None
    times = 60 if long and prompt.prompt_text[0] == "b" else number + 1
    return prompt.ground_truth * times

def a_number(prompt, samples, number):
    return 7

def fails_for_some(prompt, response):
    if ">" in response:
        raise ValueError("no letter")
    return 1.0
'''


FLOW = """
from rljax.contracts import contract
from rljax.dataflows import on_policy_distil


@contract(data="samples")
def flow(batch, key, cfg, *, actor, teacher):
    roles, metrics = on_policy_distil.page(
        batch, key, cfg, actor=actor, teacher=teacher, match="sampled"
    )
    return {"actor": roles["actor"]}, metrics
"""


@pytest.fixture(autouse=True)
def own_functions(tmp_path, monkeypatch):
    (tmp_path / "own_hints.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def hinted_config(folder, run="run", **fields):
    """A run of three steps on 16 prompts with hints, of three samples each, from random weights."""
    config = preset_config("sdft")
    config.run_dir, config.steps, config.sft.steps = str(folder / run), 3, 0
    config.evaluate.every_steps, config.export = 0, False
    config.batch.prompts_per_step, config.batch.samples_per_prompt = 16, 3
    config.batch.sequences_per_optimizer_step = 48
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return with_overrides(config, changes, "the test")


def first_batch(config):
    """(the first batch, its metrics, the prompts, the teacher)."""
    with Run(build(config, devices=jax.devices()[:1]), Path(config.run_dir)) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        batch, metrics = run.source.next(0, run.roles)
        records = run.setup.data.prompts
        return jax.tree.map(np.asarray, batch), metrics, records, run.roles["teacher"]


def with_hints(hint: str, more: str = "") -> str:
    return f"with_hint(hint='own_hints.{hint}', template='{{prompt}}{{hint}}>'{more})"


def test_the_teacher_gives_the_log_probs_behind_the_prompt_with_the_hint(tmp_path):
    """Of hints of several lengths, at the tokens of the samples alone; who has none is not taught;
    a sample whose reward failed neither."""
    fields = dict(dataflow="on_policy_distil(match='sampled', scored=True)")
    config = hinted_config(
        tmp_path,
        algorithm__collect=with_hints("of_some()"),
        reward__function="own_hints.fails_for_some",
        **fields,
    )
    batch, metrics, records, teacher = first_batch(config)
    texts = "abcd>"
    alphabet = {text: records[0].token_ids[records[0].prompt_text.index(text)] for text in ">"}
    for record in records:
        alphabet |= dict(zip(record.prompt_text, record.token_ids.tolist(), strict=True))
    assert set(alphabet) == set(texts)
    of_id = {i: text for text, i in alphabet.items()}
    taught, seen = batch.teacher[:, -1] + batch.teacher[:, 4] > 0, {}
    for row in range(48):
        ids = batch.tokens[row][batch.segment_ids[row] > 0].tolist()
        prompt, response = ids[:4], ids[4:]
        text = "".join(of_id[i] for i in prompt)
        number = seen[text] = seen.get(text, -1) + bool(batch.mask[row].any())
        if not batch.mask[row].any() or text[0] in "cd":
            assert not batch.teacher[row].any() and not batch.teacher_logprobs[row].any()
            continue
        assert taught[row]
        hint = [alphabet[text[0]]] * (number + 1) + [alphabet[">"]]
        read = jnp.asarray([prompt + hint + response])
        mask = jnp.asarray([[0.0] * (4 + len(hint)) + [1.0] * len(response)])
        alone = batch_from_rows(read, jnp.asarray([read.shape[1]]), mask)
        want = teacher.logprobs(alone)[0, 4 + len(hint) :]
        at = batch.mask[row] > 0
        np.testing.assert_allclose(batch.teacher_logprobs[row][at], want, atol=2e-5)
        assert (batch.teacher[row] == at).all()
    scored = batch.mask.any(axis=1)
    assert 5 < scored.sum() < 45 and 5 < taught.sum() < scored.sum()
    assert metrics["hint/fraction"] == taught.sum() / scored.sum()
    assert metrics["hint/overlong_fraction"] == 0


@pytest.mark.parametrize("limit", [0, 12])
def test_a_prompt_that_is_too_long_with_its_hint_is_counted_and_not_taught(tmp_path, limit):
    """By the limit of the rollout, or by that of the model."""
    more = f", max_prompt_tokens={limit}" * bool(limit)
    model = "decoder(layers=1, embed=32, mlp=64, heads=2, kv_heads=2, head_dim=16, max_tokens=40)"
    collect = with_hints("of_some(long=True)", more)
    batch, metrics, _, _ = first_batch(
        hinted_config(tmp_path, model=model, algorithm__collect=collect)
    )
    first = batch.tokens[:, 0]
    groups = {i: batch.teacher[first == i].any() for i in set(first.tolist())}
    assert sum(groups.values()) == 1 and len(groups) == 4  # those that begin with a
    assert 0.1 < metrics["hint/overlong_fraction"] < 0.5
    assert 0.1 < metrics["hint/fraction"] < 0.5
    assert metrics["hint/fraction"] == pytest.approx(batch.teacher.any(axis=1).mean())


def record(prompt, **extra) -> PromptRecord:
    messages = None if isinstance(prompt, str) else tuple(prompt)
    text = prompt if isinstance(prompt, str) else "rendered"
    return PromptRecord(text, np.array([1]), "truth", "x", extra, 3, messages)


def test_a_hint_is_written_into_the_last_message_that_it_belongs_to():
    fill = functools.partial(_filled, template="{prompt}|{hint}|{other}", message="user")
    # Braces of the texts themselves are not filled.
    assert fill(record("ask {hint}"), "h {prompt}") == "ask {hint}|h {prompt}|{other}"
    system, ask, answer = (
        {"role": role, "content": text}
        for role, text in (("system", "be"), ("user", "ask"), ("assistant", "so"))
    )
    more = {"role": "user", "content": "more", "name": "x"}
    assert fill(record([system, ask, answer, more]), "h") == [
        *(system, ask, answer),
        {**more, "content": "more|h|{other}"},
    ]
    as_system = functools.partial(fill, message="system")
    assert as_system(record([system, ask]), "h") == [{**system, "content": "be|h|{other}"}, ask]
    assert as_system(record([ask]), "h") == [{"role": "system", "content": "h"}, ask]
    for fill_one, prompt in ((as_system, "bare"), (fill, [system, answer])):
        with pytest.raises(InputError, match="row 3 has no message of it"):
            fill_one(record(prompt), "h")


def samples(*scored) -> list[HintSample]:
    return [HintSample(score, lambda text=text: text) for text, score in scored]


def test_another_sample_that_is_right_is_the_hint():
    """Right ones take turns, nobody is shown their own, and the reasoning may be left out."""
    group = samples(("a", 0.0), ("<think>hm</think>b", 1.0), ("c", None), ("d", 1.0))
    best = resolve("right_sample()", NAMESPACES["hint"])
    shown = [best(record("p"), group, number) for number in range(4)]
    assert shown == ["<think>hm</think>b", "d", "d", "<think>hm</think>b"]
    alone = resolve("right_sample(answer_alone=True, at=0.5)", NAMESPACES["hint"])
    assert alone(record("p"), group, 0) == "b"
    assert best(record("p"), samples(("a", 0.0), ("b", 1.0)), 1) is None


def test_hints_of_the_row():
    def hint(text, **extra):
        return resolve(text, NAMESPACES["hint"])(record("p", **extra), [], 0)

    assert hint("column()", privileged_context="see") == "see" and hint("column()") is None
    assert hint("column(name='demonstration')", demonstration="so") == "so"
    assert hint("ground_truth()") == "truth" and hint("same_text(text='be brief')") == "be brief"


def test_a_hint_that_is_no_text_is_refused(tmp_path):
    collect = "with_hint(hint='own_hints.a_number')"
    with pytest.raises(InputError, match=r"returns no text for the prompt of row \d+.*got 7"):
        first_batch(hinted_config(tmp_path, algorithm__collect=collect))


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_the_teacher_follows_the_policy_by_its_rate(tmp_path, rate):
    """After each step, in float32 where it is a mean; a checkpoint holds it, so that a resumed run
    goes on bitwise."""
    dtype = dict(model_settings__dtype="bfloat16") if rate == 0.25 else {}
    config = hinted_config(tmp_path, algorithm__teacher_rate=rate, steps=2, **dtype)
    teachers, policies = [], []
    with Run(build(config, devices=jax.devices()[:1]), Path(config.run_dir)) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        for _ in range(3):
            teachers.append(jax.device_get(run.roles["teacher"].params))
            policies.append(jax.device_get(run.roles["actor"].state.params))
            if len(teachers) < 3:
                run.step()
    for step in (1, 2):
        want = jax.tree.map(
            lambda old, new: (1 - rate) * old + rate * new, teachers[step - 1], policies[step]
        )
        for got, wanted in zip(jax.tree.leaves(teachers[step]), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), policies[0], policies[2])
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_with_adapters_the_base_is_shared_and_stays(tmp_path):
    config = hinted_config(tmp_path, algorithm__teacher_rate=0.5, lora__rank=2, steps=2)
    with Run(build(config, devices=jax.devices()[:1]), Path(config.run_dir)) as run:
        run.begin(run.phase, initial_params(run.config, run.setup.model))
        start = jax.device_get(run.roles["teacher"].params)
        run.step()
        run.step()  # the base was not given away with the teacher's own arrays
        teacher, actor = run.roles["teacher"], run.roles["actor"]
        own, base = teacher.model.split(teacher.params)
        _, actors_base = actor.model.split(actor.state.weights)
        pairs = zip(jax.tree.leaves(base), jax.tree.leaves(actors_base), strict=True)
        assert all(x is y for x, y in pairs) and jax.tree.leaves(base)
        old, _ = teacher.model.split(start)
        changes = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), own, old)
        assert max(jax.tree.leaves(changes)) > 0


def test_what_is_learned_is_the_teachers_view_with_the_hint(tmp_path):
    """The gap of a step is that of the log-probs that the rollout filled: without a hint the policy
    and its own copy would agree."""
    config = hinted_config(tmp_path, algorithm__collect=with_hints("of_some()"), steps=1)
    batch, _, _, _ = first_batch(config)
    train_on_one(with_overrides(config, {"run_dir": str(tmp_path / "trained")}, "the test"))
    (row,) = metrics_rows(tmp_path / "trained")
    assert abs(row["teacher/gap"]) > 1e-3 and row["grad_norm"] > 0
    assert 0 < row["teacher/none_fraction"] < 1
    assert batch.teacher_logprobs.any()


def test_a_dataflow_that_is_no_program_renews_the_teacher_too(tmp_path):
    """It returns the policy alone."""
    (tmp_path / "own_flow.py").write_text(FLOW)
    fields = dict(
        dataflow="own_flow.flow", algorithm__teacher_rate=1.0, algorithm__teacher_coef=0.0
    )
    config = hinted_config(tmp_path, **fields)
    with Run(build(config, devices=jax.devices()[:1]), Path(config.run_dir)) as run:
        run.begin(run.phase, run.setup.model.init(jax.random.key(1)))
        run.step()
        pairs = zip(
            jax.tree.leaves(run.roles["teacher"].params),
            jax.tree.leaves(run.roles["actor"].state.params),
            strict=True,
        )
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)


def test_another_model_may_be_the_one_that_is_shown_the_hint(tmp_path):
    config = hinted_config(tmp_path)
    model = build(config, devices=jax.devices()[:1]).model
    folder = tmp_path / "teacher"
    ids = dict(bos_id=None, eos_ids=(1,), pad_id=0)
    save_params(folder, model, model.init(jax.random.key(9)), **ids)
    own, _, _, teacher = first_batch(config)
    assert isinstance(teacher, SelfTeacher)
    other, _, _, teacher = first_batch(with_overrides(config, {"teacher_model": str(folder)}, "x"))
    assert type(teacher) is Reference
    np.testing.assert_array_equal(own.tokens, other.tokens)
    assert np.abs(own.teacher_logprobs - other.teacher_logprobs).max() > 0.1


def test_what_the_inner_rollout_declares_is_declared():
    """In flight its dead groups are replaced, whatever stands around it."""
    for outer in ("with_hint", "with_demonstration", "greedy_baseline"):
        text = f"{outer}(inner='dynamic(oversample=2.0)')"
        declared = spec(resolve(text, NAMESPACES["collect"]))
        assert declared.needs_groups and declared.drops_dead == (20.0, "error"), outer
    assert not spec(resolve("with_hint()", NAMESPACES["collect"])).needs_groups
    fills = spec(resolve("with_hint(inner='search()')", NAMESPACES["collect"])).fills
    assert {"teacher", "teacher_logprobs", "target_ids"} <= {*fills}


REFUSED = {
    "a rate without a hint": (
        dict(algorithm__collect="once()", algorithm__teacher_rate=0.1, teacher_model="tests"),
        "moves a teacher that is the policy itself",
    ),
    "a rate of another model": (
        dict(algorithm__teacher_rate=0.1, teacher_model="tests"),
        "moves a teacher that is the policy itself",
    ),
    "no teacher": (dict(algorithm__collect="once()"), "the folder of a teacher is needed"),
    "nobody reads it": (dict(dataflow="grpo"), "asks a teacher, which nothing reads"),
    "a dataflow without": (dict(dataflow="raft()"), "which the dataflow does not take"),
    "several teachers": (
        dict(teachers=("tests",), teacher_sources=("*",)),
        "asks one teacher, and `teachers` are several",
    ),
    "an environment": (
        dict(environment__function="guess_number()", dataflow="grpo", algorithm__teacher_coef=1.0),
        "an environment writes its own",
    ),
    "no place for the hint": (
        dict(algorithm__collect="with_hint(template='{prompt}')"),
        "stands in it once",
    ),
    "roles that are not handed on": (
        dict(algorithm__collect="with_hint(inner='special_token()')"),
        "asks for critic",
    ),
    "the same of demonstrations": (
        dict(algorithm__collect="with_demonstration(inner='special_token()')", dataflow="ppo"),
        "asks for critic",
    ),
    "a hint of scores without any": (
        dict(algorithm__collect="with_hint(hint='right_sample()')"),
        "scored=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, tmp_path):
    fields, says = REFUSED[case]
    config = hinted_config(tmp_path, **fields)
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        validate(config)


def test_whole_distributions_are_refused_before_a_run(tmp_path):
    config = hinted_config(tmp_path, dataflow="on_policy_distil()")
    with pytest.raises(InputError, match="match='sampled'"):
        check_fields_read(build(config, devices=jax.devices()[:1]))


def test_a_run_resumes_bitwise(tmp_path):
    """The teacher, a moving mean, is in the checkpoint."""
    fields = dict(algorithm__teacher_rate=0.3)
    fields |= dict(dataflow="grpo", algorithm__teacher_coef=0.5)
    fields |= dict(algorithm__collect=with_hints("of_some()"))
    whole, half, part = (
        hinted_config(tmp_path, folder, **fields, steps=steps)
        for folder, steps in (("whole", 4), ("part", 2), ("part", 4))
    )
    for config in (whole, half, part):
        train_on_one(config)
    want, got = (metrics_rows(config.run_dir) for config in (whole, part))
    for name in ("loss", "teacher/gap", "hint/fraction", "grad_norm"):
        assert [row[name] for row in got] == [row[name] for row in want]
    assert 0 < want[-1]["teacher/none_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh__tensor": 2}, {"mesh__context": 2}])
def test_a_mesh_computes_what_one_device_does(tmp_path, mesh):
    fields = dict(algorithm__teacher_rate=0.2, algorithm__collect=with_hints("of_some()"))
    fields |= dict(batch__prompts_per_step=16, steps=3)
    found = []
    for run, devices, more in (("one", 1, {}), ("four", 4, mesh)):
        config = hinted_config(tmp_path, run, **fields, **more)
        train_on(devices, config)
        found.append(metrics_rows(config.run_dir))
    for one, four in zip(*found, strict=True):
        for name in ("loss", "teacher/gap", "hint/fraction", "grad_norm"):
            assert four[name] == pytest.approx(one[name], rel=1e-3), name
