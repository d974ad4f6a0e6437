"""Scorers of the samples of a run: a reward function in workers, reward models, judges."""

import dataclasses
import functools
import logging
from pathlib import Path

import jax

from rljax import hosts
from rljax.arrays import moved
from rljax.components import Component, resolve
from rljax.config import NAMESPACES, Config, microbatch_tokens, model_fields
from rljax.contracts import spec
from rljax.data.online.encoded import load_run_tokenizer
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.mesh import on_host
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.rewards.judges.rubrics import rubrics_of
from rljax.rewards.pool.calling import asks_nobody, reads_model
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import MeshJudge, ModelScorer, ProcessScorer, Reward
from rljax.setup.setup import Setup
from rljax.setup.weights import scalar_model, step_separator_of

LOG = logging.getLogger("rljax")


def reward_role(setup: Setup, text: str, *, dense: bool = False, log: Path | None = None) -> Reward:
    """Opens the reward `text`: a function in a pool of processes that can be killed or, for judge
    and rubric, one that asks reward.judge_model. It gets the score of reward.model if it reads
    that; with "" the reward is that score alone. Raises InputError for prompts without the rubrics
    that it reads, and for models that cannot be loaded or read other ids.

    `dense`, for training, adds the scores of lines by reward.process_model, the rubrics that
    evolve, if there are any, and the costs that the dataflow reads. What the function prints goes
    to the file `log`.
    """
    reward, mesh = setup.config.reward, setup.model.mesh
    rows = max(setup.algorithm.steps.microbatch_rows, 1)
    scorer_model = setup.model_on("reward_model")
    scorer = model_scorer(setup.config, scorer_model, setup.tokenizer, text, rows)
    if text:
        evolving = dense and bool(reward.rubrics)
        if spec(resolve(text, NAMESPACES["reward"])).rubrics and not evolving:
            _check_rubrics(setup)
        judge_mesh = setup.model_on("judge").mesh
        options = dict(apart=judge_mesh != mesh, now=setup.tokenizer.now)
        pool = text_scorer(setup.config, text, judge_mesh, log, **options)
    else:
        pool, scorer = scorer, None
    process = _process_scorer(setup, rows) if dense and reward.process_model else None
    rubrics = None
    if dense and reward.rubrics:
        rubrics = resolve(reward.rubrics, NAMESPACES["rubrics"])(_share(reward.workers))
    costs = {}
    if dense and setup.needs_costs:
        costs = dict(needs_costs=True, cost_model=_cost_model(setup, rows))
    return Reward(pool, setup.tokenizer, mesh, process, rubrics, scorer, **costs)


def _cost_model(setup: Setup, rows: int) -> ModelScorer | None:
    """Returns the scorer of reward.cost_model, or None."""
    field, folder = "reward.cost_model", setup.config.reward.cost_model
    if not folder:
        return None
    model = setup.model_on("cost_model")
    scorer = _scorer(setup.config, model, setup.tokenizer, field, folder)
    return ModelScorer(*scorer, rows, "cost_model")


def _check_rubrics(setup: Setup) -> None:
    """Raises InputError unless every prompt has rubrics; samples without them would fail one
    by one, steps later."""
    prompts = setup.data.prompts if setup.main.samples else []
    for prompt in [*prompts, *setup.data.test_prompts]:
        try:
            rubrics_of(prompt.extra_info)
        except ValueError as error:
            problem = f"row {prompt.index} of {prompt.data_source!r} cannot be judged by rubrics"
            fix = "put them into extra_info of every row, or set reward.rubrics"
            raise InputError(problem, rule=str(error), fix=fix) from None


def _share(workers: int) -> int:
    """Returns the number of workers of this host, out of those of all hosts together, which ask one
    server; at least one."""
    return max(len(hosts.mine(workers)), 1)


def model_scorer(
    config: Config, policy: Model, tokenizer: Tokenizer, text: str, rows: int
) -> ModelScorer | None:
    """Returns the scorer of reward.model, which reads `rows` rows at once, if the reward `text` is
    "" or reads its score; else None. Raises InputError if reward.model is not set, or reads other
    ids than the policy."""
    if text and not reads_model(resolve(text, NAMESPACES["reward"])):
        return None
    folder = config.reward.model
    if not folder:
        rule = "it reads the score of a reward model, and reward.model is ''"
        fix = "a run whose config has reward.model, or another reward"
        raise InputError("reward", value=text, rule=rule, fix=fix)
    return ModelScorer(*_scorer(config, policy, tokenizer, "reward.model", folder), rows)


def _scorer(
    config: Config, policy: Model, tokenizer: Tokenizer, field: str, folder: str
) -> tuple[Model, dict]:
    """Loads the scorer of a field, with its weights where they lie between two uses."""
    model, params = scalar_model(config, policy, tokenizer, field, folder, trained=False)
    return model, _kept(config, params)


def _kept(config: Config, params: dict) -> dict:
    """Returns a scorer's weights where they lie between two uses: on the
    devices, or on the host."""
    if not config.memory.scorers_on_host:
        return params
    return jax.tree.map(lambda x: moved(x, on_host(x.sharding)), params)


def text_scorer(
    config: Config, text: str, mesh, log: Path | None = None, *, apart: bool = False, now=None
) -> RewardPool | MeshJudge:
    """Opens the scorer of the reward `text`: worker processes, or reward.judge_model on `mesh` for
    the rewards that it can answer. What a function prints goes to the file `log`, or to stderr.
    `apart`: the mesh is the judge's own. `now`: the date that the judge's chat template writes."""
    reward, component = config.reward, resolve(text, NAMESPACES["reward"])
    if not reward.judge_model or spec(component).asks != "mesh":
        workers = reward.workers if asks_nobody(component) else _share(reward.workers)
        return RewardPool(
            text, workers=workers, timeout_s=reward.timeout_s, memory_gb=reward.memory_gb, log=log
        )
    folder = reward.judge_model
    judge_config = Config(model=f"{folder.rstrip('/')}/")  # a slash: it is a path
    tokenizer = load_run_tokenizer(judge_config, now)
    model_config = load_config(folder, **dataclasses.asdict(config.model_settings))
    if tokenizer.vocab_size <= model_config.vocab_size:
        model_config = dataclasses.replace(model_config, known_ids=tokenizer.vocab_size)
    model = Model(model_config, mesh)
    tokens = microbatch_tokens(config)
    return MeshJudge(
        model,
        _kept(config, load_params(folder, model)),
        tokenizer,
        component,
        grades=reward.judge_grades,
        tokens_per_call=tokens,
        apart=apart,
    )


def _process_scorer(setup: Setup, rows: int) -> ProcessScorer:
    """The model of reward.process_model, which scores lines."""
    reward, home = setup.config.reward, NAMESPACES["process_reward"]
    field, folder = "reward.process_model", reward.process_model
    model = setup.model_on("process_model")
    return ProcessScorer(
        *_scorer(setup.config, model, setup.tokenizer, field, folder),
        rows,
        setup.tokenizer,
        lines=_process_lines(setup.config),
        reward=resolve(reward.process_reward, home),
        home=setup.model.mesh,
    )


@functools.cache  # once for each model
def _warn_of_separator(folder: str, separator: str) -> None:
    LOG.warning(
        "reward.process_model=%s: a line ends at the separator of its steps, %r, and a response"
        " without it has one line. Fix: none is needed where the policy writes it",
        folder,
        separator,
    )


def _process_lines(config: Config) -> Component:
    """Returns reward.process_lines, which finds the lines that are scored. One with the option
    `separator`, as `line_ids` is, gets the text that ended the steps of the model's training.
    Raises InputError if none did."""
    folder = config.reward.process_model
    lines = resolve(config.reward.process_lines, NAMESPACES["process_reward"])
    if "separator" not in lines.parameters or "separator" in lines.options:
        return lines
    separator = step_separator_of(folder)
    if not separator:
        raise InputError(
            f"reward.process_model={folder}",
            rule="it was trained with offline.step_separator='': no text tells where a step ends",
            fix="--config.reward.process_lines=FUNCTION of your own that finds the steps, or a"
            " model that was trained with a separator",
        )
    if separator != "\n" and hosts.first():
        _warn_of_separator(folder, separator)
    return lines.with_options({"separator": separator})


def abstract_scorers(setup: Setup) -> dict[str, dict]:
    """Returns {name: abstract weights} of the models that score samples (reward.model,
    reward.cost_model, reward.process_model, reward.judge_model)."""
    if not setup.needs_reward:
        return {}
    reward, weights = setup.config.reward, {}
    settings = model_fields(setup.config)
    if reward.process_model:
        _process_lines(setup.config)
    is_on_host = setup.config.memory.scorers_on_host
    for name, role, folder in (
        ("reward model", "reward_model", reward.model),
        ("cost model", "cost_model", reward.cost_model),
        ("process model", "process_model", reward.process_model),
        ("judge", "judge", reward.judge_model),
    ):
        if folder:
            model_config, mesh = load_config(folder, **settings), setup.model_on(role).mesh
            model = Model(model_config, mesh)
            if role != "judge":
                model = Model(dataclasses.replace(model_config, labels=1), mesh, "scalar")

            def held(x):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host(x.sharding))

            arrays = model.abstract()
            weights[f"{name} weights"] = jax.tree.map(held, arrays) if is_on_host else arrays
    return weights
