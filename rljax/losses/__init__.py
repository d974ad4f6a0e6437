"""Losses: unreduced, per token [B, S], per row or per example. rljax.learn masks and averages."""
