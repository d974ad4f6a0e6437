"""Whatever a stranger's file holds, an InputError alone comes out of who reads it, and soon; and no
other place of the package parses or opens files."""

import ast
import dataclasses
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO, lanes
from ugly_documents import _written, documents

from rljax import files
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import Config, to_dict
from rljax.config.data_files import to_yaml
from rljax.config.flags import load_config_file
from rljax.data.images.files import Source
from rljax.data.offline.rows import KINDS, load_rows, load_stored_rows
from rljax.data.rows.sources import load_demonstrations, load_prompts
from rljax.data.text.template import ChatTemplate
from rljax.data.text.tokenizer import load_tokenizer
from rljax.environments.adapters.shared import _arguments
from rljax.errors import InputError, printable
from rljax.evaluation.suite_rows import _test_cases
from rljax.experiments.sweep import Member
from rljax.gguf import gguf_folder
from rljax.models.huggingface.checkpoint_folder import find_tensors
from rljax.models.huggingface.load import load_config
from rljax.report import timeline
from rljax.report.card import front_matter, read_evaluation
from rljax.report.page import write_report
from rljax.report.pipeline import write_pipeline_page
from rljax.report.run_folder import read_run
from rljax.runs.folder import is_locked
from rljax.runs.jsonl import read_jsonl
from rljax.workers.wire import BrokenFrame, take_frame

DOCUMENTS, WRITTEN = documents(), len(_written())
SOON_S = 20.0  # of one document, on a machine that does much else

# What parses text, or opens a file, by itself.
PARSERS = {
    "json.loads",
    "json.load",
    "yaml.load",
    "yaml.safe_load",
    "pickle.loads",
    "pickle.load",
    "pickle.Unpickler",
    "struct.unpack",
    "struct.unpack_from",
    "tomllib.loads",
    "tomllib.load",
    "csv.reader",
    "csv.DictReader",
    "np.load",
    "np.fromfile",
    "np.memmap",
    "np.loadtxt",
    "zipfile.ZipFile",
    "tarfile.open",
    "gzip.open",
    "ElementTree.parse",
    "marshal.loads",
    "configparser.ConfigParser",
    "pyarrow.parquet.read_table",
    "pyarrow.parquet.read_metadata",
    "pyarrow.parquet.ParquetFile",
    "open",
    "os.open",
    "safe_open",
    "load_file",
}
LAST_NAMES = {name.rpartition(".")[2] for name in PARSERS}
METHODS = {"read_text", "read_bytes", "open", "splitlines", "load_file", "from_file", "fromfile"}
OPENING = re.compile(rf"\b({'|'.join(LAST_NAMES | METHODS)})\b")
OURS = "a file that comes with the package, or that the system writes"
WORKER = "what this process itself has sent to another of its own"
REWARD = "of a reward: what it raises is the status of its sample"
MESSAGE = "lines of an error message or of a text of ours, and no file"
HOSTS = "messages and files of the hosts of one run"
RUN = "a file that the run itself writes, behind a look at what has its name"
# Who may, beside files.py: {file: why}.
MAY = {
    "command/commands.py": OURS,
    "command/peer_answers.py": WORKER,
    "command/real_demo.py": "answers of its own child and server",
    "plan/host.py": OURS,
    "command/configs.py": OURS,
    "command/launch.py": OURS,
    "config/checks.py": OURS,
    "config/from_python.py": "it writes",
    "config/overrides.py": WORKER,
    "doctor/before_jax.py": MESSAGE,
    "data/images/files.py": "images: Source._open is its own one place, and read below",
    "data/rows/prepare.py": MESSAGE,
    "data/rows/read.py": "tables, read below",
    "data/rows/stored.py": "tables, read below",
    "tasks/programs.py": OURS,
    "data/text/guarded_process.py": WORKER,
    "data/text/messages.py": "arguments of calls with raw control characters, read below",
    "doctor/probe.py": WORKER,
    "environments/play_worker.py": WORKER,
    "environments/schemas.py": "texts, read below",
    "evaluation/suite_rows.py": "a pickle of texts alone, read below",
    "experiments/accept.py": OURS,
    "experiments/comparison.py": WORKER,
    "experiments/sweep.py": RUN,
    "hosts/cluster.py": HOSTS,
    "hosts/console.py": WORKER,
    "hub/client.py": "it appends to a download of its own",
    "hosts/shutdown.py": HOSTS,
    "hosts/exchange.py": HOSTS,
    "hosts/preflight.py": HOSTS,
    "hosts/stopping.py": OURS,
    "hosts/watchdog.py": HOSTS,
    "models/huggingface/load.py": "it writes",
    "models/huggingface/peft.py": "checked by open_file just before",
    "models/huggingface/safetensors_file.py": "eight bytes as a number",
    "plan/chips.py": MESSAGE,
    "plan/compiled.py": MESSAGE,
    "plan/hlo_text.py": MESSAGE,
    "plan/programs.py": MESSAGE,
    "plan/alternatives.py": MESSAGE,
    "pods/archive.py": "it writes",
    "pods/google.py": "the answer of gcloud",
    "pods/supervise.py": HOSTS,
    "pods/templates.py": OURS,
    "report/inline.py": OURS,
    "report/starts.py": RUN,
    "rewards/answers/countdown.py": REWARD,
    "rewards/judges/endpoint.py": "strict JSON of a judge: its errors are those of the call",
    "rewards/judges/endpoint_state.py": "counts beside a lock, of one user",
    "rewards/judges/rubric_buffer.py": WORKER,
    "rewards/pool/supervisor.py": WORKER,
    "rewards/pool/worker.py": WORKER,
    "rewards/sandbox/kernel.py": OURS,
    "rewards/sandbox/process.py": "the sandbox has a wire of its own",
    "rewards/sandbox/values.py": "the sandbox has a wire of its own",
    "rewards/sandbox/zygote.py": "it starts without the package",
    "rewards/text/answers.py": REWARD,
    "rewards/text/gym.py": REWARD,
    "rewards/text/instructions.py": REWARD,
    "rewards/text/rules.py": REWARD,
    "rewards/text/structure.py": REWARD,
    "rewards/unit_tests/code_forms.py": REWARD,
    "rewards/unit_tests/code_fusion.py": REWARD,
    "rewards/unit_tests/programs.py": REWARD,
    "sampler/memory.py": OURS,
    "serving/chat.py": "arguments that our parser has written",
    "checkpoint/checkpoint.py": HOSTS,
    "checkpoint/disk.py": "a folder, for fsync",
    "setup/dry_run.py": MESSAGE,
    "runs/folder.py": "the lock, without following or waiting",
    "runs/jsonl.py": RUN,
    "runs/mirror.py": RUN,
    "tracking/signals.py": OURS,
    "training/nonfinite.py": MESSAGE,
    "training/preflight.py": HOSTS,
    "workers/bootstrap.py": WORKER,
    "workers/prints.py": RUN,
    "workers/progress.py": "a record of fixed size",
    "workers/wire.py": "plain values alone: tests/workers/test_broken_frames.py",
}


def parses(code: str) -> bool:
    if not OPENING.search(code):
        return False
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and node.func.attr
            if (method or getattr(node.func, "id", "")) not in LAST_NAMES | METHODS:
                continue
            name = ast.unparse(node.func)
            if name in PARSERS or (method in METHODS and name != "webbrowser.open"):
                return True
        if isinstance(node, ast.ClassDef) and PARSERS & set(map(ast.unparse, node.bases)):
            return True
    return False


@pytest.mark.slow
def test_files_are_opened_and_parsed_in_one_place():
    home = REPO / "rljax"
    found = {
        path.relative_to(home).as_posix() for path in home.rglob("*.py") if parses(path.read_text())
    }
    assert sorted(found - {"files.py"} - MAY.keys()) == [], "read it by rljax.files"
    assert sorted(MAY.keys() - found) == [], "it parses nothing any more"


def test_an_opening_is_found():
    for code in ("json.loads(path.read_text())", "with open(x) as f: pass", "os.open(x, 0)"):
        assert parses(code), code
    assert not parses("read_text(path)\nread_data(x)")


# -- the documents --


@dataclasses.dataclass
class InFolder:
    """Reads a folder of which one file is the document, or is no file."""

    name: str
    read: Callable[[Path], object]
    others: dict[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, folder: Path, data: bytes | Callable[[Path], None]) -> object:
        place = folder / self.name
        place.parent.mkdir(parents=True, exist_ok=True)
        for other, text in self.others.items():
            (folder / other).write_text(text)
        if callable(data):
            place.unlink(missing_ok=True)
            data(place)
        else:
            place.write_bytes(data)
        return self.read(folder)


def in_folder(names, read, others: dict[str, str] | None = None):
    return [InFolder(name, read, others or {}) for name in names]


def of_file(name: str, read):
    """A reader of the file itself."""
    return InFolder(name, lambda folder: read(folder / name))


def of_text(read):
    """A reader of what is text by then."""
    return lambda folder, data: read(data.decode("utf-8", "replace"))


def checkpoint(folder: Path):
    return Checkpoints(folder).damage(1), Checkpoints(folder).read_state(1)


def finished(folder: Path):
    return Member("a", "a", {}, Config(run_dir=str(folder))).finished()


def prompts(path: Path):
    return load_prompts(str(path), "train", need_ground_truth=False)


def stored(path: Path):
    return load_stored_rows(str(path), "examples")[0]


def rows(kind: str):
    return of_file("rows.jsonl", lambda path: load_rows(str(path), "train", kind))


def rendered(text: str):
    messages = [{"role": "user", "content": "hi"}]
    template = ChatTemplate(text, "here")
    return template.render(messages, special_tokens={}, add_generation_prompt=True)


OF_A_RUN = (
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "config.json",
    "starts.jsonl",
    "episodes.jsonl",
    "data.json",
    "timeline.json",
    "model.json",
    "meanings.json",
)
TOKENIZER = {"config.json": "{}", "tokenizer_config.json": "{}"}
READERS = {
    "config.json": of_file("c.json", lambda path: load_config_file(str(path))),
    "config.yaml": of_file("c.yaml", lambda path: load_config_file(str(path))),
    "read_json": of_file("a", files.read_json),
    "parse_yaml": lambda folder, data: files.parse_yaml(data, "here"),
    "parse_toml": of_text(lambda text: files.parse_toml(text, "here")),
    "read_arrays": of_file("a.npz", files.read_arrays),
    "gguf": of_file("m.gguf", gguf_folder),
    "prompts": [of_file(f"rows{end}", prompts) for end in files.DATA_FILES],
    "demonstrations": of_file("rows.jsonl", lambda path: load_demonstrations(str(path), "train")),
    "stored": [of_file(f"rows{end}", stored) for end in (".jsonl", ".parquet")],
    "rows": list(map(rows, KINDS)),
    "image": of_file("a.png", lambda path: Source(str(path), "here").pixels()),
    "size of an image": of_file("a.png", lambda path: Source(str(path), "here").size()),
    "run": in_folder(OF_A_RUN, read_run),
    "timeline": in_folder([timeline.FILE], timeline.read),
    "lineage": in_folder(["lineage.json"], write_pipeline_page),
    "lock": in_folder([".lock"], is_locked),
    "card": of_text(front_matter),
    "evaluation": of_file("e.json", read_evaluation),
    "member": in_folder(["summary.json"], finished),
    "checkpoint": in_folder(["00000001/state.json", "00000001/manifest.json"], checkpoint),
    "model": in_folder(["config.json"], load_config),
    "weights": in_folder(["model.safetensors", "model.safetensors.index.json"], find_tensors),
    "tests of a suite": of_text(lambda text: _test_cases({"t": text}, "t")),
    "arguments": of_text(_arguments),
    "frame": lambda folder, data: take_frame(bytearray(len(data).to_bytes(8, "big") + data)),
    # Slow: each document takes another process, or a page.
    "report": in_folder(OF_A_RUN, write_report),
    "tokenizer": in_folder(["tokenizer.json", "char_tokenizer.json"], load_tokenizer, TOKENIZER),
    "tokenizer's config": in_folder(
        ["tokenizer_config.json"], load_tokenizer, {"char_tokenizer.json": '{"alphabet": "ab"}'}
    ),
    "template": of_text(rendered),
}
SLOW = ("report", "tokenizer", "tokenizer's config", "template")


def late(*_):
    raise TimeoutError("it has not come back")


@pytest.fixture(autouse=True)
def in_time():
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)


def what_is_wrong(read, folder: Path, data) -> str:
    """Returns what else than an InputError comes out of a reader; "" where nothing does."""
    folder.mkdir(exist_ok=True)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        repr(read(folder, data))
    except (InputError, BrokenFrame) as error:
        return "" if printable(str(error)) == str(error) else f"not printable: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return ""


def readers_of(name: str) -> list:
    readers = READERS[name]
    return readers if isinstance(readers, list) else [readers]


@pytest.mark.parametrize("every", lanes([4], [1]), ids=lambda every: f"1 of {every} drawn")
@pytest.mark.parametrize("name", READERS)
def test_only_an_input_error_comes_out(name, every, tmp_path):
    """All documents that are written out, and some of those that are drawn."""
    some = list(DOCUMENTS.items())
    some = some[::10] if name in SLOW else some[:WRITTEN] + some[WRITTEN::every]
    wrong = [
        (number, document, what)
        for number, read in enumerate(readers_of(name))
        for document, data in some
        if (what := what_is_wrong(read, tmp_path / str(number), data))
    ]
    assert wrong == []


def socket_at(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name may be long, and a socket's address may not
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


NO_FILES = {
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a socket": socket_at,
    "memory of the process": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_nothing_waits_for_what_is_no_file(kind, tmp_path):
    wrong = [
        (name, read.name, what)
        for name in READERS
        for number, read in enumerate(readers_of(name))
        if isinstance(read, InFolder)
        if (what := what_is_wrong(read, tmp_path / f"{name}{number}", NO_FILES[kind]))
    ]
    assert wrong == []


LETTERS = [*"\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x1f\r\n\x00\ufeff\x7f\x80\u200e٣\ue000"]


@pytest.mark.parametrize("letter", LETTERS, ids=ascii)
def test_a_text_is_read_as_it_was_written(letter, tmp_path):
    for form in ("a*b", "*", "* a", "a *", "a\n* b", "'*", "a: * #", "*\n*"):
        text = form.replace("*", letter)
        fields = to_dict(Config(model=text)) if form == "a*b" else {"model": text}
        for name, written in (("c.yaml", to_yaml(fields)), ("c.json", json.dumps(fields))):
            (tmp_path / name).write_text(written, encoding="utf-8", newline="")
            assert load_config_file(str(tmp_path / name)).model == text, (name, text)
        files.write_rows(tmp_path / "rows.jsonl", [{"prompt": text}, {"prompt": "b"}])
        read = [
            files.parse_row(line, "", n) for n, line in files.read_lines(tmp_path / "rows.jsonl")
        ]
        assert read == [{"prompt": text}, {"prompt": "b"}]


def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "rows.jsonl"
    files.write_text(path, "before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="cannot be written.*No space left"):
        files.write_text(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["rows.jsonl"]
    with pytest.raises(InputError, match="is a folder; a file is written. Fix: name a file"):
        files.write_text(tmp_path, "text")


def test_half_a_pair_is_refused_where_it_is_read_and_mended_where_it_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    files.write_rows(path, [{"prompt": "a\ud800b"}])
    assert read_jsonl(path) == [{"prompt": "a\ufffdb"}]
    path.write_text('{"prompt": "a\\ud800b"}\n')
    assert read_jsonl(path) == [{"prompt": "a\ufffdb"}]
    with pytest.raises(InputError, match="rows.jsonl: line 1 has half a surrogate pair"):
        prompts(path)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["json", "yaml"])
def test_many_fields_take_no_longer_than_they_are_read(end, tmp_path):
    count = 200_000 if end == "json" else 10_000
    names = [f"field{i}" for i in range(count)]
    for twice, says in (([names[-1]], "stands twice"), ([], "more names that are no fields")):
        text = ",\n".join(f'"{name}": 1' for name in [*names, *twice])
        path = tmp_path / f"c.{end}"
        path.write_text(
            "{" + text + "}" if end == "json" else text.replace('"', "").replace(",", "")
        )
        errors = []

        def read(folder, path, errors=errors):
            try:
                load_config_file(str(path))
            except InputError as error:
                errors.append(str(error))
                raise

        assert what_is_wrong(read, tmp_path, path) == "" and says in errors[0]


@pytest.mark.parametrize("value", ["٣", "²", "9" * 5000, "１２", "1e400x"])
def test_numbers_are_of_ascii_digits(value, tmp_path):
    for field in ("steps", "actor_optimizer.lr", "sft.steps"):
        (tmp_path / "c.yaml").write_text(f"{field}: {value}", encoding="utf-8")
        if field == "actor_optimizer.lr" and value.isascii() and value.isdecimal():
            continue  # no whole number, but it is one of a float, which is then out of its range
        with pytest.raises(InputError, match="must be a"):
            load_config_file(str(tmp_path / "c.yaml"))


IMAGES = [None, [None], [], True, 3, {}, "", "\x00", [3], [[]], [{}], ["\x00.png"]]


@pytest.mark.parametrize("images", IMAGES, ids=repr)
@pytest.mark.parametrize("where", ["images", "image"])
def test_a_column_of_images_may_hold_anything(images, where, tmp_path):
    message, path = {"role": "user", "content": "<image>"}, tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", where: images}, {"messages": [message, None], where: images}]
    for row in rows:
        path.write_text(json.dumps(row))
        for read in (prompts, stored, lambda path: load_demonstrations(str(path), "train")):
            said = what_is_wrong(lambda _, path, read=read: read(path), tmp_path, path)
            assert said == ""
    if not images and where == "images":
        path.write_text(json.dumps(rows[0]))
        if images is None or isinstance(images, list):
            assert "images" not in prompts(path)[0]


def test_a_chat_may_hold_nearly_all_characters_that_mark_the_turns():
    said = "{{ m.content }}{% generation %}{{ m.content }}{% endgeneration %}"
    template = ChatTemplate("{% for m in messages %}" + said + "{% endfor %}", "here")
    marked = dict(special_tokens={}, add_generation_prompt=False)
    text = "".join(map(chr, range(0xE000, 0xF8FF + 1)))
    whole, spans = template.render_marked([{"role": "user", "content": text}], **marked)
    assert whole == text * 2 and spans == [(len(text), 2 * len(text))]


def test_merge_keys_copy_a_bounded_number_of_fields(tmp_path):
    """2,000 fields that 2,000 merge keys would copy are refused before they are."""
    fields = ", ".join(f"k{i}: 1" for i in range(2_000))
    text = f"a: &a {{{fields}}}\nb: {{<<: [{','.join(['*a'] * 2_000)}]}}\n"
    (tmp_path / "own.yaml").write_text(text)
    signal.alarm(60)
    try:
        with pytest.raises(InputError, match="merge keys copy more than"):
            files.parse_yaml(text, "README.md")
        with pytest.raises(InputError, match="merge keys copy more than"):
            load_config_file(str(tmp_path / "own.yaml"))
    finally:
        signal.alarm(0)
    assert files.parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "x")["c"] == {"b": 1, "d": 2}


@pytest.mark.parametrize("step", ["1e308", "100000000000000000"])
def test_steps_that_floats_cannot_tell_apart_are_drawn(step, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    lines = [f'{{"step": {step}, "reward/mean": {value}}}' for value in (0.1, 0.2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write_report(tmp_path)
