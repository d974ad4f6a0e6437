"""Records for offline training: the columns of each kind of row, checked before a model loads.

Turns rows into records and finds the border between prompt and completion. In a record, prompt and
completions are all texts or all lists of messages; `index` is the row's number.
"""

from collections.abc import Mapping, Sequence

from rljax.data.images.columns import images_of, with_images
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import (
    SPOKEN,
    VARIABLES,
    as_written,
    completion_of,
    decoded,
    demonstration_record,
    first_of,
    flag_of,
    list_of,
    number_of,
    prompt_of,
    rendering_of,
    require_text,
    without_nulls,
)
from rljax.data.rows.conversation import context, conversation, require_no_column_flags
from rljax.data.rows.read import Rows, read_rows, read_stored
from rljax.data.rows.split import one_side
from rljax.errors import InputError

KINDS = ("examples", "pairs", "safety", "unpaired", "stepwise", "trajectories")
_PAIR_FIX = "give each row 'chosen' and 'rejected', and a 'prompt' unless both begin with it"
_ASSISTANT = "assistant"
_EVERYWHERE = ("reference", "logprobs", "process_scores")  # columns of all rows or of none


def load_rows(
    spec: str | Sequence[Mapping],
    split: str,
    kind: str,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
) -> list[dict]:
    """Checked records of one kind; raises InputError that names the file, the row and the column.

    examples: messages, or prompt + completion, or text; tools.
    pairs: prompt, chosen, rejected, margin, tie, and reference where the rows have one. Without a
        prompt it is the longest common beginning of the completions: whole messages, or characters
        (a space before the first difference goes to the completions). margin is that column, or
        score_chosen - score_rejected, or 0; tie is that column, or equal scores.
    safety: prompt, safer, more_harmful and, of each, whether it is safe: safer_is_safe and
        more_harmful_is_safe. Records have the first as chosen, the second as rejected.
    unpaired: prompt, completion, label (whether the completion is desirable).
    What is judged in pairs, safety and unpaired may be an empty text: the response that ends at
        once, the end token alone. A reference completion, which is imitated, may not.
    stepwise: prompt, completions (the texts of the steps), labels in [-1, 1]: True is 1, False -1.
        `ended`, where the row has it, says that the steps are lines as a policy wrote them: blank
        ones may be among them, and true = the end token follows the last one, not the separator.
    trajectories: prompt, completion or steps, reward, truncated, and process_scores (one of each
        step) and logprobs (of the sampler, one of each token) where the rows have them.
    Of all kinds: images, where a row has some (rljax.data.images.columns).
    With a `test_fraction` both splits are sides of the training split (rljax.data.rows.split).
    """
    if kind not in KINDS:
        raise InputError("unknown kind of rows", value=kind, fix=f"use one of {KINDS}")
    read_split = "train" if test_fraction else split
    rows = read_rows(spec, read_split, demonstrations=kind == "examples", notes=notes)
    records = [_record(rows, index, kind) for index in range(len(rows.rows))]
    for name in _EVERYWHERE:
        _require_everywhere_or_nowhere(records, rows, name)
    return one_side(records, split, test_fraction, rows.source) if test_fraction else records


def load_stored_rows(spec: str, kind: str, notes: list[str] | None = None) -> Stream:
    """load_rows of the training file as a stream: records are read and checked as they are drawn
    (rljax.data.rows.stored)."""
    rows = read_stored(spec, "train", notes)
    first = _record(rows, 0, kind)

    def made(index: int) -> dict:
        record = _record(rows, index, kind)
        for name in _EVERYWHERE:
            if (name in record) != (name in first):
                raise InputError(
                    f"{rows.location(index)}: the column {name!r} is not in all rows",
                    rule="every row has it, or none",
                    fix="fill it in, or remove the column",
                )
        return record

    return Stream(made, rows=rows.rows.rows)


def _record(rows: Rows, index: int, kind: str) -> dict:
    read = dict(
        examples=demonstration_record,
        pairs=_pair,
        safety=_safety,
        unpaired=_labelled,
        stepwise=_stepwise,
        trajectories=_trajectory,
    )[kind]
    location = rows.location(index)
    raw = with_images(rows.rows[index], location, rows.folder)
    images = images_of(raw)
    row = {
        name: decoded(value, f"{location}, column {name!r}")
        for name, value in raw.items()
        if name not in images
    }
    row = as_written(row, location, rows.nulls)
    if rows.fills_nulls:
        written = (*SPOKEN, "tools")
        row = {name: v if name in written else without_nulls(v) for name, v in row.items()}
    if kind != "examples":
        require_no_column_flags(row, location)
    with rows.named_columns():
        return dict(read(row, location, index), index=index, **images)


def _require_everywhere_or_nowhere(records: list[dict], rows: Rows, name: str) -> None:
    """A column of arrays is there for the whole batch or not at all."""
    lacking = [record["index"] for record in records if name not in record]
    if lacking and len(lacking) < len(records):
        raise InputError(
            f"{rows.location(lacking[0])} lacks the column {name!r}, which other rows have",
            rule="every row has it, or none",
            fix="fill it in, or remove the column",
        )


# -- prompt and completions --


def _matched(prompt, completions: dict, location: str):
    """Prompt and completions as texts all or as messages all."""
    spoken = {name for name, value in completions.items() if isinstance(value, list)}
    if isinstance(prompt, list):

        def as_turn(text):
            return [{"role": _ASSISTANT, "content": text}]

        return prompt, {n: v if n in spoken else as_turn(v) for n, v in completions.items()}
    if spoken:
        raise InputError(
            f"{location}: column 'prompt' is a text while column {sorted(spoken)[0]!r} "
            "holds messages",
            fix="write both as texts, or both as messages",
        )
    return prompt, completions


def _prompt_column(row: dict, location: str) -> str | list[dict]:
    present = {name: value for name, value in row.items() if value is not None}
    name = first_of(present, ("prompt", "question"), location, "give each row a 'prompt'")
    return prompt_of(row[name], f"{location}, column {name!r}")


def _pair(row: dict, location: str, index: int) -> dict:
    names = ["chosen", "rejected"]
    for name in names:
        first_of(row, (name,), location, _PAIR_FIX)
    if row.get("reference") is not None:
        names.append("reference")
    completions = {name: row[name] for name in names}
    # Some data sets write the prompt twice: as a text, and at the beginning of both conversations.
    whole = all(isinstance(value, list) for value in completions.values())
    several = whole and all(len(value) > 1 for value in completions.values())
    asked = row.get("prompt") if row.get("prompt") is not None else row.get("question")
    if asked is None or (several and isinstance(asked, str)):
        prompt, completions = _split_common_beginning(completions, location)
    else:
        prompt = _prompt_column(row, location)
        if isinstance(prompt, list):
            n = len(prompt)
            whole = {
                k: conversation(v, f"{location}, column {k!r}")
                for k, v in completions.items()
                if isinstance(v, list)
            }
            if whole and all(context(value[:n]) == prompt for value in whole.values()):
                completions |= {name: value[n:] for name, value in whole.items()}
    completions = {
        name: completion_of(value, f"{location}, column {name!r}", empty=name != "reference")
        for name, value in completions.items()
    }
    prompt, completions = _matched(prompt, completions, location)
    return dict(
        prompt=prompt, **completions, **_margin(row, location), **rendering_of(row, location)
    )


def _safety(row: dict, location: str, index: int) -> dict:
    for name in ("safer", "more_harmful"):
        first_of(row, (name,), location, f"give each row a {name!r} completion")
    pair = {name: row.get(name) for name in ("prompt", "question")}
    pair |= {"chosen": row["safer"], "rejected": row["more_harmful"]}
    safe = []
    for name in ("safer_is_safe", "more_harmful_is_safe"):
        first_of(
            row, (name,), location, "say of both completions whether they are safe, true or false"
        )
        safe.append(flag_of(row[name], f"{location}, column {name!r}"))
    if safe == [False, True]:
        raise InputError(
            f"{location}: the safer completion is unsafe, and the more harmful one is safe",
            value={"safer_is_safe": False, "more_harmful_is_safe": True},
            rule="a safe completion is the safer one",
            fix="swap the completions, or correct the labels",
        )
    pair |= {name: row[name] for name in ("tools", *VARIABLES) if name in row}
    return dict(_pair(pair, location, index), unsafe=tuple(not x for x in safe))


def _split_common_beginning(completions: dict, location: str) -> tuple[str | list, dict]:
    """Longest common beginning of whole conversations or texts, and what follows it in each."""
    as_messages = [isinstance(value, list) for value in completions.values()]
    if any(as_messages) and not all(as_messages):
        raise InputError(f"{location}: texts and messages are mixed", fix="write all as messages")
    for name, value in completions.items():
        where = f"{location}, column {name!r}"
        if any(as_messages):
            completions = {**completions, name: conversation(value, where)}
        else:
            require_text(value, where, "remove the row or fill it in")
    values = list(completions.values())
    # (A turn may be context in one of them and learned in the other: what it says is compared.)
    said = [context(value) if any(as_messages) else value for value in values]
    n = 0
    while all(len(value) > n for value in said) and all(v[n] == said[0][n] for v in said):
        n += 1
    if all(len(value) == n for value in values):  # identical: dropped, and counted, when encoded
        n = n - 1 if any(as_messages) else 0
    elif not any(as_messages) and n and values[0][n - 1] == " ":
        n -= 1  # the space before the difference stays with the completion
    short = [name for name, value in completions.items() if len(value) == n]
    if short and len(short) < len(values):
        other = next(name for name in completions if name not in short)
        raise InputError(
            f"{location}: {short[0]!r} is the beginning of {other!r}",
            rule="without a 'prompt' their common beginning is the prompt, and nothing is left",
            fix="add a 'prompt' column, or remove the row",
        )
    if n == 0 and any(as_messages):
        raise InputError(
            f"{location}: 'chosen' and 'rejected' share no first message",
            rule="without a 'prompt' their common beginning is the prompt",
            fix="add a 'prompt' column",
        )
    return said[0][:n], {name: value[n:] for name, value in completions.items()}


def _margin(row: dict, location: str) -> dict:
    """{"margin", "tie"}: how much better the chosen completion is, and whether neither is."""
    margin, tie = row.get("margin"), row.get("tie")
    tie = tie is not None and flag_of(tie, f"{location}, column 'tie'")
    if margin is not None:
        margin = number_of(margin, f"{location}, column 'margin'")
        if margin < 0:
            raise InputError(
                f"{location}, column 'margin' is below 0",
                value=margin,
                rule="it is how much better the chosen completion is",
                fix="swap the completions, or remove the margin",
            )
        return dict(margin=margin, tie=tie)
    names = [name for name in ("score_chosen", "score_rejected") if row.get(name) is not None]
    if not names:
        return dict(margin=0.0, tie=tie)
    scores = [
        number_of(row.get(name), f"{location}, column {name!r}")
        for name in ("score_chosen", "score_rejected")
    ]
    if scores[0] < scores[1]:
        raise InputError(
            f"{location}: 'score_chosen' is below 'score_rejected'",
            value=tuple(scores),
            fix="swap the completions, or remove the row",
        )
    return dict(margin=scores[0] - scores[1], tie=tie or scores[0] == scores[1])


# -- one completion --


def _labelled(row: dict, location: str, index: int) -> dict:
    prompt = _prompt_column(row, location)
    name = first_of(row, ("completion", "response"), location, "give each row a 'completion'")
    completion = completion_of(row[name], f"{location}, column {name!r}", empty=True)
    prompt, matched = _matched(prompt, {name: completion}, location)
    first_of(row, ("label",), location, "give each row a 'label', true or false")
    label = flag_of(row["label"], f"{location}, column 'label'")
    return dict(prompt=prompt, completion=matched[name], label=label, **rendering_of(row, location))


def _step_texts(value: object, location: str, empty: bool = False) -> list[str]:
    texts = list_of(value, location)
    for number, text in enumerate(texts):
        require_text(text, f"{location}, step {number}", "join it with the step before it", empty)
    return texts


def _one_each(values: list, steps: list, location: str) -> None:
    if len(values) != len(steps):
        raise InputError(
            f"{location} has {len(values)} values for {len(steps)} steps",
            rule="one of each step",
            fix="correct the row",
        )


def _stepwise(row: dict, location: str, index: int) -> dict:
    prompt = _prompt_column(row, location)
    for name in ("completions", "labels"):
        first_of(
            row, (name,), location, "give each row 'completions' and 'labels', one of each step"
        )
    lines = row.get("ended") is not None
    ended = {"ended": flag_of(row["ended"], f"{location}, column 'ended'")} if lines else {}
    steps = _step_texts(row["completions"], f"{location}, column 'completions'", empty=lines)
    where = f"{location}, column 'labels'"
    values = list_of(row["labels"], where)
    _one_each(values, steps, where)
    labels = []
    for number, value in enumerate(values):
        if isinstance(value, bool):
            labels.append(1.0 if value else -1.0)
            continue
        labels.append(number_of(value, f"{where}, step {number}"))
        if abs(labels[-1]) > 1:
            raise InputError(
                f"{where}, step {number} is out of range",
                value=value,
                rule="a label is true, false or a number from -1 (wrong) to 1 (right)",
                fix="rescale the labels",
            )
    return dict(
        prompt=prompt, completions=steps, labels=labels, **ended, **rendering_of(row, location)
    )


def _trajectory(row: dict, location: str, index: int) -> dict:
    prompt = _prompt_column(row, location)
    # Where both are there: steps where their scores need them, else the completion.
    names = ["completion", "response", "steps"]
    if row.get("process_scores") is not None:
        names = ["steps", "completion", "response"]
    given = [name for name in names if row.get(name) is not None] or names
    name = first_of(row, given, location, "give each row a 'completion', or 'steps'")
    record = dict(prompt=prompt, **rendering_of(row, location))
    if name == "steps":
        record["steps"] = _step_texts(row["steps"], f"{location}, column 'steps'")
    else:
        completion = completion_of(row[name], f"{location}, column {name!r}")
        record["prompt"], matched = _matched(prompt, {name: completion}, location)
        record["completion"] = matched[name]
    reward = first_of(row, ("reward", "score"), location, "give each row a 'reward'")
    record["reward"] = number_of(row[reward], f"{location}, column {reward!r}")
    truncated = row.get("truncated")
    record["truncated"] = truncated is not None and flag_of(
        truncated, f"{location}, column 'truncated'"
    )
    if row.get("process_scores") is not None:
        record["process_scores"] = _process_scores(row, record, location)
    if row.get("logprobs") is not None:
        record["logprobs"] = _logprobs(row, location)
    return record


def _process_scores(row: dict, record: dict, location: str) -> list[float]:
    where = f"{location}, column 'process_scores'"
    if "steps" not in record:
        raise InputError(
            f"{where} needs the column 'steps'",
            rule="a score stands at the end of a step",
            fix="write the completion as a list of its steps",
        )
    scores = list_of(row["process_scores"], where)
    _one_each(scores, record["steps"], where)
    return [number_of(score, f"{where}, step {i}") for i, score in enumerate(scores)]


def _logprobs(row: dict, location: str) -> list[float]:
    where = f"{location}, column 'logprobs'"
    values = list_of(row["logprobs"], where)
    logprobs = [number_of(value, f"{where}, token {i}") for i, value in enumerate(values)]
    # Samplers in low precision write log 1 as a little more than 0.
    if max(logprobs) > 1e-3:
        raise InputError(
            f"{where} holds a positive value",
            value=max(logprobs),
            rule="log-probabilities are at most 0",
            fix="write natural logarithms of the probabilities",
        )
    return logprobs
