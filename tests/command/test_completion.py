"""rljax completion: the scripts in the shells that they are for, asked as a key press asks them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from conftest import REPO

from rljax.command import COMMANDS
from rljax.command.completion import words
from rljax.config import Config, field_names
from rljax.config.flags import shipped_configs

# What is typed, some of the words that complete it, and one that does not.
ASKED = [
    ("rljax ", {"train", "doctor", "config", "--version"}, "prepare"),
    ("rljax tr", {"train"}, "sweep"),
    ("rljax config ", {"show", "diff"}, "train"),
    ("rljax label p", {"preferences"}, "steps"),
    ("rljax train ", {"quickstart", "presets/dapo"}, "train"),
    ("rljax train presets/g", {"presets/grpo", "presets/gspo"}, "presets/dapo"),
    ("rljax train quickstart --dry", {"--dry_run"}, "--nodry_run"),
    ("rljax config show --", {"--yaml", "--config.", "--changed", "--noyaml"}, "--dry_run"),
    ("rljax evaluate --search_reads=", {"outcome", "process", "critic"}, "train"),
    ("rljax plan quickstart --config.batch.e", {"--config.batch.epochs="}, "--config.seed="),
    ("rljax train --config=presets/da", {"presets/dapo"}, "presets/grpo"),
    ("rljax train --config.dataflow=gr", {"grpo"}, "ppo"),
    ("rljax train --config.export=", {"true", "false"}, "grpo"),
    ("rljax train --config.algorithm.policy_loss=ppo", {"ppo_clip"}, "gspo"),
    ("rljax pod ba", {"babysit"}, "up"),
    ("rljax completion ", {"bash", "zsh", "fish"}, "train"),
    ("rljax report my_", {"my_run"}, "other"),
    ("rljax train --config.model=my_", {"my_run"}, "other"),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """{shell: the file of its script}, in a folder with a file to complete. JAX is not imported."""
    folder = tmp_path_factory.mktemp("shells")
    (folder / "my_run").mkdir()
    code = (
        "import sys\nfrom rljax.command import main\ntry: main()\n"
        "finally: assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    files = {}
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [sys.executable, "-c", code, "completion", shell],
            capture_output=True,
            text=True,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
        assert done.returncode == 0, done.stderr
        files[shell] = folder / f"c.{shell}"
        files[shell].write_text(done.stdout)
    return files


def test_all_words_are_there():
    table = words()
    assert set(table[""]) > {name.split()[0] for name in COMMANDS}
    assert table["--config."] == [f"--config.{name}=" for name in field_names(Config)]
    assert table["--config="] == list(shipped_configs())
    for name, command in COMMANDS.items():
        flags = table[f"{name} -"]
        assert ("--trust_code" in flags) == hasattr(command.options(), "trust_code")


def needs(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def test_bash_completes(scripts):
    program = f"source {scripts['bash']}\n"
    for line, _, _ in ASKED:
        program += f"COMP_LINE='{line}' COMP_POINT={len(line)}; _rljax; "
        program += 'printf "%s\\n" "${COMPREPLY[@]}" ---\n'
    done = subprocess.run(
        [needs("bash"), "--norc", "-c", program],
        capture_output=True,
        text=True,
        cwd=scripts["bash"].parent,
    )
    answers = done.stdout.split("---\n")
    for (line, some, other), answer in zip(ASKED, answers, strict=False):
        assert some <= set(answer.split()) and other not in answer.split(), (line, answer)
    assert "syntax" not in done.stderr


def test_fish_completes(scripts):
    for line, some, other in ASKED:
        done = subprocess.run(
            [needs("fish"), "--no-config", "-c", f"source {scripts['fish']}; complete -C '{line}'"],
            capture_output=True,
            text=True,
            cwd=scripts["fish"].parent,
        )
        found = {word.split("\t")[0].strip("/") for word in done.stdout.splitlines()}
        found |= {word.partition("=")[2] for word in found if not word.endswith("=")}
        assert some <= found and other not in found, (line, found, done.stderr)


def pressed(command: list[str], prepare: str, line: str, whole: bytes, folder) -> str:
    """What an interactive shell shows after a press of the key, up to what is expected."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(command[0], command, {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "$ "})
    text = b""

    def read_until(wanted: bytes, seconds: float = 120.0) -> None:
        nonlocal text
        deadline = time.monotonic() + seconds
        while wanted not in text and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                text += os.read(terminal, 4096).replace(b"\x07", b"")  # the bell

    try:
        os.write(terminal, f"{prepare}; echo rea''dy\n".encode())
        read_until(b"\nready")
        text = text.rpartition(b"\nready")[2]
        os.write(terminal, f"{line}\t".encode())
        read_until(whole)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return text.decode(errors="replace")


PRESSED = [
    ("rljax doc", "rljax doctor "),
    ("rljax config sh", "rljax config show "),
    ("rljax train --config.dataflow=saf", "rljax train --config.dataflow=safe_rlhf "),
    ("rljax train --config.batch.ep", "rljax train --config.batch.epochs="),
    ("rljax train presets/da", "rljax train presets/dapo "),
]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(("line", "whole"), PRESSED)
def test_a_press_of_the_key_completes_the_line(shell, line, whole, scripts):
    command = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    start = "autoload -Uz compinit; compinit -u -D; " if shell == "zsh" else ""
    folder = scripts[shell].parent
    shown = pressed(
        [needs(shell), *command], f"{start}source c.{shell}", line, whole.encode(), folder
    )
    assert whole in shown, shown
