"""Puts a trained model on the hub, with its model card, report and config.

Only what is listed here leaves the machine: weights and tokenizer as the run exported them, and
pages without keys, machines or folders. Checkpoints and their optimizer states stay.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import safetensors

from rljax import hub
from rljax.errors import InputError
from rljax.files import make_folder, read_json_object, write_json, write_text
from rljax.report.card import base_of, license_of, model_card, read_evaluation
from rljax.report.page import page_of
from rljax.report.redacted import redacted, redacted_values
from rljax.report.run_folder import RecordedRun, read_run
from rljax.runs.folder import exported_steps, is_of_a_model
from rljax.runs.mirror import local_copy
from rljax.runs.store import is_url, require_run_folder

LOG = logging.getLogger("rljax")
PARTS = ("adapter", "policy", "reward_model")  # the first that a run has is what is meant
_PUBLISHED = (".safetensors", ".json", ".jinja")
_TOKENIZERS = ("tokenizer.json", "char_tokenizer.json")  # the latter of single characters
_CONFIG = "training_config.json"
_INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Published:
    """Files that were written or pushed."""

    part: str
    files: tuple[str, ...]
    url: str  # of the commit; "" where nothing was pushed


def publish(
    run_dir: str,
    repository: str,
    *,
    part: str = "",
    base: str = "",
    license: str = "",
    evaluations: Sequence[str] = (),
    public: bool = False,
    report: bool = True,
    out: str = "",
) -> Published:
    """Pushes the `part` of a run ("": its adapter, else its policy, else its reward model) to a
    repository of the hub, which is made private if it is new, unless `public`. With `out` the
    folder is written there and nothing is pushed. Raises InputError for a repository that is no
    OWNER/NAME, a run without that part or that
    has gone on since it was exported, an adapter whose base is not named, an `out` that is not
    empty, and a push that fails."""
    name = hub.parse(repository if hub.is_hub(repository) else f"hf://{repository}")
    if name.kind != "model" or name.revision or name.path:
        rule = "OWNER/NAME of a model, without a revision"
        raise InputError("--to", value=repository, rule=rule, fix=f"--to={name.repository}")
    require_run_folder(run_dir)
    results = [read_evaluation(path) for path in evaluations]
    for file, result in results:
        _warn_of_another(file, str(result["checkpoint"]), run_dir)
    with local_copy(run_dir, PARTS) as folder, _staged(out) as stage:
        run = read_run(folder)
        part = _part(run, part)
        _require_of_its_end(run, part)
        _require_config(folder / "config.json", part)
        _require_whole(folder / part, part)
        base_name = base_of(run, base)
        _copy(folder / part, stage, part, base_name)
        card = model_card(
            run,
            part,
            name.repository,
            base=base_name,
            license=license or license_of(base_name),
            evaluations=results,
            report=report,
            tokenizer=(stage / "tokenizer.json").is_file(),
            generation=(stage / "generation_config.json").is_file(),
        )
        write_text(stage / "README.md", card)
        write_json(stage / _CONFIG, redacted_values(run.config))
        if report:
            _write_report(run, stage)
        files = tuple(sorted(path.name for path in stage.iterdir()))
        message = f"{part.replace('_', ' ').capitalize()} of an rljax run, step {run.steps()[0]}"
        url = "" if out else hub.upload(name, stage, private=not public, message=message)
    return Published(part, files, url)


def _warn_of_another(file: str, checkpoint: str, run_dir: str) -> None:
    """Warns of scores of a policy that is not in the folder of the run."""
    if is_url(run_dir):
        is_in_run = f"{checkpoint}/".startswith(run_dir.rstrip("/") + "/")
    else:
        is_in_run = Path(checkpoint).resolve().is_relative_to(Path(run_dir).resolve())
    if not is_in_run:
        LOG.warning(
            "--evaluations: %s has the scores of %s, not of %s, and the card says so. Fix: "
            "`rljax evaluate %s --out=%s`, unless that is the same policy",
            *(file, checkpoint, run_dir, run_dir, file),
        )


@contextlib.contextmanager
def _staged(out: str) -> Iterator[Path]:
    """The folder that is filled: `out`, which must be empty, or one for as long as it is pushed."""
    if not out:
        with tempfile.TemporaryDirectory(prefix="rljax-") as scratch:
            yield Path(scratch)
        return
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        rule = "an empty folder, or one that is not there yet"
        fix = "name another folder, or empty this one"
        raise InputError("--out", value=out, rule=rule, fix=fix)
    is_new = not path.exists()
    make_folder(path)
    try:
        yield path
    except BaseException:  # half a folder, which a second try would refuse
        for file in path.iterdir():
            file.unlink()
        if is_new:
            path.rmdir()
        raise


def _part(run: RecordedRun, part: str) -> str:
    parts = [p for p in PARTS if (run.folder / p).is_dir()]
    if part in parts or (not part and parts):
        return part or parts[0]
    what = f"{run.folder} has no {part or 'policy, adapter or reward model'}"
    if parts:
        raise InputError(what, value=parts, fix=f"--part={parts[0]}")
    fix = "let the run finish with export=True"
    is_adapter = (run.folder / "adapter_config.json").is_file()
    if is_adapter or is_of_a_model(run.folder / "config.json"):
        what = f"{run.folder} is not the folder of a run"
        fix = "name the folder that --config.run_dir gave a run; any other folder goes to the hub "
        fix += "by the hub's own command, `hf upload OWNER/NAME FOLDER`"
    raise InputError(what, fix=fix)


def _require_of_its_end(run: RecordedRun, part: str) -> None:
    """Raises InputError where the run has gone on since it exported the part: its card and its
    report would tell of other weights."""
    step = (exported_steps(run.summary) or {}).get(part)
    last = run.summary.get("steps") if run.ended() else run.steps()[0]
    if step not in (None, last):
        raise InputError(
            f"{run.folder / part} is not of the end of the run",
            value=f"the weights of step {step}, and the run is at step {last}",
            rule="a run exports at its end; the card and the report tell of the run as it is now",
            fix="let the run finish with export=True: the command that trains it goes on; or push "
            f"the older weights without a card: `hf upload OWNER/NAME {run.folder / part}`",
        )


def _require_config(path: Path, part: str) -> None:
    """Raises InputError where the config of a run, of which its card tells, cannot be read."""
    fix = "copy config.json of the run again; or push the weights without a card of how they were "
    fix += f"trained: `hf upload OWNER/NAME {path.parent / part}`"
    if "dataflow" not in _exported_json(path, fix):
        rule = "method, data and base of the card are read there"
        raise InputError(f"{path} is not the config of a run", rule=rule, fix=fix)


def _require_whole(folder: Path, part: str) -> None:
    """Raises InputError for an exported folder that nobody could load: without its config, weights
    or tokenizer, or with a file that is cut short."""
    fix = f"copy {folder.name}/ again from where it is whole"
    config = "adapter_config.json" if part == "adapter" else "config.json"
    weights = "adapter_model.safetensors" if part == "adapter" else "model.safetensors"
    tensors: dict[str, set[str]] = {weights: set()}  # of each file, those that it has to have
    if part != "adapter" and (folder / _INDEX).is_file():
        listed = _exported_json(folder / _INDEX, fix).get("weight_map")
        tensors = {}
        for tensor, file in listed.items() if isinstance(listed, dict) else ():
            tensors.setdefault(str(file), set()).add(tensor)
        if not tensors:
            raise InputError(f"{folder / _INDEX} names no tensor", rule="weight_map does", fix=fix)
    for name in (config, *tensors):
        if not (folder / name).is_file():
            raise InputError(f"{folder} has no {name}", rule="nobody could load it", fix=fix)
    if part == "policy" and not any((folder / name).is_file() for name in _TOKENIZERS):
        problem = f"{folder} has no {_TOKENIZERS[0]}"
        raise InputError(problem, rule="nobody could ask the model", fix=fix)
    for path in filter(_is_published, sorted(folder.glob("*.json"))):
        _exported_json(path, fix)
    for name, needed in tensors.items():
        try:
            with safetensors.safe_open(folder / name, "np") as file:
                missing = sorted(needed - set(file.keys()))
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            problem = f"{folder / name} is cut short, or is no safetensors file"
            raise InputError(problem, rule=str(error), fix=fix) from None
        if missing:
            problem = f"{folder / name} lacks tensor {missing[0]}"
            raise InputError(problem, rule=f"{_INDEX} names it", fix=fix)


def _exported_json(path: Path, fix: str) -> dict:
    try:
        return read_json_object(path)
    except InputError as error:
        rule = str(error).partition(". Fix:")[0]
        raise InputError(f"{path} cannot be read", rule=rule, fix=fix) from None


def _is_published(path: Path) -> bool:
    return path.suffix in _PUBLISHED and path.is_file() and not path.name.startswith(".")


def _copy(source: Path, stage: Path, part: str, base: hub.HubName | None) -> None:
    """The files of an exported folder, large ones by a second name. An adapter gets the base that
    others can load."""
    for path in sorted(source.iterdir()):
        if _is_published(path):
            if path.suffix == ".safetensors":
                with contextlib.suppress(OSError):
                    os.link(path, stage / path.name)
            if not (stage / path.name).exists():
                _copy_file(path, stage / path.name)
    if part != "adapter":
        return
    path = stage / "adapter_config.json"
    config = read_json_object(path)
    if base is None:
        raise InputError(
            "the adapter belongs to a model of this machine",
            value=config.get("base_model_name_or_path"),
            rule="whoever loads it has to know which",
            fix="--base=OWNER/NAME, the model of the hub that the folder is a copy of, or "
            "--part=policy, which needs none",
        )
    config |= {"base_model_name_or_path": base.repository, "revision": base.revision or None}
    write_json(path, config)


def _copy_file(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        rule = f"{error.strerror or error}; {source} has {source.stat().st_size:,} bytes"
        fix = "make room there, or name another disk: --out=FOLDER, or TMPDIR without --out"
        raise InputError(f"{target} cannot be written", rule=rule, fix=fix) from None


def _write_report(run: RecordedRun, stage: Path) -> None:
    """The report, without what only this machine knows."""
    starts = [
        {k: v for k, v in start.items() if k not in ("host", "pid", "working_folder")}
        for start in run.starts
    ]
    redacted_run = dataclasses.replace(
        run, folder=stage, starts=redacted_values(starts), config=redacted_values(run.config)
    )
    write_text(stage / "report.html", redacted(page_of(redacted_run)))
