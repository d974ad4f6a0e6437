"""Hosts that are not the same are refused before anything is compiled, with a table of what."""

import json
import os

import pytest
from on_hosts import REPO, on_hosts
from tiny_offline import offline_config

from rljax.config import to_dict
from rljax.hosts.preflight import digest, of_this_host, table

HELPER = "tests/helpers/train_configs.py"
NAMES = [f"host {k} (10.0.0.{k})" for k in range(64)]


def test_the_table_names_the_few_that_differ():
    every = [{"jax": "0.10.2", "config.seed": "1"} for _ in NAMES]
    assert table(every, NAMES) == ""
    every[3] = {"jax": "0.9", "config.seed": "1"}
    every[5] = {"jax": "0.10.2"}
    assert table(every, NAMES).splitlines() == [
        "  jax",
        "    0.9: host 3 (10.0.0.3)",
        "    0.10.2: " + ", ".join(NAMES[k] for k in (0, 1, 2, 4)) + " and 59 more",
        "  config.seed",
        "    (not set): host 5 (10.0.0.5)",
        "    1: " + ", ".join(NAMES[:4]) + " and 59 more",
    ]


def test_a_digest_sees_names_and_contents_and_waits_for_no_pipe(tmp_path, monkeypatch):
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1"), other.write_text("")
    before = digest([one, other])
    assert before == digest([one, other]) != digest([one])
    one.write_text(""), other.write_text("x = 1")
    assert digest([one, other]) != before
    assert digest([tmp_path / "gone.py"]) != digest([one])
    os.mkfifo(tmp_path / "pipe.py")
    digest([tmp_path / "pipe.py"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_dump_to=/tmp/host3")
    facts = of_this_host()
    assert facts["XLA_FLAGS"] == "--xla_a=1" and len(facts["code of rljax"]) == 16


def config_file(folder, **fields) -> str:
    """A config.json of an offline run; its rows lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = offline_config(folder, "examples", "sft", "run", steps=1, **fields)
    path = folder / f"config{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps(to_dict(config)))
    return str(path)


def logged(count: int, command):
    """`on_hosts`, each of one device, and every compilation a line."""
    return on_hosts(count, 1, command, JAX_LOG_COMPILES="1")


def refused(ends, *words: str) -> None:
    """Every host has ended with an InputError that says all of `words`, and compiled nothing."""
    assert any("hosts: host 0 of" in end.err for end in ends)
    for k, end in enumerate(ends):
        assert end.code == 2, f"host {k}: {end.code}\n{end.err}"
        for word in words:
            assert word in end.err, f"host {k}: {end.err}"
        assert "Traceback" not in end.err and "Finished XLA compilation" not in end.err


@pytest.mark.hosts
def test_another_config_code_model_device_count_or_flag_is_named(tmp_path):
    """One host at a time is the odd one; each start of three hosts has one kind of difference."""
    config = config_file(tmp_path)
    other = config_file(tmp_path, seed=4)
    refused(
        logged(3, lambda k: [HELPER, other if k == 2 else config]),
        "the hosts are not the same",
        "config.seed",
        "3: host 0",
        "4: host 2 (",
    )

    odd = "import os, runpy, sys\nsys.argv = sys.argv[1:]\n{}\n"
    odd += "runpy.run_path(HELPER, run_name='__main__')"
    flags = "os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace('count=1', 'count=2')"
    for change, *words in (
        ("from rljax.hosts import preflight; preflight._PACKAGES += ('rich',)", "version of rich"),
        ("os.environ['JAX_DEBUG_NANS'] = '1'", "JAX_DEBUG_NANS", "1: host 1 ("),
        (flags, "XLA_FLAGS", "host 1 ("),
    ):
        script = odd.format(change).replace("HELPER", repr(HELPER))
        starts = [[HELPER, config], ["-c", script, HELPER, config]]
        refused(logged(2, lambda k, starts=starts: starts[k]), *words)


@pytest.mark.hosts
def test_another_model_own_code_or_data_is_named(tmp_path):
    """The same paths on every host, and something else behind them on one."""
    places = [tmp_path / f"disk{k}" for k in range(2)]
    for k, place in enumerate(places):
        place.mkdir()
        (place / "my_loss.py").write_text(f"# {k}\ndef my_loss(policy, batch):\n    return 0\n")
    config = config_file(tmp_path, algorithm__policy_loss="my_loss.my_loss")
    script = "import os, runpy, sys\nos.chdir(sys.argv[2]); sys.path.append('.')\n" + (
        "helper = sys.argv[1]; sys.argv = [helper, sys.argv[3]]\n"
        "runpy.run_path(helper, run_name='__main__')"
    )
    helper = str(REPO / HELPER)
    ends = logged(2, lambda k: ["-c", script, helper, places[k], config])
    refused(ends, "module my_loss", "host 1 (")

    rows = (tmp_path / "examples_train.jsonl").read_text()
    for place, text in zip(places, (rows, rows.replace("apples", "peaches")), strict=True):
        (place / "rows.jsonl").write_text(text)
    config = config_file(tmp_path / "b", data__train="rows.jsonl", data__test="")
    ends = logged(2, lambda k: ["-c", script, helper, places[k], config])
    refused(ends, "  data\n", "host 0 (", "host 1 (")


@pytest.mark.hosts
def test_a_run_folder_that_is_not_shared_is_named(tmp_path):
    places = [tmp_path / f"disk{k}" for k in range(3)]
    for place in places[:2]:
        place.mkdir()
    places[2].symlink_to(places[0])  # hosts 0 and 2 share a disk
    config = config_file(tmp_path, data__test="")
    text = json.loads(open(config).read())
    text["run_dir"] = "runs/shared"
    open(config, "w").write(json.dumps(text))
    script = (
        "import os, sys, json\nos.chdir(sys.argv[1])\n"
        "from rljax.config import from_dict\nfrom rljax.training import preflight, train\n"
        "preflight.SHARED_S = 2.0\n"
        "train(from_dict(json.load(open(sys.argv[2])), ''))"
    )
    ends = logged(3, lambda k: ["-c", script, places[k], config])
    refused(ends, "run_dir=runs/shared is not the same folder on host 1 (", "all hosts mount")
    assert not list(places[0].iterdir()) and not list(places[1].iterdir())  # nothing is left


@pytest.mark.hosts
def test_a_file_that_one_host_lacks_ends_all_with_its_name(tmp_path):
    config = config_file(tmp_path)
    script = (
        "import sys, json\nfrom rljax import hosts\nfrom rljax.config import from_dict\n"
        "from rljax.training import train\nconfig = from_dict(json.load(open(sys.argv[1])), '')\n"
        "from rljax.config import checks\nimport os\nwhole = os.path.exists\n"
        "hosts.start(60)\n"
        "if hosts.index() == 1: os.path.exists = lambda p: 'examples_' not in str(p) and whole(p)\n"
        "train(config)"
    )
    ends = on_hosts(3, 1, lambda k: ["-c", script, config])
    assert [end.code for end in ends] == [171, 2, 171]  # by themselves, before they were ended
    for end in ends:
        assert "does not exist" in end.err and "Traceback" not in end.err
    assert "host 1 (" in ends[0].err and "host 1 (" in ends[2].err


@pytest.mark.hosts
def test_tools_for_one_host_are_refused_on_several(tmp_path):
    for words in (
        ["evaluate", tmp_path],
        ["serve", tmp_path],
        ["sample", tmp_path, "--out=a.jsonl"],
    ):
        for end in on_hosts(2, 1, ["-m", "rljax", *words]):
            assert end.code == 2 and "runs on one host: got '2 hosts" in end.err, end.err
            assert "RLJAX_HOSTS=1" in end.err
    one = on_hosts(1, 1, ["-m", "rljax", "evaluate", str(tmp_path)], RLJAX_HOSTS="1")[0]
    assert one.code == 2 and "runs on one host" not in one.err


@pytest.mark.hosts
def test_the_host_with_least_memory_decides_for_all(tmp_path):
    config = config_file(tmp_path)
    script = (
        "import sys, json\nfrom rljax import hosts\nfrom rljax.config import from_dict\n"
        "from rljax.plan import memory\nfrom rljax.training import train\nhosts.start(60)\n"
        "if hosts.index() == 1: memory.device_bytes = lambda device: 50_000\n"
        "train(from_dict(json.load(open(sys.argv[1])), ''))"
    )
    refused(logged(2, lambda k: ["-c", script, config]), "left, less than", "this run needs")
