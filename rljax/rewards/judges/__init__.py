"""Rewards that ask a model: judges, rubrics, and the client of their endpoints."""
