"""Compiles and renders chat templates as `transformers` does: the jinja side, which sees plain
values only.

Runs in the process with limits (`guarded_process`), which bounds processor time and memory; what
is bounded here is the length of the output. Messages and errors for users are in `template`.
"""

import datetime
import functools
import json

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MARKS = "generation_marks"


class RefusedByTemplate(jinja2.TemplateError):
    """The error of `raise_exception("...")` in a template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the assistant's text.

    A rendering that is given two characters as MARKS writes them around it.
    """

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(has_generation=False)

    def parse(self, parser):
        self.environment.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block has a scope of its own: what is set within is not seen after it.
        call = self.call_method("_marked", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context, caller):
        first, last = context.get(MARKS) or ("", "")
        return first + caller() + last


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that stores no name with an underscore in front: those reach Python."""

    def __init__(*args, **kwargs):
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _require_public(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace stores no name like {name!r}")


def _raise_exception(message: object) -> None:
    raise RefusedByTemplate(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models are trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dict(*args, **kwargs) -> dict:
    # A function, for the class itself has attributes that a template should not reach.
    return dict(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def compile_template(text: str, now: datetime.datetime) -> tuple[jinja2.Template, bool]:
    """Returns the template, and whether it has `{% generation %}` blocks."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    del environment.globals["lipsum"]  # text of no use
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    template = environment.from_string(text)
    return template, environment.has_generation


def render_template(text: str, now: datetime.datetime, context: dict, max_characters: int) -> str:
    """Renders the template. Raises SecurityError if the text has more than `max_characters`."""
    template, _ = compile_template(text, now)
    pieces, size = [], 0
    for piece in template.generate(**context):
        pieces.append(piece)
        size += len(piece)
        if size > max_characters:
            raise SecurityError(f"writes more than {max_characters} characters")
    return "".join(pieces)
