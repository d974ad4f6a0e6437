"""Rows in the columns of other projects as rows in ours: ShareGPT, Alpaca, OpenRLHF, PKU-SafeRLHF,
tables of texts. Ours are TRL's and verl's.

The form is that of the first row; a later row of another one is an error that names it. What a
column must hold is checked where it is used (`sources`, rljax.data.offline.rows).
"""

import ast
import dataclasses
import re
import warnings
from collections.abc import Callable

from rljax.answer_columns import held_answers
from rljax.data.images.columns import has_images
from rljax.data.rows.columns import RESPONSES, TEXTS, TRUTHS, VALUES, with_system
from rljax.data.rows.conversation import sharegpt_content
from rljax.data.rows.unread import unread_parts
from rljax.data.text.messages import SPEAKERS
from rljax.errors import InputError
from rljax.files import parse_json


@dataclasses.dataclass(frozen=True)
class Form:
    """The columns of another project: its name, and a function that converts a row to
    our columns."""

    name: str
    convert: Callable[[dict, str], dict]  # (row, its location in errors)

    def read(self, row: dict, location: str) -> dict:
        """Returns the row in our columns. Raises InputError for a row that `convert` cannot read,
        and for one with another question in one of our columns, which would not be read."""
        converted = self.convert(row, location)
        for name in ("prompt", "messages"):
            question, converted_question = row.get(name), converted.get(name)
            if (
                question is not None
                and converted_question != question
                and unread_parts({name: question}, converted_question)
            ):
                raise InputError(
                    f"{location}, column {name!r} is not read",
                    value=question,
                    rule=f"the other columns are of {self.name}, and ask something else",
                    fix=f"write all that is asked into {name!r}, and remove the other columns of"
                    " it",
                )
        return converted


def understood(row: dict) -> str:
    """Names the kind of a row in our columns, in the words of TRL's documentation; "" if the
    columns do not tell."""
    columns = row.keys()
    model = row.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        kind, text = "verl's prompts", row.get("prompt")
    elif {"safer", "more_harmful"} <= columns:
        kind, text = "safety pairs", row["safer"]
    elif {"chosen", "rejected"} <= columns:
        implicit = "" if row.get("prompt") is not None else ", implicit prompt"
        kind, text = f"preference{implicit}", row["chosen"]
    elif {"completions", "labels"} <= columns:
        kind, text = "stepwise supervision", row.get("prompt")
    elif "reward" in columns and isinstance(row.get("steps"), (list, tuple)):
        kind, text = "trajectories of steps", row.get("prompt")
    elif row.get("messages") is not None:
        kind, text = "language modeling", row["messages"]
    elif "prompt" in columns and (completion := {"completion", "response"} & columns):
        kind = "unpaired preference" if "label" in columns else "prompt-completion"
        text = row[min(completion)]
    elif columns & {"prompt", "question"}:
        has_solution = held_answers(row) == ["solution"]
        kind = "prompts" + ", their answers in 'solution'" * has_solution
        text = row.get("prompt", row.get("question"))
    elif "text" in columns:
        kind, text = "language modeling", row["text"]
    else:
        return ""
    conversational = ", conversational" if isinstance(text, (list, tuple)) else ""
    # Tools are a chat template's: a text has none.
    tools = bool(conversational and row.get("tools"))
    extras = ", with tools" * tools + ", with images" * has_images(row)
    return kind + conversational + extras


_OUR_QUESTIONS = {"prompt", "question", "messages", "text"}


def form_of(row: dict) -> Form | None:
    """Returns the form of a row of another project; None if its columns are ours."""
    if _is_turns(row.get("conversations")):
        return _SHAREGPT
    is_alpaca = isinstance(row.get("instruction"), str)
    has_response = {"output", "response"} & row.keys() or {"chosen", "rejected"} <= row.keys()
    filled = {name for name, value in row.items() if value is not None}
    has_question = {"prompt", "question", "messages", "problem"} & filled
    answers = held_answers(row)
    if is_alpaca and (has_response or answers and not has_question):
        return _ALPACA
    if isinstance(row.get("question"), str) and "response" in row:
        return _ORCA
    if isinstance(row.get("input"), str) and isinstance(row.get("value"), (list, tuple)):
        return _MATH_SHEPHERD
    if _is_marked_math_shepherd(row.get("input"), row.get("label")):
        return _MARKED_MATH_SHEPHERD
    if _PKU_COLUMNS <= row.keys() and row.keys() & {"safer_response_id", "better_response_id"}:
        return _PKU
    our_columns = _OUR_QUESTIONS & row.keys()
    if not our_columns and ("input" in row or _is_turns(row.get("context_messages"))):
        return _OPENRLHF
    if not our_columns and isinstance(row.get("problem"), str):
        return _PROBLEMS
    answer = row.get("answer")
    if isinstance(row.get("question"), str) and isinstance(answer, str) and "\n#### " in answer:
        return _GSM8K
    return None


def _is_turns(value: object) -> bool:
    """Returns whether it is a list that begins with an object of "from" and "value", or of
    "role"."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ("from" in first or "role" in first)


def _sharegpt(row: dict, location: str) -> dict:
    """Converts `conversations` to `messages`; with `chosen` and `rejected` turns, to the `prompt`
    of a pair."""
    if not isinstance(row.get("conversations"), list):
        raise InputError(
            f"{location} has no list in the column 'conversations'",
            value=row.get("conversations"),
            rule="the first row has one",
            fix='write [{"from": "human", "value": "..."}, ...]',
        )
    messages = [
        _message(turn, f"{location}, column 'conversations', turn {number}")
        for number, turn in enumerate(row["conversations"])
    ]
    if row.get("system"):
        messages = with_system(messages, row["system"], ("system", "conversations"), location)
    others = {n: v for n, v in row.items() if n not in ("conversations", "system")}
    if "chosen" not in row:
        return {**others, "messages": messages}
    for name in ("chosen", "rejected"):
        if isinstance(row.get(name), dict):
            others[name] = [_message(row[name], f"{location}, column {name!r}")]
    return {**others, "prompt": messages}


def _message(turn: object, location: str) -> dict:
    if isinstance(turn, dict) and "role" in turn:
        return turn
    speaker = turn.get("from") if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or speaker.lower() not in (*SPEAKERS, "function_call"):
        raise InputError(
            f"{location}: who speaks is unknown",
            value=speaker if isinstance(turn, dict) else turn,
            rule=f"'from' is one of {', '.join(SPEAKERS)}, function_call",
            fix='write {"from": "human", "value": "..."}',
        )
    others = {n: v for n, v in turn.items() if n not in ("from", "value", "content")}
    content = sharegpt_content(turn, location)
    if speaker.lower() == "function_call":  # LLaMA-Factory's and APIGen's
        calls = parse_json(content, location) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": calls, **others}
    return {"role": SPEAKERS[speaker.lower()], "content": content, **others}


def _alpaca(row: dict, location: str) -> dict:
    """Converts `instruction` and `input` to `prompt`, `output` to `completion`; with `system` or
    `history` the prompt is a conversation. Dolly names them `context` and `response`. A prompt may
    have its answer in our columns."""
    for name, other in (("input", "context"), ("output", "response")):
        if name not in row and other in row:
            row = {**{n: v for n, v in row.items() if n != other}, name: row[other]}
    if "instruction" not in row:
        raise InputError(
            f"{location} has no column 'instruction'",
            value=sorted(map(str, row)),
            rule="the first row has one, so that all are read as Alpaca's",
            fix="give rows of one form, or each form as a source of its own",
        )
    for name in ("instruction", "input", "output"):
        value = row.get(name)
        if not isinstance(value, str) and not (value is None and name != "instruction"):
            raise InputError(
                f"{location}, column {name!r} is not a text", value=value, fix="write a text"
            )
    prompt = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    history = row.get("history") or []
    if row.get("system") or history:
        messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        try:
            pairs = [(question, answer) for question, answer in history]
        except (TypeError, ValueError):
            raise InputError(
                f"{location}, column 'history' is no list of pairs",
                value=history,
                fix='write [["question", "answer"], ...]',
            ) from None
        for question, answer in pairs:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        prompt = [*messages, {"role": "user", "content": prompt}]
    alpaca_columns = ("instruction", "input", "output", "system", "history")
    converted = {n: v for n, v in row.items() if n not in alpaca_columns}
    converted["prompt"] = prompt
    if row.get("output") is not None:
        converted["completion"] = row["output"]
        if "ground_truth" not in row and "reward_model" not in row:
            converted.setdefault("answer", row["output"])
    elif "output" in row:
        converted.setdefault("completion", None)
    return converted


def _openrlhf(row: dict, location: str) -> dict:
    """Converts `input` or `context_messages` to `prompt`, `output` to `completion`. A `label`
    beside an output says whether it is desirable; without an output it is the ground truth."""
    name = "context_messages" if "context_messages" in row else "input"
    if name not in row:
        raise InputError(
            f"{location} lacks the column 'input'",
            value=sorted(map(str, row)),
            rule="the first row has it, or 'context_messages'",
            fix="correct the row",
        )
    openrlhf_columns = ("input", "context_messages", "output", "label", "datasource")
    converted = {n: v for n, v in row.items() if n not in openrlhf_columns}
    converted["prompt"] = row[name]
    if "output" in row:
        converted["completion"] = row["output"]
    if "label" in row:
        converted["label" if "output" in row else "ground_truth"] = row["label"]
    if row.get("datasource") is not None:
        converted["data_source"] = row["datasource"]
    return converted


def _orca(row: dict, location: str) -> dict:
    """Converts OpenOrca's `question` and `response` to `prompt` and `completion`; with a
    `system_prompt` the prompt is a conversation."""
    converted = {n: v for n, v in row.items() if n not in ("system_prompt", "question", "response")}
    prompt = row.get("question")
    if row.get("system_prompt"):
        system = {"role": "system", "content": row["system_prompt"]}
        prompt = [system, {"role": "user", "content": prompt}]
    converted |= {"prompt": prompt, "completion": row.get("response")}
    if "ground_truth" not in row and "reward_model" not in row:
        converted.setdefault("answer", row.get("response"))
    return converted


_STEP_END = "ки"  # Math-Shepherd's token behind each step
_FIRST_STEP = "Step 1:"
_SIGNS = {"+": True, "-": False}


def _math_shepherd(row: dict, location: str) -> dict:
    """Converts Math-Shepherd as OpenRLHF reads it, `input`, a question and steps with a mark behind
    each, and `value`, "+" or "-" for each mark, to `prompt`, `completions`, `labels`."""
    *steps, remainder = str(row.get("input")).split(_STEP_END)
    values = row.get("value")
    unknown = [v for v in values if v not in (*_SIGNS, 0, 1)] if isinstance(values, list) else []
    if not isinstance(values, list) or len(values) != len(steps) or unknown or remainder.strip():
        raise InputError(
            f"{location}: 'value' does not fit the steps of 'input'",
            value=f"{len(steps)} steps, {str(values)[:80]}",
            rule=f"behind each step stands {_STEP_END!r}, and 'value' has '+' or '-' for each",
            fix="correct the row, or write 'prompt', 'completions' and 'labels'",
        )
    prompt, mark, first = steps[0].partition(_FIRST_STEP)
    others = {n: v for n, v in row.items() if n not in ("input", "value", "label")}
    return {
        **others,
        "prompt": prompt.strip() if mark else "",
        "completions": [step.strip() for step in (mark + first, *steps[1:])],
        "labels": [_SIGNS.get(value, value == 1) for value in values],
    }


def _step_signs(text: object, label: object) -> str:
    """Returns the sign of each step of a text with marks, where `label` is the same text with a
    sign in place of each mark; else "" ."""
    if not isinstance(text, str) or not isinstance(label, str):
        return ""
    *steps, remainder = text.split(_STEP_END)
    signs, position = "", 0
    for step in steps:
        sign = label[position + len(step) : position + len(step) + 1]
        if not label.startswith(step, position) or sign not in _SIGNS:
            return ""
        signs, position = signs + sign, position + len(step) + 1
    return signs if label[position:].strip() == remainder.strip() else ""


def _is_marked_math_shepherd(text: object, label: object) -> bool:
    """Returns whether `label` repeats the question and the first step of a text with marks; its
    signs may be wrong or missing."""
    if not isinstance(text, str) or not isinstance(label, str):
        return False
    first_step, mark, _ = text.partition(_STEP_END)
    repeats = bool(mark) and _FIRST_STEP in first_step and label.startswith(first_step.rstrip())
    return repeats or bool(_step_signs(text, label))


def _marked_math_shepherd(row: dict, location: str) -> dict:
    """Converts Math-Shepherd as it is published: `input`, a question and steps with a mark behind
    each, and `label`, the same with "+" or "-" in place of the marks."""
    signs = _step_signs(row.get("input"), row.get("label"))
    if not signs or row["input"].rpartition(_STEP_END)[2].strip():
        raise InputError(
            f"{location}: 'label' does not fit the steps of 'input'",
            value=row.get("label"),
            rule=f"'label' is the text of 'input' with '+' or '-' in place of each {_STEP_END!r}",
            fix="correct the row, or write 'prompt', 'completions' and 'labels'",
        )
    return _math_shepherd({**row, "value": list(signs)}, location)


_PKU_COLUMNS = {"prompt", "response_0", "response_1"}


def _pku(row: dict, location: str) -> dict:
    """Converts two responses, with the number of the better and of the safer one and whether each
    is safe, to `chosen` and `rejected`, `safer` and `more_harmful` with their labels."""
    converted = {n: v for n, v in row.items() if "response_" not in n}
    for column, first, second in (
        ("better_response_id", "chosen", "rejected"),
        ("safer_response_id", "safer", "more_harmful"),
    ):
        if row.get(column) is None:
            continue
        if row[column] not in (0, 1):
            raise InputError(
                f"{location}, column {column!r}",
                value=row[column],
                rule="0 or 1",
                fix=f"write 0 or 1 in {column!r}, or drop the row",
            )
        for name, number in ((first, int(row[column])), (second, 1 - int(row[column]))):
            converted[name] = row.get(f"response_{number}")
            label = row.get(f"is_response_{number}_safe")
            if first == "safer" and label is not None:
                converted[f"{name}_is_safe"] = label
    return converted


_PKU = Form("PKU-SafeRLHF", _pku)
_SHAREGPT = Form("ShareGPT", _sharegpt)
_ALPACA = Form("Alpaca", _alpaca)
_ORCA = Form("OpenOrca", _orca)
_MATH_SHEPHERD = Form("Math-Shepherd", _math_shepherd)
_MARKED_MATH_SHEPHERD = Form("Math-Shepherd", _marked_math_shepherd)
_OPENRLHF = Form("OpenRLHF", _openrlhf)
# MATH's and open-r1's. A map of the user's own reads the column as it is called there.
_PROBLEMS = Form("problems", lambda row, location: {**row, "prompt": row.get("problem")})
_GSM8K = Form("GSM8K, the answer after ####", lambda row, location: row)


def table_row(names: list[str], cells: list[str], location: str) -> dict:
    """Returns a row of a table of texts: an empty cell is None; numbers and truth values where a
    column holds such; lists and objects that were written as JSON."""
    columns = zip(names, cells, strict=True)
    # OpenRLHF's label of a prompt without an output is its ground truth, a text.
    is_prompt = {"input", "context_messages"} & {*names} and not {*_OUR_QUESTIONS, "output"} & {
        *names
    }
    kinds = {"label": "ground_truth"} if is_prompt else {}
    return {
        name: _cell(kinds.get(name, name), cell, f"{location}, column {name!r}")
        for name, cell in columns
    }


def _cell(name: str, cell: str, location: str) -> object:
    if not cell:
        return None if name in (*VALUES, *RESPONSES) else ""
    if name in VALUES:
        try:
            return parse_json(cell.lower(), location)
        except InputError:
            return cell
    if name in TRUTHS or not _BRACKETS.fullmatch(cell):
        return cell
    try:
        value = parse_json(cell, location)
    except InputError as error:
        if not _QUOTED.match(cell) or (name in (*TEXTS, *RESPONSES) and not _is_literal(cell)):
            return cell
        raise InputError(
            f"{location} looks like JSON, and is none",
            value=cell,
            rule=str(error),
            fix="write such cells with json.dumps, or the rows as .jsonl or .parquet",
        ) from None
    if name in (*TEXTS, *RESPONSES) and not _is_turns(value):
        raise InputError(
            f"{location} holds JSON, a{'n object' if isinstance(value, dict) else ' list'}",
            value=cell,
            rule="the column is of texts, or of messages, [{...}, ...]",
            fix="if the text itself is JSON, write the rows as .jsonl: it is in quotes there",
        )
    return value


def _is_literal(cell: str) -> bool:
    """Returns whether a cell is Python's repr of a list or an object, and not prose with
    brackets."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return isinstance(ast.literal_eval(cell.strip()), (list, dict))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


_BRACKETS = re.compile(r"\s*(\[.*\]|\{.*\})\s*", re.DOTALL)
_QUOTED = re.compile(r"""\s*(\[\s*)?(\{\s*)?["']""")
