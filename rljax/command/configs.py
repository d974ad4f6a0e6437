"""Configs: rljax configs

Lists the configs that come with the library, by the name that --config takes.

A name with :tiny behind it, such as presets/dapo:tiny, is the same algorithm on an embedded task.
To change one for good, copy the file whose path `rljax configs` prints at the end.
"""

import ast
import re

from rljax.config.declare import Options
from rljax.config.flags import shipped_configs


def main(_: Options) -> None:
    files = shipped_configs()
    rows = []
    for name, file in files.items():
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        rows.append((name, first_sentence(doc)))
    wide = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{wide}}  {text}")
    print(f"\nThe files are in {files['quickstart'].parent}")


def first_sentence(doc: str) -> str:
    """What a docstring begins with, up to the first full stop or semicolon of its prose."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"[.;](?=\s|$)", paragraph)[0] + "."
