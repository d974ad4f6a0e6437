"""Finds the hosts that run this command together, read from the environment of the process.

`environment` is a pure function of variables and of the answers of the metadata server of a TPU VM,
so that recorded environments are its tests.
"""

import dataclasses
import glob
import http.client
import importlib.util
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Mapping, MutableMapping

from rljax.errors import InputError

# Google Cloud's default firewall leaves 8470, 8471, 8474 and 8476 open between hosts; JAX's 8482 is
# closed there. GKE gives 8476 to libtpu where it sets TPU_PROCESS_PORT.
PORT, OTHER_PORT = 8476, 8474
_SLICES = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_OURS_FIX = "set RLJAX_COORDINATOR, RLJAX_HOSTS and RLJAX_HOST on every host"
Metadata = Callable[[str], str | None]
MOST_HOSTS = 100_000
_MOST_GPUS = 10_000  # of a node
_LARGEST_ATTRIBUTE = 1_000_000  # bytes: of a slice of 100,000 workers it has so many
# SLURM's way to list nodes: a[1-3,07],b. A number has at most 18 digits.
_NUMBERS = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_NODE = re.compile(rf"(?:[A-Za-z0-9_.-]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+")
_NODES = re.compile(rf"{_NODE.pattern}(?:,{_NODE.pattern})*")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts of a run and this one's index among them; a host is one process."""

    coordinator: str  # HOST:PORT of host 0
    hosts: int
    host: int
    found_by: str  # for messages
    local_device_ids: tuple[int, ...] | None = None  # None: every device that the process sees
    slices: int = 1

    def __str__(self) -> str:
        slice_text = f" in {self.slices} slices" if self.slices > 1 else ""
        return f"host {self.host} of {self.hosts}{slice_text}, coordinator {self.coordinator}"


def environment(env: Mapping[str, str], metadata: Metadata | None = None) -> Cluster | None:
    """Returns the cluster that the variables describe; None for one process, which needs none.

    In this order: ours (RLJAX_COORDINATOR, RLJAX_HOSTS, RLJAX_HOST; in a JobSet RLJAX_HOSTS alone),
    a TPU with several workers, SLURM with several tasks, SkyPilot with several nodes. Raises
    InputError for variables that are incomplete or contradict each other, and for more than
    MOST_HOSTS hosts.

    Args:
        metadata: returns the value of an attribute by its name, on a TPU VM. Asked only if the
            variables do not say how many workers there are.
    """
    for find in (_ours, _tpu_of_variables, lambda env: _tpu_vm(env, metadata), _slurm, _skypilot):
        cluster = find(env)
        if cluster is not None and cluster.hosts > MOST_HOSTS:
            subject = f"the number of hosts by {cluster.found_by}"
            fix = f"correct it, or {_OURS_FIX}"
            raise InputError(subject, value=cluster.hosts, rule=f"at most {MOST_HOSTS}", fix=fix)
        if cluster is not None:
            return cluster if cluster.hosts > 1 else None
    return None


# -- ours --


def _ours(env: Mapping[str, str]) -> Cluster | None:
    names = ("RLJAX_COORDINATOR", "RLJAX_HOSTS", "RLJAX_HOST")
    values = {name: env[name].strip() for name in names if env.get(name, "").strip()}
    if not values:
        return None
    if "RLJAX_HOSTS" not in values:
        rule = "the number of hosts is needed"
        fix = "set RLJAX_HOSTS, or unset the others for a run on one host"
        raise InputError(f"{' and '.join(values)} without RLJAX_HOSTS", rule=rule, fix=fix)
    hosts = _number(env, "RLJAX_HOSTS", low=1)
    if hosts == 1:
        return Cluster("", 1, 0, "RLJAX_HOSTS")
    if "RLJAX_HOST" not in values and env.get("JOBSET_NAME"):
        return _jobset(env, hosts)
    if missing := [name for name in names if name not in values]:
        fix = "on every host RLJAX_COORDINATOR=ADDRESS_OF_HOST_0:8476 and RLJAX_HOST=0, 1, ..."
        raise InputError(f"RLJAX_HOSTS={hosts} without {' and '.join(missing)}", fix=fix)
    host = _number(env, "RLJAX_HOST", low=0)
    _check_host("RLJAX_HOST", host, "RLJAX_HOSTS", hosts)
    coordinator = _with_port(values["RLJAX_COORDINATOR"], _port(env))
    return Cluster(coordinator, hosts, host, "RLJAX_HOSTS", slices=_our_slices(env, hosts))


def _jobset(env: Mapping[str, str], hosts: int) -> Cluster:
    """The pods of a JobSet by the labels that the manifest of `rljax pod jobset` hands on. Job J of
    R has the hosts J x hosts / R and on, and JobSet gives the first pod a stable name."""
    jobs = _number(env, "REPLICATED_JOB_REPLICAS", low=1, default=1)
    job = _number(env, "JOB_INDEX", low=0, default=0)
    index = _number(env, "JOB_COMPLETION_INDEX", low=0)
    _check_host("JOB_INDEX", job, "REPLICATED_JOB_REPLICAS", jobs)
    if hosts % jobs:
        raise InputError(
            "RLJAX_HOSTS",
            value=hosts,
            rule=f"a multiple of the {jobs} jobs",
            fix=f"RLJAX_HOSTS={max(1, hosts // jobs) * jobs}, or as many as the jobs have pods in "
            "all",
        )
    per_job = hosts // jobs
    _check_host("JOB_COMPLETION_INDEX", index, "pods of a job", per_job)
    name, job_name = env["JOBSET_NAME"], env.get("REPLICATED_JOB_NAME", "slice")
    first = f"{name}-{job_name}-0-0.{name}"
    return Cluster(
        f"{first}:{_port(env)}",
        hosts,
        job * per_job + index,
        "JobSet",
        slices=_our_slices(env, hosts),
    )


def _our_slices(env: Mapping[str, str], hosts: int) -> int:
    """Counts the slices of the hosts. RLJAX_* are trusted; MEGASCALE_NUM_SLICES may be stale."""
    slices = _number(env, "RLJAX_SLICES", low=1, default=0)
    if slices and hosts % slices:
        rule = f"a divisor of RLJAX_HOSTS={hosts}"
        fix = "RLJAX_SLICES=1, or the number of slices of equal size"
        raise InputError("RLJAX_SLICES", value=slices, rule=rule, fix=fix)
    workers = len(_workers(env) or ())
    if not slices and workers:
        slices = hosts // workers if hosts % workers == 0 else 1
    slices = slices or _number(env, "MEGASCALE_NUM_SLICES", low=1, default=1)
    return slices if hosts % slices == 0 else 1


# -- TPU --


def _workers(env: Mapping[str, str]) -> list[str] | None:
    """Addresses of the workers of this slice by the variables of GKE, Kaggle and Colab. Kaggle
    puts a warning there where it could not find out: that is no address."""
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        parts = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
        if parts and not any(re.search(r"\s", part) for part in parts):
            return [part if part.startswith("[") else part.partition(":")[0] for part in parts]
    return None


def _tpu_of_variables(env: Mapping[str, str]) -> Cluster | None:
    workers = _workers(env)
    bounds = env.get("TPU_PROCESS_BOUNDS") or env.get("TPU_HOST_BOUNDS") or ""
    slices = _number(env, "MEGASCALE_NUM_SLICES", low=1, default=1) if workers else 1
    if workers is None:
        is_single = bounds.replace(" ", "") == "1,1,1" and not env.get("MEGASCALE_NUM_SLICES")
        return Cluster("", 1, 0, "TPU") if is_single else None
    if len(workers) * slices == 1:
        return Cluster("", 1, 0, "TPU")
    name = "TPU_WORKER_ID" if env.get("TPU_WORKER_ID") else "CLOUD_TPU_TASK_ID"
    worker = _number(env, name, low=0)
    _check_host(name, worker, "workers of TPU_WORKER_HOSTNAMES", len(workers))
    return _slice_worker(env, workers, worker, slices, env.get, "TPU_WORKER_HOSTNAMES")


def _tpu_vm(env: Mapping[str, str], metadata: Metadata | None) -> Cluster | None:
    # JAX sets TPU_SKIP_MDS_QUERY as it is imported where it sees no chip; who names a server by
    # GCE_METADATA_IP means it.
    if metadata is None or (env.get("TPU_SKIP_MDS_QUERY") and not env.get("GCE_METADATA_IP")):
        return None
    endpoints = metadata("worker-network-endpoints")
    if endpoints is None:
        return None
    workers = [_address(part) for part in endpoints.strip().split(",")]
    # Lines such as MEGASCALE_NUM_SLICES: '2'. They are of this boot; variables may be older.
    lines = (line.partition(":") for line in (metadata("tpu-env") or "").splitlines())
    attributes = {name.strip(): value.strip().strip("'\"") for name, _, value in lines}
    worker = metadata("agent-worker-number") or attributes.get("WORKER_ID", "")
    slices = _number(attributes, "MEGASCALE_NUM_SLICES", low=1, default=1)
    if len(workers) * slices == 1:
        return Cluster("", 1, 0, "TPU VM")
    number = _number({"agent-worker-number": worker}, "agent-worker-number", low=0)
    _check_host("agent-worker-number", number, "worker-network-endpoints", len(workers))
    return _slice_worker(env, workers, number, slices, attributes.get, "the metadata of the TPU VM")


def _address(endpoint: str) -> str:
    """ "NAME:ID:IP", as it was, or "IP" -> the address."""
    parts = endpoint.strip().split(":")
    if len(parts) not in (1, 3) or not parts[-1]:
        problem = "worker-network-endpoints of the metadata server"
        fix = "set RLJAX_COORDINATOR, RLJAX_HOSTS and RLJAX_HOST on every host"
        raise InputError(problem, value=endpoint, rule="addresses, or NAME:ID:ADDRESS", fix=fix)
    return parts[-1]


def _slice_worker(
    env: Mapping[str, str],
    workers: list[str],
    worker: int,
    slices: int,
    lookup: Callable[[str], str | None],
    found_by: str,
) -> Cluster:
    """Worker `worker` of this slice. The slices follow one another; host 0 is of the first."""
    if slices == 1:
        return Cluster(f"{workers[0]}:{_port(env)}", len(workers), worker, found_by)
    values = {name: lookup(name) or "" for name in _SLICES}
    slice_id = _number(values, "MEGASCALE_SLICE_ID", low=0)
    _check_host("MEGASCALE_SLICE_ID", slice_id, "MEGASCALE_NUM_SLICES", slices)
    first = values["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0]
    if not first:
        raise InputError(
            f"MEGASCALE_NUM_SLICES={slices} without MEGASCALE_COORDINATOR_ADDRESS",
            fix="set RLJAX_COORDINATOR, RLJAX_HOSTS and RLJAX_HOST on every host, or unset "
            "MEGASCALE_NUM_SLICES for a run on one slice",
        )
    host = slice_id * len(workers) + worker
    hosts = slices * len(workers)
    return Cluster(f"{first}:{_port(env)}", hosts, host, found_by, slices=slices)


def corrected(env: Mapping[str, str], cluster: Cluster | None) -> tuple[dict, str]:
    """Returns ({variable: its value, or None to remove it}, a warning) for variables that libtpu
    would misread.

    The number of slices is counted while the pods of a preempted slice still end, so that a
    restarted run waits for a slice that never comes (ray PR 62893); and Kaggle may leave a warning
    in the place of addresses.
    """
    changes: dict[str, str | None] = {}
    texts = []
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if re.search(r"\S\s+\S", env.get(name, "").replace(", ", ",")):
            changes[name] = None
            texts.append(f"{name} holds no addresses and is dropped: {env[name][:80]!r}")
    slice_env = {name: env[name] for name in _SLICES if name in env}
    slices = cluster.slices if cluster else 1
    if slice_env and str(slices) != slice_env.get("MEGASCALE_NUM_SLICES"):
        if cluster is None or slices == 1:
            changes |= dict.fromkeys(name for name in env if name.startswith("MEGASCALE_"))
            texts.append(
                f"MEGASCALE_* of other hosts are dropped: this run has one slice: {slice_env}"
            )
        else:
            per_slice = cluster.hosts // slices
            changes |= {
                "MEGASCALE_NUM_SLICES": str(slices),
                "MEGASCALE_SLICE_ID": str(cluster.host // per_slice),
                "MEGASCALE_COORDINATOR_ADDRESS": cluster.coordinator.rpartition(":")[0],
            }
            texts.append(f"MEGASCALE_* are stale and set anew for {slices} slices: {slice_env}")
    return changes, "; ".join(texts)


# -- SLURM --


def _slurm(env: Mapping[str, str]) -> Cluster | None:
    """Tasks of a step, which is what `srun` starts. A shell of a job, or one that was opened on
    its node, has the variables of the job alone and is one process."""
    nodes, number = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_STEP_NUM_TASKS")
    if not nodes or not number or not env.get("SLURM_PROCID"):
        return None
    hosts = _number(env, "SLURM_STEP_NUM_TASKS", low=1)
    host = _number(env, "SLURM_PROCID", low=0)
    _check_host("SLURM_PROCID", host, "SLURM_STEP_NUM_TASKS", hosts)
    # Above Linux's ephemeral ports; another one for each job and step of a shared node.
    job, step = (_number(env, f"SLURM_{name}_ID", low=0, default=0) for name in ("JOB", "STEP"))
    port = _given_port(env) or 61_440 + (job + 17 * step) % 4096
    return Cluster(f"{node_names(nodes)[0]}:{port}", hosts, host, "SLURM", _gpus_of_task(env))


def node_names(listed: str) -> list[str]:
    """Returns the names in a list of SLURM: a1 a2 a3 a07 b of "a[1-3,07],b". Raises InputError for
    a text of another form, and for too many nodes."""
    listed = listed.strip()
    if not _NODES.fullmatch(listed):
        raise _wrong_nodes(listed, "NAME or NAME[1-3,7], ...")
    names: list[str] = []
    for item in _NODE.findall(listed):
        parts = re.split(r"\[([^\]]*)\]", item)  # text, numbers, text, ...
        expanded = [parts[0]]
        for numbers, text in zip(parts[1::2], parts[2::2], strict=True):
            ranges = _ranges(numbers)
            _check_nodes(len(names) + len(expanded) * len(ranges))
            expanded = [f"{name}{n}{text}" for name in expanded for n in ranges]
        names += expanded
    return names


def _check_nodes(count: int) -> None:
    if count > MOST_HOSTS:
        raise _wrong_nodes(count, f"at most {MOST_HOSTS} nodes")


def _wrong_nodes(value: object, rule: str) -> InputError:
    return InputError("SLURM_STEP_NODELIST", value=value, rule=rule, fix=_OURS_FIX)


def _ranges(text: str) -> list[str]:
    """ "1-3,07" -> 1 2 3 07: the zeros of the first number are kept."""
    out = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if last < first:
            raise _wrong_nodes(part, "a range goes up")
        _check_nodes(len(out) + last - first + 1)
        out += [f"{n:0{len(low)}d}" for n in range(first, last + 1)]
    return out


def _gpus_of_task(env: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs, of those that this task of SLURM sees, which are its own; None: all.

    One task of a node takes all of them (JAX by itself would take one). Several share what they
    see, unless SLURM has bound a part to each already.
    """
    tasks = _tasks_here(env)
    visible = env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES"))
    if visible is None:
        gpus = _number(env, "SLURM_GPUS_ON_NODE", low=0, high=_MOST_GPUS, default=0)
    else:
        gpus = len([part for part in visible.split(",") if part.strip()])
    of_step = env.get("SLURM_STEP_GPUS", "").split(",") if env.get("SLURM_STEP_GPUS") else []
    bound = any(env.get(f"SLURM_{name}") for name in ("GPUS_PER_TASK", "GPU_BIND", "TRES_BIND"))
    if tasks == 1 or gpus <= 1 or bound or gpus < len(of_step):
        return None
    if gpus % tasks:
        rule = "GPUs are split evenly"
        fix = "--ntasks-per-node=1, which takes all of them, or one that divides them"
        raise InputError(f"{tasks} tasks on this node see {gpus} GPUs", rule=rule, fix=fix)
    per_task, local = gpus // tasks, _number(env, "SLURM_LOCALID", low=0)
    _check_host("SLURM_LOCALID", local, "tasks of this node", tasks)
    return tuple(range(local * per_task, (local + 1) * per_task))


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of the step on this node: SLURM_STEP_TASKS_PER_NODE is such as "2(x3),1"."""
    node, begin = _number(env, "SLURM_NODEID", low=0, default=0), 0
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None or not int(match[1]):
            raise InputError(
                "SLURM_STEP_TASKS_PER_NODE", value=part, rule="such as 2(x3),1", fix=_OURS_FIX
            )
        tasks, begin = int(match[1]), begin + int(match[2] or 1)
        if node < begin:
            break
    return tasks


# -- SkyPilot --


def _skypilot(env: Mapping[str, str]) -> Cluster | None:
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    if not addresses:
        return None
    hosts = _number(env, "SKYPILOT_NUM_NODES", low=1, default=len(addresses))
    if hosts != len(addresses):
        rule = f"SKYPILOT_NODE_IPS lists {len(addresses)}"
        fix = "start the task anew by `sky launch` or `sky jobs launch`"
        raise InputError("SKYPILOT_NUM_NODES", value=hosts, rule=rule, fix=fix)
    if hosts == 1:
        return None
    host = _number(env, "SKYPILOT_NODE_RANK", low=0)
    _check_host("SKYPILOT_NODE_RANK", host, "SKYPILOT_NUM_NODES", hosts)
    return Cluster(f"{addresses[0]}:{_port(env)}", hosts, host, "SkyPilot")


# -- shared --


def _number(
    env: Mapping, name: str, *, low: int, high: int = 999_999_999, default: int | None = None
) -> int:
    text = (env.get(name) or "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        subject = f"{name}" if text else f"{name} is not set"
        raise InputError(
            subject,
            value=text or None,
            rule=f"a whole number of {low} or more, at most {high}",
            fix=f"export {name}=..., as the launcher of the hosts sets it; without any of these "
            "variables the run has one host",
        )
    return int(text)


def _check_host(name: str, index: int, count_name: str, count: int) -> None:
    if index >= count:
        rule = f"from 0 to {count - 1}: {count_name} is {count}"
        fix = "number the hosts from 0, each number once"
        raise InputError(name, value=index, rule=rule, fix=fix)


def _port(env: Mapping[str, str]) -> int:
    """JAX_COORDINATOR_PORT, which JAX knows, too; else the one that clouds leave open and libtpu
    does not use itself."""
    if port := _given_port(env):
        return port
    used = env.get("TPU_PROCESS_PORT", "") + env.get("TPU_PROCESS_ADDRESSES", "")
    return OTHER_PORT if str(PORT) in used else PORT


def _given_port(env: Mapping[str, str]) -> int:
    return _number(env, "JAX_COORDINATOR_PORT", low=1, high=65_535, default=0)


def _with_port(address: str, port: int) -> str:
    """ "10.0.0.2" -> "10.0.0.2:8476"; one that has a port keeps it."""
    name, colon, number = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"{address}:{port}"
    if not name or not re.fullmatch(r"\d{1,5}", number) or not 0 < int(number) < 65_536:
        rule = "HOST:PORT, a port below 65536"
        fix = "RLJAX_COORDINATOR=HOST:8476, with the name or address of host 0"
        raise InputError("RLJAX_COORDINATOR", value=address, rule=rule, fix=fix)
    return address


# -- the metadata server --


def tpu_vm_metadata(env: Mapping[str, str]) -> Metadata | None:
    """Returns a function that asks the metadata server for an attribute, for `environment`, on a
    machine that has TPU chips; elsewhere None. It raises InputError if the server does not answer.
    GCE_METADATA_IP, as JAX reads it, names another server."""
    address = env.get("GCE_METADATA_IP")
    chips = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    if not address and not (chips and importlib.util.find_spec("libtpu")):
        return None
    server = address or "metadata.google.internal"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine

    def ask(name: str) -> str | None:
        url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        for wait_s in (0.5, 2.0, 0.0):
            try:
                with opener.open(request, timeout=5) as answer:
                    return answer.read(_LARGEST_ATTRIBUTE).decode(errors="replace")
            except urllib.error.HTTPError as error:
                if error.code == 404:  # no such attribute
                    return None
                problem = f"answers {error.code}"
            except (TimeoutError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            except OSError:  # not on Google Cloud, or the container hides the server
                return None
            time.sleep(wait_s)
        # To go on as one host would be a run for each host of a pod.
        fix = "set RLJAX_HOSTS=1 for one host; else RLJAX_COORDINATOR, RLJAX_HOSTS, RLJAX_HOST"
        raise InputError(f"the metadata server {server} does not say {name}: {problem}", fix=fix)

    return ask


def find(env: MutableMapping[str, str]) -> Cluster | None:
    """Returns the cluster of this process, after correcting the variables that libtpu would
    misread. Raises InputError as `environment`."""
    cluster = environment(env, tpu_vm_metadata(env))
    changes, warning = corrected(env, cluster)
    for name, value in changes.items():
        if value is None:
            del env[name]
        else:
            env[name] = value
    if warning:
        warnings.warn(warning, stacklevel=2)
    return cluster
