"""What mkdocs needs beside mkdocs.yml: the order of the pages, the notebooks as pages, and links
that leave docs/."""

import json
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

# The order of the site. Pages that are not named follow by name, so a new page needs no line here.
TABS = (
    ("Home", ("index.md",)),
    (
        "Start",
        (
            "start/install.md",
            "start/first_run.md",
            "start/your_data.md",
            "start/your_reward.md",
            "start/your_model.md",
            "choose.md",
        ),
    ),
    ("Notebooks", ()),
    ("Guides", ("guides/command.md", "guides/faq.md", "guides/errors.md")),
    (
        "Methods",
        (
            "methods/index.md",
            "methods/groups.md",
            "methods/critic.md",
            "methods/preferences.md",
            "methods/selection.md",
            "methods/offline.md",
            "methods/composite.md",
            "methods/presets.md",
        ),
    ),
    ("Cookbook", ("cookbook/index.md", "cookbook/real_model.md")),
    (
        "Pods",
        ("pods/overview.md", "pods/tpu_vm.md", "pods/slurm.md", "pods/gke.md", "pods/skypilot.md"),
    ),
    ("Extend", ("extend/index.md",)),
    ("Internals", ("architecture.md",)),
    (
        "Reference",
        (
            "reference/config.md",
            "reference/commands.md",
            "reference/components.md",
            "reference/metrics.md",
            "reference/api.md",
        ),
    ),
    ("About", ("claims.md", "compared.md", "measurements.md", "contributing.md")),
)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
# (The picture of the badge lies elsewhere, and the site loads nothing from elsewhere.)
_BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_config(config):
    """Every page of docs/ in the tab of its folder; pages of no folder in the last one."""
    root = Path(config.docs_dir)
    pages = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.md"))
    pages += [page for page, _ in _notebooks(root)]
    named = {page for _, first in TABS for page in first}
    nav = []
    for title, first in TABS:
        listed = [page for page in first if page in pages]
        folder = "" if title == "About" else f"{title.lower()}/"
        own = [page for page in pages if page not in named and _folder(page) == folder]
        if title != "Home":
            nav.append({title: listed + own})
        else:
            nav += listed
    config.nav = nav
    return config


def _folder(page: str) -> str:
    head, slash, _ = page.partition("/")
    return head + slash if slash else ""


def _notebooks(root: Path) -> list[tuple[str, Path]]:
    """(page, file) of every notebook beside docs/."""
    found = sorted((root.parent / "notebooks").glob("*.ipynb"))
    return [(f"notebooks/{path.stem}.md", path) for path in found]


def on_files(files, config):
    """A page for each notebook: its text and its code. The repository keeps none of the outputs."""
    for page, path in _notebooks(Path(config.docs_dir).resolve()):
        parts = [f"*[`notebooks/{path.name}`](../../notebooks/{path.name})*"]
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = _BADGE.sub(r"[Open in Colab](\1)", "".join(cell["source"]))
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        # (Its heading is first, as of every page.)
        parts = [*parts[1:2], parts[0], *parts[2:]]
        files.append(File.generated(config, page, content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to files of the repository that are no pages become their text, or addresses below
    repo_url where that is set: the site has no such files."""
    root = Path(config.docs_dir).resolve()
    here = (root / page.file.src_uri).parent

    def link(match):
        label, target, anchor = match[1], match[2], match[3] or ""
        place = (here / target).resolve()
        if "://" in target or target.startswith("mailto:") or place.is_relative_to(root):
            return match[0]
        if not config.repo_url:
            return label
        path = os.path.relpath(place, root.parent)
        return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    parts, last = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[last:])])
