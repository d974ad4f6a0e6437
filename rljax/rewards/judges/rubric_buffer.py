"""The rubrics of each prompt: a buffer that evolves with the policy (DR Tulu's RLER, arXiv
2511.19399). Scores by rubrics are rljax.rewards.judges.rubrics.

A prompt has persistent rubrics, those of its data, which never change; active ones; and inactive
ones. On a visit of the prompt the responses are scored by the persistent and the active rubrics, a
generator contrasts the responses and writes new rubrics, rubrics with equal verdicts on all
responses are deactivated, and of the others those with the largest spread stay. New rubrics are
used from the prompt's next visit on.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.components import Component
from rljax.contracts import contract
from rljax.errors import InputError
from rljax.files import read_json
from rljax.metric import Metric
from rljax.rewards.judges.judging import bound
from rljax.rewards.judges.rubrics import (
    checked_rubric,
    checked_rubrics,
    rubric_std,
    rubric_text,
    select_rubrics,
)
from rljax.rewards.pool.pool import RewardPool, Score

METRICS = {
    "rubric/active": Metric("rubrics in use of a prompt", "rubrics"),
    "rubric/inactive": Metric("rubrics put away of a prompt", "rubrics"),
    "rubric/std": Metric("spread of the verdicts of the rubrics in use", "", "above 0"),
    "rubric/judge_failure_rate": Metric(
        "verdicts that the judge did not give", "share", "below 0.01"
    ),
    "rubric/added": Metric("rubrics added in this step", "rubrics"),
    "rubric/deactivated": Metric("rubrics put away in this step", "rubrics"),
    "rubric/generator_failures": Metric(
        "prompts for which no rubric could be written", "prompts", "0"
    ),
}

HOME = "rljax.rewards.judges.rubrics"


def generator_of(text: str) -> Component:
    """The generator that `text` names. Raises InputError if it cannot be called as one."""
    return bound("generator", text, HOME, ("prompt", "responses", "rubrics"))


def generated(prompt, response, extra_info: Mapping, *, generator: str) -> float:
    """The number of rubrics that the generator wrote about extra_info["responses"], given
    extra_info["rubrics"]. They are written to the file extra_info["out"], because a pool returns
    only numbers."""
    reply = generator_of(generator)(prompt, extra_info["responses"], extra_info["rubrics"])
    rubrics = checked_rubrics(reply)
    Path(extra_info["out"]).write_text(json.dumps(rubrics))
    return float(len(rubrics))


class RubricBuffer:
    """The evolving rubrics of every prompt that was visited. The state is JSON.

    `record` is a rljax.data.online.prompts.PromptRecord, which is not imported: this module is
    loaded by workers, which start without numpy.
    """

    def __init__(self, workers: int, *, generator: str, cap: int, seed: int, timeout_s: float):
        self.generator = generator_of(generator)
        self.cap, self.seed, self._workers, self._timeout_s = cap, seed, workers, timeout_s
        select_rubrics([], cap)
        self._pool: RewardPool | None = None  # from the first visit on: evaluation needs none
        # prompt -> {"visits", "active": [{title, description, weight, kind, std}], "inactive"}
        self._prompts: dict[str, dict] = {}

    def close(self) -> None:
        """Ends the processes of the generator."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def extra_info(self, record) -> dict:
        """The record's extra_info with the rubrics that its responses are judged by. Raises
        ValueError for a rubric of the record that is not valid."""
        info = record.extra_info if isinstance(record.extra_info, Mapping) else {}
        row_rubrics = info.get("rubrics")
        row_rubrics = () if row_rubrics is None else row_rubrics
        persistent = [{**checked_rubric(rubric), "kind": "persistent"} for rubric in row_rubrics]
        return {**info, "rubrics": [*persistent, *self._entry(record)["active"]]}

    def _entry(self, record) -> dict:
        return self._prompts.get(_key(record)) or {"visits": 0, "active": [], "inactive": []}

    def learn(self, rows: Sequence) -> dict[str, float]:
        """Visits every prompt of one step's scored rows (rljax.rollout.ScoredRow), whose samples
        hold what `extra_info` returned. Returns the metrics of the step.

        rubric/active and rubric/inactive are means over all prompts visited so far.
        """
        visited: dict[str, list] = {}
        for row in rows:
            visited.setdefault(_key(row.record), []).append(row)
        judged_by = [
            prompt_rows[0].sample["extra_info"]["rubrics"] for prompt_rows in visited.values()
        ]
        entries = [self._entry(prompt_rows[0].record) for prompt_rows in visited.values()]
        known_rubrics = [
            [*rubrics, *entry["inactive"]]
            for rubrics, entry in zip(judged_by, entries, strict=True)
        ]
        new_rubrics = self._written(list(visited.values()), known_rubrics)
        added, deactivated, stds = 0, 0, []
        for i, (key, prompt_rows) in enumerate(visited.items()):
            active = _with_std(
                entries[i]["active"], judged_by[i], [row.score for row in prompt_rows]
            )
            stds += [rubric["std"] for rubric in active if rubric["std"] is not None]
            texts = {rubric_text(rubric) for rubric in known_rubrics[i]}
            for rubric in new_rubrics[i] or ():
                if rubric_text(rubric) not in texts:
                    texts.add(rubric_text(rubric))
                    active.append({**rubric, "std": None})
                    added += 1
            self._prompts[key], dropped = self._selected(key, entries[i], active)
            deactivated += dropped
        return {
            "rubric/active": _mean([len(e["active"]) for e in self._prompts.values()]),
            "rubric/inactive": _mean([len(e["inactive"]) for e in self._prompts.values()]),
            "rubric/std": _mean(stds),
            "rubric/judge_failure_rate": _mean([row.score.status != "ok" for row in rows]),
            "rubric/added": float(added),
            "rubric/deactivated": float(deactivated),
            "rubric/generator_failures": float(sum(rubrics is None for rubrics in new_rubrics)),
        }

    def _selected(self, key: str, entry: dict, active: list[dict]) -> tuple[dict, int]:
        """The entry after a visit, and how many rubrics were deactivated."""
        visits = entry["visits"] + 1
        keep, drop = select_rubrics(
            [r["std"] for r in active], self.cap, seed=f"{self.seed} {key} {visits}"
        )
        return {
            "visits": visits,
            "active": [active[i] for i in keep],
            "inactive": [*entry["inactive"], *(active[i] for i in drop)],
        }, len(drop)

    def _written(
        self, visited: list[list], known_rubrics: list[list[dict]]
    ) -> list[list[dict] | None]:
        """Returns new rubrics for each visited prompt. Every host asks about its own prompts, and
        gets the answers of all."""
        from rljax import hosts  # not for workers

        indices = hosts.mine(len(visited))
        questions = []
        for i in indices:
            responses = [row.sample["response"] for row in visited[i]]
            questions.append((visited[i][0].sample["prompt"], responses, known_rubrics[i]))
        host_rubrics = hosts.gather(list(zip(indices, self._generate(questions), strict=True)))
        by_prompt = {i: rubrics for pairs in host_rubrics for i, rubrics in pairs}
        return [by_prompt[i] for i in range(len(visited))]

    def _generate(
        self, questions: list[tuple[str, list[str], list[dict]]]
    ) -> list[list[dict] | None]:
        """Returns new rubrics for each (prompt, responses, known rubrics); None if
        the generator failed."""
        if self._pool is None:
            reward = f"{__name__}.generated(generator={self.generator.text!r})"
            self._pool = RewardPool(reward, workers=self._workers, timeout_s=self._timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{i}.json" for i in range(len(questions))]
            samples = []
            for (prompt, responses, known_rubrics), path in zip(questions, paths, strict=True):
                extra = {"responses": responses, "rubrics": known_rubrics, "out": str(path)}
                samples.append({"prompt": prompt, "response": "", "extra_info": extra})
            results = self._pool.score(samples)
            return [
                read_json(path) if score.status == "ok" else None
                for score, path in zip(results, paths, strict=True)
            ]

    def get_state(self) -> dict:
        """The state from which `set_state` goes on, as JSON."""
        return {"prompts": self._prompts}

    def set_state(self, state: Mapping | None) -> None:
        """Goes on from a saved state; None, in a checkpoint without a buffer, means an
        empty one."""
        self._prompts = json.loads(json.dumps(state["prompts"])) if state else {}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _key(record) -> str:
    """Returns prompt_id, or else the row's index in its source."""
    number = record.prompt_id
    return f"{record.data_source} {record.index}" if number is None else str(number)


def _with_std(active: list[dict], judged_by: list[dict], scores: list[Score]) -> list[dict]:
    """Returns the active rubrics with the std of their verdicts on one group. A rubric by which
    fewer than two responses were judged keeps its earlier std."""
    judged = [score.parts for score in scores if score.status == "ok"]
    columns = {rubric_text(r): f"rubric/{k}" for k, r in enumerate(judged_by)}
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


def _check_options(config, options: dict) -> None:
    if "generator" in options:
        generator_of(options["generator"])
        if options.get("cap", 0) < 0:
            raise InputError("cap must be >= 0", fix="cap=5")


@contract(check=_check_options)
def evolving_rubrics(
    workers: int, *, generator: str, cap: int = 5, seed: int = 0, timeout_s: float = 60.0
) -> RubricBuffer:
    """A buffer of at most `cap` active rubrics per prompt, beside its persistent ones.

    `generator` names generator(prompt, responses, rubrics) -> {"positive": [...], "negative":
    [...]}, "endpoint_rubrics(base_url='...', model='...')" or your own; it runs in `workers`
    processes, each call of at most `timeout_s`, and one that fails writes nothing.
    """
    return RubricBuffer(workers, generator=generator, cap=cap, seed=seed, timeout_s=timeout_s)
