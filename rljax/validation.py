"""validate(config): every problem of a config at once, each with its fix, before any model loads.

What lives here: types, ranges, batch arithmetic, and whether components exist and fit together.
"""

import dataclasses
import math
from pathlib import Path

from rljax.components import resolve
from rljax.config import HOMES, Config, is_path, row_tokens
from rljax.errors import InputError


class _Problems(list):
    """Collects what is wrong; each entry names the field, the value, the rule and the fix."""

    def check(self, ok: bool, field: str, value, rule: str, fix: str = "") -> bool:
        if not ok:
            self.append(f"{field}={value!r}: {rule}" + (f". Fix: {fix}" if fix else ""))
        return ok


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
    "algorithm.kl_estimator": ("k1", "abs", "k2", "k3", "k1+", "k3+"),
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
            problems.check(number and math.isfinite(value), name, value, "must be a finite number")
        elif kind in (int, bool, str):
            exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            problems.check(exact, name, value, f"must be {kind.__name__}")
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
    divisors = [d for d in range(1, n + 1) if n % d == 0]
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
        problems.append(f"{field}={text!r}: {error}")
        return None


def _check_components(config: Config, problems: _Problems) -> None:
    algorithm = config.algorithm
    advantage = _resolve(problems, "algorithm.advantage", algorithm.advantage, "advantage")
    _resolve(problems, "algorithm.policy_loss", algorithm.policy_loss, "policy_loss")
    _resolve(problems, "algorithm.value_loss", algorithm.value_loss, "value_loss")
    _resolve(problems, "algorithm.reduction", algorithm.reduction, "reduction")
    _resolve(problems, "reward.function", config.reward.function, "reward")
    if config.evaluate.reward:
        _resolve(problems, "evaluate.reward", config.evaluate.reward, "reward")
    dataflow = _resolve(problems, "dataflow", config.dataflow, "dataflow")
    for field, spec in (
        ("data.train", config.data.train),
        ("data.test", config.data.test),
        ("sft.data", config.sft.data),
    ):
        if spec and not is_path(spec):
            _resolve(problems, field, spec, "data")
        elif spec:
            problems.check(
                Path(spec).exists(), field, spec, "does not exist", "give the path of a file"
            )
    if config.model and not is_path(config.model):
        _resolve(problems, "model", config.model, "model")
    elif config.model:
        problems.check(
            Path(config.model).is_dir(),
            "model",
            config.model,
            "is not a folder",
            "a Hugging Face folder",
        )
    if dataflow is None or advantage is None:
        return
    critic = "critic" in dataflow.parameters
    if advantage.name == "gae":
        problems.check(
            critic,
            "algorithm.advantage",
            algorithm.advantage,
            "needs a critic",
            f"use dataflow='ppo' (now {config.dataflow!r})",
        )
    reference = algorithm.kl_in_reward > 0 or algorithm.kl_in_loss > 0
    problems.check(
        not reference or "reference" in dataflow.parameters,
        "dataflow",
        config.dataflow,
        "takes no reference, but algorithm.kl_in_reward or kl_in_loss is above 0",
        "set both to 0",
    )
    known = {"prompts", "key", "cfg", "actor", "critic", "reference", "reward", *dataflow.options}
    unknown = [p for p in dataflow.parameters if p not in known]
    problems.check(
        not unknown,
        "dataflow",
        config.dataflow,
        f"asks for {', '.join(unknown)}, which are no roles",
        "roles are actor, critic, reference, reward; other parameters must be set in the text",
    )


def validate(config: Config) -> list[str]:
    """All problems of the config at once, as one InputError; returns warnings. Runs before any
    model loads."""
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
    return found
