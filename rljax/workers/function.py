"""The user's function that workers run, as their parent resolves it."""

from rljax.components import Component, fails_at_import, resolve
from rljax.errors import InputError


def resolve_for_workers(kind: str, text: str, home: str) -> Component:
    """Returns the component `text`, a `kind` such as "reward". It is imported here once, so that a
    mistake in its name shows before a worker starts. Raises InputError for a function that workers
    could not import."""
    if isinstance(text, str) and text.strip().startswith("__main__."):
        raise InputError(
            f"{kind} {text!r} lives in the running script or notebook",
            rule="workers do not import it",
            fix="hand the function itself to rljax.train, or "
            f"move it to a file, my_{kind}s.py, and name it 'my_{kind}s.function'",
        )
    try:
        return resolve(text, home)
    except InputError:
        raise
    except Exception as error:  # the user's module ran and raised
        raise fails_at_import(f"{kind} {text!r}", error) from error


def worker_failed(what: str, told: tuple[bool, str]) -> InputError:
    """Returns the error of a worker that could not begin; `told` is (whether its message has a fix,
    the message)."""
    has_fix, message = told
    if has_fix:
        return InputError.of_text(f"{what}: {message}")
    fix = "make its module work where it is imported anew, without what this process has set"
    return InputError(what, rule=message, fix=fix)
