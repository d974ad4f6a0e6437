"""The tool `calc`: numbers with + - * / and brackets."""

import ast
import operator

from rljax.contracts import contract

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MOST = 10.0**15  # beyond which a float is no longer exact in whole numbers
_LONGEST = 200  # characters


@contract(safe=True)
def calc(expression: str) -> str:
    """Calculates an expression of numbers with + - * / and brackets.

    Args:
        expression: such as "(3 + 4) * 12"
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an expression: {expression[:40]!r}") from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if right == 0 and isinstance(node.op, ast.Div):
            raise ValueError("division by zero")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / and brackets")
    if abs(value) > _MOST:
        raise ValueError("a number beyond 10^15")
    return value
