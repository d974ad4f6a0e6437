"""Rejection sampling: rljax sample --checkpoint=RUN_OR_MODEL_FOLDER
--out=best.jsonl [--samples=8 --select=best --min_reward=0]

Samples, scores and selects; dataflow="sft" reads the file as data.train. --pairs and --trajectories
write what DPO, KTO, DRO and DQO read. With --iterations=N and --config (how SFT trains) it is RAFT:
sample, select, SFT, N times, in the folder --out; the same command goes on where it was stopped.
"""

from rljax.command.launch import ConfigSource, print_table
from rljax.config.policy_options import RejectionOptions
from rljax.errors import InputError


def main(options: RejectionOptions, source: ConfigSource) -> None:
    """Samples and selects, once or by iterations of RAFT, and prints the counts. Raises InputError
    for RAFT without a config."""
    from rljax.datagen.rejection import raft, rejection_sample

    if not options.iterations:
        _show([rejection_sample(options)])
        return
    if source.config is None:
        raise InputError("RAFT trains", fix="--config says how")
    _show(raft(source.config, options, options.out))


def _show(metas: list[dict]) -> None:
    names = ["value"] if len(metas) == 1 else [f"iteration {i}" for i in range(len(metas))]
    rows = [
        (name, *(f"{meta['metrics'][name]:.4g}" for meta in metas)) for name in metas[0]["metrics"]
    ]
    rows += [
        (f"rows of {kind}", *(meta["files"][kind]["rows"] for meta in metas))
        for kind in metas[0]["files"]
    ]
    print_table(["metric", *names], rows, metas[-1]["files"]["examples"]["file"])
    print(metas[-1]["report"])
