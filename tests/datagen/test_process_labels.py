"""Labels of lines by a policy: an all-knowing one finds the planted errors; rows, cost, records."""

import dataclasses
import itertools
import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_oracle import recoverable

from rljax.batch import batch_from_rows
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.config.declare import check_options
from rljax.config.policy_options import LabelOptions
from rljax.data.offline.encode import encode_rows
from rljax.data.online.prompts import encode_prompts
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.saved_labels import label_saved
from rljax.datagen.steps import (
    PolicyWithTests,
    Program,
    label_programs,
    sample_programs,
    stepwise_row,
)
from rljax.errors import InputError
from rljax.mesh import make_mesh
from rljax.models.huggingface import save_params
from rljax.models.model import Model
from rljax.policies import Policy, load_named_policy
from rljax.rewards.unit_tests.programs import passed_tests
from rljax.sampler import Sampling
from rljax.tasks import program_synthesis
from rljax.tasks.program_task import instructions, program_text

SIZE = dict(max_constant=2, operations="+*", with_input=False)
TASK = program_synthesis(lines=4, prompts=300, test=8, worked_examples=8, **SIZE)
CHARS = CharTokenizer(TASK.alphabet + "#`")
RESPONSE_TOKENS = 20


def encoded(records):
    out, _ = encode_prompts(records, CHARS, max_prompt_tokens=20)
    return out


class Knowing:
    """Writes programs at random, and completes a beginning rightly wherever that can be done."""

    def __init__(self, records, programs):
        self.truth = {r.prompt: r.ground_truth for r in records}
        self.programs, self.calls = iter(programs), []

    def generate(self, prompts, key, sampling, *, n):
        answers, firsts = [], []
        for ids, length in zip(prompts.tokens, prompts.lengths, strict=True):
            prompt, _, begun = CHARS.decode(ids[:length]).partition(":")
            firsts += [ids[:length]] * n
            for _ in range(n):
                answers.append(
                    self.mended(f"{prompt}:", begun) if begun else next(self.programs, "+1")
                )
        self.calls.append(len(answers))
        width = prompts.tokens.shape[1] + sampling.max_response_tokens
        tokens, mask = np.zeros((len(answers), width), np.int32), np.zeros((len(answers), width))
        lengths, finish = [], []
        for row, (first, answer) in enumerate(zip(firsts, answers, strict=True)):
            cut = answer is None
            ids = [*CHARS.encode("+1\n+1" if cut else answer), *([] if cut else [1])]
            whole = [*first, *ids]
            tokens[row, : len(whole)], mask[row, len(first) : len(whole)] = whole, 1
            lengths.append(len(whole)), finish.append(int(cut))
        arrays = (jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(mask, jnp.float32))
        return batch_from_rows(*arrays, finish_reason=jnp.asarray(finish, jnp.int32))

    def mended(self, prompt, begun):
        alphabet = instructions(2, "+*", False)
        for more in range(4):
            for rest in itertools.product(alphabet, repeat=more):
                if all(passed_tests(begun + program_text(rest), self.truth[prompt])):
                    return program_text(rest)
        return "+1"


class Judge:
    """The unit tests, without processes; counts."""

    def __init__(self):
        self.asked = 0

    def score(self, samples):
        self.asked += len(samples)
        ok = [all(passed_tests(s["response"], s["ground_truth"])) for s in samples]
        return [FakeScore(1.0 if x else -1.0) for x in ok]


@dataclasses.dataclass
class FakeScore:
    value: float
    status: str = "ok"


def searcher(records, programs, **fields):
    sampling = Sampling(max_response_tokens=RESPONSE_TOKENS, stop_ids=(1,))
    longest = max(len(r.token_ids) for r in records)
    policy = Policy(Knowing(records, programs), CHARS, sampling, longest)
    return PolicyWithTests(policy, Judge(), **fields)


def some_programs(n, seed):
    """Failing ones as a rule, with comments and blank lines between."""
    rng, alphabet = random.Random(seed), instructions(2, "+*", False)
    out = []
    for _ in range(n):
        lines = [program_text([rng.choice(alphabet)]) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(0, 2)):
            lines.insert(rng.randint(0, len(lines) - 1), rng.choice(["#+", ""]))
        out.append("\n".join(lines) + rng.choice(["", "\n"]))
    return out


def key():
    return jax.random.key(0)


def first_unmendable(lines, truth):
    """Among the lines that do something: the first after which nothing helps; the program fails."""
    active = [j for j, line in enumerate(lines, start=1) if line and line[0] != "#"]
    for j in active[:-1]:
        if not recoverable("\n".join(lines[:j]), truth, **SIZE):
            return j
    return active[-1]


@pytest.mark.parametrize("n", [1, 3])
def test_labels_are_those_of_the_oracle(n):
    records = encoded(TASK.train[:20])
    programs = some_programs(20 * n, seed=n)
    policy = searcher(records, programs)
    rows, metrics = label_programs(policy, records, key(), programs_per_prompt=n, completions=3)
    assert len(rows) == 20 * n == metrics["programs/kept"]
    truth = {r.index: r.ground_truth for r in records}
    errors, probes = 0, 0
    for row, text in zip(rows, programs, strict=True):
        lines = row["completions"]
        assert "\n".join(lines) == text.removesuffix("\n")
        assert row["ended"] == (not text.endswith("\n"))  # the newline ended its last line
        passes = all(passed_tests(text, truth[row["index"]]))
        assert row["score"] == (1.0 if passes else -1.0)
        bad = math.inf if passes else first_unmendable(lines, truth[row["index"]])
        want = [0 if not s or s[0] == "#" else 1 if j < bad else -1 for j, s in enumerate(lines, 1)]
        assert row["labels"] == want and row["first_error"] == (None if passes else bad)
        errors += not passes
        steps = sum(label != 0 for label in want)
        probes += 0 if passes else math.ceil(math.log2(steps + 1))
    assert errors > 10 and any(0 in row["labels"] for row in rows)
    assert 0 < metrics["cost/probes"] <= probes
    # A round is one sampling of all that is open, filled up to a power of two; a prefix that some
    # completion mended is not sampled again.
    calls = policy.policy.actor.calls[1:]
    assert len(calls) <= 3 * metrics["cost/rounds"] <= 3 * math.ceil(math.log2(5))
    assert all(c == 1 << (c - 1).bit_length() for c in calls)
    assert metrics["cost/completions"] <= 3 * metrics["cost/prefixes"] <= sum(calls)
    assert metrics["cost/unit_test_runs"] == 20 * n + metrics["cost/completions"]
    assert policy.pool.asked == metrics["cost/unit_test_runs"]
    encode_rows([*rows], CHARS, "stepwise", max_tokens=64)  # what process_reward_model reads


class Hopeless(Knowing):
    """Completes every beginning wrongly."""

    def mended(self, prompt, begun):
        return "*2\n*2\n*2\n*2\n*2"


def test_a_completer_that_succeeds_finds_errors_that_the_writer_cannot():
    """Who cannot mend anything calls the first line wrong; another policy's completions say which
    one is. The writer is asked for the programs alone."""
    records, programs = encoded(TASK.train[:20]), some_programs(20, seed=5)
    found = {}
    for name in ("itself", "another"):
        policy = searcher(records, programs)
        writer = Hopeless(records, programs)
        known = policy.policy
        policy = dataclasses.replace(
            policy,
            policy=dataclasses.replace(known, actor=writer),
            completer=known if name == "another" else None,
        )
        rows, _ = label_programs(policy, records, key(), programs_per_prompt=1, completions=2)
        failing = [row for row in rows if row["first_error"] is not None]
        found[name] = [row["labels"] for row in failing]
        truth = {r.index: r.ground_truth for r in records}
        if name == "another":
            for row in failing:
                bad = first_unmendable(row["completions"], truth[row["index"]])
                assert row["first_error"] == bad
            assert len(writer.calls) == 1 and len(known.actor.calls) >= 1
    assert not any(1 in labels for labels in found["itself"])
    assert any(1 in labels for labels in found["another"])


def test_what_is_not_a_whole_program_is_dropped_and_counted():
    records = encoded(TASK.train[:1])
    policy = searcher(records, ["+1\n*2", None, "", "\n\n", "#\n"])
    rows, metrics = label_programs(policy, records, key(), programs_per_prompt=5, completions=1)
    assert [row["completions"] for row in rows] == [["+1", "*2"]]
    assert metrics["programs/sampled"] == 5 and metrics["programs/kept"] == 1
    assert metrics["programs/dropped_truncated"] == 1 and metrics["programs/dropped_empty"] == 3


def test_a_completion_has_no_more_room_than_a_program():
    """Three lines of three tokens can be mended by one more and the end token: 12 in all."""
    tests = json.dumps({"tests": [[1, 5], [2, 6]], "max_lines": 4})  # +1 four times
    records = encoded([{**TASK.train[0], "prompt": "4:", "ground_truth": tests}])
    found = []
    for limit in (11, 12):
        policy = searcher(records, ["+1\n+1\n+1\n*1"])
        small = Sampling(max_response_tokens=limit, stop_ids=(1,))
        small = dataclasses.replace(policy.policy, sampling=small)
        policy = dataclasses.replace(policy, policy=small)
        small.actor.generate = with_room(small.actor.generate)
        rows, _ = label_programs(policy, records, key(), programs_per_prompt=1, completions=1)
        found.append(rows[0]["first_error"])
    assert found == [3, 4]


def with_room(generate):
    """The fake policy writes more than the limit lets a real one write."""
    wide = Sampling(max_response_tokens=RESPONSE_TOKENS, stop_ids=(1,))
    return lambda prompts, key, sampling, n: generate(prompts, key, wide, n=n)


def test_code_alone_and_lines_without_a_label():
    records = encoded(TASK.train[:1])
    policy = searcher(records, ["#\n```\n+1\n*2\n```\n#"], code_only=True)
    (program,), _ = sample_programs(policy, records, key(), 1)
    assert program.head == "#\n```\n" and program.lines == ("+1", "*2") and not program.ended
    assert [CHARS.decode(program.ids[:stop]) for stop in program.ends] == [
        "#\n```\n+1\n",
        "#\n```\n+1\n*2\n",
    ]
    row = stepwise_row(records[0], program, (1.0, -1.0))
    assert row["completions"] == ["#\n```\n+1", "*2"] and row["labels"] == [1.0, -1.0]
    lines = ("#", "+1", "", "*2", "#")
    whole = Program(0, (), "", lines, (), True, -1.0, False)
    row = stepwise_row(records[0], whole, (None, 1.0, None, -1.0, None))
    assert row["completions"] == ["#\n+1", "\n*2"] and row["ended"] is False


def test_an_ended_row_ends_with_the_end_token_and_may_have_blank_lines():
    row = dict(prompt="1:", completions=["", "+1", "", "*2"], labels=[0.0, 1.0, 0.0, -1.0], index=0)
    for ended, end in ((True, "<eos>"), (False, "\n")):
        ((item,), _) = encode_rows([{**row, "ended": ended}], CHARS, "stepwise", max_tokens=20)
        assert CHARS.decode(item.ids, skip_special_tokens=False) == "1:\n+1\n\n*2" + end
        assert item.mask.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 1]
        assert item.labels[item.mask > 0].tolist() == row["labels"]
    with pytest.raises(InputError, match="a step has no tokens"):
        encode_rows([row], CHARS, "stepwise", max_tokens=20)


def test_bad_options_are_all_named(tmp_path):
    with pytest.raises(InputError) as error:
        check_options(LabelOptions((), "", prompts=0, held_out=1.0, neutral="no", temperature=0.0))
    for flag in ("checkpoints", "out", "prompts", "held_out", "neutral", "temperature"):
        assert f"--{flag}=" in str(error.value)
    with pytest.raises(InputError, match="no such folder"):
        load_named_policy(f"{tmp_path}/run@3")
    (tmp_path / "config.json").write_text(json.dumps({"dataflow": "ppo"}))
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_named_policy(f"{tmp_path}@3")


def test_a_completer_with_another_tokenizer_is_refused(tmp_path):
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8)"
    for name, chars in (("writer", CHARS), ("other", CharTokenizer(TASK.alphabet[::-1] + "#`"))):
        model = Model(
            resolve(text, NAMESPACES["model"])(chars.vocab_size),
            make_mesh(devices=jax.devices()[:1]),
        )
        folder, ids = tmp_path / name, dict(eos_ids=chars.eos_ids, pad_id=chars.pad_id)
        save_params(folder, model, model.init(key()), **ids)
        chars.save(folder)
    options = LabelOptions(
        (str(tmp_path / "writer"),),
        str(tmp_path / "out"),
        completer=str(tmp_path / "other"),
        data="program_synthesis(test=5, worked_examples=5)",
        reward="program_tests()",
        prompts=2,
    )
    with pytest.raises(InputError, match="completer.*other token ids"):
        label_saved(options)


def test_a_reward_that_reads_a_reward_model_is_no_test_of_a_program(tmp_path):
    text = "decoder(layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8)"
    model = Model(
        resolve(text, NAMESPACES["model"])(CHARS.vocab_size), make_mesh(devices=jax.devices()[:1])
    )
    save_params(tmp_path, model, model.init(key()), eos_ids=CHARS.eos_ids, pad_id=CHARS.pad_id)
    CHARS.save(tmp_path)
    mixed = "mixture(rewards=('code_tests()', 'reward_model()'))"
    options = dict(data="first_letter(letters=2, kinds=4, test=4)", reward=mixed)
    with pytest.raises(InputError, match="mixture.*no test of a program.*code_tests"):
        label_saved(LabelOptions((str(tmp_path),), str(tmp_path / "out"), **options))
