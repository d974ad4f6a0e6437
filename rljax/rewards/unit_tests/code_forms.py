"""Forms of unit tests: reads them from a ground truth, compares outputs, counts results.

Also the program of a response. Running it is `code_run`.

A ground truth is JSON (text, or the object itself) of one of these forms:
  {"inputs": [...], "outputs": [...]}              stdin and stdout (APPS, TACO, PrimeCode, verl)
  {"inputs": [...], "outputs": [...], "fn_name"}   a function, or a method of class Solution; with
                                                   "wrapped": true each output stands in a list
  {"asserts": [...], "setup": "..."}               statements; also a plain list of them, or the
                                                   names test_list (MBPP) and assert_case
  {"test": "...", "entry_point": "..."}            HumanEval: the test defines check(candidate);
                                                   without check, each assert at its top level
In statements and in a test, functions test_... with their fixtures and parameters (pytest; KodCode,
where `solution` is the program) and classes of unittest (BigCodeBench) are tests, one for each
function. What asserts nothing is part of the test behind it, and where nothing asserts, as in a
check(candidate) without entry_point, that is an error.
"""

import ast
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rljax.errors import InputError
from rljax.rewards.sandbox.values import encode
from rljax.rewards.unit_tests.code_cases import Definitions, cases_in, names_of, prepare

Scale = Literal["signed", "binary", "fraction"]
Compare = Literal["lines", "tokens", "exact"]


@dataclass(frozen=True)
class CaseResult:
    """The result of one test. status: passed, failed (a wrong output or a false assert), error (it
    raised), timeout, memory, output (too much of it) or killed. Every status but passed counts as a
    failed test."""

    status: str
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Tests:
    """The tests of one ground truth, by `kind`. stdin: texts in, texts out. calls: argument lists
    and values of `function`. asserts: statements over the program's `names`, after `setup`;
    `modules` of the tests are the program, too."""

    kind: str
    inputs: tuple = ()
    outputs: tuple = ()
    function: str = ""
    setup: str = ""
    wrapped: bool | None = None  # whether each value stands in a list of one; None: it may
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)


def unit_test_score(passed: Sequence[bool], scale: Scale = "signed") -> float:
    """The reward for the results of tests. signed: +1 if all passed, else -1; binary: 1 or 0;
    fraction: the share that passed. Raises InputError for an unknown scale, and without results:
    nothing was tested."""
    if scale not in ("signed", "binary", "fraction"):
        raise InputError("unit tests: scale", value=scale, fix="write signed, binary or fraction")
    if len(passed) == 0:
        raise InputError(
            "unit tests: there are none",
            rule="an empty list of tests passes nothing",
            fix="give each row a test, or drop the row",
        )
    share = sum(map(bool, passed)) / len(passed)
    if scale == "fraction":
        return share
    return 1.0 if share == 1.0 else (-1.0 if scale == "signed" else 0.0)


# -- the tests


def read_tests(ground_truth: str | dict | list) -> Tests:
    """Returns the tests that a ground truth holds. Raises InputError for any other form, for one
    without tests, and for some that would pass every program."""
    value = ground_truth
    try:
        for _ in range(2):  # some data sets store JSON in JSON
            value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _no_tests(ground_truth, f"it is no JSON: {error}") from None
    if isinstance(value, list):
        value = {"asserts": value}
    if not isinstance(value, dict):
        raise _no_tests(ground_truth, "it is neither an object nor a list")
    if value.get("inputs") is not None or value.get("outputs") is not None:
        tests = _input_output(value, ground_truth)
    else:
        try:
            tests = _python(value, ground_truth)
        except RecursionError:
            raise _no_tests(ground_truth, "a test is nested too deeply") from None
    if not tests:
        raise _no_tests(ground_truth, "the list of tests is empty")
    return tests


def _no_tests(ground_truth: object, reason: str) -> InputError:
    return InputError(
        "a ground truth holds no unit tests",
        value=ground_truth,
        rule=reason,
        fix='write {"inputs": [...], "outputs": [...]}, {"asserts": [...]} or '
        '{"test": "def check(candidate): ...", "entry_point": "name"}; call what '
        "tests, or name it test_...",
    )


def _input_output(fields: dict, ground_truth: object) -> Tests:
    inputs, outputs = fields.get("inputs"), fields.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise _no_tests(ground_truth, "inputs and outputs are lists")
    if len(inputs) != len(outputs):
        raise _no_tests(ground_truth, f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = fields.get("fn_name")
    if not name:
        return Tests("stdin", tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    try:
        arguments = [_arguments(value) for value in inputs]
        values = [
            json.loads(value) if isinstance(argument, str) and isinstance(value, str) else value
            for argument, value in zip(inputs, outputs, strict=True)
        ]
    except ValueError as error:
        raise _no_tests(ground_truth, f"an input of {name} is no JSON: {error}") from None
    name = str(name).rpartition(".")[2]
    return Tests("calls", tuple(arguments), tuple(values), name, wrapped=_wrapped(fields, values))


def _text(value: object) -> str:
    """Returns a text, or a list of lines as a text."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _arguments(value: object) -> list:
    """Returns a list of arguments; a text holds one of them per line, as JSON (LiveCodeBench)."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    return value if isinstance(value, list) else [value]


def _python(value: dict, ground_truth: object) -> Tests:
    if value.get("test") and isinstance(value["test"], str):
        return _statements([value["test"]], value, ground_truth, parted=True)
    fields = ("asserts", "test_list", "assert_case", "test")
    name = next((n for n in fields if value.get(n) is not None), None)
    if name is None:
        raise _no_tests(ground_truth, f"it has {sorted(map(str, value))}")
    statements = value[name]
    if not isinstance(statements, list) or not all(isinstance(s, str) for s in statements):
        raise _no_tests(ground_truth, f"{name} is a list of statements")
    return _statements(statements, value, ground_truth, parted=False)


def _statements(texts: list[str], value: dict, ground_truth: object, *, parted: bool) -> Tests:
    """Returns texts of Python as tests: each text that asserts, or with `parted` each
    assert at its top level, and each test function. HumanEval's check is one test, of the
    function `entry_point`."""
    imports = value.get("test_imports") or []
    setup = "\n".join([*imports, value.get("setup") or value.get("test_setup_code") or ""])
    function = str(value.get("fn_name") or value.get("entry_point") or "")
    parsed = [_parse(text, ground_truth).body for text in (setup, *texts)]
    definitions = Definitions(list(itertools.chain(*parsed)))
    (setup_body, changed), *prepared = [prepare(body, definitions) for body in parsed]
    setup = _source(setup_body) if changed else setup
    statements = list(itertools.chain(*(body for body, _ in prepared)))
    called = definitions.called_by(statements)
    units: list[tuple[str, bool]] = []  # source, and whether it asserts
    for text, (body, changed) in zip(texts, prepared, strict=True):
        text = _source(body) if changed else text
        if function and any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in body):
            if "check" not in called:
                text = f"{text}\ncheck({function})\n"
                body = ast.parse(text).body
            units.append((text, definitions.assert_in(body)))
        elif parted:
            units += [(_source(g), definitions.assert_in(g)) for g in _up_to_each_assert(body)]
        else:
            units.append((text, definitions.assert_in(body)))
    cases = cases_in(setup_body, statements, definitions, called)
    if not any(asserts for _, asserts in units):
        setup = "\n".join([setup, *(text for text, _ in units)])
        units = []
    units += [(case.source, case.asserts) for case in cases]
    tests = _with_what_asserts(units)
    if texts and not tests:
        uncalled = ", ".join(definitions.uncalled(statements, called))
        rule = f"nothing calls {uncalled}" if uncalled else "nothing in it asserts"
        raise _no_tests(ground_truth, rule)
    try:
        names, modules = names_of((setup, *tests), function)
    except SyntaxError as error:
        raise _no_tests(ground_truth, f"a test is no Python: {error}") from None
    if tests and not names:
        raise _no_tests(ground_truth, "no test uses a name of the program")
    return Tests(
        "asserts",
        tuple(tests),
        function=function,
        setup=setup,
        names=tuple(names),
        modules=tuple(modules),
    )


def _source(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(body, []))


def _up_to_each_assert(body: list[ast.stmt]) -> list[list[ast.stmt]]:
    groups: list[list[ast.stmt]] = [[]]
    for statement in body:
        groups[-1].append(statement)
        if isinstance(statement, ast.Assert):
            groups.append([])
    if len(groups) > 1 and groups[-1]:  # statements after the last assert belong to it
        trailing = groups.pop()
        groups[-1] += trailing
    return [group for group in groups if group]


def _with_what_asserts(units: list[tuple[str, bool]]) -> list[str]:
    """Returns the sources of units that assert, each preceded by those before it that do not."""
    tests: list[str] = []
    waiting: list[str] = []
    for source, asserts in units:
        waiting.append(source)
        if asserts:
            tests.append("\n".join(waiting))
            waiting = []
    if tests and waiting:
        tests[-1] = "\n".join([tests[-1], *waiting])
    return tests


def _parse(source: str, ground_truth: object) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _no_tests(ground_truth, f"a test is no Python: {error}") from None


# -- the program

# A fence at the start of a line; the language is all that stands behind it. Possessive repeats: a
# line of one letter behind ``` would otherwise be tried at every length.
_FENCE = re.compile(
    r"^([ \t]*+)```[ \t]*+([\w+#.-]*+)[^\n`]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("python", "py", "python3")


def extract_program(
    response: str, prefix: str = "", entry_point: str = "", language: str = "python"
) -> str:
    """The program of a response: its last fence of the language, or all of it without a fence.

    The last fence named by the language (python, py or python3) comes before one without a name;
    one that is not closed runs to the end; the indentation of a fence is taken off its lines.
    `prefix` (HumanEval's prompt) goes before a program that does not itself define `entry_point`;
    before one that does, only what stands above the definition in it: imports and helpers.
    """
    fences = [
        (m[2].lower(), "\n".join(line.removeprefix(m[1]) for line in m[3].split("\n")))
        for m in _FENCE.finditer(response)
    ]
    names = _PYTHON if language == "python" else (language.lower(),)
    named_fences = [text for name, text in fences if name in names]
    unnamed = [text for name, text in fences if not name]
    program = (named_fences or unnamed or [response])[-1]
    if prefix:
        defined = rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b" if entry_point else r"^def\s"
        if re.search(defined, program, re.MULTILINE):
            above = re.split(defined, prefix, maxsplit=1, flags=re.MULTILINE)[0]
            prefix = f"{above}\n" if above != prefix else ""
        program = f"{prefix}{program}"
    return program


def has_fence(response: str) -> bool:
    """Returns whether a fence of Python, or one without a name, stands in the response."""
    return any(m[2].lower() in ("", *_PYTHON) for m in _FENCE.finditer(response))


# -- comparing


def same_output(output: str, expected: str, compare: Compare = "lines", tolerance: float = 0.0):
    r"""Returns whether stdout is the expected text.

    exact: every character. lines: line by line, parted by \n alone, without the blanks at both
    ends of a line, blank lines at both ends of the text left out. tokens: split at any blank.
    With `tolerance` > 0, two tokens are also equal if both are finite numbers and |a - b| <=
    tolerance * max(1, |b|), b the expected one; lines must then have equally many tokens. exact
    takes no tolerance.
    """
    if compare == "exact":
        return output == expected
    if compare == "tokens":
        return _same_tokens(output.split(), expected.split(), tolerance)
    actual, expected_lines = (
        [line.strip() for line in text.strip().split("\n")] for text in (output, expected)
    )
    return len(actual) == len(expected_lines) and all(
        a == b or (tolerance > 0 and _same_tokens(a.split(), b.split(), tolerance))
        for a, b in zip(actual, expected_lines, strict=True)
    )


def _same_tokens(output: list[str], expected: list[str], tolerance: float) -> bool:
    return len(output) == len(expected) and all(
        a == b or (tolerance > 0 and _close(a, b, tolerance))
        for a, b in zip(output, expected, strict=True)
    )


def _close(output: str | float, expected: str | float, tolerance: float) -> bool:
    try:
        a, b = float(output), float(expected)
    except (ValueError, OverflowError):
        return False
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))


def same_value(data: object, expected: object, tolerance: float = 0.0) -> bool:
    """Returns whether a returned value is the expected JSON: a tuple counts as its list, a key of a
    dict that is a number, a truth value or None as its text; floats within `tolerance` as in
    `same_output`.

    `data` is the value as `rljax.rewards.sandbox.values.encode` writes it. Nothing is built from
    it: the work is bounded by the size of what is expected, whatever a program sent.
    """
    tag, content = _tag_of(data)
    if isinstance(expected, list | tuple):
        return tag in ("list", "tuple") and _all_same(content, expected, tolerance)
    if isinstance(expected, dict):
        if tag != "dict" or not isinstance(content, list) or len(content) != len(expected):
            return False
        items = {}
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                return False
            items[_key(pair[0])] = pair[1]
        # Two keys of one text, 1 and "1", are two keys: one of the expected is then missing.
        expected_items = {_key(encode(key)): value for key, value in expected.items()}
        return items.keys() == expected_items.keys() and all(
            same_value(items[key], expected_items[key], tolerance) for key in expected_items
        )
    if isinstance(expected, int | float):
        value = _number(tag, content)
        if value is None:
            return False
        if tolerance > 0 and float in (type(value), type(expected)):
            return _close(value, expected, tolerance)
        return value == expected
    return tag == "plain" and type(content) is type(expected) and content == expected


def _all_same(content: object, expected: Sequence, tolerance: float) -> bool:
    return (
        isinstance(content, list)
        and len(content) == len(expected)
        and all(same_value(a, b, tolerance) for a, b in zip(content, expected, strict=True))
    )


def _tag_of(data: object) -> tuple[str, object]:
    """Returns (kind, content) of an encoded value; the kind is "plain" for a value
    that JSON has itself."""
    if isinstance(data, list):
        return "list", data
    if not isinstance(data, dict):
        return "plain", data
    return str(data.get("t")), data.get("v")


def _number(tag: str, content: object) -> int | float | None:
    try:
        if tag == "int" and isinstance(content, str):
            return int(content, 16)
        if tag == "float" and isinstance(content, str):
            return float.fromhex(content)
    except (ValueError, OverflowError):
        return None
    return content if tag == "plain" and isinstance(content, int | float) else None


def _wrapped(fields: dict, values: Sequence) -> bool | None:
    """Returns whether the values of calls stand in lists of one, as APPS wraps them, by the field
    `wrapped`. Without the field, values that are JSON texts are not wrapped, and all values of a
    set have one form; if each value is such a list, the form is not known: None."""
    declared = fields.get("wrapped")
    if isinstance(declared, bool):
        return declared
    is_bare = any(isinstance(value, str) for value in fields["outputs"])
    is_bare = is_bare or not all(isinstance(value, list) and len(value) == 1 for value in values)
    return False if is_bare else None


def readings(tests: Tests, data: object, expected: object, same) -> set[str]:
    """Returns the readings of the tests in which a returned value is right: "list" if the value is
    right as it stands, "bare" if it is right as the only item of a list. A program must be right in
    one of them throughout."""
    matching = {"list"} if tests.wrapped is not True and same(data, expected) else set()
    if tests.wrapped is not False and isinstance(expected, list) and len(expected) == 1:
        matching |= {"bare"} if same(data, expected[0]) else set()
    return matching


def _key(data: object) -> str | None:
    """Returns the text of an encoded key, as JSON writes keys; None for a key that
    JSON does not have."""
    tag, content = _tag_of(data)
    if tag == "plain" and isinstance(content, str):
        return content
    if tag == "plain" and (content is None or isinstance(content, bool)):
        return json.dumps(content)
    number = _number(tag, content)
    try:
        return None if number is None else json.dumps(number)
    except ValueError:  # an integer of thousands of digits
        return None
