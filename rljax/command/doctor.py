"""Doctor: rljax doctor [RUN] [--hosts] [--json] [--nojax]

Says what is wrong with this machine, its environment and a run folder, each with one line that
mends it: packages, devices, flags of XLA, disk, proxies, the sandbox, torn checkpoints. --hosts, on
every host of a pod at once, asks whether all reach each other both ways. Exit code 0: nothing is
broken (there may be warnings); 1: something is.
"""

import dataclasses
import json

from rljax.config.run_options import DoctorOptions

_MARK = {"fine": "ok", "warning": "warning", "broken": "BROKEN"}


def main(options: DoctorOptions) -> int:
    """Prints the findings; returns the exit code."""
    from rljax.doctor import examine

    findings = list(dict.fromkeys(examine(options)))
    counts = {status: sum(f.status == status for f in findings) for status in _MARK}
    if options.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"broken": counts["broken"], "findings": rows}, indent=2))
        return 1 if counts["broken"] else 0
    for status in _MARK:
        for finding in findings:
            if finding.status == status:
                print(f"{_MARK[status]:<8} {finding.name}: {finding.what}")
                print(f"{'':<8} Fix: {finding.fix}\n" * bool(finding.fix), end="")
    print(f"{counts['broken']} broken, {counts['warning']} warnings")
    return 1 if counts["broken"] else 0
