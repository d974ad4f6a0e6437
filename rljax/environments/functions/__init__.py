"""The tools that rljax has, by name: `tools(functions=("python()", "search(corpus=...)"))`."""

from rljax.environments.functions.calculator import calc
from rljax.environments.functions.python_tool import python
from rljax.environments.functions.search_tool import search

__all__ = ["calc", "python", "search"]
