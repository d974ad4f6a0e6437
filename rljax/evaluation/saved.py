"""Evaluation of a policy on disk: which prompts and which reward, and the metrics of both."""

import contextlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rljax.config import is_path
from rljax.config.options import EvaluateOptions, check_options
from rljax.data.online.default_rewards import evaluation_of, evaluation_text
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.evaluation.policy import evaluate, final_answer, greedy_accuracy
from rljax.files import write_rows
from rljax.setup.policies import Sample, SavedPolicy, load_policy
from rljax.setup.search import searching


def data_and_reward(options: EvaluateOptions, policy: SavedPolicy) -> tuple[str, str]:
    """(data, reward) of an evaluation, from the options or from the run."""
    config = policy.config
    data = options.data or config.data.test
    if not data and config.data.train and not is_path(config.data.train):
        data = config.data.train  # a task has a test split of its own
    reward = options.reward
    if not (reward or config.evaluate.reward) and options.data and not is_path(options.data):
        reward = evaluation_of(options.data, config.reward.function)
    if not reward and policy.step is not None:
        reward = evaluation_text(config)
    require_named(options.checkpoint, "evaluate on", data=data, reward=reward)
    return data, reward


def require_named(checkpoint: str, purpose: str, **values: str | None) -> None:
    """Raises InputError that names the options that neither the flags nor the run set."""
    missing = [f"--{name}" for name, value in values.items() if not value]
    if missing:
        raise InputError(
            f"{checkpoint} does not say what to {purpose}",
            fix=f"set {' and '.join(missing)}, such as --data=rows.parquet --reward='gsm8k()'",
        )


def _answer_rows(
    prompts: Sequence[PromptRecord], right: np.ndarray, samples: Sequence[Sample]
) -> list[dict]:
    """Rows of prompt, response, score and right; null where the reward failed."""
    known = lambda x: None if np.isnan(x) else float(x)  # noqa: E731
    return [
        {"prompt": prompt.prompt, "response": s.text, "score": known(s.reward), "right": known(r)}
        for prompt, s, r in zip(prompts, samples, right, strict=True)
    ]


def evaluate_saved(
    options: EvaluateOptions, *, answer: Callable[[str], str | None] = final_answer
) -> dict:
    """Greedy accuracy, mean@n, pass@k, best_of@k and maj@k of a saved policy, JSON-ready.

    `answer` extracts from a response what maj@k votes on.
    """
    check_options(options)
    started = time.perf_counter()
    saved = load_policy(options.checkpoint, options.step, trust_code=options.trust_code)
    config, run = saved.config, saved.step is not None
    data, reward_text = data_and_reward(options, saved)
    count = options.prompts or (config.evaluate.prompts if run else 256)
    prompts, counts = saved.encode(
        load_prompts(data, "test")[:count], max_tokens=options.max_prompt_tokens,
        overlong=config.data.overlong,
    )  # fmt: skip
    policy = saved.ready(
        prompts, temperature=options.temperature, max_response_tokens=options.max_response_tokens
    )
    correct_at = config.evaluate.correct_at
    if options.search:
        guide = (options.search_model, options.search_reads)
        policy = searching(policy, saved, options.search, *guide)
    with contextlib.closing(saved.reward(reward_text)) as reward:
        greedy = greedy_accuracy(policy, reward, prompts, correct_at=correct_at)
        metrics = evaluate(
            policy, reward, prompts, samples=options.samples, ks=options.ks,
            correct_at=correct_at, seed=options.seed, answer=answer, greedy=greedy,
        )  # fmt: skip
    if options.answers:
        write_rows(options.answers, _answer_rows(prompts, *greedy))
    return {
        "checkpoint": options.checkpoint,
        "step": saved.step,
        "data": data,
        "reward": reward_text,
        "search": options.search,
        "samples": options.samples,
        "temperature": policy.sampling.temperature,
        "max_response_tokens": policy.sampling.max_response_tokens,
        "prompts": counts,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "wall_s": time.perf_counter() - started,
        "metrics": metrics,
    }
