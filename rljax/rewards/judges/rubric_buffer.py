"""The buffer of each prompt's rubrics, which evolves with the policy.

The buffer's state, one step of it, and the call of a generator in a worker of a pool. DR Tulu's
RLER, arXiv 2511.19399.

A prompt has persistent rubrics, those of its data, which never change; active ones; and inactive
ones. A visit: the responses are scored by the persistent and the active ones, a generator contrasts
them and writes new ones, rubrics that say the same of all are deactivated, and of the rest the most
telling stay. New ones are judged by from the prompt's next visit on.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.components import Component, resolve
from rljax.errors import InputError
from rljax.rewards.judges.rubrics import (
    checked_rubric,
    checked_rubrics,
    rubric_std,
    rubric_text,
    select_rubrics,
)
from rljax.rewards.pool.pool import RewardPool, Score

HOME = "rljax.rewards.judges.rubrics"


def generator_of(text: str) -> Component:
    """The generator that `text` names. Raises InputError if it cannot be called as one."""
    generator = resolve(text, HOME)
    try:
        generator.signature.bind("prompt", [], [], **generator.options)
    except TypeError as error:
        raise InputError(
            f"generator {text!r} cannot be called",
            rule=f"generator(prompt, responses, rubrics): {error}",
            fix="its other parameters need defaults, or options in the text",
        ) from None
    return generator


def generated(prompt, response, extra_info: Mapping, *, generator: str) -> float:
    """Calls a generator as a reward: the score is the number of rubrics that it wrote for
    extra_info["responses"], given extra_info["rubrics"]. The rubrics are in the file
    extra_info["out"], as a pool returns numbers only."""
    new = generator_of(generator)(prompt, extra_info["responses"], extra_info["rubrics"])
    rubrics = checked_rubrics(new)
    Path(extra_info["out"]).write_text(json.dumps(rubrics))
    return float(len(rubrics))


class RubricBuffer:
    """The evolving rubrics of every prompt that was visited. The state is JSON."""

    def __init__(self, workers: int, *, generator: str, cap: int, seed: int, timeout_s: float):
        self.generator = generator_of(generator)
        self.cap, self.seed, self._workers, self._timeout_s = cap, seed, workers, timeout_s
        select_rubrics([], cap)
        self._pool: RewardPool | None = None  # from the first visit on: evaluation needs none
        # prompt -> {"visits", "active": [{title, description, weight, kind, std}], "inactive"}
        self._prompts: dict[str, dict] = {}
        self.forget()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def forget(self) -> None:
        """Resets the metrics."""
        self._counts = {"added": 0, "deactivated": 0, "generator_failures": 0}
        self._stds: list[float] = []
        self._judged, self._failed = 0, 0

    def extra_info(self, record: Mapping) -> dict:
        """The record's extra_info with the rubrics that its responses are judged by."""
        info = record["extra_info"] if isinstance(record["extra_info"], Mapping) else {}
        given = info.get("rubrics")
        given = () if given is None else given
        persistent = [{**checked_rubric(rubric), "kind": "persistent"} for rubric in given]
        return {**info, "rubrics": [*persistent, *self._entry(record)["active"]]}

    def _entry(self, record: Mapping) -> dict:
        return self._prompts.get(_key(record)) or {"visits": 0, "active": [], "inactive": []}

    def learn(
        self, samples: Sequence[Mapping], records: Sequence[Mapping], scores: Sequence[Score]
    ) -> None:
        """Makes one visit of every prompt among the records; `samples` carry the rubrics of
        `extra_info`."""
        visited: dict[str, list[int]] = {}
        for row, record in enumerate(records):
            visited.setdefault(_key(record), []).append(row)
        self._judged += len(scores)
        self._failed += sum(score.status != "ok" for score in scores)
        written = self._generate(
            [
                (samples[rows[0]]["prompt"], [samples[i]["response"] for i in rows], self._known(
                    samples[rows[0]]["extra_info"]["rubrics"], self._entry(records[rows[0]])
                ))
                for rows in visited.values()
            ]
        )  # fmt: skip
        for (key, rows), new in zip(visited.items(), written, strict=True):
            entry = self._entry(records[rows[0]])
            own = samples[rows[0]]["extra_info"]["rubrics"]
            active = _with_std(entry["active"], own, [scores[i] for i in rows])
            self._stds += [r["std"] for r in active if r["std"] is not None]
            known = {rubric_text(r) for r in self._known(own, entry)}
            for rubric in new:
                if rubric_text(rubric) not in known:
                    known.add(rubric_text(rubric))
                    active.append({**rubric, "std": None})
                    self._counts["added"] += 1
            self._prompts[key] = self._selected(key, entry, active)

    def _selected(self, key: str, entry: dict, active: list[dict]) -> dict:
        visits = entry["visits"] + 1
        keep, drop = select_rubrics(
            [r["std"] for r in active], self.cap, seed=f"{self.seed} {key} {visits}"
        )
        self._counts["deactivated"] += len(drop)
        return {
            "visits": visits,
            "active": [active[i] for i in keep],
            "inactive": [*entry["inactive"], *(active[i] for i in drop)],
        }

    def _known(self, own: list[dict], entry: dict) -> list[dict]:
        """All rubrics of a prompt, so that a generator writes others."""
        return [*own, *entry["inactive"]]

    def _generate(self, questions: list[tuple[str, list[str], list[dict]]]) -> list[list[dict]]:
        """New rubrics for each (prompt, responses, rubrics); none where the generator failed."""
        if self._pool is None:
            reward = (
                f"rljax.rewards.judges.rubric_buffer.generated(generator={self.generator.text!r})"
            )
            self._pool = RewardPool(reward, workers=self._workers, timeout_s=self._timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder) / f"{i}.json" for i in range(len(questions))]
            results = self._pool.score(
                [
                    {
                        "prompt": prompt, "response": "",
                        "extra_info": {"responses": responses, "rubrics": known, "out": str(place)},
                    }
                    for (prompt, responses, known), place in zip(questions, places, strict=True)
                ]
            )  # fmt: skip
            self._counts["generator_failures"] += sum(s.status != "ok" for s in results)
            return [
                json.loads(place.read_text()) if score.status == "ok" else []
                for score, place in zip(results, places, strict=True)
            ]

    def metrics(self) -> dict[str, float]:
        """Since `forget`, but active and inactive: means over the prompts visited so far."""
        entries = self._prompts.values()
        mean = lambda xs: statistics.fmean(xs) if xs else 0.0  # noqa: E731
        return {
            "rubric/active": mean([len(e["active"]) for e in entries]),
            "rubric/inactive": mean([len(e["inactive"]) for e in entries]),
            "rubric/std": mean(self._stds),
            "rubric/judge_failure_rate": self._failed / max(self._judged, 1),
            **{f"rubric/{name}": float(n) for name, n in self._counts.items()},
        }

    def get_state(self) -> dict:
        return {"prompts": self._prompts}

    def set_state(self, state: Mapping | None) -> None:
        """Restores the state; None is a checkpoint without a buffer."""
        self._prompts = json.loads(json.dumps(state["prompts"])) if state else {}


def _key(record: Mapping) -> str:
    """prompt_id, else the row's index in its source."""
    number = record.get("prompt_id")
    return f"{record['data_source']} {record['index']}" if number is None else str(number)


def _with_std(active: list[dict], own: list[dict], scores: list[Score]) -> list[dict]:
    """The active rubrics with the std of their verdicts on one group; what fewer than two responses
    were judged by keeps the std that it had."""
    judged = [score.parts for score in scores if score.status == "ok"]
    columns = {rubric_text(r): f"rubric/{k}" for k, r in enumerate(own)}
    out = []
    for rubric in active:
        name = columns.get(rubric_text(rubric))
        if judged and name is not None and name not in judged[0]:
            raise InputError(
                f"the reward has no part {name!r}",
                rule="reward.rubrics needs the verdict on each rubric",
                fix='reward.function="rubric(...)", or a function of your own with such parts',
            )
        values = [parts[name] for parts in judged] if name is not None else []
        if len(values) > 1:
            rubric = {**rubric, "std": rubric_std([[v] for v in values], scale=1.0)[0]}
        out.append(rubric)
    return out


def evolving_rubrics(
    workers: int, *, generator: str, cap: int = 5, seed: int = 0, timeout_s: float = 60.0
) -> RubricBuffer:
    """A buffer of at most `cap` active rubrics per prompt, beside its persistent ones.

    `generator` names generator(prompt, responses, rubrics) -> {"positive": [...], "negative":
    [...]}, "endpoint_rubrics(base_url='...', model='...')" or your own; it runs in `workers`
    processes, each call of at most `timeout_s`, and one that fails writes nothing.
    """
    return RubricBuffer(workers, generator=generator, cap=cap, seed=seed, timeout_s=timeout_s)
