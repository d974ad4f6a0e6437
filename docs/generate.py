"""Writes the pages of docs/ that say what the code says: `python docs/generate.py`.

reference/ (config, features, metrics, commands, components, api), guides/errors.md, and in methods/
the paper index with a page for each family of presets. tests/test_site.py holds the
committed pages against what this writes; `--check` prints those that are not current.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REPO = DOCS.parent
sys.path[:0] = [str(DOCS), str(REPO)]

from error_list import GAP, Listed, listed_errors  # noqa: E402

import rljax  # noqa: E402
from rljax.command.commands import COMMANDS  # noqa: E402
from rljax.config import NAMESPACES, Config, changed_fields, field_names, value_of  # noqa: E402
from rljax.config.checks import components_of  # noqa: E402
from rljax.config.declare import declared, shown_default  # noqa: E402
from rljax.config.describe import type_text, value_text  # noqa: E402
from rljax.config.flags import load_config_file  # noqa: E402
from rljax.config.schema import FIELDS  # noqa: E402
from rljax.metric import Metric  # noqa: E402
from rljax.setup.features import EXCLUDES, FEATURES, NEEDS  # noqa: E402
from rljax.setup.role_table import ROLES  # noqa: E402

HEAD = "<!-- Written by docs/generate.py from the code: edit the code, then run it again. -->\n"
PAPER = re.compile(r"(?<![\d./])(\d{4}\.\d{4,5})(?![\d.])")

# The families of the presets: (file, title, what they have in common, their dataflows).
FAMILIES = (
    (
        "groups",
        "Groups of samples, no critic",
        "Several responses to each prompt; a response is better or worse than its siblings.",
        ("grpo", "reinforce", "remax"),
    ),
    (
        "critic",
        "With a critic",
        "A value model says what to expect from each token on; the advantage is what came "
        "beyond it.",
        ("ppo", "vapo", "pf_ppo", "safe_rlhf", "prime"),
    ),
    (
        "preferences",
        "Preferences between samples",
        "The policy's own samples are compared, and pairs or games are learned from.",
        ("online_dpo", "sppo", "xpo", "nash_md"),
    ),
    (
        "selection",
        "Imitation of samples and of teachers",
        "What is good is imitated: the best samples, what a search visited, a teacher's tokens.",
        ("raft", "expert_iteration", "distil", "on_policy_distil", "cgpo"),
    ),
)

# Where components are named that are not the whole text of a field.
NAMED_BY = {
    "tool": "`functions` of `tools(...)`",
    "preference": "`preference` of the dataflows that compare samples",
    "constrained": "`optimizer` of the dataflow `cgpo`",
    "hint": "`hint` of the rollout `with_hint`",
    "search": "`method` of the rollouts that search, `rljax evaluate --search`",
}


# -- text to Markdown --


def prose(text: str) -> str:
    """Plain text as Markdown that shows it as it is: signs are escaped outside of code spans."""
    parts = re.split(r"(`[^`]+`)", text)

    def plain(part):
        return re.sub(r"([*<\[\]|])", r"\\\1", part).replace("\\<", "&lt;")

    return "".join(part if part.startswith("`") else plain(part) for part in parts)


def cell(text: str) -> str:
    """Text as one cell of a table."""
    return prose(" ".join(text.split())).replace("`|`", "`or`")


def linked(text: str) -> str:
    """Markdown whose arXiv numbers are links."""
    return PAPER.sub(r"[\1](https://arxiv.org/abs/\1)", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def page(title: str, about: str, *lines: str) -> str:
    text = "\n".join([f"# {title}", "", HEAD.strip(), "", about, "", *lines])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def first_line(function) -> str:
    """The docstring's first paragraph; of a page without one, that of its module."""
    doc = inspect.getdoc(function) or inspect.getmodule(function).__doc__ or ""
    return doc.partition("\n\n")[0]


# -- reference --


def config_page() -> str:
    lines = []

    def section(node, prefix: str) -> None:
        rows, inner = [], []
        for field in dataclasses.fields(node):
            value, name = getattr(node, field.name), prefix + field.name
            if dataclasses.is_dataclass(value):
                inner.append((value, name))
                continue
            text = field.metadata["spec"].help
            kind = type_text(field.type).replace(" | ", " or ")
            rows.append((f"`{name}`", kind, f"`{value_text(value)}`", cell(text)))
        if rows:
            lines.extend(table(("field", "type", "default", "meaning"), rows))
        for value, name in inner:
            lines.extend(["", f"## {name}", "", prose(inspect.cleandoc(type(value).__doc__)), ""])
            section(value, f"{name}.")

    section(Config(), "")
    return page(
        "Config fields",
        "Every field of [`rljax/config/schema.py`](../../rljax/config/schema.py), as a flag "
        "`--config.FIELD=VALUE`, a line of a config in YAML or JSON, or an attribute of "
        "`rljax.Config()`. `''`, `0` and `()` mean off, unless the meaning says otherwise. Names "
        "of functions are in [components](components.md).",
        *lines,
    )


# The sections of the page of metrics: (title, about, the modules that declare them). A module is of
# the section with the longest name that it begins with.
METRIC_SECTIONS = (
    (
        "Of an update",
        "Also with a prefix: of another role (`critic/`, `NAME/`), of held-out rows (`eval/`).",
        ("learn", "roles", "models", "losses", "dataflows.sft", "dataflows.prime"),
    ),
    (
        "Of the samples of a step",
        "",
        ("rollout", "learn.metrics", "dataflows", "shaping", "rewards", "roles.state"),
    ),
    ("Of the run", "", ("",)),
    ("Sampler against trainer", "See [mismatch](../guides/mismatch.md).", ("correction",)),
    (
        "In flight",
        "See [asynchronous](../guides/asynchronous.md).",
        ("rollout.flight", "rollout.players.responses_in_flight"),
    ),
    (
        "Of environments",
        "See [environments](../guides/environments.md).",
        ("rollout.players.episodes", "dataflows.self_play"),
    ),
)


def metric_tables() -> dict[str, dict[str, Metric]]:
    """{module without "rljax.": the metrics that it declares}."""
    tables = {}
    for found in pkgutil.walk_packages(rljax.__path__, "rljax."):
        if not found.name.endswith("__main__"):
            declared = vars(importlib.import_module(found.name)).get("METRICS", {})
            tables[found.name.removeprefix("rljax.")] = declared
    return tables


def metric_rows(metrics: dict[str, Metric]) -> list:
    rows = []
    for name, metric in metrics.items():
        healthy = metric.healthy
        if metric.limits is not None:
            healthy += f"; a run warns outside: {metric.advice}"
        meaning = cell(metric.meaning.replace("{}", "…"))
        rows.append((f"`{name}`", meaning, cell(metric.unit), cell(healthy)))
    return rows


def metrics_page() -> str:
    homes = {home: title for title, _, modules in METRIC_SECTIONS for home in modules}
    sections: dict[str, dict[str, Metric]] = {title: {} for title, *_ in METRIC_SECTIONS}
    for module, metrics in metric_tables().items():
        home = max((home for home in homes if module.startswith(home)), key=len)
        sections[homes[home]] |= metrics
    lines = []
    for title, about, _ in METRIC_SECTIONS:
        head = ("metric", "meaning", "unit", "healthy")
        lines += [f"## {title}", "", about, "", *table(head, metric_rows(sections[title])), ""]
    return page(
        "Metrics",
        "What `metrics.jsonl`, the trackers and the report name, and what is healthy: rules of "
        "thumb, or a range outside of which a run warns. `*` stands for anything. Each is declared "
        "in the module that makes it. Metrics of your own parts have no line here: declare them "
        "[in their contract](../extend/loss.md), and the report explains them as these.",
        *lines,
    )


def commands_page() -> str:
    lines = [
        "A command that takes a config takes every [field](config.md) as `--config.FIELD=VALUE`, "
        "too, and `--print_config`. In a clone `python launchers/train.py` is `rljax train`.",
        "",
    ]
    for name, command in COMMANDS.items():
        rows = []
        for field, spec in declared(command.options).items():
            default = shown_default(getattr(command.options, field))
            written = spec.flag.upper() if spec.positional else f"--{spec.flag}"
            shown = f"`{default}`" if default else ""
            rows.append((f"`{written}`", shown, cell(spec.help_text)))
        takes = {"": "none", "needed": "needed", "optional": "may be given"}
        config = takes.get(command.config, f"`{command.config}` where none is given")
        lines += [f"## rljax {name}", "", f"{prose(command.about)}. Config: {config}.", ""]
        lines += ["```text", command.doc(), "```", ""]
        if rows:
            lines += [*table(("flag", "default", "what it is for"), rows), ""]
    return page("Commands", "What `rljax COMMAND --help` says, from the same source.", *lines)


def signature_of(function) -> str:
    """The options of a component and their defaults, without the roles that it may get."""
    parameters = inspect.signature(function).parameters.values()
    parameters = [p for p in parameters if p.name not in ROLES]
    options = [p for p in parameters if p.default is not p.empty and p.default is not None]
    unset = [p for p in parameters if p.default is None]
    texts = [f"{p.name}={p.default!r}" for p in options] + [f"{p.name}=None" for p in unset]
    return ", ".join(texts)


def components() -> dict[str, list]:
    """{namespace: its functions} that a config can name by a bare name."""
    out = {}
    for space, home in NAMESPACES.items():
        module = importlib.import_module(home)
        out[space] = [getattr(module, name) for name in sorted(components_of(home))]
    return out


def components_page() -> str:
    lines = []
    for space, functions in components().items():
        fields = [f"`{n}`" for n, spec in FIELDS.items() if space in (spec.component, spec.holds)]
        where = ", ".join(fields) or NAMED_BY[space]
        lines += [f"## {space}", "", f"Named by {where}; functions of `{NAMESPACES[space]}`.", ""]
        rows = []
        for function in functions:
            name, options = function.__name__, signature_of(function)
            about = linked(cell(first_line(function)))
            rows.append((f"`{name}`", f"`{options}`" if options else "", about))
        lines += [*table(("name", "options and their defaults", "what it does"), rows), ""]
    return page(
        "Components",
        "Every function of rljax that a config can name, by its first sentence; its docstring has "
        "the formula. A component is written as a call with options, `ppo_clip(clip_high=0.28)`, "
        "and your own function goes in its place by module or file "
        "([extend](../extend/index.md)).",
        *lines,
    )


def reason(text: str) -> str:
    """The reason or the fix of a rule, without what only a config knows."""
    return re.sub(r"\{\w+!r\}", GAP, text)


def features_page() -> str:
    numbers = {name: str(i) for i, name in enumerate(FEATURES, 1)}
    excluded = {frozenset((rule.a, rule.b)) for rule in EXCLUDES}
    needed = {(rule.a, rule.b) for rule in NEEDS}
    columns = [name for name in FEATURES if name in {rule.b for rule in (*EXCLUDES, *NEEDS)}]
    rows = []
    for name, feature in FEATURES.items():
        cells = [
            "no" if {name, other} in excluded else "needs" if (name, other) in needed else ""
            for other in columns
        ]
        fields = ", ".join(f"`{field}`" for field in feature.fields)
        rows.append((numbers[name], name, fields, *cells))
    reasons = [
        (rule.a, word, rule.b, cell(reason(rule.why)), cell(reason(rule.fix)))
        for rules, word in ((EXCLUDES, "not with"), (NEEDS, "needs"))
        for rule in rules
    ]
    return page(
        "What goes with what",
        "The features of a run, each with the fields that turn it on, often because "
        "the function that it names [declares](../extend/rollout.md) it: yours too. Two features "
        "go together unless their cell says `no`; `needs` is what the feature of the row needs. "
        "A column is the feature of that number. A config with an excluded pair is refused before "
        "anything loads; images, once the data is read.",
        *table(("", "feature", "field", *(numbers[name] for name in columns)), rows),
        "",
        "## Why",
        "",
        *table(("feature", "", "feature", "why", "what to do"), reasons),
    )


def api_page() -> str:
    lines = []
    for name in rljax.__all__:
        member = getattr(rljax, name)
        try:
            signature = f"{name}{inspect.signature(member)}"
        except (TypeError, ValueError):
            signature = name
        signature = re.sub(r"<[^>]* at 0x[0-9a-f]+>|<factory>", "...", signature)
        signature = re.sub(r"\b(?:rljax|collections|jaxlib)(?:\.\w+)*\.(?=\w)", "", signature)
        doc = inspect.getdoc(member) or ""
        if name == "Config":
            signature, doc = "Config(**fields)", f"{doc} Fields: reference/config.md."
        lines += [f"## rljax.{name}", "", "```text", *textwrap.wrap(signature, 100), "```", ""]
        lines += ["```text", doc, "```", ""]
        if inspect.isclass(member) and not dataclasses.is_dataclass(member):
            continue
        methods = [
            (n, f)
            for n, f in vars(member).items()
            if inspect.isclass(member)
            and not n.startswith("_")
            and (inspect.isfunction(f) or isinstance(f, classmethod))
            and inspect.getdoc(f)
            and not hasattr(object, n)
        ]
        if methods:
            rows = [(f"`{n}`", cell(first_line(f))) for n, f in methods]
            lines += [*table(("method", "what it does"), rows), ""]
    return page(
        "API",
        "The public names of `import rljax`; they are imported when they are first used. The rest "
        "is imported from its room, as [architecture](../architecture.md) lists them.",
        *lines,
    )


# -- errors --


def errors_page() -> str:
    rooms = listed_errors(REPO / "rljax")
    of_features = {
        Listed(field, reason(rule.why), reason(rule.fix))
        for rule in (*EXCLUDES, *NEEDS)
        for field in FEATURES[rule.a].fields
    }
    rooms["validation"] = sorted({*rooms["validation"], *of_features})
    lines = []
    for room, errors in rooms.items():
        rows = [tuple(cell(text) for text in dataclasses.astuple(error)) for error in errors]
        lines += [f"## {room}", "", *table(("it says", "rule", "fix"), rows), ""]
    return page(
        "Errors",
        "What a user can get wrong raises `rljax.InputError`: what is wrong, the value, the rule, "
        "and the fix; commands print it without a traceback and end with exit code 2. These are "
        "its texts by the room that raises them, `…` standing for what only the run knows. A "
        "traceback of anything else is a bug of ours. Of config fields the field is named first.",
        *lines,
    )


# -- methods --


@dataclasses.dataclass(frozen=True)
class Preset:
    """A config that ships, as its docstring and its fields describe it."""

    name: str
    paragraphs: tuple[str, ...]
    config: Config

    @property
    def papers(self) -> list[str]:
        return list(dict.fromkeys(PAPER.findall(" ".join(self.paragraphs))))

    @property
    def about(self) -> str:
        """Its first sentence without the paper; of a short one also that of the next paragraph."""
        texts = [re.sub(r" \([^()]*arXiv[^()]*\)", "", text) for text in self.paragraphs]
        plain = not texts[1].startswith(("What differs", "Settings", "Hardware"))
        added = f". {sentence(texts[1])}" if len(texts[0]) < 100 and plain else ""
        return sentence(texts[0]) + added

    @property
    def differs(self) -> str:
        """What is not as published, of the paragraph that says so."""
        for paragraph in self.paragraphs:
            if paragraph.startswith("What differs: "):
                return paragraph.removeprefix("What differs: ")
        return ""


def presets(folder: str) -> list[Preset]:
    out = []
    for file in sorted((REPO / "configs" / folder).glob("*.py")):
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        parts = [" ".join(p.split()) for p in doc.split("\n\n") if not p.startswith("rljax ")]
        out.append(Preset(file.stem, tuple(parts), load_config_file(str(file))))
    return out


def settings_of(config: Config) -> list[str]:
    """The fields that make the method: those that differ from the defaults, sizes left out."""
    plain = ("steps", "data.", "evaluate.", "model_settings.dtype", "batch.tokens", "export")
    changed = [name for name in changed_fields(config) if not name.startswith(plain)]
    order = field_names(config)
    return [f"{name} = {value_of(config, name)!r}" for name in sorted(changed, key=order.index)]


def family_page(title: str, about: str, members: list[Preset]) -> str:
    lines = []
    for preset in members:
        lines += [f"## {preset.name}", ""]
        for paragraph in preset.paragraphs:
            paragraph = paragraph.replace("docs/methods/presets.md", "presets.md")
            text = linked(prose(paragraph))
            lines += [text.replace("presets.md", "[measured](presets.md)"), ""]
        lines += [
            f"`rljax train presets/{preset.name}:tiny`. Settings that are not the "
            "[defaults](../reference/config.md):",
            "",
            "```text",
            *settings_of(preset.config),
            "```",
            "",
        ]
    about += " Parts by name: [components](../reference/components.md)."
    return page(title, about, *lines)


def sentence(text: str) -> str:
    return re.split(r"(?<=[.;])\s(?=[A-Z`-])", text)[0].rstrip(".;")


def index_rows(members: list[Preset], link: str) -> list:
    rows = []
    for preset in members:
        papers = ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in preset.papers)
        target = link.format(preset.name)
        about = cell(preset.about)
        rows.append((f"[`{preset.name}`]({target})", papers, about, cell(preset.differs)))
    return rows


def part_rows() -> list:
    """A row for every component whose docstring names a paper."""
    rows = []
    for space, functions in components().items():
        for function in functions:
            doc = inspect.getdoc(function) or ""
            papers = list(dict.fromkeys(PAPER.findall(doc)))
            if papers:
                links = ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in papers)
                about = cell(sentence(first_line(function)))
                place = f"../reference/components.md#{space}"
                rows.append((f"[`{function.__name__}`]({place})", space, links, about))
    return rows


def method_pages() -> dict[str, str]:
    known, out, lines = presets("presets"), {}, []
    head = ("preset", "paper", "what it is", "where paper and code differ")
    for file, title, about, flows in FAMILIES:

        def flow(p):
            return re.split(r"[(.]", p.config.dataflow)[0]

        members = [preset for preset in known if flow(preset) in flows]
        out[f"methods/{file}.md"] = family_page(title, about, members)
        lines += [f"## [{title}]({file}.md)", "", about, ""]
        lines += [*table(head, index_rows(members, f"{file}.md#{{}}")), ""]
    lines += [
        "## [From a file](offline.md)",
        "",
        "Pairs, labels, demonstrations, steps: no "
        "samples are drawn. Configs of `configs/offline/`.",
        "",
        *table(head, index_rows(presets("offline"), "offline.md")),
        "",
    ]
    lines += [
        "## Parts with a paper",
        "",
        "Losses, advantages, ..., for any config.",
        "",
        *table(("name", "part", "paper", "what it does"), part_rows()),
    ]
    out["methods/index.md"] = page(
        "Methods: the paper index",
        "Every config that ships as a method, with its paper and where the code departs from it; "
        "an empty last column means: as published. `rljax train presets/NAME:tiny` runs the same "
        "algorithm on an embedded task; what it reached is in [presets](presets.md). Constraints, "
        "branching and search: [composite methods](composite.md).",
        *lines,
    )
    return out


def pages() -> dict[str, str]:
    """{path under docs: text} of every generated page."""
    return {
        "reference/config.md": config_page(),
        "reference/features.md": features_page(),
        "reference/metrics.md": metrics_page(),
        "reference/commands.md": commands_page(),
        "reference/components.md": components_page(),
        "reference/api.md": api_page(),
        "guides/errors.md": errors_page(),
        **method_pages(),
    }


def main(arguments: list[str]) -> int:
    stale = 0
    for path, text in pages().items():
        file = DOCS / path
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(path)
        if "--check" not in arguments:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return min(stale, 1) if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
