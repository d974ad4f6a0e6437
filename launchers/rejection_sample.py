"""Rejection sampling: python launchers/rejection_sample.py --checkpoint=RUN_OR_MODEL_FOLDER
--out=best.jsonl [--samples=8 --select=best --min_reward=0]

Samples, scores and selects; dataflow="sft" reads the file as data.train. --pairs and --trajectories
write what DPO, KTO, DRO and DQO read. With --iterations=N and --config (how SFT trains) it is RAFT:
sample, select, SFT, N times, in the folder --out.
"""

from rljax.config import flags as launch
from rljax.config.options import RejectionOptions
from rljax.errors import InputError


def main(options: RejectionOptions) -> None:
    from rljax.datagen.rejection import raft, rejection_sample

    if not options.iterations:
        _show([rejection_sample(options)])
        return
    config = launch.parsed_config()
    if config is None:
        raise InputError("RAFT trains", fix="--config says how")
    _show(raft(config, options, options.out))


def _show(metas: list[dict]) -> None:
    names = ["value"] if len(metas) == 1 else [f"iteration {i}" for i in range(len(metas))]
    rows = [
        (name, *(f"{meta['metrics'][name]:.4g}" for meta in metas)) for name in metas[0]["metrics"]
    ]
    rows += [
        (f"rows of {kind}", *(meta["files"][kind]["rows"] for meta in metas))
        for kind in metas[0]["files"]
    ]
    launch.print_table(["metric", *names], rows, metas[-1]["files"]["examples"]["file"])


if __name__ == "__main__":
    launch.command(main, RejectionOptions)
