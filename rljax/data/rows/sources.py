"""Makes records of prompts and of demonstrations, and checks their rows. No tokens here.

Where the rows come from (files, tasks, TFDS, a list) is `read`; the rows of preference and other
offline training are rljax.data.offline.rows. Every row is checked here, before a model loads.
"""

import datetime
import decimal
import json
import math
from collections.abc import Callable

from rljax.answer_columns import ANSWERS, PLAIN_ANSWERS, held_answers
from rljax.data.images.columns import images_of, with_images
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import (
    CONVERSATIONAL,
    as_written,
    decoded,
    demonstration_record,
    first_of,
    object_of,
    prompt_of,
    text_of,
)
from rljax.data.rows.conversation import context, conversation
from rljax.data.rows.nulls import TOOLS
from rljax.data.rows.read import Rows, read_rows, read_stored
from rljax.data.rows.split import one_side
from rljax.data.text.messages import check_unicode
from rljax.errors import InputError
from rljax.rewards.answers.find import last_boxed, tagged
from rljax.rewards.pool.foreign import GroundTruth

_PROMPT_FIX = (
    "give each row a 'prompt' (text, or a list of chat messages), 'question' or 'messages'"
)
_SOLUTION_CHARACTERS = 100  # of a solution that is taken as the answer itself
_TRUTH_FIX = "give each row a 'ground_truth', an 'answer' or a reward_model.ground_truth"


# A function that returns the reason why no response to a record could be scored by its ground
# truth; "" where one could.
Check = Callable[[dict], str]


def load_prompts(
    spec: str,
    split: str,
    *,
    need_ground_truth: bool = True,
    check: Check | None = None,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
) -> list[dict]:
    """Returns prompt records: prompt (str or messages), ground_truth (a GroundTruth: its text, with
    the columns of the row), data_source, extra_info, index; and images, where a row has some
    (rljax.data.images.columns).

    Without `need_ground_truth` (a reward model judges) a missing one is "". `notes` are those of
    read_rows. With a `test_fraction` both splits are sides of the training split
    (rljax.data.rows.split). Raises InputError that names the source, row and column, also for a row
    that fails the `check`.
    """
    rows = read_rows(spec, "train" if test_fraction else split, notes=notes)
    records = _prompt_records(rows, need_ground_truth, check)
    return _records_of_split(records, split, test_fraction, spec, rows)


def _prompt_records(rows: Rows, need_ground_truth: bool, check: Check | None) -> list[dict]:
    numbered = enumerate(rows.rows)
    return [prompt_record(row, i, rows, need_ground_truth, check) for i, row in numbered]


def load_endless_prompts(
    spec: str,
    *,
    need_ground_truth: bool = True,
    check: Check | None = None,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
    stored: bool = False,
) -> list[dict] | Stream:
    """Returns the records of `load_prompts` for the training split. They are a stream, made as it
    is read, for an endless task and, if `stored`, for a file."""
    if stored:
        rows = read_stored(spec, "train", notes)
    else:
        rows = read_rows(spec, "train", endless=True, notes=notes)
    if not isinstance(rows.rows, Stream):
        records = _prompt_records(rows, need_ground_truth, check)
        return _records_of_split(records, "train", test_fraction, spec, rows)

    def record_at(i):
        return prompt_record(rows.rows[i], i, rows, need_ground_truth, check)

    return Stream(record_at, rows=rows.rows.rows)


def load_demonstrations(
    spec: str,
    split: str,
    notes: list[str] | None = None,
    test_fraction: float = 0.0,
    stored: bool = False,
) -> list[dict] | Stream:
    """Returns supervised records: `messages`, or `prompt` + `completion`, or `text`; and index.

    A task's demonstrations are its training split. `test_fraction`: see load_prompts; `stored`: see
    load_endless_prompts. Raises InputError that names the source, row and column.
    """
    if stored:
        rows = read_stored(spec, split, notes)
        return Stream(lambda index: _demonstration(rows, index), rows=rows.rows.rows)
    rows = read_rows(spec, "train" if test_fraction else split, demonstrations=True, notes=notes)
    records = [_demonstration(rows, index) for index in range(len(rows.rows))]
    return _records_of_split(records, split, test_fraction, spec, rows)


def _records_of_split(
    records: list[dict], split: str, test_fraction: float, spec: str, rows: Rows
) -> list[dict]:
    """Returns the records of a split; warns of columns of their rows that are not read."""
    if test_fraction:
        records = one_side(records, split, test_fraction, spec)
    rows.unread.warn(records)
    return records


def _demonstration(rows: Rows, index: int) -> dict:
    location = rows.location(index)
    row = rows.rows[index]
    row = _as_written(with_images(row, location, rows.folder), rows, location)
    with rows.named_columns():
        return {**demonstration_record(row, location, index, rows.unread), **images_of(row)}


# -- the columns of a row --


def prompt_record(
    row: dict, index: int, rows: Rows, need_ground_truth: bool, check: Check | None = None
) -> dict:
    """Returns row `index` as load_prompts makes it; `rows.unread` collects its columns that are not
    read. Raises InputError that names row and column."""
    location = rows.location(index)
    with rows.named_columns():
        row = _as_written(with_images(row, location, rows.folder), rows, location)
        row = _with_prompt(_without_hiding_nulls(row), location)
        prompt_column = first_of(row, _QUESTIONS[:2], location, _PROMPT_FIX, _QUESTIONS[2:])
        truth, truth_column, kept_columns = _ground_truth(row, location, need_ground_truth)
        data_source = row.get("data_source", rows.data_source)
        text_of(data_source, f"{location}, column 'data_source'", "name the data set")
        extra_info = object_of(row.get("extra_info"), f"{location}, column 'extra_info'")
        used = {prompt_column, truth_column, "reward_model", "data_source", "extra_info", "images"}
        others = {name: value for name, value in row.items() if name not in used}
        others |= kept_columns
        own_info = {name: value for name, value in extra_info.items() if value is not None}
        truth = truth.beside(row, own_info)
        record = dict(
            prompt=prompt_of(row[prompt_column], f"{location}, column {prompt_column!r}"),
            ground_truth=truth,
            data_source=data_source,
            extra_info={**extra_info, **others, **own_info},
            index=index,
        )
        record |= images_of(row)
        rows.unread.check(row, record["prompt"], location, index, read=prompt_column)
        _require_words(record["prompt"], f"{location}, column {prompt_column!r}")
        if check and (problem := check(record)):
            raise InputError(
                f"{location}, column {truth_column!r}",
                value=row[truth_column],
                rule=problem,
                fix="correct or remove the row, or name another reward in reward.function",
            )
    return record


def _as_written(row: dict, rows: Rows, location: str) -> dict:
    """Returns the row with its messages, tools and calls as they were written."""

    def decoded_columns(columns: dict) -> dict:
        return {
            name: decoded(value, f"{location}, column {name!r}")
            if name in (*CONVERSATIONAL, *TOOLS) and isinstance(value, (list, tuple))
            else value
            for name, value in columns.items()
        }

    row = decoded_columns(row)
    if isinstance(row.get("extra_info"), dict):
        row["extra_info"] = decoded_columns(row["extra_info"])
    return as_written(row, location, rows.nulls)


_QUESTIONS = ("prompt", "question", "messages", "problem")


def _without_hiding_nulls(row: dict) -> dict:
    """Returns the row without the nulls that a table writes for missing values, where another
    column of the same meaning holds the value."""
    for names in (_QUESTIONS, ANSWERS):
        if any(row.get(name) is not None for name in names):
            row = {name: x for name, x in row.items() if x is not None or name not in names}
    return row


def _with_prompt(row: dict, location: str) -> dict:
    """Returns the row with the conversation in `messages` as a prompt: the messages before its last
    answer, which is the ground truth where no column is."""
    if "prompt" in row or "question" in row:
        return row
    if not isinstance(row.get("messages"), list):
        return {**row, "prompt": row["problem"]} if "problem" in row else row
    messages = context(conversation(row["messages"], f"{location}, column 'messages'"))
    columns = {name: value for name, value in row.items() if name != "messages"}
    if messages[-1]["role"] != "assistant":
        return {**columns, "prompt": messages}
    *prompt, last = messages
    if not held_answers(row):  # nulls of a table hide no answer
        columns = {name: x for name, x in columns.items() if x is not None or name not in ANSWERS}
        columns["answer"] = last.get("content")
    return {**columns, "prompt": prompt}


def _require_words(prompt: str | list[dict], location: str) -> None:
    """Raises InputError for a prompt without words: its samples would answer nothing."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") or "" for m in prompt]
    has_calls = not isinstance(prompt, str) and any(m.get("tool_calls") for m in prompt)
    if not has_calls and not any(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"{location} is empty", value=prompt, fix="remove the row or fill it in")


def _ground_truth(row: dict, location: str, needed: bool) -> tuple[GroundTruth, str, dict]:
    """Returns the answer to compare with, its column, and further columns to keep in the record."""
    model = row.get("reward_model")
    if model is not None:
        fix = 'write {"style": "rule", "ground_truth": "..."}'
        value = object_of(model, f"{location}, column 'reward_model'", fix).get("ground_truth")
        text = ""
        if value is not None or needed:
            text = _answer_text(value, f"{location}, column 'reward_model.ground_truth'")
        return GroundTruth(text, {"reward_model": model}, value), "reward_model", {}
    present = [name for name in PLAIN_ANSWERS[:2] if name in row]
    solution = row["solution"] if "solution" in held_answers(row) else None
    if needed and not present and solution is not None:
        columns, location = {"solution": solution}, f"{location}, column 'solution'"
        if isinstance(solution, str):
            truth = GroundTruth(_answer_of_solution(solution, location), columns)
            return truth, "solution", columns
        value = solution
        if isinstance(value, (list, tuple)):
            value = [
                _answer_of_solution(item, location) if isinstance(item, str) else item
                for item in value
            ]
        return GroundTruth(_answer_text(value, location), columns, value), "solution", columns
    if not needed and all(row[name] is None for name in present):
        return GroundTruth(""), "ground_truth", {}
    column = first_of(row, PLAIN_ANSWERS[:2], location, _TRUTH_FIX, ANSWERS)
    text = _answer_text(row[column], f"{location}, column {column!r}")
    # The published GSM8K rows hold the worked solution, and the answer after "####".
    solution, mark, final = text.rpartition("\n#### ")
    if column == "answer" and mark:
        final = final.strip().replace(",", "")
        if not final:
            raise InputError(
                f"{location}, column 'answer' is empty after ####",
                value=text,
                fix="write the final answer behind '####', or drop the row",
            )
        return GroundTruth(final, {column: text}, text), column, {"solution": solution}
    return GroundTruth(text, {column: row[column]}, row[column]), column, {}


def _answer_of_solution(solution: str, location: str) -> str:
    """Returns the answer of a `solution`, as TRL's and open-r1's rows have it: in its last box,
    between <answer> tags, behind "####", or a short text that is the answer itself."""
    marked_answer = last_boxed(solution) or tagged(solution)
    answer = (marked_answer or solution.rpartition("\n#### ")[2]).strip().strip("$").strip()
    is_short = "\n" not in answer and len(answer) <= _SOLUTION_CHARACTERS
    if not answer or not (marked_answer or is_short):
        raise InputError(
            f"{location} has no answer that can be told from the rest",
            value=solution[-80:],
            rule="the answer of one is in its last \\boxed{...}, in <answer>...</answer>, or "
            "the whole of a short line",
            fix="write the answer alone into a column 'answer'",
        )
    check_unicode(answer, location)
    return answer


def _answer_text(value: object, location: str) -> str:
    """Returns a ground truth as text; numbers are written as such, 72.0 as 72, lists and objects as
    JSON (several targets, as in verl's searchR1 rows)."""
    if isinstance(value, float):
        if math.isfinite(value):
            return str(int(value)) if value.is_integer() else repr(float(value))
        value = None if math.isnan(value) else value  # a missing number comes as NaN
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return str(int(value)) if value == value.to_integral_value() else f"{value.normalize():f}"
    if isinstance(value, (bool, datetime.date, datetime.time, datetime.timedelta)):
        raise InputError(
            f"{location} is a {type(value).__name__}, and no text",
            value=value,
            rule="an answer is compared with what the model writes, and there are several ways to"
            " write it",
            fix="write it as the text of a right answer, such as 'yes' or '2020-01-02'",
        )
    if isinstance(value, (dict, list)) and value:
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:  # dates, bytes, NaN
            raise InputError(
                f"{location} holds what JSON has not",
                value=value,
                rule=str(error),
                fix="write the answer as text",
            ) from None
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{location} is {'null' if value is None else 'empty or not a text'}",
            value=value,
            rule="a ground truth is a text, a number, or a list or an object of such",
            fix="remove the row or fill it in",
        )
    check_unicode(value, location)
    return value
