"""Search as decoding: a method, named in a config as text, looks ahead from every sentence of a
batch and says which token comes next. `rljax.sampler.generate` calls a `Search` in place of
sampling.

tree: the arrays of a tree and its pure functions. evaluators: what a search asks of its models.
mcts: tree search. lines: beams, best of n, lookahead. problem: what a method gets and returns.
"""

from rljax.search.evaluators import Evaluation, Evaluator, Forked, Leaves, Value
from rljax.search.lines import beam, best_of_n, lookahead
from rljax.search.mcts import mcts
from rljax.search.problem import Search, SearchedResponse, SearchProblem

__all__ = [
    "Evaluation",
    "Evaluator",
    "Forked",
    "Leaves",
    "SearchedResponse",
    "Search",
    "SearchProblem",
    "Value",
    "beam",
    "best_of_n",
    "lookahead",
    "mcts",
]
