"""Charts of rewards against the distance from the reference."""

import json
import re

import numpy as np
import pytest

from rljax.report.curves import distance, rewards_by_distance
from rljax.report.page import write_report
from rljax.report.run_folder import read_run


def run_of(folder, rows):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": i + 1, **row}) for i, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return read_run(folder)


def over_optimised(steps: int = 12) -> list[dict]:
    """The trained reward rises with the KL, the other one falls; every second step is evaluated."""
    return [
        {
            "ref_kl/k1": 0.02 * i,
            "response_tokens/mean": 8.0,
            "reward/mean": float(i),
            "reward/part/gold": 0.9 - 0.05 * i,
            **({"eval/accuracy": 1 - 0.05 * i} if i % 2 else {}),
        }
        for i in range(steps)
    ]


def test_the_distance_is_the_root_of_the_kl_of_a_response(tmp_path):
    at = distance(run_of(tmp_path / "r", over_optimised()))
    assert at == pytest.approx({i + 1.0: np.sqrt(0.02 * i * 8) for i in range(12)})
    noisy = [{"ref_kl/k1": -0.01, "response_tokens/mean": 3.0}, {"ref_kl/k1": 0.5}]
    assert distance(run_of(tmp_path / "n", noisy)) == {1.0: 0.0}  # an estimate below 0; no length


def points(figure: str) -> np.ndarray:
    """The corners of the first line of a chart: x to the right, y downwards."""
    text = re.search(r'<polyline class="s0 "[^>]* points="([^"]*)"', figure)[1]
    return np.array([pair.split(",") for pair in text.split()], float)


def test_one_chart_rises_and_the_other_falls(tmp_path):
    trained, others = rewards_by_distance(run_of(tmp_path / "r", over_optimised()[::-1]))
    assert "reward/mean" in trained and "√KL" in trained
    assert "reward/part/gold" in others and "eval/accuracy" in others
    for figure, sign in ((trained, -1), (others, 1)):
        x, y = points(figure).T
        assert (np.diff(x) > 0).all()  # in the order of the distance, not of the steps
        assert (sign * np.diff(y) > 0).all()
    ticks = re.findall(r'class="mid">([^<]*)<', trained)
    assert len(set(ticks)) >= 3 and any("." in tick for tick in ticks)  # not whole numbers alone
    page = write_report(tmp_path / "r").read_text()
    assert trained in page and others in page
    # One number for a name: that of the last step, also where the distance was largest before.
    numbers = re.findall(r'<span class="key"[^>]*>(?:<i[^>]*></i>)?([^<]*) <b>([^<]*)</b>', page)
    of = {name: {value for other, value in numbers if other == name} for name, _ in numbers}
    assert of["reward/mean"] == {"0"} and all(len(values) == 1 for values in of.values())


def test_a_run_without_a_reference_or_with_one_reward_has_none(tmp_path):
    plain = [{"reward/mean": 1.0, "eval/accuracy": 0.5, "response_tokens/mean": 3.0}] * 9
    assert rewards_by_distance(run_of(tmp_path / "p", plain)) == []
    same = [
        {k: v for k, v in row.items() if k not in ("reward/part/gold", "eval/accuracy")}
        | {"reward/part/only": row["reward/mean"]}
        for row in over_optimised()
    ]
    assert rewards_by_distance(run_of(tmp_path / "s", same)) == []  # the part is the reward itself
    assert rewards_by_distance(run_of(tmp_path / "f", over_optimised(3))) == []  # too few
