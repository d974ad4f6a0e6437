"""Estimates and tables as HTML, as all pages show them."""

from collections.abc import Sequence

from rljax.report.run_folder import Estimate
from rljax.tracking.charts import escaped, short


def shares(*estimates: Estimate) -> bool:
    """Returns whether all values and bounds lie in 0 to 1, so that they are shown in percent."""
    return all(0 <= v <= 1 for e in estimates for v in (e.value, e.low, e.high) if v is not None)


def shown(e: Estimate, as_share: bool, *, signed: bool = False) -> str:
    """Returns the value and its interval in percent (points for a difference), or as numbers."""

    def text_of(v: float) -> str:
        text = f"{100 * v:.1f}" if as_share else short(v)
        return f"+{text}" if signed and v > 0 else text

    unit = "" if not as_share else " points" if signed else " %"
    if e.low is None:
        return f"{text_of(e.value)}{unit}"
    return (
        f'{text_of(e.value)}{unit} <span class="interval">'
        f"[{text_of(e.low)}, {text_of(e.high)}]</span>"
    )


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    *,
    wraps: bool = False,
) -> str:
    """Returns a section with a table. Cells are HTML, the first of each row is its heading; the
    title, the headings of columns and the note are plain text. `wraps`: cells are sentences."""
    if not rows:
        return ""
    heading = f"<h2>{escaped(title)}</h2>" if title else ""
    caption = f'<p class="dim">{escaped(note)}</p>' if note else ""
    columns = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    kind = ' class="texts"' if wraps else ""
    return (
        f'<section>{heading}{caption}<div class="scroll"><table{kind}><tr>{columns}</tr>'
        f"{body}</table></div></section>"
    )
