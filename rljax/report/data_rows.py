"""The data of a run as the model reads them: rows with the learned tokens marked, and what ends
a turn."""

from collections.abc import Mapping

from rljax.report.run_folder import RecordedRun, is_number
from rljax.tracking.charts import escaped

_PERCENTILES = ("50 %", "90 %", "99 %", "longest")


def data_rows(run: RecordedRun) -> str:
    """Returns the section about the data, by data.json; "" for a run that has none."""
    notes = [note for note in _list(run.data.get("notes")) if isinstance(note, str)]
    rows = [row for row in _list(run.data.get("rows")) if isinstance(row, Mapping)]
    if not notes and not rows:
        return ""
    items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    texts = "".join(map(_row, rows))
    title = "The data as the model reads them"
    legend = (
        '<p class="dim">What is learned is marked; special tokens are shown.</p>' if rows else ""
    )
    return (
        f"<details><summary>{title}</summary><ul>{items}</ul>{_lengths(run.data.get('lengths'))}"
        f"{legend}{texts}</details>"
    )


def _list(value: object) -> list:
    return value if isinstance(value, list) else []


def _row(row: Mapping) -> str:
    """One row: its title, its fields, and its text with what is learned marked."""
    parts = []
    for piece in _list(row.get("pieces")):
        text, learned = piece if isinstance(piece, list) and len(piece) == 2 else (piece, False)
        text = escaped(str(text))
        parts.append(f"<mark>{text}</mark>" if learned is True else text)
    title = f"{row.get('title', 'row')}: {row.get('tokens', '?')} tokens"
    fields = row.get("fields")
    pairs = fields.items() if isinstance(fields, Mapping) else ()
    details = "; ".join(f"{name} = {value}" for name, value in pairs)
    return (
        f'<p class="dim">{escaped(title)}{escaped(f"; {details}" if details else "")}</p>'
        f'<pre class="text">{"".join(parts)}</pre>'
    )


def _lengths(lengths: object) -> str:
    """A table of lengths in tokens."""
    if not isinstance(lengths, Mapping) or not lengths:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("", *_PERCENTILES))
    body = "".join(
        f"<tr><th>{escaped(str(name))}</th>"
        + "".join(f"<td>{value:,}</td>" for value in _list(values) if is_number(value))
        + "</tr>"
        for name, values in lengths.items()
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
