"""Parses XLA's text of a compiled program: names, types, operands, groups of devices."""

import dataclasses
import math
import re

import numpy as np
from jax.sharding import Mesh

_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0}
ARRAY = re.compile(r"\b(pred|token|bf16|[sufc]\d+\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.DOTALL)
_BEGINS = re.compile(r"  (ROOT )?%?[\w.\-]+ = ")
_ENDS = re.compile(r"\}(, execution_thread=.*)?$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    types: str  # of its results
    op: str
    operands: tuple[str, ...]
    rest: str  # of its line
    root: bool


def array_bytes(types: str, *, in_hbm: bool = False) -> int:
    """Returns the bytes of the arrays in a type, the sum of its members for a tuple. `in_hbm`:
    counts only arrays in device memory, not those in a core's own memory or the host's."""
    total = 0
    for dtype, sizes, layout in ARRAY.findall(types):
        if in_hbm and re.search(r"S\([1-9]", layout):
            continue
        bits = _BITS[dtype] if dtype in _BITS else int(re.search(r"\d+", dtype)[0])
        total += math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
    return total


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns ({computation: its instructions}, the name of the entry). Raises ValueError for text
    of an unknown form, because counts of it would be too low."""
    computations, lines, entry = {}, None, ""
    for line in text.splitlines():
        if lines is None and (head := _HEAD.match(line)):
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif _ENDS.match(line):
            lines = None
        elif lines is not None and (_BEGINS.match(line) or not lines):
            lines.append(line)
        elif lines is not None:
            # The metadata of a kernel may run over several lines, one of them "}}, ...".
            lines[-1] += "\n" + line
    parsed = {name: _instructions(lines) for name, lines in computations.items()}
    for name, body in parsed.items():
        if sum(instruction.root for instruction in body) != 1:  # every computation has one result
            raise ValueError(f"rljax.plan.hlo_text cannot read {name}: {computations[name][-1:]}")
    return parsed, entry


def _instructions(lines: list[str]) -> list[Instruction]:
    parts = filter(None, map(_LINE.match, lines))
    return [
        Instruction(name, types, op, _operands(rest), rest, bool(root))
        for root, name, types, op, rest in (part.groups() for part in parts)
    ]


def _operands(rest: str) -> tuple[str, ...]:
    """The names within the parentheses of `op(...)`."""
    depth, end = 1, len(rest)
    for i, letter in enumerate(rest):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            end = i
            break
    return tuple(re.findall(r"%([\w.\-]+)", rest[:end]))


# -- device groups -> mesh axes


def _ids_of_iota(text: str) -> list[list[int]]:
    """Reads groups such as [2,4]<=[4,2]T(1,0), which is two groups of four."""
    groups, shape, order = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    numbers = [[int(n) for n in part.split(",")] for part in (groups, shape, order or "") if part]
    ids = np.arange(math.prod(numbers[1])).reshape(numbers[1])
    ids = ids.transpose(numbers[2]) if order else ids
    return ids.reshape(numbers[0]).tolist()


def _ids_of_mesh(text: str) -> list[list[int]]:
    """Reads groups such as mesh['a'=4,'b'=2] {'b'}, which run along b; in 'a':(2)2 they run along
    the part of a that is inside of 2 others."""
    sizes = {name: int(n) for name, n in re.findall(r"'([\w.]+)'=(\d+)", text)}
    axes = re.findall(r"'([\w.]+)'(?::\((\d+)\)(\d+))?", text[text.index("{") :])
    shape, group_dims = [], []
    for name, size in sizes.items():
        parts = [(int(outer), int(n)) for axis, outer, n in axes if axis == name and n]
        if not parts:
            group_dims += [len(shape)] * any(axis == name for axis, _, _ in axes)
            shape.append(size)
            continue
        covered = 1
        for outer, n in sorted(parts):
            shape += [outer // covered, n]
            group_dims.append(len(shape) - 1)
            covered = outer * n
        shape.append(size // covered)
    ids = np.arange(math.prod(shape)).reshape(shape)
    rest = [i for i in range(len(shape)) if i not in group_dims]
    size = math.prod(shape[i] for i in group_dims)
    return ids.transpose(rest + group_dims).reshape(-1, size).tolist()


def groups_of(rest: str) -> list[list[int]]:
    """Returns the groups of devices that communicate, from the attributes of a
    collective; [] if unknown."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
    match = re.search(r"replica_groups=(mesh\[[^\]]*\] ?\{[^}]*\})", rest)
    if match and "device_ids" not in match[1]:
        return _ids_of_mesh(match[1])
    if match := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return _ids_of_iota(match[1])
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest):
        return [[int(n) for n in g.split(",") if n] for g in re.findall(r"\{([\d,]+)\}", match[1])]
    return []


def axes_of(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ. Devices count as the
    mesh lists them."""
    shape, differ = tuple(mesh.shape.values()), set()
    for group in groups:
        indices = np.stack(np.unravel_index(np.array(group) % mesh.size, shape), axis=1)
        differ |= set(np.flatnonzero((indices != indices[0]).any(axis=0)).tolist())
    return tuple(name for i, name in enumerate(mesh.shape) if i in differ)
