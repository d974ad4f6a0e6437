"""Records for offline training: the columns of each kind of row, checked before a model loads.

Turns rows into records and finds the border between prompt and completion. In a record, prompt and
completions are all texts or all lists of messages; `index` is the row's number.
"""

import functools
import logging
from collections.abc import Mapping, Sequence

from rljax.data.images.columns import images_of, with_images
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import (
    CONVERSATIONAL,
    Column,
    as_written,
    completion_of,
    decoded_row,
    demonstration_record,
    each,
    flag_of,
    is_missing,
    number_of,
    prompt_of,
    read_columns,
    rendering_of,
    text_of,
    without_nulls,
)
from rljax.data.rows.conversation import (
    context,
    conversation,
    require_no_column_flags,
    require_no_other_reasoning,
)
from rljax.data.rows.read import Rows, read_rows, read_stored
from rljax.data.rows.split import one_side
from rljax.data.rows.unread import unread_parts
from rljax.errors import InputError

LOG = logging.getLogger("rljax")
_ASSISTANT = "assistant"
_EVERYWHERE = ("reference", "process_scores", "logprobs")  # columns of all rows or of none


def load_rows(
    spec: str | Sequence[Mapping],
    split: str,
    kind: str,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
    unlearned: Mapping[str, Sequence[str]] | None = None,
) -> list[dict]:
    """Checked records of one kind; raises InputError that names the file, the row and the column.

    examples: messages, or prompt + completion, or text; tools.
    pairs: prompt, chosen, rejected, margin, tie, and reference where the rows have one. Without a
        prompt it is the longest common beginning of the completions: whole messages, or characters
        (a space before the first difference goes to the completions). Of a text that begins the
        other one nothing is left, the response that ends at once; of conversations in such a case
        the last common answer stays with both. margin is that column, or score_chosen -
        score_rejected, or 0; tie is that column, or equal scores.
    safety: prompt, safer, more_harmful and, of each, whether it is safe: safer_is_safe and
        more_harmful_is_safe. Records have the first as chosen, the second as rejected.
    unpaired: prompt, completion, label (whether the completion is desirable).
    What is judged in pairs, safety and unpaired may be an empty text, or a message with one: the
        response that ends at once, the end token alone. A reference completion, which is imitated,
        may not.
    stepwise: prompt, completions (the texts of the steps), labels in [-1, 1]: True is 1, False -1.
        `ended`, where the row has it, says that the steps are lines as a policy wrote them: blank
        ones may be among them, and true = the end token follows the last one, not the separator.
    trajectories: prompt, completion or steps, reward, truncated, and process_scores (one of each
        step) and logprobs (of the sampler, one of each token) where the rows have them.
    Of all kinds: images, where a row has some (rljax.data.images.columns).
    With a `test_fraction` both splits are sides of the training split (rljax.data.rows.split).
    `unlearned`: columns that the run's loss does not read, by what they hold ("margin",
    "reference"); rows that have one are warned of, with the count.
    """
    if kind not in KINDS:
        raise InputError("unknown kind of rows", value=kind, fix=f"use one of {KINDS}")
    read_split = "train" if test_fraction else split
    rows = read_rows(spec, read_split, demonstrations=kind == "examples", notes=notes)
    rows.unread.unlearned = unlearned or {}
    records = [_record(rows, index, kind) for index in range(len(rows.rows))]
    for name in _EVERYWHERE:
        _require_everywhere_or_nowhere(records, rows, name)
    if test_fraction:
        records = one_side(records, split, test_fraction, rows.source)
    rows.unread.warn(records)
    if kind == "stepwise":
        _warn_of_labels(rows.source, [record["labels"] for record in records])
    return records


def load_stored_rows(
    spec: str,
    kind: str,
    notes: list[str] | None = None,
    unlearned: Mapping[str, Sequence[str]] | None = None,
) -> Stream:
    """The records of `load_rows` for the training file as a stream: they are read and checked as
    they are drawn (rljax.data.rows.stored). Raises InputError, here for the first row and otherwise
    when it is drawn, for a bad row and for an optional column that not all rows have."""
    rows = read_stored(spec, "train", notes)
    rows.unread.unlearned = unlearned or {}
    first = _record(rows, 0, kind)
    if kind == "stepwise":  # what the first block of the file says
        _warn_of_labels(rows.source, [row.get("labels") for row in rows.rows.some()])

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


def prompt_row(rows: Rows, index: int) -> dict:
    """Returns row `index` with its prompt as records have it, for a command that writes rows of the
    same prompt; and images. Raises InputError, with the row, for a prompt that no record has."""
    location = rows.location(index)
    row, images = _as_written(rows, index, location)
    with rows.named_columns():
        row |= read_columns(row, location, (_PROMPT,))
        rendering_of(row, location)
        rows.unread.check(row | images, row["prompt"], location, index, **_asks(row))
    return row | images


def _as_written(rows: Rows, index: int, location: str) -> tuple[dict, dict]:
    """Row `index` without the images of it, and these."""
    raw = with_images(rows.rows[index], location, rows.folder)
    images = images_of(raw)
    row = decoded_row({n: v for n, v in raw.items() if n not in images}, location)
    row = as_written(row, location, rows.nulls)
    if rows.fills_nulls:
        written = (*CONVERSATIONAL, "tools")
        row = {name: v if name in written else without_nulls(v) for name, v in row.items()}
    return row, images


def _asks(row: dict) -> dict:
    """Arguments of Unread.check: the column of the prompt, behind which something is learned."""
    read = next((n for n in _PROMPT.names.split() if not is_missing(row.get(n))), "")
    return dict(read=read, learned=True)


def _record(rows: Rows, index: int, kind: str) -> dict:
    location = rows.location(index)
    row, images = _as_written(rows, index, location)
    if kind == "examples":
        with rows.named_columns():
            record = demonstration_record(row | images, location, index, rows.unread)
            return dict(record, **images)
    require_no_column_flags(row, location)
    make, *columns = _KINDS[kind]
    with rows.named_columns():
        made = make(row, read_columns(row, location, columns), location)
        how, asked = _asks(row), made["prompt"]
        text = row[how["read"]] if how["read"] else None
        if isinstance(asked, list) and isinstance(text, str):
            # Whole conversations took the place of a text, which a later turn may say.
            later = [*asked, *(m for m in made["chosen"] if m["role"] != _ASSISTANT)]
            asked = asked if unread_parts({"prompt": text}, later) else later
        rows.unread.check(row | images, asked, location, index, **how)
    require_no_other_reasoning(row, made, location)
    return dict(made, **rendering_of(row, location), index=index, **images)


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


def _pair(row: dict, read: dict, location: str) -> dict:
    names = ("chosen", "rejected", "reference")
    completions = {name: read[name] for name in names if name in read}
    # Some data sets write the prompt twice: as a text, and at the beginning of both conversations.
    whole = all(isinstance(value, list) for value in completions.values())
    several = whole and all(len(value) > 1 for value in completions.values())
    read_from = _asks(row)["read"]
    asked = row[read_from] if read_from else None
    if asked is None and not several:  # whole conversations bring what is asked themselves
        _refuse_unread_question(row, completions["chosen"], location)
    if asked is None or (several and isinstance(asked, str)):
        prompt, completions = _split_common_beginning(completions, location)
    else:
        prompt = read_columns(row, location, (_PROMPT,))["prompt"]
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
    return dict(prompt=prompt, **completions, **_margin(read, location))


def _refuse_unread_question(row: dict, chosen: object, location: str) -> None:
    """Raises InputError for a column of a pair without a prompt that looks like what is asked and
    is no part of the completions: they would be learned without it."""
    for name in unread_parts(row, chosen, choices=False):
        raise InputError(
            f"{location}, column {name!r} is not read",
            value=row[name],
            rule="what is asked is in 'prompt', or else in the common beginning of the completions",
            fix=f"rename {name!r} to 'prompt', or remove the column where nothing that is asked is"
            " in it",
        )


def _safety(row: dict, read: dict, location: str) -> dict:
    safe = [read["safer_is_safe"], read["more_harmful_is_safe"]]
    if safe == [False, True]:
        raise InputError(
            f"{location}: the safer completion is unsafe, and the more harmful one is safe",
            value={"safer_is_safe": False, "more_harmful_is_safe": True},
            rule="a safe completion is the safer one",
            fix="swap the completions, or correct the labels",
        )
    pair = {"chosen": read["safer"], "rejected": read["more_harmful"]}
    return dict(_pair(row | pair, pair, location), unsafe=tuple(not x for x in safe))


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
            text_of(value, where)
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
    ended = any(as_messages) and 0 < len(short) < len(values)
    if ended and n > 1 and said[0][n - 1]["role"] == _ASSISTANT:
        n -= 1  # one conversation goes on after an answer with which the other one ends
    elif ended:
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


def _margin(read: dict, location: str) -> dict:
    """{"margin", "tie"}: how much better the chosen completion is, and whether neither is."""
    tie, names = read.get("tie", False), ("score_chosen", "score_rejected")
    if "margin" in read or not read.keys() & set(names):
        return dict(margin=read.get("margin", 0.0), tie=tie)
    better, worse = (number_of(read.get(name), f"{location}, column {name!r}") for name in names)
    if better < worse:
        raise InputError(
            f"{location}: 'score_chosen' is below 'score_rejected'",
            value=(better, worse),
            fix="swap the completions, or remove the row",
        )
    return dict(margin=better - worse, tie=tie or better == worse)


# -- one completion --


def _labelled(row: dict, read: dict, location: str) -> dict:
    name = "response" if is_missing(row.get("completion")) else "completion"
    prompt, matched = _matched(read["prompt"], {name: read["completion"]}, location)
    return dict(prompt=prompt, completion=matched[name], label=read["label"])


def _one_each(read: dict, name: str, steps: list, location: str) -> None:
    if len(read[name]) != len(steps):
        raise InputError(
            f"{location}, column {name!r} has {len(read[name])} values for {len(steps)} steps",
            rule="one of each step",
            fix="correct the row",
        )


_step = functools.partial(text_of, fix="join it with the step before it")


def _stepwise(row: dict, read: dict, location: str) -> dict:
    steps = read["completions"]
    if "ended" not in read:  # steps that are lines as a policy wrote them may be blank
        for number, step in enumerate(steps):
            _step(step, f"{location}, column 'completions', step {number}")
    _one_each(read, "labels", steps, location)
    return read


def _trajectory(row: dict, read: dict, location: str) -> dict:
    # Where both are there: steps where their scores need them, else the completion.
    names = ["completion", "response", "steps"]
    if "process_scores" in read:
        names = ["steps", "completion", "response"]
    name = next((name for name in names if not is_missing(row.get(name))), names[0])
    where = f"{location}, column {name!r}"
    made = dict(prompt=read["prompt"])
    if name == "steps":
        made["steps"] = each(_step, "step")(row["steps"], where)
    else:
        completion = completion_of(row.get(name), where)
        made["prompt"], matched = _matched(made["prompt"], {name: completion}, location)
        made["completion"] = matched[name]
    if "process_scores" in read:
        if name != "steps":
            raise InputError(
                f"{location}, column 'process_scores' needs the column 'steps'",
                rule="a score stands at the end of a step",
                fix="write the completion as a list of its steps",
            )
        _one_each(read, "process_scores", made["steps"], location)
    made |= {"reward": read["reward"], "truncated": False}
    return made | {n: read[n] for n in ("truncated", *_EVERYWHERE) if n in read}


# -- the columns of each kind --


def _margin_of(value: object, location: str) -> float:
    margin = number_of(value, location)
    if margin < 0:
        rule = "it is how much better the chosen completion is"
        fix = "swap the completions, or remove the margin"
        raise InputError(f"{location} is below 0", value=margin, rule=rule, fix=fix)
    return margin


def _step_label(value: object, location: str) -> float:
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    label = number_of(value, location)
    if abs(label) > 1:
        rule = "a label is true, false or a number from -1 (wrong) to 1 (right)"
        fix = "rescale the labels"
        raise InputError(f"{location} is out of range", value=value, rule=rule, fix=fix)
    return label


def _warn_of_labels(source: str, labels: Sequence) -> None:
    """Warns of rows whose labels are never below 0, and not all 1: in other libraries 0 is a wrong
    step, or labels are the share of right answers that follow."""
    rows = [row for row in labels if isinstance(row, (list, tuple))]
    every = [x for row in rows for x in row if isinstance(x, (int, float))]
    booleans = {x for x in every if isinstance(x, bool)}
    if not every or False in booleans or min(every) < 0 or min(every) == 1:
        return
    count = sum(any(x < 1 for x in row if isinstance(x, (int, float))) for row in rows)
    LOG.warning(
        "%s: no label of a step is below 0, and %s of %s rows have labels below 1: here -1 or false"
        " is a wrong step, and 0 one that is neither right nor wrong. Fix: write true and false for"
        " 1 and 0, and 2 * label - 1 for a share; keep them if that is what they mean",
        source,
        f"{count:,}",
        f"{len(rows):,}",
    )


def _logprobs(value: object, location: str) -> list[float]:
    logprobs = each(number_of, "token")(value, location)
    # Samplers in low precision write log 1 as a little more than 0.
    if max(logprobs) > 1e-3:
        raise InputError(
            f"{location} holds a positive value",
            value=max(logprobs),
            rule="log-probabilities are at most 0",
            fix="write natural logarithms of the probabilities",
        )
    return logprobs


_PROMPT = Column("prompt question", prompt_of, "give each row a 'prompt'", null_is_absent=True)
_PAIR = "give each row 'chosen' and 'rejected', and a 'prompt' unless both begin with it"
_SAFE = "say of both completions whether they are safe, true or false"
_STEPS = "give each row 'completions' and 'labels', one of each step"
_judged = functools.partial(completion_of, empty=True)
# What makes a record of each kind of the row and of what was read of its columns; the columns.
_KINDS = {
    "pairs": (
        _pair,
        Column("chosen", fix=_PAIR),
        Column("rejected", fix=_PAIR),
        Column("reference"),
        Column("margin", _margin_of),
        Column("tie", flag_of),
        Column("score_chosen"),
        Column("score_rejected"),
    ),
    "safety": (
        _safety,
        Column("safer", fix="give each row a 'safer' completion"),
        Column("more_harmful", fix="give each row a 'more_harmful' completion"),
        Column("safer_is_safe", flag_of, _SAFE),
        Column("more_harmful_is_safe", flag_of, _SAFE),
    ),
    "unpaired": (
        _labelled,
        _PROMPT,
        Column("completion response", _judged, "give each row a 'completion'"),
        Column("label", flag_of, "give each row a 'label', true or false"),
    ),
    "stepwise": (
        _stepwise,
        _PROMPT,
        Column("completions", each(functools.partial(_step, empty=True), "step"), _STEPS),
        Column("labels", each(_step_label, "step"), _STEPS),
        Column("ended", flag_of),
    ),
    "trajectories": (
        _trajectory,
        _PROMPT,
        Column("completion response steps", fix="give each row a 'completion', or 'steps'"),
        Column("reward score", number_of, "give each row a 'reward'"),
        Column("truncated", flag_of),
        Column("process_scores", each(number_of, "step")),
        Column("logprobs", _logprobs),
    ),
}
KINDS = ("examples", *_KINDS)
