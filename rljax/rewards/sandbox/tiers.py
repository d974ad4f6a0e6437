"""Runs one untrusted Python program where it can harm nothing: limits, tiers, results.

Chooses how to confine; `process` starts and watches, `zygote` and `program` run inside.

Tiers, tried once per process by running a program in each, the first that works is used:
  namespaces   user, mount, pid, network, ipc, uts namespaces of our own; a root that holds the
               interpreter's libraries only; needs no root
  bubblewrap   the same by bwrap, where only that may make namespaces
  seccomp      no namespaces: Landlock says which files can be read. It does not say so of stat:
               which files and processes there are, their sizes, times and owners can be seen. Files
               can be neither removed nor renamed, so that all that a program writes is counted
  closed       neither: no path can be used, so programs import only what is loaded already
  unsafe       rlimits only; only by name: allow_unsafe_execution=True
All but the last also have seccomp's allow-list, Landlock where it applies, no capabilities,
rlimits, a session of their own, an empty environment and an empty folder that is wiped afterwards.

A program is one process of at most `max_threads` threads; it can start no other. Every program gets
a fresh process: a zygote inside the sandbox forks it, which takes a twentieth of the time of a new
interpreter in a new sandbox (benchmarks/code_sandbox.py). Zygotes are kept for the next program and
end with this process, even by kill -9. Linux only.
"""

import functools

from rljax.errors import InputError
from rljax.rewards.sandbox.process import Process, ProcessLimits, Result, SandboxError

__all__ = ["ProcessLimits", "Process", "Result", "SandboxError", "run_program", "sandbox_tier"]

TIERS = ("namespaces", "bubblewrap", "seccomp", "closed")
ALL_TIERS = (*TIERS, "unsafe")
# Actions that the weaker tiers leave open, for a warning when a run begins.
LEFT_OPEN = {
    "seccomp": "a program reads no file of yours, but sees by stat which files and processes there "
    "are, their sizes, times and owners; it can remove and rename no file of its own",
    "closed": "a program opens no file at all, so it can import only a few modules of the standard "
    "library",
    "unsafe": "a program can read, change and start whatever you can",
}
_START_TIMEOUT_S = 30.0


def run_program(
    source: str,
    stdin: str | bytes = "",
    *,
    limits: ProcessLimits | None = None,
    allow_unsafe_execution: bool = False,
    warm: bool = True,
) -> Result:
    """Runs a Python program and waits for its end. Raises SandboxError if the sandbox failed,
    and InputError if this machine has none. `warm=False` starts an interpreter for this
    program alone."""
    header = {"mode": "script", "source": source}
    tier = sandbox_tier(allow_unsafe_execution)
    with Process(header, limits or ProcessLimits(), tier, stdin=stdin, warm=warm) as process:
        return process.wait()


@functools.cache
def _choose_tier(tiers: tuple[str, ...]) -> str:
    """The first of them in which a program runs. Raises InputError with the reasons."""
    reasons = []
    for tier in tiers:
        try:
            header = {"mode": "script", "source": "print(6 * 7)"}
            with Process(header, ProcessLimits(timeout_s=_START_TIMEOUT_S), tier) as process:
                result = process.wait()
            if result.stdout == b"42\n":
                return tier
            reasons.append(f"{tier}: a program ended with {result.message!r}")
        except (SandboxError, OSError) as error:
            reasons.append(str(error))
    raise InputError(
        "this machine offers no sandbox for untrusted programs",
        rule="; ".join(reasons),
        fix="install bubblewrap, allow user namespaces or use Linux 5.13 or later; or score with "
        "sandbox_fusion; allow_unsafe_execution=True runs programs with limits of time and "
        "memory only, able to read and write what you can",
    )


def sandbox_tier(allow_unsafe_execution: bool = False) -> str:
    """The name of the tier that programs of this process run in; tried once. Raises InputError if
    no tier works."""
    return _choose_tier((*TIERS, "unsafe") if allow_unsafe_execution else TIERS)
