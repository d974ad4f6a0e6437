"""A cost model (arXiv 2310.12773): C > 0 says unsafe, and the more harmful of two
responses costs more; the run's folder reward_model/ is what --config.reward.cost_model of a
safe_rlhf run reads.

Rows have the columns of PKU-SafeRLHF (response_0, response_1, safer_response_id,
is_response_0_safe, is_response_1_safe), or prompt, safer, more_harmful, safer_is_safe,
more_harmful_is_safe.

rljax train offline/cost_model:tiny
rljax train offline/cost_model --config.model=MODEL_FOLDER \\
    --config.data.train=train.jsonl --config.data.test=test.jsonl

Hardware, time and quality at full size: not measured.
"""

from rljax.config import Config, OptimizerConfig
from rljax.config.tiny import tiny_offline


def get_config(variant: str = "") -> Config:
    """`:tiny` is the same algorithm on embedded rows."""
    config = Config(dataflow="cost_model", steps=1000)
    config.offline.examples_per_step, config.offline.max_tokens = 128, 1024
    config.algorithm.reward_loss = "cost_preference()"
    config.critic_optimizer = OptimizerConfig(lr=1e-5, schedule="cosine", warmup_steps=50)
    config.model_settings.dtype = "bfloat16"
    config.evaluate.every_steps = 100
    return tiny_offline(config) if variant == "tiny" else config
