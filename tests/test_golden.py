"""Every file and every case of the golden vectors: values, gradients and metrics, in float64 and in
float32.

tests/golden holds a selection of every file that has a check (tests/helpers/golden_checks), and a
file that is missing there fails. The folder $RLJAX_GOLDEN (default ../shared/golden/public), where
it is at hand, adds its further cases and files; one with neither a check nor a line in NOT_HERE
fails. Where $RLJAX_GOLDEN is set, every lane compares all float64 cases.
"""

import dataclasses
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FURTHER, GOLDEN
from golden_checks.common import Skip
from golden_io import read_cases, same

ROOMS = (
    "advantages",
    "policy",
    "correction",
    "objectives",
    "data",
    "preference",
    "reward_model",
    "distillation",
    "schedules",
    "logprobs",
)

# What no formula of these rooms answers to. A prefix ending in / stands for a folder.
NOT_HERE: dict[str, str] = {
    "hf/": "model folders: tests/models/test_families.py holds them",
    "trl_traj/": "whole runs of trainers: test_programs.py and test_trl_offline.py replay them",
    "verl/reward_scores": "rewards of texts: tests/rewards/test_rewards.py",
    "verl/data_metrics": "verl's summary of a batch: ours has other numbers",
    "verl/validation_metrics": "bootstrap estimates by numpy's generator; ours are exact "
    "(tests/evaluation/test_evaluate.py)",
    "verl/seqlen_balance": "balancing rows over devices by length: not built",
}


def stems() -> set[str]:
    """Files of both folders, such as verl/adv_gae."""
    suffixes = ("*/**/*.npz", "*/**/*.json")
    files = [(f, p) for f in (GOLDEN, FURTHER) for suffix in suffixes for p in f.glob(suffix)]
    return {p.relative_to(folder).with_suffix("").as_posix() for folder, p in files}


def cases_of(stem: str) -> list:
    """The cases of tests/golden, then those of the other folder that are not among them.

    Agreement is optional for the latter's degenerate inputs (`edge`): there both projects choose.
    Those of tests/golden are known to agree, and have to.
    """
    cases = read_cases(GOLDEN / f"{stem}.npz")[1]
    further = FURTHER / f"{stem}.npz"
    if further.exists():
        more = read_cases(further)[1]
        more = [c for c in more if not any(same(c, mine) for mine in cases)]
        cases += [dataclasses.replace(c, optional=c.edge) for c in more]
    return cases


def checks() -> dict:
    out = {}
    for room in ROOMS:
        table = importlib.import_module(f"golden_checks.{room}").CHECKS
        assert not out.keys() & table.keys()
        out |= table
    return out


CHECKS = checks()
# In float32, where a compile costs as much again, the normal lane holds every eighth case of one
# file of each room to its numbers, and the slow lane all cases of all.
ALSO_FLOAT32 = (
    "trl/dpo",
    "trl/grpo_loss",
    "trl/reward_model",
    "trl/sft",
    "verl/adv_gae",
    "verl/policy_loss_vanilla",
    "verl/value_loss",
)


# Every case is a program to compile. In float64 the slow lane holds all of them to their numbers,
# and the normal lane so many of each file that every value of an option and every kind of input is
# met (covering); and of files in which nearly every case has an option's value to itself, at most
# so many, those that meet most.
AT_MOST = {
    "trl/grpo_loss": 26,
    "verl/rollout_correction": 8,
    # The inputs of these are alike from file to file.
    "verl/policy_loss_": 6,
    "verl/adv_": 4,
}

# What another file has of the same formula: older releases, and the same numbers computed at once.
OTHERWISE = (
    "verl/rollout_is_pr3694",
    "verl/rollout_corr_v070",
    "trl/dpo_seq_v024",
    "trl/kto_seq_v024",
    "verl/adv_grpo_vectorized",
    "verl/adv_rloo_vectorized",
)


def lanes_of(stem: str):
    """(dtype, which cases, marks) of a file."""
    slow = [pytest.mark.slow]
    yield "float64", "covering", slow if stem in OTHERWISE else []
    yield "float64", "all", slow
    yield "float32", "all", slow
    if stem in ALSO_FLOAT32:
        yield "float32", "eighth", []


PARAMETERS = [
    pytest.param(s, d, part, id=f"{s}-{d}-{part}", marks=marks)
    for s in sorted(CHECKS)
    for d, part, marks in lanes_of(s)
]


def traits(case) -> set:
    """The value of every option, the words of the label, and the kind of the input; a count of
    tokens is no option."""

    def hashable(x):
        return x.shape if isinstance(x, np.ndarray) else repr(x)

    names = (case.inputs, case.grads, case.metrics)
    return {
        *((k, hashable(v)) for k, v in case.params.items() if k != "num_items_in_batch"),
        *(word for word in case.label.split() if not word.startswith("num_items_in_batch")),
        ("shapes", tuple(sorted((name, np.shape(x)) for name, x in case.inputs.items()))),
        ("edge", case.edge),
        tuple(tuple(sorted(part)) for part in names),
    }


def covering(cases: list, most: int | None = None) -> list:
    """A few of the cases that have every trait: of `most` of them, those that have most, the values
    of options first."""
    of_each, chosen = [traits(case) for case in cases], set()
    wanted = set().union(*of_each)
    options = {(k, repr(v)) for case in cases for k, v in case.params.items()}
    while wanted and len(chosen) != most:
        left = (i for i in range(len(cases)) if i not in chosen)
        best = max(
            left, key=lambda i: (len(of_each[i] & wanted & options), len(of_each[i] & wanted))
        )
        chosen.add(best)
        wanted -= of_each[best]
    return [case for i, case in enumerate(cases) if i in chosen]


def part_of(cases: list, part: str, stem: str) -> list:
    if part == "covering":
        most = next((n for name, n in AT_MOST.items() if stem.startswith(name)), None)
        return cases if "RLJAX_GOLDEN" in os.environ else covering(cases, most)
    return cases[::8] if part == "eighth" else cases


def excused(stem: str) -> bool:
    return any(stem == k or (k.endswith("/") and stem.startswith(k)) for k in NOT_HERE)


def test_every_file_has_a_check_or_a_reason():
    assert [s for s in sorted(stems()) if s not in CHECKS and not excused(s)] == []
    assert [s for s in CHECKS if excused(s)] == []


def tolerance(kind: str, key: str, case, dtype: str) -> tuple[float, float]:
    """(relative, relative to the largest element): float64 to 1e-9, metrics to 1e-6, float32 to
    1e-4."""
    coarse = "float32" in (case.params.get("compute_dtype"), case.params.get("precision"))
    if kind == "metric":
        if key.endswith("_std") and (dtype == "float32" or coarse):
            return 1e-2, 1e-2  # the peer takes sqrt(E[x^2] - E[x]^2)
        return (1e-4, 1e-4) if dtype == "float32" or coarse else (1e-6, 1e-6)
    if dtype == "float32":
        return 1e-4, 1e-4
    if coarse:  # the peer itself ran in float32
        return (1e-3, 1e-4) if kind == "grad" else (1e-4, 2e-5)
    return 1e-9, 1e-9


def compare(got: dict, case, dtype: str) -> list[str]:
    """Returns what differs, and what is missing. Where agreement is optional, shapes are compared,
    and a number has to be one."""
    stored = {
        f"{kind}/{k}": v
        for kind, values in (
            ("output", case.outputs),
            ("grad", case.grads),
            ("metric", case.metrics),
        )
        for k, v in values.items()
    }
    omitted = got.pop("omitted", {})
    wrong = [f"{key} is not computed" for key in stored if key not in got and key not in omitted]
    wrong += [f"{key} is not in the file" for key in got if key not in stored]
    for key in stored.keys() & got.keys():
        want, value = np.asarray(stored[key], np.float64), got[key]
        value, keep = value if isinstance(value, tuple) else (value, None)
        value = np.asarray(value, np.float64)
        if value.shape != want.shape:
            wrong.append(f"{key} has shape {value.shape}, not {want.shape}")
            continue
        keep = np.ones(want.shape, bool) if keep is None else np.broadcast_to(keep, want.shape)
        value, want = value[keep], want[keep]
        relative, of_largest = tolerance(key.split("/")[0], key, case, dtype)
        if np.asarray(stored[key]).dtype == np.float32:  # the file itself rounds
            of_largest = max(of_largest, 1e-7)
        largest = np.max(np.abs(want[np.isfinite(want)]), initial=0.0)
        floor = {"float64": 1e-12, "float32": 1e-6}[dtype]
        if key.startswith("metric/"):
            floor = 1e-6 if dtype == "float64" else 2e-5
        close = np.isclose(value, want, rtol=relative, atol=of_largest * largest + floor)
        if case.optional:
            close = close | np.isfinite(value) | ~np.isfinite(want)
        if not close.all():
            worst = np.nanmax(np.abs(value - want)) if value.size else 0.0
            wrong.append(
                f"{key}: off by {worst:.3g} (largest {largest:.3g}), {(~close).sum()} values"
            )
    return wrong


def computed(check, cases, dtype) -> list[dict | None]:
    """What a check returns for each case, None for one that it skips: compiled as one program where
    it allows that. Op by op takes minutes, and a program for each case twice as long."""
    aside = {}

    def of(case):
        try:
            return dict(check(case, dtype))
        except Skip:
            return None

    def arrays():
        all_got = [of(case) for case in cases]
        for i, got in enumerate(all_got):
            if got is not None:
                keep = {k: v[1] for k, v in got.items() if isinstance(v, tuple)}
                aside[i] = got.pop("omitted", {}), keep
                all_got[i] = {k: v[0] if isinstance(v, tuple) else v for k, v in got.items()}
        return all_got

    try:
        all_got = jax.jit(arrays)()
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError):
        # One of them computes on the host in between.
        if len(cases) > 1:
            return [got for case in cases for got in computed(check, [case], dtype)]
        return [of(cases[0])]
    for i, (omitted, keep) in aside.items():
        masked = {k: (all_got[i][k], mask) for k, mask in keep.items()}
        all_got[i] = {**all_got[i], **masked, "omitted": omitted}
    return all_got


@pytest.mark.parametrize("stem,dtype,part", PARAMETERS)
def test_golden(stem, dtype, part):
    cases = part_of(cases_of(stem), part, stem)
    with jax.enable_x64(True):
        together = computed(CHECKS[stem], cases, jnp.dtype(dtype))
    checked = [(case, got) for case, got in zip(cases, together, strict=True) if got is not None]
    wrong = [f"{case.label}: {w}" for case, got in checked for w in compare(got, case, dtype)]
    assert not wrong, f"{len(wrong)} differences\n" + "\n".join(wrong[:20])
    assert checked, f"none of the {len(cases)} cases was compared"
