"""Rewards in a file without JAX: a worker that imports another helper imports it, for seconds."""


def digits_in_order(response, ground_truth) -> float:
    """The share of the digits that stand where they should."""
    return sum(a == b for a, b in zip(response, ground_truth, strict=False)) / len(ground_truth)


def always_right(response) -> float:
    return 1.0


def begins_even(response) -> float:
    """1 if the first character is an even digit: what follows it changes nothing."""
    return float(response[:1] in tuple("02468"))


def share(response, ground_truth) -> float:
    """The share of the letter; 1 more for a response of an even length: few groups are dead."""
    return response.count(ground_truth[:1]) / max(len(response), 1) + len(response) % 2
