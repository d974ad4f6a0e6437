"""Hints: what a teacher is shown beside the prompt, and the policy is not.

A hint is a function (prompt, samples, number) -> text or None that `with_hint(hint=...)` names. It
is called for each sample: `prompt` is its PromptRecord, `samples` are all samples of this prompt as
HintSample, and `number` is the index of this sample among them. None: there is nothing to show.
"""

from collections.abc import Callable, Sequence

from rljax.contracts import PlainText, contract
from rljax.data.online.prompts import PromptRecord
from rljax.reasoning import cut_reasoning


class HintSample:
    """A sample of a prompt: its `score`, None where its reward failed or none is computed, and
    its `response`, the text, which is decoded when it is first read."""

    def __init__(self, score: float | None, decode: Callable[[], str]):
        self.score, self._decode, self._text = score, decode, None

    @property
    def response(self) -> str:
        """The text of the response, without special tokens."""
        if self._text is None:
            self._text = self._decode()
        return self._text


Samples = Sequence[HintSample]


@contract(safe=True)
def column(
    prompt: PromptRecord, samples: Samples, number: int, *, name: PlainText = "privileged_context"
):
    """The text in a column of the prompt's row, such as a demonstration or feedback (SDFT, arXiv
    2601.19897). The default is TRL's column. A row without it has no hint."""
    return prompt.extra_info.get(name)


@contract(safe=True)
def ground_truth(prompt: PromptRecord, samples: Samples, number: int):
    """The ground truth of the prompt's row, as for on-policy self-distillation with the answer."""
    return prompt.ground_truth or None


@contract(safe=True)
def same_text(prompt: PromptRecord, samples: Samples, number: int, *, text: PlainText):
    """The same text for every prompt, such as a system prompt that the policy is to do without
    (prompt distillation)."""
    return text


@contract(safe=True, reads=("scores",))
def right_sample(
    prompt: PromptRecord,
    samples: Samples,
    number: int,
    *,
    at: float = 1.0,
    answer_alone: bool = False,
):
    """The response of another sample of the prompt whose score is `at` or more (SDPO, arXiv
    2601.20802): of several the next one in the batch, so that they take turns. `answer_alone`
    leaves its reasoning out. None if there is no such sample."""
    for step in range(1, len(samples)):
        sample = samples[(number + step) % len(samples)]
        if sample.score is not None and sample.score >= at:
            return cut_reasoning(sample.response) if answer_alone else sample.response
    return None
