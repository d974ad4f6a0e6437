"""Hosts that are killed, fail or stand still: the others end with the reason, and a restart is
bitwise the run that nothing stopped."""

import re

import pytest
from hosts_run import config_file, event, rounds
from tiny_run import assert_same_run

pytestmark = pytest.mark.hosts


def since(result: dict, host: int) -> list[float]:
    """Seconds from the event on `host` to the end of each host."""
    at = float(re.search(r"now: \w+ at ([0-9.]+)", result["out"][host])[1])
    return [end - at for end in result["ends"]]


PHASES = ("generate", "reward", "learn", "save")
# Every host in every phase but one; a later step each time, so that the run gets on.
KILLS = [
    event(host, PHASES[i % 4], 2 + i, "SIGKILL")
    for i, host in enumerate([0, 1, 2, 3, 3, 2, 1, 0, 1, 0, 3, 2])
]


def test_twelve_kills(tmp_path):
    fields = dict(sft__steps=0, steps=14, evaluate__every_steps=0)
    whole, killed = (config_file(tmp_path, name, **fields) for name in ("whole", "killed"))
    asked = [{"hosts": 4, "config": str(killed), "event": kill} for kill in KILLS]
    asked += [{"hosts": 4, "config": str(path)} for path in (killed, whole)]
    results = rounds(tmp_path, asked, timeout_s=120.0)
    for kill, result in zip(KILLS, results, strict=False):
        victim, others = kill["host"], [k for k in range(4) if k != kill["host"]]
        assert result["codes"][victim] == -9, result["err"]
        assert all(result["codes"][k] in (-6, 171) for k in others), (kill, result)
        assert max(since(result, victim)) < 45
        for k in others:
            assert re.search(
                rf"host {victim} \([^)]*\), last heard of in \w+, step \d+, was lost",
                result["err"][k],
            ), (kill, result["err"][k])
    assert [result["codes"] for result in results[12:]] == [[0] * 4] * 2, results[12]["err"]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(("do", "code"), [("raise", 171), ("input", 2)])
def test_an_error_on_one_host_ends_all(tmp_path, do, code):
    config = config_file(tmp_path, sft__steps=0)
    asked = [{"hosts": 4, "config": str(config), "event": event(2, "reward", 2, do)}]
    (result,) = rounds(tmp_path, asked, timeout_s=120.0)
    assert result["codes"] == [171, 171, code, 171], result["err"]
    assert max(since(result, 2)) < 15
    what = "RuntimeError: the user's code is wrong" if do == "raise" else "InputError: the user's"
    for k in (0, 1, 3):
        assert re.search(rf"hosts: host 2 \([^)]*\): {what}", result["err"][k]), result["err"][k]
        assert "(in reward, step 2)" in result["err"][k]
        log = (tmp_path / f"run/hosts/host-{k:03d}.log").read_text()
        assert what in log  # each host's console is in the run folder


STALLS = [(1, "reward"), (0, "data"), (1, "learn"), (0, "tracking")]


def test_stalls(tmp_path):
    """Never a silent hang: who stands where, the stacks of all hosts, and exit code 170."""
    asked, folders = [], []
    for n, (host, phase) in enumerate(STALLS):
        config = config_file(tmp_path, f"run{n}", sft__steps=0, hosts__stall_s=8.0)
        asked += [{"hosts": 2, "config": str(config), "event": event(host, phase, 3, "sleep")}]
        folders.append(tmp_path / f"run{n}/hosts")
    for (host, phase), folder, result in zip(
        STALLS, folders, rounds(tmp_path, asked, timeout_s=120.0), strict=True
    ):
        assert result["codes"] == [170, 170], result["err"]
        assert max(since(result, host)) < 2 * (8 + 20)
        named = rf"host {host} \([^)]*\) stands in {phase}, step 3, for (\d+) s"
        assert re.search(named, result["err"][0]), result["err"][0]
        seconds = int(re.search(named, result["err"][0])[1])
        assert 8 <= seconds <= 8 + 20, result["err"][0]
        for k in range(2):
            stacks = (folder / f"host-{k:03d}.stacks.txt").read_text()
            assert re.search(named, stacks) and "thread" in stacks
            assert ("in happens" in stacks) == (k == host)
