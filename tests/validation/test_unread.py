"""Fields that nothing reads: one rule, said of every section."""

import pytest

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, value_of, with_overrides
from rljax.config.flags import load_config_file, shipped_config, shipped_configs
from rljax.config.from_python import config_from
from rljax.config.names import OFTEN_MEANT, field_names, unknown_field
from rljax.config.schema import FIELDS
from rljax.errors import InputError
from rljax.validation import validate
from rljax.validation.unread import unread, unread_fields, unread_warnings

BASE = {"model": "decoder(layers=1)", "data.train": "sort_digits()", "data.max_prompt_tokens": 16}
OFFLINE = {
    **BASE,
    "dataflow": "preference",
    "data.train": "letter_feedback()",
    "actor_optimizer.lr": 1e-5,
}
_EVALUATED = {**OFFLINE, "evaluate.prompts_from": "sort_digits()"}
_SUPERVISED = {"sft.steps": 1, "sft.data": "sort_digits()"}


@pytest.mark.parametrize(
    ("base", "field", "value", "why"),
    [
        (BASE, "critic_optimizer.lr", 1e-3, "has no critic"),
        (BASE, "offline.max_tokens", 77, "learns from samples"),
        (BASE, "lora.alpha", 7.0, "lora.rank is off"),
        (BASE, "environment.max_turns", 3, "environment.function is off"),
        (BASE, "sft.optimizer.lr", 1e-3, "sft.steps is off"),
        (BASE, "sampler.pages", 9, "sampler.page_tokens is off"),
        (OFFLINE, "reward.function", "exact_match()", "learns from a file"),
        (OFFLINE, "batch.prompts_per_step", 4, "learns from a file"),
        (OFFLINE, "environment.max_turns", 3, "learns from a file"),
        ({**OFFLINE, "dataflow": "reward_model"}, "actor_optimizer.lr", 1e-4, "trains no policy"),
        (OFFLINE, "data.max_prompt_tokens", 3, "samples nothing while evaluate.prompts_from"),
        (OFFLINE, "sampler.max_response_tokens", 7, "samples nothing while evaluate.prompts_from"),
        (OFFLINE, "sampler.top_p", 0.5, "such as rljax evaluate and serve, do"),
        (OFFLINE, "sampler.top_k", 5, "samples nothing"),
        (OFFLINE, "sampler.min_p", 0.5, "samples nothing"),
        (OFFLINE, "sampler.stop_strings", ("x",), "samples nothing"),
        (OFFLINE, "sampler.kv_dtype", "int8", "samples nothing"),
        (OFFLINE, "evaluate.samples", 4, "samples nothing"),
        (OFFLINE, "offline.step_separator", ";", "learns from no steps"),
        (BASE, "data.turns", "last", "from no answers of a file"),
        (OFFLINE, "evaluate.reward", "exact_match()", "samples nothing"),
        ({**OFFLINE, **_SUPERVISED}, "sampler.top_p", 0.5, "samples nothing"),
        ({**OFFLINE, **_SUPERVISED}, "sft.stop_at_accuracy", 0.5, "samples nothing"),
        ({**OFFLINE, "dataflow": "reward_model"}, "sampler.temperature", 0.5, "trains no policy"),
    ],
)
def test_a_field_that_nothing_reads_is_a_warning_with_its_value_and_the_reason(
    base, field, value, why
):
    config = with_overrides(Config(), {**base, field: value}, "test")
    found = [text for text in validate(config) if f"{field}={value!r}" in text]
    assert len(found) == 1 and why in found[0] and "set, but nothing reads it" in found[0]
    plain = with_overrides(Config(), base, "test")
    assert not [text for text in unread_warnings(plain) if f"{field}=" in text] or field in base


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        ({**BASE, "dataflow": "ppo", "algorithm.advantage": "gae()"}, "critic_optimizer.lr", 1e-3),
        (OFFLINE, "offline.max_tokens", 77),
        ({**BASE, "sft.steps": 3}, "sft.optimizer.lr", 1e-3),
        ({**BASE, "sft.steps": 3}, "data.turns", "last"),
        (OFFLINE, "data.turns", "last"),
        ({**OFFLINE, "dataflow": "dqo"}, "offline.step_separator", ";"),
        ({**BASE, "lora.rank": 4}, "lora.alpha", 7.0),
        (_EVALUATED, "reward.function", "exact_match()"),
        (_EVALUATED, "evaluate.reward", "exact_match()"),
        (_EVALUATED, "evaluate.samples", 4),
        (_EVALUATED, "sampler.stop_strings", ("x",)),
        (_EVALUATED, "data.max_prompt_tokens", 3),
        ({**OFFLINE, **_SUPERVISED}, "data.max_prompt_tokens", 3),  # the longest demonstration
        ({**OFFLINE, **_SUPERVISED}, "sampler.max_response_tokens", 7),
        (OFFLINE, "sampler.temperature", 0.5),  # of the log-probs
        (BASE, "sampler.top_p", 0.5),
        (BASE, "evaluate.samples", 4),
        ({**OFFLINE, "dataflow": "reward_model"}, "critic_optimizer.lr", 1e-3),
    ],
)
def test_a_field_that_is_read_is_not_said(base, field, value):
    config = with_overrides(Config(), {**base, field: value}, "test")
    assert not [text for text in unread_warnings(config) if f"{field}=" in text]


def test_what_a_config_has_from_one_that_ships_nobody_has_set(tmp_path):
    for path in ("quickstart", "quickstart:tiny", "presets/ppo", "configs/quickstart.py"):
        shipped = shipped_config(path)
        assert shipped == load_config_file(path)
        off = with_overrides(shipped, {"sft.steps": 0, "dataflow": "grpo"}, "test")
        assert unread_warnings(off, shipped) == [], path
        own = with_overrides(off, {"sft.optimizer.lr": 7e-4, "critic_optimizer.lr": 7e-4}, "test")
        found = unread_warnings(own, shipped)
        assert [text.partition(":")[0] for text in found] == [
            "sft.optimizer.lr=0.0007",
            "critic_optimizer.lr=0.0007",
        ]
    assert "sft.optimizer.beta2=0.99" in str(
        unread_warnings(with_overrides(load_config_file("quickstart"), {"sft.steps": 0}, "test"))
    )
    mine = tmp_path / "quickstart.py"  # whose values are the user's, whatever its name
    mine.write_bytes(shipped_configs()["quickstart"].read_bytes())
    assert shipped_config(str(mine)) is None and shipped_config("") is None


def test_what_asks_for_evaluations_where_nothing_is_held_out_is_said_by_name(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "answer": "a"}\n')

    def said(base, **fields) -> list[str]:
        config = with_overrides(Config(), {**base, "data.train": str(rows), **fields}, "test")
        return [text for text in validate(config) if "nothing is held out" in text]

    for name in ("evaluate.every_steps", "evaluate.patience", "evaluate.samples"):
        (text,) = said(BASE, **{name: 2})
        assert text.endswith(f"held out: {name} does nothing")
        assert said(BASE, **{name: 2, "data.test_fraction": 0.5}) == []
        assert not said({**BASE, "data.sources": ("sort_digits()",)}, **{name: 2})
    (text,) = said(OFFLINE, **{"evaluate.every_steps": 2, "evaluate.patience": 2})
    assert text.endswith("evaluate.every_steps and evaluate.patience do nothing")
    assert said(OFFLINE) == said(BASE) == []
    assert (
        said({**OFFLINE, "evaluate.prompts_from": "sort_digits()"}, **{"evaluate.patience": 2})
        == []
    )


def test_what_would_be_switched_on_in_vain_is_an_error():
    config = with_overrides(Config(), {**OFFLINE, "reward.model": "folder"}, "test")
    with pytest.raises(InputError, match="reward.model='folder'"):
        validate(config)


def test_every_field_that_is_called_unread_exists_and_none_is_a_switch():
    config = with_overrides(Config(), BASE, "test")
    for name in unread(config):
        value_of(config, name)  # raises for none
    assert not {"steps", "model", "lora.rank", "sft.steps", "data.train"} & set(unread(config))


def test_an_ambiguous_name_is_that_of_the_field_that_is_read():
    made = config_from(
        "quickstart:tiny", None, None, None, {"sequences_per_optimizer_step": 4}, unread
    )
    assert made.batch.sequences_per_optimizer_step == 4
    made = config_from("", None, None, None, {"dataflow": "preference", "max_tokens": 9}, unread)
    assert made.offline.max_tokens == 9
    made = config_from("", None, None, None, {"dataflow": "preference", "samples": 9}, unread)
    assert made.evaluate.samples == 9  # it draws no others
    fields = {"lr": 0.5, "sft": {"steps": 1}}
    with pytest.raises(InputError, match="lr is any of sft.optimizer.lr, actor_optimizer.lr. Fix"):
        config_from("", None, None, None, fields, unread)
    twice = {"sequences_per_optimizer_step": 4, "batch": {"sequences_per_optimizer_step": 8}}
    with pytest.raises(InputError, match="given twice"):
        config_from("", None, None, None, twice, unread)


@pytest.mark.parametrize("name", OFTEN_MEANT)
def test_a_short_name_by_which_another_field_is_often_meant_is_refused_with_both(name):
    ends = [field for field in field_names(Config) if field.endswith(f".{name}")]
    fields = {name: 3, "environment": {"function": "guess_number()"}}
    with pytest.raises(InputError, match=f"rljax.train: {name} is any of") as error:
        config_from("quickstart:tiny", None, None, None, fields, unread)
    assert ends and OFTEN_MEANT[name] not in ends
    read = set(ends) - set(unread(with_overrides(Config(), BASE, "test")))
    for field in (OFTEN_MEANT[name], *read):
        assert field in str(error.value)
        assert field in unknown_field(name, field_names(Config))
    for field in (OFTEN_MEANT[name], ends[0]):  # a whole name is no question
        section, _, last = field.partition(".")
        value = "x" if FIELDS[field].kind is str else (0.5,) if name == "weights" else 3
        made = config_from("quickstart:tiny", None, None, None, {section: {last: value}}, unread)
        assert value_of(made, field) == value


def test_the_presets_set_nothing_that_nothing_reads():
    for name in shipped_configs():
        if not name.startswith(("presets/", "offline/", "agents/", "quickstart")):
            continue
        for variant in ("", ":tiny"):
            try:
                config = load_config_file(name + variant)
            except InputError:  # it has no such variant
                continue
            assert unread_warnings(config) == [], name + variant


def test_a_sample_of_a_data_set_says_so():
    config = with_overrides(Config(), {**BASE, "data.train": "gsm8k"}, "test")
    (found,) = [text for text in validate(config) if "rows of our own" in text]
    assert "10 rows" in found and "hf://datasets/openai/gsm8k" in found
    config.data.train = "gsm8k(path='somewhere')"
    assert not [text for text in validate(config) if "rows of our own" in text]


def test_who_reads_a_field_follows_from_its_declaration():
    """With a critic or without, from samples or from rows, whose evaluations may score samples."""

    def names(dataflow: str, **fields) -> set[str]:
        config = with_overrides(Config(dataflow=dataflow), fields, "test")
        return {*unread_fields(config, resolve(dataflow, NAMESPACES["dataflow"]))}

    of_a_critic = {"critic_model", "critic_optimizer.lr"}
    of_samples = {"batch.samples_per_prompt", "reward.function", "environment.function"}
    assert of_a_critic | {"offline.max_tokens"} <= names("grpo")
    assert names("grpo").isdisjoint(of_samples | {"actor_optimizer.lr", "sampler.dtype"})
    assert names("ppo").isdisjoint(of_a_critic) and "actor_optimizer.lr" in names("reward_model")
    assert of_samples | of_a_critic <= names("sft") and "offline.max_tokens" not in names("sft")
    evaluated = names("sft", **{"evaluate.prompts_from": "sort_digits()"})
    assert of_samples - evaluated == {"reward.function"}
