"""Configs: rljax configs

Lists the configs that come with the library, by the name that --config takes.

A name with :tiny behind it, such as presets/dapo:tiny, is the same algorithm on an embedded task.
To change one for good, copy the file whose path `rljax configs` prints at the end.
"""

import ast
import re
import shutil
import sys
import textwrap

from rljax.config.declare import Options
from rljax.config.flags import shipped_configs


def main(_: Options) -> None:
    """Prints the configs that ship, with the first sentence of each."""
    files = shipped_configs()
    rows = []
    for name, file in files.items():
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        rows.append((name, first_sentence(doc)))
    indent = max(len(name) for name, _ in rows) + 2
    width = max(shutil.get_terminal_size().columns, indent + 40)
    width = width if sys.stdout.isatty() else 10_000  # a line each, for grep
    for name, text in rows:
        print(f"{name:<{indent}}" + ("\n" + " " * indent).join(textwrap.wrap(text, width - indent)))
    print(f"\nThe files are in {files['quickstart'].parent}")


def first_sentence(doc: str) -> str:
    """Returns the first sentence of a docstring, whole, however many lines it has."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    end = re.search(r"(?<!\b\w)(?<!vs)(?<! al)\.(?= |$)|:$", paragraph)
    return paragraph[: end.start()] + "." if end else paragraph
