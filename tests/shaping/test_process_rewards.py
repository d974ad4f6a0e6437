"""Lines of tokens, labels on them, and the dense reward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import compiled, worked_example
from golden_checks.common import response_batch

from rljax.advantages import group_process, reinforce
from rljax.datagen.first_error import label_lines
from rljax.errors import InputError
from rljax.shaping import steps as process

dense_step_rewards = compiled(process.dense_step_rewards)
metrics_of = compiled(process.process_reward_metrics)


def close(got, want, tol=1e-6):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


def example_batch():
    x = worked_example("prm.dense_reward")
    i, n = x["inputs"], x["inputs"]["num_tokens"]
    steps = np.zeros(n)
    start = 0
    for j, end in enumerate(i["line_end_index"], start=1):
        steps[start : end + 1], start = j, end + 1
    scores = np.full(n, 9.0)  # a model scores every token; only line ends are read
    scores[i["line_end_index"]] = i["prm_score"]
    p = x["params"]
    outcomes = np.array([p["r_fail"], p["r_pass"]])
    rewards = np.zeros((2, n))
    rewards[:, -1] = outcomes
    batch = response_batch(
        np.ones((2, n)),
        jnp.float32,
        rewards=rewards,
        scores=outcomes,
        step_ids=np.stack([steps] * 2),
        process_rewards=np.stack([scores] * 2),
    )
    return x, batch


def test_dense_reward_example():
    x, batch = example_batch()
    want, p = x["outputs"], x["params"]
    options = {k: p[k] for k in ("lambda_fail", "lambda_pass")}
    got = np.asarray(dense_step_rewards(batch, **options))
    close(got[0], want["token_reward_fail"])
    close(got[1], want["token_reward_pass"])
    close(np.sum(got, axis=1), [want["return_fail"], want["return_pass"]])
    close(reinforce(batch.replace(rewards=got))[0], want["return_to_go_fail"])
    close(got, dense_step_rewards(batch))  # the defaults are the paper's


def test_scores_are_clipped_and_never_outweigh_the_outcome():
    _, batch = example_batch()
    wild = batch.replace(process_rewards=batch.process_rewards * 100)
    rewards = np.asarray(batch.rewards)
    close(
        np.sum(dense_step_rewards(wild) - rewards, axis=1),
        [0.25 * (1 - 1 - 1) / 3, 0.025 * (1 - 1 - 1) / 3],
    )
    best = batch.replace(process_rewards=np.full(rewards.shape, 7.0, rewards.dtype))
    close(np.sum(dense_step_rewards(best) - rewards, axis=1), [0.25, 0.025])


def test_garbage_tool_output_and_rows_without_lines():
    _, batch = example_batch()
    want = np.asarray(dense_step_rewards(batch))

    # A tool reply inside line 2, padding behind, a row without lines.
    def wide(x, fill):
        padded = np.pad(x, ((0, 0), (0, 1)), constant_values=fill)
        return np.insert(padded, 4, fill, axis=1)

    spread = response_batch(
        wide(batch.mask, 0),
        jnp.float32,
        rewards=wide(batch.rewards, jnp.nan),
        scores=batch.scores,
        step_ids=wide(batch.step_ids, 5),
        process_rewards=wide(batch.process_rewards, jnp.nan),
    )
    got = np.asarray(process.dense_step_rewards(spread))
    close(np.delete(got[:, :-1], 4, axis=1), want)
    assert (got[:, [4, 9]] == 0).all()
    none = batch.replace(step_ids=np.zeros_like(batch.step_ids))
    close(dense_step_rewards(none), batch.rewards)
    slope = jax.jit(
        jax.grad(lambda s: jnp.sum(process.dense_step_rewards(batch.replace(process_rewards=s))))
    )(batch.process_rewards)
    assert not np.any(slope)
    with pytest.raises(InputError, match="step_ids"):
        process.dense_step_rewards(batch.replace(step_ids=None))
    with pytest.raises(InputError, match="lambda_pass"):
        process.dense_step_rewards(batch, lambda_pass=-1.0)


def ids(*texts, mask=None, truncated=False, **options):
    mask = np.ones(len(texts)) if mask is None else np.array(mask)
    return process.line_ids([texts], mask[None], [truncated], **options)[0].tolist()


def test_lines_end_at_newlines_and_at_the_final_token():
    assert ids("a", " b", "\n", "c", "\n", "d", "") == [1, 1, 1, 2, 2, 3, 3]
    assert ids("a\n", "b\n", "") == [1, 2, 0]  # EOS alone is no line
    assert ids("a", "\n", " ", "\n", "b") == [1, 1, 2, 2, 3]  # a blank line is one
    assert ids("f(x)\n  y", " z", "\n") == [1, 2, 2]  # what follows the newline goes with it
    assert ids("", "") == [0, 0]
    # Prompt, tool output and padding belong to no line.
    texts, mask = ("?\n", "a", "out\n", "b", "\n", "c", "\n"), [0, 1, 0, 1, 1, 1, 0]
    assert ids(*texts, mask=mask) == [0, 1, 0, 1, 1, 2, 0]
    assert process.line_ends(np.array([[0, 1, 0, 1, 1, 2, 0]])).tolist()[0] == [
        False,
        False,
        False,
        False,
        True,
        True,
        False,
    ]


def test_lines_end_at_another_separator_also_in_several_tokens():
    assert ids("a", ";", "\n", "b;", " c", separator=";") == [1, 1, 2, 2, 3]
    assert ids("a", "\n", "\n", "b", "\n", "c", separator="\n\n") == [1, 1, 1, 2, 2, 2]
    assert ids("a. ", "b", ".", " c", separator=". ") == [1, 2, 2, 2]


def test_the_line_a_response_was_cut_off_in():
    texts = ("a", "\n", "b", "c")
    assert ids(*texts, truncated=True) == [1, 1, 0, 0]
    assert ids(*texts, truncated=True, score_partial_line=True) == [1, 1, 2, 2]
    assert ids("b", "c", truncated=True) == [0, 0]
    assert ids("a", "\n", truncated=True) == [1, 1]  # cut off between lines: nothing is partial


def test_lines_of_the_code_alone():
    texts = ("Sure", ":\n", "```", "py\n", "a", "\n", "b", "\n", "``", "`\n", "Done", ".", "")
    assert ids(*texts, code_only=True) == [0, 0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0]
    assert max(ids(*texts)) == 6
    assert ids("a", "\n", "b", code_only=True) == [1, 1, 2]  # no fence: all of it
    open_block = texts[:7]
    assert ids(*open_block, code_only=True, truncated=True) == [0, 0, 0, 0, 1, 1, 0]
    assert ids(*open_block, code_only=True) == [0, 0, 0, 0, 1, 1, 2]
    # Prose that was cut off behind a whole block does not spoil the block.
    assert ids(*texts[:-2], code_only=True, truncated=True)[4:8] == [1, 1, 2, 2]


def test_labels_of_a_search_on_tokens():
    texts = [["a", "\n", "# c", "\n", "b", "\n", "d", ""], ["z", "", "", "", "", "", "", ""]]
    mask = np.array([[1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]])
    steps = process.line_ids(texts, mask, [False, False])
    programs = ["".join(row).split("\n") for row in texts]
    found, _ = label_lines(
        programs, lambda prefixes: [kept < 3 for _, kept in prefixes], neutral="drop"
    )
    assert [f.labels for f in found] == [(1, None, -1, -1), (-1,)]
    values = np.zeros(steps.shape)
    values[0, [1, 5, 7]], values[1, 1] = [1, -1, -1], -1
    assert process.line_ends(steps)[values != 0].all()
    with pytest.raises(InputError, match="texts of row 0"):
        process.line_ids([["a"]], np.ones((1, 2)), [False])
    # The estimators of steps read the same ids.
    batch = response_batch(mask, jnp.float32, step_ids=steps, process_rewards=values, group=[0, 0])
    advantages = np.asarray(compiled(group_process)(batch))
    # Line scores 1, 0, -1, -1 and -1, mean -0.4: 1.4 + 0.4 - 0.6 - 0.6 lie ahead at the start.
    close(advantages[0, 0], -advantages[0, 7])
    assert advantages[0, 0] > 0


def test_metrics():
    _, batch = example_batch()
    got = metrics_of(batch, dense_step_rewards(batch))
    close(got["process/dense_sum"], (-0.025 - 0.0025) / 2, 1e-5)
    close(got["process/share_of_return"], 0.0275 / 2.0275, 1e-4)
    close(got["process/lines"], 3.0)
    close(got["process/correlation"], 0.0)  # both rows have the same scores
    close(got["process/score_passed"], -0.1)
    scores = np.asarray(batch.process_rewards).copy()
    scores[1] = 1.0
    better = batch.replace(process_rewards=scores)
    got = metrics_of(better, dense_step_rewards(better))
    close(got["process/correlation"], 1.0, 1e-4)
    close([got["process/score_passed"], got["process/score_failed"]], [1.0, -0.1])
