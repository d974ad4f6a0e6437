"""Scores of reasoning-gym's data sets (the extra `[tasks]`).

The reward, the JSON form of an entry, and the guard before scorers that would run a response as
Python. The problems are rljax.tasks.gym.

Four of the library's scorers call `eval` on the answer, and five hand it to sympy's parser, which
does: a response is untrusted, so the first get `ast.literal_eval` and the others see only what can
be read as an algebraic expression.
"""

import ast
import functools
import json
import math
import re
import sys

from rljax.contracts import PlainText, contract
from rljax.errors import InputError
from rljax.rewards.answers.find import tagged

# Whose scorers call sympy.parse_expr, of answers and of what the entry says.
_ALGEBRA = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
_FUNCTIONS = frozenset(
    "sqrt cbrt exp log ln sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh "
    "atanh Abs abs pi oo erf Rational".split()
)
_MAX_CHARACTERS = 2000
_MOST = 1000  # digits of a number, terms of a sum


@functools.cache
def load_library():
    """The module reasoning_gym. Raises InputError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise InputError(
            "the package reasoning_gym is not installed", fix="pip install 'reasoning-gym>=0.1.25'"
        ) from None
    return reasoning_gym


def packed(name: str, config: dict, entry: dict) -> str:
    """The ground truth of an entry: JSON that `reasoning_gym_score` reads, tuples kept as such."""
    return json.dumps({"dataset": name, "config": _packed(config), "entry": _packed(entry)})


def _packed(value: object) -> object:
    """Returns the value in JSON's types; a tuple, and an object whose keys are no texts,
    become tagged lists."""
    if isinstance(value, tuple):
        return {"()": [_packed(item) for item in value]}
    if isinstance(value, dict):
        items = [[_packed(key), _packed(item)] for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and not {*value} & {"()", "{}"}:
            return dict(items)
        return {"{}": items}
    if isinstance(value, list):
        return [_packed(item) for item in value]
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    if hasattr(value, "tolist"):  # numpy's
        return _packed(value.tolist())
    return str(value)  # enums, dates: scorers read the entry's texts


def _unpacked(value: object) -> object:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"()"}:
        return tuple(_unpacked(item) for item in value["()"])
    if set(value) == {"{}"}:
        return {_unpacked(key): _unpacked(item) for key, item in value["{}"]}
    return {key: _unpacked(item) for key, item in value.items()}


@functools.lru_cache(maxsize=64)
def _scorer(name: str, config: str):
    """Returns score_answer(answer, entry) of a data set with this config."""
    library = load_library()
    dataset = library.create_dataset(name, seed=0, size=1, **_unpacked(json.loads(config)))
    # Scorers call eval on answers, and on texts of the entry: theirs reads values alone.
    vars(sys.modules[type(dataset).__module__])["eval"] = _value_of
    return dataset.score_answer


def _value_of(text: str) -> object:
    """The value of a literal, or of whole numbers with operators."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        if not re.fullmatch(r"[0-9a-fA-FxX\s+\-*/%&|^~<>()]{1,500}", text) or "**" in text:
            raise
        tree = ast.parse(text.strip(), mode="eval")
        allowed = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
        if not all(isinstance(node, allowed) for node in ast.walk(tree)):
            raise
        shifts = [
            node.right
            for node in ast.walk(tree)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift)
        ]
        if any(not isinstance(by, ast.Constant) or by.value > 4096 for by in shifts):
            raise
        return eval(compile(tree, "<entry>", "eval"), {"__builtins__": {}})


def _check_entry(name: str, entry: dict) -> None:
    """Raises ValueError for an entry of which the scorer would run a text as code."""
    metadata = entry.get("metadata")
    integrand = metadata.get("integrand") if isinstance(metadata, dict) else None
    for text in (entry.get("answer"), integrand) if name in _ALGEBRA else ():
        if isinstance(text, str) and not _reaches_nothing(text, _FUNCTIONS | {"Integral"}):
            raise ValueError(f"the entry holds {text!r:.80}, which is no expression")


def is_algebra(text: str) -> bool:
    """Returns whether a text is safe to hand to sympy's parser: numbers, single letters, operators,
    and calls of elementary functions; nothing that names, quotes or reaches anything else."""
    return _reaches_nothing(text) and is_bounded(text)


def _reaches_nothing(text: str, functions: frozenset[str] = _FUNCTIONS) -> bool:
    """Returns whether a text holds numbers, letters, operators and elementary functions alone."""
    if len(text) > _MAX_CHARACTERS or not re.fullmatch(r"[0-9A-Za-z\s.,+\-*/^()=]*", text):
        return False
    if re.search(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.", text):  # attributes
        return False
    names = re.findall(r"[A-Za-z]+", text)
    return all(len(name) == 1 or name in functions for name in names)


def is_bounded(text: str) -> bool:
    """Returns whether sympy can work the expression out: no number of more than 1,000 digits, no
    more than 1,000 terms once it is multiplied out, no functions four deep. Text that is no
    expression is bounded."""
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
        _size(tree.body)
    except (SyntaxError, MemoryError):
        return True  # sympy reads no more than Python does
    except (RecursionError, OverflowError):
        return False
    return True


def _size(node: ast.AST) -> tuple[float, float, int]:
    """Returns (digits of its numbers, terms once it is multiplied out, depth to which functions are
    nested). Raises OverflowError above the limits."""
    inner = [_size(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    digits, terms, depth = (max((part[i] for part in inner), default=1) for i in range(3))
    if isinstance(node, ast.Constant):
        digits, depth = len(str(node.value)), 0
    elif isinstance(node, ast.Call):
        terms, depth = 1, depth + 1
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        symbols = any(isinstance(part, ast.Name) for part in ast.walk(node.right))
        power = 1.0 if symbols else 10.0 ** min(inner[1][0], 300.0)
        power = float(node.right.value) if isinstance(node.right, ast.Constant) else power
        several = any(isinstance(part, ast.Name) for part in ast.walk(node.left))
        digits = max(inner[1][0], inner[0][0] * power)
        if inner[0][1] > 1 and several:
            if power > _MOST:
                raise OverflowError
            terms = math.comb(int(power + inner[0][1]) - 1, int(inner[0][1]) - 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        digits, terms = digits + 1, inner[0][1] + inner[1][1]
    elif isinstance(node, ast.BinOp):
        digits, terms = inner[0][0] + inner[1][0], inner[0][1] * inner[1][1]
    if max(digits, terms) > _MOST or depth > 4:
        raise OverflowError
    return digits, terms, depth


def is_answer(name: str, text: str) -> bool:
    """Returns whether the data set's scorer may read this text."""
    return name not in _ALGEBRA or is_algebra(text)


# The library takes seconds to import, which the deadline of the first sample does not have.
@contract(
    reads="answer",
    on_timeout=0.0,
    truth="specification",
    prepare=lambda options: lambda: load_library(),
)
def reasoning_gym_score(response: str, ground_truth: str, *, tag: PlainText = "answer") -> dict:
    """The data set's own score, 0 to 1, of what the last <answer>...</answer> holds (`tag`).

    A response without the tag scores what the data set gives for no answer, most often 0. Parts:
    answered, refused (an answer that its scorer would have run as code, which scores 0). Raises
    ValueError for a ground truth that is no entry of a data set.
    """
    try:
        parsed = json.loads(ground_truth)
        name, entry = parsed["dataset"], _unpacked(parsed["entry"])
        _check_entry(name, entry)
        score_answer = _scorer(name, json.dumps(parsed["config"], sort_keys=True))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise ValueError(
            f"ground_truth {ground_truth!r:.80} is not an entry of reasoning_gym"
        ) from error
    answer = tagged(response, tag, closed=False)
    if answer is not None and not is_answer(name, answer):
        return {"score": 0.0, "answered": 1.0, "refused": 1.0}
    try:
        score = float(score_answer(answer, entry))
    except Exception:
        # Some scorers raise on what they cannot parse: that is a wrong answer. One that raises on
        # its own answer is at fault itself.
        score_answer(entry["answer"], entry)
        score = 0.0
    return {"score": score, "answered": float(answer is not None), "refused": 0.0}
