"""Rewards made of rewards: a weighted mixture, one reward per data source, a reward with a cost
from another one, a reward under judges, and a reward model's score as one of them.

Parts are normalised over a batch or a group by `rljax.shaping.scores.mixed_parts` and
`rljax.advantages.gdpo`.
"""

import functools
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

from rljax.components import Component, resolve
from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.pool.calling import (
    HOME,
    Abstained,
    Fields,
    RewardText,
    call_reward,
    late_score,
    wanted_fields,
)


@functools.lru_cache(maxsize=1024)
def _member(text: str) -> tuple[Component, Fields]:
    component = resolve(text, HOME)
    return component, wanted_fields(component)


def _scored(text: str, sample: dict, context: str) -> tuple[float, dict[str, float]]:
    component, fields = _member(text)
    try:
        return call_reward(component, sample, fields)
    except Abstained:
        raise
    except Exception as error:
        raise RuntimeError(f"{context} {text!r}: {type(error).__name__}: {error}") from error


def _check_sources(options: dict) -> None:
    for option in ("sources", "defaults"):
        pairs = options[option]
        if not all(isinstance(p, tuple) and [type(x) for x in p] == [str, str] for p in pairs):
            raise InputError(
                f"by_source({option})",
                value=pairs,
                rule="pairs of a data source and its reward",
                fix=f"{option}=(('my_set', 'exact_match()'),): one pair needs the comma behind it",
            )


def _late_mixture(options: dict, sample: dict) -> dict:
    """Scores a mixture in which a member passed its limit: each counts as late, and one that has no
    score when it is late, as 0."""
    rewards = options["rewards"]
    scales = _scales(options)
    parts = {}
    for name, text in zip(member_names(rewards), rewards, strict=True):
        late = late_score(_member(text)[0], sample)
        parts |= {} if late is None else {name: late[0]}
    total = sum(s * parts.get(n, 0.0) for n, s in zip(member_names(rewards), scales, strict=True))
    return {"score": total, **parts}


def _scales(options: dict) -> tuple[float, ...]:
    return member_weights(options["rewards"], options["weights"], options["normalise"])


@contract(
    safe=True,
    rubrics=False,
    on_timeout=lambda options: functools.partial(_late_mixture, options),
    prepare=lambda options: functools.partial(_scales, options),
    on_device="rljax.rewards.on_device.forms.mixture",
)
def mixture(
    *,
    rewards: tuple[RewardText, ...],
    weights: tuple[float, ...] = (),
    normalise: bool = False,
    inner_parts: bool = True,
    **sample,
) -> dict:
    """sum_i w_i r_i of other rewards on the same sample; divided by sum_i |w_i| if `normalise`.

    No weights = 1 each. Parts: each r_i by the name of its reward (numbered from the second of a
    name on), and its own parts as name/part. With inner_parts=False those are left out: `gdpo` and
    `mixed_parts`, which read all parts in the order of their names, then see one per reward. A
    member that raises makes the sample an error. One that returns None abstains: the sample's score
    is that of the others, and the part abstained/NAME counts it; where all do, there is no score.
    """
    scales = member_weights(rewards, weights, normalise)
    total, weight_sum, parts = 0.0, 0.0, {}
    for name, text, scale in zip(member_names(rewards), rewards, scales, strict=True):
        try:
            value, inner = _scored(text, sample, "mixture, member")
        except Abstained:
            parts[f"abstained/{name}"] = 1.0
            continue
        total, weight_sum = total + scale * value, weight_sum + abs(scale)
        parts[name] = value
        if inner_parts:
            parts |= {f"{name}/{key}": part for key, part in inner.items() if key != "score"}
    if not parts.keys() & {*member_names(rewards)} or normalise and not weight_sum:
        raise Abstained(
            f"all of {', '.join(member_names(rewards))} returned None for this response"
        )
    return {"score": total / weight_sum if normalise else total, **parts}


@functools.lru_cache(maxsize=1024)
def member_names(rewards: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the members of a mixture, numbered from the second of a name on."""
    names = [_member(text)[0].short_name for text in rewards]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return tuple(n if c == 1 else f"{n}_{c}" for n, c in zip(names, counts, strict=True))


@functools.lru_cache(maxsize=1024)
def member_weights(rewards: tuple, weights: tuple, normalise: bool) -> tuple[float, ...]:
    """Returns the weight of each member of a mixture. Raises InputError for weights that do not fit
    the rewards, or that add up to 0 where they are normalised."""
    weights = weights or (1.0,) * len(rewards)
    numbers = all(isinstance(w, int | float) and math.isfinite(w) for w in weights)
    if not rewards:
        fix = "mixture(rewards=('exact_match()',)), with the rewards that are to be added"
        raise InputError("mixture(rewards)", value=rewards, rule="at least one reward", fix=fix)
    if len(weights) != len(rewards) or not numbers:
        raise InputError(
            "mixture(weights)",
            value=weights,
            rule=f"one finite number for each of the {len(rewards)} rewards",
            fix=f"weights={(1.0,) * len(rewards)}",
        )
    size = sum(abs(w) for w in weights)
    if normalise and size == 0:
        raise InputError(
            "mixture(weights)",
            value=weights,
            rule="normalise=True divides by sum |w|",
            fix="set a weight that is not 0, or normalise=False",
        )
    return tuple(w / size if normalise else float(w) for w in weights)


def _late_with_cost(options: dict, sample: dict) -> dict | None:
    """Scores a sample that passed a limit, where its reward and its cost both declare it."""
    scores = [late_score(_member(options[name])[0], sample) for name in ("reward", "cost")]
    if None in scores:
        return None
    (value, parts), (cost, _) = scores
    return {**parts, "score": value, "cost": options["scale"] * cost + options["shift"]}


@contract(
    safe=True, rubrics=False, on_timeout=lambda options: functools.partial(_late_with_cost, options)
)
def with_cost(
    *, reward: RewardText, cost: RewardText, scale: float = 1.0, shift: float = 0.0, **sample
) -> dict:
    """The score and the parts of one reward, and the value c of another as the part `cost`, scale c
    + shift: what dataflow="safe_rlhf" holds below its threshold. Above 0 is unsafe:
    with_cost(reward="exact_match()", cost="regex_match(pattern='...')", scale=2.0, shift=-1.0)."""
    value, parts = _scored(reward, sample, "with_cost, reward")
    price, _ = _scored(cost, sample, "with_cost, cost")
    return {**parts, "score": value, "cost": scale * price + shift}


def _late_with_judges(options: dict, sample: dict) -> dict | None:
    """Scores `with_judges` when it is late: no judge passes, and the reward is late. None where one
    of them has no score when it is late: it asks a server or a model."""
    reward, judges = options["reward"], options["judges"]
    late = [late_score(_member(text)[0], sample) for text in (reward, *judges)]
    if None in late:
        return None
    failed = {f"judge/{name}": 0.0 for name in member_names(judges)}
    return {"score": late[0][0], "compliant": 0.0, **failed}


@contract(
    safe=True,
    rubrics=False,
    on_timeout=lambda options: functools.partial(_late_with_judges, options),
    prepare=lambda options: lambda: _pass_marks(options["judges"], options["pass_at"]),
)
def with_judges(
    *, reward: RewardText, judges: tuple[RewardText, ...], pass_at: tuple[float, ...] = (), **sample
) -> dict:
    """The score of `reward`, and as part `compliant` 1 where every judge passes, else 0: what
    dataflow="cgpo" learns from (arXiv 2409.20370).

    A judge is any reward; it passes where its score is at least its number of pass_at; none = 1
    each. Further parts: the verdict of each judge as judge/NAME (numbered from the second of a name
    on), and the reward's own as reward/NAME. A member that raises makes the sample an error. A
    judge that returns None leaves the verdict to the others.
    """
    marks = _pass_marks(judges, pass_at)
    score, inner = _scored(reward, sample, "with_judges, reward")
    verdicts, silent = {}, {}
    for name, text, mark in zip(member_names(judges), judges, marks, strict=True):
        try:
            value, _ = _scored(text, sample, "with_judges, judge")
            verdicts[f"judge/{name}"] = float(value >= mark)
        except Abstained:
            silent[f"abstained/judge/{name}"] = 1.0
    if not verdicts:
        raise Abstained(f"all of the judges {', '.join(member_names(judges))} returned None")
    reward_parts = {f"reward/{name}": part for name, part in inner.items() if name != "score"}
    return {
        "score": score,
        "compliant": min(verdicts.values()),
        **verdicts,
        **silent,
        **reward_parts,
    }


@functools.lru_cache(maxsize=1024)
def _pass_marks(judges: tuple, pass_at: tuple[float, ...]) -> tuple[float, ...]:
    marks = pass_at or (1.0,) * len(judges)
    numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in marks)
    if isinstance(judges, str) or not judges or len(marks) != len(judges) or not numbers:
        raise InputError(
            "with_judges(pass_at)",
            value=pass_at,
            rule=f"one finite number for each of the judges {judges!r}, at least one",
            fix="judges=('valid_json()',): one judge needs the comma behind it",
        )
    return marks


@contract(safe=True)
def reward_model(model_score: float) -> float:
    """The score of the reward model of reward.model, as one of the rewards of a mixture.

    Raises ValueError if it is not finite.
    """
    if not math.isfinite(model_score):
        raise ValueError(f"the reward model says {model_score}")
    return model_score


# Data source of a common data set -> the reward of its own evaluation. * is any text.
SOURCES: tuple[tuple[str, RewardText], ...] = (
    ("openai/gsm8k", "gsm8k()"),
    ("gsm8k", "gsm8k()"),
    ("lighteval/MATH", "boxed()"),
    ("DigitalLearningGmbH/MATH-lighteval", "boxed()"),
    ("HuggingFaceH4/MATH-500", "boxed()"),
    ("math_dapo", "dapo()"),
    ("math_dapo_reasoning", "dapo()"),
    ("math", "boxed()"),
    ("aime*", "dapo()"),
    ("numina_*", "boxed()"),
    ("searchR1_*", "qa_exact_match()"),
)


def reward_of_source(data_source: str, pairs: Iterable[tuple[str, str]] = SOURCES) -> str:
    """The reward of the first pair whose name fits the data source; "" if none does."""
    fits = (text for name, text in pairs if fnmatchcase(str(data_source), name))
    return next(fits, "")


def _late_of_source(options: dict, sample: dict) -> dict | None:
    """Scores a late sample by the reward of its data source."""
    pairs = (*options["sources"], *options["defaults"])
    text = reward_of_source(sample["data_source"], pairs) or options["otherwise"]
    late = late_score(_member(text)[0], sample) if text else None
    return None if late is None else late[1]


@contract(
    safe=True,
    rubrics=False,
    on_timeout=lambda options: functools.partial(_late_of_source, options),
    prepare=lambda options: functools.partial(_check_sources, options),
)
def by_source(
    data_source: str,
    *,
    sources: tuple[tuple[PlainText, RewardText], ...] = (),
    defaults: tuple[tuple[PlainText, RewardText], ...] = SOURCES,
    otherwise: RewardText = "",
    **sample,
) -> dict:
    """The reward named for the sample's data_source: sources=(("my_set", "math_verify()"),
    ("aime*", "boxed()")), the first that fits, before those of `SOURCES`; defaults=() for none.

    A source that none names is scored by `otherwise`; where that is "", an InputError lists those
    that are named.
    """
    text = reward_of_source(data_source, (*sources, *defaults)) or otherwise
    if text:
        sample["data_source"] = data_source
        return _scored(text, sample, f"data source {data_source!r}, reward")[1]
    names = ", ".join(dict.fromkeys(name for name, _ in (*sources, *defaults)))
    raise InputError(
        f"no reward for data source {data_source!r}",
        rule=f"named are {names or 'none'}",
        fix=f"by_source(sources=(({data_source!r}, 'my_module.my_reward()'),))",
    )
