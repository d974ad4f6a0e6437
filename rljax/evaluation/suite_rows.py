"""Rows of the published benchmarks as prompts and ground truths, in the words of their own
evaluations.

A row that lacks a column, or holds something else there, raises InputError that names the column.
"""

import base64
import datetime
import io
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence

from rljax import hub
from rljax.contracts import contract
from rljax.data.rows import maps
from rljax.data.rows.read import read_rows
from rljax.errors import InputError
from rljax.files import DATA_FILES, parse_json, strangers_bytes
from rljax.rewards.answers.find import last_boxed
from rljax.rewards.answers.normalise import integer_of
from rljax.rewards.text.instructions import read_instructions
from rljax.rewards.text.rules import strict_number

Solved = Sequence[dict]  # rows that are shown with their answers
LETTERS = "ABCDEFGHIJ"
_MOST_TESTS = 2**30  # bytes of a problem's tests, unpacked


def _asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def exemplars(
    data: str, given: str, split: str, shots: int, columns: Sequence[str], by: str = ""
) -> Solved:
    """The first `shots` rows of the file `given`, else of the `split` of the data; with `by` the
    first of each value of that column. Empty if shots is 0. Raises InputError for shots below 0,
    for a file without shots, for data without another split, and for too few rows."""
    if shots < 0:
        raise InputError("shots", value=shots, fix="shots=0 for none, or the number of exemplars")
    if not shots:
        if given:
            fix = "shots=4, or leave exemplars out"
            raise InputError("exemplars", value=given, rule="needs shots above 0", fix=fix)
        return ()
    one_file = data.endswith(DATA_FILES) and "{split}" not in data
    if not given and (one_file or "*" in data):
        problem = f"shots={shots} needs solved questions that are not asked, and {data} is one file"
        raise InputError(problem, fix="exemplars='train.jsonl', or a folder with both splits")
    dataset = read_rows(given or data, split)
    groups: dict[str, list[dict]] = {}
    for index, row in enumerate(dataset.rows):
        if missing := [name for name in columns if name not in row]:
            fix = f"an exemplar has the columns {', '.join(columns)}"
            raise InputError(
                f"{dataset.location(index)} lacks {missing}", value=sorted(row), fix=fix
            )
        group = groups.setdefault(str(row[by]) if by else "", [])
        if len(group) < shots:
            group.append(row)
    for value, group in groups.items():
        if len(group) < shots:
            value_text = f" of {by} {value!r}" if by else ""
            problem = f"shots={shots}, and {dataset.source} has {len(group)} rows{value_text}"
            raise InputError(problem, fix=f"shots={len(group)} or fewer, or a file with more rows")
    return [row for group in groups.values() for row in group]


def _require_column(row: dict, name: str, fix: str) -> None:
    if name not in row:
        raise InputError(f"lacks the column {name!r}", value=sorted(map(str, row)), fix=fix)


def _require_unseen(row: dict, solved: Solved, columns: Sequence[str]) -> None:
    """Raises InputError where the row is one of those that are shown with their answers."""
    question = [row[name] for name in columns]
    if any([exemplar[name] for name in columns] == question for exemplar in solved):
        fix = "exemplars='FILE' with other questions"
        raise InputError("is asked and is shown as an exemplar, too", value=question[0], fix=fix)


# -- mathematics --


@contract(reads="answer")
def marked_answer(response: str) -> str | None:
    """The number behind the last `####`, as gsm8k(method='strict') reads it; None without one."""
    return strict_number(response)


@contract(reads="answer")
def boxed_answer(response: str) -> str | None:
    r"""The text in the last `\boxed{}`; None without one."""
    text = last_boxed(response)
    return text.strip() or None if text is not None else None


def gsm8k(row: dict, *, instruction: str, solved: Solved) -> dict:
    """Reads {"question", "answer" with the number behind ####}. Raises InputError for another row,
    and for one that is among the exemplars."""
    fields = maps.gsm8k(row, 0, instruction=instruction)
    if not solved:
        return {"prompt": _asked(fields["prompt"]), "ground_truth": fields["ground_truth"]}
    _require_unseen(row, solved, ("question",))
    examples = [
        f"Question: {exemplar['question']}\nAnswer: {exemplar['answer']}" for exemplar in solved
    ]
    prompt = "\n\n".join([*examples, f"Question: {row['question']}\nAnswer:"])
    return {"prompt": prompt, "ground_truth": fields["ground_truth"]}


def boxed(row: dict, *, instruction: str) -> dict:
    """Reads {"problem", "answer"} and maybe "subject" and "level"."""
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    problem = maps.column(row, "problem")
    extra = {name: row[name] for name in ("subject", "level") if name in row}
    return {
        "prompt": _asked(f"{problem}\n{instruction}"),
        "ground_truth": maps.column({**row, "answer": answer}, "answer").strip(),
        **extra,
    }


def aime(row: dict, *, instruction: str) -> dict:
    r"""Reads {"problem" or "question", "answer"}, also with capitals, or a "solution" that is one
    `\boxed{}`. Raises InputError unless the answer is an integer from 0 to 999."""
    row = {name.lower(): value for name, value in row.items()}
    answer = row.get("answer")
    if "answer" not in row and isinstance(row.get("solution"), str):
        answer = last_boxed(row["solution"]) or row["solution"]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if "solution" not in row:
        _require_column(row, "answer", "rename the column that holds the answer to 'answer'")
    number = None if isinstance(answer, bool) else integer_of(str(answer).strip(" \n$"), 0, 999)
    if number is None:
        fix = "write the number alone in the column, or drop the row"
        raise InputError("column 'answer'", value=answer, rule="an integer from 0 to 999", fix=fix)
    problem = maps.column(
        row, "problem" if "problem" in row or "question" not in row else "question"
    )
    return {"prompt": _asked(f"{problem}\n{instruction}"), "ground_truth": str(number)}


# -- choice --


def mmlu_pro(row: dict, *, solved: Solved) -> dict:
    """Reads {"question", "options", "answer": a letter, "answer_index", "category"}. Raises
    InputError for another row, and for a category without an exemplar if there are some."""
    category, letter = maps.column(row, "category"), _choice(row)
    _require_unseen(row, solved, ("question", "options"))
    instruction = (
        f"The following are multiple choice questions (with answers) about {category}. Think step "
        'by step and then finish your answer with "the answer is (X)" where X is the correct '
        "letter choice."
    )
    examples = [
        f"{_question(exemplar)}{_worked(exemplar)}"
        for exemplar in solved
        if str(exemplar["category"]) == category
    ]
    if solved and not examples:
        fix = f"add an exemplar of {category!r} to the validation rows, or set shots=0"
        raise InputError("column 'category'", value=category, rule="no exemplar is of it", fix=fix)
    last = "Answer: Let's think step by step." if solved else "Answer:"
    text = "\n\n".join([instruction, *examples, f"{_question(row)}{last}"])
    prompt = text if solved else _asked(text.removesuffix("\nAnswer:"))
    return {"prompt": prompt, "ground_truth": letter, "category": category}


def _question(row: dict) -> str:
    options = row["options"]
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return "\n".join(["Question:", row["question"], "Options:", *lines, ""])


def _worked(row: dict) -> str:
    """The exemplar's own reasoning, which the data set has; else its answer."""
    reasoning = row.get("cot_content")
    if isinstance(reasoning, str) and reasoning.strip():
        return "Answer: " + reasoning.strip().removeprefix("A: ")
    return f"Answer: Let's think step by step. The answer is ({row['answer']})."


def _choice(row: dict) -> str:
    """The letter of the right option. Raises InputError."""
    maps.column(row, "question")
    fix = "give each row its options, a list of texts, in a column 'options'"
    _require_column(row, "options", fix)
    options = row["options"]
    texts = isinstance(options, list) and all(isinstance(text, str) for text in options)
    if not texts or not 2 <= len(options) <= len(LETTERS):
        raise InputError("column 'options'", value=options, rule="a list of 2 to 10 texts", fix=fix)
    letters = LETTERS[: len(options)]
    letter, index = row.get("answer"), row.get("answer_index")
    if letter is None and isinstance(index, int) and 0 <= index < len(options):
        letter = LETTERS[index]
    if not isinstance(letter, str) or letter not in letters or len(letter) != 1:
        rule = f"one of the letters {letters}"
        fix = "write the letter of the right option in 'answer', or its place in 'answer_index'"
        raise InputError("column 'answer'", value=letter, rule=rule, fix=fix)
    if index is not None and index != letters.index(letter):
        rule = f"the place of the answer {letter}, {letters.index(letter)}"
        fix = "correct one of the two columns, or leave 'answer_index' out"
        raise InputError("column 'answer_index'", value=index, rule=rule, fix=fix)
    return letter


# -- instructions --


def ifeval(row: dict) -> dict:
    """Reads {"prompt", "instruction_id_list", "kwargs"}. Raises InputError for instructions that
    are not IFEval's."""
    prompt = maps.column(row, "prompt")
    truth = {name: row.get(name) for name in ("instruction_id_list", "kwargs")}
    for name in truth:
        fix = "give the rows of google/IFEval, with their instruction_id_list and kwargs"
        _require_column(row, name, fix)
    try:
        instructions = read_instructions(truth)
    except ValueError as error:
        rule, fix = str(error), "correct the two columns of this row, or drop it"
        raise InputError("columns 'instruction_id_list' and 'kwargs'", rule=rule, fix=fix) from None
    names, arguments = zip(*instructions, strict=True)
    truth = {"instruction_id_list": list(names), "kwargs": list(arguments)}
    return {"prompt": _asked(prompt), "ground_truth": truth}


# -- programs --

_LCB_SYSTEM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
)
_LCB_STARTER = (
    "### Format: You will use the following starter code to write the solution to the problem and "
    "enclose your code within delimiters.\n```python\n{starter}\n```"
)
_LCB_STDIN = (
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do "
    "not directly test on the sample inputs). Enclose your code within delimiters as follows. "
    "Ensure that when the python program runs, it reads the inputs, runs the algorithm and writes "
    "output to STDOUT.\n```python\n# YOUR CODE HERE\n```"
)


def check_day(name: str, day: str) -> None:
    """Raises InputError unless `day` is a date such as "2024-08-01", or ""."""
    try:
        if day:
            datetime.date.fromisoformat(day)
    except ValueError as error:
        raise InputError(name, value=day, rule=str(error), fix=f"{name}='2024-08-01'") from None


def livecodebench(row: dict, *, start: str, end: str) -> dict | None:
    """Reads {"question_content", "public_test_cases"} and maybe "private_test_cases",
    "starter_code", "metadata", "difficulty"; None for a contest before the day `start` or after
    `end`. Raises InputError for tests that are missing or of two kinds, and for a row without a
    date if days are given."""
    question = maps.column(row, "question_content")
    if start or end:
        day = str(row.get("contest_date") or "")[:10]
        check_day("column 'contest_date'", day)
        if not day:
            fix = "leave start and end out, or drop the rows without a date"
            raise InputError("lacks a contest_date", rule="start and end compare it", fix=fix)
        if (start and day < start) or (end and day > end):
            return None
    tests = _test_cases(row, "public_test_cases") + _test_cases(row, "private_test_cases")
    if not tests:
        problem = "column 'public_test_cases' holds no test"
        fix = "drop the row, or give it a test"
        raise InputError(problem, value=row["public_test_cases"], fix=fix)
    kinds = {test["testtype"] for test in tests}
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        rule = "all stdin, or all functional"
        fix = "drop the row, or give all its tests one testtype"
        raise InputError("testtype", value=sorted(kinds), rule=rule, fix=fix)
    truth = {name: [test[key] for test in tests] for name, key in _LCB_TESTS}
    if kinds == {"functional"}:
        truth |= {"fn_name": _function_name(row), "wrapped": False}
    starter = row.get("starter_code") or ""
    form = _LCB_STARTER.format(starter=starter) if starter else _LCB_STDIN
    answer = "### Answer: (use the provided format with backticks)"
    text = f"### Question:\n{question}\n\n{form}\n\n{answer}\n\n"
    prompt = [{"role": "system", "content": _LCB_SYSTEM}, *_asked(text)]
    extra = {"difficulty": row["difficulty"]} if row.get("difficulty") else {}
    return {"prompt": prompt, "ground_truth": truth, **extra}


_LCB_TESTS = (("inputs", "input"), ("outputs", "output"))


def _function_name(row: dict) -> str:
    """func_name of the metadata, else the method of the starter code."""
    metadata = row.get("metadata") or {}
    try:
        metadata = (
            parse_json(metadata, "column 'metadata'") if isinstance(metadata, str) else metadata
        )
    except InputError as error:
        fix = 'write a JSON object in the column, such as {"func_name": "solve"}'
        raise InputError(error.parts[0], fix=fix) from None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    methods = re.findall(r"def\s+(\w+)\s*\(\s*self", row.get("starter_code") or "")
    if not (name or methods):
        fix = 'write the name that tests call, such as {"func_name": "solve"}'
        raise InputError("column 'metadata' has no func_name", value=metadata, fix=fix)
    return name or methods[-1]


class _Plain(pickle.Unpickler):
    """Reads texts and lists alone: a pickle that names a class or a function could run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it holds {module}.{name}, and only texts are read")


def _test_cases(row: dict, name: str) -> list[dict]:
    """The tests of a column: JSON, or as the data set packs its private ones, base64 of zlib of a
    pickled JSON text."""
    if name not in row:
        if name == "private_test_cases":
            return []
        fix = "give the rows of livecodebench/code_generation_lite, with their test cases"
        _require_column(row, name, fix)
    value = row[name] or []
    location = f"column {name!r}"
    try:
        if isinstance(value, str) and not value.lstrip().startswith("["):
            with strangers_bytes(location):
                unpacker = zlib.decompressobj()
                raw = unpacker.decompress(base64.b64decode(value, validate=True), _MOST_TESTS)
                if unpacker.unconsumed_tail:
                    raise ValueError(f"more than {_MOST_TESTS} bytes")
                value = _Plain(io.BytesIO(raw)).load()
        value = parse_json(value, location) if isinstance(value, str | bytes) else value
    except InputError as error:
        fix = "download the file again, or write the tests as JSON text"
        raise InputError(f"{location} cannot be read", rule=error.parts[0], fix=fix) from None
    valid = isinstance(value, list) and all(
        isinstance(test, dict)
        and all(isinstance(test.get(key), str) for key in ("input", "output", "testtype"))
        for test in value
    )
    if not valid:
        rule = 'a list of {"input": text, "output": text, "testtype": "stdin" or "functional"}'
        fix = "correct the tests of this row, or drop it"
        raise InputError(f"column {name!r}", value=row[name], rule=rule, fix=fix)
    return value


def pinned(data: str) -> str:
    """A spec of the hub with the commit that was read; any other spec as it is."""
    return hub.pinned(data) if hub.is_hub(data) else data
