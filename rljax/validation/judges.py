"""Checks of the judges and rubrics of a config: they have a model to ask, and time to wait for
its answer."""

from rljax.components import Component
from rljax.config import Config, value_of
from rljax.contracts import spec
from rljax.errors import InputError
from rljax.rewards.pool.calling import wanted_fields
from rljax.validation.problems import ConfigProblems, resolved


def _option(component: Component, name: str):
    default = component.signature.parameters[name].default
    return component.options.get(name, default)


def check_judges(config: Config, problems: ConfigProblems) -> None:
    """Checks that rewards that ask a model have one to ask, and give up before the pool would kill
    them."""
    reward = config.reward
    if reward.judge_model:
        _check_mesh_judge(config, problems)
    for field in ("reward.function", "evaluate.reward"):
        component = resolved(value_of(config, field), "reward")
        asks = "" if component is None else spec(component).asks
        if asks == "server":
            _check_address(component, "url", field, problems)
        if asks != "mesh" or reward.judge_model:
            continue
        for name in ("base_url", "model"):
            rule = f"has no {name}: it asks an OpenAI-compatible endpoint"
            fix = f"{component.name}(base_url='http://127.0.0.1:8000/v1', model='...'), or "
            fix += "reward.judge_model=FOLDER to ask a model on the mesh"
            problems.check(bool(_option(component, name)), field, component.text, rule, fix)
        if _option(component, "base_url"):
            _check_address(component, "base_url", field, problems)
        timeout_s = _option(component, "timeout_s")
        rule = f"the pool would kill {component.name} before its own timeout_s={timeout_s:g} ends"
        fix = f"reward.timeout_s={timeout_s + 2:g}, or {component.name}(timeout_s=...)"
        problems.check_field(timeout_s < reward.timeout_s, "reward.timeout_s", rule, fix)
    if reward.rubrics:
        component = resolved(reward.function, "reward")
        fits = component is not None and _reads_rubrics(component)
        rule = f"no rubric reaches reward.function={reward.function!r}"
        fix = "reward.function='rubric(...)'"
        problems.check_field(fits, "reward.rubrics", rule, fix)


def _check_address(component: Component, name: str, field: str, problems: ConfigProblems) -> None:
    """Checks the address of a judge before a run begins, all of whose rewards would fail."""
    from rljax.rewards.judges.endpoint_http import check_address

    try:
        check_address(_option(component, name))
    except InputError:
        rule = f"{name} is no address: http or https, a host, no user or password, no blanks"
        fix = f"{component.name}({name}='http://127.0.0.1:8000/v1', ...)"
        problems.check(False, field, component.text, rule, fix)


def _check_mesh_judge(config: Config, problems: ConfigProblems) -> None:
    reward, field = config.reward, "reward.judge_model"
    component = resolved(reward.function, "reward")
    asks = component is not None and spec(component).asks == "mesh"
    rule = f"answers for judge(...) and rubric(...); reward.function is {reward.function!r}"
    problems.check_field(asks, field, rule, "reward.function='judge()'")
    grades = reward.judge_grades
    fits = len(grades) != 1 and all(grades) and len(set(grades)) == len(grades)
    rule = "two or more different texts, worst first; () = the numbers from 0 to scale"
    problems.check_field(fits, "reward.judge_grades", rule, "('0', '1', '2')")


def _reads_rubrics(reward: Component) -> bool:
    """Returns whether the reward reads rubrics: as it declares, or else whether it is handed those
    of a sample."""
    if (declared := spec(reward).rubrics) is not None:
        return declared
    try:
        fields, _ = wanted_fields(reward)
    except InputError:  # which is said elsewhere
        return True
    return fields is None or "extra_info" in fields
