"""Prompts to sample from: records, loaders, streams, curricula."""
