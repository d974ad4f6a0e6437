"""No command sends control characters of a file, a folder or a response to the terminal."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys

import pytest
from conftest import REPO
from rich.live import Live
from rich.text import Text

from rljax.command.commands import main
from rljax.config import Config, to_dict
from rljax.errors import InputError, printable
from rljax.tracking.screen import Terminal, printable_streams, streams_without_readers

# Moves the cursor, colours, sets a title, links, and turns the text around: each as it is written.
EVIL = "\x1b[2J\x1b[31m\x1b]0;t\x07\x9b1m\u202e\x7f\r"
SENT = {*EVIL} - set("[2J31m]0;t")


def sends(text: str) -> bool:
    return not SENT.isdisjoint(text)


def test_printable_shows_what_it_does_not_send():
    assert printable("a\tb\n\x1b[31m\x85\u202e\ud800é🙂") == (
        "a\tb\n\\x1b[31m\\x85\\u202e\\ud800é🙂"
    )
    assert not sends(str(InputError(EVIL, value=[EVIL], rule=EVIL, fix=EVIL)))


@pytest.fixture
def run(tmp_path):
    """A folder whose name and files are full of them."""
    folder = tmp_path / f"run{EVIL}"
    folder.mkdir()
    config = to_dict(Config()) | {"model": EVIL}
    (folder / "config.json").write_text(json.dumps(config))
    row = {"step": 1, f"a{EVIL}": 1.0, "reward/mean": 0.5, "phase": f"rl{EVIL}"}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    sample = {"step": 1, "prompt": EVIL, "response": EVIL, "reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "summary.json").write_text(json.dumps({"status": EVIL, "accuracy_after": 0.2}))
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": EVIL, "ground_truth": EVIL}) + "\n")
    return folder


COMMANDS = {
    "doctor": ["doctor", "RUN", "--nojax"],
    "report": ["report", "RUN"],
    "watch": ["watch", "RUN", "--once"],
    "config show": ["config", "show", "RUN"],
    "config show as YAML": ["config", "show", "RUN", "--yaml"],
    "config diff": ["config", "diff", "RUN", "quickstart"],
    "evaluate": ["evaluate", "RUN"],
    "plan": ["plan", "RUN"],
    "inspect": ["inspect", "RUN/rows.jsonl", "--model=none"],
    "no command": [EVIL],
    "no config": ["train", f"--config={EVIL}"],
    "no field": ["train", "quickstart", f"--config.a{EVIL}=1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_them(name, run, capsys):
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        main([word.replace("RUN", str(run)) for word in COMMANDS[name]])
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out + err and not sends(out + err)


def test_prints_warnings_and_logs_are_shown(capsys):
    log = logging.getLogger("test_screen")
    with printable_streams(), printable_streams():
        log.addHandler(logging.StreamHandler())
        print(EVIL, end="")
        sys.stdout.writelines([EVIL])
        log.warning(EVIL)
        assert sys.stdout.writable() and not sys.stdout.isatty()
    out, err = capsys.readouterr()
    assert out == printable(EVIL) * 2 and err == printable(EVIL) + "\n"


def test_rich_keeps_its_own_codes_and_shows_those_of_texts():
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, width=200, color_system="standard")
    terminal.print(Text(f"a{EVIL}b", style="red"))
    with Live(Text(f"c{EVIL}d"), console=terminal, refresh_per_second=1):
        pass
    text = stream.getvalue()
    assert "\x1b[31m" in text and "\\x1b[2J" in text
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "\u202e" not in text


def test_rich_writes_past_the_stream_that_escapes(capsys):
    with printable_streams():
        Terminal(force_terminal=True, color_system="standard").print(Text("a", style="red"))
    assert "\x1b[31ma" in capsys.readouterr().out


# -- streams that nobody reads, and closed ones --


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("streams", [contextlib.nullcontext, printable_streams])
def test_work_goes_on_without_the_reader_of_its_output(streams, monkeypatch, caplog):
    with pipe_without_reader() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with streams(), streams_without_readers(), streams_without_readers():
            Terminal().print("a")
            print("b", flush=True)
        print("c", flush=True)
    assert caplog.messages == [
        "nobody reads the standard output any more: the work goes on without it"
    ]


@pytest.mark.parametrize(("writes", "code"), [(True, 0), (False, 1)])
def test_a_command_that_writes_a_file_ends_well_without_a_reader(writes, code, tmp_path):
    """One that only prints ends, as every program does behind `| head`."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "ground_truth": "b"}\n')
    prepare = ["data", "prepare", f"--source={tmp_path}/rows.jsonl", f"--out={tmp_path}/out"]
    command = [sys.executable, "-m", "rljax", *(prepare if writes else ["configs"])]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with pipe_without_reader() as pipe:
        ended = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, env=environment, text=True
        )
    assert ended.returncode == code and "Traceback" not in ended.stderr
    assert ("nobody reads the standard output" in ended.stderr) == writes


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_ends_well_with_closed_streams(closed, tmp_path):
    """What its children print does not come into a file that it opens."""
    program = (
        "import subprocess, sys; from rljax.tracking.screen import open_closed_streams; "
        "open_closed_streams(); file = open('file', 'w'); "
        "subprocess.run(['echo', 'printed'], check=True); print('printed', flush=True); "
        "from rljax.command import main; main(['configs'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    line = f'exec "{sys.executable}" -c "{program}" {closed}'
    ended = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 0 and not ended.stdout and not ended.stderr
    assert (tmp_path / "file").read_text() == ""
