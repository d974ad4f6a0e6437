"""The model card of a trained model: README.md with front matter, as the hub shows it.

It says what was measured and how, and nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from rljax import hub
from rljax.errors import InputError
from rljax.files import parse_yaml, read_json, read_json_object, read_text, yaml_text
from rljax.report.head import field, title_of
from rljax.report.redacted import redacted
from rljax.report.run_folder import Estimate, RecordedRun, change_in_words, estimate, moment, pairs
from rljax.tracking.charts import duration, escaped

# By PEFT's name of a model's task: the tag of a repository, and the class that loads it.
_TASKS = {
    "CAUSAL_LM": ("text-generation", "AutoModelForCausalLM"),
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
    "TOKEN_CLS": ("token-classification", "AutoModelForTokenClassification"),
}
# Fields of the config that a card shows beside model and data. Those that are "" or off, or that
# the run does not read (`unread` of its summary), are left out.
_FIELDS = """
    dataflow algorithm.advantage algorithm.policy_loss algorithm.preference_loss
    algorithm.reward_loss algorithm.kl_in_loss algorithm.kl_in_reward reward.function reward.model
    environment.function teacher_model teachers teacher_sources algorithm.teacher_coef
    algorithm.teacher_rate critic_model lora.rank lora.alpha actor_optimizer.name actor_optimizer.lr
    critic_optimizer.name critic_optimizer.lr batch.prompts_per_step batch.samples_per_prompt
    offline.examples_per_step sampler.temperature sampler.max_response_tokens sft.steps
    sft.optimizer.lr steps
""".split()
_MARKDOWN = re.compile(r"[\\`*\[\]~#!|]")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)


def front_matter(text: str) -> dict:
    """Returns the front matter of a README.md; {} if it has none that can be read."""
    match = _FRONT_MATTER.match(text)
    try:
        value = parse_yaml(match[1], "README.md") if match else {}
    except InputError:
        value = {}
    return value if isinstance(value, dict) else {}


def base_of(run: RecordedRun, told: str = "") -> hub.HubName | None:
    """Returns the model of the hub that a run started from: `told` by the user, else that of the
    config; None for random weights and for a local folder of unknown origin. Raises InputError for
    a `told` that names no model of the hub."""
    if told:
        name = hub.model_name(told)
        if name is None:
            fix = "--base=Qwen/Qwen3-0.6B, or the name of the model that you began with"
            raise InputError("--base", value=told, rule="OWNER/NAME of a model of the hub", fix=fix)
        return name
    text = field(run.config, "model")  # a run writes what it read of the hub as hf://
    if any(_task(run, part) != "CAUSAL_LM" for part in ("adapter", "reward_model")):
        text = field(run.config, "critic_model") or text
    return hub.parse(text) if isinstance(text, str) and hub.is_hub(text) else None


def _task(run: RecordedRun, part: str) -> str:
    """Returns PEFT's name of the task of a part, by the files of the run; that of a policy if it
    has no such part."""
    name = "adapter_config.json" if part == "adapter" else "config.json"
    try:
        config = read_json_object(run.folder / part / name)
    except InputError:
        return "CAUSAL_LM"
    if part == "adapter":
        task = config.get("task_type")
        return task if task in _TASKS else "CAUSAL_LM"
    architectures = str(config.get("architectures"))
    endings = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    return next((task for end, task in endings.items() if end in architectures), "CAUSAL_LM")


def license_of(base: hub.HubName | None) -> str:
    """Returns the license that the base's own card names; "" if it cannot be read."""
    if base is None:
        return ""
    try:
        text = read_text(hub.model_card(base))
    except InputError:
        return ""
    value = front_matter(text).get("license")
    return value if isinstance(value, str) else ""


def model_card(
    run: RecordedRun,
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
    """Returns README.md of a repository with the `part` (policy, adapter, reward_model) of a run:
    card.md without the lines whose words are missing; `evaluations` are (name, result) of `rljax
    evaluate --out`. `tokenizer`: transformers can read the tokenizer beside the weights, which it
    cannot if that is the alphabet of a task. `generation`: generation_config.json, beside them,
    says what ends a response."""
    words = {
        "front_matter": yaml_text(_head(run, part, base, license)).rstrip(),
        "name": _text(repository.rpartition("/")[2]),
        "report": "" if report else None,
        **_evaluation(run, evaluations),
        **_training(run),
        **_use(run, part, repository, base, tokenizer, generation),
        **_origin(run, part, base),
    }
    words = {name: word for name, word in words.items() if word is not None}
    template = read_text(Path(__file__).with_name("card.md")).split("\n")
    lines = [line for line in template if words.keys() >= {*Template(line).get_identifiers()}]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()
    return redacted(Template(text).substitute(words)) + "\n"


def _head(run: RecordedRun, part: str, base: hub.HubName | None, license: str) -> dict:
    out: dict[str, object] = {}
    if license:
        out["license"] = license
    if base is not None:
        out["base_model"] = base.repository
        out["base_model_relation"] = "adapter" if part == "adapter" else "finetune"
    if datasets := [name.repository for name in _datasets(run)]:
        out["datasets"] = list(dict.fromkeys(datasets))
    out["library_name"] = "peft" if part == "adapter" else "transformers"
    out["pipeline_tag"] = _TASKS[_task(run, part)][0]
    method = str(field(run.config, "dataflow") or "").partition("(")[0].rpartition(".")[2]
    lora = ["lora"] if field(run.config, "lora.rank") else []
    out["tags"] = ["rljax", *([method] if method else []), *lora]
    return out


def _datasets(run: RecordedRun) -> list[hub.HubName]:
    data = run.config.get("data")
    texts = [data.get("train"), *(data.get("sources") or ())] if isinstance(data, Mapping) else []
    texts.append(field(run.config, "sft.data"))
    return [hub.parse(text) for text in texts if isinstance(text, str) and hub.is_hub(text)]


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
    cells = [[_line(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _text(value: object) -> str:
    """A value as plain text of the card: what Markdown or HTML would read is escaped."""
    return escaped(_MARKDOWN.sub(r"\\\g<0>", _line(value)))


def _code(value: object) -> str:
    """A value as code: the quotes are longer than any that it holds."""
    text = _line(value)
    quote = _fence(text, 1)
    space = " " if "`" in text else ""
    return f"{quote}{space}{text}{space}{quote}"


def _fence(text: str, min_length: int) -> str:
    """Returns more backticks than stand together anywhere in a text, at least `min_length`."""
    return "`" * max(min_length, 1 + max(map(len, re.findall("`+", text)), default=0))


def _evaluation(run: RecordedRun, evaluations: Sequence[tuple[str, dict]]) -> dict[str, str | None]:
    test = field(run.config, "data.test")
    first, last = run.summary.get("sft_steps"), run.summary.get("steps")
    has_steps = isinstance(first, int) and isinstance(last, int)
    words = {"steps": f" (at steps {first} and {last})" if has_steps else ""}
    if rows := pairs(run.summary):
        cells = []
        for name, before, after, change in rows:
            numbers = [_number(x, percent=name == "accuracy") for x in (before, after, change)]
            count = after.n if after.n is not None else change.n
            cells.append(
                [name, *numbers, "" if count is None else str(count), change_in_words(change)]
            )
        reward = field(run.config, "evaluate.reward") or field(run.config, "reward.function")
        words["rows"] = _code(test or field(run.config, "data.train"))
        words["judge"] = f", judged by {_code(reward)}" if reward else ""
        words["accuracies"] = _table(("", "before", "after", "difference", "n", ""), cells)
    before, after = run.summary.get("eval_before"), run.summary.get("eval_after")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        cells = [
            (_text(key), *(_number(estimate(x[key]), percent=False) for x in (before, after)))
            for key, value in before.items()
            if key in after and estimate(value) is not None
        ]
        words |= {"test": _code(test), "losses": _table(("", "before", "after"), cells)}
    parts = []
    for name, result in evaluations:
        suites = result.get("suites")
        checkpoint, step = str(result["checkpoint"]), result.get("step")
        measured = checkpoint if hub.is_hub(checkpoint) else Path(checkpoint).name
        measured = _code(measured or checkpoint or "?")
        measured += f", step {step}," if isinstance(step, int) else ""
        tables = suites if isinstance(suites, list) else [result]
        parts += [_separate(name, measured, table) for table in tables]
    if parts:
        words["evaluations"] = "\n\n".join(parts)
    return words if len(words) > 1 else words | {"unmeasured": ""}


def _separate(name: str, measured: str, result: dict) -> str:
    """The table of a file that `rljax evaluate` wrote about the policy `measured`."""
    rows = [
        (_text(metric), _number(value, percent=False), "" if value.n is None else str(value.n))
        for metric, recorded in result["metrics"].items()
        if (value := estimate(recorded)) is not None
    ]
    suite = f" --suite={result['suite']}" if result.get("suite") else ""
    description = (
        f"{_code(f'rljax evaluate{suite}')} of {measured} on {_code(result.get('data'))}, reward "
        f"{_code(result.get('reward'))}, {_text(result.get('samples'))} samples at temperature "
        f"{_text(result.get('temperature'))}, at most {_text(result.get('max_response_tokens'))} "
        f"tokens ({_text(name)}); 95 % intervals over prompts."
    )
    return f"{description}\n\n{_table(('metric', 'value', 'n'), rows)}"


def read_evaluation(path: str | Path) -> tuple[str, dict]:
    """Returns (name, result) of a file that `rljax evaluate --out` wrote. Raises InputError for any
    other file."""
    result = read_json(path)
    fields = result if isinstance(result, dict) else {}
    if not isinstance(fields.get("metrics"), dict) or "checkpoint" not in fields:
        rule = "a file that rljax evaluate --out=FILE wrote"
        fix = "rljax evaluate RUN_DIR --out=evaluation.json writes one"
        raise InputError("--evaluations", value=str(path), rule=rule, fix=fix)
    return Path(path).name, result


# -- the rest --


def _training(run: RecordedRun) -> dict[str, str | None]:
    unread = run.summary.get("unread")
    unread = unread if isinstance(unread, list) else []
    sampled = run.summary.get("completions")
    rows = [("model", field(run.config, "model")), ("data", field(run.config, "data.train"))]
    for name in _FIELDS:
        value = field(run.config, name)
        # If a run drew no samples, `sampler` says how others may sample its policy.
        used = name not in unread and (sampled or not name.startswith("sampler."))
        if used and value not in (None, "", 0, 0.0):
            rows.append((name, value))
    rows.append(("seed", run.summary.get("seed", field(run.config, "seed"))))
    last, total = run.steps()
    rows.append(("steps taken", f"{last} of {total}" if total else last))
    rows += [(name, run.summary.get(name)) for name in ("device", "status")]
    if isinstance(run.summary.get("wall_s"), int | float):
        rows.append(("time", duration(run.summary["wall_s"])))
    cells = [(name, _code(value)) for name, value in rows if value not in (None, "")]
    words = {"fields": _table(("field", "value"), cells)}
    start = run.latest_start
    if start:
        git = start.get("git") if isinstance(start.get("git"), Mapping) else {}
        dirty = " with changes" * bool(git.get("dirty"))
        words["commit"] = f", commit {_text(git['commit'])}{dirty}" if "commit" in git else ""
        words |= {"moment": moment(start["time"]), "command": str(start.get("command"))}
        words["command_fence"] = _fence(words["command"], 3)
    if isinstance(run.summary.get("versions"), Mapping):
        versions = ", ".join(f"{k} {v}" for k, v in run.summary["versions"].items())
        words |= {"version": _text(start.get("rljax") or ""), "versions": _text(versions)}
    return words


def _use(
    run: RecordedRun,
    part: str,
    repository: str,
    base: hub.HubName | None,
    tokenizer: bool,
    generation: bool,
) -> dict[str, str | None]:
    """Returns the words of the code that loads the model and, where it generates, ends its
    responses as the run did: transformers reads stop ids from a model's folder, and stop strings
    only from the call."""
    adapter, scores = part == "adapter", _task(run, part) != "CAUSAL_LM"
    generates = not scores and tokenizer and generation
    sampler = run.config.get("sampler")
    stops = sampler.get("stop_strings") if isinstance(sampler, Mapping) else ()
    stops = [text for text in stops or () if isinstance(text, str)]
    loader = _TASKS[_task(run, part)][1]
    weights = repository
    if adapter:
        weights = base.repository if base else "BASE"
        imports = ", AutoTokenizer, GenerationConfig" * generates
        flags = f"--config.model={weights} --config.lora.adapter={repository}"
        flags = None if scores else flags  # no field reads one
    else:
        imports = ", AutoTokenizer" * tokenizer
        flags = f"--config.{'reward.model' if scores else 'model'}={repository}"
    revision = f', revision="{base.revision}"' if adapter and base and base.revision else ""
    stop = f", stop_strings={stops!r}, tokenizer=tokenizer" if stops else ""
    chat = run.data.get("conversations") is True
    return {
        "of_messages": "" if chat else None,
        "of_text": None if chat else "",
        "fence": _fence(" ".join((weights, repository, stop * generates)), 3),
        "peft": "" if adapter else None,
        "classes": loader + imports,
        "loader": loader,
        "weights": weights,
        "revision": revision + ", num_labels=1" * (adapter and scores),
        "adapter": repository if adapter else None,
        "generation_config": repository if adapter and generates else None,
        "alphabet": None if adapter or tokenizer else "",
        "tokenizer": repository if tokenizer and (generates or not adapter) else None,
        "generates": "" if generates else None,
        "stops": stop,
        "flags": flags and _code(flags),
    }


def _origin(run: RecordedRun, part: str, base: hub.HubName | None) -> dict[str, str | None]:
    kinds = {"policy": "A policy", "adapter": "A LoRA adapter", "reward_model": "A reward model"}
    if _task(run, "adapter") != "CAUSAL_LM":
        kinds["adapter"] = "A LoRA adapter of a reward model"
    model = field(run.config, "model")
    if base is not None:
        words = {"start": f", trained from {_link(base)}", "base": _link(base) + _commit(base)}
    elif str(model or "").endswith(")"):
        words = {"start": "", "random_weights": _code(model)}
    else:
        words = {"start": "", "folder": ""}
    names = _datasets(run)
    files = [f"  - {_code(f)}: SHA-256 {_code(entry.get('sha256'))}" for f, entry in _files(run)]
    data = [f"- Data: {_link(name)}{_commit(name)}" for name in names]
    return words | {
        "part": kinds[part],
        "title": _text(title_of(run)),
        "on_data": f" on {', '.join(map(_link, names))}" if names else "",
        "files": "\n".join(files) or None,
        "datasets": "\n".join(data) or None,
    }


def _link(name: hub.HubName) -> str:
    return f"[{name.repository}]({hub.page(name)})"


def _commit(name: hub.HubName) -> str:
    return f", commit {_code(name.revision)}" if name.revision else ""


def _files(run: RecordedRun) -> list[tuple[str, Mapping]]:
    """Returns (file, entry) of the weights that the run began with, from its model.json."""
    try:
        files = read_json_object(run.folder / "model.json").get("files")
    except InputError:
        return []
    files = files if isinstance(files, Mapping) else {}
    return [(f, entry) for f, entry in files.items() if isinstance(entry, Mapping)]
