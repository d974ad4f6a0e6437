"""Options of the commands that sample from policies or score with models: evaluate, sample, label,
score, compare, play."""

import dataclasses
import os
import typing

from rljax.config.declare import OF_A_RUN, option
from rljax.config.options import (
    CompilerOptions,
    TrustOptions,
    jsonl_option,
    prompt_tokens_option,
    response_tokens_option,
    step_option,
    temperature_option,
)

# The demonstrations of an iteration of RAFT, in the folder of the run that learns from them.
SELECTED = "selected.jsonl"


def default_ks(samples: int) -> tuple[int, ...]:
    """Returns the k of pass@k, best-of-k and majority@k that are taken if none are set."""
    return tuple(k for k in (1, 4, 8) if k <= samples)


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CompilerOptions, TrustOptions):
    """Options of `rljax evaluate`. None means the value in the run's config.json, else the default
    of Config."""

    checkpoint: str = option(
        "",
        "A run folder, a model folder, or OWNER/NAME of the hub",
        required=True,
        first=True,
        path="policy",
    )
    suites: tuple[str, ...] = option(
        (),
        "Benchmarks: gsm8k(shots=8),math500,aime24,mmlu_pro,ifeval,livecodebench, or your own",
        flag="suite",
    )
    data: str | None = option(
        None, "File or task; default: the run's held-out prompts", component="data"
    )
    reward: str | None = option(None, "Reward function; default: the run's", component="reward")
    samples: int | None = option(
        None, "Samples per prompt; 0 = the greedy response only; default: the suite's, or 8", low=0
    )
    ks: tuple[int, ...] = option(
        (),
        "Numbers k of pass@k, best-of-k and majority@k; default: those of 1,4,8 that --samples "
        "allows",
        flag="k",
    )
    length_buckets: tuple[int, ...] = option(
        (), "Bounds in tokens: pass@1 of prompts by the mean length of their responses"
    )
    against: str = option(
        "",
        "Another policy, or RUN@STEP: its metrics on the same prompts, and the differences",
        path="policy",
    )
    prompts: int | None = option(
        None, "Number of prompts, the first ones; default: the run's, or 256", low=1
    )
    temperature: float | None = temperature_option()
    max_prompt_tokens: int | None = prompt_tokens_option()
    max_response_tokens: int | None = response_tokens_option()
    step: str = step_option()
    search: str = option(
        "",
        "Decode by a search: mcts(simulations=32, width=4), beam(), best_of_n(), lookahead()",
        component="search",
    )
    search_model: str = option(
        "",
        "Model that guides the search: a reward model's folder, or a run folder for its critic",
        path="policy",
    )
    search_reads: typing.Literal["outcome", "process", "critic"] = option(
        "outcome",
        "Positions where it is read: outcome, after any token; process, at the ends of lines; "
        "critic, as a critic",
        choices=("outcome", "process", "critic"),
    )
    seed: int = option(0, "Seed of the samples", low=0)
    out: str = option("", "Write the result to this file, as JSON", path="written_file")
    answers: str = jsonl_option("File for the greedy response to every prompt, and its score")

    def ks_of(self, samples: int) -> tuple[int, ...]:
        """Returns `ks`; if none are set, those of 1, 4 and 8 that so many samples allow."""
        return self.ks or default_ks(samples)

    def conflicts(self):
        """Yields --search_model without --search, k above the samples, options that suites do not
        read, and length_buckets below 1 token."""
        if self.search_model and not self.search:
            yield "search_model", self.search_model, "needs --search"
        samples = 8 if self.samples is None else self.samples
        for k in self.ks if samples > 0 else ():
            if not 1 <= k <= samples and not (self.suites and k > 0):
                yield "ks", k, f"each is between 1 and --samples={samples}"
        if self.suites:
            yield from self._suite_conflicts()
        for bound in self.length_buckets:
            if bound < 1:
                yield "length_buckets", bound, "each is at least 1 token"

    def _suite_conflicts(self):
        for name in ("reward", "length_buckets", "against", "search", "answers"):
            if value := getattr(self, name):
                yield name, value, "not beside --suite, which says what is asked and how it is read"
        if self.data is not None and len(self.suites) > 1:
            yield "data", self.data, "of one suite; of several in brackets: gsm8k(data='a.jsonl')"


@dataclasses.dataclass(frozen=True)
class RejectionOptions(CompilerOptions, TrustOptions):
    """Options of `rljax sample`. None means the value in the run's config.json."""

    checkpoint: str = option(
        "",
        "A run folder, a model folder, or OWNER/NAME of the hub",
        required=True,
        first=True,
        path="policy",
    )
    out: str = option(
        "",
        "The .jsonl file of demonstrations; with --iterations, a folder",
        required=True,
        path="written",
    )
    step: str = step_option()
    data: str | None = option(
        None, "File or task with prompts; default: the run's", component="data"
    )
    split: str = option("train", "Split of the data")
    reward: str | None = option(None, "Reward function; default: the run's", component="reward")
    reward_model: str = option(
        "",
        "A reward model's folder: the reward, or its reward_model() where --reward is set",
        path="model",
    )
    samples: int = option(8, "Samples per prompt", low=1)
    prompts: int | None = option(None, "Number of prompts, the first ones; default: all", low=1)
    temperature: float | None = temperature_option()
    max_prompt_tokens: int | None = prompt_tokens_option()
    max_response_tokens: int | None = response_tokens_option()
    select: typing.Literal["best", "top_k", "threshold"] = option(
        "best", "Rule by which a prompt's samples are kept", choices=("best", "top_k", "threshold")
    )
    top_k: int = option(1, "Number of samples that --select=top_k keeps", low=1)
    min_reward: float | None = option(None, "Bound of the rewards; only samples above it are kept")
    per_prompt: int = option(
        0, "Largest number of samples that are kept of a prompt; 0 = no limit", low=0
    )
    dedup: bool = option(True, "Keep one of several equal texts to a prompt")
    keep_truncated: bool = option(False, "Keep responses without an end, too")
    pairs: str = jsonl_option(
        "File for the best and the worst sample of every prompt, ties dropped"
    )
    trajectories: str = jsonl_option("File for every sample with its reward and log-probs")
    process_samples: int = option(0, "Completions per prefix for process scores; 0 = none", low=0)
    seed: int = option(0, "Seed of the samples", low=0)
    iterations: int = option(0, "Rounds of sampling and SFT (RAFT); 0 = sample once", low=0)
    epochs: int = option(1, "Epochs of SFT on each selection (RAFT)", low=1)

    def conflicts(self):
        """Yields an --out that is no .jsonl file or named twice, a missing --min_reward, --top_k
        above the samples, --process_samples without --trajectories, and files of RAFT that its runs
        would replace."""
        if not self.iterations and self.out and not self.out.endswith(".jsonl"):
            yield "out", self.out, "the name of a .jsonl file"
        elif self.iterations and os.path.isfile(self.out):
            yield "out", self.out, "it is a file; with --iterations name a folder"
        elif not self.iterations and os.path.isdir(self.out):
            yield "out", self.out, "it is a folder; name a file, such as one in it"
        files = [file for file in (self.out, self.pairs, self.trajectories) if file]
        if len(set(files)) < len(files):
            yield "out", self.out, "another file than --pairs and --trajectories"
        used = {*OF_A_RUN, SELECTED}
        for name in ("pairs", "trajectories") if self.iterations else ():
            file = os.path.basename(getattr(self, name))
            if file and file in used:
                rule = f"the folder of every iteration has another {file}; name another file"
                yield name, getattr(self, name), rule
            used.add(file)
        if self.select == "threshold" and self.min_reward is None:
            yield "min_reward", None, "--select=threshold needs the bound"
        if self.top_k > self.samples >= 1:
            yield "top_k", self.top_k, f"between 1 and --samples={self.samples}"
        if self.process_samples and not self.trajectories:
            rule = "process scores are columns of --trajectories"
            yield "process_samples", self.process_samples, rule


@dataclasses.dataclass(frozen=True)
class LabelOptions(CompilerOptions, TrustOptions):
    """Options of `rljax label steps`. None means the value in the run's config.json, else the
    default of Config."""

    checkpoints: tuple[str, ...] = option(
        (),
        "Run folders, RUN@STEP, model folders, or OWNER/NAME of the hub",
        required=True,
        path="policy",
    )
    out: str = option(
        "",
        "Folder for train.jsonl, test.jsonl and labels.json",
        required=True,
        path="written_folder",
    )
    data: str | None = option(
        None, "File or task; default: the run's training prompts", component="data"
    )
    reward: str | None = option(
        None, "Unit tests; default: the run's reward function", component="reward"
    )
    prompts: int = option(256, "Prompts drawn for each checkpoint", low=1)
    programs_per_prompt: int = option(4, "Programs sampled per prompt", low=1)
    completions: int = option(20, "Largest number of completions of each prefix", low=1)
    completer: str = option(
        "",
        "Policy that completes the prefixes, such as RUN@STEP; default: the checkpoint that wrote "
        "them",
        path="policy",
    )
    search: str = option(
        "",
        "Labels by the simulations of a search, such as mcts(simulations=32), not completions",
        component="search",
    )
    held_out: float = option(
        0.1, "Share of the prompts whose rows go to test.jsonl", low=0, below=1
    )
    neutral: typing.Literal["zero", "drop", "inherit"] = option(
        "zero", "Labels of blank lines and comments", choices=("zero", "drop", "inherit")
    )
    code_only: bool = option(False, "Label only the lines of the last fenced block")
    replay: bool = option(False, "Ask every probe once more, to see how far it can be trusted")
    temperature: float | None = temperature_option()
    max_prompt_tokens: int | None = prompt_tokens_option()
    max_response_tokens: int | None = response_tokens_option()
    rows_at_once: int = option(256, "Sequences sampled together", low=1)
    seed: int = option(0, "Seed of prompts, programs and completions", low=0)

    def conflicts(self):
        """Yields --completer and --replay with --search."""
        for name in ("completer", "replay") if self.search else ():
            if value := getattr(self, name):
                yield name, value, "no completions with --search: its simulations are the labels"


@dataclasses.dataclass(frozen=True)
class PreferenceOptions(CompilerOptions, TrustOptions):
    """Options of `rljax label preferences`. None means the value in the run's config.json."""

    data: str = option(
        "", "Rows to compare, or prompts where --policy is set", required=True, component="data"
    )
    out: str = option("", "File for the pairs, .jsonl", required=True, path="written_file")
    judge: str = option(
        "", "Judge, a function (prompt, first, second) -> P(first is better), as text"
    )
    reward_model: str = option("", "A reward model's folder, in place of a judge", path="model")
    policy: str = option(
        "",
        "Policy that samples the completions: a run folder, a model folder, or OWNER/NAME",
        path="policy",
    )
    samples: int = option(2, "Completions per prompt; all pairs of them are compared", low=2)
    temperature: float | None = temperature_option()
    max_prompt_tokens: int | None = prompt_tokens_option()
    max_response_tokens: int | None = response_tokens_option()
    keep_truncated: bool = option(False, "Keep completions of --policy without an end, too")
    max_tokens: int = option(
        4096, "Largest length of prompt and completion, in tokens, for --reward_model", low=1
    )
    ties: typing.Literal["drop", "keep"] = option(
        "drop", "Treatment of pairs on which the orders do not agree", choices=("drop", "keep")
    )
    workers: int = option(2, "Processes of the judge", low=1)
    timeout_s: float = option(
        60.0, "Longest time of one judgement, in seconds; then its process is killed", above=0
    )
    seed: int = option(0, "Seed of the samples", low=0)

    def conflicts(self):
        """Yields --judge unless exactly one of --judge and --reward_model is set."""
        if bool(self.judge) == bool(self.reward_model):
            yield "judge", self.judge, "exactly one of --judge and --reward_model labels the pairs"


@dataclasses.dataclass(frozen=True)
class ScoreOptions(CompilerOptions):
    """Options of `rljax score steps`."""

    reward_model: str = option("", "A folder of a process reward model", required=True)
    data: str = option(
        "", "File or folder of rows with completions and labels", required=True, path="data"
    )
    split: str = option("test", "Split of the data: train or test", choices=("train", "test"))
    show: int = option(
        4, "Number of rows, the first ones, whose lines are printed as a table", low=0
    )
    out: str = option("", "Write the result to this file, as JSON", path="written_file")


@dataclasses.dataclass(frozen=True)
class ComparisonOptions(CompilerOptions, TrustOptions):
    """Options of `rljax compare`, the same for every method."""

    out: str = option("", "Folder of the comparison", path="written_folder")
    seeds: tuple[int, ...] = option(
        (0, 1, 2), "Seeds; each has a base policy, a file and a run of every method", required=True
    )
    prompts: int = option(
        1024, "Prompts of the training split that the base policy samples on", low=1
    )
    samples: int = option(4, "Samples per prompt", low=2)
    process_samples: int = option(4, "Completions per prefix, for the process scores", low=1)
    steps: int = option(100, "Optimizer steps of every method", low=1)
    test_prompts: int = option(256, "Held-out prompts", low=1)
    test_samples: int = option(8, "Samples per held-out prompt, for the sampled accuracy", low=1)
    capabilities: bool = option(False, "Print what PPO, DPO, KTO and DQO need, and stop")

    def conflicts(self):
        """Yields a missing --out, and seeds that are named twice."""
        if not (self.out or self.capabilities):
            yield "out", self.out, "needed: the folder of the comparison"
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", self.seeds, "each once"


@dataclasses.dataclass(frozen=True)
class PlayOptions(CompilerOptions, TrustOptions):
    """Options of `rljax play`."""

    human: bool = option(False, "You type the replies; a line that ends with \\ goes on")
    policy: str = option(
        "", "Policy that replies: a run folder, RUN@STEP, a model folder, or OWNER/NAME"
    )
    script: str = option("", "A file of replies, parted by lines of ---")
    row: int = option(0, "Number of the data row", low=0)
    split: str = option("train", "Split of the data: train or test", choices=("train", "test"))
    greedy: bool = option(False, "Take the policy's most likely tokens")
    seed: int = option(0, "Seed of the episode, and of the policy's samples", low=0)

    def conflicts(self):
        """Yields --human unless exactly one player is named, and --greedy without --policy."""
        if sum(map(bool, (self.human, self.policy, self.script))) != 1:
            yield "human", self.human, "exactly one of --human, --policy and --script plays"
        if self.greedy and not self.policy:
            yield "greedy", self.greedy, "read with --policy alone"
