"""Push: rljax push RUN OWNER/NAME [--part=policy] [--public] [--evaluations=result.json]

Puts the adapter, policy or reward model that a run has exported on the Hugging Face Hub, with a
model card: base and data with their commits, method, evaluations with 95 % intervals, the command,
the report. A new repository is private unless --public. Checkpoints stay here, and keys and
passwords in the config or the command are hidden. --out=FOLDER writes what would be pushed.
"""

import dataclasses

from rljax.command.launch import print_table
from rljax.config.run_options import PushOptions


def main(options: PushOptions) -> None:
    """Pushes the model and prints the files."""
    from rljax.report.publish import publish

    arguments = dataclasses.asdict(options)
    pushed = publish(arguments.pop("run"), arguments.pop("to"), **arguments)
    print_table(("file",), [(name,) for name in pushed.files], f"{pushed.part} of {options.run}")
    print(f"pushed: {pushed.url}" if pushed.url else f"written to {options.out}; nothing is pushed")
