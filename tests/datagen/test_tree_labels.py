"""Labels of lines by tree search: counts of its simulations, which know what cannot be mended."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from sampler_cases import tiny, weights

from rljax.config import Config
from rljax.config.declare import check_options
from rljax.config.policy_options import LabelOptions
from rljax.data.offline.encode import encode_rows
from rljax.data.online.prompts import PromptRecord
from rljax.data.text.tokenizer import CharTokenizer
from rljax.datagen.saved_labels import label_saved
from rljax.datagen.steps import PolicyWithTests
from rljax.datagen.trees import label_trees
from rljax.errors import InputError
from rljax.models.huggingface import save_params
from rljax.policies import Policy, SavedPolicy
from rljax.sampler import Sampling

CHARS = CharTokenizer("ab#\n>")
MODEL = tiny(layers=1, kinds=tiny().config.kinds[:1])


@dataclasses.dataclass
class Score:
    value: float
    status: str = "ok"


def passes(text: str) -> bool:
    return "b" not in text and "a" in text and "\n" in text


class Judge:
    """The tests: 1 or -1; a text with two "#" times out."""

    def __init__(self):
        self.seen = []

    def score(self, samples):
        self.seen += [(s["prompt"], s["response"], s["finish_reason"]) for s in samples]
        return [
            Score(0.0, "timeout")
            if s["response"].count("#") == 2
            else Score(1.0 if passes(s["response"]) else -1.0)
            for s in samples
        ]


@functools.cache
def labelled(
    neutral="zero", programs=12, method="mcts(simulations=32, width=4)", names=("a", "b", "ab")
):
    allowed = tuple(CHARS.encode("ab#\n")) + CHARS.eos_ids
    sampling = Sampling(
        max_response_tokens=8, allowed_ids=allowed, temperature=50.0, stop_ids=CHARS.eos_ids
    )
    saved = SavedPolicy(Config(), MODEL, weights(MODEL), CHARS, None)
    records = [
        PromptRecord(f"{x}>", np.array(CHARS.encode(f"{x}>"), np.int32), "", "", {}, i)
        for i, x in enumerate(names)
    ]
    searcher = PolicyWithTests(Policy(saved.actor(), CHARS, sampling, 3), Judge())
    rows, metrics = label_trees(
        searcher,
        records,
        jax.random.key(0),
        method=method,
        programs_per_prompt=programs,
        neutral=neutral,
    )
    return rows, metrics, searcher.pool.seen


def prefix(row, line: int) -> str:
    end = "" if row["ended"] and line == len(row["completions"]) else "\n"
    return "\n".join(row["completions"][:line]) + end


def test_a_label_counts_the_simulations_through_the_end_of_its_line():
    rows, metrics, seen = labelled("inherit")
    prompts = ("a>", "b>", "ab>")
    assert len(rows) > 15 and metrics["cost/simulations"] == len(seen)
    for row in rows:
        known = [
            (text, why)
            for prompt, text, why in seen
            if prompt == prompts[row["index"]] and text.count("#") != 2
        ]
        for line, (label, visits) in enumerate(zip(row["labels"], row["visits"], strict=True), 1):
            whole = row["ended"] and line == len(row["labels"])
            start = prefix(row, line)
            behind = [x for x in known if (x[0] == start if whole else x[0].startswith(start))]
            assert visits == len(behind) > 0 or whole
            if not whole:
                passed = sum(passes(text) and why == "stop" for text, why in behind)
                assert label == pytest.approx(2 * passed / visits - 1)
            if "b" in start:  # cannot be mended
                assert label == -1
        text = prefix(row, len(row["labels"]))
        assert row["score"] == (1.0 if passes(text) else -1.0)
        if passes(text):
            assert row["first_error"] is None
        elif row["ended"] and not row["completions"][-1].startswith("#") and row["completions"][-1]:
            assert row["first_error"] is not None  # at the latest the last line
    between = [x for row in rows for x in row["labels"] if -1 < x < 1]
    assert len(between) > 5 and metrics["labels/between"] > 0
    encode_rows([*rows], CHARS, "stepwise", max_tokens=64)  # what process_reward_model reads


@pytest.mark.slow
def test_rows_that_fill_up_a_shape_are_neither_tested_nor_counted():
    """Three prompts are sampled as four, of which the fourth is the third again."""
    _, metrics, seen = labelled()
    _, _, four = labelled(names=("a", "b", "ab", "ba"))
    assert sorted(seen) == sorted(one for one in four if one[0] != "ba>")
    assert metrics["cost/simulations"] == len(seen)
    with pytest.raises(InputError, match="--search.*scored no complete response"):
        labelled(method="beam(beams=2, width=2)")


@pytest.mark.slow
def test_programs_are_different_and_half_of_them_pass():
    for count in (4, 12):
        rows, _, _ = labelled(programs=count)
        for index in range(3):
            own = [row for row in rows if row["index"] == index]
            texts = {(tuple(row["completions"]), row["ended"]) for row in own}
            assert len(texts) == len(own) <= count
        passed = np.mean([row["score"] == 1 for row in rows])
        assert 0.3 < passed < 0.6


def test_comments_are_labelled_as_asked():
    zero, dropped = labelled("zero")[0], labelled("drop")[0]
    comments = [
        (line, label)
        for row in zero
        for line, label in zip(row["completions"], row["labels"], strict=True)
        if not line or line[0] == "#"
    ]
    assert len(comments) > 5 and {label for _, label in comments} == {0.0}
    assert all(len(row["visits"]) == len(row["completions"]) for row in [*zero, *dropped])
    assert sum(len(r["labels"]) for r in dropped) < sum(len(r["labels"]) for r in zero)


@pytest.mark.slow
def test_the_command_writes_rows_for_a_process_reward_model(tmp_path):
    with pytest.raises(InputError, match="completer.*no completions with --search"):
        check_options(LabelOptions(("a",), "b", completer="c", search="mcts()"))
    save_params(tmp_path / "policy", MODEL, weights(MODEL), eos_ids=(1,), pad_id=0)
    CharTokenizer("ab+*12345\n:>-").save(tmp_path / "policy")
    data = tmp_path / "prompts.jsonl"
    row = {"prompt": "a>", "ground_truth": json.dumps({"tests": [[0, 0]], "max_lines": 4})}
    data.write_text("\n".join([json.dumps(row)] * 4))
    result = label_saved(
        LabelOptions(
            (str(tmp_path / "policy"),),
            str(tmp_path / "out"),
            data=str(data),
            prompts=4,
            reward="program_tests()",
            search="mcts(simulations=8, width=3)",
            programs_per_prompt=4,
            max_response_tokens=6,
            held_out=0.5,
            temperature=20.0,
        )
    )
    (metrics,) = result["checkpoints"].values()
    assert sum(result["rows"].values()) == metrics["programs/kept"] > 0
    assert metrics["cost/simulations"] > metrics["programs/kept"]
