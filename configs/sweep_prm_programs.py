"""A sweep: PPO on program synthesis without and with a process reward model, in four settings.

python launchers/sweep.py --config=configs/sweep_prm_programs.py --out=runs/prm/sweep

Neither, dense reward (DenseReward), the critic's first values (ValueInit), and both; the runs that
come first are in configs/prm_programs.py. Another seed: --config.seed=1 --out=runs/prm/sweep1.
"""

from pathlib import Path

from rljax.config import Config
from rljax.config.flags import load_config_file

SCORER = "runs/prm/scorer/reward_model"


def get_config(variant: str = "") -> Config:
    """PPO as in configs/prm_programs.py, without a process reward model."""
    return load_config_file(str(Path(__file__).with_name("prm_programs.py")))


def sweep():
    """The four settings: each switch on its own."""
    for dense in ("", SCORER):
        for values in ("", SCORER):
            yield {"reward.process_model": dense, "critic_model": values}
