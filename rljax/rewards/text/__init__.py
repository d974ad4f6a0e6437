"""Rewards of the text itself: form, style, length, rules."""
