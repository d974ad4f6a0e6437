"""Evaluate what is on disk: the checkpoint of a run, or a Hugging Face folder.

What lives here: finding and loading a policy's weights (without its optimizer state), and the
options of launchers/evaluate.py. What does not: the estimators and the sampling
(rljax.evaluation.policy). A run may still be training: nothing here writes into its folder.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp

from rljax.config import Config, MeshConfig, from_dict, is_path
from rljax.data.online.default_rewards import evaluation_of, evaluation_text
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.online.prompts import encode_prompts
from rljax.data.rows.files import read_json_object
from rljax.data.rows.sources import load_prompts
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.evaluation.policy import evaluate
from rljax.learn.state import new_train_state
from rljax.models.huggingface import load_params
from rljax.models.model import Model
from rljax.models.trees import merged
from rljax.roles import Actor
from rljax.rollout import Reward
from rljax.sampler import Sampling
from rljax.setup import check_length, initial_params, load_model, text_scorer
from rljax.setup.checkpoint import ARRAYS, Checkpoints
from rljax.setup.setup import decoding_of


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """The flags of launchers/evaluate.py. None: as the run's config.json says, else its default."""

    checkpoint: str
    step: str = "latest"  # of a run: latest | best | a number
    data: str | None = None
    reward: str | None = None
    samples: int = 8  # per prompt, at `temperature`; 0 = greedy only
    ks: tuple[int, ...] = (1, 4, 8)
    prompts: int | None = None
    temperature: float | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    seed: int = 0


def check_options(options: EvaluateOptions) -> None:
    """Every problem of the flags at once. Raises InputError."""
    problems = []

    def check(ok: bool, flag: str, value, rule: str):
        if not ok:
            problems.append(f"--{flag}={value}: {rule}")

    check(options.checkpoint != "", "checkpoint", "", "a run folder or a Hugging Face folder")
    check(options.samples >= 0, "samples", options.samples, "must be >= 0; 0 = greedy only")
    if options.samples > 0:
        for k in options.ks:
            rule = f"each is between 1 and --samples={options.samples}"
            check(1 <= k <= options.samples, "k", k, rule)
    for flag in ("prompts", "max_prompt_tokens", "max_response_tokens"):
        value = vars(options)[flag]
        check(value is None or 1 <= value < 2**31, flag, value, "must be >= 1")
    temperature = options.temperature
    rule = "must be above 0 and finite: greedy accuracy is measured beside it"
    check(temperature is None or 0 < temperature < float("inf"), "temperature", temperature, rule)
    step = options.step
    rule = "latest, best, or the number of a step"
    check(step in ("latest", "best") or step.isdecimal(), "step", step, rule)
    check(0 <= options.seed < 2**31, "seed", options.seed, "from 0 to 2147483647")
    if problems:
        raise InputError("these flags cannot be used:\n  " + "\n  ".join(problems))


@dataclasses.dataclass(frozen=True)
class SavedPolicy:
    """A policy ready to sample. `step` is None for a Hugging Face folder."""

    config: Config  # the run's, or the default one around a Hugging Face folder
    model: Model
    params: dict
    tokenizer: Tokenizer
    step: int | None

    def actor(self) -> Actor:
        nothing = optax.identity()
        state = new_train_state(self.params, nothing)
        decoding = decoding_of(self.config, self.tokenizer)
        return Actor(state, self.model, nothing, self.config.sampler.temperature, decoding)


class _ReadOnly(Checkpoints):
    """The checkpoints of a run that may be going on: no folder is made, no leftover removed."""

    def __init__(self, folder: Path, best_metric: str):
        self.folder, self.keep, self.best_metric = folder, 0, best_metric


def _find_step(checkpoints: Checkpoints, wanted: str) -> int:
    folder = checkpoints.folder
    steps = checkpoints.steps() if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{folder} holds no checkpoint",
            fix="wait for the run's first one, or give its policy/ folder",
        )
    if wanted == "latest":
        return checkpoints.latest()
    if wanted == "best":
        step = checkpoints.best()
        if step is None:
            rule = f"checkpoint.best_metric is {checkpoints.best_metric!r} in its config.json"
            raise InputError(f"{folder}: no step is the best", rule=rule, fix="--step=latest")
    else:
        step = int(wanted)
    if step not in steps:
        raise InputError(f"{folder} has no step {step}", fix=f"one of {', '.join(map(str, steps))}")
    damage = checkpoints.damage(step)
    if damage:
        raise InputError(f"the checkpoint of step {step} is damaged: {damage}", fix="another step")
    return step


def _read_params(path: Path, model: Model) -> dict:
    """The actor's parameters from a checkpoint's arrays; optimizer state and critic stay on
    disk."""
    like = {"actor": {"params": model.split(model.abstract())[0]}}
    options = ocp.args.PyTreeRestore(
        item=like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path.absolute(), options)["actor"]["params"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} does not hold the weights of the model in the run's config.json",
            rule=f"{type(error).__name__}: {str(error)[:500]}",
            fix="evaluate with the model folder that the run was started with",
        ) from error


def load_policy(folder: str | Path, step: str = "latest") -> SavedPolicy:
    """The policy of a run folder (config.json, checkpoints/) or of a Hugging Face folder.

    All devices here share the weights, whatever mesh the run was trained on.
    """
    folder = Path(folder)
    if not folder.is_dir():
        fix = "give a run folder or a Hugging Face folder"
        raise InputError("no such folder", value=str(folder), fix=fix)
    saved = read_json_object(folder / "config.json")
    if "model_type" in saved:
        config = Config(model=f"{folder}/")  # with a slash it is a path, whatever it is called
        tokenizer = load_run_tokenizer(config)
        model = load_model(config, tokenizer)
        return SavedPolicy(config, model, load_params(folder, model), tokenizer, None)
    if "dataflow" not in saved:
        raise InputError(
            f"{folder / 'config.json'} is neither a run's nor a Hugging Face model's",
            value=sorted(saved)[:8],
            fix="give a run folder or a Hugging Face folder",
        )
    config = from_dict(saved, str(folder / "config.json"))
    config = dataclasses.replace(config, mesh=MeshConfig())
    checkpoints = _ReadOnly(folder / "checkpoints", config.checkpoint.best_metric)
    number = _find_step(checkpoints, step)
    tokenizer = load_run_tokenizer(config)
    model = load_model(config, tokenizer)
    params = _read_params(checkpoints.path(number) / ARRAYS, model)
    if model.config.lora:  # a checkpoint holds the adapters alone
        params = merged(params, model.split(initial_params(config, model))[1])
    return SavedPolicy(config, model, params, tokenizer, number)


def _what_to_evaluate(options: EvaluateOptions, policy: SavedPolicy) -> tuple[str, str]:
    """(data, reward), from the flags or from the run."""
    config = policy.config
    data = options.data or config.data.test
    if not data and config.data.train and not is_path(config.data.train):
        data = config.data.train  # a task has a test split of its own
    reward = options.reward
    if not (reward or config.evaluate.reward) and options.data and not is_path(options.data):
        reward = evaluation_of(options.data, config.reward.function)
    if not reward and policy.step is not None:
        reward = evaluation_text(config)
    missing = [f"--{name}" for name, value in (("data", data), ("reward", reward)) if not value]
    if missing:
        raise InputError(
            f"{options.checkpoint} does not say what to evaluate on",
            fix=f"set {' and '.join(missing)}, such as --data=test.parquet --reward='gsm8k()'",
        )
    return data, reward


def evaluate_saved(
    options: EvaluateOptions, *, answer: Callable[[str], str | None] | None = None
) -> dict:
    """Greedy accuracy, mean@n, pass@k, best_of@k and maj@k of a saved policy, JSON-ready.

    `answer` says what maj@k votes on; None = rljax.evaluation.policy.final_answer.
    """
    check_options(options)
    started = time.perf_counter()
    policy = load_policy(options.checkpoint, options.step)
    config, run = policy.config, policy.step is not None
    data, reward_text = _what_to_evaluate(options, policy)
    limit = options.max_prompt_tokens or config.data.max_prompt_tokens
    response_tokens = options.max_response_tokens or config.sampler.max_response_tokens
    count = options.prompts or (config.evaluate.prompts if run else 256)
    overlong = config.data.overlong
    records = load_prompts(data, "test")[:count]
    prompts, counts = encode_prompts(
        records, policy.tokenizer, max_prompt_tokens=limit, overlong=overlong
    )
    prompt_tokens = max(len(record.token_ids) for record in prompts)
    check_length(prompt_tokens, response_tokens, policy.model)
    sampling = Sampling(
        temperature=options.temperature or config.sampler.temperature,
        max_response_tokens=response_tokens,
        stop_ids=tuple(policy.tokenizer.eos_ids),
        stop_strings=tuple(config.sampler.stop_strings),
    )
    scorer = text_scorer(config, reward_text, policy.model.mesh)
    reward = Reward(scorer, policy.tokenizer, policy.model.mesh)
    try:
        found = evaluate(
            policy.actor(),
            reward,
            prompts,
            sampling=sampling,
            prompt_tokens=prompt_tokens,
            samples=options.samples,
            ks=options.ks,
            correct_at=config.evaluate.correct_at,
            seed=options.seed,
            **({"answer": answer} if answer else {}),
        )
    finally:
        reward.close()
    return {
        "checkpoint": options.checkpoint,
        "step": policy.step,
        "data": data,
        "reward": reward_text,
        "samples": options.samples,
        "temperature": sampling.temperature,
        "max_response_tokens": response_tokens,
        "prompts": counts,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "wall_s": time.perf_counter() - started,
        "metrics": found,
    }


def parse_ks(text: str | Sequence[str]) -> tuple[int, ...]:
    """ "1,4,8" -> (1, 4, 8). Raises InputError that names the flag."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError("--k", value=",".join(parts), rule="whole numbers", fix="--k=1,4,8")
    return tuple(sorted({int(part) for part in parts}))


def write_result(result: dict, path: str) -> None:
    """The result as JSON."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--out={path} cannot be written", rule=str(error)) from None
