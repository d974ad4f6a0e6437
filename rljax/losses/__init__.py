"""Losses: unreduced, per token [B, S] or per row [B]. Nothing here masks, averages or runs a
model."""
