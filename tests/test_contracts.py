"""Contracts: the declaration of a function, and that what it declares is what it reads."""

import dataclasses
import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from namespaces import public_functions, unwrapped

from rljax import advantages, correction
from rljax.batch import Batch
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import Contract, contract, spec
from rljax.errors import InputError
from rljax.learn import reductions
from rljax.losses import (
    distillation,
    implicit_reward,
    kl,
    policy,
    preference,
    q_function,
    reward_model,
    value,
)
from rljax.losses.policy import PolicyOutputs
from rljax.metric import Metric
from rljax.shaping import filters, scores, steps

P = functools.partial
ROWS, TOKENS = 12, 6
SHAPES = {"B": ROWS, "S": TOKENS, "K": 2}
FIELDS = {
    f.name: jax.ShapeDtypeStruct([SHAPES[a] for a in f.metadata["axes"]], f.metadata["dtype"])
    for f in dataclasses.fields(Batch)
    if set(f.metadata["axes"]) <= SHAPES.keys()
}
ALWAYS = ("tokens", "segment_ids", "positions", "mask")
TOKEN, ROW = FIELDS["mask"], FIELDS["scores"]
LOGITS = jax.ShapeDtypeStruct((ROWS, TOKENS, 2), jnp.float32)
OF_POLICY, OF_TOKENS, OF_ROWS = (PolicyOutputs(TOKEN, TOKEN),), (TOKEN,), (ROW,)

# Namespace -> what stands before the batch, and the functions with the options that change what
# they read. Functions without such an option are added by themselves.
TABLE = {
    advantages: (
        (),
        [
            P(advantages.group_relative, exclude_truncated=True),
            P(advantages.gae, bootstrap_truncated=True),
            P(advantages.vapo_gae, bootstrap_truncated=True),
        ],
    ),
    policy: (
        OF_POLICY,
        [
            P(policy.ppo_clip, max_sequence_kl=0.1),
            P(policy.gspo, max_sequence_kl=0.1),
            P(policy.cispo, behaviour="sampler"),
            P(policy.topr, behaviour="old"),
            P(policy.m2po, behaviour="old"),
            P(policy.trajectory_balance, log_z=jnp.zeros(ROWS)),
        ],
    ),
    value: (OF_TOKENS, [P(value.squared_error, clip=None)]),
    preference: (
        OF_POLICY,
        [
            P(preference.dpo, wpo_weighting=True),
            P(preference.dpo, losses=("sigmoid", "sft"), wpo_weighting=True),
        ],
    ),
    implicit_reward: (OF_POLICY, []),
    q_function: (
        OF_POLICY,
        [
            P(q_function.dqo_policy, beta=0.1),
            P(q_function.dqo_policy, beta=0.1, behaviour="ref", bootstrap_truncated=True),
            P(q_function.dqo_policy, beta=0.1, behaviour="old", one_step=True),
            P(q_function.dqo_policy, beta=0.1, is_level="off"),
            P(q_function.dqo_value, beta=0.1),
            P(q_function.dqo_value, beta=0.1, one_step=True),
            P(q_function.dqo_value, beta=0.1, is_level="off", bootstrap_truncated=True),
            P(q_function.dro_policy, tau=0.1),
            P(q_function.dro_policy, tau=0.1, value=jnp.zeros(ROWS)),
            P(q_function.dro_value, tau=0.1),
        ],
    ),
    reward_model: (OF_ROWS, [P(reward_model.bradley_terry, margin=True)]),
    reductions: (
        (),
        [
            P(reductions.token_sum_norm, max_tokens=9),
            P(reductions.seq_mean_token_sum_norm, max_tokens=9),
        ],
    ),
    filters: ((), []),
    scores: (
        (),
        [
            P(scores.soft_overlong, max_tokens=5, cache_tokens=2),
            P(scores.length_penalty_when_right, max_tokens=5, cache_tokens=2),
            P(scores.clipped, low=0.0, high=1.0),
        ],
    ),
    correction: ((), []),
}
# Functions that another array stands beside the batch of.
BESIDE = {
    preference.kto: (0.3,),
    preference.bco: (0.1,),
    preference.xpo: (jnp.zeros(ROWS // 2, jnp.bool_),),
}
BEFORE = {
    reward_model.step_regression: OF_TOKENS,
    reward_model.step_classification: (LOGITS,),
    q_function.dqo_value: OF_TOKENS,
    q_function.dro_value: OF_TOKENS,
}
# Public functions of these modules that are not called with a batch as their stage does.
HELPERS = {
    implicit_reward.group_accuracy,
    scores.response_tokens,
    scores.apply_shaping,
    q_function.lambda_returns,
    q_function.offline_weights,
    q_function.prompt_values,
    q_function.soft_rewards,
}


def cases():
    """(name, what stands before the batch, function) of every function of every namespace."""
    for module, (before, listed) in TABLE.items():
        plain = [f for f in public_functions(module) if f not in HELPERS]
        needed = {unwrapped(p) for p in listed if not callable_without_options(unwrapped(p))}
        for function in [*(f for f in plain if f not in needed), *listed]:
            bare = unwrapped(function)
            options = function.keywords if isinstance(function, P) else {}
            name = ".".join([module.__name__.rpartition(".")[2], bare.__name__, *options])
            yield name, BEFORE.get(bare, before), function
    for function, before in (
        (P(kl.kl_penalised_rewards, coef=0.1), ()),
        (distillation.sampled_reverse_kl, OF_POLICY),
        (steps.dense_step_rewards, ()),
        (P(steps.process_reward_metrics, rewards=jnp.zeros((ROWS, TOKENS))), ()),
    ):
        yield unwrapped(function).__name__, before, function


def callable_without_options(function) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


CASES = list(cases())


def call(before, function, fields):
    """The shapes that the function returns for a batch that has these fields alone."""
    batch = Batch(**{name: FIELDS[name] for name in (*ALWAYS, *fields)})
    beside = BESIDE.get(unwrapped(function), ())
    return jax.eval_shape(lambda *args: function(*args, *beside), *before, batch)


@pytest.mark.parametrize("name,before,function", CASES, ids=[name for name, *_ in CASES])
def test_a_function_reads_what_it_declares_and_no_more(name, before, function):
    reads = spec(function).reads
    assert set(reads) <= FIELDS.keys() - set(ALWAYS)
    call(before, function, reads)  # it asks for nothing that is not declared
    call(before, function, FIELDS.keys() - set(ALWAYS))
    for field in reads:
        with pytest.raises(InputError):
            call(before, function, [name for name in reads if name != field])


@pytest.mark.parametrize("name,before,function", CASES, ids=[name for name, *_ in CASES])
def test_a_function_returns_as_many_examples_and_values_as_it_declares(name, before, function):
    declared = spec(function)
    out = call(before, function, declared.reads)
    if before:  # a loss: one value per token, per row, or per example
        assert out[0].shape in ((ROWS, TOKENS), (ROWS // declared.rows,))
        assert declared.rows == 1 or out[0].shape == (ROWS // declared.rows,)
        assert declared.per_token == (function in STEP_LOSSES)
        assert declared.labels == (2 if function is reward_model.step_classification else 1)
    assert ("returns" in (declared.fills or ())) == (unwrapped(function) in WITH_RETURNS)


STEP_LOSSES = (reward_model.step_regression, reward_model.step_classification)
WITH_RETURNS = (advantages.gae, advantages.vapo_gae)


def test_every_namespace_of_formulas_is_in_the_table():
    stages = (
        "advantage",
        "policy_loss",
        "value_loss",
        "preference_loss",
        "reward_loss",
        "reduction",
        "filter",
        "shaping",
        "correction",
    )
    homes = {importlib.import_module(NAMESPACES[stage]) for stage in stages}
    assert homes <= TABLE.keys()


@contract(reads=lambda options: ("values",) if options["deep"] else (), rows=2)
def declared(policy, batch, *, deep=False):
    return policy


def plain(policy, batch):
    return policy


class Called:
    """An object that is called, without a declaration and without attributes."""

    __slots__ = ()

    def __call__(self, policy, batch):
        return policy


@functools.wraps(declared)
def wrapper(*args, **kwargs):
    return declared(*args, **kwargs)


@pytest.mark.parametrize(
    "function,reads,rows",
    [
        (declared, (), 2),
        (P(declared, deep=True), ("values",), 2),
        (P(P(declared, deep=True), deep=False), (), 2),
        (jax.jit(declared, static_argnames="deep"), (), 2),
        (P(jax.jit(declared, static_argnames="deep"), deep=True), ("values",), 2),
        (jax.jit(P(declared, deep=True)), ("values",), 2),
        (wrapper, (), 2),
        (P(wrapper, deep=True), ("values",), 2),
        (contract(rows=3)(jax.jit(plain)), (), 3),
        (plain, (), 1),
        (P(plain), (), 1),
        (jax.jit(plain), (), 1),
        (Called(), (), 1),
        (abs, (), 1),
    ],
)
def test_spec_is_that_of_the_function_and_its_options(function, reads, rows):
    assert (spec(function).reads, spec(function).rows) == (reads, rows)


def test_spec_of_a_component_has_the_options_of_its_text():
    def of(text, stage):
        return spec(resolve(text, NAMESPACES[stage]))

    assert of("dpo", "preference_loss") == Contract(safe=True, reads=("ref_logprobs",), rows=2)
    both = of("dpo(losses=('sigmoid', 'sft'), wpo_weighting=True)", "preference_loss")
    assert both.whole_step and both.reads == ("ref_logprobs", "sum_pi_squared")
    assert of("ppo_clip(max_sequence_kl=0.1)", "policy_loss").reads[-1] == "sampler_logprobs"
    assert of("step_regression(squash='tanh')", "reward_loss").squash == "tanh"
    assert spec(P(resolve("gspo", NAMESPACES["policy_loss"]), max_sequence_kl=1.0)).reads[-1] == (
        "sampler_logprobs"
    )


def test_a_declaration_with_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="contract has no"):
        contract(read=("values",))
    assert spec(contract(reads=["values"])(lambda batch: batch)).reads == ("values",)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (dict(reads="values"), "contract(reads='values') is a tuple of names: ('values',)"),
        (dict(fills=(3,)), "contract(fills=(3,)) is a tuple of names: ('rewards',)"),
        (dict(seats="ab"), "contract(seats='ab') is a tuple of names: ('ab',)"),
        (dict(reads=lambda options: "values"), "is a tuple of names: ('values',)"),
        (dict(rows="2"), "contract(rows='2') is a whole number"),
        (dict(data=3), "contract(data=3) is a text"),
        (dict(metrics={"m": "a text"}), "contract(metrics={'m': 'a text'}) is of metrics: {"),
        (dict(metrics={3: Metric("x")}), "is of metrics: {'my_ratio': "),
        (dict(metrics="m"), "contract(metrics='m') is of metrics: {"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_a_declared_value_of_another_kind_is_refused_with_its_function(declared, says):
    @contract(**declared)
    def mine(batch):
        return batch

    with pytest.raises(InputError) as error:
        spec(mine)
    message = str(error.value)
    assert message.startswith("@contract of 'mine' in module 'test_contracts'; ")
    assert says in message and "test_contracts.py:" in message and "Fix: correct" in message
