"""Mistakes drawn from a grammar, kinds x places x spellings, each with a planted cause: the error
names the cause, and has a fix."""

import csv
import json
import random
import re
import string
from functools import partial

import jax
import jax.numpy as jnp
import pyarrow as pa
import pyarrow.parquet
import pytest
from test_user_code import put, tiny

from rljax.batch import Batch
from rljax.command.commands import COMMANDS
from rljax.command.launch import launch
from rljax.components import resolve
from rljax.config import Config
from rljax.config.data_files import read_config
from rljax.config.names import field_names
from rljax.config.overrides import value_of
from rljax.config.schema import FIELDS as DECLARED
from rljax.config.texts import with_texts
from rljax.data.offline.rows import load_rows
from rljax.data.rows.sources import load_prompts
from rljax.errors import InputError
from rljax.losses.policy import PolicyOutputs
from rljax.rewards.pool.calling import wanted_fields
from rljax.setup.dry_run import _Checked
from rljax.validation import validate

DRAWS = 20  # of each kind: 220 in all
FIELDS = field_names(Config)
CONFIG = tiny  # of a folder: a config that is right

# A mistake is (what raises, the texts of its cause, which the message has).
Mistake = tuple


def misspelt(rng: random.Random, word: str) -> str:
    """The word with a letter left out, doubled, changed, or swapped with the next."""
    place = rng.randrange(len(word) - 1)
    letter = rng.choice(string.ascii_lowercase)
    return rng.choice(
        [
            word[:place] + word[place + 1 :],
            word[:place] + word[place] * 2 + word[place + 1 :],
            word[:place] + letter + word[place + 1 :],
            word[:place] + word[place + 1] + word[place] + word[place + 2 :],
        ]
    )


def unlike(rng: random.Random, word: str, known) -> str:
    while (made := misspelt(rng, word)) in (word, *known):
        pass
    return made


def written(folder, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# -- configs --


def field_name(rng, folder) -> Mistake:
    """In a flag, a YAML or a JSON file, or an attribute."""
    section, _, last = rng.choice(FIELDS).rpartition(".")
    wrong = f"{section}.{unlike(rng, last, FIELDS)}".lstrip(".")
    if wrong in FIELDS:
        return field_name(rng, folder)
    how = rng.choice(["flag", "yaml", "json", "python"])
    if how == "flag":
        return partial(with_texts, Config(), {wrong: "1"}, "flags", "--config."), [wrong]
    if how == "python":
        section, _, last = wrong.rpartition(".")
        return partial(setattr, value_of(Config(), section), last, 1), [last]
    text = json.dumps({wrong: 1}) if how == "json" else f"{wrong}: 1\n"
    file = written(folder, f"mine.{how}", text)
    return partial(read_config, file), [file, wrong]


def field_type(rng, folder) -> Mistake:
    typed = [(f, s.kind) for f, s in DECLARED.items() if s.kind in (int, float, bool)]
    field, kind = rng.choice(typed)
    value = rng.choice(["many", "1,2,3", "0x", "--", "yes please", "[1, {}]"])
    if rng.random() < 0.5:
        return partial(with_texts, Config(), {field: value}, "flags", "--config."), [field]
    file = written(folder, "typed.yaml", f"{field}: {json.dumps(value)}\n")
    return partial(read_config, file), [file, field]


def field_range(rng, folder) -> Mistake:
    """Below the least, and none of the choices."""
    config = CONFIG(folder)
    if rng.choice([True, False]):
        field = rng.choice([name for name, spec in DECLARED.items() if spec.choices])
        put(config, field, rng.choice(["nothing_of_it", "Offf", "bloat16"]))
    else:
        field = rng.choice([name for name, spec in DECLARED.items() if spec.low in (0, 1)])
        put(config, field, -rng.randrange(1, 9))
    return partial(validate, config), [f"{field}="]


def path(rng, folder) -> Mistake:
    """A file that is not there, alone, by a pattern, in a list, or below the home folder."""
    config, name = CONFIG(folder), f"{rng.choice('abc')}{rng.randrange(99)}"
    field = rng.choice(["data.train", "data.test", "sft.data", "evaluate.prompts_from"])
    ending = rng.choice([".jsonl", ".csv", ".parquet", ".json"])
    there = written(folder, "there.jsonl", '{"prompt": "1>", "answer": "1"}\n')
    missing = f"{folder}/{name}{ending}"
    spec, named = rng.choice(
        [
            (missing, missing),
            (f"{folder}/{name}_*{ending}", f"{name}_*{ending}"),
            (f"{there},{missing}", missing),
            (f"~/{name}{ending}", f"{name}{ending}"),
            (f"{folder}/no_folder/{name}{ending}", f"no_folder/{name}{ending}"),
        ]
    )
    return partial(validate, put(config, field, spec)), [f"{field}=", named]


# -- rows --

ROWS = {
    "prompts": {"prompt": "1+1=", "ground_truth": "2"},
    "pairs": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "unpaired": {"prompt": "1+1=", "completion": "2", "label": True},
    "stepwise": {"prompt": "1+1=", "completions": ["a", "b"], "labels": [True, False]},
    "examples": {"prompt": "1+1=", "completion": "2"},
    "trajectories": {"prompt": "1+1=", "completion": "2", "reward": 1.0},
}
FLAT = ("prompts", "pairs", "examples", "trajectories")  # whose cells a table of texts can hold


def stored(rng, folder, rows: list, kind: str) -> str:
    formats = ["jsonl", "json", "parquet"] + ["csv", "tsv"] * (kind in FLAT)
    how = rng.choice(formats)
    file = folder / f"rows{rng.randrange(10**6)}.{how}"
    if how == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif how == "json":
        file.write_text(json.dumps(rows))
    elif how == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="") as stream:
            separator = "\t" if how == "tsv" else rng.choice(",;|")
            table = csv.DictWriter(stream, list(rows[0]), delimiter=separator)
            table.writeheader()
            table.writerows(rows)
    return str(file)


def reader(kind: str, file: str):
    if kind == "prompts":
        return partial(load_prompts, file, "train")
    return partial(load_rows, file, "train", kind)


def column(rng, folder) -> Mistake:
    """A column that is misspelt, in all rows."""
    kind = rng.choice(list(ROWS))
    name = rng.choice([n for n in ROWS[kind] if n != "prompt" or kind not in ("pairs", "examples")])
    wrong = f"my_{name[::-1]}" if rng.random() < 0.3 else unlike(rng, name, ROWS[kind])
    rows = [{wrong if n == name else n: v for n, v in ROWS[kind].items()}] * 3
    file = stored(rng, folder, rows, kind)
    return reader(kind, file), [file, "row 0", wrong]


def bad_row(rng, folder) -> Mistake:
    """One row of several in which a value is missing, or of another kind."""
    kind, place = rng.choice(list(ROWS)), rng.randrange(1, 5)
    name = rng.choice([n for n in ROWS[kind] if n != "prompt"])
    rows = [dict(ROWS[kind]) for _ in range(5)]
    how = rng.choice(["null", "not a row", "no JSON", "kind"])
    if how == "null" and kind == "pairs":
        how = "kind"
    file = folder / f"row{rng.randrange(10**6)}.jsonl"
    lines = [json.dumps(row) for row in rows]
    if how == "not a row":
        lines[place] = rng.choice(["3", '"text"', "null", "[1]"])
    elif how == "no JSON":
        lines[place] = lines[place][: -rng.randrange(1, 8)]
    else:
        lines[place] = json.dumps(rows[place] | {name: None if how == "null" else {"a": [None]}})
    if kind == "prompts" and how == "kind":
        lines[place] = json.dumps(rows[place] | {name: ""})
    file.write_text("\n".join(lines))
    where = [rf"line {place + 1}\b"] if how == "no JSON" else [rf"row {place}\b"]
    return reader(kind, str(file)), [str(file), *where]


# -- functions --

RIGHT = {
    "reward": "def f(response, ground_truth, *, price: float = 1.0):\n    return 1.0\n",
    "loss": "def f(policy, batch, *, width: float = 0.2):\n    return policy.logprobs, {}\n",
    "environment": "def f(prompt, *, turns: int = 2):\n    yield prompt\n    return 1.0\n",
}
HOMES = {
    "reward": "rljax.rewards",
    "loss": "rljax.losses.policy",
    "environment": "rljax.environments",
}
FIELD_OF = {
    "reward": "reward.function",
    "loss": "algorithm.policy_loss",
    "environment": "environment.function",
}


def users_module(rng, folder) -> Mistake:
    """A module of a reward, a loss or an environment that cannot be imported, or lacks its
    function."""
    kind = rng.choice(list(RIGHT))
    name = f"mine_{rng.randrange(10**9)}"
    absent = f"absent_{rng.randrange(10**6)}"
    first, cause = rng.choice(
        [
            (f"import {absent}", f"pip install {absent}"),
            (f"from {absent}.x import y", absent),
            (f"x = {absent}", f"import or define '{absent}'"),
            ("def g(:", f"{name}.py:1"),
            ("raise KeyError('k')", f"correct line 1 of {folder}/{name}.py"),
            (f"import {name}_b", f"{name}_b"),
            ("from . import x", "without a leading dot"),
            ("import sys; sys.exit(1)", "__main__"),
            ("", "it defines f"),
        ]
    )
    written(folder, f"{name}.py", f"{first}\n{RIGHT[kind]}")
    function = "score" if cause == "it defines f" else "f"
    file = f"{folder}/{name}.py"
    text = file if cause == "it defines f" and rng.random() < 0.5 else f"{file}:{function}"
    return partial(resolve, text, HOMES[kind]), [f"{name}", cause]


def component(rng, folder) -> Mistake:
    """The text of a component: its name, its options and their values, its brackets."""
    kind = rng.choice(list(RIGHT))
    file = written(folder, f"own_{kind}.py", RIGHT[kind])
    option = {"reward": "price", "loss": "width", "environment": "turns"}[kind]
    wrong = unlike(rng, option, ())
    call, cause = rng.choice(
        [
            (f"({wrong}=1.0)", f"no option '{wrong}'"),
            (f"({option}='much')", option),
            ("(1.0)", "positional"),
            (f"({option}=1", "got "),
            (f"({option}=1, {option}=1)", option),
            (f"({option}=other)", "'other'"),
            ("(**{})", "**"),
        ]
    )
    config = CONFIG(folder)
    text = f"{file}:f{call}"
    return partial(validate, put(config, FIELD_OF[kind], text)), [f"{FIELD_OF[kind]}=", cause]


def reward_signature(rng, folder) -> Mistake:
    """A reward that asks for what no sample has, or mixes signatures."""
    wrong = unlike(rng, rng.choice(["response", "ground_truth", "extra_info", "num_tokens"]), ())
    body, cause = rng.choice(
        [
            (f"def f({wrong}): return 1.0", wrong),
            (f"def f(response, {wrong}): return 1.0", wrong),
            ("def f(response, /): return 1.0", "'response' by position"),
            ("def f(response, responses): return [1.0]", "'responses' and 'response'"),
        ]
    )
    file = written(folder, f"signed_{rng.randrange(10**9)}.py", body)
    made = resolve(f"{file}:f", HOMES["reward"])
    return partial(wanted_fields, made), [file, cause]


def loss_body(rng, folder) -> Mistake:
    """A loss that raises on shapes, or returns something else."""
    field = rng.choice(["advantages", "old_logprobs", "ref_logprobs"])
    wrong = unlike(rng, field, dir(Batch))
    body, cause = rng.choice(
        [
            ("return policy.log_probs, {}", "did you mean 'logprobs'"),
            ("return policy.entropies, {}", "did you mean 'entropy'"),
            (f"return batch.{wrong}, {{}}", wrong),
            ("return policy.logprobs.summ(), {}", "summ"),
            ("return (policy.logprobs if policy.logprobs[0, 0] > 0 else 0.0), {}", "jnp.where"),
            ("import numpy\n    return numpy.exp(policy.logprobs), {}", "jax.numpy"),
            ("return policy.logprobs.mean(), {}", "no mean or sum"),
            ("return policy.logprobs", "(loss, metrics)"),
            (f"return {wrong} + 1, {{}}", f"import or define '{wrong}'"),
            ("return policy.logprobs, None", "(loss, metrics)"),
        ]
    )
    file = written(
        folder, f"loss_{rng.randrange(10**9)}.py", f"def f(policy, batch):\n    {body}\n"
    )
    loss = _Checked(resolve(f"{file}:f", HOMES["loss"]), "policy_loss", ())
    floats = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    ids = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    batch = Batch(ids, ids, ids, floats, old_logprobs=floats, advantages=floats)
    call = partial(jax.eval_shape, lambda p, b: loss(p, b), PolicyOutputs(floats, floats), batch)
    return call, ["algorithm.policy_loss=", file, cause]


class Printed(Exception):
    """Returns what a command wrote to standard error."""


def flag(rng, folder, capsys=None) -> Mistake:
    """An option of a command: its name, its value, or that there is none."""
    name, option, value = rng.choice(
        [
            ("evaluate", "samples", "many"),
            ("evaluate", "checkpoint", ""),
            ("serve", "port", "x"),
            ("report", "out", ""),
            ("plan", "topology", ""),
            ("sweep", "cpus", "a"),
            ("data prepare", "test_fraction", "half"),
            ("train", "dry_run", "perhaps"),
        ]
    )
    known = set(COMMANDS[name].options.__dataclass_fields__)
    if value and rng.random() < 0.5 and option in known:
        argument, named = f"--{option}={value}", option
    else:
        named = unlike(rng, option, known)
        argument = f"--{named}={value or 1}"

    def run():
        assert launch(COMMANDS[name], [argument], f"rljax {name}") == 2
        raise InputError.of_text(capsys.readouterr().err.removeprefix("error: ").strip())

    return run, [f"--{named}"]


KINDS = (
    field_name,
    field_type,
    field_range,
    path,
    column,
    bad_row,
    users_module,
    component,
    reward_signature,
    loss_body,
    flag,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_error_names_the_planted_cause_and_has_a_fix(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    rng, faults = random.Random(f"34 {kind.__name__}"), []
    for number in range(DRAWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        call, causes = kind(rng, folder, **({"capsys": capsys} if kind is flag else {}))
        with pytest.raises(InputError) as error:
            call()
        said, fix = str(error.value), error.value.parts[1]
        lacks = [cause for cause in causes if cause not in said and not re.search(cause, said)]
        if lacks or not fix.strip():
            faults.append((lacks, said))
    assert not faults, "\n\n".join(f"lacks {lacks}: {said}" for lacks, said in faults)


def test_what_is_planted_is_the_only_mistake(tmp_path):
    """The configs and rows, without a mistake, are accepted."""
    validate(CONFIG(tmp_path))
    rng = random.Random(0)
    for kind, row in ROWS.items():
        for _ in range(5):
            assert len(reader(kind, stored(rng, tmp_path, [row] * 3, kind))()) == 3
    for kind, text in RIGHT.items():
        file = written(tmp_path, f"right_{kind}.py", text)
        resolve(f"{file}:f", HOMES[kind])
        assert value_of(put(CONFIG(tmp_path), FIELD_OF[kind], f"{file}:f"), FIELD_OF[kind])
