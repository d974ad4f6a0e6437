"""Nested dicts of arrays, the form that parameters have."""

from collections.abc import Callable, Mapping


def nested(flat: Mapping[tuple, object]) -> dict:
    """Returns {path: leaf} as nested dicts."""
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def flattened(tree: Mapping, prefix: tuple = ()) -> dict[tuple, object]:
    """Returns nested dicts as {path: leaf}."""
    leaves: dict = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping)
        leaves |= flattened(value, (*prefix, key)) if inner else {(*prefix, key): value}
    return leaves


def split(tree: Mapping, wanted: Callable[[tuple], bool]) -> tuple[dict, dict]:
    """Returns (the leaves whose path is wanted, the rest), as nested dicts that
    share the leaves."""
    flat = flattened(tree)
    yes = {path: value for path, value in flat.items() if wanted(path)}
    return nested(yes), nested({path: v for path, v in flat.items() if path not in yes})


def merged(one: Mapping, other: Mapping) -> dict:
    """Returns both trees as one; they share no leaf."""
    return nested(flattened(one) | flattened(other)) if other else dict(one)
