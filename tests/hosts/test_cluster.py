"""Which hosts run together: recorded environments, each with the cluster that it describes."""

import http.server
import threading

import pytest

from rljax.errors import InputError
from rljax.hosts.cluster import Cluster, corrected, environment, find, node_names, tpu_vm_metadata

# -- variables, as the platforms set them --

# A TPU VM has none of its own: its facts are attributes of the metadata server.
GCE_ENDPOINTS = "10.130.0.31,10.130.0.28,10.130.0.30,10.130.0.29"
GCE = {"agent-worker-number": "2", "worker-network-endpoints": GCE_ENDPOINTS}
GCE_OLD = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.164.0.5,unknown:unknown:10.164.0.9",
    "tpu-env": "ACCELERATOR_TYPE: 'v2-16'\nWORKER_ID: '1'\n",
}
GCE_SLICES = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "10.128.0.11,10.128.0.12",
    "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nMEGASCALE_COORDINATOR_ADDRESS: '10.128.0.3:8080'\n"
    "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nTYPE: 'V4'\n",
}
KAGGLE = {
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "KAGGLE_URL_BASE": "https://www.kaggle.com/",
}
NO_ADDRESS = "WARNING: could not determine TPU worker hostnames or IP addresses, ask again later"
COLAB = {
    "COLAB_RELEASE_TAG": "release-colab-external_20260904",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "172.28.0.12",
    "TPU_WORKER_ID": "0",
    "COLAB_TPU_1VM": "1",
}
_POD = "train-slice-{}-{}.train"
GKE = {
    "TPU_WORKER_ID": "3",
    "TPU_TOPOLOGY": "4x4",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_SKIP_MDS_QUERY": "true",
    "KUBERNETES_SERVICE_HOST": "34.118.224.1",
    "TPU_WORKER_HOSTNAMES": ",".join(_POD.format(0, i) for i in range(4)),
}
GKE_SLICES = {
    **GKE,
    "TPU_WORKER_HOSTNAMES": ",".join(_POD.format(1, i) for i in range(4)),
    "MEGASCALE_COORDINATOR_ADDRESS": _POD.format(0, 0),
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_PORT": "8080",
}
TPU7X = {
    "TPU_WORKER_ID": "1",
    "TPU_PROCESS_PORT": "8476",
    "TPU_PROCESS_ADDRESSES": "job-0-0.job:8476,job-0-1.job:8476",
    "TPU_WORKER_HOSTNAMES": "job-0-0.job,job-0-1.job",
}
JOBSET = {
    "RLJAX_HOSTS": "8",
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "slice",
    "REPLICATED_JOB_REPLICAS": "2",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
}
SLURM = {
    "SLURM_JOB_ID": "65670",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-node-[905,954]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7",
}
SLURM_EIGHT = {
    **SLURM,
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
SLURM_FOUR = {
    **SLURM_EIGHT,
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "7",
}
SLURM_BOUND = {**SLURM_EIGHT, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
SLURM_BOUND_TWO = {**SLURM_FOUR, "CUDA_VISIBLE_DEVICES": "0,1"}  # of eight of the step
SLURM_UNEVEN = {
    **SLURM_FOUR,
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6\n",
}
OURS = {"RLJAX_COORDINATOR": "10.0.0.2:8476", "RLJAX_HOSTS": "8", "RLJAX_HOST": "3"}

PORT_OF_JOB = 61_440 + 65670 % 4096


def cluster(coordinator, hosts, host, by, local=None, slices=1) -> Cluster:
    return Cluster(coordinator, hosts, host, by, local, slices)


def slurm(hosts, host, local=None) -> Cluster:
    return cluster(f"gpu-node-905:{PORT_OF_JOB}", hosts, host, "SLURM", local)


NODES = "the metadata of the TPU VM"
NAMES = "TPU_WORKER_HOSTNAMES"
# name: (variables, attributes of the metadata server or None where nobody may ask, the cluster)
ENVIRONMENTS = {
    "a laptop": ({"HOME": "/home/me", "PATH": "/usr/bin"}, None, None),
    "ours": (OURS, None, cluster("10.0.0.2:8476", 8, 3, "RLJAX_HOSTS")),
    "ours without a port": (
        OURS | {"RLJAX_COORDINATOR": "host-0"},
        None,
        cluster("host-0:8476", 8, 3, "RLJAX_HOSTS"),
    ),
    "ours, IPv6": (
        OURS | {"RLJAX_COORDINATOR": "[fd00::2]"},
        None,
        cluster("[fd00::2]:8476", 8, 3, "RLJAX_HOSTS"),
    ),
    "ours, one host": ({"RLJAX_HOSTS": "1"} | SLURM, None, None),
    "ours before GKE": (OURS | GKE, None, cluster("10.0.0.2:8476", 8, 3, "RLJAX_HOSTS", None, 2)),
    "ours, two slices": (
        OURS | {"RLJAX_SLICES": "2"},
        None,
        cluster("10.0.0.2:8476", 8, 3, "RLJAX_HOSTS", None, 2),
    ),
    "JobSet": (JOBSET, None, cluster("train-slice-0-0.train:8476", 8, 6, "JobSet")),
    "JobSet on TPUs, stale MEGASCALE": (
        GKE_SLICES | JOBSET | {"MEGASCALE_NUM_SLICES": "3"},
        None,
        cluster("train-slice-0-0.train:8476", 8, 6, "JobSet", None, 2),
    ),
    "TPU VM v5litepod-16": ({}, GCE, cluster("10.130.0.31:8476", 4, 2, NODES)),
    "TPU VM, old endpoints": ({}, GCE_OLD, cluster("10.164.0.5:8476", 2, 1, NODES)),
    "TPU VM, two slices": ({}, GCE_SLICES, cluster("10.128.0.3:8476", 4, 3, NODES, None, 2)),
    "TPU VM v5litepod-8": (
        {},
        {"agent-worker-number": "0", "worker-network-endpoints": "10.130.0.31"},
        None,
    ),
    "TPU VM, another port": (
        {"JAX_COORDINATOR_PORT": "9999"},
        GCE,
        cluster("10.130.0.31:9999", 4, 2, NODES),
    ),
    "TPU VM of Compute Engine": (
        {},
        {"worker-network-endpoints": "10.0.0.7,10.0.0.9", "tpu-env": "WORKER_ID: '1'"},
        cluster("10.0.0.7:8476", 2, 1, NODES),
    ),
    "a machine of Compute Engine that is no TPU": ({}, {}, None),
    "a server that is named, and JAX saw no chip": (
        {"TPU_SKIP_MDS_QUERY": "1", "GCE_METADATA_IP": "127.0.0.1:80"},
        GCE,
        cluster("10.130.0.31:8476", 4, 2, NODES),
    ),
    "TPU VM, one process of it": ({"TPU_PROCESS_BOUNDS": "1,1,1"}, None, None),
    "TPU VM whose metadata is switched off": ({"TPU_SKIP_MDS_QUERY": "1"}, GCE, None),
    "GKE": (GKE, None, cluster("train-slice-0-0.train:8476", 4, 3, NAMES)),
    "GKE, one host": (GKE | {NAMES: "localhost", "TPU_WORKER_ID": "0"}, None, None),
    "GKE, one host of one slice": (
        GKE | {NAMES: "localhost", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "1"},
        None,
        None,
    ),
    "GKE, two slices": (
        GKE_SLICES,
        None,
        cluster("train-slice-0-0.train:8476", 8, 7, NAMES, None, 2),
    ),
    "GKE tpu7x: libtpu has port 8476": (TPU7X, None, cluster("job-0-0.job:8474", 2, 1, NAMES)),
    "Kaggle": (KAGGLE, None, None),
    "Kaggle that could not find out": (KAGGLE | {NAMES: NO_ADDRESS}, None, None),
    "Colab with a TPU": (COLAB, None, None),
    "Colab with a GPU": ({"COLAB_GPU": "1", "CUDA_VISIBLE_DEVICES": "0"}, None, None),
    "SLURM, a task per node": (SLURM, None, slurm(2, 1)),
    "SLURM, a task per GPU": (SLURM_EIGHT, None, slurm(16, 11, (3,))),
    "SLURM, four tasks for eight GPUs": (SLURM_FOUR, None, slurm(8, 7, (6, 7))),
    "SLURM, --gpus-per-task": (SLURM_BOUND, None, slurm(16, 11)),
    "SLURM, GPUs bound by the step": (SLURM_BOUND_TWO, None, slurm(8, 7)),
    "SLURM, the last task alone on its node": (SLURM_UNEVEN, None, slurm(5, 4)),
    "SLURM without GPUs": (
        {k: v for k, v in SLURM_EIGHT.items() if "GPU" not in k and "CUDA" not in k},
        None,
        slurm(16, 11),
    ),
    "SLURM, a second step": (
        SLURM | {"SLURM_STEP_ID": "3"},
        None,
        cluster(f"gpu-node-905:{61_440 + (65670 + 51) % 4096}", 2, 1, "SLURM"),
    ),
    "SLURM, the batch script": (
        {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NODELIST": "a[1-8]",
        },
        None,
        None,
    ),
    "SLURM, ssh to a node": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "a1"},
        None,
        None,
    ),
    "SLURM, srun --pty bash": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        None,
        None,
    ),
    "SkyPilot": (SKY, None, cluster("10.0.0.4:8476", 3, 1, "SkyPilot")),
    "SkyPilot, one node": (
        SKY | {"SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_NODES": "1"},
        None,
        None,
    ),
    "SkyPilot on a TPU pod": (SKY, GCE, cluster("10.130.0.31:8476", 4, 2, NODES)),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment(name):
    env, attributes, expected = ENVIRONMENTS[name]
    assert environment(env, None if attributes is None else attributes.get) == expected


# What says how many workers there are, so that a metadata server that is there is left alone.
_SUFFICE = {NAMES, "RLJAX_HOSTS", "TPU_PROCESS_BOUNDS", "TPU_SKIP_MDS_QUERY"}


def _suffices(env) -> bool:
    return bool(env.keys() & _SUFFICE) and "GCE_METADATA_IP" not in env


@pytest.mark.parametrize("name", [n for n, e in ENVIRONMENTS.items() if _suffices(e[0])])
def test_nobody_is_asked_what_the_variables_say(name):
    def refuse(attribute):
        raise AssertionError(f"the metadata server is asked for {attribute}")

    assert environment(ENVIRONMENTS[name][0], refuse) == ENVIRONMENTS[name][2]


BAD = {
    "host number too high": (OURS | {"RLJAX_HOST": "8"}, "RLJAX_HOST.*from 0 to 7"),
    "host number no number": (OURS | {"RLJAX_HOST": "three"}, "RLJAX_HOST.*'three'"),
    "hosts no number": (OURS | {"RLJAX_HOSTS": "-1"}, "RLJAX_HOSTS.*'-1'"),
    "no hosts": (OURS | {"RLJAX_HOSTS": "0"}, "RLJAX_HOSTS.*1 or more"),
    "hosts alone": ({"RLJAX_HOSTS": "4"}, "without RLJAX_COORDINATOR and RLJAX_HOST"),
    "no hosts given": ({"RLJAX_HOST": "0"}, "without RLJAX_HOSTS"),
    "a port that is none": (OURS | {"RLJAX_COORDINATOR": "h:http"}, "RLJAX_COORDINATOR.*'h:http'"),
    "slices": (OURS | {"RLJAX_SLICES": "3"}, "RLJAX_SLICES.*divisor"),
    "JobSet without an index": (
        {k: v for k, v in JOBSET.items() if k != "JOB_COMPLETION_INDEX"},
        "JOB_COMPLETION_INDEX is not set",
    ),
    "JobSet of another size": (JOBSET | {"RLJAX_HOSTS": "7"}, "multiple of the 2 jobs"),
    "JobSet, pod too many": (JOBSET | {"JOB_COMPLETION_INDEX": "4"}, "from 0 to 3"),
    "GKE worker too high": (GKE | {"TPU_WORKER_ID": "4"}, "TPU_WORKER_ID.*from 0 to 3"),
    "GKE without a worker": (GKE | {"TPU_WORKER_ID": ""}, "CLOUD_TPU_TASK_ID is not set"),
    "slice too high": (GKE_SLICES | {"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID.*from 0 to 1"),
    "slices without a coordinator": (
        GKE_SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""},
        "without MEGASCALE_COORDINATOR_ADDRESS",
    ),
    "SLURM task too high": (SLURM | {"SLURM_PROCID": "2"}, "SLURM_PROCID.*from 0 to 1"),
    "SLURM, three tasks for eight GPUs": (
        SLURM_EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"},
        "3 tasks on this node see 8 GPUs",
    ),
    "SLURM node list": (SLURM | {"SLURM_STEP_NODELIST": "a[1-"}, "SLURM_STEP_NODELIST"),
    **{
        f"SLURM nodes {nodes!r:.24}": (SLURM | {"SLURM_STEP_NODELIST": nodes}, "STEP_NODELIST")
        for nodes in (
            ",",
            ",,",
            "a,",
            ",a",
            "[",
            "]",
            "n[]",
            "n[,]",
            "n[1-2-3]",
            "n[1-]",
            "n[-3]",
            "n[3-1]",
            "n[1,]",
            "n[[1-2]]",
            "n[1-2",
            "n[1]]",
            "n[x]",
            "n[1-2]n[",
            "a b",
            "a\nb",
            "a;b",
            "a/b",
            "n[" + "9" * 5000 + "]",
            "n[1-" + "9" * 5000 + "]",
            "n[1-999999999]",
            "n[0-100000]",
            "n[1-400]m[1-400]",
            "n[1-9]" * 40,
            ",".join(["n[1-60000]"] * 2),
            "n[\u0661-\u0663]",
            "[" * 5000,
            "n[1" + ",1-50000" * 3 + "]",
            "\x1b[2J",
            "n\u202e",
            "(1)" * 3,
            "n[1.5]",
        )
    },
    **{
        f"{name} {value!r:.24}": (SLURM_EIGHT | {name: value}, name)
        for name, value in (
            ("SLURM_STEP_TASKS_PER_NODE", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "0(x2)"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x"),
            ("SLURM_STEP_TASKS_PER_NODE", ","),
            ("SLURM_STEP_TASKS_PER_NODE", "9" * 5000),
            ("SLURM_STEP_TASKS_PER_NODE", "\u0662"),
            ("SLURM_STEP_NUM_TASKS", "9" * 5000),
            ("SLURM_STEP_NUM_TASKS", "1e400"),
            ("SLURM_PROCID", "-1"),
            ("SLURM_PROCID", "\u0661"),
            ("SLURM_JOB_ID", "x"),
            ("SLURM_STEP_ID", "4" * 5000),
            ("JAX_COORDINATOR_PORT", "x"),
            ("JAX_COORDINATOR_PORT", "70000"),
            ("JAX_COORDINATOR_PORT", "9" * 5000),
        )
    },
    "more hosts than any": (OURS | {"RLJAX_HOSTS": "999999999"}, "number of hosts.*at most"),
    "more tasks than any": (SLURM | {"SLURM_STEP_NUM_TASKS": "999999999"}, "number of hosts"),
    "more GPUs than any": (
        {k: v for k, v in SLURM_EIGHT.items() if k not in ("CUDA_VISIBLE_DEVICES",)}
        | {"SLURM_GPUS_ON_NODE": "999999999"},
        "SLURM_GPUS_ON_NODE",
    ),
    "more slices than any": (GKE_SLICES | {"MEGASCALE_NUM_SLICES": "999999999"}, "number of hosts"),
    "SkyPilot of another size": (SKY | {"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NODE_IPS lists 3"),
    "SkyPilot rank": (SKY | {"SKYPILOT_NODE_RANK": "3"}, "SKYPILOT_NODE_RANK.*from 0 to 2"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_errors(name):
    env, message = BAD[name]
    with pytest.raises(InputError, match=message):
        environment(env)


def test_metadata_that_contradicts_itself():
    with pytest.raises(InputError, match="agent-worker-number.*from 0 to 3"):
        environment({}, (GCE | {"agent-worker-number": "4"}).get)
    with pytest.raises(InputError, match="worker-network-endpoints"):
        environment({}, (GCE | {"worker-network-endpoints": "a:b,c:d"}).get)


def test_node_lists():
    assert node_names("a") == ["a"]
    assert node_names("a1,b2") == ["a1", "b2"]
    assert node_names("node[008-010,7],x") == ["node008", "node009", "node010", "node7", "x"]
    assert len(node_names("n[1-100000]")) == 100_000
    assert node_names("r[1-2]n[1,3]-ib") == ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]


def test_many_nodes_with_the_same_tasks_are_not_written_out():
    env = SLURM_EIGHT | {"SLURM_STEP_TASKS_PER_NODE": "8(x999999999)", "SLURM_NODEID": "77777"}
    assert environment(env) == environment(SLURM_EIGHT)


def test_stale_slices_are_dropped_or_set_anew():
    fresh = environment(GKE_SLICES)
    assert corrected(GKE_SLICES, fresh) == ({}, "")
    assert corrected({}, None) == ({}, "") and corrected(GKE, environment(GKE)) == ({}, "")
    # A preempted slice was still counted as the pods of the new one started.
    stale = GKE_SLICES | JOBSET | {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2"}
    changes, warning = corrected(stale, environment(stale))
    first = "train-slice-0-0.train"
    assert changes == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": first,
    }
    assert "stale" in warning
    # One process, and one slice, wait for no others.
    left = {name: value for name, value in GKE_SLICES.items() if "MEGASCALE" in name}
    ours = left | OURS | {"RLJAX_SLICES": "1"}
    for env, one in ((left, None), (ours, environment(ours)), (left, environment(left, GCE.get))):
        changes, warning = corrected(env, one)
        assert changes == dict.fromkeys(left) and "one slice" in warning


def test_find_corrects_the_variables_and_says_so():
    env = GKE_SLICES | JOBSET | {"MEGASCALE_NUM_SLICES": "3"}
    with pytest.warns(UserWarning, match="set anew for 2 slices"):
        assert find(env).slices == 2
    assert env["MEGASCALE_NUM_SLICES"] == "2"
    env = KAGGLE | {NAMES: NO_ADDRESS}
    with pytest.warns(UserWarning, match="no addresses"):
        assert find(env) is None
    assert NAMES not in env


def test_a_warning_in_the_place_of_addresses_is_dropped():
    changes, warning = corrected(KAGGLE | {NAMES: NO_ADDRESS}, None)
    assert changes == {NAMES: None} and "could not determine" in warning
    assert corrected(KAGGLE | {NAMES: "a, b"}, None) == ({}, "")


@pytest.fixture
def metadata_server():
    """A metadata server with the attributes of GCE -> (its address, the paths it was asked for)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            asked.append(name)
            if self.headers["Metadata-Flavor"] != "Google":
                self.send_error(403)
            elif name == "flaky" and asked.count(name) < 2:
                self.send_error(503)
            elif name in GCE or name == "flaky":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(GCE.get(name, "yes").encode())
            else:
                self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_the_metadata_server(metadata_server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of the machine, and not for this
    address, asked = metadata_server
    env = {"GCE_METADATA_IP": address}
    ask = tpu_vm_metadata(env)
    assert environment(env, ask) == cluster("10.130.0.31:8476", 4, 2, NODES)
    assert set(asked) == {"agent-worker-number", "worker-network-endpoints", "tpu-env"}
    assert ask("flaky") == "yes"
    assert tpu_vm_metadata({"GCE_METADATA_IP": "127.0.0.1:9"})("agent-worker-number") is None


def test_a_machine_without_chips_asks_nobody():
    assert tpu_vm_metadata({}) is None
