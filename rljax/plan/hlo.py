"""Traffic of a compiled program: bytes between chips by mesh axis, and bytes of device memory.

Counts instructions (rljax.plan.hlo_text reads them), loops multiplied by their trip counts. All
numbers are of one device.

The compiler's own cost counts a loop's body once. Here the trips of a loop are read from its
condition (a counter below a constant). A loop that ends by its data takes `trips` iterations, and a
loop around it takes one. Of a conditional the cheapest branch counts: the others are of options
that are off.

Traffic between slices, over the data center's network (DCN), is written out in a TPU's text: a sum
over several slices is a sum over each slice, and a `send` to the hosts of the others. On other
platforms it follows from the groups of devices.
"""

import dataclasses
import functools
import re

from jax.sharding import Mesh

from rljax.plan.hlo_text import ARRAY, Instruction, array_bytes, axes_of, groups_of, parse

DCN = "DCN"
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%?([\w.\-]+)")
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# Instructions that move nothing: they are views of other memory, or were counted where they began.
_FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "bitcast-convert", "constant"),
    *("after-all", "iota", "partition-id", "replica-id", "opt-barrier", "domain"),
    "get-dimension-size",
}
# Instructions that update their first operand in place, and the index of the operand that
# is written.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
_CALLS = ("call", "call-start", "async-start")
# Pallas kernels, whose bytes rljax.plan.flops takes from what they declare.
_KERNELS = ('"tpu_custom_call"', '"__gpu$xla.gpu.triton"', '"mosaic_gpu')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: `axes` are the mesh axes its groups run along, `bytes_sent` what one device
    sends in an iteration by a ring, `dcn_bytes` what of that leaves its slice, `trips` how often it
    runs, `of` where it comes from."""

    op: str
    axes: tuple[str, ...]
    bytes_sent: float
    result_bytes: int
    trips: float
    of: str
    in_open_loop: bool  # a loop that ends by its data: decoding
    dcn_bytes: float = 0.0


@dataclasses.dataclass
class Traffic:
    """The traffic of one device in one run of a program."""

    hbm_bytes: float = 0.0
    collectives: list[Collective] = dataclasses.field(default_factory=list)

    def by_axis(self) -> dict[str, float]:
        """Bytes that a device sends within its slice, by mesh axis ("fsdp", "fsdp x tensor", ...),
        and to other slices (DCN)."""
        out: dict[str, float] = {}
        for collective in self.collectives:
            within_slice = collective.bytes_sent - collective.dcn_bytes
            if within_slice or not collective.dcn_bytes:
                name = " x ".join(collective.axes) or "?"
                out[name] = out.get(name, 0.0) + within_slice * collective.trips
            if collective.dcn_bytes:
                out[DCN] = out.get(DCN, 0.0) + collective.dcn_bytes * collective.trips
        return out


def _bytes_sent(op: str, operand: int, result: int, groups: list[list[int]]) -> float:
    """Bytes that a device sends by a ring of n: an all-gather (n-1)/n of its result, a
    reduce-scatter of its operand, an all-reduce both."""
    if op == "collective-permute":
        moving = sum(a != b for a, b in groups)
        return operand * moving / max(len(groups), 1)
    n = len(groups[0]) if groups else 2
    part = (n - 1) / n
    total = {"all-reduce": 2 * operand, "all-gather": result}.get(op, operand)
    return total * part


# -- the walk


class _Walk:
    """Walks the computations of one compiled text and adds up their traffic, loops multiplied."""

    def __init__(self, text: str, mesh: Mesh, trips: int, slices: int):
        self.parts, self.entry = parse(text)
        self.mesh, self.trips, self.slices = mesh, trips, slices
        self.types = {name: {i.name: i.types for i in body} for name, body in self.parts.items()}

    def known_trips(self, condition: str) -> int | None:
        """Returns the number of iterations of a loop whose counter starts at 0 and stays below a
        constant; None for any other loop."""
        body = {i.name: i for i in self.parts.get(condition, ())}
        root = next((i for i in body.values() if i.root), None)
        if root is not None and root.op == "fusion":
            return self._fused_trips(root, body)
        if root is not None and root.op == "compare" and "direction=LT" in root.rest:
            return next(map(_number, _constants(root, body)), None)
        return None

    def _stride(self, condition: str, body: str) -> int:
        """Returns the increment of a loop's counter per iteration: a product that is overlapped
        with the sending of its operand goes two devices at a time."""
        condition_parts, body_parts = (
            {i.name: i for i in self.parts.get(x, ())} for x in (condition, body)
        )
        root = next((i for i in condition_parts.values() if i.root), None)
        last = next((i for i in body_parts.values() if i.root and i.op == "tuple"), None)
        names = root.operands if root else ()
        operands = [condition_parts[n] for n in names if n in condition_parts]
        index = [re.search(r"index=(\d+)", i.rest) for i in operands if i.op == "get-tuple-element"]
        if len(index) != 1 or last is None:
            return 1
        increment = body_parts.get(last.operands[int(index[0][1])])
        if increment is None or increment.op != "add":
            return 1
        steps = _constants(increment, body_parts)
        return max(_number(steps[0]), 1) if len(steps) == 1 else 1

    def _fused_trips(self, root: Instruction, body: dict) -> int | None:
        """Trip count of a loop as XLA for CPUs writes it, with the comparison inside a fusion and
        the constant as an operand."""
        computation = _CALLED.search(root.rest)
        inner = self.parts.get(computation[1], ()) if computation else ()
        if not any(i.root and i.op == "compare" and "direction=LT" in i.rest for i in inner):
            return None
        numbers = _constants(root, body) + [i for i in inner if i.op == "constant"]
        return _number(numbers[0]) if len(numbers) == 1 else None

    def _loop(self, instruction: Instruction) -> tuple[str, str, float, bool]:
        """(body, condition, trips, whether it ends by its data)."""
        body = re.search(r"body=%?([\w.\-]+)", instruction.rest)[1]
        condition = re.search(r"condition=%?([\w.\-]+)", instruction.rest)[1]
        stated = re.search(r'known_trip_count[^}]*?"?n"?:"?(\d+)', instruction.rest)
        count = int(stated[1]) if stated else self.known_trips(condition)
        if count is None:
            return body, condition, 1 if self._has_open_loop(body) else self.trips, True
        trips = count if stated else -(-count // self._stride(condition, body))
        return body, condition, trips, False

    @functools.cache  # noqa: B019  (a walk lives as long as its text is read)
    def _has_open_loop(self, name: str) -> bool:
        for instruction in self.parts.get(name, ()):
            if instruction.op == "while" and self._loop(instruction)[-1]:
                return True
            if any(self._has_open_loop(c) for c in self._called(instruction)):
                return True
        return False

    def _called(self, instruction: Instruction) -> list[str]:
        names = _CALLED.findall(instruction.rest)
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
        names += re.findall(r"%?([\w.\-]+)", branches[1]) if branches else []
        names += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", instruction.rest)
        return [name for name in names if name in self.parts]

    def _add(self, name: str, times: float, in_open: bool, out: Traffic, visited: set) -> None:
        """Adds to `out` the cost of one run of a computation, `times` over."""
        for instruction in self.parts[name]:
            if instruction.op == "while":
                body, condition, trips, is_open = self._loop(instruction)
                # A gather that began outside goes on in pieces during the iterations: it
                # counts once.
                open_channels = {mark for mark in visited if mark[1]}
                self._add(body, times * trips, in_open or is_open, out, open_channels)
                self._add(condition, times * (trips + 1), in_open or is_open, out, open_channels)
            elif instruction.op == "conditional":
                self._add_branch(instruction, times, in_open, out)
            elif instruction.op in _CALLS and (called := self._called(instruction)):
                for computation in called:
                    self._add(computation, times, in_open, out, visited)
            elif instruction.op in _FREE or instruction.op.endswith(("-done", "-update")):
                continue
            elif instruction.op == "send":
                out.collectives.append(self._sent(name, instruction, times, in_open))
                out.hbm_bytes += times * self._operand_bytes(name, instruction)
            else:
                self._add_one(name, instruction, times, in_open, out, visited)

    def _sent(self, name: str, instruction: Instruction, times: float, in_open: bool) -> Collective:
        """Returns the transfer that a TPU hands to its host for the other slices."""
        kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
        op = kind[1].lower().replace("_", "-") if kind else "send"
        size, other_slices = self._operand_bytes(name, instruction), self.slices - 1
        sent = {
            "all-reduce": 2 * size * other_slices / self.slices,
            "all-gather": size * other_slices,
        }
        sent |= dict.fromkeys(("reduce-scatter", "all-to-all"), size * other_slices / self.slices)
        sent = sent.get(op, size) if kind else 0.0
        return Collective(op, (), sent, size, times, _of(instruction), in_open, sent)

    def _add_branch(
        self, instruction: Instruction, times: float, in_open: bool, out: Traffic
    ) -> None:
        branches = []
        for computation in self._called(instruction):
            largest = Traffic()
            self._add(computation, times, in_open, largest, set())
            branches.append(largest)
        if branches:
            smallest = min(branches, key=lambda t: sum(t.by_axis().values()) + t.hbm_bytes)
            out.hbm_bytes += smallest.hbm_bytes
            out.collectives += smallest.collectives

    def _add_one(
        self, name, instruction: Instruction, times, in_open, out: Traffic, visited: set
    ) -> None:
        called = self._called(instruction)
        inner = [i for computation in called for i in self._with_inner(computation)]
        home = called[0] if inner and instruction.op == "fusion" else name
        collectives = [i for i in inner if _kind(i.op)] if instruction.op == "fusion" else []
        collectives += [instruction] if _kind(instruction.op) else []
        fresh = []
        for collective in collectives:
            # The pieces of a gather that is spread over computations share its channel id.
            mark = re.search(r"channel_id=(\d+)", collective.rest)
            chain = re.search(r'chain_id="(\d+)"', collective.rest)
            mark = (mark and mark[1], chain and chain[1], _kind(collective.op))
            if not mark[0] or mark not in visited:
                visited.add(mark)
                fresh.append(collective)
        for collective in fresh:
            parent = name if collective is instruction else home
            record = self._collective(parent, collective, times, in_open)
            out.collectives.append(record)
            out.hbm_bytes += times * (self._operand_bytes(parent, collective) + record.result_bytes)
        if not collectives:
            out.hbm_bytes += times * self._hbm_bytes(name, instruction)

    def _with_inner(self, name: str):
        for instruction in self.parts[name]:
            yield instruction
            for computation in self._called(instruction):
                yield from self._with_inner(computation)

    def _collective(self, name: str, instruction: Instruction, times, in_open) -> Collective:
        groups = groups_of(instruction.rest)
        operand, result = self._operand_bytes(name, instruction), self._result_bytes(instruction)
        op = _kind(instruction.op)
        if op == "all-reduce" and instruction.name in self.scattered:
            op, result = "reduce-scatter", result // max(len(groups[0]) if groups else 1, 1)
        bytes_sent = _bytes_sent(op, operand, result, groups)
        crossing = self._crossing(op, operand, result, groups)
        axes = axes_of(groups, self.mesh)
        return Collective(op, axes, bytes_sent, result, times, _of(instruction), in_open, crossing)

    def _crossing(self, op: str, operand: int, result: int, groups: list[list[int]]) -> float:
        """Bytes that a device sends to other slices, where those of one slice share the work."""
        if self.slices == 1 or not groups:
            return 0.0
        size = self.mesh.size // self.slices  # data is outermost: a slice is a run of devices
        groups = [[number % self.mesh.size // size for number in group] for group in groups]
        if op == "collective-permute":
            return _bytes_sent(op, operand, result, groups)
        slices = sorted(set(groups[0]))
        return _bytes_sent(op, operand, result, [slices]) * len(slices) / len(groups[0])

    @functools.cached_property
    def scattered(self) -> set[str]:
        """Names of the all-reduces of which a device keeps only its part: a TPU's reduce-scatter is
        a fusion of an all-reduce and the slice."""
        parts = [body for name, body in self.parts.items() if name.startswith("all-reduce-scatter")]
        return {instruction.name for body in parts for instruction in body}

    def _operand_bytes(self, name: str, instruction: Instruction) -> int:
        tables = [self.types.get(name, {}), *self.types.values()]
        types = [next((t[x] for t in tables if x in t), "") for x in instruction.operands]
        return sum(map(array_bytes, types))

    def _result_bytes(self, instruction: Instruction) -> int:
        """Bytes of the result; -start forms have a tuple (operands, results, ...), of which the
        second member counts."""
        if not instruction.op.endswith("-start"):
            return array_bytes(instruction.types)
        sizes = list(map(array_bytes, _members(instruction.types)))
        count = len(instruction.operands)
        return sum(sizes[count : 2 * count])

    # -- device memory

    def _hbm_bytes(self, name: str, instruction: Instruction) -> float:
        """Bytes of device memory that an instruction reads and writes. Of slices, and of updates in
        place, only the part counts."""
        types = self.types[name]

        def size(n):
            return array_bytes(types.get(n, ""), in_hbm=True)

        if instruction.op == "fusion" and self._called(instruction):
            return self._fusion_bytes(self._called(instruction)[0], instruction, types)
        if instruction.op == "custom-call" and any(name in instruction.rest for name in _KERNELS):
            return 0.0
        result = array_bytes(instruction.types, in_hbm=True)
        if instruction.op in ("dynamic-slice", "slice", "gather"):
            return 2 * result
        if instruction.op in _IN_PLACE:
            return 2 * size(instruction.operands[_IN_PLACE[instruction.op]])
        # (source, destination, ...); of a copy the other way round.
        if instruction.op.endswith("-start"):
            buffers = _members(instruction.types)[:2]
            moved_bytes = min(map(array_bytes, buffers))
            return moved_bytes * sum(array_bytes(end, in_hbm=True) > 0 for end in buffers)
        return result + sum(size(n) for n in instruction.operands)

    def _fusion_bytes(self, computation: str, instruction: Instruction, types: dict) -> float:
        parameters = self._parameters(computation)
        total = sum(
            self._read(computation, index)
            for index, operand in enumerate(instruction.operands)
            if array_bytes(types.get(operand, ""), in_hbm=True) and index in parameters
        )
        [root] = [i for i in self.parts[computation] if i.root] or [None]
        by_name = {i.name: i for i in self.parts[computation]}
        results = [by_name[n] for n in root.operands] if root.op == "tuple" else [root]
        for types_of_end, end in zip(_members(instruction.types), results, strict=False):
            if array_bytes(types_of_end, in_hbm=True):
                total += self._written(computation, end, types_of_end)
        return total

    @functools.cache  # noqa: B019  (a walk lives as long as its text is read)
    def _parameters(self, name: str) -> dict[int, Instruction]:
        """A computation's parameters by their numbers."""
        parameters = (i for i in self.parts[name] if i.op == "parameter")
        return {int(re.match(r"(\d+)\)", i.rest)[1]): i for i in parameters}

    @functools.cache  # noqa: B019
    def _users(self, name: str) -> dict[str, list[Instruction]]:
        """Maps each value of a computation to the instructions that read it."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.parts[name]:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users

    def _written(self, name: str, end: Instruction, types: str) -> int:
        """Bytes that a result of a fusion writes; of an update in place, only the part."""
        by_name = {i.name: i for i in self.parts[name]}
        while end.op == "bitcast":
            end = by_name[end.operands[0]]
        if end.op == "fusion" and self._called(end):
            inner = self._called(end)[0]
            return self._written(inner, next(i for i in self.parts[inner] if i.root), types)
        part = _IN_PLACE.get(end.op)
        return array_bytes(self.types[name].get(end.operands[part], "") if part else types)

    def _passed_on(self, name: str) -> int | None:
        """Number of the parameter that a fusion only views in another form; None for others."""
        by_name = {i.name: i for i in self.parts[name]}
        end = next(i for i in self.parts[name] if i.root)
        while end.op == "bitcast":
            end = by_name[end.operands[0]]
        return next((n for n, x in self._parameters(name).items() if x is end), None)

    def _read(self, name: str, index: int) -> float:
        """Bytes of a fusion's operand that are read. Of an operand that is only sliced, in the
        fusion or in one inside it, only the slices count."""
        users, param = self._users(name), self._parameters(name)[index]
        full_bytes, sliced_bytes = array_bytes(param.types), 0.0
        pending, names = list(users.get(param.name, ())), {param.name}
        while pending:
            use = pending.pop()
            if use.op == "bitcast":
                names.add(use.name)
                pending += users.get(use.name, ())
            elif use.op in ("dynamic-slice", "slice", "gather") and use.operands[0] in names:
                sliced_bytes += array_bytes(use.types)
            elif use.op == "fusion" and self._called(use):
                inner = self._called(use)[0]
                indices = [i for i, x in enumerate(use.operands) if x in names]
                sliced_bytes += sum(self._read(inner, i) for i in indices)
                if self._passed_on(inner) in indices:  # the fusion returns the operand itself
                    names.add(use.name)
                    pending += users.get(use.name, ())
            elif use.op in _IN_PLACE and use.operands[0] in names:
                continue
            else:
                return full_bytes
        return min(full_bytes, sliced_bytes)


def _constants(instruction: Instruction, body: dict[str, Instruction]) -> list[Instruction]:
    """Returns the operands of an instruction that are constants."""
    operands = (body[name] for name in instruction.operands if name in body)
    return [operand for operand in operands if operand.op == "constant"]


def _number(constant: Instruction) -> int:
    return int(re.match(r"(-?\d+)\)", constant.rest)[1])


def _of(instruction: Instruction) -> str:
    """Returns the source line of an instruction."""
    match = re.search(r'op_name="([^"]*)"', instruction.rest)
    return match[1] if match else instruction.name


def _kind(op: str) -> str:
    """The collective that an opcode stands for, "" if none."""
    op = op.removesuffix("-start")
    return op if op in COLLECTIVES else ""


def _members(types: str) -> list[str]:
    """The arrays of a tuple's type."""
    return [m[0] for m in re.finditer(ARRAY, types)]


def traffic(text: str, mesh: Mesh, trips: int = 1, slices: int = 1) -> Traffic:
    """Returns the traffic of a run of a compiled program, from its text (`compiled.as_text()`)."""
    walk, out = _Walk(text, mesh, trips, slices), Traffic()
    walk._add(walk.entry, 1.0, False, out, set())
    return out
