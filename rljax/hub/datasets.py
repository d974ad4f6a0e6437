"""Finds the files of a data set that hold the rows of a split, as the hub's own viewer finds them.

    hf://datasets/OWNER/NAME[@REVISION]                     the default subset, the split asked for
    hf://datasets/OWNER/NAME[@REVISION]/SUBSET[/SPLIT]      a subset, and a split of it
    hf://datasets/OWNER/NAME[@REVISION]/SPLIT               of a data set with one subset
    hf://datasets/OWNER/NAME[@REVISION]/FOLDER or /FILE     by its path; * ? [] and {split} work

Subsets and their files are those of `configs` in the front matter of README.md; without it, splits
are found by the names of files and folders (train-00000-of-00002.parquet, data/test.jsonl).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljax.errors import InputError
from rljax.files import DATA_FILES, SAVED_FILES, parse_yaml, read_text
from rljax.hub import client
from rljax.hub.globs import Files, is_glob
from rljax.hub.names import HubName, data_name

_README = "README.md"
# Files beside the rows: of the page, and of the library `datasets`.
_NO_ROWS = {_README, "dataset_infos.json", *SAVED_FILES}
_MOST_README = 4_000_000  # bytes
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
# The words by which a name says its split.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(?:^|/)([A-Za-z]\w*(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*$")


@dataclasses.dataclass(frozen=True)
class SplitFiles:
    """The files of a split, in order, and a text that says which subset and split were chosen."""

    repository: str
    files: tuple[Path, ...]
    names: tuple[str, ...]  # in the repository
    chosen: str


def split_files(spec: str, split: str) -> SplitFiles:
    """Returns the files that hold the rows of a data set's split, downloading those that are not
    here. Raises InputError, with a list of what there is, for a subset or split that the data set
    does not have."""
    name = data_name(spec.replace("{split}", split))
    name = name.at(client.resolve(name))
    repository = dataclasses.replace(name, path="")
    description, names = _chosen(repository, name.path, split)
    unreadable = [n for n in names if not n.endswith(DATA_FILES)]
    # Several formats hold the same rows: the one that is first in DATA_FILES is read.
    by_format = ([n for n in names if n.endswith(suffix)] for suffix in DATA_FILES)
    names = next(filter(None, by_format), [])
    if not names:
        raise InputError(
            f"{name} has no file of rows that is read",
            value=unreadable[:6] or sorted(client.listing(repository))[:10],
            rule=f"files end in one of {', '.join(DATA_FILES)}",
            fix=f"hf://datasets/{name.repository}@refs/convert/parquet, made by the hub",
        )
    folder = client.fetch(repository, names)
    files = tuple(folder / n for n in names)
    description += f", {len(names)} file{'s' * (len(names) > 1)}, commit {name.revision[:12]}"
    return SplitFiles(name.repository, files, tuple(names), description)


def _chosen(name: HubName, path: str, split: str) -> tuple[str, list[str]]:
    """Returns (description, files) of a path in a repository at a commit."""
    paths = sorted(client.listing(name))
    data = [p for p in paths if not p.startswith(".") and Path(p).name not in _NO_ROWS]
    if path in data:
        return path, [path]
    if is_glob(path):
        if files := Files(data).matching(path):
            return path, files
        fix = f"one of {client.page(name)}/tree/{name.revision}"
        raise InputError(f"no file of {name.repository} matches {path!r}", value=data[:10], fix=fix)
    subsets = _subsets(name, paths, data)
    first, *rest = path.split("/") if path else [""]
    if first in subsets and len(rest) <= 1:
        return _of_split(name, first, subsets[first], rest[0] if rest else split)
    main = next(iter(subsets))  # the one that is read where none is named
    if path in subsets[main]:
        return _of_split(name, main, subsets[main], path)
    if not path:
        description, files = _of_split(name, main, subsets[main], split)
        alternatives = [subset for subset in subsets if subset != main]
        return description + (
            f" (others: {', '.join(alternatives[:6])})" if alternatives else ""
        ), files
    in_folder = [p for p in data if p.startswith(f"{path}/")]
    if not in_folder:
        raise InputError(
            f"{name.repository} has no subset, split, folder or file {path!r}",
            value={subset: sorted(splits) for subset, splits in subsets.items()},
            rule="subsets and their splits",
            fix=f"hf://datasets/{name.repository}/{main}/{next(iter(subsets[main]), 'train')}",
        )
    splits = files_by_split(p.removeprefix(f"{path}/") for p in in_folder)
    if list(splits) == ["train"] and not any(
        _split_of(p.removeprefix(f"{path}/")) for p in in_folder
    ):
        return path, in_folder  # no name says a split: all of them are what was asked for
    splits = {key: [f"{path}/{p}" for p in files] for key, files in splits.items()}
    return _of_split(name, path, splits, split)


def _of_split(
    name: HubName, subset: str, splits: Mapping[str, list[str]], split: str
) -> tuple[str, list[str]]:
    if split not in splits:
        example = next(iter(splits), "train")
        problem = f"{name.repository}, subset {subset!r}, has no split {split!r}"
        fix = f"hf://datasets/{name.repository}/{subset}/{example} names one of them"
        raise InputError(problem, value=sorted(splits), fix=fix)
    return f"subset {subset}, split {split}", splits[split]


# -- subsets --


def _subsets(name: HubName, paths: list[str], data: list[str]) -> dict[str, dict[str, list[str]]]:
    """{subset: {split: files}}, first the default one: the one that README marks, else the one
    called default, else the first that it lists."""
    configs, files = _configs(name) if _README in paths else [], Files(data)
    default_names = [_text(e.get("config_name")) for e in configs if e.get("default") is True]
    subsets: dict[str, dict[str, list[str]]] = {}
    by_names: dict[str, dict[str, list[str]]] = {}  # of the folders of subsets
    for entry in configs:
        subset = _text(entry.get("config_name"))
        prefix = _text(entry.get("data_dir"), "").strip("/")
        prefix = f"{prefix}/" if prefix else ""
        if entry.get("data_files") is None:
            if prefix not in by_names:
                by_names[prefix] = files_by_split(
                    p.removeprefix(prefix) for p in data if p.startswith(prefix)
                )
            splits = {key: [prefix + p for p in names] for key, names in by_names[prefix].items()}
        else:
            by_split: dict[str, dict[str, None]] = {}
            for split, patterns in _patterns(entry["data_files"]):
                matched = by_split.setdefault(split, {})
                for pattern in patterns:
                    matched |= dict.fromkeys(files.matching(prefix + pattern.removeprefix("./")))
            splits = {split: list(matched) for split, matched in by_split.items()}
        if splits := {split: names for split, names in splits.items() if names}:
            subsets[subset] = splits
    first = sorted(subsets, key=lambda subset: (subset not in default_names, subset != "default"))
    return {subset: subsets[subset] for subset in first} or {"default": files_by_split(data)}


def _text(value: object, otherwise: str = "default") -> str:
    """Returns a name in a README; `otherwise` for a value that is none, such as nested lists."""
    return str(value) if isinstance(value, str | int | float) else otherwise


def _configs(name: HubName) -> list[dict]:
    """The `configs` of README.md; [] where it has none that can be read."""
    path = client.fetch(name, [_README]) / _README
    try:
        match = _FRONT_MATTER.match(read_text(path, _MOST_README))
        value = parse_yaml(match[1], str(path)) if match else None
    except InputError:
        return []
    configs = value.get("configs") if isinstance(value, dict) else None
    return [e for e in configs if isinstance(e, dict)] if isinstance(configs, list) else []


def _patterns(value: object) -> list[tuple[str, list[str]]]:
    """[(split, patterns)] of `data_files`: a pattern, a list of them, or of {split, path}."""
    if isinstance(value, dict):
        value = [{"split": split, "path": path} for split, path in value.items()]
    out = []
    for item in value if isinstance(value, list) else [value]:
        split, path = "train", item
        if isinstance(item, dict):
            split, path = _text(item.get("split"), "train"), item.get("path")
        patterns = path if isinstance(path, list) else [path]
        out.append((split, [p for p in patterns if isinstance(p, str)]))
    return out


def files_by_split(paths: Iterable[str]) -> dict[str, list[str]]:
    """{split: files} by what the names of files and folders say; all are `train` where none says
    anything."""
    splits: dict[str, list[str]] = {}
    files = [p for p in paths if p.endswith(DATA_FILES) and Path(p).name not in _NO_ROWS]
    for path in files:
        splits.setdefault(_split_of(path), []).append(path)
    rest = splits.pop("", [])
    return splits or ({"train": rest} if rest else {})


def _split_of(path: str) -> str:
    """The split that a name says: train-00000-of-00002.parquet, test/part.jsonl; "" for none."""
    if shard := _SHARD.search(path):
        word = shard[1].rpartition(".")[2] or shard[1]
        return next((split for split, synonyms in _WORDS.items() if word.lower() in synonyms), word)
    *folders, file = path.lower().split("/")
    for part in (*reversed(folders), file.partition(".")[0]):
        words = re.split(r"[^a-z]+", part)
        for split, synonyms in _WORDS.items():
            if any(word in synonyms for word in words):
                return split
    return ""
