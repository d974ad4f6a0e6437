"""Hosts meet, tell each other facts, and name whoever is missing, twice there or elsewhere."""

import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import REPO
from on_hosts import all_well, free_port, on_hosts
from processes import wait_until

from rljax import hosts
from rljax.hosts.cluster import Cluster, environment
from rljax.hosts.rendezvous import meet

_START = "import json\nfrom rljax import hosts\nhosts.start(init_timeout_s={})\n"


def start(timeout_s: float = 60) -> str:
    return _START.format(timeout_s)


EXCHANGES = (
    start()
    + """
import jax, numpy as np
from rljax.arrays import fetch, place
from rljax.mesh import make_mesh

k, n = hosts.index(), hosts.count()
rows = {"row": k, "score": 0.1 + k, "missing": float("nan"), "text": "\\u2028\\ud83d\\ude00" * k}
gathered = hosts.gather(rows)
mesh = make_mesh(data=-1, fsdp=1)
batch = {"a": np.arange(24.0).reshape(8, 3), "b": np.full((8,), np.nan), "c": np.int32(7),
         "d": np.arange(5)}
placed = place(batch, mesh)
own = sorted({i for s in placed["a"].addressable_shards for i in range(*s.index[0].indices(8))})
back = fetch(jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t))(placed))
again = fetch({"a": place(placed["a"], mesh), "host": batch["a"]})
hosts.wait("the end", 60)
print(json.dumps({
    "gathered": gathered, "shared": hosts.share(["of", k]), "mine": hosts.mine(5),
    "agree": [hosts.agree(k == 1), hosts.agree(False, "here")], "own": own,
    "back": {name: np.asarray(x).tolist() for name, x in back.items()},
    "again": bool(np.array_equal(again["a"], again["host"])), "names": hosts.names(),
}))
"""
)


def test_two_hosts_have_the_same_facts():
    ends = all_well(on_hosts(2, 2, EXCHANGES))
    one, two = (json.loads(host.out.splitlines()[-1]) for host in ends)  # gloo speaks first
    assert [row["row"] for row in one["gathered"]] == [0, 1]
    assert [row["score"] for row in one["gathered"]] == [0.1, 1.1]
    assert one["gathered"][1]["text"] == "\u2028\U0001f600" and one["gathered"][0]["missing"] != 0
    assert str(one["gathered"]) == str(two["gathered"])  # NaN is not equal to itself
    assert one["shared"] == two["shared"] == ["of", 0]
    assert (one["mine"], two["mine"]) == ([0, 2, 4], [1, 3])
    assert one["agree"] == two["agree"] == [True, False]
    assert (one["own"], two["own"]) == ([0, 1, 2, 3], [4, 5, 6, 7])  # a host builds its own rows
    for host in (one, two):
        assert host["back"]["a"] == [[6.0 * i, 6.0 * i + 2, 6.0 * i + 4] for i in range(8)]
        assert host["back"]["c"] == 14 and host["back"]["d"] == [0, 2, 4, 6, 8]
        assert all(x != x for x in host["back"]["b"]) and host["again"]
    assert one["names"][1].startswith("host 1 (") and "127.0.0.1" in one["names"][1]


def test_one_process_is_the_identity():
    value = {"x": (1, 2)}
    assert hosts.gather(value)[0] is value and hosts.share(value) is value
    assert hosts.agree(True) and not hosts.agree(False)
    assert (hosts.count(), hosts.index(), hosts.first(), hosts.mine(3)) == (1, 0, True, [0, 1, 2])
    hosts.wait("nothing", 0.0)
    hosts.fail(ValueError("this process goes on"))


@pytest.mark.hosts
def test_hosts_at_different_places_are_named():
    script = start() + "hosts.agree(True, 'evaluate' if hosts.index() else 'learn')"
    for host in on_hosts(2, 1, script):
        assert host.code and "host 0 (127.0.0.1) at learn; host 1" in host.err


@pytest.mark.hosts
def test_the_reason_of_a_failure_reaches_the_others():
    script = start() + (
        "if hosts.index() == 2: hosts.fail(ValueError('the disk is gone'))\n"
        "try: hosts.gather(1)\n"
        "except hosts.HostFailed as error: hosts.fail(error)"
    )
    ends = on_hosts(3, 1, script)
    assert [host.code for host in ends] == [171, 171, 171]
    for host in ends[:2]:
        assert "host 2 (" in host.err and "ValueError: the disk is gone" in host.err


@pytest.mark.hosts
def test_a_barrier_names_who_does_not_come(tmp_path):
    script = start() + (
        "import os, sys, time\n"
        "while hosts.index() and not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
        "if hosts.index(): os._exit(0)\n"
        "try: hosts.wait('here', 2)\nexcept ValueError as error: print(error, flush=True)\n"
        "open(sys.argv[1], 'w').close(); os._exit(0)"
    )
    first = on_hosts(3, 1, ["-c", script, tmp_path / "waited"])[0]
    assert "waited 2 s for all hosts at 'here'" in first.out
    assert "host 1 (" in first.out and "host 2 (" in first.out and "host 0" not in first.out


@pytest.mark.hosts
def test_a_host_that_does_not_start_is_named():
    begins = start(4)
    script = "import rljax.hosts.rendezvous as m; m.PATIENCE_S = 1.0\n" + begins
    ends = on_hosts(3, 1, lambda k: "" if k == 1 else script)
    assert ends[1].code == 0
    for host in (ends[0], ends[2]):
        assert host.code == 1 and "2 of 3 hosts are here; missing: host 1" in host.err
        assert "--worker=all" in host.err
        assert "not all hosts have come within 4 s: got 'missing: host 1'" in host.err


@pytest.mark.hosts
def test_a_run_whose_hosts_come_too_late_is_started_again():
    """On the host that listens, and on one that calls; 2 would end a JobSet for good."""
    config = REPO / "tests/helpers/tiny_run.py"
    train = ["-m", "rljax", "train", config, "--config.hosts.init_timeout_s=3"]
    for here in (0, 2):
        ends = on_hosts(3, 1, lambda k, here=here: train if k == here else "", timeout_s=120)
        assert ends[here].code == 171 and "within 3 s" in ends[here].err, ends[here].err


def test_a_host_that_ends_while_others_wait_may_come_again():
    """As after a preemption: it comes, is killed, and comes again before the last one is there."""
    port = free_port()
    given = dict(RLJAX_COORDINATOR=f"127.0.0.1:{port}", RLJAX_HOSTS="3")
    cluster = [environment({**given, "RLJAX_HOST": str(k)}) for k in range(3)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, cluster[0], 60.0)
        for _ in range(2):
            wait_until(lambda: said_hello(port), "the first host to listen")
        others = [pool.submit(meet, cluster[k], 60.0) for k in (1, 2)]
        one, two, three = (future.result(60) for future in (first, *others))
    assert one == two == three and len(one) == 3


def said_hello(port: int) -> bool:
    """Says at the port what host 1 of 3 says, and is gone."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(b'{"host": 1, "hosts": 3, "name": "killed"}')
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.hosts
def test_a_number_twice_is_refused_on_all():
    again = "import os; os.environ['RLJAX_HOST'] = '1'\n" + start(30)
    ends = on_hosts(3, 1, lambda k: start(30) if k == 0 else again)
    for host in ends:
        assert host.code == 1 and "two hosts say that they are host 1" in host.err


@pytest.mark.hosts
def test_a_coordinator_that_does_not_answer_is_named():
    wrong = "import os; os.environ['RLJAX_COORDINATOR'] = '127.0.0.1:9'\n"
    patience = "import rljax.hosts.rendezvous as m; m.PATIENCE_S = 1.0\n"
    end = on_hosts(2, 1, lambda k: wrong + patience + start(3) if k else "")[1]
    assert end.code == 1 and "no answer from 127.0.0.1:9" in end.err
    assert "is the port open?" in end.err and "within 3 s" in end.err


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        env = dict(RLJAX_COORDINATOR=f"127.0.0.1:{port}", RLJAX_HOSTS="2", RLJAX_HOST="0")
        with pytest.raises(ValueError, match=f"cannot listen at port {port}"):
            meet(environment(env), 1.0)


@pytest.mark.slow
def test_hosts_that_count_differently_are_refused():
    count = "import os; os.environ['RLJAX_HOSTS'] = str(2 + hosts_more)\n"
    scripts = [start(30), count.replace("hosts_more", "1") + start(30)]
    for host in on_hosts(2, 1, lambda k: scripts[k]):
        assert host.code == 1 and "host 0 says 2, host 1 at" in host.err


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_first_host_that_vanishes_is_missed():
    """Its machine hangs up on nobody: the kernel asks whether it is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cluster = Cluster(f"127.0.0.1:{port}", 2, 1, "a test")
        called = threading.Thread(target=meet, args=(cluster, 30.0))
        called.start()
        caller, _ = server.accept()
        with caller:
            caller.recv(4096)
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            timer, when = next(row[5] for row in rows if row[2].endswith(f":{port:04X}")).split(":")
            assert timer == "02" and int(when, 16) <= 3000  # keepalive, in 1/100 s
            caller.sendall(b'{"addresses": ["one", "two"]}\n')
            called.join(30)
