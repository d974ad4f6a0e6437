"""Shows what a run would begin with, without taking a step: `rljax train --dry_run`."""

import tempfile
from pathlib import Path

import jax
from rich.console import Console

from rljax import hosts
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.config import Config
from rljax.data.online.loader import Loader
from rljax.data.rows.show import show
from rljax.rewards.pool.calling import asks_nobody
from rljax.rollout import Episodes
from rljax.setup import build
from rljax.setup.weights import check_weights
from rljax.tracking.packages import require_packages
from rljax.training.preflight import check_same_data, check_same_start
from rljax.training.run import Run, checkpoint_bytes
from rljax.training.scores import scored_responses, try_rewards
from rljax.training.setup_warnings import setup_warnings
from rljax.validation import validate

ROWS = 2  # of each source that are shown


def preview(config: Config, console: Console, *, shipped: Config | None = None) -> None:
    """Prints the warnings and the plan of a config, its first rows as the model reads them, and
    the rewards of ordinary responses to them. It makes no run folder and compiles nothing; of
    several hosts the first one prints. Raises InputError for all that `train` would refuse before
    its first step."""
    hosts.start(config.hosts.init_timeout_s, config.hosts.heartbeat_s)
    try:
        check_same_start(config)
        console = console if hosts.first() else Console(quiet=True)
        _preview(config, console, shipped)
    except BaseException as error:
        hosts.fail(error)  # the others would wait for this host
        raise


def _preview(config: Config, console: Console, shipped: Config | None) -> None:
    devices = jax.devices()

    def warn(texts) -> None:
        for text in texts:
            console.print(f"warning: {text}", markup=False, soft_wrap=True)

    warn(validate(config, len(devices), shipped))
    if hosts.first():  # which alone speaks to them
        require_packages(config.trackers)
    setup = build(config, devices)
    check_same_data(setup)
    warn(setup_warnings(setup, shipped))
    if setup.starts_from_policy:
        check_weights(config, setup.model)
    folder = f"{config.run_dir or 'runs'}/checkpoints"
    Checkpoints(folder).check_room(checkpoint_bytes(setup))
    with tempfile.TemporaryDirectory() as folder, Run(setup, Path(folder)) as run:
        console.print(f"plan: {run.memory.line()}", markup=False, soft_wrap=True)
        show(config, console, rows=ROWS, split="train", ids=False)
        if run.setup.needs_reward:
            warn(try_rewards(run))
            _show_rewards(run, console)


def _show_rewards(run: Run, console: Console) -> None:
    """A line for each of the responses that a reward is tried with."""
    if run.player.has_turns:
        _show_exchange(run, run.player, console)
        return
    reward = run.reward
    if reward.row_pool is None or not asks_nobody(reward.row_pool.component):
        console.print("rewards: of a model or a server, which is not asked here")
        return
    for source in run.setup.data.sources:
        for record in Loader(source, batch_size=1, seed=run.config.seed).take(ROWS):
            for row in scored_responses(reward, record):
                score = row.score.value if row.score.status == "ok" else row.score.message
                text = f"reward {score} of the response {row.sample['response']!r:.200}"
                console.print(text, markup=False, soft_wrap=True)


def _show_exchange(run: Run, player: Episodes, console: Console) -> None:
    """Shows the environment's first text for a row, a scripted reply, and the answer to that."""
    (record,) = Loader(run.setup.data.sources[0], batch_size=1, seed=run.config.seed).take(1)
    decode = run.setup.tokenizer.decode
    for step in player.first_exchange(record):
        if step.ended:
            text = f"environment: ended, outcome {step.outcome}"
        else:
            reply = f"reply {step.text!r:.200}; " if step.text else ""
            text = f"{reply}environment says {decode(step.ids, skip_special_tokens=False)!r:.400}"
        console.print(text, markup=False, soft_wrap=True)
