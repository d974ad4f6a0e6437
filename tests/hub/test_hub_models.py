"""Models of a hub on loopback, by the real client: cached, offline, interrupted, refused."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub.constants
import jax
import pytest
from conftest import REPO
from gguf_files import write_gguf
from hub_server import TOKEN, Fault, environment, forget, git_digest, give_up_soon, running_hub, use
from tiny_folders import config as tiny_config
from tiny_folders import one_device, same, tensors_of, write_folder
from tiny_tokenizer import write_tokenizer

from rljax import hub
from rljax.data.text.tokenizer import load_tokenizer
from rljax.errors import InputError
from rljax.hub import client
from rljax.models.config import LoraConfig
from rljax.models.huggingface import load_config, load_params, load_with_report
from rljax.models.huggingface.peft import load_adapter, save_adapter
from rljax.models.model import Model

# What a repository may hold, and nobody asks for.
BESIDE = {
    "modeling_evil.py": "raise SystemExit('run')",
    "pytorch_model.bin": b"\x80\x04pickle",
    "original/consolidated.safetensors": b"0" * 64,
    "model.safetensors.extra.bin": b"1",
    "README.md": "# model",
    "flax_model.msgpack": b"2",
    ".gitattributes": "x",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder in two shards, with a tokenizer."""
    here = tmp_path_factory.mktemp("source") / "model"
    model = Model(tiny_config(vocab_size=320), one_device())
    write_folder(here, model, tensors_of(model), files=2)
    write_tokenizer(here)
    return here


@pytest.fixture
def server(tmp_path, monkeypatch):
    with running_hub() as running:
        use(running, tmp_path / "home", monkeypatch)
        yield running


@pytest.fixture
def published(server, folder):
    """The commit of me/tiny."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return server.put("me/tiny", {**files, **BESIDE})


def offline(monkeypatch, value=True):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", value)
    forget()


@pytest.mark.slow
def test_a_repository_is_loaded_as_its_folder_is(server, published, folder):
    model = Model(load_config("hf://me/tiny"), one_device())
    assert server.paths("HEAD") == [f"/me/tiny/resolve/{published}/config.json"] + [
        f"/api/resolve-cache/models/me/tiny/{published}/config.json"
    ]  # config.json alone
    assert model.config == load_config(folder)
    params, report = load_with_report("me/tiny", model)
    same(params, load_params(folder, model))
    assert (report.folder, report.revision) == ("me/tiny", published)
    assert report.files == load_with_report(folder, model)[1].files
    assert load_tokenizer("me/tiny@main").fingerprint() == load_tokenizer(folder).fingerprint()
    here = hub.model_folder("me/tiny")
    assert {path.name for path in here.iterdir()} == {path.name for path in folder.iterdir()}
    asked = " ".join(server.paths())
    assert not any(name in asked for name in BESIDE)


def test_a_gguf_file_is_downloaded_alone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", layers=1)
    data = (tmp_path / "m.gguf").read_bytes()
    commit = server.put("me/gguf", {"m.Q4.gguf": data, "m.Q8.gguf": data, **BESIDE})
    spec = "hf://me/gguf/m.Q4.gguf"
    model = Model(load_config(spec), one_device())
    params, report = load_with_report(spec, model)
    same(params, load_params(tmp_path / "m.gguf", model))
    assert (report.folder, report.revision, [*report.files]) == (spec, commit, ["m.Q4.gguf"])
    assert load_tokenizer(spec).has_chat_template
    assert "m.Q8" not in " ".join(server.paths())
    assert hub.pinned(spec) == f"hf://me/gguf@{commit}/m.Q4.gguf"
    assert hub.model_folder(f"hf://me/gguf@{commit}/m.Q4.gguf") == hub.model_folder(spec)
    with pytest.raises(InputError, match="2 .gguf files.*hf://me/gguf@.*/m.Q4.gguf"):
        hub.model_folder("me/gguf")
    with pytest.raises(InputError, match="no m.Q5.gguf"):
        hub.model_folder("hf://me/gguf/m.Q5.gguf")


def test_a_revision_is_asked_once_and_stays_what_it_was(server, published, folder):
    server.put("me/tiny", {"config.json": "{}"}, ref="v1")
    assert hub.pinned("me/tiny") == f"hf://me/tiny@{published}"
    later = server.put("me/tiny", {"config.json": "{}", "new.json": "{}"})
    assert hub.model_folder("hf://me/tiny", hub.CONFIG).name == published  # of this process
    assert hub.model_folder("hf://me/tiny@main", hub.CONFIG).name == later
    forget()
    assert hub.model_folder("hf://me/tiny", hub.CONFIG).name == later
    assert hub.model_folder(f"hf://me/tiny@{published}", hub.CONFIG).name == published
    assert hub.pinned("hf://me/tiny@v1").startswith("hf://me/tiny@")
    server.put("me/tiny", {"config.json": "{}"})  # another folder of it is of the same commit
    assert hub.pinned("hf://me/tiny/adapter") == f"hf://me/tiny@{later}/adapter"


@pytest.mark.parametrize("cut", ["HF_HUB_OFFLINE", "no server"])
def test_what_was_read_once_needs_no_network(server, published, folder, monkeypatch, cut):
    hub.model_folder("hf://me/tiny")
    if cut == "no server":
        server.close()
        forget()
    else:
        offline(monkeypatch)
    before = len(server.requests)
    assert hub.model_folder("me/tiny").name == published
    assert load_config("hf://me/tiny") == load_config(folder)
    with pytest.raises(
        InputError, match=r"hf://me/tiny@v2 is not in the cache.*(HF_HUB_OFFLINE|Error)"
    ):
        hub.model_folder("hf://me/tiny@v2")
    with pytest.raises(InputError, match="me/other is no folder here, and as a name on the hub"):
        hub.model_folder("me/other")
    assert len(server.requests) == before


def test_a_copy_that_was_cut_short_is_no_copy(server, published, monkeypatch):
    """Half of the files are there: without a network that is said, with one the rest comes."""
    here = hub.model_folder("me/tiny")
    whole = sorted(path.name for path in here.iterdir())
    gone = next(path for path in here.iterdir() if path.name.startswith("model-00002"))
    gone.resolve().unlink()
    gone.unlink()
    offline(monkeypatch)
    with pytest.raises(InputError, match="model-00002-of-00002.safetensors.*HF_HUB_OFFLINE"):
        hub.model_folder("me/tiny")
    offline(monkeypatch, False)
    server.requests.clear()
    assert sorted(path.name for path in hub.model_folder("me/tiny").iterdir()) == whole
    assert len([p for p in server.paths("GET") if p.startswith("/store/")]) == 1


def test_a_download_goes_on_where_the_connection_broke(server, folder):
    data = bytes(range(256)) * 4000
    server.put("me/big", {"config.json": "{}", "model.safetensors": data})
    server.faults = [Fault("GET /store", "cut", times=2)]
    here = hub.model_folder("hf://me/big", hub.WEIGHTS)
    assert (here / "model.safetensors").read_bytes() == data
    ranges = [r.headers.get("range") for r in server.requests if r.path.startswith("/store")]
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges if r]
    assert len(starts) == 2 and 0 < starts[0] < starts[1] < len(data)


@pytest.mark.parametrize(
    ("where", "status"),
    [
        ("GET /api/models", 500),
        ("GET /api/models", 503),
        ("GET /api/models", 429),
        ("HEAD .*config.json", 503),
        ("GET .*config.json", 500),
        ("GET .*config.json", 503),
    ],
)
def test_a_server_in_trouble_is_asked_again(server, published, where, status):
    server.faults = [Fault(where, status)]
    assert hub.model_folder("me/tiny", hub.CONFIG).name == published
    assert not server.faults[0].times


def test_a_server_that_stays_in_trouble_is_named(server, published):
    server.faults = [Fault("GET /api", 502, times=99)]
    with pytest.raises(
        InputError, match="not in the cache, and the hub is not reached.*status 502"
    ):
        hub.model_folder("hf://me/tiny")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_file_with_another_digest_is_refused_and_removed(server, published, name):
    """Of a large file the SHA-256 that is its ETag, of a small one git's digest."""
    large = name.endswith(".safetensors")
    server.faults = [Fault("GET /store" if large else f"GET .*/{name}", "changed", times=99)]
    listed = server.repositories["model", "me/tiny"].commits[published][name]
    kind = "SHA-256" if large else f"git SHA-1 is {git_digest(listed)}"
    with pytest.raises(
        InputError, match=f"safetensors is not the file.*{kind}|{name} is not.*{kind}"
    ):
        hub.model_folder("me/tiny")
    here = client.home(hub.parse("hf://me/tiny")) / "snapshots" / published
    assert not (here / name).exists() and not (here / name).is_symlink()
    server.faults.clear()
    assert (hub.model_folder("me/tiny") / name).exists()


def test_weights_that_changed_in_the_cache_are_refused(server, published, folder):
    model = Model(load_config(folder), one_device())
    load_with_report("me/tiny", model)
    blob = (hub.model_folder("me/tiny") / "model-00001-of-00002.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with pytest.raises(InputError, match=f"SHA-256 is {blob.name}.*remove {blob}"):
        load_with_report("me/tiny", model)


def test_files_that_others_put_into_the_cache_are_compared_once(server, published):
    """The cache of the client is shared: what is there is not downloaded, but compared."""
    huggingface_hub.hf_hub_download("me/tiny", "config.json")
    server.requests.clear()
    here = hub.model_folder("me/tiny", hub.CONFIG)
    assert not [p for p in server.paths() if "config.json" in p]
    (here / "tokenizer.json").write_text("{}")  # by whom ever
    with pytest.raises(InputError, match="tokenizer.json is not the file that the hub lists"):
        hub.model_folder("me/tiny", hub.TOKENIZER)


def log_in(token: str = TOKEN) -> None:
    path = Path(huggingface_hub.constants.HF_TOKEN_PATH)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token)


def test_private_and_gated_repositories_say_what_they_need(server, folder):
    server.put_folder("me/private", folder, private=True)
    server.put_folder("me/gated", folder, gated=True)
    for wanted in ("hf://me/private", "hf://me/nobody", "me/private"):
        with pytest.raises(
            InputError, match="no model me/.*nobody is logged in.*hf auth login.*HF_TOKEN"
        ):
            hub.model_folder(wanted)
    with pytest.raises(
        InputError, match=f"me/gated is gated.*accept them at {server.url}/me/gated.*hf auth"
    ):
        hub.model_folder("hf://me/gated")
    log_in("hf_wrong")
    with pytest.raises(InputError, match="status 401.*the token is not valid.*hf auth login anew"):
        hub.model_folder("hf://me/private")
    log_in()
    assert hub.model_folder("me/private").is_dir()
    with pytest.raises(InputError, match="no model me/nobody.*your token may not read it"):
        hub.model_folder("hf://me/nobody")
    with pytest.raises(InputError, match="gated.*account of your token has not"):
        hub.model_folder("hf://me/gated")


def test_what_is_not_there_is_named(server, published):
    with pytest.raises(InputError, match="me/tiny has no revision 'v9'.*/me/tiny/commits"):
        hub.model_folder("hf://me/tiny@v9")
    with pytest.raises(InputError, match="has no adapter_model.safetensors.*config.json"):
        hub.model_folder("hf://me/tiny", hub.ADAPTER)
    with pytest.raises(InputError, match="hf://me/tiny@.*/original has no config.json"):
        hub.model_folder("hf://me/tiny/original")
    server.put("me/pickles", {"config.json": "{}", "pytorch_model.bin": b"\x80", "run.py": ""})
    with pytest.raises(InputError, match=r"no \*.safetensors: got \['pytorch_model.bin'\].*pickle"):
        hub.model_folder("hf://me/pickles", hub.WEIGHTS)
    server.put("me/old", {"config.json": "{}", "tokenizer.model": b"0"})
    with pytest.raises(InputError, match="has no tokenizer.json.*tokenizer.model"):
        hub.model_folder("hf://me/old", hub.TOKENIZER)
    assert not any(p.endswith((".bin", ".py", ".model")) for p in server.paths())


@pytest.mark.slow
def test_an_adapter_is_loaded_and_named_with_its_base(server, folder, tmp_path):
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q_proj",), base="float32")
    config = dataclasses.replace(load_config(folder), lora=lora)
    model = Model(config, one_device())
    params = model.init(jax.random.key(0))
    base = "hf://me/tiny@" + "a" * 40
    save_adapter(tmp_path / "adapter", model, params, base=base)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("me/tiny", "a" * 40)
    server.put_folder("me/adapter", tmp_path / "adapter")
    server.put_folder("me/two", tmp_path)  # in a folder of its own
    fresh = model.init(jax.random.key(1))
    for spec in ("me/adapter", "hf://me/two/adapter"):
        same(load_adapter(spec, model, fresh), load_adapter(tmp_path / "adapter", model, fresh))
    with pytest.raises(InputError, match="has no config.json.*it is an adapter: lora.adapter="):
        load_config("hf://me/adapter")


def test_a_hub_that_never_answers_does_not_hold_anyone_up(server, published, monkeypatch):
    give_up_soon(monkeypatch)
    server.faults = [Fault("GET /api", "silent", times=99)]
    with pytest.raises(InputError, match="hub is not reached.*Timeout"):
        hub.model_folder("hf://me/tiny")
    assert len(server.requests) == 1


def test_what_is_no_hub_is_named(server):
    server.faults = [Fault("GET /api", 200, times=99)]  # {}
    with pytest.raises(InputError, match="its answer cannot be used"):
        hub.model_folder("hf://me/tiny")


def test_hostile_names_in_a_listing_are_left_out(server, published, tmp_path):
    server.put("me/evil", {"config.json": "{}", "../../../x.json": "{}", "a/../../y.json": "{}"})
    entries = client.listing(hub.parse(hub.pinned("hf://me/evil")))
    assert list(entries) == ["config.json"]


def test_two_processes_and_threads_share_a_cache(server, published, folder):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(hub.model_folder("me/tiny"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    assert hub.model_folder("me/tiny") == found[0]


SCRIPT = """
import sys
from rljax import hub
from rljax.errors import InputError
try:
    print(hub.model_folder("me/tiny"))
except InputError as error:
    sys.exit(str(error))
"""


def test_another_process_reads_the_environment(server, published, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, as a user sets them."""
    own = {**environment(server, tmp_path / "home2"), "PYTHONPATH": str(REPO)}

    def run(**more):
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(
            command, env={**own, **more}, capture_output=True, text=True, timeout=60
        )

    first = run(HF_HUB_OFFLINE="1")
    assert first.returncode == 1 and "HF_HUB_OFFLINE is set" in first.stderr
    second = run()
    assert second.stdout.strip().startswith(str(tmp_path / "home2" / "hub")), second.stderr
    before = len(server.requests)
    assert run(HF_HUB_OFFLINE="1").stdout == second.stdout and len(server.requests) == before


def test_without_the_package_it_is_named(tmp_path):
    """A package of its name that cannot be imported stands for one that is not there."""
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('none')")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{tmp_path}:{REPO}"},
    )
    assert (
        "me/tiny is no folder here" in done.stderr
        and "pip install 'huggingface_hub>=2.4'" in done.stderr
    )
