"""The process in which files from strangers are tried: chat templates, and new tokenizers.

The kernel ends it where a request takes too much processor time (SIGPROF), and refuses it memory
beyond its share, whatever the file makes it do: no list of forbidden operations is complete. The
other end of the pipes is `guarded`. Imports no JAX.

Request: <length, seconds, bytes of memory> and a pickle of (job, arguments). Reply: <length>, a
letter for the kind of answer, a text.
"""

import json
import os
import pickle
import resource
import signal
import struct
import sys

import jinja2
import jinja2.meta

from rljax.data.text.template_sandbox import RefusedByTemplate, compile_template, render_template

REQUEST = struct.Struct("!Qdq")
REPLY = struct.Struct("!Q")
# Kinds of answers: a result; a template's own refusal; a syntax error in a line; another error; one
# of a limit, after which the process is not used again.
OK, REFUSED, SYNTAX, FAILED, LIMIT = "=", "r", "s", "f", "l"
_LONGEST_MESSAGE = 1_000  # characters: an error may quote a text without end


def _compile(text, now) -> str:
    """Returns JSON of [whether the template marks the assistant's text, names of the variables that
    it reads]."""
    template, marks_assistant = compile_template(text, now)
    variables = jinja2.meta.find_undeclared_variables(template.environment.parse(text))
    return json.dumps([marks_assistant, sorted(variables)])


# The texts that a tokenizer is tried on: runs of one character with an end, on which patterns that
# backtrack and normalizers that multiply show themselves.
_PROBES = [
    *(character * 40 + end for character in map(chr, range(32, 127)) for end in ("", "\x00")),
    *(character * 2_000 + "\x00" for character in "a 1!\n"),
    *("é中😀\u0301\xa0\t\r\n\u2581ﷺ"),
    "The quick brown fox, 12345 times:\n\n\tx = f(y) ** 2  # Größe 中文 😀\r\n" * 8,
]
_GROWTH = 100  # ids of a character, or characters of an id, that no tokenizer needs


def _try_tokenizer(data: bytes) -> str:
    """Loads the tokenizer.json and uses it; ValueError where texts grow without measure."""
    import tokenizers

    library = tokenizers.Tokenizer.from_buffer(data)
    library.no_truncation()
    library.no_padding()
    for text in _PROBES:
        try:
            ids = library.encode(text, add_special_tokens=False).ids
        except Exception:  # noqa: S112  a character that it does not know
            continue
        size = len(ids)
        if size <= _GROWTH * (len(text) + 10):
            size = len(library.decode(ids, skip_special_tokens=False))
        if size > _GROWTH * (len(text) + 10):
            raise ValueError(f"makes {size} ids or characters of {text[:4]!r} x {len(text)}")
    return ""


_JOBS = {"compile": _compile, "render": render_template, "tokenizer": _try_tokenizer}


def _answer(data: bytes) -> tuple[str, str]:
    try:
        job, arguments = pickle.loads(data)
        return OK, _JOBS[job](*arguments)
    except RefusedByTemplate as error:
        return REFUSED, str(error)
    except jinja2.TemplateSyntaxError as error:
        return SYNTAX, f"{error.lineno} {error.message}"
    except MemoryError:
        return LIMIT, "it takes too much memory"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in a library is not an Exception
        return FAILED, f"{type(error).__name__}: {error}"


def _memory_in_use() -> int:
    """Bytes of address space."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: the limit is looser by what Python itself takes
        return 0


def _read(count: int) -> bytes:
    data = sys.stdin.buffer.read(count)
    if len(data) < count:  # the parent is gone
        raise SystemExit
    return data


def main() -> None:
    """Answers requests until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Before a limit is set: the import of `tokenizers` shall not count for a file.
    import tokenizers  # noqa: F401

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries that panic print pages
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    while True:
        size, seconds, memory = REQUEST.unpack(_read(REQUEST.size))
        data = _read(size)
        resource.setrlimit(resource.RLIMIT_AS, (_memory_in_use() + memory, hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, text = _answer(data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if kind != OK:
            text = text[:_LONGEST_MESSAGE]
        reply = (kind + text).encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(REPLY.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
