"""64 hosts: what they say to each other, over a store in memory with a thread for each host, and
over the coordination service with a process for each."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading

import pytest
from many_hosts import on_threads
from on_hosts import REPO, all_well, on_hosts
from processes import wait_until
from tiny_run import metrics_rows, tiny_config

from rljax.config import to_dict
from rljax.errors import InputError
from rljax.heartbeat import CurrentPhase
from rljax.hosts import HostFailed
from rljax.hosts.exchange import POLL_S
from rljax.hosts.preflight import table
from rljax.hosts.shutdown import FAILED, Ending
from rljax.hosts.watchdog import NOW, Seen, behind, described, stall

HOSTS = 64


def test_one_odd_host_is_named_on_all_of_them():
    def preflight(exchange):
        facts = {"version of jax": "0.10.2", "code of rljax": "ab12", "XLA_FLAGS": ""}
        if exchange.index == 17:
            facts["version of jax"] = "0.9.0"
        return table(exchange.gather(facts, "preflight"), exchange.names)

    results, store = on_threads(HOSTS, preflight)
    assert len(results) == HOSTS and len(set(results.values())) == 1
    assert results[0].splitlines()[1] == "    0.9.0: host 17 (10.0.0.17)"
    assert "0.10.2: host 0 (10.0.0.0)" in results[0] and "and 59 more" in results[0]
    assert sum(store.messages.values()) <= 5 * HOSTS


@pytest.mark.slow
def test_2048_rows_are_gathered_by_a_few_messages_of_each_host():
    def rows(exchange):
        mine = range(exchange.index, 2048, exchange.count)
        for step in range(3):
            sent = [[k, math.nan if k == 5 else k / 7 + step, {"a": 0.1}, "ok", ""] for k in mine]
            together = exchange.gather(sent, "rewards")
        values = {row[0]: row[1] for host in together for row in host}
        return [values[k] for k in range(2048)]

    results, store = on_threads(HOSTS, rows)
    wanted = [k / 7 + 2 for k in range(2048)]
    for got in results.values():
        assert math.isnan(got[5]) and got[:5] + got[6:] == wanted[:5] + wanted[6:]
    sent = {k: store.messages[k] - store.polls[k] for k in range(HOSTS)}
    assert sum(sent.values()) <= 5 * 3 * HOSTS
    assert max(sent[k] for k in range(1, HOSTS)) <= 3 * 3  # no host asks all others
    assert len(store.values) <= 1  # a long run does not fill the store


def test_two_that_are_missing_at_a_barrier_are_named():
    others = threading.Barrier(HOSTS - 2)

    def work(exchange):
        others.wait()
        exchange.wait("checkpoint", 2.0)

    results, _ = on_threads(HOSTS, work, without=(5, 9))
    assert len(results) == HOSTS - 2
    for error in results.values():
        assert isinstance(error, InputError) and "'checkpoint'" in str(error)
        assert "missing: host 5 (10.0.0.5), host 9 (10.0.0.9)" in str(error)


def test_a_failure_reaches_all_who_wait_and_the_first_of_two_counts():
    told = threading.Event()

    def all_wait(store):
        """All but the two that fail, and the first one, which waits for what they send."""
        with store.changed:
            return len(store.values) == HOSTS - 3

    def work(exchange):
        if exchange.index not in (40, 41):
            return exchange.gather(0, "learn")
        if exchange.index == 40:
            wait_until(lambda: all_wait(exchange.client.store), "the others")
        else:
            told.wait()
        ending = Ending(exchange, heartbeat_s=30)
        failure = ending.tell(f"ValueError: no column {exchange.index}", FAILED)
        told.set()
        return failure

    results, store = on_threads(HOSTS, work)
    assert len(results) == HOSTS
    failure = results.pop(40)
    assert results.pop(41) == failure and (failure.host, failure.code) == (40, FAILED)
    for error in results.values():
        assert isinstance(error, HostFailed)
        assert str(error) == "host 40 (10.0.0.40): ValueError: no column 40"
    assert store.waits == {POLL_S}  # seconds between two looks, not at full speed
    assert sum(store.messages.values()) - sum(store.polls.values()) <= 5 * HOSTS


def test_a_host_that_stands_still_is_named_by_all():
    def work(exchange):
        k = exchange.index
        place = CurrentPhase("learn", 120, 482, True, 310.0, 130.0)
        if k in (17, 30):  # behind: one at work, one that waits for the other's scores
            place = CurrentPhase("reward", 120, 481, k == 30, 312.0, 130.0)
        exchange.client.set(f"{NOW}{k}", json.dumps(dataclasses.astuple(place)))
        exchange.wait("all have said it", 120.0)
        seen = {
            int(key.rpartition("/")[2]): Seen(CurrentPhase(*json.loads(text)), "", text, 0.0)
            for key, text in exchange.client.list(NOW).items()
        }
        return behind(seen), stall(seen, 0.0), described(seen, exchange.names, 0.0)

    results, store = on_threads(HOSTS, work)
    assert len(results) == HOSTS
    for last, late, text in results.values():
        assert last == [17] and late == pytest.approx(312 / 130)
        assert text.startswith("host 17 (10.0.0.17) stands in reward, step 120, for 312 s")
        assert "62 hosts wait in learn" in text
    assert sum(store.messages.values()) == 3 * HOSTS


def test_hosts_at_different_places_are_named():
    def work(exchange):
        return exchange.gather(0, "save" if exchange.index == 3 else "evaluate")

    results, _ = on_threads(HOSTS, work)
    for error in results.values():
        assert "host 3 (10.0.0.3) at save" in str(error)


@pytest.mark.hosts
def test_processes_of_the_coordination_service_start_meet_and_end():
    hosts = int(os.environ.get("RLJAX_MANY_HOSTS", HOSTS))
    path = os.pathsep.join(map(str, (REPO, REPO / "tests", REPO / "tests/helpers")))
    done = subprocess.run(
        [sys.executable, str(REPO / "tests/helpers/many_hosts.py"), str(hosts), "5"],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    assert measured["exit_codes"].pop("-9") == 1  # the one that was killed
    assert sum(measured["exit_codes"].values()) == hosts - 1
    assert "0" not in measured["exit_codes"]  # nobody believes that it has finished
    assert measured["seconds"]["all ended after the kill"] < 45


@pytest.mark.hosts
@pytest.mark.slow
def test_eight_processes_take_the_grpo_step_of_one(tmp_path):
    rows = {}
    for hosts, devices in ((1, 8), (8, 1)):
        config = tiny_config(
            tmp_path / str(hosts),
            steps=1,
            sft__steps=0,
            batch__prompts_per_step=8,
            batch__sequences_per_optimizer_step=32,
            evaluate__prompts=8,
            evaluate__every_steps=0,
            checkpoint__every_steps=0,
        )
        file = tmp_path / f"{hosts}.json"
        file.write_text(json.dumps(to_dict(config)))
        command = ["tests/helpers/train_configs.py", file]
        all_well(on_hosts(hosts, devices, command, timeout_s=500))
        (rows[hosts],) = metrics_rows(config.run_dir)
    one, eight = rows[1], rows[8]
    assert one.keys() == eight.keys() and eight["batch/completions"] == 32
    for name, value in one.items():
        assert eight[name] == (
            pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
        ), name
    assert eight["reward/mean"] == one["reward/mean"] and eight["grad_norm"] > 0
