"""Searches that keep a few texts instead of a tree: beams, the best of n samples, and beams of
lines that a process reward model judges, with lookahead (arXiv 2408.03314).

Axes: R rows of a problem, K beams of a row; evaluators have R K rows, those of one row together.
"""

import dataclasses

import numpy as np

from rljax.arrays import fetch
from rljax.batch import FinishReason
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.search.evaluators import Forked, folded, padded_paths
from rljax.search.problem import SearchedResponse, SearchProblem


@contract(safe=True)
def best_of_n(
    problem: SearchProblem, *, samples: int = 8, temperature: float = 1.0
) -> list[SearchedResponse]:
    """Picks, of `samples` responses that the policy draws at `temperature`, the one that the reward
    model (or the reward) says is best; of equal ones the first."""
    _check("best_of_n", problem, samples=samples)
    evaluator = problem.evaluator(1, dataclasses.replace(problem.sampling, temperature=temperature))
    best: list[tuple[float, list[int]] | None] = [None] * problem.rows
    for number in range(samples):
        roots = padded_paths([[]] * problem.rows, [True] * problem.rows)
        limit = problem.lengths + problem.limit
        drawn = evaluator.roll(roots, fetch(folded(problem.keys, number)), limit, problem.limit)
        scores = _scores(problem, evaluator, drawn)
        for row, (ids, score) in enumerate(zip(drawn, scores, strict=True)):
            if best[row] is None or score > best[row][0]:
                best[row] = score, ids
    return [_response(problem, ids) for _, ids in best]


@contract(safe=True)
def beam(
    problem: SearchProblem, *, beams: int = 4, width: int = 4, length_penalty: float = 1.0
) -> list[SearchedResponse]:
    """Beam search over tokens: each of K = `beams` texts grows by its `width` likeliest tokens, and
    the best K of all stay. Without a value model a text is as good as the sum of its log-probs over
    its number of tokens ^ length_penalty; with one, as good as that says (value-guided beams)."""
    _check("beam", problem, needs_value=False, beams=beams, width=width)
    repeated = _repeated(problem, beams)
    evaluator = repeated.evaluator(width)
    rows, beam_rows = np.arange(problem.rows), np.arange(repeated.rows)
    texts: list[list[int]] = [[] for _ in beam_rows]
    sums, ended = np.zeros(repeated.rows), np.zeros(repeated.rows, bool)
    scores = np.where(beam_rows % beams == 0, 0.0, -np.inf)  # at first a row has one text
    while not ended.all():
        tokens, logprobs, _ = fetch(evaluator(padded_paths([[]] * repeated.rows, ~ended)))
        total = sums[:, None] + logprobs
        grown = total / (np.array([len(t) for t in texts])[:, None] + 1.0) ** length_penalty
        if problem.value is not None:
            paths = np.maximum(tokens, 0)[:, :, None].tolist()
            ahead = [[children[j] for children in paths] for j in range(width)]
            grown = np.stack(
                [_values(repeated, evaluator, texts, steps) for steps in ahead], axis=1
            )
        # A text that has ended is a candidate as it is; a beam that has no text yet is none.
        grown = np.where((tokens < 0) | ~np.isfinite(scores)[:, None], -np.inf, grown)
        ended_scores = np.where(np.arange(width) == 0, scores[:, None], -np.inf)
        grown = np.where(ended[:, None], ended_scores, grown).reshape(problem.rows, beams * width)
        order = np.argsort(-grown, axis=1, kind="stable")[:, :beams]
        scores = np.take_along_axis(grown, order, axis=1).reshape(-1)
        source = (rows[:, None] * beams + order // width).reshape(-1)
        token = tokens[source, (order % width).reshape(-1)]
        grows = ~ended[source] & np.isfinite(scores)
        sums = np.where(grows, total[source, (order % width).reshape(-1)], sums[source])
        texts = [
            texts[s] + [int(t)] * bool(g) for s, t, g in zip(source, token, grows, strict=True)
        ]
        ended = np.array(
            [not g or problem.reason(t) is not None for g, t in zip(grows, texts, strict=True)]
        )
        evaluator.advance(np.maximum(token, 0)[:, None], grows.astype(np.int32), source)
    return [_response(problem, texts[row * beams]) for row in rows]


@contract(safe=True)
def lookahead(
    problem: SearchProblem,
    *,
    beams: int = 1,
    samples: int = 4,
    step_tokens: int = 32,
    lookahead_tokens: int = 0,
    temperature: float = 1.0,
) -> list[SearchedResponse]:
    """Beams of lines: each of K = `beams` texts is continued `samples` times, at `temperature`, by
    a line (`step_tokens` tokens at most), and the K continuations stay that the process reward
    model says are best. It reads them after `lookahead_tokens` more tokens, the likeliest ones.

    Raises InputError without a value model, and for beams, samples or step_tokens below 1.
    """
    sizes = dict(beams=beams, samples=samples, step_tokens=step_tokens)
    _check("lookahead", problem, needs_value=False, **sizes)
    if problem.value is None:
        rule = "it compares unfinished texts"
        fix = "give a reward model by --search_model=FOLDER, or search with best_of_n()"
        raise InputError("lookahead", value="no value model", rule=rule, fix=fix)
    repeated = _repeated(problem, beams)
    evaluator = repeated.evaluator(
        1, dataclasses.replace(problem.sampling, temperature=temperature)
    )
    limit = repeated.lengths + problem.limit
    texts: list[list[int]] = [[] for _ in range(repeated.rows)]
    ended, scores, round_ = np.zeros(repeated.rows, bool), np.zeros(repeated.rows), 0
    lines = set(problem.value.line_ids)
    while not ended.all():
        steps, values = [], []
        for number in range(samples):
            keys = fetch(folded(repeated.keys, round_ * samples + number))
            drawn = evaluator.roll(
                padded_paths([[]] * repeated.rows, ~ended), keys, limit, step_tokens
            )
            drawn = [_first_line(ids, lines) for ids in drawn]
            judged = drawn
            if lookahead_tokens:
                unfinished = [
                    not e and problem.reason(t + d) is None
                    for e, t, d in zip(ended, texts, drawn, strict=True)
                ]
                continuations = evaluator.roll(
                    padded_paths(drawn, unfinished), keys, limit, lookahead_tokens, greedy=True
                )
                judged = [
                    d + m if o else d
                    for d, m, o in zip(drawn, continuations, unfinished, strict=True)
                ]
            steps.append(drawn)
            values.append(_values(repeated, evaluator, texts, judged))
        # A row has K texts with their continuations; before the first line all texts are equal.
        text_values = np.stack(values, axis=1)
        text_values = np.where(ended[:, None], scores[:, None], text_values)
        text_values[ended, 1:] = -np.inf
        if round_ == 0:
            keep = (np.arange(repeated.rows) % beams == 0)[:, None]
            text_values = np.where(keep | (samples < beams), text_values, -np.inf)
        row_values = text_values.reshape(problem.rows, beams * samples)
        order = np.argsort(-row_values, axis=1, kind="stable")[:, :beams]
        scores = np.take_along_axis(row_values, order, axis=1).reshape(-1)
        source = (np.arange(problem.rows)[:, None] * beams + order // samples).reshape(-1)
        sample_index = (order % samples).reshape(-1)
        new_steps = [
            [] if ended[s] else steps[w][s] for s, w in zip(source, sample_index, strict=True)
        ]
        texts = [texts[s] + step for s, step in zip(source, new_steps, strict=True)]
        has_no_step = np.array([not step for step in new_steps])  # ended before, or not finite
        ended = has_no_step | np.array([problem.reason(text) is not None for text in texts])
        evaluator.advance(
            _wide(new_steps, step_tokens), np.array([len(s) for s in new_steps]), source
        )
        round_ += 1
    return [_response(problem, texts[row * beams]) for row in range(problem.rows)]


def _check(
    name: str, problem: SearchProblem, *, needs_value: bool = True, **at_least_one: int
) -> None:
    for option, value in at_least_one.items():
        if value < 1:
            raise InputError(f"{name}({option})", value=value, fix=f"{name}({option}=1), or more")
    if needs_value and problem.value is None and problem.scored is None:
        rule = "it compares texts by a reward model, or by a reward"
        fix = "give a reward model by --search_model=FOLDER, or a config with a reward"
        raise InputError(name, value="no value model, no reward", rule=rule, fix=fix)
    if needs_value and problem.scored is None and problem.value.reads == "critic":
        fix = "search with mcts(), or give the folder of a reward model"
        raise InputError(f"{name} by a critic", rule="it compares texts that have ended", fix=fix)


def _repeated(problem: SearchProblem, beams: int) -> SearchProblem:
    rows = np.repeat(np.arange(problem.rows), beams)
    keys = np.stack([fetch(folded(problem.keys, 2**20 + k)) for k in range(beams)], axis=1)
    repeated = dict(prompts=problem.prompts[rows], lengths=problem.lengths[rows])
    return dataclasses.replace(problem, **repeated, keys=keys.reshape(-1, 2))


def _scores(problem: SearchProblem, evaluator: Forked, responses: list[list[int]]) -> np.ndarray:
    """Scores complete responses, one to a row; -inf where the reward failed."""
    if problem.scored is None:
        leaves = padded_paths(responses, [True] * len(responses))
        return fetch(evaluator(leaves).value)
    complete = [(ids, int(problem.reason(ids) or 0)) for ids in responses]
    return np.nan_to_num(problem.score(range(len(responses)), complete), nan=-np.inf)


def _values(
    problem: SearchProblem, evaluator: Forked, texts: list[list[int]], steps: list[list[int]]
) -> np.ndarray:
    """Scores the roots' texts with these steps appended. If a text ends there, a critic gives the
    value of the state before its last token."""
    if problem.value.reads == "critic":
        ends = [problem.reason(t + s) is not None for t, s in zip(texts, steps, strict=True)]
        steps = [step[:-1] if end else step for step, end in zip(steps, ends, strict=True)]
    return fetch(evaluator(padded_paths(steps, [True] * len(steps))).value)


def _first_line(ids: list[int], lines: set[int]) -> list[int]:
    """Returns the ids up to the first one that ends a line, which is included."""
    end = next((i for i, token in enumerate(ids) if token in lines), len(ids) - 1)
    return ids[: end + 1]


def _wide(rows: list[list[int]], columns: int) -> np.ndarray:
    wide = np.zeros((len(rows), columns), np.int32)
    for row, ids in enumerate(rows):
        wide[row, : len(ids)] = ids
    return wide


def _response(problem: SearchProblem, ids: list[int]) -> SearchedResponse:
    reason = problem.reason(ids)
    reason = FinishReason.ABORT if reason is None else reason
    return SearchedResponse(list(ids), [0.0] * len(ids), int(reason))
