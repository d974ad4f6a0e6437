"""The table of the commands, and main(), which runs the one that is named."""

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

import rljax
from rljax.command.launch import Command, complain, launch
from rljax.config import data_options as data
from rljax.config import policy_options as policies
from rljax.config import run_options as runs
from rljax.config import service_options as services
from rljax.config.declare import Options
from rljax.errors import InputError
from rljax.suggest import near_names
from rljax.tracking.screen import open_closed_streams, printable_streams
from rljax.tracking.signals import quit_now

_local = functools.partial(Command, one_host=True)
_light = functools.partial(Command, jax=False)
_shown = functools.partial(Command, jax=False, only_prints=True)
_COMMANDS = (
    Command(
        "demo",
        "train a policy here in minutes: a small one, or --real, a pretrained one",
        runs.DemoOptions,
        "quickstart:demo",
    ),
    Command("train", "run a config: rljax train quickstart", runs.TrainOptions, "needed"),
    _shown("configs", "list the configs that ship", Options),
    _shown(
        "config show",
        "the resolved config, as a table, YAML or JSON",
        runs.ShowOptions,
        "needed",
        prints_config=True,
    ),
    _shown("config diff", "the fields in which two configs or runs differ", runs.DiffOptions),
    _shown(
        "doctor",
        "what is wrong with this machine or a run folder, and how to mend it",
        runs.DoctorOptions,
    ),
    Command(
        "inspect",
        "print rows of the data as the model reads them",
        data.InspectOptions,
        "needed",
        module="inspect_data",
        data_with="model",
        only_prints=True,
    ),
    _local(
        "play",
        "one episode of a config's environment: by hand, or by a policy",
        policies.PlayOptions,
        "needed",
    ),
    Command(
        "plan",
        "memory and time of a config, on chips that need not be there",
        runs.PlanOptions,
        "needed",
    ),
    _local(
        "evaluate", "accuracy, pass@k and majority@k of a run or model", policies.EvaluateOptions
    ),
    _light("report", "write the report of a run anew, or compare several", runs.ReportOptions),
    _shown(
        "watch",
        "curves and completions of runs in the terminal, while they go on",
        runs.WatchOptions,
    ),
    _local(
        "push",
        "put a run's policy or adapter on the Hugging Face Hub, with a model card",
        runs.PushOptions,
        jax=False,
    ),
    _local("replay", "find what made a step's loss or gradient not finite", runs.ReplayOptions),
    _local("serve", "an OpenAI-compatible endpoint for a run or model", services.ServeOptions),
    _local("chat", "talk to a run or model, with tools", services.ChatOptions),
    Command("sweep", "run what a config's sweep() yields", runs.SweepOptions, "needed"),
    _local(
        "pipeline",
        "chain the stages that a config's pipeline() yields: SFT, RM, RL",
        runs.PipelineOptions,
        "needed",
    ),
    _light("pod", "several hosts: here, TPU VMs, SLURM, Kubernetes, SkyPilot", services.PodOptions),
    _light(
        "data prepare",
        "map rows to the columns that training reads",
        data.PrepareOptions,
        module="prepare_data",
    ),
    Command(
        "data inspect",
        "the same as inspect",
        data.InspectOptions,
        "needed",
        module="inspect_data",
        data_with="model",
        only_prints=True,
    ),
    _local(
        "sample",
        "rejection sampling: the best of K samples as a file; RAFT",
        policies.RejectionOptions,
        "optional",
        module="rejection_sample",
    ),
    _local("label steps", "find the first wrong line of programs", policies.LabelOptions),
    _local("label preferences", "have a judge label pairs", policies.PreferenceOptions),
    _local("score steps", "a process reward model on labelled lines", policies.ScoreOptions),
    _local(
        "compare",
        "offline algorithms on one file of samples",
        policies.ComparisonOptions,
        "optional",
        module="compare_offline",
    ),
    _shown("completion", "completion of these words by bash, zsh or fish", runs.CompletionOptions),
    _light(
        "scaling",
        "fit curves of performance over compute",
        runs.ScalingOptions,
        module="fit_scaling",
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}


@printable_streams()
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `rljax COMMAND ...` and ends the process with the command's exit code."""
    open_closed_streams()
    is_last = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--version"]:
        print(f"rljax {rljax.__version__}")
        sys.exit(0)
    if arguments[:1] == ["help"] and len(arguments) > 1:  # rljax help train
        arguments = [*arguments[1:], "--help"]
    words = [argument for argument in arguments if argument not in ("--help", "-h", "help")]
    group = {k: c for k, c in COMMANDS.items() if not words or k.startswith(f"{words[0]} ")}
    if not arguments or (group and len(words) < 2 and len(words) < len(arguments)):
        print(_overview(group))  # all commands, or those of a group: rljax data --help
        sys.exit(0 if arguments else 2)
    for count in (2, 1):
        name = " ".join(arguments[:count])
        if name in COMMANDS:
            run(name, arguments[count:], f"rljax {name}", last=is_last)
    sys.exit(complain(_unknown(arguments)))


@printable_streams()
def run(
    name: str, arguments: Sequence[str] | None = None, program: str = "", *, last: bool = False
) -> None:
    """Runs a command and ends the process with its exit code. A Ctrl-C ends it, too, without a
    traceback, at any moment at which the command does not answer it itself. `last`: nothing else
    runs in this process afterwards, as when the arguments are those of the process."""
    open_closed_streams()
    last = last or arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, quit_now)
    try:
        code = launch(COMMANDS[name], list(arguments), program or f"python {sys.argv[0]}")
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` ends: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if last and "jax" in sys.modules:
        _end_process(code)
    sys.exit(code)


def _end_process(code: int) -> None:
    """Ends the process as sys.exit does, but without taking Python down: a thread of XLA or of
    TensorStore that frees an array at that moment would abort it, after a command that was done."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _unknown(arguments: Sequence[str]) -> InputError:
    word = arguments[0]
    subcommands = [name for name in COMMANDS if name.startswith(f"{word} ")]
    command = " ".join(arguments[:2]) if subcommands else word
    near = (subcommands if command == word else []) or [
        n for n in COMMANDS if n.startswith(command)
    ]
    near = near or near_names(command, COMMANDS, 1)
    near = near or subcommands
    near = near or [name for name in COMMANDS if word in name.split()]
    hint = f"did you mean rljax {' or '.join(near)}? " if near else ""
    return InputError("no such command", value=command, fix=f"{hint}`rljax --help` lists them")


def _overview(commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {command.about}" for name, command in commands.items())
    return (
        "usage: rljax COMMAND [arguments]\n\n"
        f"{listed}\n\n"
        "rljax COMMAND --help lists the flags of one. rljax --version\n"
        "Start with: rljax demo"
    )
