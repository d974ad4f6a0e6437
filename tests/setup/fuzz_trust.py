"""Looks at many configs of known and unknown texts under an audit hook, as a command does: SEED
COUNT -> JSON of how many were accepted, and of what was imported, run, opened or connected to."""

import importlib
import json
import random
import sys

from rljax.components import resolve
from rljax.config import NAMESPACES, Config, field_names, from_dict, value_of
from rljax.config.overrides import kind_of_text
from rljax.config.schema import DATA
from rljax.config.schema import FIELDS as DECLARED
from rljax.config.trust import asks
from rljax.errors import InputError

WATCHED = {
    "import",
    "exec",
    "open",
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "ctypes.dlopen",
    "marshal.loads",
}
OPTIONS = (
    "id command server url base_url cls env folder path corpus method inner functions rewards "
    "reward judge generator game of schema cache api_key_env optimizer template n tasks "
    "allow_unsafe_execution"
).split()
VALUES = (
    "'evil.run'",
    "'evil:X-v0'",
    "'./evil.py:run'",
    "1",
    "True",
    "None",
    "('evil.run()',)",
    "'touch ran'",
    "'http://127.0.0.1:9/x'",
    "(('a', 'evil.run'),)",
    "{}",
    "[1]",
    "'s3://b/x'",
    "'mixture(rewards=(\\'evil.run\\',))'",
    "'/etc/passwd'",
    "evil",
    "__import__('evil')",
    "'\\x00'",
)
LOOSE = (
    "evil.run",
    "evil.py:run",
    "./evil.py:f.jsonl",
    "evil",
    "tfds:evil",
    "tfds:/tmp",
    "tfds:a:b",
    "hf://a/b.py:run",
    "http://127.0.0.1:9/rows.jsonl",
    "s3://b/r.parquet",
    "file:///etc/passwd",
    "os.system(command='touch ran')",
    "__import__('evil')",
    "\uff45vil.run",
    "a=evil.run",
    "reference=program(command='touch ran')",
    "evil.run()()",
    "(lambda: 1)()",
    "x" * 300,
    "evil.py:run(x=1).jsonl",
    "rows.jsonl",
    "exec('import evil')",
    "evil\n.run",
    "\x00",
    "../x",
)
HOMES = {*NAMESPACES.values(), "rljax.sampler.layout", "rljax.environments.calls"}
NAMES = [
    name
    for home in sorted(HOMES)
    for name, value in vars(importlib.import_module(home)).items()
    if callable(value)
]
DEFAULTS = Config()
FIELDS = [f for f in field_names(Config) if isinstance(value_of(DEFAULTS, f), str | tuple)]


def text(rng: random.Random) -> str:
    """A call of something that is there, or a text that is meant to be taken for another thing."""
    if rng.random() < 0.3:
        return rng.choice(LOOSE)
    given = [f"{rng.choice(OPTIONS)}={rng.choice(VALUES)}" for _ in range(rng.randint(0, 3))]
    made = f"{rng.choice([*NAMES, 'evil.run'])}({', '.join(given)})"
    if rng.random() < 0.2:
        made = f"{rng.choice(NAMES)}({rng.choice(OPTIONS)}={made!r})"
    return rng.choice(["", "", "", " ", "x=", "reference="]) + made


def config(rng: random.Random) -> Config:
    flat = {}
    for field in rng.sample(FIELDS, rng.randint(1, 4)):
        many = isinstance(value_of(DEFAULTS, field), tuple)
        flat[field] = [text(rng)] if many else text(rng)
    return from_dict(flat, "fuzz")


def is_accepted(made: Config) -> bool:
    """Returns whether nothing of the config asks for trust; if so its components are looked up."""
    if asks(made):
        return False
    for field, stage in ((n, spec.component) for n, spec in DECLARED.items() if spec.component):
        value = value_of(made, field)
        for one in (value,) if isinstance(value, str) else value:
            data = field in (*DATA, "model") and kind_of_text(one) != "component"
            try:
                if one and one != "console" and not data:
                    resolve(one, NAMESPACES[stage])
            except InputError:
                pass
    return True


def main(seed: int, count: int) -> None:
    rng, seen, watching = random.Random(seed), [], False

    def note(event: str, args: tuple) -> None:
        if watching and event in WATCHED:
            seen.append((event, str(args)[:200]))

    sys.addaudithook(note)
    for _ in range(100):  # what is imported once, and cached
        is_accepted(config(rng))
    watching = True
    accepted = sum(is_accepted(config(rng)) for _ in range(count))
    watching = False
    print(json.dumps({"accepted": accepted, "seen": seen[:20], "evil": "evil" in sys.modules}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
