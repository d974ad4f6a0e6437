"""Rewards that compare a final answer: numbers, expressions, lists, JSON."""
