"""validate(config): every problem of a config at once, each with its fix, before any model loads.

What lives here: types, ranges, batch arithmetic, and whether components exist and fit together.
"""

import dataclasses
import difflib
import math
import os
import sys

from rljax.components import Component, resolve
from rljax.config import HOMES, Config, field_names, is_path, row_tokens
from rljax.errors import InputError
from rljax.rewards.worker import wanted_fields
from rljax.tracking import NAMES as TRACKERS


class _Problems(list):
    """Collects what is wrong; each entry names the field, the value, the rule and the fix."""

    def check(self, ok: bool, field: str, value, rule: str, fix: str = "") -> bool:
        if not ok:
            self.add(field, value, rule + (f". Fix: {fix}" if fix else ""))
        return ok

    def add(self, field: str, value, text: object) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 200 else shown[:200] + "..."
        self.append(f"{field}={shown}: {text}")


_POSITIVE = (
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "batch.sequences_per_optimizer_step",
    "batch.tokens_per_microbatch",
    "batch.epochs",
    "sampler.max_response_tokens",
    "data.max_prompt_tokens",
    "reward.workers",
    "sft.sequences_per_step",
    "sft.check_every_steps",
    "evaluate.prompts",
    "checkpoint.keep",
    "samples_every_steps",
    "max_skipped_in_a_row",
)
_NOT_NEGATIVE = (
    "steps",
    "sft.steps",
    "evaluate.every_steps",
    "checkpoint.every_steps",
    "sampler.top_k",
    "sampler.temperature",
    "algorithm.kl_in_reward",
    "algorithm.kl_in_loss",
    "algorithm.entropy_coef",
    "sft.stop_at_accuracy",
    "seed",
)
_CHOICES = {
    "data.overlong": ("drop", "error", "left", "right"),
    "algorithm.kl_estimator": ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
    "model_settings.dtype": ("float32", "bfloat16"),
    "model_settings.remat": ("none", "full"),
}


def _value(config, name: str):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _check_types(config, problems: _Problems, prefix: str = "") -> None:
    """Every field holds a value of its annotated type: a typo such as lr="1e-6" is caught here."""
    for field in dataclasses.fields(config):
        value, name, kind = getattr(config, field.name), prefix + field.name, field.type
        if dataclasses.is_dataclass(kind):
            if problems.check(isinstance(value, kind), name, value, f"must be a {kind.__name__}"):
                _check_types(value, problems, name + ".")
        elif kind is float:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            finite = number and abs(value) <= sys.float_info.max  # false for NaN
            problems.check(finite, name, value, "must be a finite number")
        elif kind in (int, bool, str):
            exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            ok = problems.check(exact, name, value, f"must be {kind.__name__}")
            if ok and kind is int:
                problems.check(abs(value) < 2**31, name, value, f"must be below {2**31}")
        else:
            texts = isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value)
            problems.check(texts, name, value, "must be a tuple of texts")


def _check_ranges(config: Config, problems: _Problems) -> None:
    for name in _POSITIVE:
        problems.check(_value(config, name) >= 1, name, _value(config, name), "must be >= 1")
    for name in _NOT_NEGATIVE:
        problems.check(_value(config, name) >= 0, name, _value(config, name), "must be >= 0")
    for name, choices in _CHOICES.items():
        problems.check(
            _value(config, name) in choices,
            name,
            _value(config, name),
            f"one of {', '.join(choices)}",
        )
    problems.check(
        config.reward.timeout_s > 0,
        "reward.timeout_s",
        config.reward.timeout_s,
        "must be > 0 seconds",
    )
    top_p = config.sampler.top_p
    problems.check(0 < top_p <= 1, "sampler.top_p", top_p, "0 < top_p <= 1 (1 = off)")
    temperature = config.sampler.temperature
    problems.check(
        temperature != 0,
        "sampler.temperature",
        temperature,
        "training needs samples, and temperature 0 is greedy",
        "1.0 (evaluation is greedy by itself)",
    )
    _check_optimizers(config, problems)
    _check_mesh(config, problems)


def _check_optimizers(config: Config, problems: _Problems) -> None:
    for prefix in ("actor_optimizer", "critic_optimizer", "sft.optimizer"):
        optimizer = _value(config, prefix)
        problems.check(optimizer.lr >= 0, f"{prefix}.lr", optimizer.lr, "must be >= 0")
        schedules = ("constant", "linear", "cosine")
        problems.check(
            optimizer.schedule in schedules,
            f"{prefix}.schedule",
            optimizer.schedule,
            f"one of {', '.join(schedules)}",
        )
        for name in ("beta1", "beta2"):
            beta = getattr(optimizer, name)
            problems.check(0 <= beta < 1, f"{prefix}.{name}", beta, "0 <= beta < 1")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            problems.check(
                getattr(optimizer, name) >= 0,
                f"{prefix}.{name}",
                getattr(optimizer, name),
                "must be >= 0",
            )
        problems.check(optimizer.eps > 0, f"{prefix}.eps", optimizer.eps, "must be > 0")


def _check_mesh(config: Config, problems: _Problems) -> None:
    sizes = dataclasses.asdict(config.mesh)
    for name, size in sizes.items():
        problems.check(
            size >= 1 or size == -1, f"mesh.{name}", size, "must be >= 1, or -1 = what is left"
        )
    unset = [name for name, size in sizes.items() if size == -1]
    problems.check(
        len(unset) <= 1,
        "mesh",
        sizes,
        "at most one size may be -1",
        f"set mesh.{unset[0]}=1" if unset else "",
    )


def _divisors_near(n: int, wanted: int) -> str:
    small = [d for d in range(1, min(math.isqrt(n), 10**6) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    near = sorted(divisors, key=lambda d: abs(d - wanted))[:3]
    return " or ".join(str(d) for d in sorted(near))


def _check_batch(config: Config, problems: _Problems) -> None:
    batch = config.batch
    rows = batch.prompts_per_step * batch.samples_per_prompt
    made = (
        f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
        f"{rows} sequences per step"
    )
    step = batch.sequences_per_optimizer_step
    problems.check(
        rows % step == 0,
        "batch.sequences_per_optimizer_step",
        step,
        f"must divide {made}",
        f"{_divisors_near(rows, step)}; {rows} = one optimizer step per epoch",
    )
    problems.check(
        batch.tokens_per_microbatch >= row_tokens(config),
        "batch.tokens_per_microbatch",
        batch.tokens_per_microbatch,
        f"must hold one row: data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"sampler.max_response_tokens={config.sampler.max_response_tokens} = "
        f"{row_tokens(config)} tokens",
        f"batch.tokens_per_microbatch={row_tokens(config)} or more",
    )
    shards = (
        config.mesh.data * config.mesh.fsdp if config.mesh.fsdp > 0 and config.mesh.data > 0 else 1
    )
    problems.check(
        step % shards == 0,
        "batch.sequences_per_optimizer_step",
        step,
        f"must divide by mesh.data x mesh.fsdp = {shards}",
        f"a multiple of {shards}",
    )


def _resolve(problems: _Problems, field: str, text: str, home: str):
    try:
        return resolve(text, HOMES[home])
    except InputError as error:
        problems.add(field, text, error)
        return None


def _check_paths(config: Config, problems: _Problems) -> None:
    """Data, model and tokenizer: a component that resolves, or a path that exists."""
    for field, spec in (
        ("data.train", config.data.train),
        ("data.test", config.data.test),
        ("sft.data", config.sft.data),
    ):
        if spec and not is_path(spec):
            _resolve(problems, field, spec, "data")
        elif spec:
            file = spec.replace("{split}", "test" if field == "data.test" else "train")
            fix = "give the path of a file"
            problems.check(os.path.exists(file), field, spec, "does not exist", fix)
    model, tokenizer = config.model, config.tokenizer
    if model and not is_path(model):
        _resolve(problems, "model", model, "model")
    elif model:
        fix = "a Hugging Face folder, or 'decoder(...)'"
        problems.check(os.path.isdir(model), "model", model, "is not a folder", fix)
    if tokenizer:
        fix = "a folder with tokenizer.json"
        problems.check(os.path.isdir(tokenizer), "tokenizer", tokenizer, "is not a folder", fix)
    run_dir = config.run_dir
    free = not os.path.exists(run_dir) or os.path.isdir(run_dir)
    problems.check(free, "run_dir", run_dir, "is a file", "name a folder")


def _check_names(config: Config, problems: _Problems) -> None:
    """Lists of names: trackers, and fields that may change at a resume."""
    known = {"trackers": TRACKERS, "checkpoint.allow_changed": ("data", *field_names(config))}
    for field, choices in known.items():
        for name in _value(config, field):
            close = difflib.get_close_matches(name, choices, n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"such as {choices[0]!r}"
            problems.check(name in choices, field, name, "no such name", fix)


# stage -> what its function is called with; every other parameter is an option of the config.
_CALLED_WITH = {
    "advantage": ("batch",),
    "policy_loss": ("policy", "batch"),
    "value_loss": ("values", "batch"),
    "reduction": ("batch",),
    "dataflow": ("prompts", "key", "cfg"),
}
_ROLES = ("actor", "critic", "reference", "reward")


def _check_signature(problems: _Problems, field: str, component: Component, stage: str) -> None:
    """The function can be called as its stage calls it, and no option that it needs is missing."""
    given, called = {}, _CALLED_WITH[stage]
    if stage == "dataflow":
        given = {name: None for name in _ROLES if name in component.parameters}
    text, rule = component.text, f"it is called with ({', '.join(called)})"
    try:
        component.signature.bind(*called, **{**given, **component.options})
    except TypeError as error:
        fix = "write its options in the text, name(option=value); other parameters need defaults"
        if stage == "dataflow":
            rule += f" and the roles it names of {', '.join(_ROLES)}"
        problems.check(False, field, text, f"{rule}: {error}", fix)
    if stage == "dataflow" and component.name == "sft":
        rule = "takes worked examples, not prompts"
        problems.check(False, field, text, rule, "set sft.steps above 0, and steps=0 to stop there")


def _check_components(config: Config, problems: _Problems) -> None:
    found = {}
    for stage in ("advantage", "policy_loss", "value_loss", "reduction", "dataflow"):
        field = "dataflow" if stage == "dataflow" else f"algorithm.{stage}"
        component = _resolve(problems, field, _value(config, field), stage)
        if component is not None:
            found[stage] = component
            _check_signature(problems, field, component, stage)
    for field in ("reward.function", "evaluate.reward"):
        text = _value(config, field)
        if text or field == "reward.function":
            reward = _resolve(problems, field, text, "reward")
            if reward is not None:
                try:
                    wanted_fields(reward)
                except InputError as error:
                    problems.add(field, text, error)
    if "dataflow" in found and "advantage" in found:
        _check_fit(config, problems, found["dataflow"], found["advantage"])


def _check_fit(
    config: Config, problems: _Problems, dataflow: Component, advantage: Component
) -> None:
    """The dataflow, the advantage and the coefficients ask for the same roles."""
    algorithm, field = config.algorithm, "algorithm.advantage"
    critic = "critic" in dataflow.parameters
    if advantage.name == "gae":
        fix = f"use dataflow='ppo' (now {config.dataflow!r})"
        problems.check(critic, field, algorithm.advantage, "needs a critic", fix)
    elif "." not in advantage.name:
        rule = f"gives no returns for the critic of dataflow={config.dataflow!r} to learn"
        problems.check(not critic, field, algorithm.advantage, rule, "gae(), or dataflow='grpo'")
    reference = dataflow.signature.parameters.get("reference")
    wanted = algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0
    problems.check(
        not wanted or reference is not None,
        "dataflow",
        config.dataflow,
        "takes no reference, but algorithm.kl_in_reward or kl_in_loss is above 0",
        "set both to 0",
    )
    problems.check(
        wanted or reference is None or reference.default is None,
        "dataflow",
        config.dataflow,
        "needs a reference, but algorithm.kl_in_reward and kl_in_loss are 0",
        "set one of them, or give the parameter the default None",
    )


def validate(config: Config) -> list[str]:
    """All problems of the config at once, as one InputError; returns warnings. Runs before any
    model loads."""
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise InputError("a config is a rljax.config.Config", value=kind, fix="build one")
    problems = _Problems()
    _check_types(config, problems)
    if not problems:
        _check_ranges(config, problems)
    if not problems:
        _check_batch(config, problems)
        problems.check(
            bool(config.model),
            "model",
            config.model,
            "is not set",
            "a Hugging Face folder, or 'decoder(...)'",
        )
        problems.check(
            bool(config.data.train),
            "data.train",
            config.data.train,
            "is not set",
            "a path, or a task",
        )
        problems.check(
            config.steps + config.sft.steps > 0,
            "steps",
            config.steps,
            "nothing to train: sft.steps is 0 too",
        )
        _check_paths(config, problems)
        _check_names(config, problems)
        _check_components(config, problems)
    if problems:
        listed = "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1))
        raise InputError(
            f"the config has {len(problems)} problem{'s' * (len(problems) > 1)}:\n{listed}"
        )
    return _warnings(config)


def _warnings(config: Config) -> list[str]:
    found = []
    if config.sampler.top_p < 1 or config.sampler.top_k > 0:
        found.append(
            "sampler.top_p or top_k truncates what is sampled, which the trainer's log-probs "
            "cannot represent: "
            "ratios are biased (ALGORITHMS 0.1 rule 7)"
        )
    if config.algorithm.kl_in_reward > 0 and config.algorithm.kl_in_loss > 0:
        found.append(
            "algorithm.kl_in_reward and kl_in_loss are both on: the KL penalty counts twice"
        )
    if config.batch.samples_per_prompt == 1 and config.algorithm.advantage.startswith(
        "group_relative"
    ):
        found.append("batch.samples_per_prompt=1 with a group advantage: every advantage is 0")
    held_out = config.data.test or not is_path(config.data.train)
    if not held_out and (config.evaluate.every_steps or config.sft.stop_at_accuracy):
        found.append(
            "data.test is not set, so nothing is held out: evaluate.every_steps and "
            "sft.stop_at_accuracy do nothing"
        )
    return found
