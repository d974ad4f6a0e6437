"""docs/pods/tpu_vm.md: its commands are ones that rljax, bash and gcloud take."""

import re
import shlex
import subprocess

import pytest
from absl import flags
from conftest import REPO

from rljax.command import COMMANDS
from rljax.config.declare import define_flags, parsed_options
from rljax.config.flags import config_flags
from rljax.config.options import PodOptions
from rljax.pods import read_pod
from rljax.pods.supervise import RESTARTS

PAGE = (REPO / "docs/pods/tpu_vm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMAND_LINES = [line for block in BLOCKS for line in block.splitlines()]


def options_of(words):
    """The checked options of an rljax command, without running it."""
    name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS)
    path, _, others = config_flags(words[len(name.split()) :])
    values = flags.FlagValues()
    define_flags(COMMANDS[name].options, values)
    positional = values([name, *others])[1:]
    if COMMANDS[name].config and positional and not path:
        positional = positional[1:]
    return parsed_options(COMMANDS[name].options, positional, values)


def test_bash_takes_every_block():
    assert len(BLOCKS) == 9
    for block in BLOCKS:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("line", [x for x in COMMAND_LINES if "rljax" in x], ids=lambda x: x[:40])
def test_rljax_takes_every_command(line):
    line = (
        re.sub(r"^(\w+=\S+ )+", "", line).partition(" > ")[0].replace("$SLURM_ARRAY_TASK_ID", "0")
    )
    words = shlex.split(line)
    if words[0] != "rljax":  # what another program is given as text
        text = next(w.removeprefix("--command=") for w in words if w.startswith("--command="))
        words = shlex.split(text.rpartition("&& ")[2])
    assert words.pop(0) == "rljax"
    options = options_of(words)
    if isinstance(options, PodOptions):
        if options.type:
            read_pod(options.type, options.slices)
        if options.command:
            options_of(list(options.command))


def test_exit_codes_are_those_that_are_started_again():
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| (yes|no)\b.*\|$", PAGE, re.MULTILINE)
    codes = {int(code): word for row, word in rows for code in row.split(",")}
    assert {code for code, word in codes.items() if word == "yes"} == set(RESTARTS)
