"""The verdicts of two published rules, for tests/rewards/verdicts.jsonl, where ours are tested.

A line of that file is [reward, reference, response, right, math-verify, verl]. The first four were
written and judged by hand; `python tests/helpers/published_verdicts.py` fills in the last two: what
math-verify's own `verify(parse(reference), parse(response))` says, and verl's rule for the kind of
data (math_reward, gsm8k's strict method), null where they have none.
"""

import json
from pathlib import Path

VERDICTS = Path(__file__).resolve().parent.parent / "rewards" / "verdicts.jsonl"


def rows() -> list[list]:
    return [json.loads(line) for line in VERDICTS.read_text(encoding="utf-8").split("\n") if line]


def verl_verdict(reward: str, reference: str, response: str) -> int | None:
    """The verdict of verl's rule; None where it has none for this kind of answer."""
    if reward == "gsm8k":
        from rljax.rewards import gsm8k

        return int(gsm8k(response, reference, method="strict"))
    return verl_math(response, reference) if reward in ("math_verify", "boxed") else None


def math_verify_verdict(reward: str, reference: str, response: str) -> int | None:
    if reward not in ("math_verify", "boxed", "gsm8k"):
        return None
    from math_verify import parse, verify

    return int(verify(parse(f"${reference}$"), parse(response)))


# -- verl's math_reward: the rule of MATH's authors (Hendrycks et al., arXiv 2103.03874) --------


def verl_math(response: str, reference: str) -> int:
    try:
        answer = _without_box(_last_box(response))
        return int(_equivalent(answer, reference))
    except (AssertionError, AttributeError, IndexError, TypeError):
        return 0


def _last_box(text: str) -> str | None:
    if "\\boxed " in text:
        return "\\boxed " + text.split("\\boxed ")[-1].split("$")[0]
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox") if "\\boxed" not in text else -1)
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return None


def _without_box(text: str) -> str:
    if "\\boxed " in text:
        return text.removeprefix("\\boxed ")
    assert text.startswith("\\boxed{") and text.endswith("}")
    return text[len("\\boxed{") : -1]


def _equivalent(one: str, other: str) -> bool:
    try:
        return _stripped(one) == _stripped(other)
    except (AssertionError, IndexError):
        return one == other


def _stripped(text: str) -> str:
    for removed in ("\n", "\\!"):
        text = text.replace(removed, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(removed, "")
    if "\\text{ " in text:
        before, _ = text.split("\\text{ ")
        text = before
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    text = _fractions(_roots(text).replace(" ", ""))
    return _slash("\\frac{1}{2}" if text == "0.5" else text)


def _roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    parts = [f"{{{part[0]}}}{part[1:]}" if part[0] != "{" else part for part in rest]
    return "\\sqrt".join([first, *parts])


def _fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    done = first
    for part in rest:
        if part[0] != "{":
            if len(part) < 2:
                return text
            lower = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            part = f"{{{part[0]}}}{lower}"
        done += "\\frac" + part
    return done


def _slash(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        upper, lower = map(int, parts)
    except ValueError:
        return text
    return f"\\frac{{{upper}}}{{{lower}}}" if text == f"{upper}/{lower}" else text


if __name__ == "__main__":
    lines = []
    for reward, reference, response, right, *_ in rows():
        key = reward, reference, response
        row = [*key, right, math_verify_verdict(*key), verl_verdict(*key)]
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    VERDICTS.write_text("".join(lines), encoding="utf-8")
