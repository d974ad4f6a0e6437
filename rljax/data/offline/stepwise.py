"""A prompt and labelled steps as one row of ids, to train a process reward model on.

Lengths are in tokens.
"""

from collections.abc import Sequence

from rljax.errors import InputError


def step_tokens(
    prompt_ids: Sequence[int],
    steps: Sequence[Sequence[int]],
    labels: Sequence[float],
    separator_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    max_completion_tokens: int | None = None,
    last_step_only: bool = False,
) -> tuple[list[int], list[float | None]]:
    """(ids, labels) of prompt + step 1 + separator + step 2 + separator ...; a step's label stands
    at its last token (the separator's, where there is one), None at all others.

    The prompt keeps its last max_prompt_tokens, the completion its first max_completion_tokens, the
    whole its first max_tokens: the label of a step that is cut goes with it, so that labels may
    all be None. last_step_only: no label but the last step's. A BOS token is the caller's to put in
    front of prompt_ids.
    """
    limits = {
        "max_tokens": max_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "max_completion_tokens": max_completion_tokens,
    }
    for name, value in limits.items():
        if value is not None and value < 1:
            raise InputError(f"step_tokens({name})", value=value, rule=">= 1 tokens, or None")
    if len(steps) != len(labels):
        raise InputError("labels of steps", value=len(labels), rule=f"one per step: {len(steps)}")
    completion, completion_labels = [], []
    for i, (step, label) in enumerate(zip(steps, labels, strict=True)):
        ids = [*step, *separator_ids]
        if not ids:
            raise InputError(
                f"step {i + 1} of {len(steps)}", value=[], rule="at least one token, for its label"
            )
        kept = label if not last_step_only or i == len(steps) - 1 else None
        completion += ids
        completion_labels += [None] * (len(ids) - 1) + [kept]
    prompt = list(prompt_ids)
    if max_prompt_tokens is not None:
        prompt = prompt[-max_prompt_tokens:]
    ids = prompt + completion[:max_completion_tokens]
    row_labels = [None] * len(prompt) + completion_labels[:max_completion_tokens]
    return ids[:max_tokens], row_labels[:max_tokens]
