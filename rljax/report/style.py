"""Parts that the pages share: one style sheet, light and dark, and the document around a body."""

import urllib.parse

from rljax.tracking.charts import escaped

CSS = """
:root { color-scheme: light dark; --bg: #fafaf9; --card: #fff; --ink: #1c1917; --dim: #78716c;
  --line: #e7e5e4; --span: #f5f0e6; --s0: #2563eb; --s1: #d97706; --s2: #059669; --s3: #9333ea;
  --s4: #64748b; --good: #15803d; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --bg: #171514; --card: #211f1d; --ink: #e7e5e4;
  --dim: #a8a29e; --line: #383432; --span: #2b2722; --s0: #7ab0ff; --s1: #fbbf24; --s2: #4ade80;
  --s3: #c99bff; --s4: #a3b3c9; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 60px; max-width: 1180px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p { margin: 4px 0; } .dim { color: var(--dim); } code, pre, .text { font-family: ui-monospace,
  "SF Mono", Menlo, Consolas, monospace; font-size: 12.5px; }
.facts span { display: inline-block; margin-right: 16px; color: var(--dim); }
.facts b, .keys b { color: var(--ink); font-weight: 600; }
.headline { background: var(--card); border: 1px solid var(--line);
  border-left: 5px solid var(--s4); border-radius: 8px; padding: 12px 18px; margin: 18px 0; }
.headline h2 { margin: 0; font-size: 1.35rem; } .headline.good { border-left-color: var(--good); }
.headline.bad { border-left-color: var(--bad); } .good .verdict { color: var(--good); }
.bad .verdict { color: var(--bad); } .interval { font-size: .8em; color: var(--dim);
  font-weight: 400; white-space: nowrap; }
.outside { font-size: 14px; } .outside ul { margin: 4px 0 14px; padding-left: 20px; }
.note { border-left: 3px solid var(--s1); padding-left: 10px; margin: 10px 0; }
.grid { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px 6px; display: flex; flex-direction: column; justify-content: space-between; }
figure.wide { margin-bottom: 12px; padding-bottom: 12px; } figcaption { font-size: 13px; }
figcaption .name { font-weight: 600; display: block; } figcaption .name .dim { font-weight: 400; }
.keys { display: block; font-size: 12px; color: var(--dim); margin: 2px 0 4px; }
.key { display: inline-block; margin-right: 12px; overflow-wrap: anywhere; }
.key i, th i {
  display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
svg { width: 100%; height: auto; display: block; } svg.shares { height: 20px; border-radius: 4px; }
svg text { font-size: 10px; fill: var(--dim); }
.end { text-anchor: end; } .mid { text-anchor: middle; } svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--dim); stroke-width: .8; }
svg .span { fill: var(--span); } svg .span-name { font-weight: 600;
  paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
svg polyline { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
svg .faint { stroke-width: 1; opacity: .32; } svg .band { opacity: .18; stroke-width: 2; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } .s4 { stroke: var(--s4); }
i.s0, .band.s0, .dot.s0, .bar.s0 { fill: var(--s0); background: var(--s0); }
i.s1, .band.s1, .dot.s1, .bar.s1 { fill: var(--s1); background: var(--s1); }
i.s2, .band.s2, .dot.s2, .bar.s2 { fill: var(--s2); background: var(--s2); }
i.s3, .band.s3, .dot.s3, .bar.s3 { fill: var(--s3); background: var(--s3); }
i.s4, .band.s4, .dot.s4, .bar.s4 { fill: var(--s4); background: var(--s4); }
svg .bar, svg .dot { stroke: none; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--dim); opacity: .18; }
svg.dash { display: inline-block; width: 18px; height: 4px; margin-right: 5px;
  vertical-align: middle; stroke-width: 2; }
figcaption .what { display: block; font-size: 12px; color: var(--dim); margin: 1px 0; }
.unhealthy { color: var(--bad); } a { color: var(--s0); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { font-weight: 600; }
tr:first-child th { color: var(--dim); font-weight: 400; }
table.origin th, table.origin td { white-space: normal; vertical-align: top; font-size: 13px;
  overflow-wrap: anywhere; }
table.origin th { min-width: 8em; }
table.texts th, table.texts td { white-space: normal; vertical-align: top; min-width: 6em; }
dt { font-weight: 600; font-size: 13px; overflow-wrap: anywhere; }
dd { margin: 0 0 8px; font-size: 13px; }
details.step { margin: 4px 0; } details.step > summary { font-weight: 400; font-size: 14px; }
.sample { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 12px; margin: 0 0 10px; } .sample .meta { font-size: 13px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; max-height: 22em;
  overflow: auto; }
.text.prompt { color: var(--dim); max-height: 9em; }
h3 { font-size: .95rem; margin: 16px 0 6px; }
.siblings { display: grid; gap: 10px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); }
.siblings > * { min-width: 0; }
.turn { display: grid; grid-template-columns: 3.4em 1fr; border-top: 1px solid var(--line); }
.turn > div { min-width: 0; } .turn .text { max-height: 16em; unicode-bidi: isolate; }
.margin { color: var(--dim); font-size: 12px; padding-top: 5px; }
.t { border-radius: 3px; background: color-mix(in srgb, var(--s0) 12%, transparent); }
.t:hover { outline: 1px solid var(--s0); } .p1 { background: color-mix(in srgb, var(--s0) 24%,
  transparent); } .p2 { background: color-mix(in srgb, var(--s0) 38%, transparent); }
.p3 { background: color-mix(in srgb, var(--s0) 55%, transparent); }
.t.f { background: none; border-bottom: 2px dashed var(--s4); border-radius: 0; }
.bad-call { border-left: 3px solid var(--bad); padding-left: 6px;
  background: color-mix(in srgb, var(--bad) 12%, transparent); }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; }
.of-prompt { margin: 0 0 18px; }
@media (max-width: 560px) { th { overflow-wrap: break-word; }
  table .interval { white-space: normal; display: block; }
  th, td { white-space: normal; padding-right: 8px; font-size: 13px; } }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
"""


def document(title: str, body: str) -> str:
    """Returns a whole page of HTML: no script, nothing that is loaded from elsewhere."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{CSS}</style></head><body>{body}</body></html>\n"
    )


def link(target: str, text: str) -> str:
    """Returns a link to a file, relative to the page; `text` is HTML. A colon in the name of a file
    is quoted, so that no name is read as an address."""
    quoted = urllib.parse.quote(target, errors="surrogateescape")
    return f'<a href="{escaped(quoted)}">{text}</a>'


def shortened(value: object, most: int, file: str) -> str:
    """Returns a value as text of at most `most` characters; then it says how many more are in
    `file`. It is not escaped."""
    text = "" if value is None else str(value)
    omitted = len(text) - most
    return text[:most] + (f" … {omitted} more characters are in {file}" if omitted > 0 else "")
