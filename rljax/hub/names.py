"""Names of repositories of the Hugging Face Hub in a config or on the command line.

    hf://OWNER/NAME[@REVISION][/FOLDER]               a model, or a folder of its repository
    hf://OWNER/NAME[@REVISION]/FILE.gguf              a model in a file of its repository
    OWNER/NAME[@REVISION]                             the same, unless a local folder has that name
    hf://datasets/OWNER/NAME[@REVISION][/PATH]        a data set (rljax.hub.datasets)

REVISION is a branch, a tag or a commit; none is the default branch. Pure: nothing is asked.
"""

import dataclasses
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from rljax.errors import InputError
from rljax.gguf import is_gguf

SCHEME = "hf://"
DATASETS = "datasets/"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Letters, digits and . _ -, at most 96 of them; no part ends with . or -, or has two of these.
_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
# Another branch with a slash in its name is written feature%2Fname.
_SPECIAL = re.compile(r"refs/pr/\d+|refs/convert/\w+", re.ASCII)
_REVISION = rf"(?:{_SPECIAL.pattern}|[^/@]+)"
_REPOSITORY = re.compile(rf"({_PART}/{_PART})(?:@({_REVISION}))?(?:/+(.*))?", re.ASCII)
_BARE = re.compile(rf"{_PART}/{_PART}(?:@{_REVISION})?/?", re.ASCII)
_LONGEST_PATH, _LONGEST_STEP = 1000, 255  # bytes
# Control characters, halves of characters, and what parts folders on another system.
_NO_PATH = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\\]")
# Of another text: up to what ends a text in quotes or an option.
_INSIDE = re.compile(r"hf://[^\s'\"(),]+")


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository of the hub, its revision ("" = the default branch), and a path in it."""

    kind: str  # "model" or "dataset"
    repository: str  # OWNER/NAME
    revision: str = ""
    path: str = ""

    def __str__(self) -> str:
        prefix = DATASETS if self.kind == "dataset" else ""
        special = _SPECIAL.fullmatch(self.revision)
        revision = self.revision if special else quote(self.revision, safe="")
        suffix = f"@{revision}" if revision else ""
        return f"{SCHEME}{prefix}{self.repository}{suffix}" + (f"/{self.path}" if self.path else "")

    def at(self, commit: str) -> "HubName":
        """Returns the same name at a commit."""
        return dataclasses.replace(self, revision=commit)

    @property
    def pinned(self) -> bool:
        """Returns whether it names a commit, which never changes."""
        return bool(COMMIT.fullmatch(self.revision))


def is_path(text: object) -> bool:
    """Returns whether a value is a path in a repository that any file system takes, and that stays
    inside the folder it is put in."""
    if not isinstance(text, str) or len(text) > _LONGEST_PATH or _NO_PATH.search(text):
        return False
    steps = text.encode().split(b"/")
    right = all(step not in (b"", b".", b"..") and len(step) <= _LONGEST_STEP for step in steps)
    return right and len(text.encode()) <= _LONGEST_PATH


def is_hub(text: object) -> bool:
    """Returns whether a text begins with hf://."""
    return str(text).startswith("hf:/")  # pathlib makes one slash of two


def parse(text: str | Path) -> HubName:
    """Returns the repository that an hf:// text names. Raises InputError for any other text."""
    rest, kind = re.sub(r"\Ahf:/(?!//)/?", "", str(text)), "model"
    if rest.startswith(DATASETS):
        rest, kind = rest.removeprefix(DATASETS), "dataset"
    match = _REPOSITORY.fullmatch(rest.rstrip("/"))
    path, revision = (match[3] or "", unquote(match[2] or "")) if match else ("", "")
    if match is None or not all(is_path(part) for part in (path, revision) if part):
        raise InputError(
            "an hf:// path",
            value=str(text),
            rule="hf://OWNER/NAME[@REVISION][/FOLDER] for a model, "
            "hf://datasets/OWNER/NAME[@REVISION][/SUBSET/SPLIT] for a data set",
            fix="copy OWNER/NAME from the repository's page",
        )
    return HubName(kind, match[1], revision, path)


def model_name(text: str | Path) -> HubName | None:
    """Returns the repository that the text of a model field names; None for a local path. A bare
    OWNER/NAME is one unless a file or folder has that name."""
    if is_hub(text):
        return _of_kind(text, "model")
    text = str(text)
    if _BARE.fullmatch(text) and not is_gguf(text) and not os.path.lexists(text):
        return parse(SCHEME + text)
    return None


def data_name(text: str) -> HubName | None:
    """Returns the repository that the text of a data field names; None if it is not hf://."""
    return _of_kind(text, "dataset") if is_hub(text) else None


def _of_kind(text: str | Path, kind: str) -> HubName:
    name = parse(text)
    if name.kind != kind:
        expected, fix = (
            ("a model", SCHEME) if kind == "model" else ("a data set", SCHEME + DATASETS)
        )
        raise InputError(f"{expected} is needed", value=str(text), fix=f"{fix}OWNER/NAME")
    return name


def names_in(text: str) -> list[str]:
    """Returns every hf:// path in a text, such as folder='hf://OWNER/NAME' of a maker of a role."""
    return _INSIDE.findall(text)
