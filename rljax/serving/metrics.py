"""Counters of a worker in Prometheus' text format."""

import json
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Name in Worker.statistics(): (name for Prometheus, type, meaning).
COUNTERS = {
    "slots": ("slots", "gauge", "Samples that can decode at a time"),
    "slot_tokens": ("slot_tokens", "gauge", "Tokens of a slot, prompt and response together"),
    "pending_samples": ("pending_samples", "gauge", "Samples that decode or wait"),
    "room_samples": ("room_samples", "gauge", "Samples that may decode or wait"),
    "tokens": ("tokens_total", "counter", "Sampled tokens"),
    "slot_occupancy": ("slot_occupancy_ratio", "gauge", "Share of decode steps with a token"),
    "dispatches": ("dispatches_total", "counter", "Calls of the decode program"),
    "host_s": ("host_seconds_total", "counter", "Time in which the devices waited for the host"),
    "device_s": ("device_seconds_total", "counter", "Time of decoding on the devices"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "counter", "Prompts found in the cache"),
    "prefix_cache_reused_tokens": (
        "prefix_cache_reused_tokens_total",
        "counter",
        "Tokens that were not read again",
    ),
    "pages/occupancy": ("pages_used_ratio", "gauge", "Share of the pages in use, mean"),
    "pages/occupancy_max": ("pages_used_max_ratio", "gauge", "The same, at most"),
    "pages/fill": ("pages_filled_ratio", "gauge", "Tokens held by those of the pages in use"),
    "pages/shared": ("pages_shared_ratio", "gauge", "Pages in use that several samples read"),
    "pages/preemptions": (
        "preemptions_total",
        "counter",
        "Samples that were taken out of their slots for pages",
    ),
    "drafts/kept": ("drafts_kept_ratio", "gauge", "Share of the drafted tokens that were kept"),
    "drafts/tokens_per_step": (
        "tokens_per_step_ratio",
        "gauge",
        "Tokens that a step of a slot gave, mean",
    ),
    "version": ("parameters_version", "gauge", "Version of the parameters"),
}


def prometheus_text(statistics: Mapping[str, float]) -> str:
    """Returns one family of metrics for each counter of Worker.statistics()."""
    lines = []
    for key, value in statistics.items():
        name, kind, meaning = COUNTERS[key]
        lines += [
            f"# HELP rljax_{name} {meaning}",
            f"# TYPE rljax_{name} {kind}",
            f"rljax_{name} {json.dumps(value)}",
        ]
    return "\n".join([*lines, ""])
