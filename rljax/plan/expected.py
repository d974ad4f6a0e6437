"""Effects of bounds on staleness and of splits of the devices on a run: simulated side by side, as
text and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.plan.simulate import Draw, Load, Outcome, Seconds, simulate
from rljax.plan.table import rows_text, seconds_text

SEEDS = 2
LEFT_OUT = (
    "left out: reading again (in_flight_cache='reread', parked episodes), short pages, drafts, "
    "dropped groups, late scores, the processors of environments, checkpoints, evaluations, more "
    "slots than a step has rows"
)


@dataclasses.dataclass(frozen=True)
class Mode:
    """A setting of rollouts.max_staleness and rollouts.ahead. `sampling`: number of devices that
    only sample; 0: one mesh samples and learns."""

    max_staleness: int
    ahead: int
    sampling: int = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """A mode, the mean of its simulations, and by how much they differ, as a share of the mean."""

    mode: Mode
    outcome: Outcome
    spread: float


@dataclasses.dataclass(frozen=True)
class Expected:
    """A simulation's inputs and results. `seconds` by the number of devices that sample, 0: one
    mesh; `source` says where they come from."""

    load: Load
    seconds: Mapping[int, Seconds]
    source: str
    devices: int
    lengths: str
    rows: Sequence[Row]


def modes(etas: Sequence[int], own: tuple[int, int], splits: Sequence[int]) -> list[Mode]:
    """Returns the modes to compare. On one mesh: every eta, with `ahead` equal to it and to half of
    it, and the config's `own` (eta, ahead); then those with an eta above 0 for every split."""
    pairs = {(0, 0), own, *((eta, eta) for eta in etas)}
    pairs |= {(eta, max(1, eta // 2)) for eta in etas if eta}
    pairs = sorted(pairs)
    return [Mode(*pair, split) for split in (0, *splits) for pair in pairs if pair[0] or not split]


def expect(
    load: Load, seconds: Mapping[int, Seconds], chosen: Sequence[Mode], steps: int = 16
) -> list[Row]:
    """Simulates each mode SEEDS times; every mode draws the same samples."""
    rows = []
    for mode in chosen:
        options = dict(overlap=mode.sampling > 0, steps=steps, warm=3 + mode.max_staleness)
        inputs = load, seconds[mode.sampling], mode.max_staleness, mode.ahead
        rows.append(Row(mode, *_mean([simulate(*inputs, **options, seed=s) for s in range(SEEDS)])))
    return rows


def _mean(outcomes: Sequence[Outcome]) -> tuple[Outcome, float]:
    names = ("step_s", "live_share", "dispatches", "decode_steps", "learn_share")
    means = {
        name: float(np.mean([getattr(outcome, name) for outcome in outcomes])) for name in names
    }
    ages = np.zeros(max(len(outcome.ages) for outcome in outcomes))
    for outcome in outcomes:
        ages[: len(outcome.ages)] += np.array(outcome.ages) / len(outcomes)
    took = [outcome.step_s for outcome in outcomes]
    spread = (max(took) - min(took)) / means["step_s"] if means["step_s"] else 0.0
    return Outcome(ages=tuple(ages.tolist()), **means), spread


def fastest_splits(rows: Sequence[Row]) -> list[Row]:
    """Returns the split with the shortest step for every bound."""
    best: dict[tuple[int, int], Row] = {}
    for row in (row for row in rows if row.mode.sampling):
        key = row.mode.max_staleness, row.mode.ahead
        if key not in best or row.outcome.step_s < best[key].outcome.step_s:
            best[key] = row
    return list(best.values())


def drawn_lengths(draw: Draw) -> np.ndarray:
    """Returns lengths [20000] in whole tokens, as a run draws them."""
    return np.maximum(np.ceil(draw(np.random.default_rng(0), 20_000)), 1)


# -- as text


def expected_text(expected: Expected) -> str:
    """Returns a table of the modes on one mesh and the fastest split of each; then all splits."""
    load, base = expected.load, expected.rows[0].outcome
    top = max(len(row.outcome.ages) for row in expected.rows)
    names = ("", "step", "speed-up", "slots live", "learning", "age mean", "max")
    table = [[*names, *map(str, range(top))]]
    one_mesh = [row for row in expected.rows if not row.mode.sampling]
    for row in [*one_mesh, *fastest_splits(expected.rows)]:
        outcome = row.outcome
        faster = f"{base.step_s / outcome.step_s:.2f}x"
        mode, learning = row.mode, expected.devices - row.mode.sampling
        name = f"eta {mode.max_staleness}, ahead {mode.ahead}"
        name += f", {mode.sampling} sample + {learning} learn" if mode.sampling else ""
        cells = [name, seconds_text(outcome.step_s), faster]
        shares = (outcome.live_share, outcome.learn_share, outcome.mean_age)
        cells += [*(f"{share:.2f}" for share in shares), f"{outcome.max_age}"]
        cells += [f"{share:.2f}" for share in outcome.ages]
        table.append(cells + [""] * (top - len(outcome.ages)))
    spread = max(row.spread for row in expected.rows)
    lines = [
        f"{load.groups} prompts x {load.samples} in {load.slots} slots; {expected.lengths}",
        f"seconds {expected.source}",
        *[_parts(split, times, expected.devices) for split, times in expected.seconds.items()],
        LEFT_OUT,
        "",
        "shares: of slots that decode while any does, of the time for learning, of tokens by age",
        *rows_text(table),
        "",
        *_splits(expected),
        f"{SEEDS} seeds each, which differ by at most {spread:.0%}",
    ]
    return "\n".join(lines)


def _parts(split: int, seconds: Seconds, devices: int) -> str:
    label = f"{split} sample + {devices - split} learn" if split else "one mesh"
    return (
        f"  {label}: decode step {seconds_text(seconds.step_s)} with all slots live, "
        f"{seconds_text(seconds.idle_s)} with hardly one; learning {seconds_text(seconds.learn_s)};"
        f" dispatch {seconds_text(seconds.dispatch_s)}, reading a prompt "
        f"{seconds_text(seconds.read_s)}, weights {seconds_text(seconds.publish_s)}"
    )


def _splits(expected: Expected) -> list[str]:
    """Lines with the seconds of a step for every bound, by the number of devices that sample, and
    the fastest of these numbers."""
    splits = [split for split in expected.seconds if split]
    if not splits:
        return []
    step = {
        (row.mode.max_staleness, row.mode.ahead, row.mode.sampling): row.outcome.step_s
        for row in expected.rows
    }
    table = [["step by devices that sample", *map(str, splits), "balance", "one mesh"]]
    for best in fastest_splits(expected.rows):
        pair = best.mode.max_staleness, best.mode.ahead
        table.append(
            [
                f"eta {pair[0]}, ahead {pair[1]}",
                *[seconds_text(step[*pair, split]) for split in splits],
                str(best.mode.sampling),
                seconds_text(step[*pair, 0]),
            ]
        )
    return [*rows_text(table), ""]


def expected_json(expected: Expected) -> dict:
    """Returns everything that was simulated, as JSON data."""
    load = expected.load
    return {
        "groups": load.groups,
        "samples": load.samples,
        "slots": load.slots,
        "lengths": expected.lengths,
        "source": expected.source,
        "devices": expected.devices,
        "seconds": {str(n): dataclasses.asdict(times) for n, times in expected.seconds.items()},
        "modes": [
            dataclasses.asdict(row.mode)
            | {"spread": row.spread, "mean_age": row.outcome.mean_age}
            | dataclasses.asdict(row.outcome)
            for row in expected.rows
        ],
    }
