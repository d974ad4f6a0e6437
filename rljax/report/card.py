"""The model card of what a run has trained: README.md with front matter, as the hub shows it.

It says what was measured and how, and nothing that was not.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax import hub
from rljax.errors import InputError
from rljax.files import parse_yaml, read_json, read_json_object, read_text, yaml_text
from rljax.report.head import field, title_of
from rljax.report.redacted import redacted
from rljax.report.run_folder import Estimate, Run, change_in_words, estimate, moment, pairs
from rljax.tracking.charts import duration, escaped

KINDS = {
    "policy": "text-generation",
    "adapter": "text-generation",
    "reward_model": "text-classification",
}
# What a reader asks of a run, beside model and data; what is "" or off, and what the run does not
# read (`unread` of its summary), is left out.
_FIELDS = (
    "dataflow",
    "algorithm.advantage",
    "algorithm.policy_loss",
    "algorithm.preference_loss",
    "algorithm.reward_loss",
    "algorithm.kl_in_loss",
    "algorithm.kl_in_reward",
    "reward.function",
    "reward.model",
    "environment.function",
    "teacher_model",
    "critic_model",
    "lora.rank",
    "lora.alpha",
    "actor_optimizer.name",
    "actor_optimizer.lr",
    "critic_optimizer.name",
    "critic_optimizer.lr",
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "offline.examples_per_step",
    "sampler.temperature",
    "sampler.max_response_tokens",
    "sft.steps",
    "sft.optimizer.lr",
    "steps",
)
_MARKDOWN = re.compile(r"[\\`*\[\]~#!|]")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)


def front_matter(text: str) -> dict:
    """The front matter of a README.md; {} where it has none that can be read."""
    match = _FRONT_MATTER.match(text)
    try:
        value = parse_yaml(match[1], "README.md") if match else {}
    except InputError:
        value = {}
    return value if isinstance(value, dict) else {}


def base_of(run: Run, told: str = "") -> hub.HubName | None:
    """The model of the hub that a run started from: the one its user names, else its config's; None
    for random weights and for a local folder of which nobody says where it came from."""
    if told:
        name = hub.model_name(told)
        if name is None:
            raise InputError(
                "--base",
                value=told,
                rule="OWNER/NAME of a model of the hub",
                fix="--base=Qwen/Qwen3-0.6B, or the name of the model that you began with",
            )
        return name
    text = field(run.config, "model")  # a run writes what it read of the hub as hf://
    return hub.parse(text) if isinstance(text, str) and hub.is_hub(text) else None


def license_of(base: hub.HubName | None) -> str:
    """The license that the base's own card names; "" where it cannot be read."""
    if base is None:
        return ""
    try:
        text = read_text(hub.model_card(base))
    except InputError:
        return ""
    value = front_matter(text).get("license")
    return value if isinstance(value, str) else ""


def model_card(
    run: Run,
    part: str,
    repository: str,
    *,
    base: hub.HubName | None,
    license: str = "",
    evaluations: Sequence[tuple[str, dict]] = (),
    report: bool = False,
    tokenizer: bool = True,
    generation: bool = False,
) -> str:
    """README.md of a repository with the `part` (policy, adapter, reward_model) of a run;
    `evaluations` are (name, result) of `rljax evaluate --out`. `tokenizer`: transformers can read
    the tokenizer that is beside the weights, which the alphabet of a task is not. `generation`:
    what ends a response is beside them, in generation_config.json."""
    head = yaml_text(_head(run, part, base, license))
    name = repository.rpartition("/")[2]
    sampler = run.config.get("sampler")
    stops = sampler.get("stop_strings") if isinstance(sampler, Mapping) else ()
    stops = [text for text in stops or () if isinstance(text, str)]
    sections = [
        f"---\n{head}---",
        f"# {_text(name)}",
        _sentence(run, part, base),
        "## Evaluation\n\n" + _evaluation(run, evaluations),
        "## Training\n\n" + _training(run),
        "## Use\n\n" + _use(part, repository, base, tokenizer, generation, stops),
        "## Where it came from\n\n" + _origin(run, base),
    ]
    if report:
        sections.append("All curves, samples and the config: [report.html](report.html).")
    return redacted("\n\n".join(section.rstrip() for section in sections)) + "\n"


def _head(run: Run, part: str, base: hub.HubName | None, license: str) -> dict:
    out: dict[str, object] = {}
    if license:
        out["license"] = license
    if base is not None:
        out["base_model"] = base.repository
        out["base_model_relation"] = "adapter" if part == "adapter" else "finetune"
    if datasets := [name.repository for name in _datasets(run)]:
        out["datasets"] = list(dict.fromkeys(datasets))
    out["library_name"] = "peft" if part == "adapter" else "transformers"
    out["pipeline_tag"] = KINDS[part]
    method = str(field(run.config, "dataflow") or "").partition("(")[0].rpartition(".")[2]
    lora = ["lora"] if field(run.config, "lora.rank") else []
    out["tags"] = ["rljax", *([method] if method else []), *lora]
    return out


def _datasets(run: Run) -> list[hub.HubName]:
    data = run.config.get("data")
    texts = [data.get("train"), *(data.get("sources") or ())] if isinstance(data, Mapping) else []
    texts.append(field(run.config, "sft.data"))
    return [hub.parse(text) for text in texts if isinstance(text, str) and hub.is_hub(text)]


def _sentence(run: Run, part: str, base: hub.HubName | None) -> str:
    what = {"policy": "A policy", "adapter": "A LoRA adapter", "reward_model": "A reward model"}
    start = f", trained from [{base.repository}]({hub.page(base)})" if base else ""
    data = ", ".join(f"[{n.repository}]({hub.page(n)})" for n in _datasets(run))
    return f"{what[part]}{start}{f' on {data}' if data else ''}: {_text(title_of(run))}."


# -- evaluation --


def _number(value: Estimate | None, *, percent: bool) -> str:
    if value is None:
        return ""
    scale, unit = (100, " %") if percent else (1, "")
    text = f"{scale * value.value:.4g}{unit}"
    if value.low is None:
        return text
    return f"{text} [{scale * value.low:.4g}, {scale * value.high:.4g}]"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: object) -> str:
    """Returns a cell of a table: Markdown of one line; a bar would begin another column."""
    return _line(text).replace("|", "\\|")


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _text(value: object) -> str:
    """A value as plain text of the card: what Markdown or HTML would read is escaped."""
    return escaped(_MARKDOWN.sub(r"\\\g<0>", _line(value)))


def _code(value: object) -> str:
    """A value as code: the quotes are longer than any that it holds."""
    text = _line(value)
    quote = _fence(text, 1)
    apart = " " if "`" in text else ""
    return f"{quote}{apart}{text}{apart}{quote}"


def _fence(text: str, least: int) -> str:
    """More backticks than stand together in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _evaluation(run: Run, evaluations: Sequence[tuple[str, dict]]) -> str:
    parts = []
    if rows := pairs(run.summary):
        cells = []
        for name, before, after, change in rows:
            percent = name == "accuracy"
            count = after.n if after.n is not None else change.n
            cells.append(
                [
                    name,
                    _number(before, percent=percent),
                    _number(after, percent=percent),
                    _number(change, percent=percent),
                    "" if count is None else str(count),
                    change_in_words(change),
                ]
            )
        where = field(run.config, "data.test") or field(run.config, "data.train")
        reward = field(run.config, "evaluate.reward") or field(run.config, "reward.function")
        by = f", judged by {_code(reward)}" if reward else ""
        parts.append(
            f"By the run itself, before and after training{_steps_between(run)}, on held-out rows "
            f"of {_code(where)}{by}; accuracy is greedy. In brackets 95 % intervals; a change is "
            "called one only where the interval of the difference excludes 0.\n\n"
            + _table(("", "before", "after", "difference", "n", ""), cells)
        )
    before, after = run.summary.get("eval_before"), run.summary.get("eval_after")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        rows = [
            (
                _text(key),
                _number(estimate(value), percent=False),
                _number(estimate(after[key]), percent=False),
            )
            for key, value in before.items()
            if key in after and estimate(value) is not None
        ]
        parts.append(
            f"On held-out rows of {_code(field(run.config, 'data.test'))}, before and after "
            f"training{_steps_between(run)}, without intervals:\n\n"
            + _table(("", "before", "after"), rows)
        )
    for name, result in evaluations:
        suites = result.get("suites")
        for one in suites if isinstance(suites, list) else [result]:
            parts.append(_separate(name, one))
    return "\n\n".join(parts) or "Not measured."


def _steps_between(run: Run) -> str:
    """The steps at which it was evaluated, as far as the run says."""
    first, last = run.summary.get("sft_steps"), run.summary.get("steps")
    known = isinstance(first, int) and isinstance(last, int)
    return f" (at steps {first} and {last})" if known else ""


def _separate(name: str, result: dict) -> str:
    """The table of a file that `rljax evaluate` wrote."""
    rows = [
        (_text(metric), _number(value, percent=False), "" if value.n is None else str(value.n))
        for metric, found in result["metrics"].items()
        if (value := estimate(found)) is not None
    ]
    suite = f" --suite={result['suite']}" if result.get("suite") else ""
    how = (
        f"{_code(f'rljax evaluate{suite}')} on {_code(result.get('data'))}, reward "
        f"{_code(result.get('reward'))}, {_text(result.get('samples'))} samples at temperature "
        f"{_text(result.get('temperature'))}, at most {_text(result.get('max_response_tokens'))} "
        f"tokens ({_text(name)}); 95 % intervals over prompts."
    )
    return f"{how}\n\n{_table(('metric', 'value', 'n'), rows)}"


def read_evaluation(path: str | Path) -> tuple[str, dict]:
    """(its name, the result) of a file that `rljax evaluate --out` wrote."""
    result = read_json(path)
    fields = result if isinstance(result, dict) else {}
    if not isinstance(fields.get("metrics"), dict) or "checkpoint" not in fields:
        raise InputError(
            "--evaluations",
            value=str(path),
            rule="a file that rljax evaluate --out=FILE wrote",
            fix="rljax evaluate RUN_DIR --out=evaluation.json writes one",
        )
    return Path(path).name, result


# -- the rest --


def _training(run: Run) -> str:
    unread = run.summary.get("unread")
    unread = unread if isinstance(unread, list) else []
    sampled = run.summary.get("completions")
    rows = [("model", field(run.config, "model")), ("data", field(run.config, "data.train"))]
    for name in _FIELDS:
        value = field(run.config, name)
        # Of a run that drew no samples, `sampler` is how others may sample it.
        read = name not in unread and (sampled or not name.startswith("sampler."))
        if read and value not in (None, "", 0, 0.0):
            rows.append((name, value))
    rows.append(("seed", run.summary.get("seed", field(run.config, "seed"))))
    last, total = run.steps()
    rows.append(("steps taken", f"{last} of {total}" if total else last))
    for name, value in (
        ("device", run.summary.get("device")),
        ("status", run.summary.get("status")),
    ):
        rows.append((name, value))
    if isinstance(run.summary.get("wall_s"), int | float):
        rows.append(("time", duration(run.summary["wall_s"])))
    shown = [(name, _code(value)) for name, value in rows if value not in (None, "")]
    text = _table(("field", "value"), shown)
    if run.starts:
        start = run.starts[-1]
        git = start.get("git") if isinstance(start.get("git"), Mapping) else {}
        commit = (
            f", commit {_text(git['commit'])}{' with changes' * bool(git.get('dirty'))}"
            if "commit" in git
            else ""
        )
        text += f"\n\nThe command, on {moment(start['time'])}{commit}:"
        command = str(start.get("command"))
        text += f"\n\n{_fence(command, 3)}\n{command}\n{_fence(command, 3)}"
    if isinstance(run.summary.get("versions"), Mapping):
        versions = ", ".join(f"{k} {v}" for k, v in run.summary["versions"].items())
        own = (run.starts or [{}])[-1].get("rljax") or ""
        text += f"\n\nrljax {_text(own)}; {_text(versions)}."
    return text


def _use(
    part: str,
    repository: str,
    base: hub.HubName | None,
    tokenizer: bool,
    generation: bool,
    stops: Sequence[str],
) -> str:
    """Writes the code that loads it and, where it generates, ends its responses as the run did:
    transformers reads stop ids from a model's folder, and stop strings only from the call."""
    generates = part != "reward_model" and tokenizer and generation
    if part == "adapter":
        first = base.repository if base else "BASE"
        revision = f', revision="{base.revision}"' if base and base.revision else ""
        names = "AutoModelForCausalLM" + ", AutoTokenizer, GenerationConfig" * generates
        code = (
            f"from peft import PeftModel\nfrom transformers import {names}\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{first}"{revision})\n'
            f'model = PeftModel.from_pretrained(model, "{repository}")'
        )
        if generates:
            code += f'\nmodel.generation_config = GenerationConfig.from_pretrained("{repository}")'
        flags = f"--config.model={first} --config.lora.adapter={repository}"
    else:
        kind = "CausalLM" if part == "policy" else "SequenceClassification"
        names = f"AutoModelFor{kind}, AutoTokenizer" if tokenizer else f"AutoModelFor{kind}"
        code = f"from transformers import {names}\n\n"
        code += f'model = AutoModelFor{kind}.from_pretrained("{repository}")'
        flags = f"--config.{'model' if part == 'policy' else 'reward.model'}={repository}"
    if not tokenizer and part != "adapter":
        code += "\n# Its characters are tokens of their own: rljax alone reads char_tokenizer.json."
    if tokenizer and (part != "adapter" or generates):
        code += f'\ntokenizer = AutoTokenizer.from_pretrained("{repository}")'
    if generates:
        more = f", stop_strings={list(stops)!r}, tokenizer=tokenizer" if stops else ""
        code += (
            '\ninputs = tokenizer("What is 2 + 3?", return_tensors="pt")\n'
            f"ids = model.generate(**inputs, max_new_tokens=512{more})\n"
            "print(tokenizer.decode(ids[0]))"
        )
    fence = _fence(code, 3)
    return f"{fence}python\n{code}\n{fence}\n\nIn rljax: {_code(flags)}."


def _origin(run: Run, base: hub.HubName | None) -> str:
    lines = []
    if base is not None:
        at = f", commit {_code(base.revision)}" if base.revision else ""
        lines.append(f"- Base: [{base.repository}]({hub.page(base)}){at}")
    elif str(field(run.config, "model") or "").endswith(")"):
        lines.append(f"- Base: random weights, {_code(field(run.config, 'model'))}")
    else:
        lines.append("- Base: a folder of the machine that trained it")
    for file, facts in _files(run):
        lines.append(f"  - {_code(file)}: SHA-256 {_code(facts.get('sha256'))}")
    for name in _datasets(run):
        at = f", commit {_code(name.revision)}" if name.revision else ""
        lines.append(f"- Data: [{name.repository}]({hub.page(name)}){at}")
    return "\n".join(lines)


def _files(run: Run) -> list[tuple[str, Mapping]]:
    """The weights that the run began with, of its model.json."""
    try:
        files = read_json_object(run.folder / "model.json").get("files")
    except InputError:
        return []
    files = files if isinstance(files, Mapping) else {}
    return [(f, facts) for f, facts in files.items() if isinstance(facts, Mapping)]
