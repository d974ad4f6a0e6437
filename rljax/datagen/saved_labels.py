"""Labels of lines by policies on disk: programs of several checkpoints, labelled by completions
(steps) or by a tree search (trees)."""

import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.config.declare import check_options
from rljax.config.policy_options import LabelOptions
from rljax.data.images.columns import require_text_alone
from rljax.data.online.default_rewards import reads_reference, reward_text
from rljax.data.online.prompts import PromptRecord
from rljax.data.rows.columns import rows_of
from rljax.data.rows.sources import load_prompts
from rljax.data.rows.split import held_out_fraction
from rljax.data.text.tokenizer import Tokenizer
from rljax.datagen.steps import PolicyWithTests, label_programs
from rljax.datagen.trees import label_trees
from rljax.errors import InputError
from rljax.evaluation.saved import require_named
from rljax.files import write_json, write_rows
from rljax.policies import Policy, load_named_policy
from rljax.rewards.pool.calling import reads_model
from rljax.setup import text_scorer
from rljax.setup.same_ids import differing_ids

SHARES = "labels.json"


def label_saved(options: LabelOptions) -> dict:
    """Labels programs of every checkpoint, and writes rows for dataflow="process_reward_model".
    Returns {"checkpoints": {checkpoint: metrics}, "rows", "options", "wall_s" in seconds}.

    Each program is searched with completions of its own checkpoint, or of `options.completer`.
    Files: train.jsonl, test.jsonl (rows of held-out prompts, whatever checkpoint they come from),
    labels.json. Raises InputError if no program has a line to label.
    """
    check_options(options)
    started, rows, metrics = time.perf_counter(), [], {}
    for number, name in enumerate(options.checkpoints):
        labelled, metrics[name] = _label_checkpoint(options, name, number)
        rows += labelled
    if not rows:
        counts = {k: v for m in metrics.values() for k, v in m.items() if k[:8] == "programs"}
        fix = "longer responses (--max_response_tokens), or a policy that ends its programs"
        raise InputError("no program has a line to label", value=counts, fix=fix)
    # A prompt is held out by its index, so that it is the same for every checkpoint.
    indices = {row["index"] for row in rows}
    draws = {i: random.Random(f"{options.seed} held out {i}").random() for i in indices}
    held_out = {index for index, draw in draws.items() if draw < options.held_out}
    parts = {
        "train": [row for row in rows if row["index"] not in held_out],
        "test": [row for row in rows if row["index"] in held_out],
    }
    for name, part in parts.items():
        write_rows(Path(options.out) / f"{name}.jsonl", part)
    result = {
        "checkpoints": metrics,
        "rows": {name: len(part) for name, part in parts.items()},
        "options": dataclasses.asdict(options),
        "wall_s": time.perf_counter() - started,
    }
    write_json(Path(options.out) / SHARES, result)
    return result


def _label_checkpoint(options: LabelOptions, name: str, number: int) -> tuple[list[dict], dict]:
    """Returns rows and metrics of one checkpoint, on prompts drawn without replacement."""
    saved = load_named_policy(name, trust_code=options.trust_code)
    config = saved.config
    reward = options.reward or (reward_text(config) if saved.step is not None else None)
    data = options.data or config.data.train
    require_named(name, "label", data=data, reward=reward)
    if reads_model(resolve(reward, NAMESPACES["reward"])):
        rule = "it reads the score of a reward model: no test of a program"
        raise InputError("reward", value=reward, rule=rule, fix="--reward='code_tests()', say")
    with rows_of("--data", "--data=FILE of prompts with answers"):
        need, fraction = reads_reference([reward]), held_out_fraction(config, data)
        records = load_prompts(data, "train", need_ground_truth=need, test_fraction=fraction)
    rng = random.Random(f"{options.seed} {number}")
    drawn = rng.sample(records, min(options.prompts, len(records)))
    require_text_alone(drawn, "this command")
    prompts, _ = saved.encode(drawn, max_tokens=options.max_prompt_tokens)
    sampling = dict(
        temperature=options.temperature, max_response_tokens=options.max_response_tokens
    )
    policy = saved.ready(prompts, **sampling)
    completer = _completer(options, saved.tokenizer, drawn, prompts, sampling)
    pool = text_scorer(config, reward, saved.model.mesh)
    searcher = PolicyWithTests(
        policy, pool, config.evaluate.correct_at, options.code_only, options.rows_at_once, completer
    )
    key = jax.random.fold_in(jax.random.key(options.seed), number)
    settings = dict(programs_per_prompt=options.programs_per_prompt, neutral=options.neutral)
    try:
        if options.search:
            rows, metrics = label_trees(searcher, prompts, key, method=options.search, **settings)
        else:
            counts = dict(completions=options.completions, replay=options.replay)
            rows, metrics = label_programs(searcher, prompts, key, **settings, **counts)
    finally:
        pool.close()
    source = {"source": name, "source_step": saved.step}
    return [{**row, **source} for row in rows], {**metrics, "prompts": float(len(prompts))}


def _completer(
    options: LabelOptions,
    tokenizer: Tokenizer,
    drawn: list[dict],
    prompts: Sequence[PromptRecord],
    sampling: dict,
) -> Policy | None:
    """Returns the policy of options.completer, which has to read prompts as the checkpoint does;
    None without one."""
    if not options.completer:
        return None
    completer = load_named_policy(options.completer, trust_code=options.trust_code)
    encoded, _ = completer.encode(drawn, max_tokens=options.max_prompt_tokens)
    same_ids = [list(p.token_ids) for p in encoded] == [list(p.token_ids) for p in prompts]
    if not same_ids or differing_ids(tokenizer, completer.tokenizer):
        rule = "other token ids than the checkpoint's"
        fix = "a policy with the same tokenizer and chat template"
        raise InputError("completer", value=options.completer, rule=rule, fix=fix)
    return completer.ready(prompts, **sampling)
