"""Records for offline training: the columns of each kind of row, checked before a model loads.

Turns rows into records and finds the border between prompt and completion. In a record, prompt and
completions are all texts or all lists of messages; `index` is the row's number.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

from rljax.data.images.columns import images_of, with_images
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import (
    CONVERSATIONAL,
    PAIR_SCORES,
    Column,
    as_written,
    completion_of,
    decoded_row,
    demonstration_record,
    each,
    flag_of,
    is_missing,
    number_of,
    plain_number,
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
from rljax.data.rows.unread import REWARDS, unread_parts
from rljax.errors import InputError

LOG = logging.getLogger("rljax")
_ASSISTANT = "assistant"
_ALL_OR_NONE = ("reference", "process_scores", "logprobs")  # columns of all rows or of none


def load_rows(
    spec: str | Sequence[Mapping],
    split: str,
    kind: str,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
    unlearned: Mapping[str, Sequence[str]] | None = None,
    reads_margin: bool = False,
) -> list[dict]:
    """Returns checked records of one kind; raises InputError that names the file, the row and the
    column.

    examples: messages, or prompt + completion, or text; tools.
    pairs: prompt, chosen, rejected, margin, tie, and reference where the rows have one. Without a
        prompt it is the longest common beginning of the completions: whole messages, or characters
        (a space before the first difference goes to the completions). Of a text that begins the
        other one nothing is left, the response that ends at once; of conversations in such a case
        the last common answer stays with both. margin is that column, or score_chosen -
        score_rejected (or columns of PAIR_SCORES), or 0; tie is that column, or equal scores.
    safety: prompt, safer, more_harmful and, of each, whether it is safe: safer_is_safe and
        more_harmful_is_safe. Records have the first as chosen, the second as rejected.
    unpaired: prompt, completion, label (whether the completion is desirable; or a score of 0 or 1).
    A completion that is judged, in pairs, safety and unpaired, may be an empty text, or a message
        with one: the response that ends at once, the end token alone. A reference completion, which
        is imitated, may not.
    stepwise: prompt, completions (the texts of the steps), labels in [-1, 1]: True is 1, False -1.
        `ended`, where the row has it, says that the steps are lines as a policy wrote them: blank
        ones may be among them, and true = the end token follows the last one, not the separator.
    trajectories: prompt, completion or steps, reward, truncated, and process_scores (one of each
        step) and logprobs (of the sampler, one of each token) where the rows have them.
    Of all kinds: images, where a row has some (rljax.data.images.columns).
    With a `test_fraction` both splits are sides of the training split (rljax.data.rows.split).
    `unlearned`: columns that the run's loss does not read, by what they hold ("margin",
    "reference"); rows that have one are warned of, with the count. `reads_margin`: the run's loss
    reads the margin of a pair; rows that have none are warned of, and are an error where no row has
    one.
    """
    if kind not in KINDS:
        raise InputError("unknown kind of rows", value=kind, fix=f"use one of {KINDS}")
    read_split = "train" if test_fraction else split
    rows = read_rows(spec, read_split, demonstrations=kind == "examples", notes=notes)
    rows.unread.unlearned = unlearned or {}
    records = [_record(rows, index, kind) for index in range(len(rows.rows))]
    for name in _ALL_OR_NONE:
        _require_everywhere_or_nowhere(records, rows, name)
    if test_fraction:
        records = one_side(records, split, test_fraction, rows.source)
    rows.unread.warn(records)
    if reads_margin:
        indices = [record["index"] for record in records]
        raw_rows = [rows.rows[index] for index in indices]
        _check_margins(rows.source, raw_rows, lambda i: rows.location(indices[i]))
    if kind == "stepwise":
        _warn_of_labels(rows.source, [record["labels"] for record in records])
    return records


def load_stored_rows(
    spec: str,
    kind: str,
    notes: list[str] | None = None,
    unlearned: Mapping[str, Sequence[str]] | None = None,
    reads_margin: bool = False,
) -> Stream:
    """Returns the records of `load_rows` for the training file as a stream: they are read and
    checked as they are drawn (rljax.data.rows.stored). Raises InputError, here for the first row
    and otherwise when it is drawn, for a bad row and for an optional column that not all rows
    have."""
    rows = read_stored(spec, "train", notes)
    rows.unread.unlearned = unlearned or {}
    first = _record(rows, 0, kind)
    if reads_margin:  # by the first block of the file
        block = rows.rows.first_block()
        _check_margins(rows.source, block, lambda i: f"row {i} of the first {len(block):,}")
    if kind == "stepwise":  # by the first block of the file
        _warn_of_labels(rows.source, [row.get("labels") for row in rows.rows.first_block()])

    def record_at(index: int) -> dict:
        record = _record(rows, index, kind)
        for name in _ALL_OR_NONE:
            if (name in record) != (name in first):
                raise InputError(
                    f"{rows.location(index)}: the column {name!r} is not in all rows",
                    rule="every row has it, or none",
                    fix="fill it in, or remove the column",
                )
        return record

    return Stream(record_at, rows=rows.rows.rows)


def prompt_row(rows: Rows, index: int) -> dict:
    """Returns row `index` with its prompt as records have it, for a command that writes rows of the
    same prompt; and images. Raises InputError, with the row, for a prompt that no record has."""
    location = rows.location(index)
    row, images = _as_written(rows, index, location)
    with rows.named_columns():
        row |= read_columns(row, location, (_PROMPT,))
        rendering_of(row, location)
        rows.unread.check(row | images, row["prompt"], location, index, **_check_arguments(row))
    return row | images


def _as_written(rows: Rows, index: int, location: str) -> tuple[dict, dict]:
    """Returns row `index` without its images, and these."""
    with_sources = with_images(rows.rows[index], location, rows.folder)
    images = images_of(with_sources)
    row = decoded_row({n: v for n, v in with_sources.items() if n not in images}, location)
    row = as_written(row, location, rows.nulls)
    if rows.fills_nulls:
        kept_with_nulls = (*CONVERSATIONAL, "tools")
        row = {name: v if name in kept_with_nulls else without_nulls(v) for name, v in row.items()}
    return row, images


def _check_arguments(row: dict) -> dict:
    """Returns arguments of Unread.check: the column of the prompt, behind which something is
    learned."""
    column = next((n for n in _PROMPT.names.split() if not is_missing(row.get(n))), "")
    return dict(read=column, learned=True)


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
        record = make(row, read_columns(row, location, columns), location)
        arguments, prompt = _check_arguments(row), record["prompt"]
        text = row[arguments["read"]] if arguments["read"] else None
        if isinstance(prompt, list) and isinstance(text, str):
            # Whole conversations took the place of a text, which a later turn may say.
            later = [*prompt, *(m for m in record["chosen"] if m["role"] != _ASSISTANT)]
            prompt = prompt if unread_parts({"prompt": text}, later) else later
        rows.unread.check(row | images, prompt, location, index, **arguments)
    require_no_other_reasoning(row, record, location)
    return dict(record, **rendering_of(row, location), index=index, **images)


def _require_everywhere_or_nowhere(records: list[dict], rows: Rows, name: str) -> None:
    """Raises InputError for a column of arrays that some rows have and others lack: a batch has it
    whole or not at all."""
    lacking = [record["index"] for record in records if name not in record]
    if lacking and len(lacking) < len(records):
        raise InputError(
            f"{rows.location(lacking[0])} lacks the column {name!r}, which other rows have",
            rule="every row has it, or none",
            fix="fill it in, or remove the column",
        )


# -- prompt and completions --


def _in_one_form(prompt, completions: dict, location: str):
    """Returns prompt and completions, all as texts or all as messages. Raises InputError for a text
    as prompt with messages as completions."""
    conversational = {name for name, value in completions.items() if isinstance(value, list)}
    if isinstance(prompt, list):

        def as_turn(text):
            return [{"role": _ASSISTANT, "content": text}]

        return prompt, {n: v if n in conversational else as_turn(v) for n, v in completions.items()}
    if conversational:
        raise InputError(
            f"{location}: column 'prompt' is a text while column {sorted(conversational)[0]!r} "
            "holds messages",
            fix="write both as texts, or both as messages",
        )
    return prompt, completions


def _pair(row: dict, read: dict, location: str) -> dict:
    names = ("chosen", "rejected", "reference")
    completions = {name: read[name] for name in names if name in read}
    # Some data sets write the prompt twice: as a text, and at the beginning of both conversations.
    are_messages = all(isinstance(value, list) for value in completions.values())
    are_conversations = are_messages and all(len(value) > 1 for value in completions.values())
    prompt_column = _check_arguments(row)["read"]
    prompt_value = row[prompt_column] if prompt_column else None
    if prompt_value is None and not are_conversations:  # those bring the prompt themselves
        _refuse_unread_question(row, completions["chosen"], location)
    if prompt_value is None or (are_conversations and isinstance(prompt_value, str)):
        prompt, completions = _split_common_beginning(completions, location)
    else:
        prompt = read_columns(row, location, (_PROMPT,))["prompt"]
        if isinstance(prompt, list):
            n = len(prompt)
            conversations = {
                k: conversation(v, f"{location}, column {k!r}")
                for k, v in completions.items()
                if isinstance(v, list)
            }
            if conversations and all(context(v[:n]) == prompt for v in conversations.values()):
                completions |= {name: value[n:] for name, value in conversations.items()}
    completions = {
        name: completion_of(value, f"{location}, column {name!r}", empty=name != "reference")
        for name, value in completions.items()
    }
    prompt, completions = _in_one_form(prompt, completions, location)
    return dict(prompt=prompt, **completions, **_margin(row, read, location))


def _refuse_unread_question(row: dict, chosen: object, location: str) -> None:
    """Raises InputError for a column of a pair without a prompt that looks like a question and is
    no part of the completions: they would be learned without it."""
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
    """Returns the longest common beginning of whole conversations or texts, and the rest of each.
    Raises InputError where that leaves no prompt, or no completion."""
    is_messages = [isinstance(value, list) for value in completions.values()]
    if any(is_messages) and not all(is_messages):
        raise InputError(f"{location}: texts and messages are mixed", fix="write all as messages")
    for name, value in completions.items():
        where = f"{location}, column {name!r}"
        if any(is_messages):
            completions = {**completions, name: conversation(value, where)}
        else:
            text_of(value, where)
    values = list(completions.values())
    # (A turn may be context in one of them and learned in the other: its content is compared.)
    contents = [context(value) if any(is_messages) else value for value in values]
    n = 0
    while all(len(v) > n for v in contents) and all(v[n] == contents[0][n] for v in contents):
        n += 1
    if all(len(value) == n for value in values):  # identical: dropped, and counted, when encoded
        n = n - 1 if any(is_messages) else 0
    elif not any(is_messages) and n and values[0][n - 1] == " ":
        n -= 1  # the space before the difference stays with the completion
    short = [name for name, value in completions.items() if len(value) == n]
    one_ends = any(is_messages) and 0 < len(short) < len(values)
    if one_ends and n > 1 and contents[0][n - 1]["role"] == _ASSISTANT:
        n -= 1  # one conversation goes on after an answer with which the other one ends
    elif one_ends:
        other = next(name for name in completions if name not in short)
        raise InputError(
            f"{location}: {short[0]!r} is the beginning of {other!r}",
            rule="without a 'prompt' their common beginning is the prompt, and nothing is left",
            fix="add a 'prompt' column, or remove the row",
        )
    if n == 0 and any(is_messages):
        raise InputError(
            f"{location}: 'chosen' and 'rejected' share no first message",
            rule="without a 'prompt' their common beginning is the prompt",
            fix="add a 'prompt' column",
        )
    return contents[0][:n], {name: value[n:] for name, value in completions.items()}


def _margin(row: Mapping, read: dict, location: str) -> dict:
    """Returns {"margin", "tie"}: the amount by which the chosen completion is better, and whether
    neither is."""
    tie, names = read.get("tie", False), _score_columns(row)
    if "margin" in read or not names:
        return dict(margin=read.get("margin", 0.0), tie=tie)
    better, worse = (number_of(row.get(name), f"{location}, column {name!r}") for name in names)
    if better < worse:
        raise InputError(
            f"{location}: {names[0]!r} is below {names[1]!r}",
            value=(better, worse),
            fix="swap the completions, or remove the row, or both columns if they do not say which"
            " completion is better",
        )
    return dict(margin=better - worse, tie=tie or better == worse)


def _score_columns(row: Mapping) -> tuple[str, ...]:
    """Returns the two columns of a pair's scores, () if the row has none."""
    present = {name for names in PAIR_SCORES for name in names if not is_missing(row.get(name))}
    return next((names for names in PAIR_SCORES if present & {*names}), ())


def _check_margins(source: str, rows: Sequence[Mapping], location: Callable[[int], str]) -> None:
    """Raises InputError if none of the rows says how much better its chosen completion is, and
    warns of those that do not. `location` returns that of the i-th one."""
    lacking = [
        i
        for i, row in enumerate(rows)
        if is_missing(row.get("margin")) and not row.get("tie") and not _score_columns(row)
    ]
    if lacking and len(lacking) == len(rows):
        raise InputError(
            f"{source}: no row has a margin",
            value=sorted(map(str, rows[0])),
            rule="the loss of this run subtracts the margin of each pair",
            fix="give each row a 'margin' of 0 or more, or scores of both completions,"
            " 'score_chosen' and 'score_rejected'; or write algorithm.reward_loss without"
            " margin=True",
        )
    if lacking:
        LOG.warning(
            "%s: %s of %s rows have no margin, and the loss of this run subtracts 0 from them (the"
            " first is in %s). Fix: give each a 'margin', 0 where no completion is the better one",
            source,
            f"{len(lacking):,}",
            f"{len(rows):,}",
            location(lacking[0]),
        )


# -- one completion --


def _labelled(row: dict, read: dict, location: str) -> dict:
    name = "response" if is_missing(row.get("completion")) else "completion"
    prompt, matched = _in_one_form(read["prompt"], {name: read["completion"]}, location)
    return dict(prompt=prompt, completion=matched[name], label=read["label"])


def _require_one_of_each_step(read: dict, name: str, steps: list, location: str) -> None:
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
    _require_one_of_each_step(read, "labels", steps, location)
    return read


def _trajectory(row: dict, read: dict, location: str) -> dict:
    # Where both are there: steps where their scores need them, else the completion.
    names = ["completion", "response", "steps"]
    if "process_scores" in read:
        names = ["steps", "completion", "response"]
    name = next((name for name in names if not is_missing(row.get(name))), names[0])
    where = f"{location}, column {name!r}"
    record = dict(prompt=read["prompt"])
    if name == "steps":
        record["steps"] = each(_step, "step")(row["steps"], where)
    else:
        completion = completion_of(row.get(name), where)
        record["prompt"], matched = _in_one_form(record["prompt"], {name: completion}, location)
        record["completion"] = matched[name]
    if "process_scores" in read:
        if name != "steps":
            raise InputError(
                f"{location}, column 'process_scores' needs the column 'steps'",
                rule="a score stands at the end of a step",
                fix="write the completion as a list of its steps",
            )
        _require_one_of_each_step(read, "process_scores", record["steps"], location)
    record |= {"reward": read["reward"], "truncated": False}
    return record | {n: read[n] for n in ("truncated", *_ALL_OR_NONE) if n in read}


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
    rows = [[*map(plain_number, row)] for row in labels if isinstance(row, (list, tuple))]
    numbers = [x for row in rows for x in row if isinstance(x, (int, float))]
    booleans = {x for x in numbers if isinstance(x, bool)}
    if not numbers or False in booleans or min(numbers) < 0 or min(numbers) == 1:
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


_PROMPT = Column(
    "prompt question",
    prompt_of,
    "give each row a 'prompt': a text, or the messages before the answer",
    null_is_absent=True,
)
_PAIR = "give each row 'chosen' and 'rejected', and a 'prompt' unless both begin with it"
_SAFE = "say of both completions whether they are safe, true or false"
_STEPS = "give each row 'completions' and 'labels', one of each step"
_judged_completion = functools.partial(completion_of, empty=True)
# For each kind: the function (row, values that were read of its columns, location) -> record, and
# the columns.
_KINDS = {
    "pairs": (
        _pair,
        Column("chosen", fix=_PAIR),
        Column("rejected", fix=_PAIR),
        Column("reference"),
        Column("margin", _margin_of),
        Column("tie", flag_of),
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
        Column("completion response", _judged_completion, "give each row a 'completion'"),
        Column("label score", flag_of, "give each row a 'label', true or false"),
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
        Column(" ".join(REWARDS), number_of, "give each row a 'reward'"),
        Column("truncated", flag_of),
        Column("process_scores", each(number_of, "step")),
        Column("logprobs", _logprobs),
    ),
}
KINDS = ("examples", *_KINDS)
