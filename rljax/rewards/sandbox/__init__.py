"""Untrusted programs in a process of their own, by the strongest isolation the host has."""
