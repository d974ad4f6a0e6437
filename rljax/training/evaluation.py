"""rljax.evaluate: evaluates a policy on held-out prompts, from Python."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rljax.config.from_python import as_text
from rljax.config.names import nearest_fields
from rljax.config.policy_options import EvaluateOptions, default_ks
from rljax.config.python_words import in_python
from rljax.data.online.prompts import PromptRecord
from rljax.errors import InputError
from rljax.evaluation import policy as policies
from rljax.evaluation.saved import evaluate_saved
from rljax.policies import Policy
from rljax.rollout import Player, Reward
from rljax.training.result import TrainedRun


def evaluate(
    policy: TrainedRun | str | Path | Policy,
    reward: str | Callable | Reward | Player | None = None,
    prompts: int | Sequence[PromptRecord] | None = None,
    *,
    data: object = None,
    samples: int = 8,
    ks: Sequence[int] | None = None,
    answer: Callable[[str], str | None] = policies.final_answer,
    **options,
) -> dict:
    """Returns the greedy accuracy, mean@n, pass@k, best_of@k and maj@k of a policy, with 95 %
    intervals.

    `policy` is the run that `rljax.train` returned, a run folder, a model folder or a name of the
    hub:

        rljax.evaluate(run)["metrics"]["greedy_accuracy"]
        rljax.evaluate("runs/mine", samples=16, prompts=100)

    Args:
      reward: a function or the name of one; default: the run's.
      prompts: how many of the held-out prompts, the first ones; default: as many as the run's.
      data: rows, a file or a task, as `rljax.train` takes them; default: what the run held out.
      samples: drawn responses to each prompt; 0 = the greedy one alone.
      ks: of pass@k, best_of@k and maj@k; default: those of 1, 4 and 8 that `samples` allows.
      answer: extracts from a response what maj@k votes on.
      options: what else `rljax evaluate` takes, by the names of its flags: temperature=0.8,
        step="best", trust_code=True (a folder whose config names functions of other files).

    A `Policy` of `rljax.policies.saved` is evaluated with its `player` and its `prompts`, both
    objects of the library; then the metrics alone are returned, and `options` are correct_at and
    seed. Raises InputError for anything the user can fix.
    """
    with in_python("rljax.evaluate"), tempfile.TemporaryDirectory() as inputs:
        ks = default_ks(samples) if ks is None else tuple(ks)
        if isinstance(policy, Policy):
            settings = dict(samples=samples, ks=ks, answer=answer, **options)
            return policies.evaluate(policy, reward, prompts, **settings)
        arguments = {"data": ("data.train", data), "reward": ("reward.function", reward)}
        texts = {
            name: as_text(field, value, Path(inputs), where="rljax.evaluate")
            for name, (field, value) in arguments.items()
            if value is not None
        }
        evaluate_options = _options(policy, {**texts, **options, "prompts": prompts})
        return evaluate_saved(
            dataclasses.replace(evaluate_options, samples=samples, ks=ks), answer=answer
        )


def _options(policy: object, options: Mapping) -> EvaluateOptions:
    if isinstance(policy, TrainedRun):  # it was made by this program, with functions of its own
        options = {"trust_code": True, **options}
        policy = policy.folder
    if not isinstance(policy, str | os.PathLike):
        raise InputError(
            "rljax.evaluate",
            value=type(policy).__name__,
            rule="a run that rljax.train returned, a folder, or a name of the hub",
            fix="rljax.evaluate(run), or rljax.evaluate('runs/mine')",
        )
    names = [field.name for field in dataclasses.fields(EvaluateOptions)]
    for name in options:
        if name not in names or name in ("checkpoint", "suites"):
            close = " or ".join(nearest_fields(name, names))
            fix = f"did you mean {close}?" if close else "help(rljax.evaluate) lists the arguments"
            raise InputError(f"rljax.evaluate takes no {name}", fix=fix)
    return EvaluateOptions(str(policy), **options)
