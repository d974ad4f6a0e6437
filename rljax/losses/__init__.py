"""Losses: unreduced, per token [B, S], per row or per example. rljax.learn masks and averages.

A loss raises InputError where the batch lacks a field that it reads.
"""
