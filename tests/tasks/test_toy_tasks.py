"""Tasks of the experiments in configs/pipelines: demonstrations that are bounded, text that answers
nothing."""

import collections

import pytest

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.data.online.encoded import load_data, load_run_tokenizer
from rljax.errors import InputError
from rljax.rewards import letter_quota
from rljax.rewards.pool.calling import HOME, call_reward


def task_of(text: str):
    return resolve(text, NAMESPACES["data"])()


def test_the_reward_is_highest_at_the_quota_and_falls_on_both_sides():
    counts = {n: letter_quota("b" * n + "a" * (8 - n), "b", quota=4) for n in range(9)}
    assert [counts[n] for n in (0, 1, 2, 3, 4)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [counts[n] for n in (5, 6, 7, 8)] == [0.75, 0.5, 0.25, 0.0]
    assert letter_quota("b" * 50, "b", quota=4) == 0.0


@pytest.mark.parametrize(("letters", "quota", "shown"), [(8, 4, 2), (6, 4, 3), (5, 2, 5)])
def test_demonstrations_show_at_most_so_many(letters, quota, shown):
    task = task_of(f"letter_quota(letters={letters}, quota={quota}, shown={shown}, seed=3)")
    reward = resolve(task.reward, HOME)
    counts, scores = collections.Counter(), []
    for row in (*task.worked_examples, *task.worked_test):
        assert len(row["completion"]) == letters
        counts[row["completion"].count(row["prompt"][0])] += 1
        sample = {"response": row["completion"], "ground_truth": row["prompt"][0]}
        scores.append(call_reward(reward, sample)[0])
    assert set(counts) == set(range(shown + 1))
    best = max(1 - abs(n - quota) / quota for n in range(shown + 1))
    assert max(scores) == pytest.approx(best)
    assert all(row["ground_truth"] == row["prompt"][0] for row in (*task.train, *task.test))
    assert not {r["prompt"] for r in task.train} & {r["prompt"] for r in task.test}


def test_hints_are_followed_in_worked_examples_and_right_in_the_column():
    """The same prompts have every hint: what follows it is not the letter that is right."""
    task, plain = task_of("hinted_letter()"), task_of("first_letter()")
    shown = collections.defaultdict(set)
    for row in task.worked_examples:
        prompt, hint, _ = row["prompt"].split(">")
        assert row["completion"] == hint
        shown[prompt + ">"].add(hint)
    assert set(shown) == {row["prompt"] for row in task.train}
    assert all(hints == set("abcd") for hints in shown.values())
    for row in (*task.train, *task.test):
        assert row["extra_info"]["privileged_context"] == row["ground_truth"] == row["prompt"][0]
    assert [row["prompt"] for row in task.test] == [row["prompt"] for row in plain.test]


def test_texts_are_prompts_in_a_row_and_are_learned_whole():
    of = "first_letter(letters=3, kinds=4)"
    plain, task = task_of(of), task_of(f"prompt_texts(of='{of}', texts=50, prompts_per_text=3)")
    prompts = {row["prompt"] for row in plain.train}
    assert len(task.worked_examples) == 50 and len(task.worked_test) == 64
    for row in task.worked_examples:
        parts = [part + ">" for part in row["text"].split(">")[:-1]]
        assert len(parts) == 3 and set(parts) <= prompts  # never a held-out one
    assert task.test == plain.test and task.reward == plain.reward
    other = task_of(f"prompt_texts(of='{of}', texts=50, prompts_per_text=3, seed=1)")
    assert other.worked_examples != task.worked_examples
    config = Config(model="decoder(layers=1)", dataflow="sft")
    config.data.train = f"prompt_texts(of='{of}', texts=50)"
    data = load_data(config, load_run_tokenizer(config), "examples")
    assert {int(item["item"].mask.sum()) for item in data.sources[0]} == {12}  # all but the first


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("letter_quota(quota=9)", r"letter_quota\(quota\): got 9; 1 to 8"),
        ("letter_quota(shown=9)", r"letter_quota\(shown\)"),
        ("letter_quota(kinds=1)", r"letter_quota\(kinds\)"),
        ("prompt_texts(of='first_letter()', texts=0)", r"prompt_texts\(texts\)"),
        ("prompt_texts(of='first_leter()')", "did you mean"),
        ("prompt_texts(of='sorting(chat=True)')", "prompts are texts"),
    ],
)
def test_options_out_of_range_are_named(spec, says):
    with pytest.raises(InputError, match=says):
        task_of(spec)
