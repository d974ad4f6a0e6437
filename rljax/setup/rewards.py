"""What scores the samples of a run: a reward function in workers, reward models, judges."""

import dataclasses
from pathlib import Path

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, microbatch_tokens
from rljax.data.online.encoded import load_run_tokenizer
from rljax.errors import InputError
from rljax.models.huggingface import load_config, load_params
from rljax.models.model import Model
from rljax.rewards.judges.judges import judge
from rljax.rewards.judges.rubrics import rubric, rubrics_of
from rljax.rewards.pool.calling import reads_model
from rljax.rewards.pool.pool import RewardPool
from rljax.rollout import MeshJudge, ModelScorer, ProcessScorer, Reward
from rljax.setup.setup import Setup
from rljax.setup.weights import scalar_model


def reward_role(setup: Setup, text: str, *, dense: bool = False, log: Path | None = None) -> Reward:
    """The reward function `text` in a pool of killable workers or, for judge and rubric, asked of
    reward.judge_model, with the score of reward.model where it reads that; where it is "" the model
    alone. `dense`, for training, adds the scores of lines by reward.process_model and the rubrics
    that evolve, if there are any. What the function prints goes to the file `log`."""
    reward, mesh = setup.config.reward, setup.model.mesh
    rows = max(setup.algorithm.steps.microbatch_rows, 1)
    scorer = model_scorer(setup.config, setup.model, text, rows)
    if text:
        evolving = dense and bool(reward.rubrics)
        if resolve(text, NAMESPACES["reward"]).function is rubric and not evolving:
            _check_rubrics(setup)
        pool = text_scorer(setup.config, text, mesh, log)
    else:
        pool, scorer = scorer, None
    scored = _process_scorer(setup, rows) if dense and reward.process_model else None
    rubrics = None
    if dense and reward.rubrics:
        rubrics = resolve(reward.rubrics, NAMESPACES["rubrics"])(reward.workers)
    return Reward(pool, setup.tokenizer, mesh, scored, rubrics, scorer)


def _check_rubrics(setup: Setup) -> None:
    """Every prompt has rubrics: else its samples would fail one by one, steps later."""
    prompts = setup.data.prompts if setup.main.samples else []
    for prompt in [*prompts, *setup.data.test_prompts]:
        try:
            rubrics_of(prompt.extra_info)
        except ValueError as error:
            raise InputError(
                f"row {prompt.index} of {prompt.data_source!r} cannot be judged by rubrics",
                rule=str(error),
                fix="put them into extra_info of every row, or set reward.rubrics",
            ) from None


def model_scorer(config: Config, policy: Model, text: str, rows: int) -> ModelScorer | None:
    """reward.model, `rows` rows at once, where the reward `text` is "" or reads its score; else
    None."""
    if text and not reads_model(resolve(text, NAMESPACES["reward"])):
        return None
    folder = config.reward.model
    if not folder:
        rule = "it reads the score of a reward model, and reward.model is ''"
        fix = "a run whose config has reward.model, or another reward"
        raise InputError("reward", value=text, rule=rule, fix=fix)
    model, params = scalar_model(config, policy, "reward.model", folder, adapted=False)
    return ModelScorer(model, params, rows)


def text_scorer(config: Config, text: str, mesh, log: Path | None = None) -> RewardPool | MeshJudge:
    """What scores samples by the reward `text`: workers, or reward.judge_model for what it can
    answer. What a function prints goes to the file `log`, or to stderr."""
    reward, component = config.reward, resolve(text, NAMESPACES["reward"])
    if not reward.judge_model or component.function not in (judge, rubric):
        return RewardPool(
            text, workers=reward.workers, timeout_s=reward.timeout_s, memory_gb=reward.memory_gb,
            log=log,
        )  # fmt: skip
    folder = reward.judge_model
    tokenizer = load_run_tokenizer(Config(model=f"{folder.rstrip('/')}/"))  # a slash: it is a path
    model = Model(load_config(folder, **dataclasses.asdict(config.model_settings)), mesh)
    tokens = microbatch_tokens(config)
    return MeshJudge(
        model, load_params(folder, model), tokenizer, component, grades=reward.judge_grades,
        tokens_per_call=tokens,
    )  # fmt: skip


def _process_scorer(setup: Setup, rows: int) -> ProcessScorer:
    """The model of reward.process_model, which scores lines."""
    wish, home = setup.config.reward, NAMESPACES["process_reward"]
    model, params = scalar_model(
        setup.config, setup.model, "reward.process_model", wish.process_model, adapted=False
    )
    return ProcessScorer(
        model, params, rows, setup.tokenizer,
        lines=resolve(wish.process_lines, home), reward=resolve(wish.process_reward, home),
    )  # fmt: skip


def abstract_scorers(setup: Setup) -> dict[str, dict]:
    """{name: weights} of the models that score samples (reward.model, reward.process_model,
    reward.judge_model)."""
    if not setup.needs_reward:
        return {}
    wish, found = setup.config.reward, {}
    for name, folder in (("reward model", wish.model), ("process model", wish.process_model)):
        if folder:
            settings = dataclasses.asdict(setup.config.model_settings)
            facts = dataclasses.replace(load_config(folder, **settings), labels=1)
            found[f"{name} weights"] = Model(facts, setup.model.mesh, "scalar").abstract()
    if wish.judge_model:
        settings = dataclasses.asdict(setup.config.model_settings)
        facts = load_config(wish.judge_model, **settings)
        found["judge weights"] = Model(facts, setup.model.mesh).abstract()
    return found
