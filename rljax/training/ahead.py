"""Compiles the learning program of a phase while its first batch is sampled."""

import contextlib
import threading

import jax

from rljax import hosts
from rljax.setup import Phase, Setup
from rljax.setup.dry_run import abstract_batch
from rljax.tracking import compiles


class CompiledAhead:
    """Compiles the learning program of each phase in a thread. The first step finds the compiled
    program, as it calls the same function with the same shapes; if compiling fails, it raises."""

    def __init__(self):
        self.programs = 0  # compiled so far
        self._thread: threading.Thread | None = None
        self._phase, self._name = "", ""

    def start(self, setup: Setup, phase: Phase, key: jax.Array, roles: dict) -> None:
        """Begins to compile the dataflow of `phase` for `roles`, a scalar `key` and a batch of the
        shapes of the dry run, once for each phase. Does nothing on several hosts, which compile in
        one order, or for a dataflow that is no rljax.roles.program."""
        function = phase.dataflow.function
        if phase.name == self._phase or hosts.count() > 1 or not hasattr(function, "arguments"):
            return
        self.wait()
        keywords = {name: role.in_program() for name, role in roles.items()}
        keywords |= phase.dataflow.options
        arguments, static = function.arguments(
            abstract_batch(setup, phase), key, phase.algorithm, **keywords
        )
        # Shapes alone: the first step donates the arrays.
        arguments = jax.tree.map(_shape_of, arguments)

        def compile_ahead():
            with compiles.ahead() as compiled, contextlib.suppress(Exception):
                function.run.lower(*arguments, **static).compile()
            self.programs += compiled.count(self._name)

        self._phase, self._name = phase.name, f"jit({function.__name__})"
        self._thread = threading.Thread(target=compile_ahead, name="rljax compiles ahead")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the program that is being compiled, if there is one."""
        if self._thread is not None:
            with compiles.waits_for(self._name):
                self._thread.join()
            self._thread = None


def _shape_of(x):
    if not isinstance(x, jax.Array):
        return x
    weak = getattr(x, "weak_type", False)  # a key has none
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)
