"""MeshJudge: a language model on the mesh as the judge of `judge` and `rubric`.

Prompts and scores are computed by rljax.rewards.judges. A judge behind an endpoint is
rljax.rewards.judges.endpoint. Axes: B questions, S tokens, K grades.

No text is generated: the verdict is the expected grade, sum_k k p_k / (K - 1), where p_k is the
probability of grade k as the next token, among the grades (G-Eval, arXiv 2303.16634).
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rljax.arrays import fetch, place, weights_of
from rljax.batch import Batch
from rljax.components import Component
from rljax.contracts import spec
from rljax.data.text.chat import encode_prompt_messages
from rljax.data.text.tokenizer import Tokenizer
from rljax.errors import InputError
from rljax.models.model import Model
from rljax.reasoning import answer_of
from rljax.rewards.judges.judges import message
from rljax.rewards.judges.rubrics import rubric_message, rubric_parts, rubrics_of
from rljax.rewards.pool.pool import Score
from rljax.tracking import timing

_SHORTEST_ROW = 64  # tokens; longer rows double, so that few shapes are compiled
_NO_THINKING = {"enable_thinking": False}  # read by templates that would open a thought otherwise


class MeshJudge:
    """Scores samples as the component `reward`, such as judge(...) or rubric(...), does through an
    endpoint. It reads the options template and scale and, of one that reads rubrics, normalise.
    `grades`: see RewardConfig."""

    def __init__(
        self,
        model: Model,
        params,
        tokenizer: Tokenizer,
        reward: Component,
        *,
        grades: Sequence[str] = (),
        tokens_per_call: int = 16384,
        apart: bool = False,
    ):
        self.apart = apart  # on devices of its own
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.tokens_per_call = tokens_per_call
        defaults = {k: p.default for k, p in reward.signature.parameters.items()}
        self.options = {**defaults, **reward.options}
        self.by_rubrics = spec(reward).rubrics
        self.grades = tuple(grades) or _numbers(self.options["scale"])
        self.grade_ids = _grade_ids(tokenizer, self.grades)
        self._encode([{"role": "user", "content": "?"}])  # raises here if there is no template

    def _encode(self, conversation: list[dict]) -> list[int]:
        return encode_prompt_messages(self.tokenizer, conversation, variables=_NO_THINKING)

    def score(self, samples: Sequence[Mapping]) -> list[Score]:
        """Returns one Score per sample. A question longer than the model's context is an error.
        Part judge/grade_mass: the probability that the next token is one of the grades."""
        questions: list[tuple[list[list[int]], list[dict]] | Score] = []
        for sample in samples:
            try:
                questions.append(self._questions(sample))
            except ValueError as error:
                text = f"{type(error).__name__}: {error}"[:500]
                questions.append(Score(math.nan, {}, "error", 0.0, text))
        rows = [
            ids for question in questions if not isinstance(question, Score) for ids in question[0]
        ]
        verdicts = iter(self._verdicts(rows))
        out = []
        for question in questions:
            if not isinstance(question, Score):
                pairs = [next(verdicts) for _ in question[0]]
                question = self._score([v for v, _ in pairs], [m for _, m in pairs], question[1])
            out.append(question)
        return out

    def _questions(self, sample: Mapping) -> tuple[list[list[int]], list[dict]]:
        """Returns (token ids of each question, the rubrics that they ask about)."""
        template, best = self.options["template"], self.grades[-1]
        sample = {**sample, "response": answer_of(sample["response"])}
        answer = f"Answer with one of {', '.join(self.grades)} and nothing else."
        if self.by_rubrics:
            rubrics = rubrics_of(sample["extra_info"])
            arguments = (template, answer, best, sample["prompt"], sample["response"])
            messages = [rubric_message(*arguments, rubric) for rubric in rubrics]
        else:
            names = ("prompt", "response", "ground_truth")
            rubrics = []
            messages = [message(template, answer, best, {name: sample[name] for name in names})]
        questions = [self._encode(conversation) for conversation in messages]
        longest, limit = max(map(len, questions)), self.model.config.max_tokens
        if longest > limit:
            raise ValueError(f"a question of {longest} tokens: the judge holds {limit}")
        return questions, rubrics

    def _verdicts(self, rows: list[list[int]]) -> list[tuple[float, float]]:
        """Returns (expected grade in [0, 1], probability of a grade) of each
        row, in their order."""
        out: list[tuple[float, float]] = [(math.nan, math.nan)] * len(rows)
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(rows):
            length = max(_SHORTEST_ROW, 1 << (len(ids) - 1).bit_length())
            by_length.setdefault(min(length, self.model.config.max_tokens), []).append(i)
        steps = np.linspace(0.0, 1.0, len(self.grades))
        weights = weights_of(self.params, "judge")
        for length, members in sorted(by_length.items()):
            devices = self.model.mesh.size
            size = max(self.tokens_per_call // length // devices, 1) * devices
            for start in range(0, len(members), size):
                part = members[start : start + size]
                filled = part + part[:1] * (size - len(part))  # one shape, one compile
                batch = self._placed(_batch([rows[i] for i in filled], length))
                options = dict(model=self.model, grade_ids=self.grade_ids)
                probabilities, mass = fetch(_grade_probabilities(weights, batch, **options))
                for i, p, m in zip(part, probabilities.astype(np.float64), mass, strict=False):
                    out[i] = (float(p @ steps), float(m))
        return out

    def _placed(self, batch: Batch) -> Batch:
        """Rows of the host on the judge's mesh; what it takes is recorded where that is its own."""
        if not self.apart:
            return place(batch, self.model.mesh)
        start_s = time.monotonic()
        size = sum(x.nbytes for x in jax.tree.leaves(batch))
        batch = jax.block_until_ready(place(batch, self.model.mesh))
        timing.moved("judge", moved_bytes=size, moved_s=time.monotonic() - start_s)
        return batch

    def _score(self, values: list[float], mass: list[float], rubrics: list[dict]) -> Score:
        if not np.isfinite([*values, *mass]).all():
            return Score(math.nan, {}, "error", 0.0, f"the judge says {values}")
        parts = {"score": values[0]}
        if self.by_rubrics:
            parts = rubric_parts(rubrics, values, self.options.get("normalise", True))
        return Score(parts["score"], {**parts, "judge/grade_mass": min(mass)}, "ok", 0.0)

    def close(self) -> None:
        """Does nothing: no process was started."""


@functools.partial(jax.jit, static_argnames=("model", "grade_ids"))
def _grade_probabilities(
    params, batch: Batch, *, model: Model, grade_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The probabilities of the grades as the next token of each row: normalised over the grades
    [B, K], and their sum [B]."""
    column = jnp.arange(batch.tokens.shape[1])[None, :]
    last = jnp.max(jnp.where(batch.segment_ids > 0, column, 0), axis=1)
    logp = jax.nn.log_softmax(model.next_logits(params, batch, last), axis=-1)
    grade_logprobs = logp[:, jnp.array(grade_ids)]
    return jax.nn.softmax(grade_logprobs, axis=-1), jnp.exp(
        jax.nn.logsumexp(grade_logprobs, axis=-1)
    )


def _numbers(scale: float) -> tuple[str, ...]:
    if scale != int(scale) or scale < 1:
        rule = "a whole number: a judge on the mesh answers with one of 0, 1, ..., scale"
        raise InputError("scale", value=scale, rule=rule, fix="or set reward.judge_grades")
    return tuple(str(i) for i in range(int(scale) + 1))


def _grade_ids(tokenizer: Tokenizer, grades: Sequence[str]) -> tuple[int, ...]:
    """Returns the id of each grade. Raises InputError unless each grade is one token of its own."""
    encoded = [tokenizer.encode(grade) for grade in grades]
    for grade, ids in zip(grades, encoded, strict=True):
        if len(ids) != 1 or encoded.count(ids) > 1:
            raise InputError(
                f"grade {grade!r} of reward.judge_model",
                value=ids,
                rule="each grade is one token of the judge's tokenizer, and no other grade's",
                fix="judge(scale=9) or less, rubric(scale=2), or reward.judge_grades=('0', '1')",
            )
    return tuple(ids[0] for ids in encoded)


def _batch(rows: Sequence[Sequence[int]], length: int) -> Batch:
    tokens, segments = np.zeros((2, len(rows), length), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    positions = np.where(segments > 0, np.arange(length, dtype=np.int32)[None, :], 0)
    return Batch(tokens, segments, positions.astype(np.int32), np.zeros(tokens.shape, np.float32))
