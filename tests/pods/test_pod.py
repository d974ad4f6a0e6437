"""What a pod is: chips, hosts and topologies of every type."""

import math

import pytest

from rljax.errors import InputError
from rljax.pods import VERSIONS, Pod, read_pod
from rljax.pods.pod import topologies

# Of the tables of the documentation: type, topology, hosts.
KNOWN = {
    "v4-8": ("2x2x1", 1),
    "v4-16": ("2x2x2", 2),
    "v4-32": ("2x2x4", 4),
    "v4-64": ("2x4x4", 8),
    "v4-128": ("4x4x4", 16),
    "v4-512": ("4x8x8", 64),
    "v4-1536": ("8x8x12", 192),
    "v4-4096": ("8x16x16", 512),
    "v5litepod-1": ("1x1", 1),
    "v5litepod-4": ("2x2", 1),
    "v5litepod-8": ("2x4", 1),
    "v5litepod-16": ("4x4", 4),
    "v5litepod-32": ("4x8", 8),
    "v5litepod-64": ("8x8", 16),
    "v5litepod-128": ("8x16", 32),
    "v5litepod-256": ("16x16", 64),
    "v5p-8": ("2x2x1", 1),
    "v5p-128": ("4x4x4", 16),
    "v5p-384": ("4x4x12", 48),
    "v5p-1024": ("8x8x8", 128),
    "v5p-12288": ("16x16x24", 1536),
    "v6e-8": ("2x4", 1),
    "v6e-16": ("4x4", 4),
    "v6e-256": ("16x16", 64),
    "tpu7x-8": ("2x2x1", 1),
    "tpu7x-128": ("4x4x4", 16),
    "tpu7x-4096": ("8x16x16", 512),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", KNOWN)
def test_types_of_the_documentation(name):
    pod = read_pod(name)
    assert (pod.topology_text, pod.hosts) == KNOWN[name]
    assert pod.type == name


@pytest.mark.parametrize("version", VERSIONS)
def test_hosts_times_chips_are_the_topology(version):
    """Of every shape that there is, read by its name and by its type."""
    figures = VERSIONS[version]
    for shape in topologies(version):
        pod = read_pod(f"{version}:{'x'.join(map(str, shape))}", slices=2)
        assert pod.hosts_per_slice * pod.chips_per_host == math.prod(shape) == pod.chips
        assert pod.hosts == 2 * pod.hosts_per_slice and len(shape) == figures.dimensions
        assert pod.devices == 2 * pod.chips * figures.devices_per_chip <= 2 * 2 * figures.most_chips
        again = read_pod(pod.type)
        assert again.chips == pod.chips and again.type == pod.type
        assert max(again.topology) <= max(shape)  # the most cube-like of that number
        assert str(pod.chips_per_host) in pod.machine_type


def test_other_names():
    assert read_pod("v5e-16") == read_pod("v5litepod-16") == read_pod("v5e:4x4")
    assert read_pod("v7x-8") == read_pod("tpu7x-8") == Pod("tpu7x", (2, 2, 1))
    assert read_pod("2xv5e:16x16") == read_pod("v5litepod-256", 2)
    with pytest.raises(InputError, match="--slices.*says 2"):
        read_pod("2xv5e:16x16", 4)
    text = str(read_pod("v5litepod-16", 2))
    assert text == "2 slices of v5litepod-16 (v5e:4x4), 8 hosts, 32 chips"


@pytest.mark.parametrize(
    "text, message",
    [
        ("v3-8", "VERSION-NUMBER"),
        ("v5litepod", "VERSION-NUMBER"),
        ("v4-", "VERSION-NUMBER"),
        ("v4-12", "v4 has no such type.*counts cores.*v4-8"),
        ("v5e:4x6", "no such slice.*v5e:4x8"),
        ("v5litepod-512", "v5litepod-256"),
        ("v4:4x4", "no such slice"),
        ("v6e-4x4", "no such type"),
        ("v5p:4x4x6", "v5p:4x4x8"),
        ("v4-0", "VERSION-NUMBER"),
    ],
)
def test_types_that_are_none(text, message):
    with pytest.raises(InputError, match=message):
        read_pod(text)
