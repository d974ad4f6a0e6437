"""The episodes of a run as HTML: what was read and written, turn by turn and token by token.

Rows are those of rljax.tracking.episodes. Tokens that the policy chose are shaded, the darker the
less likely; forced ones have a dashed line; text that the policy only read is grey; a turn with a
call that could not be parsed is red. Every text is escaped.
"""

import math
import re
from collections.abc import Mapping, Sequence

from rljax.report.run_folder import RecordedRun, is_number, rows_by_step
from rljax.report.style import shortened
from rljax.tracking.charts import escaped, short

MOST_STEPS = 12  # of the fold
MOST_GROUPS = 4  # shown side by side
MOST_MARKED = 20_000  # tokens of the page that have numbers of their own
MOST_CHARACTERS = 4000  # of an observation
SHADES = (-0.05, -0.7, -2.3)  # log-probs: below the last one, fewer than one in ten
# What would move the text around it, or shows nothing: controls, and marks of direction.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
LEGEND = (
    '<p class="dim">Shaded: chosen by the policy, <span class="t p0">likely</span> '
    '<span class="t p1">to</span> <span class="t p2">un</span><span class="t p3">likely</span>; '
    '<span class="t f">dashed</span>: forced; grey: read, not learned from; '
    '<span class="bad-call">red</span>: a call that could not be parsed. Point at a token for its '
    "id, log-prob and the version of the weights. On the left: the turn and its reward.</p>"
)


def transcripts(run: RecordedRun) -> str:
    """Returns the section about episodes; "" for a run that recorded none."""
    steps = rows_by_step(run.episodes)
    if not steps:
        return ""
    budget = _Budget(MOST_MARKED)
    newest, *older = sorted(steps, reverse=True)
    body = _of_step(steps[newest], budget)
    folds = "".join(_fold(step, steps[step], budget) for step in older[:MOST_STEPS])
    omitted = len(older) - MOST_STEPS
    more = f'<p class="dim">{omitted} more steps are in episodes.jsonl.</p>' if omitted > 0 else ""
    title = f'<h2>Episodes <span class="dim">of step {short(newest)}</span></h2>'
    return f"<section>{title}{LEGEND}{body}{folds}{more}</section>"


class _Budget:
    """Number of tokens that the page may still mark one by one."""

    def __init__(self, left: int):
        self.left = left

    def take(self, count: int) -> int:
        granted = min(self.left, count)
        self.left -= granted
        return granted


def _of_step(rows: Sequence[Mapping], budget: _Budget) -> str:
    """The ends and the failures of a step, then whole groups."""
    out, shown = [], set()
    for title, row in _picked(rows):
        repeated = id(row) in shown
        shown.add(id(row))
        card = f'<p class="dim">the one above: {_name(row)}</p>' if repeated else _card(row, budget)
        out.append(f"<h3>{title}</h3>{card}")
    groups: dict[object, list[Mapping]] = {}
    for row in rows:
        groups.setdefault(str(row.get("group")), []).append(row)
    siblings = [group for group in groups.values() if len(group) > 1]
    for group in siblings[:MOST_GROUPS]:
        cards = "".join(_card(row, budget) for row in group)
        name = _text(group[0].get("group"))
        out.append(f'<h3>Group {name}</h3><div class="siblings">{cards}</div>')
    return "".join(out)


def _picked(rows: Sequence[Mapping]) -> list[tuple[str, Mapping]]:
    """(title, episode): the best, the worst, the longest, and one of each kind of failure."""
    scored = [row for row in rows if row.get("status") == "ok" and _is_finite(row.get("return"))]
    out = []
    if scored:
        out = [
            ("Best", max(scored, key=lambda row: row["return"])),
            ("Worst", min(scored, key=lambda row: row["return"])),
        ]
    out.append(("Longest", max(rows, key=_tokens)))
    kinds = {_text(row.get("status")): row for row in rows if row.get("status") != "ok"}
    return out + [(f"Failed: {kind}", kinds[kind]) for kind in sorted(kinds)]


def _fold(step: float, rows: Sequence[Mapping], budget: _Budget) -> str:
    returns = [row["return"] for row in rows if _is_finite(row.get("return"))]
    spread = f", return {short(min(returns))} to {short(max(returns))}" if returns else ""
    title = f"step {short(step)}: {len(rows)} episode{'s' if len(rows) > 1 else ''}{spread}"
    body = "".join(_card(row, budget) for row in {id(r): r for _, r in _picked(rows)}.values())
    return f'<details class="step"><summary>{title}</summary>{body}</details>'


def _card(row: Mapping, budget: _Budget) -> str:
    """One episode: a line of facts, then its turns."""
    turns = [turn for turn in _list(row, "turns") if isinstance(turn, Mapping)]
    end = f"ended by {_text(row.get('finish'))}"
    if row.get("status") != "ok":
        end = f'<span class="unhealthy">failed: {_text(row.get("status"))}</span>'
    notes = [end, f"{len(turns)} turn{'s' if len(turns) != 1 else ''}", f"{_tokens(row)} tokens"]
    total = f"return {_number(row.get('return'))}"
    body = "".join(_turn(i, turn, budget) for i, turn in enumerate(turns, start=1))
    message = _text(row.get("message"))
    body += f'<pre class="unhealthy">{message}</pre>' if message else ""
    return (
        f'<div class="sample episode"><div class="meta"><b>{total}</b> <span class="dim">'
        f"{_name(row)} · {' · '.join(notes)}</span></div>{body}</div>"
    )


def _name(row: Mapping) -> str:
    seat = f", seat {_text(row.get('seat'))}" if row.get("seat") else ""
    return f"episode {_text(row.get('episode'))} of group {_text(row.get('group'))}{seat}"


def _turn(number: int, turn: Mapping, budget: _Budget) -> str:
    reward = turn.get("reward")
    margin = f"{number}" + (f"<br>{_number(reward, signed=True)}" if reward else "")
    observation = _text(turn.get("observation"))
    wrong = " bad-call" if turn.get("bad") is True else ""
    return (
        f'<div class="turn"><div class="margin">{margin}</div><div>'
        f'<div class="text prompt">{observation}</div>'
        f'<div class="text reply{wrong}">{_reply(turn, budget)}</div></div></div>'
    )


def _reply(turn: Mapping, budget: _Budget) -> str:
    """The tokens of a reply, each with its numbers; the text alone once the page has enough."""
    pieces = _list(turn, "pieces")
    count = budget.take(len(pieces))
    if not pieces:
        return _text(turn.get("text"))
    columns = [_list(turn, name) for name in ("tokens", "logprobs", "chosen", "versions")]
    marked = [
        _token(piece, *(column[i] if i < len(column) else None for column in columns))
        for i, piece in enumerate(pieces[:count])
    ]
    return "".join(marked) + _text("".join(map(str, pieces[count:])))


def _token(piece: object, number: object, logprob: object, chosen: object, version: object) -> str:
    has_logprob = _is_finite(logprob)
    shade = sum(logprob < bound for bound in SHADES) if has_logprob else len(SHADES)
    notes = [f"id {_text(number)}"]
    if has_logprob:
        notes.append(f"log-prob {logprob:.3f}, p {100 * math.exp(min(logprob, 0)):.1f} %")
    notes += [] if version is None else [f"version {_text(version)}"]
    notes += [] if chosen else ["forced"]
    name = f"t p{shade}" if chosen else "t f"
    text = _text(piece) or f"⟨{_text(number)}⟩"
    return f'<span class="{name}" title="{", ".join(notes)}">{text}</span>'


def _text(value: object) -> str:
    """A value as text of the page: escaped, without characters that move others."""
    text = shortened(value, MOST_CHARACTERS, "episodes.jsonl")
    return escaped(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text))


def _number(value: object, *, signed: bool = False) -> str:
    if not is_number(value):
        return "none"
    return ("+" if signed and value > 0 else "") + escaped(short(value))


def _list(row: Mapping, name: str) -> list:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _tokens(row: Mapping) -> int:
    turns = (turn for turn in _list(row, "turns") if isinstance(turn, Mapping))
    return sum(len(_list(turn, "tokens")) for turn in turns)


def _is_finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)
