"""The folder of a model: a local one as it is, the files of a repository of the hub that are
needed, or the folder that is made of a GGUF file.

Only JSON, chat templates, safetensors and GGUF are ever downloaded: no pickle, and no code.
"""

from pathlib import Path

from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.gguf import gguf_folder, is_gguf, weights_file
from rljax.hub import client
from rljax.hub.names import HubName, is_hub, model_name, parse

# What a loader reads of a folder.
CONFIG, TOKENIZER, WEIGHTS, ADAPTER = "config", "tokenizer", "weights", "adapter"
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_TEXTS = (".json", ".jinja")
_TEMPLATES = "additional_chat_templates"
# Which file a folder cannot do without, and what a repository without it may be instead.
_NEEDED = {
    CONFIG: (("config.json",), "a model has a config.json and *.safetensors"),
    TOKENIZER: (("tokenizer.json", "char_tokenizer.json"), "the tokenizer is a tokenizer.json"),
    WEIGHTS: (("config.json",), "a model has a config.json and *.safetensors"),
    ADAPTER: (_ADAPTER, "an adapter is adapter_config.json and adapter_model.safetensors"),
}


def model_folder(spec: str | Path, *parts: str) -> Path:
    """Returns the folder of a model with these `parts` in it (none named: all but an adapter's):
    the local folder `spec`, or the copy of a repository of the hub, downloaded if it is not here.
    For a GGUF file, or a folder that holds one and no config.json, it is the folder made of it.
    Raises InputError if the repository cannot be found."""
    name = model_name(spec)
    if name is None:
        path = Path(spec)
        if ADAPTER in parts:
            return path
        if is_gguf(path) and not path.is_dir():
            return gguf_folder(path)
        file = None if (path / "config.json").exists() else weights_file(path)
        return gguf_folder(file) if file else path
    parts = parts or (CONFIG, TOKENIZER, WEIGHTS)
    name = _at_its_commit(spec, name)
    prefix = "" if not name.path or is_gguf(name.path) else f"{name.path}/"
    entries = {
        path.removeprefix(prefix): entry
        for path, entry in client.listing(name).items()
        if path.startswith(prefix)
    }
    if ADAPTER not in parts and (file := _gguf_of(name, entries)):
        return gguf_folder(client.fetch(name, [prefix + file]) / prefix / file)
    for part in parts:
        client.fetch(name, [prefix + file for file in _files(name, part, entries)])
    return client.home(name) / "snapshots" / name.revision / name.path


def _gguf_of(name: HubName, entries: dict) -> str | None:
    """The GGUF file that a name of the hub is, or the only one of a repository that holds no other
    model; None where it is none."""
    if is_gguf(name.path):
        if name.path not in entries:
            raise _lacks(name, name.path, "the file that is named", entries)
        return name.path
    files = [file for file in entries if is_gguf(file) and "/" not in file]
    if not files or "config.json" in entries:
        return None
    if len(files) > 1:
        problem = f"{name} has {len(files)} .gguf files"
        fix = f"name the file: {name}/{sorted(files)[0]}"
        raise InputError(problem, value=sorted(files)[:8], rule="a model is one of them", fix=fix)
    return files[0]


def _at_its_commit(spec: str | Path, name: HubName) -> HubName:
    """The name with the commit. Of a bare one an error also says that no such folder is here."""
    try:
        return name.at(client.resolve(name))
    except InputError as error:
        if is_hub(spec):
            raise
        raise error.within(f"{spec} is no folder here, and as a name on the hub: ") from None


def _files(name: HubName, part: str, entries: dict) -> list[str]:
    """The files of a part. Raises InputError where the repository has none that can be read."""
    required, rule = _NEEDED[part]
    present = [file for file in required if file in entries]
    if not present or (part == ADAPTER and len(present) < len(required)):
        raise _lacks(name, required[-1] if part == ADAPTER else required[0], rule, entries)
    if part == ADAPTER:
        return list(required)
    if part == CONFIG:
        return present
    texts = [
        file
        for file in entries
        if file.endswith(_TEXTS) and ("/" not in file or file.startswith(f"{_TEMPLATES}/"))
    ]
    return texts if part == TOKENIZER else [*present, *_weights(name, entries)]


def _weights(name: HubName, entries: dict) -> list[str]:
    """The index and its files, else model.safetensors, else what safetensors there are: as a local
    folder is read (rljax.models.huggingface.checkpoint_folder)."""
    prefix = f"{name.path}/" if name.path else ""
    if _INDEX in entries:
        path = client.fetch(name, [prefix + _INDEX]) / prefix / _INDEX
        weight_map = read_json_object(path).get("weight_map")
        files = (
            sorted({str(file) for file in weight_map.values()})
            if isinstance(weight_map, dict)
            else []
        )
        return [_INDEX, *(file for file in files if file in entries)]
    if _WHOLE in entries:
        return [_WHOLE]
    files = [f for f in entries if f.endswith(".safetensors") and "/" not in f]
    if not files:
        raise _lacks(name, "*.safetensors", "weights are read from safetensors alone", entries)
    return files


def _lacks(name: HubName, file: str, rule: str, entries: dict) -> InputError:
    names = sorted(entries)
    pickles = [n for n in names if n.endswith(_PICKLES)]
    tree = f"{client.page(name)}/tree/{name.revision}"
    fix = f"another repository, or another folder of it; see {tree}"
    if all(f in entries for f in _ADAPTER):
        fix = f"it is an adapter: lora.adapter={name}, and model= the model that it belongs to"
    elif pickles and file == "*.safetensors":
        rule += "; pickle files can run any code, and are never read"
        fix = "convert them where you trust them: transformers' save_pretrained writes safetensors"
        names = pickles
    return InputError(f"{name} has no {file}", value=names[:6], rule=rule, fix=fix)


def model_card(name: HubName) -> Path:
    """Returns the path of README.md of a model of the hub. Raises InputError if it has none."""
    name = name.at(client.resolve(name))
    return client.fetch(name, ["README.md"]) / "README.md"


def digests(spec: str | Path) -> dict[str, str]:
    """Returns {file: SHA-256 that the hub lists} of the weights of a repository; {} for a
    local folder."""
    name = model_name(spec)
    if name is None:
        return {}
    entries = client.listing(name.at(client.resolve(name)))
    folder = name.path.rpartition("/")[0] if is_gguf(name.path) else name.path
    prefix = f"{folder}/" if folder else ""
    return {
        path.removeprefix(prefix): entry.sha256
        for path, entry in entries.items()
        if entry.sha256 and path.startswith(prefix)
    }


def pinned(spec: str) -> str:
    """Returns the hf:// path of a model or data set with the commit that it has now. Raises
    InputError if it cannot be found."""
    name = parse(spec) if is_hub(spec) else model_name(spec)
    if name is None or name.pinned:
        return spec
    return str(_at_its_commit(spec, name))
