"""Numbers with units, for people. It imports nothing, so that errors can be shown at once."""


def human_bytes(count: float) -> str:
    """Returns a number of bytes for people: 512 B, 90 kB, 0.776 MB, 20.5 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e5, "MB")):
        if count >= unit:
            return f"{count / max(unit, 1e6):.3g} {name}"
    return f"{count / 1e3:.3g} kB" if count >= 1e3 else f"{count:.0f} B"


def human_count(count: float) -> str:
    """Returns a number of things for people, to four digits: 109,400, 7,242,000,000."""
    return f"{float(f'{count:.4g}'):,.0f}"


def interval_text(estimate: dict) -> str:
    """Returns a value with its interval: "0.500 [0.400, 0.600]"."""
    return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**estimate)
