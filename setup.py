"""Packages: rljax, and configs/ as rljax.configs, so that `rljax train quickstart` works from a
wheel. Everything else is in pyproject.toml, where one folder cannot be two packages' place."""

from pathlib import Path

from setuptools import find_packages, setup

configs = {
    ".".join(["rljax", *folder.parts]): str(folder)
    for folder in (Path("configs"), *Path("configs").rglob("*"))
    if folder.is_dir() and folder.name != "__pycache__"
}
setup(
    packages=[*find_packages(include=["rljax", "rljax.*"]), *configs],
    package_dir=configs,
    package_data={
        **{name: ["*.json", "*.txt"] for name in configs},
        "rljax.pods": ["host.sh"],
        "rljax.report": ["card.md"],
    },
)
