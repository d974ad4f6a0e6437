"""Run: the state of one training run, and what one step does to it.

What lives here: roles, progress, save and load, the supervised step, the dataflow's step,
evaluation. What
does not: when each happens (rljax.train), how things are built (rljax.setup).

Every random draw is a function of (seed, step), and the data order of (seed, position), so that a
resumed run
is bitwise the uninterrupted one.
"""

import dataclasses
import json
import logging
import time
from pathlib import Path

import jax
import numpy as np

from rljax import setup as build
from rljax.arrays import place
from rljax.batch import Batch
from rljax.config import Config, fingerprints, is_path
from rljax.data.online.curriculum import Curriculum
from rljax.data.online.default_rewards import evaluation_text, reward_text
from rljax.data.online.loader import make_loader
from rljax.data.online.prompts import Prompts, pad_examples
from rljax.dataflows.sft import sft
from rljax.errors import InputError
from rljax.evaluation.policy import accuracy_by_source, bootstrap, greedy_accuracy
from rljax.learn.optimizers import current_learning_rate
from rljax.models.adapters import lora
from rljax.models.huggingface import save_params
from rljax.models.huggingface.peft import save_adapter
from rljax.plan.memory import check_fits
from rljax.rollout import generate_scored
from rljax.setup.checkpoint import Checkpoints, check_fingerprints
from rljax.setup.policies import Policy
from rljax.train.offline import (
    held_out_step,
    offline_batch,
    read_reference_logprobs,
    store_reference_logprobs,
    tokens_of,
)
from rljax.train.progress import Progress, bad_steps_in_a_row

LOG = logging.getLogger("rljax")
EXPORTED = {"actor": "policy", "reward_model": "reward_model"}  # folder names


class Run:
    """One run: its setup, roles and progress. `train` drives it."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder
        self.started = time.monotonic()
        self.setup = build.build(config)
        self.memory = check_fits(self.setup)  # before any weight is loaded
        self.key = jax.random.key(config.seed)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=config.checkpoint.keep,
            best_metric=config.checkpoint.best_metric,
        )
        self.fingerprints = {**fingerprints(config), "data": self.setup.data.digest}
        data, seed = self.setup.data, config.seed
        self.prompts = build.data_stream(config, data)
        self.examples = None
        if config.sft.steps:
            self.examples = make_loader(
                data.examples, batch_size=config.sft.sequences_per_step, seed=seed
            )
        self.progress = Progress(phase="sft" if config.sft.steps else "rl")
        self.roles: dict = {}
        self.metrics: dict[str, float] = {}
        self.steady: list[list[float]] = []  # seconds of generate, reward, learn, rest of each step
        self.timelines: list[
            dict
        ] = []  # rljax.report.timeline: of two steps of the dataflow at most
        self.started_training = False
        self.saved_step: int | None = None  # of the checkpoint that a resume would go on from
        self.reward = self.eval_reward = None
        if self.setup.needs_reward or data.test_prompts:
            by_model = config.reward.model and self.setup.needs_reward
            text = "" if by_model else reward_text(config)
            self.reward = build.reward_role(self.setup, text, dense=self.setup.needs_reward)
            other = evaluation_text(config)
            # Evaluation hears the outcome alone.
            same = other in ("", text)
            scorer = self.reward if same else build.reward_role(self.setup, other)
            self.eval_reward = scorer.outcome_alone()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for reward in {id(r): r for r in (self.reward, self.eval_reward) if r is not None}.values():
            reward.close()

    # -- state -------------------------------------------------------------------------------------
    # ------------

    def start(self, tracking) -> None:
        """Resume from the newest whole checkpoint of the folder, or start anew."""
        step = self.checkpoints.latest()
        if step is None:
            tracking.truncate({"metrics.jsonl": 0, "samples.jsonl": 0})
            record = self.folder / "model.json"
            params = {}
            if self.setup.starts_from_policy:
                params = build.initial_params(self.config, self.setup.model, record)
            if self.progress.phase == "sft":
                self.roles = build.sft_roles(self.setup, params)
            else:
                self.begin_rl(params)
                self.evaluate()
                self.remember_before()
        else:
            self._resume(step, tracking)
        self.started_training = True

    def _resume(self, step: int, tracking) -> None:
        state = self.checkpoints.read_state(step)
        allowed = self.config.checkpoint.allow_changed
        check_fingerprints(state["fingerprints"], self.fingerprints, allowed)
        self.load(step)
        if self.finished() and self.is_wrapped_up():
            raise InputError(
                f"{self.folder} is a finished run: step {step}, nothing left to train",
                fix="use a new run_dir, or raise steps and allow it: "
                "--config.checkpoint.allow_changed=\"('steps',)\"",
            )
        tracking.truncate(state["offsets"])
        LOG.warning("resumed %s at step %d", self.folder, step)

    def load(self, step: int) -> None:
        """Everything of a checkpoint but the trackers."""
        state = self.checkpoints.read_state(step)
        self.progress = Progress(**state["progress"])
        if self.setup.model.config.lora:  # a checkpoint holds the adapters alone
            params = build.initial_params(self.config, self.setup.model)
        else:  # shapes and shardings; the values are replaced
            params = self.setup.model.init(jax.random.key(0))
        if self.progress.reference_file:
            folder = Path(self.config.offline.reference_logprobs)
            read_reference_logprobs(self.setup, folder / self.progress.reference_file)
        make = build.sft_roles if self.progress.phase == "sft" else build.rl_roles
        roles = make(self.setup, params)
        self.roles = build.with_arrays(
            roles, self.checkpoints.read_arrays(step, build.role_arrays(roles))
        )
        self._restore_order(self.prompts, state["prompts"])
        if self.reward is not None and self.reward.rubrics is not None:
            self.reward.rubrics.set_state(state.get("rubrics"))
        if self.examples is not None:
            self._restore_order(self.examples, state["examples"])
        self.started, self.saved_step = time.monotonic() - self.progress.elapsed_s, step

    def _restore_order(self, loader, saved: dict | None) -> None:
        """Go to the saved position; other data or another seed, allowed by name, has an order of
        its own."""
        saved = saved or loader.get_state()
        if isinstance(loader, Curriculum):
            loader.set_state(saved)  # pass rates belong to their prompts: no other data
            return
        if {"data", "seed"} & set(self.config.checkpoint.allow_changed):
            saved = {**loader.get_state(), "position": saved["position"]}
        loader.set_state(saved)

    def is_wrapped_up(self) -> bool:
        """Whether the last steps were followed by export, summary and report: the report is the
        last file."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return False
        ended = (summary.get("status"), summary.get("steps")) == ("finished", self.progress.step)
        return ended and (self.folder / "report.html").exists()

    def save(self, tracking) -> None:
        """Everything, at once: roles, data position, progress, tracker offsets."""
        if bad_steps_in_a_row(self.metrics) and not self.finished():
            return  # a checkpoint is a state worth going back to
        self.progress.elapsed_s = time.monotonic() - self.started
        state = {
            "progress": dataclasses.asdict(self.progress),
            "fingerprints": self.fingerprints,
            "offsets": tracking.offsets(),
            "prompts": self.prompts.get_state(),
            "rubrics": self._rubrics(),
            "examples": self.examples.get_state() if self.examples is not None else None,
            "metrics": {
                k: v for k, v in self.metrics.items() if isinstance(v, float) and np.isfinite(v)
            },
        }
        self.checkpoints.save(self.progress.step, build.role_arrays(self.roles), state)
        self.saved_step = self.progress.step

    def _rubrics(self) -> dict | None:
        """Of every prompt, where they evolve."""
        found = self.reward.rubrics if self.reward is not None else None
        return found.get_state() if found is not None else None

    @property
    def stopped_early(self) -> bool:
        """evaluate.patience evaluations in a row were no better than the best before them."""
        return 0 < self.config.evaluate.patience <= self.progress.since_best

    def finished(self) -> bool:
        over = self.progress.rl_steps >= self.config.steps or self.stopped_early
        return self.progress.phase == "rl" and over

    @property
    def phase(self) -> str:
        """What a step is called: sft, rl, or the dataflow that learns from a file."""
        offline = self.progress.phase == "rl" and self.setup.learns_offline
        return self.setup.dataflow.name if offline else self.progress.phase

    # -- steps -------------------------------------------------------------------------------------
    # ------------

    def begin_rl(self, params) -> None:
        """Fresh optimizers on these weights; the reference is their copy."""
        stored = self.config.offline.reference_logprobs
        if stored:
            name = store_reference_logprobs(self.setup, params, Path(stored))
            self.progress.reference_file = name
            read_reference_logprobs(self.setup, Path(stored) / name)
        self.roles = build.rl_roles(self.setup, params)
        self.progress.phase = "rl"
        if self.config.data.drop_above_pass_rate:
            self._drop_solved()

    def sft_step(self) -> dict:
        examples = pad_examples(next(self.examples), length=self.setup.data.example_tokens)
        batch = place(Batch(**examples), self.setup.model.mesh)
        new, metrics = sft(batch, None, self.setup.sft_recipe, actor=self.roles["actor"])
        self.roles |= new
        self.progress.sft_steps += 1
        taken = self.progress.sft_steps - 1
        metrics["lr"] = current_learning_rate(
            self.config.sft.optimizer, self.config.sft.steps, taken
        )
        return metrics

    def _draw(self, count: int) -> Prompts:
        """The next prompts of the data; `more` draws on."""
        length = self.setup.data.prompt_tokens
        return Prompts.from_records(self.prompts.take(count), length=length, more=self._draw)

    def _learn_pass_rates(self) -> None:
        """What the rewards said of each prompt, for a curriculum that retires the solved ones."""
        if isinstance(self.prompts, Curriculum):
            self.prompts.record(self.reward.outcomes, self.config.evaluate.correct_at)

    def _drop_solved(self) -> None:
        """Prompts that the starting policy mostly solves are dropped before the first step."""
        limit, samples = self.config.data.drop_above_pass_rate, self.config.data.pass_rate_samples
        size, every = self.config.batch.prompts_per_step, self.setup.data.prompts
        key = jax.random.fold_in(self.key, 3)
        for start in range(0, len(every), size):
            part = every[start : start + size]
            part = part + every[: size - len(part)]  # one shape; asking again does no harm
            part = (part * (-(-size // len(part))))[:size]
            prompts = Prompts.from_records(part, length=self.setup.data.prompt_tokens)
            key, draw = jax.random.split(key)
            self.reward.forget()
            asked = (prompts, draw, self.setup.recipe.sampling)
            generate_scored(self.roles["actor"], self.reward, *asked, n=samples)
            self._learn_pass_rates()
        dropped = self.prompts.drop_above(limit)
        LOG.info("dropped %d of %d prompts: pass rate above %g", dropped, len(every), limit)

    def _step_key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.key, 2), self.progress.rl_steps)

    def _learning_rate(self) -> float:
        """Of the last optimizer step that was taken."""
        total = build.optimizer_steps(self.setup)
        taken = self.progress.rl_steps * total // max(self.config.steps, 1) - 1
        config = self.config
        of_actor = self.setup.trains == "actor"
        optimizer = config.actor_optimizer if of_actor else config.critic_optimizer
        return current_learning_rate(optimizer, total, max(taken, 0))

    def _roles_of_dataflow(self) -> dict:
        return {k: v for k, v in self.roles.items() if k in self.setup.dataflow.parameters}

    def offline_step(self) -> dict:
        """One optimizer step on the next examples of the file."""
        before = self.prompts.position
        batch = offline_batch(self.setup, self.prompts.take(self.prompts.batch_size))
        tokens = tokens_of(batch)
        new, metrics = self.setup.dataflow(
            batch, self._step_key(), self.setup.recipe, **self._roles_of_dataflow()
        )
        self.roles |= {k: v for k, v in new.items() if k in self.roles}
        self.progress.rl_steps += 1
        drawn = self.prompts.position - before
        self.progress.prompts += drawn
        chances = self._chances()
        return {
            **metrics,
            **chances,
            "lr": self._learning_rate(),
            "batch/examples": float(drawn),
            "batch/tokens": float(tokens),
            "data/epoch": self.prompts.epoch,
        }

    def _chances(self) -> dict[str, float]:
        """Of each source that is mixed in."""
        if not isinstance(self.prompts, Curriculum):
            return {}
        names = (self.config.data.train, *self.config.data.sources)
        pairs = zip(names, self.prompts.chances(), strict=True)
        return {f"data/chance/{name}": float(chance) for name, chance in pairs}

    def rl_step(self) -> dict:
        if self.setup.learns_offline:
            return self.offline_step()
        setup, config = self.setup, self.config
        before = self.prompts.position
        if self.reward is not None:
            self.reward.forget()
        prompts = self._draw(config.batch.prompts_per_step)
        roles = self._roles_of_dataflow()
        if setup.needs_reward:
            roles["reward"] = self.reward
        new, metrics = setup.dataflow(prompts, self._step_key(), setup.recipe, **roles)
        self.roles |= {k: v for k, v in new.items() if k in self.roles}
        self.progress.rl_steps += 1
        drawn = self.prompts.position - before
        completions = drawn * setup.recipe.samples_per_prompt
        self.progress.prompts += drawn
        self.progress.completions += completions
        self._learn_pass_rates()
        counts = dict(self.reward.counts) if setup.needs_reward else {}
        if isinstance(self.prompts, Curriculum):
            counts["data/retired_prompts"] = float(self.prompts.skipped)
        counts |= self._chances()
        dropped = setup.data.counts.get("dropped_overlong", 0) + self.prompts.dropped
        return {
            **metrics,
            **counts,
            "data/dropped_overlong": float(dropped),
            "lr": self._learning_rate(),
            "batch/prompts": float(drawn),
            "batch/completions": float(completions),
            "data/epoch": self.prompts.epoch,
        }

    def evaluate(self) -> dict:
        """The loss on held-out examples and the greedy accuracy on held-out prompts, of which there
        are any, remembered in progress."""
        found = {}
        if self.setup.data.held_out and self.progress.phase == "rl":
            key, roles = jax.random.fold_in(self.key, 4), self._roles_of_dataflow()
            new, found = held_out_step(self.setup, roles, key)
            self.roles |= {k: v for k, v in new.items() if k in self.roles}
            self.progress.held_out = found
        if self.setup.data.test_prompts:
            found = {**found, **self._accuracy()}
        self._count_patience(found)
        return found

    def _count_patience(self, found: dict) -> None:
        better = -found["eval/loss"] if "eval/loss" in found else found.get("eval/accuracy")
        progress = self.progress
        if better is None or not np.isfinite(better) or progress.phase != "rl":
            return
        if progress.best is None or better > progress.best:
            progress.best, progress.since_best = float(better), 0
        else:
            progress.since_best += 1

    def _accuracy(self) -> dict:
        """Greedy accuracy on the held-out prompts."""
        data = self.setup.data
        sampling = self.setup.recipe.sampling
        policy = Policy(self.roles["actor"], self.setup.tokenizer, sampling, data.prompt_tokens)
        correct_at = self.config.evaluate.correct_at
        right, responses = greedy_accuracy(
            policy, self.eval_reward, data.test_prompts, correct_at=correct_at
        )
        failed = float(np.mean(np.isnan(right)))
        if failed == 1.0:  # a judge that is down must not end the run
            LOG.warning("step %d: every reward of the evaluation failed", self.progress.step)
            self.progress.accuracy = self.progress.right = None
            return {"eval/failed_fraction": failed}
        found = bootstrap(right)
        self.progress.accuracy, self.progress.right = (
            found,
            [None if np.isnan(r) else float(r) for r in right],
        )
        truncated = float(np.mean([r.finish_reason == "length" for r in responses]))
        return {
            **accuracy_by_source(data.test_prompts, right),
            "eval/accuracy": found["value"],
            "eval/accuracy_low": found["low"],
            "eval/accuracy_high": found["high"],
            "eval/truncated_fraction": truncated,
            "eval/failed_fraction": failed,
        }

    def remember_before(self) -> None:
        """The latest evaluation is the one that the dataflow starts from."""
        self.progress.accuracy_before = self.progress.accuracy
        self.progress.right_before = self.progress.right
        self.progress.held_out_before = self.progress.held_out

    def export(self) -> Path:
        """What was trained as a Hugging Face folder: weights (adapters merged), config, tokenizer;
        and adapters alone as a PEFT folder beside it."""
        name = "policy" if self.progress.phase == "sft" else EXPORTED[self.setup.trains]
        tokenizer, folder = self.setup.tokenizer, self.folder / name
        role = self.roles["actor" if name == "policy" else self.setup.trains]
        model, params = role.model, role.state.weights
        if model.config.lora:
            base = self.config.model if is_path(self.config.model) else ""
            save_adapter(self.folder / "adapter", model, params, base=base)
            params = lora.merge(model, params)
            whole = dataclasses.replace(lora.without(model.config), weight_dtype="float32")
            model = dataclasses.replace(model, config=whole)
        save_params(
            folder,
            model,
            params,
            bos_id=tokenizer.bos_id,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
        )
        tokenizer.save(folder)
        return folder
