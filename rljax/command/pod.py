"""Pods: rljax pod VERB [--flags] [-- COMMAND ...]

The same command on every host. Here and for schedulers (the text is printed):
  local      processes on this machine: rljax pod local --hosts=4 --devices=2 -- train quickstart
  slurm      a script for sbatch: rljax pod slurm --nodes=4 --gpus=8 -- train my.py
  jobset     a JobSet of GKE: rljax pod jobset --type=v5litepod-64 --slices=2 -- train my.py
  sky        a task of SkyPilot: rljax pod sky --type=v6e-16 -- train my.py
  supervise  runs the command, and again after what a restart can mend; slurm, ... use it

TPU VMs of Google Cloud, by gcloud, which must be logged in. --name, --zone and --type say which:
  up         asks for the pod and waits until it is there
  run        sends the code of this folder, starts the command on every host and prints its logs
  logs stop  of a command that runs: prints, ends
  babysit    up and run; a pod that was taken away is asked for again, until the command is done
  down       deletes the pod
  accept     starts, kills, resumes and re-sizes a small run, and writes what it saw; with --hosts
             here, with --type on a pod
"""

import sys
from pathlib import Path

from rljax.config.service_options import PodOptions
from rljax.errors import InputError
from rljax.files import yaml_text


def main(options: PodOptions) -> int:
    """Runs a verb; returns the exit code."""
    if options.verb in ("slurm", "jobset", "sky"):
        print(_template_text(options), end="")
        return 0
    if options.verb == "local":
        from rljax.pods.local import run_local
        from rljax.pods.templates import host_command

        command = host_command(options.command, supervised=False)
        return run_local(_of_this_python(command), options.hosts, options.devices)
    if options.verb == "supervise":
        from rljax.pods.supervise import supervise

        return supervise(_of_this_python(list(options.command)))
    if options.verb == "accept":
        return _accept(options)
    return _on_google(options)


def _accept(options: PodOptions) -> int:
    from rljax.experiments.accept import accept_here, accept_on

    if options.type:
        manifest = accept_on(_cloud(options), options.setup, options.poll_s, options.out)
    else:
        folder = Path(options.out or "runs/accept")
        manifest = accept_here(options.hosts, options.devices, folder)
    for check, passed in manifest["checks"].items():
        print(f"{'yes' if passed else 'NO':<4} {check}")
    return 0 if all(manifest["checks"].values()) else 1


def _cloud(options: PodOptions):
    from rljax.pods import google, read_pod

    if not options.type:
        raise InputError("no --type", fix="such as --type=v5litepod-16")
    pod = read_pod(options.type, options.slices)
    target = (options.name, options.zone, options.project, options.spot)
    return google.cloud(options.api, pod, *target)


def _on_google(options: PodOptions) -> int:
    from rljax.pods import remote

    target = _cloud(options)
    if options.verb == "up":
        remote.bring_up(target, options.poll_s)
    elif options.verb == "run":
        return remote.run(target, options.command, options.setup)
    elif options.verb == "logs":
        return remote.logs(target)
    elif options.verb == "stop":
        remote.stop(target)
    elif options.verb == "babysit":
        return remote.babysit(target, options.command, options.setup, options.poll_s)
    elif options.verb == "down":
        target.delete()
    return 0


def _of_this_python(command: list[str]) -> list[str]:
    return [sys.executable, *command[1:]] if command[0] in ("python", "python3") else command


def _template_text(options: PodOptions) -> str:
    from rljax.pods import read_pod, templates

    def values_of(*names: str) -> dict[str, object]:
        return {name: getattr(options, name) for name in names}

    pod, command = read_pod(options.type, options.slices) if options.type else None, options.command
    if options.verb == "slurm":
        fields = values_of("name", "nodes", "gpus", "time", "partition", "account")
        return templates.slurm(command, **fields)
    if options.verb == "sky":
        fields = values_of("name", "accelerators", "nodes", "bucket", "spot")
        return yaml_text(templates.sky(command, pod=pod, **fields), blocks=True)
    if pod is None:
        raise InputError("no --type", fix="such as --type=v5litepod-64")
    fields = values_of("name", "image", "queue", "spot")
    return yaml_text(templates.jobset(pod, command, **fields), blocks=True)
