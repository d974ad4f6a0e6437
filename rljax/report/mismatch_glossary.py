"""Meanings of the metrics of sampler against trainer: a part of rljax.report.glossary."""

# fmt: off
SHARE = "share"
OTHER_POLICY = (
    "sampler and trainer are different policies: stale weights, temperature, or precision"
)

# The most of both that is healthy, by the narrowest numbers that a run computes with or holds.
LARGEST_DIFFERENCE = {
    "abs_logprob_diff_mean": {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.05, "int8": 0.1},
    "abs_logprob_diff_p99": {"float32": 1e-2, "float16": 0.05, "bfloat16": 0.3, "int8": 0.6},
}
BY_NUMBERS = (
    "a run warns above what its narrowest numbers explain (docs/guides/mismatch.md, Numbers)"
)

MISMATCH = {
    "mismatch_kl": ("KL from the sampler's to the trainer's log-probs of the same tokens",
                    "nats per token", (-0.1, 0.1, OTHER_POLICY)),
    "mismatch_k3_kl": ("KL between sampler and trainer by an estimate that is never negative",
                       "nats per token", (0.0, 0.1, OTHER_POLICY)),
    "mismatch_chi2_token": ("mean squared ratio of trainer to sampler, minus 1, per token", "",
                            "near 0"),
    "mismatch_chi2_seq": ("mean squared ratio of trainer to sampler, minus 1, per sequence", "",
                          "below 1"),
    "mismatch_training_ppl": ("perplexity of the samples by the trainer", "choices",
                              "equals rollout_ppl"),
    "mismatch_training_log_ppl": ("log perplexity of the samples by the trainer", "nats",
                                  "equals rollout_log_ppl"),
    "mismatch_rollout_ppl": ("perplexity of the samples by the sampler", "choices", ""),
    "mismatch_rollout_log_ppl": ("log perplexity of the samples by the sampler", "nats", ""),
    "mismatch_log_ppl_diff": ("trainer's log perplexity minus the sampler's", "nats", "near 0"),
    "mismatch_log_ppl_abs_diff": ("size of the difference of the log perplexities, mean over "
                                  "sequences", "nats", "near 0"),
    "mismatch_log_ppl_diff_max": ("trainer's log perplexity minus the sampler's, highest", "nats",
                                  "below 0.1"),
    "mismatch_log_ppl_diff_min": ("trainer's log perplexity minus the sampler's, lowest", "nats",
                                  "above -0.1"),
    "mismatch_ppl_ratio": ("trainer's perplexity over the sampler's", "ratio", "near 1"),
    "eff_sample_size": ("share of the tokens that carry an update in which each weighs as the "
                        "trainer's probability of it over the sampler's", SHARE,
                        (0.8, 1.0, OTHER_POLICY)),
    "probability_correlation": ("correlation of the sampler's and the trainer's probabilities",
                                "-1 to 1", (0.99, 1.0, "sampler and trainer disagree about "
                                "probabilities: float32 output head on both sides, and the same "
                                "model options")),
    "probability_diff_mean": ("difference of the probabilities, mean", SHARE, "below 0.01"),
    "probability_diff_max": ("difference of the probabilities, largest", SHARE, "below 0.3"),
    "probability_diff_std": ("difference of the probabilities, spread", SHARE, "below 0.01"),
    "abs_logprob_diff_mean": ("difference of the log-probs, mean size", "nats", BY_NUMBERS),
    "abs_logprob_diff_p99": ("size of the difference of the log-probs that 99 % of the tokens stay "
                             "below", "nats", BY_NUMBERS),
    "abs_logprob_diff_max": ("difference of the log-probs, largest", "nats", "below 1"),
    "rollout_is_mean": ("mean correction weight, before its bounds", "ratio",
                        (0.8, 1.25, "the weights should average to 1: compare temperature and "
                         "precision of sampler and trainer")),
    "rollout_is_eff_sample_size": ("share of the tokens that carry the update", SHARE,
                                   (0.8, 1.0, "few tokens carry the update: raise upper, use "
                                    "level='geometric', or update on fresher samples")),
    "rollout_is_veto_fraction": ("sequences dropped for a token that the trainer finds impossible",
                                 SHARE, (0.0, 0.05, "whole sequences are dropped: look for tokens "
                                 "that the trainer finds nearly impossible (top-p or stop handling "
                                 "of the sampler), or lower veto")),
    "rollout_is_catastrophic_token_fraction": (
        "sampled tokens that the trainer finds nearly impossible", SHARE,
        (0.0, 0.01, "the trainer finds sampled tokens nearly impossible: check tokenizer, chat "
         "template and the weights the sampler holds")),
    "rollout_is_masked_fraction": ("tokens whose weight left its bounds", SHARE,
                                   (0.0, 0.3, "mask mode drops many tokens: widen lower and upper, "
                                    "or use mode='truncate'")),
    "rollout_is_seq_masked_fraction": ("sequences with a token whose weight left its bounds", SHARE,
                                       "below 0.3"),
    "rollout_is_batch_norm_factor": ("mean weight that the weights were divided by", "ratio",
                                     "near 1"),
    "rollout_is_std": ("spread of the weights of tokens, within their bounds", "ratio",
                       "near 0"),
    "rollout_is_seq_std": ("spread of the weights of sequences", "ratio", "below 1"),
    "rollout_is_p*": ("weight that {} % of the tokens stay below", "ratio", "near 1"),
    "rollout_is_*_applied": ("{} weight after bounds and rejection", "ratio", "within the bounds"),
    "rollout_is_ratio_fraction_*": ("tokens whose weight is too {}", SHARE, "near 0"),
    "rollout_is_seq_fraction_*": ("sequences whose weight is too {}", SHARE, "near 0"),
    "rollout_is_seq_max_deviation": ("largest distance of a sequence's weight from 1", "ratio",
                                     "below 1"),
    "rollout_is_seq_*": ("weights of sequences before their bounds: {}", "ratio", "near 1"),
    "rollout_is_*": ("weights of tokens before their bounds: {}", "ratio", "near 1"),
    "rollout_rs_masked_fraction": ("tokens rejected by the rules of `reject`", SHARE,
                                   (0.0, 0.3, "rejection drops many tokens: widen the bounds in "
                                    "reject")),
    "rollout_rs_seq_masked_fraction": ("sequences with a rejected token", SHARE, "below 0.3"),
    "rollout_rs_*": ("rejection statistic {}", "", "within the rule's bounds"),
}
