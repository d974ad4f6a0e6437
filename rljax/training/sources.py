"""Sources: where the batch of a step comes from.

A source provides rows of a file, rollouts of the policy, stored rollouts, or a mixture of both:
next(step, roles) -> (Batch, metrics). get_state() and set_state(state) are for checkpoints, saved()
is called after each of them, and meanwhile(learned) while the host waits for the program.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.arrays import place, put_whole
from rljax.batch import Batch
from rljax.contracts import spec
from rljax.data.dropped import REASONS
from rljax.data.offline.batches import batch_arrays, mismatched_arrays
from rljax.data.offline.encode import encode_rows
from rljax.data.offline.rows import load_rows
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.kept import kept_line
from rljax.data.online.loader import Loader
from rljax.data.online.prompts import PromptRecord, Prompts, pad_examples
from rljax.data.online.stream import Stream
from rljax.data.rows.columns import rows_of
from rljax.errors import InputError
from rljax.keys import stream
from rljax.mesh import constrain_rows, replicated
from rljax.metric import Metric
from rljax.roles.placed import PlacedReference
from rljax.rollout import (
    BestSeen,
    Landed,
    Player,
    RewardReport,
    check_rows,
    make_sample,
    player_of,
    run_rollout,
    widened,
)
from rljax.rollout.flight import (
    Clock,
    EpisodesInFlight,
    Flight,
    InFlight,
    ResponsesInFlight,
    Tickets,
)
from rljax.setup import Phase, Setup, prompt_order
from rljax.setup.setup import sampled_prompts
from rljax.setup.teachers import teacher_number

LOG = logging.getLogger("rljax")
METRICS = {
    "batch/prompts": Metric("prompts drawn", "prompts"),
    "batch/completions": Metric("completions sampled", "completions"),
    "batch/examples": Metric("examples read", "examples"),
    "batch/tokens": Metric("tokens in the batch, prompts included", "tokens"),
    "data/epoch": Metric(
        "passes over the data so far", "epochs", "many passes: watch the evaluation"
    ),
    "data/steps_per_epoch": Metric(
        "steps in which the data are passed over once, rounded down", "steps"
    ),
    "data/dropped_overlong": Metric(
        "prompts left out as longer than data.max_prompt_tokens; with data.stream also rows of"
        " offline runs over offline.max_tokens",
        "prompts",
        "few of them",
    ),
    **{
        f"data/{name}": Metric(f"rows of a stream left out so far: {REASONS[name].said}", "rows")
        for name in ("dropped_empty", "dropped_identical", "dropped_tie")
    },
    "data/truncated": Metric("rows of a stream that were cut so far", "rows"),
    "data/split_conversations": Metric(
        "conversations of a stream so far of which the chat template rewrites earlier turns", "rows"
    ),
    "data/unasked_turns": Metric(
        "turns of a stream's conversations so far that are read and not learned, because they stand"
        " before the first question",
        "turns",
    ),
    "data/retired_prompts": Metric("prompts that the curriculum retired as solved", "prompts"),
    "data/chance/*": Metric("chance that a prompt is drawn from {}", "share"),
    "replay/prompts": Metric("prompts with stored rollouts in the batch", "prompts"),
    "replay/reward": Metric("mean score of the stored rollouts", "score"),
    "replay/epoch": Metric("passes over the stored rollouts so far", "epochs"),
    "pretraining/epoch": Metric("passes over the pre-training examples so far", "epochs"),
    **{
        f"pretraining/{name}": Metric(
            f"data/{name} of the pre-training examples, if they are read as a stream", "rows"
        )
        for name in ("dropped_empty", "truncated", "split_conversations", "unasked_turns")
    },
    "pretraining/tokens": Metric("tokens of the pre-training examples of this step", "tokens"),
}


def make_source(setup: Setup, phase: Phase, player: Player | None, key: jax.Array):
    """Makes the source of a phase's batches, by the kind of data that its dataflow declares. `key`:
    the scalar random key of the run."""
    config, data = setup.config, setup.data
    if phase.name == "sft":
        size = config.sft.sequences_per_step
        loader = Loader(data.examples, batch_size=size, seed=config.seed)
        rows = _padded(data.example_tokens, data.example_images)
        return FileSource(loader, rows, setup.model.mesh, ())
    if not phase.samples:
        loader = prompt_order(config, data)
        names = (config.data.train, *config.data.sources)
        return FileSource(loader, partial(offline_rows, setup), setup.model.mesh, names)
    count = sampled_prompts(config)
    replayed = config.batch.prompts_per_step - count
    if not count:
        return ReplaySource(setup, replayed)
    sampled = RolloutSource(setup, phase, player, key, count)
    return MixedSource(sampled, ReplaySource(setup, replayed), setup) if replayed else sampled


def make_sources(setup: Setup, player: Player | None, key: jax.Array) -> dict:
    """Returns {name of a phase: the source of its batches}, and with pretraining.data
    "pretraining": the source of the examples beside those of the last phase. `key`: the scalar
    random key of the run."""
    sources = {phase.name: make_source(setup, phase, player, key) for phase in setup.phases}
    if setup.pretraining is not None:
        data, size = setup.data, setup.pretraining_rows
        loader = Loader(data.pretraining, batch_size=size, seed=setup.config.seed)
        rows = _padded(data.pretraining_tokens, data.pretraining_images)
        sources["pretraining"] = FileSource(loader, rows, setup.model.mesh, ())
    return sources


def _padded(length: int, images) -> Callable[[list], Batch]:
    """Returns the function that makes a Batch of supervised examples."""
    return lambda items: Batch(**pad_examples(items, length=length, images=images))


def draw_pretraining(sources: dict, step: int, roles: dict) -> dict:
    """Puts the next examples into the role `pretraining`, if it is one of the roles;
    returns metrics."""
    if "pretraining" not in roles:
        return {}
    source = sources["pretraining"]
    examples, metrics = source.next(step, roles)
    roles["pretraining"] = dataclasses.replace(roles["pretraining"], state=examples)
    return {
        "pretraining/epoch": metrics["data/epoch"],
        "pretraining/tokens": metrics["batch/tokens"],
        **{f"pretraining/{name}": float(n) for name, n in source.loader.counts.items()},
    }


def positions(sources: dict, player: Player | None) -> dict:
    """Returns the positions of sources in their data, and what the rubrics of the reward have
    learned."""
    reward = None if player is None else player.reward
    rubrics = None if reward is None else reward.rubrics
    return {
        "sources": {name: source.get_state() for name, source in sources.items()},
        "rubrics": rubrics.get_state() if rubrics is not None else None,
    }


class LoaderSource:
    """A source whose state is that of its loader."""

    def get_state(self) -> dict:
        """Returns the position in the data."""
        return self.loader.get_state()

    def set_state(self, state: dict) -> None:
        """Goes on from `get_state`."""
        self.loader.set_state(state)

    def saved(self) -> None:
        """Notes that a checkpoint was made. Afterwards the run does what a resumed one would do."""

    def meanwhile(self, learned: Callable[[], bool]) -> None:
        """Works on the next batches until devices that train have `learned` this one."""


class FileSource(LoaderSource):
    """A source of the next examples of a file, as many as the batch of the loader; `rows` makes a
    Batch of them."""

    def __init__(self, loader, rows: Callable[[list], Batch], mesh: Mesh, names: tuple[str, ...]):
        self.loader, self.rows, self.mesh, self.names = loader, rows, mesh, names
        self.count = loader.batch_size

    def next(self, step: int, roles: dict) -> tuple[Batch, dict]:
        """Returns the next batch of the file and its metrics."""
        before = self.loader.position
        batch = self.rows(self.loader.take(self.count))
        metrics = {
            "batch/examples": float(self.loader.position - before),
            "batch/tokens": float(np.sum(batch.segment_ids > 0)),
            **epoch_metrics(self.loader, self.count),
            **drop_metrics(self.loader),
        }
        return place(batch, self.mesh), {**metrics, **_chances(self.loader, self.names)}


class RolloutSource(LoaderSource):
    """A source of scored trajectories of the current policy on the next `count` prompts. `report`
    has what the reward returned for the samples of the last step."""

    def __init__(self, setup: Setup, phase: Phase, player: Player | None, key, count: int):
        self.setup, self.count, self.scored = setup, count, phase.data == "rollouts"
        self.player = player_of(player if self.scored else None)
        self.key, self.loader = key, prompt_order(setup.config, setup.data)
        self.report: RewardReport | None = None
        self.best_seen = BestSeen(setup.data.endless)
        # Every row that is scored is learned from: its reference log-probs may begin before.
        every = spec(setup.rollout).every_row and count == setup.config.batch.prompts_per_step
        self.ahead = every and self.scored
        self.in_flight = self._flight() if setup.config.rollouts.max_staleness else None

    def _flight(self) -> InFlight:
        setup, settings = self.setup, self.setup.config.rollouts
        cfg = setup.rollouts.replace(prompts_per_step=self.count)
        clock = Clock.parsed(settings.clock)
        if self.player.has_turns:
            player = EpisodesInFlight(self.player, cfg, clock)
        else:
            columns = setup.data.prompt_tokens
            player = ResponsesInFlight(self.player.reward, cfg, columns, clock)
        return InFlight(
            Tickets(self.count, settings.max_staleness, settings.steps_ahead),
            Flight(player, clock),
            self.draw,
            setup.rollout,
            self.key,
            reread=settings.in_flight_cache == "reread",
            partial_mask=settings.partial_mask,
        )

    def draw(self, count: int) -> Prompts:
        """Returns the next prompts of the data."""
        return self._prompts(self.loader.take(count))

    def _prompts(self, records: list[PromptRecord]) -> Prompts:
        data = self.setup.data
        return Prompts.from_records(records, length=data.prompt_tokens, images=data.images)

    def next(self, step: int, roles: dict) -> tuple[Batch, dict]:
        """Samples and scores the trajectories of a step; returns their batch and metrics. Raises
        InputError for a rollout that returns none, or does not take those that were in flight."""
        setup, before = self.setup, self.loader.position
        flies = self.in_flight is not None
        cfg = setup.rollouts.replace(prompts_per_step=self.count, in_flight=flies)
        player, reference = self.player, roles.get("reference")
        if self.ahead and isinstance(reference, PlacedReference):
            player = player.beside(reference)
        landed, flown = self.in_flight.take(roles["actor"], step) if flies else (None, {})
        if flies:  # these groups and those that they replaced were drawn before
            before = self.loader.position - self.count - int(flown["queue/dropped"])
        prompts = landed.prompts if flies else self.draw(self.count)
        given = dict(
            sample=make_sample(roles.get("actor"), player, cfg.sampling, landed),
            reward=player.reward,
            draw=self.draw,
            tokenizer=setup.tokenizer,
        )
        key = stream(self.key, "rollout", step)
        done = run_rollout(setup.rollout, prompts, key, cfg, **{**roles, **given})
        if flies:
            _require_taken(landed, setup)
        check_rows(setup.rollout, done.batch, cfg)
        drawn = self.drawn_metrics(before)
        batch = place(widened(done.batch, setup.row_tokens), setup.model.mesh)
        batch = with_teachers(batch, done.prompts.records, setup)
        return batch, {**done.metrics, **flown, **drawn, **self.outcome(done.report)}

    def drawn_metrics(self, before: int) -> dict:
        """Returns metrics of the prompts that were drawn since the position `before`."""
        setup, drawn = self.setup, self.loader.position - before
        dropped = setup.data.counts.get("dropped_overlong", 0) + self.loader.dropped
        return {
            "batch/prompts": float(drawn),
            "batch/completions": float(drawn * setup.rollouts.samples_per_prompt),
            **epoch_metrics(self.loader, self.count),
            **drop_metrics(self.loader),
            "data/dropped_overlong": float(dropped),
        }

    def outcome(self, report: RewardReport) -> dict:
        """Returns the metrics of a step's scores, which the curriculum and the rubrics learn
        from."""
        config = self.setup.config
        learned = self._learn(report) if self.scored else {}
        return learned | _chances(self.loader, (config.data.train, *config.data.sources))

    def _learn(self, report: RewardReport) -> dict:
        """Teaches the curriculum and the rubrics what the rewards said -> metrics."""
        self.report = report
        metrics = report.metrics() | self.best_seen.record(report) | self.player.learn(report)
        if isinstance(self.loader, Curriculum):
            self.loader.record(report.outcomes, self.setup.rollouts.correct_at)
            metrics["data/retired_prompts"] = float(self.loader.skipped)
        return metrics

    def get_state(self) -> dict:
        """Returns the position in the data, the best scores seen, and the samples in flight."""
        state = {**self.loader.get_state(), "best_seen": self.best_seen.get_state()}
        if self.in_flight is None:
            return state
        return {**state, "in_flight": self.in_flight.get_state()}

    def set_state(self, state: dict) -> None:
        """Goes on from `get_state`. Raises InputError for samples in flight if
        rollouts.max_staleness is 0, or their prompts are not in the data."""
        saved = (state := dict(state)).pop("in_flight", None)
        if saved is not None and self.in_flight is None:
            rule = f"the checkpoint has {len(saved['groups'])} prompts in flight"
            raise InputError("rollouts.max_staleness", value=0, rule=rule, fix="as it was")
        self.best_seen.set_state(state.pop("best_seen", {}))
        self.loader.set_state(state)
        if saved is not None:
            find = record_finder(self.setup.data.sources)
            self.in_flight.set_state(saved, lambda one: self._prompts([find(one)]))

    def saved(self) -> None:
        """Lets samples in flight read their texts again, as those of a resumed run do."""
        if self.in_flight is not None:
            self.in_flight.read_again()

    def meanwhile(self, learned: Callable[[], bool]) -> None:
        """Works on samples in flight until devices that train have `learned` this batch."""
        if self.in_flight is not None:
            self.in_flight.meanwhile(learned)


def with_teachers(batch: Batch, records: Sequence[PromptRecord], setup: Setup) -> Batch:
    """Returns the batch with the number of the teacher of each row's prompt, by the data_source of
    `records`, to which batch.group points; the batch itself without `teachers` in the config."""
    config, mesh = setup.config, setup.model.mesh
    if not config.teachers:
        return batch
    numbers = [teacher_number(config, record.data_source) for record in records]
    numbers = np.array(numbers, np.int32)
    return _taught(batch, put_whole(numbers, replicated(mesh)), mesh=mesh)


@partial(jax.jit, static_argnames="mesh")
def _taught(batch: Batch, numbers: jax.Array, *, mesh: Mesh) -> Batch:
    # A row whose reward failed has a group of its own, and no policy tokens.
    of_row = jnp.take(numbers, batch.group, mode="clip")[:, None]
    teacher = jnp.where(batch.mask > 0, of_row, 0)
    return batch.replace(teacher=constrain_rows(teacher, mesh))


def record_finder(sources: Sequence) -> Callable[[dict], PromptRecord]:
    """Returns a function that finds the record with a saved prompt_id, index and source, and raises
    InputError if the data have none. The data are indexed once: a run may have a thousand prompts
    in flight of a million."""
    known = {
        (one.prompt_id, one.index, one.source): one
        for source in sources
        if not isinstance(source, Stream)
        for one in source
    }

    def find(saved: dict) -> PromptRecord:
        at = (saved["prompt_id"], saved["index"], saved["source"])
        found = [known[at]] if at in known else []
        if isinstance(at[1], int) and at[1] >= 0:
            found += [source[at[1]] for source in sources if isinstance(source, Stream)]
        for record in found:
            if record is not None and record.source == at[2]:
                return record
        raise InputError(
            "a prompt in flight is not in the data",
            value=saved,
            rule="a run goes on with the data that it began with",
            fix="set data.train and data.sources as they were, or begin a new run_dir",
        )

    return find


def _require_taken(landed: Landed, setup: Setup) -> None:
    """Raises InputError where a rollout made samples of its own."""
    if not landed.taken:
        raise InputError(
            f"algorithm.collect={setup.rollout.text!r} with rollouts.max_staleness",
            value=setup.config.rollouts.max_staleness,
            rule="it did not ask for samples of the prompts that it was given, by "
            "sample(prompts, key, n=cfg.samples_per_prompt)",
            fix="rollouts.max_staleness=0",
        )


class ReplaySource(LoaderSource):
    """A source of stored rollouts: `count` prompts a step with their recorded samples, rewards
    and log-probs.

    A group is samples_per_prompt trajectories of equal prompts; a remainder is not used. The tokens
    have policy_version -1: no step of this run sampled them.
    """

    report = None

    def __init__(self, setup: Setup, count: int):
        config = setup.config
        self.setup, self.count = setup, count
        with rows_of("rollouts.replay", "--config.rollouts.replay=FILE of trajectories"):
            rows = load_rows(config.rollouts.replay, "train", "trajectories")
        longest = setup.row_tokens
        items, kept = encode_rows(rows, setup.tokenizer, "trajectories", max_tokens=longest)
        if kept["kept"] < kept["total"]:
            LOG.warning("%s", kept_line(config.rollouts.replay, "trajectories", kept, longest))
        groups = _groups(items, config.batch.samples_per_prompt, config.rollouts.replay)
        self.loader = Loader(groups, batch_size=count, seed=config.seed)

    def next(self, step: int, roles: dict) -> tuple[Batch, dict]:
        """Returns the batch of the next stored groups and its metrics."""
        groups = self.loader.take(self.count)
        n = len(groups[0])
        items = [item for group in groups for item in group]
        arrays = batch_arrays("trajectories", items, length=self.setup.row_tokens)
        batch = Batch(
            **arrays,
            group=np.repeat(np.arange(len(groups), dtype=np.int32), n),
            policy_version=np.where(arrays["mask"] > 0, -1, 0).astype(np.int32),
            sampler_log_kept=np.zeros_like(arrays["mask"]),
        )
        metrics = {
            "replay/prompts": float(len(groups)),
            "replay/reward": float(np.mean(arrays["scores"])),
            "replay/epoch": self.loader.epoch,
            "batch/tokens": float(np.sum(arrays["segment_ids"] > 0)),
        }
        return place(batch, self.setup.model.mesh), metrics


def _groups(items: list, n: int, file: str) -> list[list]:
    """Trajectories in groups of n with equal prompts, in the order of the file."""
    by_prompt: dict[tuple, list] = {}
    for item in items:
        if item.logprobs is None:
            raise InputError(
                f"rollouts.replay={file} has rows without logprobs",
                rule="losses compare the policy with whoever wrote the rollouts",
                fix="write the file with rljax sample --trajectories",
            )
        by_prompt.setdefault(tuple(item.prompt_ids.tolist()), []).append(item)
    groups = [
        members[start : start + n]
        for members in by_prompt.values()
        for start in range(0, len(members) - n + 1, n)
    ]
    if not groups:
        most = max(map(len, by_prompt.values()), default=0)
        raise InputError(
            f"rollouts.replay={file} has no prompt with {n} trajectories",
            value=most,
            rule="a prompt brings batch.samples_per_prompt of them",
            fix=f"batch.samples_per_prompt={max(most, 1)} or less",
        )
    return groups


class MixedSource:
    """A source of rollouts of the policy and stored ones, joined into one batch. A field that only
    one of them has is dropped."""

    def __init__(self, sampled: RolloutSource, stored: ReplaySource, setup: Setup):
        self.sampled, self.stored, self.mesh = sampled, stored, setup.model.mesh
        self.loader, self.count = sampled.loader, sampled.count

    @property
    def report(self) -> RewardReport | None:
        """Report of the reward on the samples of the policy."""
        return self.sampled.report

    def next(self, step: int, roles: dict) -> tuple[Batch, dict]:
        """Returns the joined batch and the metrics of both sources."""
        ours, metrics = self.sampled.next(step, roles)
        theirs, more = self.stored.next(step, roles)
        more.pop("batch/tokens")
        return _joined(ours, theirs, self.mesh), {**metrics, **more}

    def saved(self) -> None:
        """Notes that a checkpoint was made."""
        self.sampled.saved()

    def meanwhile(self, learned: Callable[[], bool]) -> None:
        """Works on samples in flight until devices that train have `learned` this batch."""
        self.sampled.meanwhile(learned)

    def get_state(self) -> dict:
        """Returns the states of both sources."""
        return {"sampled": self.sampled.get_state(), "stored": self.stored.get_state()}

    def set_state(self, state: dict) -> None:
        """Goes on from `get_state`."""
        self.sampled.set_state(state["sampled"])
        self.stored.set_state(state["stored"])


def _joined(ours: Batch, theirs: Batch, mesh) -> Batch:
    # Rows whose reward failed have groups of their own, below twice the number of rows.
    theirs = theirs.replace(group=theirs.group + 2 * ours.rows)
    if ours.kept_tokens is not None:
        theirs = theirs.replace(kept_tokens=jnp.zeros((theirs.rows,), jnp.int32))
    if ours.routes is not None:  # of stored rows none are known
        unknown = jnp.full((theirs.rows, *ours.routes.shape[1:]), -1, ours.routes.dtype)
        theirs = theirs.replace(routes=unknown)
    both = {}
    for field in dataclasses.fields(Batch):
        one, other = vars(ours)[field.name], vars(theirs)[field.name]
        if one is not None and other is not None:
            both[field.name] = jnp.concatenate([one, other])
    return place(Batch(**both), mesh)


def steps_per_epoch(items: float, count: int) -> int | None:
    """Returns floor(items / count) for `count` items a step; None for data without end."""
    return None if math.isinf(items) else math.floor(items / count)


def epoch_metrics(loader, count: int) -> dict[str, float]:
    """Returns data/epoch, and data/steps_per_epoch of a step that draws `count` items."""
    steps = steps_per_epoch(loader.items_per_epoch, count)
    known = {} if steps is None else {"data/steps_per_epoch": float(steps)}
    return {"data/epoch": loader.epoch, **known}


def drop_metrics(loader) -> dict[str, float]:
    """Returns data/dropped_*, data/truncated and the like of the rows of streams that were drawn
    so far; {} if no source is a stream."""
    return {f"data/{name}": float(count) for name, count in loader.counts.items()}


def data_counts(setup: Setup, sources: dict) -> dict[str, float]:
    """Returns the counts of a run's data: of what was read before it began, and of the rows of
    streams that were drawn since."""
    counts = dict(setup.data.counts)
    for name, source in sources.items():
        prefix = {"sft": "examples_", "pretraining": "pretraining_"}.get(name, "")
        for what, count in (source.loader.counts if source.loader.streamed else {}).items():
            counts[prefix + what] = counts.get(prefix + what, 0) + count
    return counts


def epoch_notes(source, steps: int) -> list[str]:
    """Returns lines such as "7 steps per epoch: 7,500 items, 1,024 a step; 105 steps are 14.3
    epochs" about a source's data; [] for data without end. Rows of a stream may be dropped when
    they are drawn, so their number is a bound."""
    items, count = source.loader.items_per_epoch, source.count
    whole = steps_per_epoch(items, count)
    if whole is None:
        return []
    unit = "step" if whole == 1 else "steps"
    passes = f"{steps:,} steps are {steps * count / items:.3g} epochs"
    if source.loader.streamed:
        said = f"at most {whole:,} {unit} per epoch: {items:,.0f} rows, {count:,} a step"
        return [f"{said}; rows that are dropped as they are drawn are counted in data/dropped_*"]
    return [f"{whole:,} {unit} per epoch: {items:,.0f} items, {count:,} a step; {passes}"]


def _chances(loader, names: tuple[str, ...]) -> dict[str, float]:
    """The chance of each source that is mixed in."""
    if not isinstance(loader, Curriculum):
        return {}
    pairs = zip(names, loader.chances(), strict=True)
    return {f"data/chance/{name}": float(chance) for name, chance in pairs}


def offline_rows(setup: Setup, records: list[dict], rows: int = 0) -> Batch:
    """Returns records of the phase's kind of data as a batch on the host, with the stored log-probs
    of the reference if the records have them; filled up with empty rows to `rows`.

    unpaired: rows 2i are the completions, rows 2i + 1 the same prompts with each other's.
    """
    kind, how = setup.main.data, dict(length=setup.row_tokens, images=setup.data.images)
    items, length = [record["item"] for record in records], setup.row_tokens
    arrays = batch_arrays(kind, items, rows_per_example=setup.rows_per_example, **how)
    if kind == "unpaired":
        others = mismatched_arrays(items, **how)
        others = {name: others.get(name, np.zeros_like(x)) for name, x in arrays.items()}
        arrays = {
            name: np.stack([x, others[name]], axis=1).reshape(-1, *x.shape[1:])
            for name, x in arrays.items()
        }
    if records and "ref_logprobs" in records[0]:
        stored = [row for record in records for row in record["ref_logprobs"]]
        arrays["ref_logprobs"] = np.zeros((len(stored), length), np.float32)
        for row, values in zip(arrays["ref_logprobs"], stored, strict=True):
            row[: len(values)] = values
    for name, x in arrays.items():
        arrays[name] = np.pad(x, [(0, max(rows - len(x), 0))] + [(0, 0)] * (x.ndim - 1))
    return Batch(**arrays)
