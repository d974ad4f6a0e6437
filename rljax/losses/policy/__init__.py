"""Policy losses: (policy, batch, **options) -> (loss [B, S], metrics of that shape or [B]).

What lives here: the formulas, unreduced. What does not: masking and averaging (rljax.update),
models. `policy` holds logprobs [B, S] and entropy [B, S]; every other array is a constant of the
batch. tokens.py: a ratio per token; sequences.py: a ratio per sequence; selection.py: tokens picked
by statistics of the whole step. A loss may be marked `applies_weights` or `whole_step` (common.py).
"""

from rljax.losses.policy.common import Policy as Policy
from rljax.losses.policy.common import log_ratio as log_ratio
from rljax.losses.policy.selection import clip_cov as clip_cov
from rljax.losses.policy.selection import kl_cov as kl_cov
from rljax.losses.policy.selection import ppo_high_entropy as ppo_high_entropy
from rljax.losses.policy.sequences import gmpo as gmpo
from rljax.losses.policy.sequences import gspo as gspo
from rljax.losses.policy.sequences import gspo_token as gspo_token
from rljax.losses.policy.sequences import gvpo as gvpo
from rljax.losses.policy.sequences import vespo as vespo
from rljax.losses.policy.tokens import cispo as cispo
from rljax.losses.policy.tokens import decoupled_ppo as decoupled_ppo
from rljax.losses.policy.tokens import dppo_kl as dppo_kl
from rljax.losses.policy.tokens import dppo_tv as dppo_tv
from rljax.losses.policy.tokens import dro as dro
from rljax.losses.policy.tokens import dynamic_fine_tuning as dynamic_fine_tuning
from rljax.losses.policy.tokens import gpg as gpg
from rljax.losses.policy.tokens import negative_log_likelihood as negative_log_likelihood
from rljax.losses.policy.tokens import policy_gradient as policy_gradient
from rljax.losses.policy.tokens import ppo_clip as ppo_clip
from rljax.losses.policy.tokens import sapo as sapo
