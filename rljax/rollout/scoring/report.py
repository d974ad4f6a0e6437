"""RewardReport: the scored samples of a call of a reward, and what they say as metrics."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from rljax.data.online.prompts import PromptRecord
from rljax.metric import Metric
from rljax.rewards.pool.pool import Score
from rljax.tracking.episodes import EpisodeSummary

METRICS = {
    "reward/part/*": Metric("mean of the part {} of the reward", "score"),
    "reward/source/*": Metric("mean score on prompts of {}", "score", "rises"),
    "reward/errors": Metric(
        "rewards that raised an error: those samples are masked",
        "samples",
        "0; the text of the error is in samples.jsonl",
    ),
    "reward/errors/*": Metric(
        "rewards that failed by {}: those samples are masked", "samples", "0"
    ),
    "reward/timeouts": Metric(
        "rewards that were not done after reward.timeout_s", "samples", "below 1 % of the samples"
    ),
    "reward/timeouts_scored": Metric(
        "late rewards that were given a score instead of being masked",
        "samples",
        "below 1 % of the samples",
    ),
    "reward/abstained": Metric(
        "samples of which every reward returned None: they are masked",
        "samples",
        "few; they teach nothing",
    ),
    "reward/abstained/*": Metric(
        "samples of which {} returned None and other rewards did not", "samples"
    ),
    "reward/timeout_longer_fraction": Metric(
        "chance that a response that was late is longer than one that was not",
        "share",
        "near 0.5; far above, length decides what is masked",
    ),
    "reward/timeouts/*": Metric("rewards of {} that were not done in time", "samples", "0"),
    "reward/failed_fraction/*": Metric("samples of {} without a score", "share", "below 0.01"),
    "reward/extraction_failed_fraction": Metric(
        "samples in which no answer was found",
        "share",
        "falls to 0; near 1: the format is not learned",
    ),
    "reward/all_equal": Metric(
        "1 where all scores of the step are one number",
        "0 or 1",
        "0; three in a row warn: nothing is learned",
    ),
    "reward/equal_groups": Metric("prompts whose samples all have one score", "share", "below 0.7"),
    "reward/best_of_k": Metric(
        "highest score of a prompt's samples, mean over the step's prompts",
        "score",
        "above reward/mean: exploration still finds better answers",
    ),
    "data/share/*": Metric("completions of this step from {}", "share"),
}


class RewardInput(Mapping):
    """The fields that a reward may declare. The response is decoded when it is first read: with
    several hosts most of them are read by one host alone, or by none."""

    def __init__(
        self, fields: Mapping, decode: Callable[[], str], shown: Callable[[], str] | None = None
    ):
        self._fields, self._decode, self._shown = {**fields}, decode, shown

    def __getitem__(self, name: str):
        if name == "response" and self._fields[name] is None:
            self._fields[name] = self._decode()
        return self._fields[name]

    def __iter__(self):
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def adding(self, **fields) -> "RewardInput":
        """Returns the same sample with these fields, too."""
        return RewardInput(self._fields | fields, self._decode, self._shown)

    @property
    def shown(self) -> str:
        """The response as people are shown it, with the special tokens that it holds; its stop
        token, which every response that ended has, is left out."""
        return self["response"] if self._shown is None else self._shown()


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """One sample: the fields that the reward read, its score, and its prompt."""

    sample: Mapping  # prompt, response, ground_truth, ...: the fields that a reward may declare
    score: Score
    record: PromptRecord
    group: int  # the same number for all samples of a prompt within a report

    def example(self) -> dict:
        """Returns text, reward and status, as they are shown."""
        keep = ("prompt", "ground_truth", "finish_reason")
        sample = self.sample
        return {
            **{name: sample[name] for name in keep},
            "response": sample.shown if isinstance(sample, RewardInput) else sample["response"],
            "reward": self.score.value,
            "status": self.score.status,
            "message": self.score.message,
        }


@dataclasses.dataclass(frozen=True)
class RewardReport:
    """The scored rows of one call, or of several, in their order."""

    rows: tuple[ScoredRow, ...] = ()
    process: tuple[Mapping[str, float], ...] = ()  # metrics of the scored lines, one per call
    episodes: tuple[EpisodeSummary, ...] = ()  # episodes of an environment

    @classmethod
    def joined(cls, reports: Iterable["RewardReport"]) -> "RewardReport":
        """Joins reports into one. Prompts of different reports have different groups."""
        rows, process, episodes, offset = [], [], [], 0
        for report in reports:
            rows += [dataclasses.replace(row, group=offset + row.group) for row in report.rows]
            process += report.process
            episodes += report.episodes
            offset = 1 + max((row.group for row in rows), default=-1)
        return cls(tuple(rows), tuple(process), tuple(episodes))

    @property
    def examples(self) -> list[dict]:
        """Returns text, reward and status of every sample."""
        return [row.example() for row in self.rows]

    @property
    def outcomes(self) -> list[tuple[int, float]]:
        """Returns (prompt_id, score) of every scored sample of a training prompt."""
        return [
            (row.record.prompt_id, row.score.value)
            for row in self.rows
            if row.score.status == "ok" and row.record.prompt_id is not None
        ]

    def metrics(self) -> dict[str, float]:
        """Returns counts of failures, of errors also by kind, of samples over a limit that have
        a score for that, and of rewards that abstain; whether late samples are the long ones;
        for each source the share of failures, the mean score and the share of the samples;
        means of the parts; whether the scores of a prompt are equal, and their highest; metrics
        of scored lines."""
        out = {f"reward/{name}": 0.0 for name in ("errors", "timeouts")}
        means: dict[str, list[float]] = {}
        shares: dict[str, float] = {}
        for row in self.rows:
            score, source = row.score, row.record.source or row.record.data_source
            shares[source] = shares.get(source, 0.0) + 1 / len(self.rows)
            failed = means.setdefault(f"reward/failed_fraction/{source}", [])
            failed.append(float(score.status not in ("ok", "abstained")))
            if score.status == "abstained":
                out["reward/abstained"] = out.get("reward/abstained", 0.0) + 1.0
                continue
            if score.status != "ok":
                out[f"reward/{score.status}s"] += 1.0
                if score.status == "error":
                    name = f"reward/errors/{error_kind(score.message)}"
                    out[name] = out.get(name, 0.0) + 1.0
                continue
            if score.over_limit:
                out["reward/timeouts_scored"] = out.get("reward/timeouts_scored", 0.0) + 1.0
            means.setdefault(f"reward/source/{source}", []).append(score.value)
            for name, value in score.parts.items():
                if match := re.fullmatch(r"(.*/)?abstained/(.+)", name):
                    name = f"reward/abstained/{match[1] or ''}{match[2]}"
                    out[name] = out.get(name, 0.0) + 1.0
                    continue
                means.setdefault(f"reward/part/{name}", []).append(value)
        out |= {name: float(np.mean(values)) for name, values in sorted(means.items())}
        failed = self.extraction_failed_fraction
        if failed is not None:
            out["reward/extraction_failed_fraction"] = failed
        out |= self._group_scores() | self._late_and_long()
        if len(shares) > 1:
            out |= {f"data/share/{name}": share for name, share in sorted(shares.items())}
        for name in self.process[0] if self.process else ():
            out[name] = float(np.mean([metrics[name] for metrics in self.process]))
        return out

    @property
    def extraction_failed_fraction(self) -> float | None:
        """Returns extraction_failed_fraction of the samples."""
        return extraction_failed_fraction(row.score.parts for row in self.rows)

    def _group_scores(self) -> dict[str, float]:
        """Returns reward/all_equal: 1 if all known scores are one number, else 0. Of the
        prompts with two known scores or more it returns reward/equal_groups, the share of
        those whose scores are one number, and reward/best_of_k, the mean of their highest
        scores, k being the samples of a prompt. Scores are the reward's own, without shaping
        and without scores of lines."""
        groups: dict[int, list[float]] = {}
        for row in self.rows:
            if row.score.status == "ok":
                groups.setdefault(row.group, []).append(row.score.value)
        if sum(map(len, groups.values())) < 2:
            return {}
        scores = {score for values in groups.values() for score in values}
        out = {"reward/all_equal": float(len(scores) == 1)}
        several = [values for values in groups.values() if len(values) > 1]
        if several:
            out["reward/equal_groups"] = float(np.mean([len({*values}) == 1 for values in several]))
            out["reward/best_of_k"] = float(np.mean([max(values) for values in several]))
        return out

    def _late_and_long(self) -> dict[str, float]:
        """Returns reward/timeout_longer_fraction: of all pairs of a response that was too late
        and one that was not, the share in which the late one is longer. At 0.5, lateness does
        not depend on length."""
        is_late = [row.score.status == "timeout" or row.score.over_limit for row in self.rows]
        if len(set(is_late)) < 2:
            return {}
        lengths = np.array([row.sample["num_tokens"] for row in self.rows])
        late, others = lengths[is_late], lengths[np.logical_not(is_late)]
        gap = np.subtract.outer(late, others)
        return {"reward/timeout_longer_fraction": float(np.mean((gap > 0) + 0.5 * (gap == 0)))}


def extraction_failed_fraction(parts: Iterable[Mapping[str, float]]) -> float | None:
    """Returns the share of samples in which no answer was found, from the parts of their
    scores: 1 - the mean of the parts called extracted, also of members of a mixture. None
    without such parts."""
    extracted = [
        value
        for part in parts
        for name, value in part.items()
        if name.rpartition("/")[2] == "extracted"
    ]
    return 1.0 - float(np.mean(extracted)) if extracted else None


def error_kind(message: str) -> str:
    """Returns the exception's name in the message of a failed score; the kind of an
    EndpointError; else "other"."""
    match = re.match(r"(?:EndpointError: )?(\w+): ", message)
    return match[1] if match else "other"
