"""Features and what excludes them: every row of the tables is reached, by functions of the user's
own as well, and nothing is excluded by the name of a function."""

import ast

import pytest
from conftest import REPO
from feature_settings import SETTINGS, SKIPPED, base_config, config_of, every_pair, kind_of_skip
from test_asynchrony import in_flight
from test_config import problems_of, valid

from rljax.components import Component
from rljax.config import NAMESPACES, with_overrides
from rljax.config.checks import components_of
from rljax.contracts import spec
from rljax.setup.features import EXCLUDES, FEATURES, NEEDS, Parts, turned_on, violations
from rljax.validation import validate


def test_every_feature_can_be_turned_on():
    assert set(SETTINGS) == set(FEATURES)
    for name in FEATURES:
        assert name in turned_on(Parts(config_of(name), images=name == "images")), name
    assert turned_on(Parts(base_config())).keys() == {"advantage blind to tokens"}


@pytest.mark.smoke
@pytest.mark.parametrize("rule", EXCLUDES, ids=lambda rule: f"{rule.a}, {rule.b}")
def test_every_exclusion_is_reached(rule):
    config = config_of(rule.a, rule.b)
    parts = Parts(config, images=rule.b == "images")
    assert {rule.a, rule.b} <= turned_on(parts).keys()
    said = [
        f"{field}={value!r}: {why}. Fix: {rule.fix}"
        for one, field, value, why in violations(parts)
        if one == rule
    ]
    assert said
    if rule.b != "images":  # which are known once the data is read: test_image_runs.py
        problems = problems_of(config)
        assert all(text in problems for text in said), problems


@pytest.mark.slow
def test_every_pair_that_is_not_run_has_its_reason(tmp_path):
    """Counts pairs by kind, without a run: test_feature_pairs.py runs all the others."""
    for name in ("policy", "teacher", "scorer", "judge", "letters"):
        (tmp_path / name).mkdir()
        _model(tmp_path / name)
    for name in ("rows", "pictures", "stored"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    together = {frozenset(pair) for pair in every_pair()}
    for kind, pairs in SKIPPED.items():
        assert {frozenset(pair) for pair in pairs} <= together
        assert {kind_of_skip(pair, str(tmp_path)) for pair in pairs} == {kind}
    counts = {kind: len(pairs) for kind, pairs in SKIPPED.items()}
    assert counts == {"excluded": 5, "invalid": 5, "one value": 8, "unread": 25, "off": 1}
    names = len(FEATURES)
    direct = {frozenset((rule.a, rule.b)) for rule in EXCLUDES}
    assert not direct & together
    assert (names * (names - 1) // 2, len(direct), len(together)) == (2346, 105, 2037)


def test_every_need_is_reached():
    without = {
        ("sampler devices", "in flight"): {"rollouts.sampler_devices": 1},
        ("tree of episodes", "environment"): {"algorithm.collect": "turn_tree()"},
        ("pages", "dispatches by the host"): {"sampler.page_tokens": 8},
    }
    assert {(rule.a, rule.b) for rule in NEEDS} == without.keys()
    for rule in NEEDS:
        said = problems_of(with_overrides(base_config(), without[rule.a, rule.b], "test"))
        assert rule.why in said and rule.fix in said


EPISODES = {"environment__function": "tiny_environments.two_seats()"}
RUBRICS = "evolving_rubrics(generator='rubric_generators.two_by_visit')"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"collect": "in_rounds", "rollouts__max_staleness": 1}, "scores a round of samples"),
        ({"collect": "best", "rollouts__max_staleness": 1}, "searches the responses of a step"),
        ({"collect": "duel", "rollouts__max_staleness": 1}, "from an opponent"),
        ({"collect": "branches", "rollouts__max_staleness": 1}, "plays the trees of a step"),
        ({"collect": "in_rounds", **EPISODES}, "it continues single responses"),
        ({"collect": "values", **EPISODES}, "it continues single responses"),
        ({"collect": "best", **EPISODES}, "it continues single responses"),
        ({"collect": "by_row", **EPISODES}, "compares single rows"),
        ({"advantage": "row_advantage", **EPISODES}, "compares single rows"),
        ({"collect": "branches"}, "episodes branch where turns of an environment end"),
        ({"collect": "branches", **EPISODES, "batch__samples_per_prompt": 2}, "a multiple of 6"),
        ({"collect": "values", "algorithm__reward_shaping": ("normalised()",)}, "its mean and"),
        (
            {"collect": "vine()", "algorithm__reward_shaping": ("users_features.ranked",)},
            "its mean and variance over the samples",
        ),
        ({"collect": "best", "algorithm__reward_shaping": ("normalised()",)}, "some rows at"),
        ({"collect": "best", "algorithm__old_logprobs": "sampler"}, "chooses whole texts"),
        ({"collect": "best", "sampler__router_replay": True}, "by the device's loop"),
        ({"collect": "best_of(size=9)"}, "best_of(size): got 9"),
        ({"advantage": "blind", "reward__process_model": "tests"}, "no rewards of single tokens"),
        ({"advantage": "blind", "dataflow": "ppo"}, "gives no returns for the critic"),
        ({"reward__rubrics": RUBRICS, "reward__function": "users_features.plain"}, "no rubric"),
        ({"reward__rubrics": RUBRICS, "reward__function": "users_features.ignores"}, "no rubric"),
        ({"reward__function": "users_features.remote(url='a b')"}, "url is no address"),
        (
            {
                "dataflow": "remax",
                "algorithm__advantage": "remax()",
                "algorithm__collect": "vine(completions=2)",
            },
            "does not hand on",
        ),
    ],
)
def test_a_users_own_function_is_excluded_by_what_it_declares(fields, says):
    named = dict(fields)
    for stage in ("collect", "advantage"):
        if (text := named.pop(stage, "")) != "":
            own = text if text == "vine()" else f"users_features.{text}"
            named[f"algorithm__{stage}"] = own
    assert says in problems_of(valid(**named))


@pytest.mark.parametrize("feature", ["environment", "rollout by scores"])
def test_distillation_is_scored_where_the_samples_have_to_be(feature):
    """The fix keeps the teacher."""

    def broken(config) -> list:
        return [rule for rule, *_ in violations(Parts(config)) if rule.b == "no reward read"]

    config = config_of(feature, "no reward read")
    (rule,) = broken(config)
    assert rule.a == feature and "on_policy_distil(scored=True)" in rule.fix
    config.dataflow = "on_policy_distil(scored=True)"
    assert feature in turned_on(Parts(config)) and not broken(config)


def test_what_nobody_declared_gets_the_benefit_of_the_doubt(tmp_path):
    """A function of the user's own may do what it does not say."""
    own = dict(algorithm__advantage="users_features.undeclared")
    validate(valid(**own, reward__process_model=_model(tmp_path)))
    validate(valid(**own, dataflow="ppo"))
    validate(valid(reward__rubrics=RUBRICS, reward__function="users_features.of_extra_info"))


def _model(folder) -> str:
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_our_own_functions_leave_no_doubt():
    """What may be left undeclared is declared by every function of ours that it is asked of."""
    for home, names in (("advantage", ("fills", "token_rewards")), ("dataflow", ("fills",))):
        for name in components_of(NAMESPACES[home]):
            declared = spec(resolve_bare(name, home))
            if declared.data == "rollouts":
                assert all(getattr(declared, field) is not None for field in names), name
    for name in components_of(NAMESPACES["reward"]):
        component = resolve_bare(name, "reward")
        parameters = component.signature.parameters.values()
        handed = any(p.name == "extra_info" or p.kind is p.VAR_KEYWORD for p in parameters)
        assert not handed or spec(component).rubrics is not None, name


def resolve_bare(name: str, home: str) -> Component:
    return Component(name, NAMESPACES[home])


def test_runs_that_learn_from_a_file_have_features_too():
    said = problems_of(valid(dataflow="sft", memory__reference_on_host=True, lora__rank=4))
    assert "shares the actor's base" in said
    assert "in flight" not in turned_on(Parts(valid(dataflow="sft", rollouts__max_staleness=1)))


def test_what_a_user_declares_excludes_no_more():
    validate(valid(algorithm__collect="users_features.visits", algorithm__old_logprobs="sampler"))
    assert validate(in_flight(algorithm__collect="users_features.values")) == []
    validate(valid(algorithm__collect="users_features.best_of(size=8)"))
    warned = validate(
        valid(
            algorithm__policy_loss="users_features.own_loss",
            algorithm__correction="rollout_correction()",
        )
    )
    assert any("counts the mismatch twice" in text for text in warned)


REPLAY = {"rollouts__replay": "stored.jsonl"}
SCORELESS = {"dataflow": "on_policy_distil", "teacher_model": "tests"}


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"algorithm__policy_loss": "users_features.entropy_loss"}, "have no entropy"),
        ({"dataflow": "remax", "algorithm__advantage": "remax()"}, "have no values"),
        (  # A stored row kept no token of another response: it counts 0.
            {
                "algorithm__collect": "special_token()",
                "algorithm__policy_loss": "users_features.by_kept",
            },
            "",
        ),
        # The critic fills the values of stored rows, too.
        (
            {
                "dataflow": "ppo",
                "algorithm__advantage": "gae()",
                "algorithm__collect": "users_features.values",
            },
            "",
        ),
    ],
)
def test_stored_rows_lack_what_only_sampling_fills(fields, refused, tmp_path, monkeypatch):
    (tmp_path / "stored.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    parts = Parts(valid(**REPLAY, **fields))
    found = [why for rule, _, _, why in violations(parts) if rule.b == "fields of new samples"]
    assert bool(found) == bool(refused) and all(refused in why for why in found)


@pytest.mark.parametrize("collect", ["in_rounds", "values", "best", "dynamic()"])
def test_a_rollout_that_goes_by_scores_has_some(collect):
    own = collect if collect.endswith(")") else f"users_features.{collect}"
    parts = Parts(valid(**SCORELESS, algorithm__collect=own))
    assert "rollout by scores" in turned_on(parts)
    assert "reads no reward" in problems_of(parts.config)


def test_a_role_of_the_users_own_may_take_the_place_of_the_critic():
    """Its dataflow says that it fills the values which gae reads."""
    roles = {"roles": ("worth=trained_values(lr=1e-3)",), "algorithm__advantage": "gae()"}
    validate(valid(dataflow="users_features.valued", **roles))
    said = problems_of(valid(dataflow="users_features.without_values", **roles))
    assert "needs a critic" in said and "fills=('values',)" in said


def test_a_check_is_no_function_of_options():
    from users_features import at_most, best_of

    assert spec(best_of).check is at_most


# The modules that decide what goes with what, and the attributes that would name a function.
DECIDING = ["setup/features.py", "setup/images.py", "setup/rewards.py", "training/sources.py"]


def test_no_function_is_told_by_its_name():
    files = [*(REPO / "rljax" / "validation").glob("*.py")]
    files += [REPO / "rljax" / name for name in DECIDING]
    wrong = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            # `"." in component.name` looks into a name; `name in component.options` does not.
            looked_in = isinstance(node.ops[0], ast.In | ast.NotIn)
            text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
            sides = [node.left, *node.comparators * (not looked_in or text)]
            sides = [side for side in sides if isinstance(side, ast.Attribute)]
            # The name of a phase is no function's.
            names = {side.attr for side in sides if ast.unparse(side) != "phase.name"}
            if names & {"function", "short_name", "name"}:
                wrong.append(f"{file.name}:{node.lineno}")
    assert wrong == []
