"""Evaluation of a policy on disk: which prompts and which reward, and the metrics of both."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from rljax import hub
from rljax.components import resolve
from rljax.config import NAMESPACES, Config, is_path
from rljax.config.declare import check_options
from rljax.config.policy_options import EvaluateOptions
from rljax.contracts import spec
from rljax.data.kinds import SAMPLED
from rljax.data.online.default_rewards import evaluation_of, evaluation_text, reads_reference
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.columns import rows_of
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.errors import InputError
from rljax.evaluation.lengths import by_length
from rljax.evaluation.policy import (
    GAIN,
    Answers,
    answer_metrics,
    answer_prompts,
    bootstrap,
    correct,
    final_answer,
    score_table,
)
from rljax.files import write_rows
from rljax.policies import Policy, SavedPolicy, load_named_policy, load_policy
from rljax.policies.search import searching


def kind_of_data(config: Config) -> str:
    """Returns the kind of data that the dataflow of a config learns from. Raises InputError if
    there is no such dataflow."""
    return spec(resolve(config.dataflow, NAMESPACES["dataflow"])).data


def held_out_data(config: Config) -> str:
    """Returns the data with the held-out prompts of a run: evaluate.prompts_from; else data.test,
    or data.train if that is a task with a test split, or a file of which a share was held out; else
    "", as where those rows are pairs, labels, steps or trajectories."""
    if config.evaluate.prompts_from:
        return config.evaluate.prompts_from
    if kind_of_data(config) not in (*SAMPLED, "examples"):
        return ""
    holds_out = config.data.test_fraction or not is_path(config.data.train)
    return config.data.test or (config.data.train if holds_out else "")


def data_and_reward(options: EvaluateOptions, policy: SavedPolicy) -> tuple[str, str]:
    """(data, reward) of an evaluation, from the options or from the run."""
    config = policy.config
    data = options.data or held_out_data(config)
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
        data, reward = f"--data={values['data'] or 'rows.parquet'}", values["reward"] or "gsm8k()"
        quote = "'" if '"' in reward else '"'
        quotable = not set(quote + "$`\\!") & set(reward)  # else no shell reads it as it stands
        example = f"{data} --reward={quote}{reward}{quote}" if quotable else data
        fix = f"set {' and '.join(missing)}, such as {example}"
        raise InputError(f"{checkpoint} does not say what to {purpose}", fix=fix)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """One saved policy and what it answered."""

    prompts: list[PromptRecord]
    counts: dict[str, int]
    policy: Policy
    answers: Answers
    metrics: dict
    right: np.ndarray  # pass@1 of each prompt [P]
    tokens: np.ndarray  # the mean length of its responses [P]


def _answer_rows(result: _Asked, correct_at: float) -> list[dict]:
    """Rows of prompt, greedy response, score and right; null where the reward failed."""

    def or_none(x):
        return None if np.isnan(x) else float(x)

    greedy = result.answers.greedy
    right = correct(score_table(greedy, 1)[:, 0], correct_at)
    return [
        {
            "prompt": prompt.prompt,
            "response": s.text,
            "score": or_none(s.reward),
            "right": or_none(r),
        }
        for prompt, s, r in zip(result.prompts, greedy, right, strict=True)
    ]


def evaluate_saved(
    options: EvaluateOptions, *, answer: Callable[[str], str | None] = final_answer
) -> dict:
    """Greedy accuracy, mean@n, pass@k, best_of@k and maj@k of a saved policy, and pass@1 by the
    length of the responses, as JSON. With `options.against` also those of another policy on the
    same prompts, and the differences, prompt by prompt.

    `answer` extracts the text that maj@k votes on from a response. Raises InputError for bad
    options, and without data or a reward.
    """
    if options.samples is None:
        options = dataclasses.replace(options, samples=8)
    check_options(options)
    started = time.perf_counter()
    saved = load_policy(options.checkpoint, options.step, trust_code=options.trust_code)
    config, run = saved.config, saved.step is not None
    data, reward_text = data_and_reward(options, saved)
    fraction = 0.0 if options.data else held_out_fraction(config, data)
    count = options.prompts or (config.evaluate.prompts if run else 256)
    with rows_of("--data", "--data=FILE of prompts with answers"):
        need = reads_reference([reward_text])
        records = load_prompts(data, "test", need_ground_truth=need, test_fraction=fraction)
    prompts = records[:count]
    correct_at = config.evaluate.correct_at
    ask = functools.partial(_asked, options, prompts, reward_text, correct_at, answer)
    result = ask(saved)
    if options.answers:
        write_rows(options.answers, _answer_rows(result, correct_at))
    comparison = {}
    if options.against:
        comparison = _compared(result, ask, options)
    else:
        result.metrics.update(
            by_length("pass@1", result.right, result.tokens, options.length_buckets)
        )
    sampling = result.policy.sampling
    return {
        "checkpoint": hub.pinned(options.checkpoint),
        "step": saved.step,
        "data": hub.pinned(data) if hub.is_hub(data) else data,
        "reward": reward_text,
        "search": options.search,
        "samples": options.samples,
        "temperature": sampling.temperature,
        "max_response_tokens": sampling.max_response_tokens,
        "prompts": result.counts,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "wall_s": time.perf_counter() - started,
        "metrics": result.metrics,
        **comparison,
    }


def _asked(
    options: EvaluateOptions,
    records: list[dict],
    reward_text: str,
    correct_at: float,
    answer: Callable[[str], str | None],
    saved: SavedPolicy,
) -> _Asked:
    """Samples a saved policy on the records, scores it, and takes its metrics."""
    prompts, counts = saved.encode(
        records, max_tokens=options.max_prompt_tokens, overlong=saved.config.data.overlong
    )
    policy = saved.ready(
        prompts, temperature=options.temperature, max_response_tokens=options.max_response_tokens
    )
    if options.search:
        guide = (options.search_model, options.search_reads)
        policy = searching(policy, saved, options.search, *guide)
    with contextlib.closing(saved.player(reward_text)) as player:
        keywords = dict(samples=options.samples, seed=options.seed)
        answers = answer_prompts(policy, player, prompts, **keywords)
    keywords = dict(correct_at=correct_at, episodes=player.has_turns, answer=answer)
    metrics = answer_metrics(answers, ks=options.ks_of(options.samples), **keywords)
    right, tokens = answers.pass_rates(correct_at), answers.tokens()
    return _Asked(prompts, counts, policy, answers, metrics, right, tokens)


def _compared(ours: _Asked, ask: Callable[[SavedPolicy], _Asked], options: EvaluateOptions) -> dict:
    """{"against": the other policy and its metrics, "difference": ours - theirs, prompt by prompt}.
    A prompt is in one bucket for both: that of the other policy's responses."""
    saved = load_named_policy(options.against, trust_code=options.trust_code)
    theirs = ask(saved)
    prompt_ids = [[(p.source, p.index) for p in side.prompts] for side in (ours, theirs)]
    if prompt_ids[0] != prompt_ids[1]:
        problem = "the two policies do not read the same prompts"
        rule = "prompts that are too long for one of them are left out"
        fix = "--max_prompt_tokens that is enough for both"
        raise InputError(problem, value=(ours.counts, theirs.counts), rule=rule, fix=fix)
    by_tokens = functools.partial(
        by_length, "pass@1", tokens=theirs.tokens, bounds=options.length_buckets
    )
    ours.metrics.update(by_tokens(ours.right))
    theirs.metrics.update(by_tokens(theirs.right))
    gain = ours.right - theirs.right
    against = {"checkpoint": options.against, "step": saved.step, "metrics": theirs.metrics}
    return {
        "against": against,
        "difference": {"pass@1": bootstrap(gain, within=GAIN), **by_tokens(gain, within=GAIN)},
    }
