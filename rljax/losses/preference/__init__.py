"""Preference losses: (policy, batch, **options) -> (loss [B/K], metrics of that shape).

The formulas, unreduced: rljax.learn averages over examples. An example is K consecutive rows, K =
`rows` of the loss's contract, which also says whether it reads the reference (`ref_logprobs`) and
whether it needs all rows of the optimizer step at once (`whole_step`). A loss raises
InputError where the batch lacks a field that its contract reads, and where K does not divide B.

    name                     paper         example
    dpo                      2305.18290    pair, with a reference; loss types in pairwise.py:
      sigmoid                2305.18290      cDPO with label_smoothing
      sigmoid_norm           2411.15124      length means (Tulu 3)
      hinge                  2305.10425      SLiC-HF
      ipo, ipo_sum           2310.12036
      exo_pair               2402.00856
      nca_pair               2402.05369
      robust                 2403.00409
      bco_pair               2404.04656
      sppo_hard              2405.00675
      apo_zero, apo_down     2408.06266
      discopop               2406.08414
      aot, aot_unpaired      2406.05882      order statistics of the step
      sft                    2411.10442      supervised term of all chosen tokens of the step
      rpo                    2404.19733      supervised term of the chosen answer
      divergence=            2309.16240      f-DPO
      ld_alpha=              2409.06411      LD-DPO
      wpo_weighting=         2406.11827      WPO
    spin                     2401.01335    pair: the data's answer, the policy's own
    simpo                    2405.14734    pair; alpha= 2501.03884 (AlphaPO)
    cpo                      2401.08417    pair, and a supervised term
    orpo                     2403.07691    pair, and a supervised term
    tpo                      2405.16681    triple
    kto                      2402.01306    row with a label, and the KL of mismatched rows
    apo_zero_unpaired        2408.06266    row with a label
    bco                      2404.04656    row with a label, and a running mean
    sppo, sppo_online        2405.00675    pair; row with a reward
    xpo                      2405.21046    pair: a sample of the policy, one of the reference
    nash_md                  2312.00886    row with a win probability
"""

from rljax.losses.preference.dpo import dpo, spin
from rljax.losses.preference.games import nash_md, sppo, sppo_online, xpo
from rljax.losses.preference.reference_free import cpo, orpo, simpo, tpo
from rljax.losses.preference.unpaired import apo_zero_unpaired, bco, kto

__all__ = [
    "apo_zero_unpaired",
    "bco",
    "cpo",
    "dpo",
    "kto",
    "nash_md",
    "orpo",
    "simpo",
    "spin",
    "sppo",
    "sppo_online",
    "tpo",
    "xpo",
]
