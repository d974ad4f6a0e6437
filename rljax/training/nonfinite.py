"""Finds the operation that made the first number that is not finite, among those that reach
a result.

A function is traced and then computed operation by operation on the devices. `jax_debug_nans` stops
at the first NaN anywhere, even if a mask removes it on the next line, treats a whole loop as one
operation, and does not see an infinity. Here a NaN counts only if it reaches the result that is
asked about, and loops are entered.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.source_info_util import summarize

from rljax.arrays import fetch

NAN, INF = "NaN", "infinity"
FRAMES = 4  # lines of the user's code that are shown of an operation
HERE = 2**20  # numbers of an array that is brought to the host to be looked at


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that made a number that is not finite."""

    order: int
    kind: str  # NaN or infinity
    operation: str  # the primitive, or the input
    location: str = ""  # file:line (function), the innermost first
    loops: str = ""  # "iteration 2 of 4 at ...": the loops around it
    count: str = ""  # "3 of 64 numbers, the first at [2, 5]"
    operands: tuple[str, ...] = ()
    cause: "Origin | None" = None  # of a NaN that was made of infinities: where those were made

    def lines(self) -> list[str]:
        """Returns a description for people, in the order of the operations."""
        causes = [] if self.cause is None else [*self.cause.lines(), "and of that"]
        out = [*causes, f"{self.operation} made {self.kind}: {self.count}"]
        out += [f"  at {location}" for location in self.location.splitlines()]
        out += [f"  inside {self.loops}"] if self.loops else []
        return out + [f"  operand {i}: {text}" for i, text in enumerate(self.operands, 1)]


# The origins of the NaNs and of the infinities of a value; for an integer or a mask, the origin of
# the number whose finiteness it tells. {} if it has none.
Marks = dict[str, Origin]


def trace(function: Callable, *arguments, names: Sequence[str] = ()) -> tuple:
    """Computes function(*arguments) operation by operation; returns (its result, the same tree
    with the Marks of each leaf). `names` of the arguments describe numbers that are not finite in
    the inputs."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    paths = jax.tree_util.tree_flatten_with_path(arguments)[0]
    leaves = [leaf for _, leaf in paths]
    walk = _Walk()
    marks = []
    for path, leaf in paths:
        name = names[path[0].idx] if names else f"argument {path[0].idx}"
        text = f"the input {name}{jax.tree_util.keystr(path[1:])}"
        marks.append(walk.found(leaf, text) if _is_float(leaf) else {})
    values, out = walk.run(closed.jaxpr, closed.consts, leaves, marks, ())
    structure = jax.tree.structure(shapes)
    return structure.unflatten(values), structure.unflatten(out)


class _Walk:
    """One evaluation of a jaxpr with marks beside its values."""

    def __init__(self):
        self.made = 0  # origins so far: their order

    def run(self, jaxpr, consts, arguments, marks, loops: tuple[str, ...]):
        """(values, Marks) of the outputs."""
        env = dict(zip(jaxpr.invars, zip(arguments, marks, strict=True), strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value, self.constant(value)
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
        outputs = {v for v in jaxpr.outvars if _is_var(v)}

        def read(atom):
            return env[atom] if _is_var(atom) else (atom.val, self.constant(atom.val))

        for i, eqn in enumerate(jaxpr.eqns):
            values, input_marks = (
                zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
            )
            outs, out_marks = self.equation(eqn, values, input_marks, loops)
            env.update(zip(eqn.outvars, zip(outs, out_marks, strict=True), strict=True))
            for var in {v for v in (*eqn.invars, *eqn.outvars) if _is_var(v)} - outputs:
                if last.get(var, i) <= i:  # as in the program, values that nothing reads are freed
                    env.pop(var, None)
        pairs = [read(v) for v in jaxpr.outvars]
        return [value for value, _ in pairs], [mark for _, mark in pairs]

    def constant(self, value) -> Marks:
        return self.found(value, "a constant") if _is_float(value) else {}

    def equation(self, eqn, values, marks, loops):
        """Returns (values, Marks) of one operation. An operation with others inside is computed as
        a whole first, and entered only where that leaves something to find."""
        enter = _INSIDE.get(eqn.primitive.name)
        if enter is None or not _tells_finiteness(eqn):
            outs = _bind(eqn, values)
            if enter is None or all(_all_finite(x) for x in outs):
                return outs, [self.marks_of(eqn, x, values, marks, loops) for x in outs]
        return enter(self, eqn, values, marks, loops)

    def marks_of(self, eqn, out, values, marks, loops) -> Marks:
        if not _is_float(out):
            if eqn.primitive.name == "is_finite":
                return {} if bool(fetch(out).all()) else _earliest(marks, (NAN, INF))
            # Comparing floats does not pass on their marks: masks compare with -inf.
            pairs = zip(values, marks, strict=True)
            return _earliest([mark for x, mark in pairs if not _is_float(x)], (NAN, INF))
        floats = [mark for x, mark in zip(values, marks, strict=True) if _is_float(x)]
        out_marks: Marks = {}
        for kind in _kinds(out):
            kind_marks = _earliest(floats, (kind,))
            if not kind_marks:
                cause = _earliest(floats, (INF,)).get(INF) if kind == NAN else None
                kind_marks = {kind: self.origin(eqn, kind, out, values, loops, cause)}
            out_marks |= kind_marks
        return out_marks

    def origin(self, eqn, kind, out, values, loops, cause) -> Origin:
        self.made += 1
        index = _index(out, kind)
        operands = tuple(_operand(x, np.shape(out), index) for x in values)
        return Origin(
            self.made,
            kind,
            eqn.primitive.name,
            summarize(eqn.source_info, num_frames=FRAMES),
            ", ".join(loops),
            _count(out, kind),
            operands,
            cause,
        )

    def found(self, value, text: str) -> Marks:
        """Returns the marks of a value that no operation here has computed, such as an input."""
        marks = {}
        for kind in _kinds(value):
            self.made += 1
            marks[kind] = Origin(self.made, kind, text, count=_count(value, kind))
        return marks

    # -- operations that have others inside --

    def call(self, eqn, values, marks, loops):
        names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
        inner = next(eqn.params[name] for name in names if name in eqn.params)
        closed = isinstance(inner, core.ClosedJaxpr)
        jaxpr, consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
        return self.run(jaxpr, consts, values, marks, loops)

    def cond(self, eqn, values, marks, loops):
        branches = eqn.params["branches"]
        branch = branches[min(max(int(fetch(values[0])), 0), len(branches) - 1)]
        return self.run(branch.jaxpr, branch.consts, values[1:], marks[1:], loops)

    def while_loop(self, eqn, values, marks, loops):
        params = eqn.params
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry, carried = list(values[b:]), list(marks[b:])
        iteration = 0
        while bool(jax.jit(core.jaxpr_as_fun(test))(*values[:a], *carry)[0]):
            iteration += 1
            inner_loops = (
                *loops,
                f"iteration {iteration} of the loop at {summarize(eqn.source_info)}",
            )
            carry, carried = self.run(
                body.jaxpr,
                body.consts,
                [*values[a:b], *carry],
                [*marks[a:b], *carried],
                inner_loops,
            )
        return carry, carried

    def scan(self, eqn, values, marks, loops):
        params = eqn.params
        body, length, n = params["jaxpr"], params["length"], params["num_consts"]
        m = n + params["num_carry"]
        carry, carried = list(values[n:m]), list(marks[n:m])
        stacked: list = [None] * length
        collected: list[Marks] = [{} for _ in body.jaxpr.outvars[m - n :]]
        for iteration in reversed(range(length)) if params["reverse"] else range(length):
            location = f"iteration {iteration + 1} of {length} at {summarize(eqn.source_info)}"
            rows = [x[iteration] for x in values[m:]]
            # A row that is not finite itself has the marks of its array.
            of_rows = [
                {k: v for k, v in mark.items() if not _is_float(x) or k in _kinds(x)}
                for x, mark in zip(rows, marks[m:], strict=True)
            ]
            outs, new_marks = self.run(
                body.jaxpr,
                body.consts,
                [*values[:n], *carry, *rows],
                [*marks[:n], *carried, *of_rows],
                (*loops, location),
            )
            carry, carried = outs[: m - n], new_marks[: m - n]
            stacked[iteration] = outs[m - n :]
            for i, mark in enumerate(new_marks[m - n :]):
                pair = [collected[i], mark]
                collected[i] = _earliest(pair, (NAN,)) | _earliest(pair, (INF,))
        if not length:
            return _bind(eqn, values), [*carried, *collected]
        columns = zip(*stacked, strict=True)
        return [*carry, *(jnp.stack(column) for column in columns)], [*carried, *collected]


_INSIDE = {
    **dict.fromkeys(
        (
            "jit",
            "pjit",
            "closed_call",
            "core_call",
            "remat",
            "remat2",
            "checkpoint",
            "custom_jvp_call",
            "custom_vjp_call",
            "custom_vjp_call_jaxpr",
        ),
        _Walk.call,
    ),
    "cond": _Walk.cond,
    "while": _Walk.while_loop,
    "scan": _Walk.scan,
}


def _bind(eqn, values) -> list:
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _tells_finiteness(eqn) -> bool:
    """Returns whether an operation inside tests numbers for being finite, so that its result may
    depend on numbers that it does not return."""
    return any(
        inner.primitive.name == "is_finite" or _tells_finiteness(inner)
        for jaxpr in core.jaxprs_in_params(eqn.params)
        for inner in jaxpr.eqns
    )


def _earliest(marks: Sequence[Marks], kinds: tuple[str, ...]) -> Marks:
    """The mark of these kinds that was made first, as Marks."""
    candidates = [(kind, m[kind]) for m in marks for kind in kinds if kind in m]
    kind, origin = min(candidates, key=lambda pair: pair[1].order, default=("", None))
    return {} if origin is None else {kind: origin}


def _is_var(atom) -> bool:
    return not isinstance(atom, core.Literal)


def _is_float(x) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else np.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _here(x):
    """Returns (numpy, the array on the host) for a small array, since each shape would be a program
    of its own; else (jax.numpy, the array)."""
    return (np, fetch(x)) if math.prod(np.shape(x)) <= HERE else (jnp, x)


def _all_finite(x) -> bool:
    if not _is_float(x):
        return True
    lib, x = _here(x)
    return bool(lib.all(lib.isfinite(x)))


def _kinds(x) -> list[str]:
    if _all_finite(x):
        return []
    lib, x = _here(x)
    flags = {NAN: lib.any(lib.isnan(x)), INF: lib.any(lib.isinf(x))}
    return [kind for kind, any_of_it in flags.items() if bool(any_of_it)]


def _bad(x, kind: str) -> tuple[int, int]:
    """Returns (count of the numbers of that kind, flat index of the first)."""
    lib, x = _here(x)
    bad = lib.ravel(lib.isnan(x) if kind == NAN else lib.isinf(x))
    return int(lib.sum(bad)), int(lib.argmax(bad))


def _index(x, kind: str) -> tuple[int, ...]:
    """Returns the index of the first number of that kind."""
    return tuple(int(i) for i in np.unravel_index(_bad(x, kind)[1], np.shape(x)))


def _count(x, kind: str) -> str:
    size = math.prod(np.shape(x))
    if size == 1:
        return "a single number"
    return f"{_bad(x, kind)[0]} of {size} numbers, the first at {list(_index(x, kind))}"


def _operand(x, shape: tuple[int, ...], index: tuple[int, ...]) -> str:
    """Describes an operand: its value at the index of the result, where they are laid out alike."""
    if not hasattr(x, "dtype"):
        return str(x)
    kind = f"{x.dtype}{list(np.shape(x))}"
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
        return kind
    if math.prod(np.shape(x)) == 1:
        return f"{kind} {fetch(jnp.ravel(x)[0])}"
    if np.shape(x) == shape:
        return f"{kind}, there {fetch(x[index])}"
    if not _is_float(x):
        return kind
    lib, x = _here(x)
    return f"{kind} from {lib.nanmin(x)} to {lib.nanmax(x)}"
