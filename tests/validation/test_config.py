"""The config: every rule fails as it says, all problems come at once, and no field is dead."""

import ast
import dataclasses
import json
import re

import pytest
from conftest import REPO

from rljax.config import (
    NAMESPACES,
    Config,
    field_names,
    fingerprints,
    from_dict,
    is_path,
    microbatch_rows,
    to_dict,
    value_of,
    with_overrides,
)
from rljax.config.flags import config_flags
from rljax.config.schema import FIELDS
from rljax.config.texts import with_texts
from rljax.data.online import prompts
from rljax.dataflows import algorithm
from rljax.errors import InputError
from rljax.learn import rounding
from rljax.models import attention, cache, config, remat
from rljax.sampler import layout, requests
from rljax.validation import validate

PACKAGE = sorted((REPO / "rljax").rglob("*.py"))


def valid(**overrides) -> Config:
    """A config without a problem; overrides by dotted name with __ for the dot."""
    config = Config(model="decoder(layers=1)")
    config.data.train = "sort_digits()"
    config.data.max_prompt_tokens = 16
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return with_overrides(config, named, "test")


def problems_of(config) -> str:
    with pytest.raises(InputError) as error:
        validate(config)
    return str(error.value)


@pytest.mark.smoke
def test_the_base_is_valid():
    assert validate(valid()) == []


# Every rule: (what is set, what the message must say beside the field's name).
RULES = [
    (
        {"algorithm.collect": "search(method='beam()')", "algorithm.old_logprobs": "sampler"},
        "knows no log-probs of draws",
    ),
    (
        {"dataflow": "expert_iteration", "algorithm.collect": "search(method='best_of_n()')"},
        "no shares of visits",
    ),
    (
        {"algorithm.collect": "search()", "algorithm.reward_shaping": ("normalised()",)},
        "scores some rows at a time",
    ),
    ({"steps": 1.5}, "must be a whole number"),
    ({"steps": True}, "must be a whole number"),
    ({"steps": -1}, "must be >= 0"),
    ({"steps": 2**31}, "must be below"),
    ({"steps": 0}, "nothing to train"),
    ({"seed": -1}, "must be >= 0"),
    ({"seed": "1"}, "must be a whole number"),
    ({"export": 1}, "must be true or false"),
    ({"model": 3}, "must be a text"),
    ({"model": ""}, "a Hugging Face folder"),
    ({"model": "no/such/folder"}, "is not a folder"),
    ({"model": "decodr(layers=1)"}, "did you mean decoder"),
    ({"model": "decoder(layers='1')"}, "must be int"),
    ({"tokenizer": "no/such/folder"}, "is not a folder"),
    ({"run_dir": __file__}, "is a file"),
    ({"trackers": "console"}, "must be a list of texts"),
    ({"trackers": (1,)}, "must be a list of texts"),
    ({"trackers": ("wandbb",)}, "did you mean wandb"),
    ({"dataflow": "gpro"}, "did you mean grpo"),
    ({"dataflow": "ppo"}, "gives no returns for the critic"),
    ({"samples_every_steps": 0}, "must be >= 1"),
    ({"max_skipped_in_a_row": 0}, "must be >= 1"),
    ({"data.train": ""}, "a path, or a task"),
    ({"data.train": "no/such.parquet"}, "does not exist"),
    ({"data.train": "sort_digit()"}, "did you mean sort_digits"),
    ({"data.test": "no_such.jsonl"}, "does not exist"),
    ({"data.max_prompt_tokens": 0}, "must be >= 1"),
    ({"data.overlong": "cut"}, "one of drop, error, left, right"),
    ({"sft.data": "no/such.jsonl"}, "does not exist"),
    ({"sft.steps": -1}, "must be >= 0"),
    ({"sft.sequences_per_step": 0}, "must be >= 1"),
    ({"sft.check_every_steps": 0}, "must be >= 1"),
    ({"sft.stop_at_accuracy": -0.1}, "must be >= 0"),
    ({"batch.prompts_per_step": 0}, "must be >= 1"),
    ({"batch.samples_per_prompt": 0}, "must be >= 1"),
    ({"batch.epochs": 0}, "must be >= 1"),
    (
        {"batch.sequences_per_optimizer_step": 300},
        "must divide 128 prompts x 8 samples = 1024 sequences per step. Fix: 128 or 256 or 512",
    ),
    ({"batch.tokens_per_microbatch": 100}, "must hold one row"),
    ({"mesh.data": 0}, "must be >= 1, or -1"),
    ({"mesh.data": -1}, "at most one size may be -1"),
    (
        {"mesh.data": 3, "mesh.fsdp": 1, "batch.sequences_per_optimizer_step": 256},
        "must divide by mesh.data x fsdp x expert = 3",
    ),
    ({"sampler.temperature": 0}, "temperature 0 is greedy"),
    ({"sampler.temperature": float("nan")}, "must be a finite number"),
    ({"sampler.temperature": 10**400}, "must be a finite number"),
    ({"sampler.top_k": -1}, "must be >= 0"),
    ({"sampler.top_p": 0.0}, "0 < top_p <= 1"),
    ({"sampler.max_response_tokens": 0}, "must be >= 1"),
    ({"reward.function": "exact_macth"}, "did you mean exact_match"),
    ({"reward.function": "("}, "not a valid call"),
    ({"reward.function": "length_under()"}, "needs 'max_tokens'"),
    ({"reward.function": "gsm8k(method='loose')"}, "it is one of 'numeric'"),
    ({"reward.workers": 0}, "must be >= 1"),
    ({"reward.timeout_s": 0}, "must be > 0 seconds"),
    (
        {
            "reward.timeout_s": 5.0,
            "reward.function": "judge(base_url='http://127.0.0.1/v1', model='m', timeout_s=5.0)",
        },
        "the pool would kill judge before its own timeout_s=5 ends",
    ),
    ({"evaluate.reward": "nope"}, "has no 'nope'"),
    ({"evaluate.prompts": 0}, "must be >= 1"),
    ({"evaluate.every_steps": -1}, "must be >= 0"),
    ({"algorithm.advantage": "gae"}, "needs a critic. Fix: use dataflow='ppo'"),
    ({"algorithm.advantage": "group_relative(1)"}, "options are keywords"),
    ({"algorithm.advantage": "group_relative(eps=x)"}, "is not a literal"),
    ({"algorithm.advantage": "group_relative(eps=1, eps=2)"}, "twice"),
    ({"algorithm.policy_loss": "ppo_clip(clip_hihg=0.3)"}, "did you mean 'clip_high'"),
    ({"algorithm.policy_loss": "ppo_clip(clip_high='a')"}, "must be float"),
    (
        {"algorithm.policy_loss": "rljax.losses.policy.common.log_ratio"},
        "it is called with (policy, batch)",
    ),
    ({"algorithm.policy_loss": "no_such_module.loss"}, "cannot be imported"),
    ({"algorithm.policy_loss": "math.hypot"}, "algorithm.policy_loss"),
    ({"algorithm.value_loss": "squared_eror"}, "did you mean squared_error"),
    ({"algorithm.reduction": "seq_mean_token_sum_norm"}, "missing a required argument"),
    ({"algorithm.reduction": "Batch"}, "has no 'Batch'"),
    ({"algorithm.kl_estimator": "k4"}, "one of k1"),
    ({"algorithm.kl_in_loss": -1.0}, "must be >= 0"),
    ({"algorithm.kl_in_reward": -1.0}, "must be >= 0"),
    ({"algorithm.entropy_coef": -1.0}, "must be >= 0"),
    ({"actor_optimizer.lr": "1e-6"}, "must be a finite number"),
    ({"actor_optimizer.lr": -1e-6}, "must be >= 0"),
    ({"critic_optimizer.schedule": "cos"}, "did you mean cosine"),
    ({"critic_optimizer.schedule": "cosine(final=2.0)"}, "from 0 to 1, of lr"),
    ({"actor_optimizer.schedule": "wsd(decay=0.0)"}, "above 0, at most 1"),
    ({"actor_optimizer.schedule": "wsd(shape='square')"}, "it is one of 'linear', 'cosine'"),
    ({"actor_optimizer.schedule": "tiny_optimizer.staircase()"}, "missing a required argument"),
    ({"actor_optimizer.lr": 1000.0}, "a learning rate is at most 10"),
    ({"algorithm.policy_loss": "ppo_clip(clip_high=-1)"}, "must be >= 0"),
    ({"algorithm.policy_loss": "ppo_clip(dual_clip=0)"}, "must be > 0"),
    ({"model": "gpt2"}, "on the hub OWNER/NAME"),
    ({"model": "Qwen2.5-0.5B"}, "on the hub OWNER/NAME"),
    ({"model": "my_model"}, "on the hub OWNER/NAME"),
    ({"model": "no_such_module_here.model"}, "on the hub OWNER/NAME"),
    ({"data.train": "my_data"}, "hf://datasets/OWNER/NAME"),
    ({"dataflow": "dpo"}, '`dataflow=preference` with `algorithm.preference_loss="dpo()"`'),
    ({"algorithm.policy_loss": "grpo"}, '`algorithm.policy_loss="ppo_clip()"`'),
    ({"algorithm.policy_loss": "dapo"}, "presets/dapo"),
    ({"reward.function": "accuracy_reward"}, "`reward.function=math_verify`"),
    ({"reward.function": "squared_error"}, "is a value of algorithm.value_loss"),
    ({"actor_optimizer.name": "adamww"}, "did you mean adamw"),
    ({"actor_optimizer.name": "adamw(beta2=1.5)"}, "0 <= beta2 < 1"),
    ({"actor_optimizer.name": "adamw(beta2=0.9)", "actor_optimizer.beta2": 0.95}, "sets it too"),
    ({"sft.optimizer.name": "muon(bta=0.9)"}, "did you mean 'beta'"),
    ({"actor_optimizer.name": "muon(ns_steps=0)"}, "set ns_steps to a number above 0"),
    ({"actor_optimizer.name": "muon()", "actor_optimizer.beta1": 0.8}, "does not read it"),
    (
        {"actor_optimizer.name": "lion", "actor_optimizer.beta2": 0.98},
        "does not read it. Fix: actor_optimizer.beta2=0.999, and "
        "actor_optimizer.name='lion(beta2=0.98)'",
    ),
    (
        {"actor_optimizer.name": "optax.adam(b1=0.8)", "actor_optimizer.weight_decay": 0.1},
        "does not read it. Fix: actor_optimizer.weight_decay=0.0",
    ),
    ({"actor_optimizer.name": "tiny_optimizer.no_optimizer()"}, "optax.GradientTransformation"),
    ({"actor_optimizer.name": "tiny_optimizer.halved"}, "missing a required argument: 'power'"),
    ({"sft.optimizer.beta1": 1.0}, "0 <= beta < 1"),
    ({"actor_optimizer.beta2": 1.5}, "0 <= beta < 1"),
    ({"actor_optimizer.eps": 0.0}, "must be > 0"),
    ({"actor_optimizer.warmup_steps": -1}, "must be >= 0"),
    ({"actor_optimizer.clip_norm": -1.0}, "must be >= 0"),
    ({"model_settings.dtype": "float8"}, "one of float32, bfloat16, float16"),
    ({"model_settings.weight_dtype": "float16"}, "one of float32, bfloat16"),
    ({"model_settings.weight_dtype": "bfloat16", "lora.rank": 4}, "adapters alone are trained"),
    ({"model_settings.remat": "some"}, "one of none, dots, attention, full, offload"),
    ({"memory.optimizer_on_host": 1}, "must be true or false"),
    ({"memory.reference_on_host": True, "lora.rank": 4}, "shares the actor's base"),
    ({"checkpoint.keep": 0}, "must be >= 1"),
    ({"checkpoint.every_steps": -1}, "must be >= 0"),
    ({"checkpoint.allow_changed": ("stesp",)}, "did you mean 'steps'"),
    ({"algorithm.advantage": "vapo_gae"}, "needs a critic"),
    ({"algorithm.advantage": "remax"}, "reads batch field values"),
    ({"algorithm.advantage": "prime"}, "reads batch field process_rewards"),
    ({"algorithm.advantage": "vineppo"}, "a dataflow of your own"),
    ({"algorithm.kl_reward_estimator": "k3+"}, "one of k1, abs, k2, k3"),
    ({"algorithm.kl_target": 0.1}, "there is no KL coefficient to adapt"),
    ({"algorithm.kl_horizon": 0.0}, "must be > 0 sequences"),
    ({"algorithm.trust_region": -1.0}, "must be >= 0"),
    ({"algorithm.old_logprobs": "smapler"}, "one of recomputed, sampler"),
    ({"algorithm.correction": "rollout_corection()"}, "did you mean rollout_correction"),
    ({"algorithm.correction": "rollout_correction(level='word')"}, "it is one of 'token'"),
    ({"algorithm.correction": "mismatch_metrics", "algorithm.old_logprobs": "sampler"}, "twice"),
    ({"algorithm.collect": "dynmaic()"}, "did you mean dynamic"),
    ({"algorithm.collect": "dynamic(if_short='wait')"}, "it is one of 'error', 'fill'"),
    ({"algorithm.collect": "dynamic(oversample=0.5)"}, "must be >= 1"),
    ({"algorithm.collect": "first_live(oversample=0.5)"}, "must be >= 1"),
    ({"algorithm.filters": ("overlogn()",)}, "did you mean overlong"),
    ({"algorithm.filters": "overlong()"}, "must be a list of texts"),
    ({"algorithm.baseline_filters": ("pass_rate(low='x')",)}, "must be float"),
    ({"algorithm.reward_shaping": ("soft_overlong()",)}, "missing a required"),
    ({"data.sources": ("no_such_task()",)}, "has no 'no_such_task'"),
    ({"data.weights": (1.0, 2.0)}, "1 weights >= 0"),
    ({"data.weights": ("a",)}, "must be a list of numbers"),
    ({"data.final_weights": (-1.0,)}, "1 weights >= 0"),
    ({"data.retire_at_pass_rate": 1.5}, "from 0 to 1"),
    ({"data.drop_above_pass_rate": -0.5}, "from 0 to 1"),
    ({"data.pass_rate_samples": 0}, "must be >= 1"),
    ({"data.target_tokens": (5, 2)}, "1 <= low <= high"),
    ({"data.target_tokens": (1.5, 2)}, "must be a list of whole numbers"),
    ({"data.target_instruction": "in {n} tokens"}, "holds {target_tokens}"),
    ({"sampler.thinking_tokens": (5,)}, "(low, high)"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("overrides", "says"), RULES, ids=lambda x: str(x)[:50])
def test_each_rule(overrides, says):
    message = problems_of(with_overrides(valid(), overrides, "test"))
    fields = [*overrides, "mesh", "algorithm.advantage", "batch.sequences_per_optimizer_step"]
    named = [line for line in message.splitlines()[1:] if says in line]
    assert named, message
    assert any(f" {field}=" in named[0] for field in fields), message


def test_choices_are_those_of_the_code_that_reads_them():
    read = {
        "data.turns": prompts.TURNS,
        "model_settings.dtype": config.DTYPES,
        "model_settings.remat": remat.POLICIES,
        "model_settings.weight_dtype": rounding.HELD,
        "model_settings.context_attention": attention.CONTEXT_ATTENTION,
        "sampler.loop": requests.LOOPS,
        "sampler.dtype": requests.DTYPES,
        "sampler.head_in_float32": requests.SWITCHES,
        "sampler.weight_dtype": layout.WEIGHT_DTYPES,
        "sampler.kv_dtype": cache.DTYPES,
    }
    assert {name: FIELDS[name].choices for name in read} == read


def test_what_a_declaration_names_is_there():
    """Namespaces, switches, fixes, and the fields of Algorithm."""
    stages = {spec.component for spec in FIELDS.values()} - {""}
    assert stages <= NAMESPACES.keys() and {"data", "reward", "advantage"} <= stages
    assert {spec.path for spec in FIELDS.values()} == {
        "",
        "model",
        "tokenizer",
        "adapter",
        "written_folder",
    }
    assert {spec.holds for spec in FIELDS.values()} <= {"", "field", *NAMESPACES}
    readers = {spec.read_by for spec in FIELDS.values()}
    of_runs = {"samples", "rows", "a critic", "a policy", "sampling", "prompts"}
    of_runs |= {"answers", "steps"}
    assert readers == {"", *of_runs}  # of validation/unread.py
    patterns = {name: re.compile(spec.safe) for name, spec in FIELDS.items() if spec.safe}
    assert {"data.template_variables", "lora.targets", "trackers"} <= patterns.keys()
    switches = {switch for spec in FIELDS.values() for switch in spec.switches}
    assert switches <= FIELDS.keys() and {"sft.steps", "sft.optimizer.warmup_steps"} <= switches
    assert FIELDS["sft.optimizer.warmup_from"].switches == (
        "sft.steps",
        "sft.optimizer.warmup_steps",
    )
    learned = [name.rpartition(".")[2] for name, spec in FIELDS.items() if spec.learn]
    assert {*learned, "steps", "positive_nll"} == algorithm.FIELDS and len(learned) == 22
    for name, spec in FIELDS.items():
        assert spec.problem(value_of(Config(), name)) == "", name
        if spec.fits is not None or not {spec.above, spec.below, spec.high} <= {None}:
            assert spec.fix or spec.low is not None, f"{name}: an error without a fix"


def test_fields_that_a_resume_may_change_are_those_that_change_no_number():
    may_change = {name for name, spec in FIELDS.items() if spec.may_change}
    assert may_change == {
        "run_dir",
        "trackers",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "checkpoint.best_metric",
        "checkpoint.allow_changed",
        "samples_every_steps",
        "program_steps",
        "report_every_minutes",
        "reward.workers",
        "compilation_cache",
        "profile_steps",
        "profile_port",
        "profile_hosts",
        "export",
        "hosts.init_timeout_s",
        "hosts.heartbeat_s",
        "hosts.stall_s",
        "offline.reference_logprobs",
    }
    named = set(fingerprints(Config()))
    assert named == (FIELDS.keys() - may_change) | {"offline.reference_logprobs"}


def test_all_problems_at_once():
    found = problems_of(
        valid(
            data__train="no/such.parquet",
            batch__sequences_per_optimizer_step=300,
            algorithm__advantage="gae",
            algorithm__policy_loss="ppo_clp",
            reward__function="nope()",
            trackers=("x",),
            model="no/such/model",
        )
    )
    assert found.startswith("the config has 7 problems:")
    assert [line.split(".")[0].strip() for line in found.splitlines()[1:]] == list("1234567")


def test_types_come_first_and_all_at_once():
    config = valid(steps="9", seed=None, sampler__top_p="1")
    config.set_unchecked("batch", None)
    found = problems_of(config)
    assert found.startswith("the config has 4 problems:") and "must be a BatchConfig" in found
    with pytest.raises(InputError, match="rljax.config.Config"):
        validate({"steps": 3})


def test_a_wrong_type_hides_no_problem_elsewhere_and_makes_none():
    config = valid(
        seed="1",  # a wrong type
        sampler__top_p="0.9",
        algorithm__kl_in_loss=-1.0,  # out of range
        algorithm__advantage="group_relativ",  # no such function
        data__train="no/such.parquet",  # no such file
        batch__prompts_per_step=0,  # what the arithmetic of batches divides by
        mesh__tensor=0,
    )
    found = problems_of(config)
    named = ("seed", "sampler.top_p", "algorithm.kl_in_loss", "algorithm.advantage", "data.train")
    for name in (*named, "batch.prompts_per_step", "mesh.tensor"):
        assert found.count(f" {name}=") == 1, found
    assert found.startswith("the config has 7 problems:")


def test_missing_devices_and_what_does_not_divide_come_together():
    three = valid(mesh__fsdp=3)
    with pytest.raises(InputError) as error:
        validate(three, 1)
    found = str(error.value)
    assert "mesh={'data': 1, 'fsdp': 3" in found and "needs 3 devices, and 1 device is" in found
    assert " batch.sequences_per_optimizer_step=" in found and "2 problems" in found
    for sizes, devices, fits in (
        ({"fsdp": -1}, 1, True),
        ({"fsdp": -1, "tensor": 2}, 8, True),
        ({"fsdp": 4}, 4, True),
        ({"fsdp": -1, "tensor": 3}, 8, False),
        ({"fsdp": 4}, 8, False),
        ({"fsdp": 8}, 4, False),
    ):
        config = valid(**{f"mesh__{name}": size for name, size in sizes.items()})
        if fits:
            assert validate(config, devices) == []
        else:
            with pytest.raises(InputError, match=f"{devices} devices are there"):
                validate(config, devices)


@pytest.mark.parametrize(
    ("field", "usual", "unusual"),
    [
        ("actor_optimizer__clip_norm", 0.0, 1e-5),
        ("actor_optimizer__eps", 1e-5, 0.1),
        ("sampler__temperature", 2.0, 2.5),
        ("algorithm__kl_in_loss", 1.0, 5.0),
        ("algorithm__kl_in_reward", 0.5, 2.0),
    ],
)
def test_unusual_numbers_are_warned_of(field, usual, unusual):
    assert validate(valid(**{field: usual})) == []
    [said] = validate(valid(**{field: unusual}))
    assert said.startswith(f"{field.replace('__', '.')}={unusual!r} is unusual: ")


def test_a_ratio_is_clipped_to_no_less_than_zero():
    for loss in ("ppo_clip", "cispo", "gspo", "decoupled_ppo", "clip_cov"):
        assert "<= 1" in problems_of(valid(algorithm__policy_loss=f"{loss}(clip_low=1.5)")), loss


def test_fixes_of_data_and_components_name_what_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "good.jsonl").write_text("{}\n")
    for text in ("rows/godo.jsonl", "rosw/good.jsonl", "rows/good.json", "rows/goood.jsonl"):
        assert "did you mean 'rows/good.jsonl'?" in problems_of(valid(data__train=text)), text
    assert "did you mean" not in problems_of(valid(data__train="rows/other.jsonl"))
    for text in ("https://x.org/a.jsonl", "http://x.org/rows", "https://x.org/a*.jsonl?raw=1"):
        said = problems_of(valid(data__train=text))
        assert "addresses are not read. Fix: download it" in said and "hf://datasets/" in said
    for text, meant in (
        ("my_module:my_loss", "my_module.my_loss"),
        ("a.b:my_loss(x=1)", "a.b.my_loss(x=1)"),
    ):
        assert f"write {meant}" in problems_of(valid(algorithm__policy_loss=text))


def test_references_and_dataflows_fit():
    assert validate(valid(algorithm__kl_in_loss=0.1)) == []
    warnings = validate(valid(algorithm__kl_in_loss=0.1, algorithm__kl_in_reward=0.1))
    assert "counts twice" in warnings[0]
    assert validate(valid(dataflow="ppo", algorithm__advantage="gae(lam=0.95)")) == []
    assert "the importance ratios are biased" in validate(valid(sampler__top_k=5))[0]
    learned = dict(reward__model="owner/scorer", reward__function="")
    assert "no such mark" in validate(valid(**learned))[0]
    assert validate(valid(**learned, evaluate__reward="exact_match()")) == []
    assert validate(valid(**learned, evaluate__correct_at=-2.0)) == []
    gspo = valid(algorithm__policy_loss="gspo()")
    assert "long sequences weigh more" in validate(gspo)[0]
    both = valid(
        algorithm__policy_loss="decoupled_ppo()", algorithm__correction="rollout_correction()"
    )
    assert "counts the mismatch twice" in validate(both)[0]
    remax = valid(dataflow="remax", algorithm__advantage="remax()")
    assert validate(remax) == []
    one = valid(batch__samples_per_prompt=1, batch__sequences_per_optimizer_step=128)
    assert "of one alone every advantage is 0" in problems_of(one)
    one.algorithm.advantage = "group_relative(singleton='raw')"
    assert validate(one) == []
    one.algorithm.advantage = "reinforce_plus_plus()"
    assert validate(one) == []


# -- the fields --


def test_every_field_is_read():
    """A field that nothing reads is a promise that nothing keeps."""
    read = set()
    for path in [*PACKAGE, *sorted((REPO / "launchers").glob("*.py"))]:
        if path.name == "config.py" and path.parent.name == "rljax":
            continue
        if path.parent.name == "validation":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    whole = {"mesh", "model_settings"}  # handed over as keyword arguments, checked below
    by_name = {"mesh.slices", "mesh.shard_optimizer"}
    names = [n for n in field_names(Config()) if n.partition(".")[0] not in whole or n in by_name]
    through_config = {"tokens_per_microbatch"}  # by config.microbatch_rows, checked below
    unread = [n for n in names if n.rpartition(".")[2] not in read | through_config]
    assert unread == []
    assert len(names) > 60


def test_fields_handed_over_as_a_whole_are_taken():
    from rljax.mesh import make_mesh
    from rljax.models.config import ModelConfig

    config = Config()
    rest = {"slices", "shard_optimizer"}  # read by name
    assert set(dataclasses.asdict(config.mesh)) - rest == set(config.mesh.sizes())
    assert set(config.mesh.sizes()) <= set(make_mesh.__code__.co_varnames)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set(dataclasses.asdict(config.model_settings)) <= fields
    config.batch.tokens_per_microbatch = 100
    assert microbatch_rows(config, rows=64, row_tokens=10) == 8
    config.batch.tokens_per_microbatch = 1000
    assert microbatch_rows(config, rows=64, row_tokens=10) == 64
    assert microbatch_rows(config, rows=24, row_tokens=100, shards=8) == 8
    config.batch.tokens_per_microbatch = 0  # without a plan: the default's
    assert microbatch_rows(config, rows=64, row_tokens=1024) == 16
    assert microbatch_rows(config, rows=64, row_tokens=100_000, shards=8) == 8


@pytest.mark.slow
def test_every_field_has_a_rule_for_its_type():
    for name in field_names(valid()):
        assert f"{name}=" in problems_of(with_overrides(valid(), {name: object()}, "test"))


def test_a_config_survives_json():
    config = valid(trackers=("console", "wandb"), checkpoint__allow_changed=("steps",), steps=7)
    again = from_dict(json.loads(json.dumps(to_dict(config))), "config.json")
    assert again == config and fingerprints(again) == fingerprints(config)
    with pytest.raises(InputError, match="run/config.json has unknown fields:\n  stpes: .*steps"):
        from_dict({"stpes": 3}, "run/config.json")
    old = from_dict({"steps": 3, "batch": {"epochs": 2}}, "config.json")
    assert (old.steps, old.batch.epochs, old.seed) == (3, 2, 0)


def test_overrides_copy_and_name_what_is_unknown():
    config = valid()
    changed = with_overrides(config, {"batch.epochs": 3, "actor_optimizer.lr": 1}, "x")
    assert (changed.batch.epochs, config.batch.epochs) == (3, 1)
    assert isinstance(changed.actor_optimizer.lr, float)
    with pytest.raises(InputError, match="batch.epoch: .*batch.epochs.\n  batch: a section") as e:
        with_overrides(config, {"batch.epoch": 3, "batch": 1, "seed": 1}, "member 2")
    assert str(e.value).startswith("member 2 has unknown fields")


def from_flags(*arguments: str) -> Config:
    path, texts, others = config_flags(arguments)
    assert (path, others) == (None, [])
    return with_texts(Config(), texts, "these flags cannot be used", "--config.")


def test_unknown_flags_are_all_listed_with_the_nearest_name():
    with pytest.raises(InputError) as error:
        from_flags("--config.stepz=3", "--config.batch.epoch", "2", "--config.lr=1")
    assert str(error.value).splitlines() == [
        "these flags cannot be used:",
        "  --config.stepz: no such field; did you mean --config.steps?",
        "  --config.batch.epoch: no such field; did you mean --config.batch.epochs?",
        "  --config.lr: no such field; did you mean --config.sft.optimizer.lr or "
        "--config.actor_optimizer.lr or --config.critic_optimizer.lr?",
        "Fix: `rljax train --help` lists the fields, their types and defaults",
    ]


@pytest.mark.parametrize("field", ["sampler.stop_strings", "tokenizer", "trackers"])
def test_none_is_no_text_of_a_flag(field):
    with pytest.raises(InputError, match=f'{field}=None: there is no null; "" is an empty text'):
        from_flags(f"--config.{field}=None")
    assert from_flags("--config.sampler.stop_strings=('None',)").sampler.stop_strings == ("None",)


def test_paths_and_components(tmp_path, monkeypatch):
    assert is_path("a/b") and is_path("x.parquet") and is_path("./m")
    assert not is_path("decoder(layers=2)") and not is_path("sort_digits") and not is_path("")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model (copy)").mkdir()
    assert is_path("model (copy)")


def test_names_of_another_framework_are_answered_with_ours():
    with pytest.raises(InputError) as error:
        from_flags("--config.actor.tis_imp_ratio_cap=2", "--config.x.adv_estimator=grpo")
    text = str(error.value)
    assert "actor.tis_imp_ratio_cap: no such field; use `--config.algorithm.correction=" in text
    assert "rollout_correction(upper=2.0)" in text and "`--config.algorithm.advantage`" in text
    with pytest.raises(InputError, match="use `algorithm.correction"):
        from_dict({"algorithm": {"rollout_is_threshold": 2.0}}, "old.json")
    with pytest.raises(InputError, match="use `algorithm.advantage`"):
        from_dict({"trainer": {"adv_estimator": "grpo"}}, "old.json")


def test_a_field_whose_switch_is_off_is_said_to_be_unread():
    config = valid()
    assert not [w for w in validate(config) if "nothing reads it" in w]
    config.lora.alpha, config.data.pass_rate_samples = 7.0, 3
    config.sampler.interrupt_phrase = "stop"
    found = " ".join(w for w in validate(config) if "nothing reads it" in w)
    for field in ("lora.alpha", "data.pass_rate_samples", "sampler.interrupt_phrase"):
        assert field in found
    config.lora.rank = 4
    assert "lora.alpha" not in " ".join(validate(config))


def test_a_model_of_random_weights_is_proposed_where_it_is_one(tmp_path):
    """The policy may be a decoder(); what scores or teaches may not."""
    for field, at_random in (("model", True), ("reward__model", False), ("critic_model", False)):
        for value in (str(tmp_path), str(tmp_path / "missing"), "decoder(layers=2)"):
            if at_random and "(" in value:
                continue
            problem = problems_of(valid(**{field: value}))
            assert problem.endswith("for random weights") == at_random, problem
