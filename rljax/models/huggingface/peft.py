"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors.

Merging adapters is in rljax.models.adapters.lora.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rljax import hosts, hub
from rljax.arrays import fetch, put_whole
from rljax.errors import InputError
from rljax.files import open_file, read_json_object
from rljax.models.adapters import lora
from rljax.models.config import ModelConfig
from rljax.models.families import FAMILIES
from rljax.models.huggingface.safetensors_file import require_finite
from rljax.models.model import Model
from rljax.models.names import NAMES, Disk, Fused, block_layers, fused_members
from rljax.models.trees import flattened, nested

# What an adapter's config may say. Which maps have A and B, and in which layers, its tensors say.
# Anything else that is set changes what A and B mean.
_PLAIN = frozenset(
    """peft_type task_type base_model_name_or_path r lora_alpha target_modules exclude_modules
    layers_to_transform lora_dropout bias modules_to_save inference_mode revision auto_mapping
    peft_version eva_config loftq_config corda_config lora_ga_config layers_pattern megatron_core
    runtime_config qalora_group_size target_parameters use_rslora rank_pattern alpha_pattern
    init_lora_weights""".split()
)
# Starts of A and B that leave the base as it is; others (pissa, olora, corda, ...) change it, too.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# What PEFT itself cannot merge into weights.
_VIRTUAL_TOKENS = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING CPT ADAPTION_PROMPT".split()
)
_UNMERGEABLE = ("alora_invocation_tokens", "arrow_config")
_LONGEST_PATTERN = 500  # characters of a name in rank_pattern
_HALVES = {"lora_a": "lora_A", "lora_b": "lora_B"}


@dataclasses.dataclass(frozen=True)
class Half:
    """One of our A or B, of one layer, in PEFT's tensor: alone, or, where several of our maps are
    one on disk (rljax.models.names.Fused, gate and up of experts), one block of it.

    Such a map's A [m r, in] holds the A of its m parts one under the other, and its B [out, m r]
    has the B of each part in the part's rows and in the columns of its A; the rest is zero. Of X
    experts A is [X m r, in], an expert's rows together, and B [out, m r X], its last axis the
    experts'.
    """

    path: tuple[str, ...]
    layer: int | None  # in its stack
    shape: tuple[int, ...]  # of the whole tensor; of the bias of a head a single number
    rows: slice  # of A the ranks, of B what the map writes
    columns: slice  # of B the ranks
    experts: int = 0  # 0 = not of experts

    @property
    def is_a(self) -> bool:
        """Returns whether this is A, and not B."""
        return self.path[-1] == "lora_a"

    def block(self, tensor: np.ndarray) -> np.ndarray:
        """Returns our part of PEFT's tensor, a view: [rank, in] or [out, rank] as they have it; of
        experts [X, rank, in] or [out, rank, X]."""
        if not self.experts:
            return tensor[self.rows, self.columns] if tensor.ndim > 1 else tensor
        if self.is_a:
            return tensor.reshape(self.experts, -1, tensor.shape[1])[:, self.rows]
        return tensor.reshape(tensor.shape[0], -1, self.experts)[self.rows, self.columns]

    def transposed(self, block: np.ndarray) -> np.ndarray:
        """Returns the block in our order of axes: [in, rank] or [rank, out], of
        experts behind X."""
        return block.swapaxes(-1, -2) if self.experts and self.is_a else block.T


def _has_towers(config: ModelConfig) -> bool:
    """Returns whether the base has more than a decoder, which transformers then keeps below
    language_model."""
    return config.vision is not None or bool(config.part_of)


def _halves(model: Model) -> dict[str, list[Half]]:
    """{PEFT's tensor name: what it holds}."""
    out: dict[str, list[Half]] = {}
    config, shapes, blocks = model.config, model.shapes(), block_layers(model.config)
    every = slice(None)
    prefix = "base_model.model.model." + ("language_model." if _has_towers(config) else "")
    for path, (shape, _) in shapes.items():
        if path == ("head",) and model.head == "scalar":
            out["base_model.model.score.weight"] = [Half(path, None, shape[::-1], every, every)]
        if path == ("head_bias",):
            out["base_model.model.score.bias"] = [Half(path, None, shape, every, every)]
        if path[-1] not in _HALVES:
            continue
        if path[0] == "vision":
            for key, half in _of_tower(model, path):
                out[key] = [half]
            continue
        if lora.is_of_experts(path):
            name, where = _of_experts(model, path)
            for i, layer in enumerate(blocks[path[1]]):
                key = f"{prefix}layers.{layer}.{name}.{_HALVES[path[-1]]}.weight"
                out.setdefault(key, []).append(Half(path, i, **where))
            continue
        name, rank = lora.module_name(path[2:-1], config), config.lora.rank
        module, is_a = lora.module_of(path[2:-1], config), path[-1] == "lora_a"
        members = fused_members(path, module) if isinstance(module, Fused) else [path]
        sizes = [math.prod(shapes[member][0][1:]) // rank for member in members]
        at, ranks = members.index(path), rank * len(members)
        before = sum(sizes[:at])
        part = slice(rank * at, rank * (at + 1))
        where = dict(shape=(ranks, sizes[0]), rows=part, columns=every)
        if not is_a:
            rows = slice(before, before + sizes[at])
            where = dict(shape=(sum(sizes), ranks), rows=rows, columns=part)
        for i, layer in enumerate(blocks[path[1]]):
            key = f"{prefix}layers.{layer}.{name}.{_HALVES[path[-1]]}.weight"
            out.setdefault(key, []).append(Half(path, i, **where))
    return out


def _of_tower(model: Model, path: tuple[str, ...]) -> Iterator[tuple[str, Half]]:
    """(PEFT's tensor name, what it holds) of an A or B of the vision tower, block by block."""
    shape, rank, every = model.shapes()[path][0], model.config.lora.rank, slice(None)
    name = lora.tower_name(path[1:-1], model.config)
    stacked = lora.stacked_axes(path)
    size = math.prod(shape[stacked:]) // rank
    whole = (rank, size) if path[-1] == "lora_a" else (size, rank)
    for i in range(shape[0]) if stacked else (None,):
        key = f"base_model.model.model.{name.format(i)}.{_HALVES[path[-1]]}.weight"
        yield key, Half(path, i, whole, every, every)


def _of_experts(model: Model, path: tuple[str, ...]) -> tuple[str, dict]:
    """(the module of PEFT's tensor, fields of Half) of an A or B of experts: those of a parameter
    that is targeted by itself, `target_parameters`. Where both parameters of a module are, PEFT
    wraps that of gate and up first."""
    config, shape = model.config, model.shapes()[path][0][1:]
    matrix, rank, experts = path[-2], config.lora.rank, shape[0]
    module = lora.experts_name(config, matrix).rpartition(".")[0]
    parts = ("down",) if matrix == "down" else ("gate", "up")
    if matrix != "down" and (*path[:-2], "down", path[-1]) in model.shapes():
        module += ".base_layer"
    at, ranks, every = parts.index(matrix), rank * len(parts), slice(None)
    part = slice(rank * at, rank * (at + 1))
    if path[-1] == "lora_a":
        return module, dict(
            shape=(experts * ranks, shape[1]), rows=part, columns=every, experts=experts
        )
    rows = slice(shape[2] * at, shape[2] * (at + 1))
    on_disk = NAMES[FAMILIES[config.family].names][f"mlp.{matrix}[x]"]
    if isinstance(on_disk, Disk) and on_disk.column is not None and not on_disk.halves:
        rows = slice(at, None, 2)
    shape = (shape[2] * len(parts), ranks * experts)
    return module, dict(shape=shape, rows=rows, columns=part, experts=experts)


def _ranks(model: Model) -> dict[str, int]:
    """{last part of the name: rank} of the maps that are several of ours."""
    found = {}
    for path in model.shapes():
        if path[0] == "vision":
            continue
        if path[-1] == "lora_a" and lora.is_of_experts(path):
            if path[-2] != "down":
                found["gate_up_proj"] = 2 * model.config.lora.rank
        elif path[-1] == "lora_a":
            module = lora.module_of(path[2:-1], model.config)
            if isinstance(module, Fused):
                last = module.name.rpartition(".")[2]
                found[last] = len(module.members) * model.config.lora.rank
    return found


def save_adapter(folder: str | Path, model: Model, params: dict, *, base: str = "") -> None:
    """Writes the adapters of `params` so that PEFT (and load_adapter) reads them. `base` is the
    name or folder of the model that they belong to; of one of the hub its name and its revision are
    written apart, as PEFT has them. Of several hosts all take part, and the first one writes."""
    name = hub.model_name(base) if base else None
    folder, flat, all_halves = Path(folder), flattened(params), _halves(model)
    whole = fetch({half.path: flat[half.path] for held in all_halves.values() for half in held})
    if not hosts.first():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, held in all_halves.items():
        tensors[key] = np.zeros(held[0].shape, np.float32)
        for half in held:
            value = whole[half.path] if half.layer is None else whole[half.path][half.layer]
            block = half.block(tensors[key])
            # Ours are [in, rank] and [rank, out], whatever the number of axes; theirs transposed.
            value = value.astype(np.float32).reshape(half.transposed(block).shape)
            block[...] = half.transposed(value)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    paths = {path for path in whole if path[-1] in lora.LEAVES}
    tower = {lora.tower_name(p[1:-1], model.config) for p in paths if p[0] == "vision"}
    experts = {p for p in paths if lora.is_of_experts(p)}
    rest = (p for p in paths - experts if p[0] != "vision")
    names = {lora.module_name(p[2:-1], model.config) for p in rest}
    parameters = {lora.experts_name(model.config, p[-2]) for p in experts}
    rank, alpha, ranks = model.config.lora.rank, model.config.lora.alpha, _ranks(model)
    kind = "TOKEN_CLS" if model.config.head_bias else "SEQ_CLS"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.head == "lm" else kind,
        "base_model_name_or_path": (name.repository if name else base) or None,
        "revision": (name.revision or None) if name else None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": {last: alpha * many / rank for last, many in ranks.items()},
        "target_modules": _targets(names, tower, _has_towers(model.config)) or None,
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": ["score"] if model.head == "scalar" else None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(names: set[str], tower: set[str], has_towers: bool) -> list[str] | str:
    """The last part of every name; of a model with a vision tower, which has the same ones, a
    pattern, with the names of the tower's maps in full."""
    last = sorted({name.rpartition(".")[2] for name in names})
    if not has_towers:
        return last
    decoder = [rf"language_model\..*\.({'|'.join(last)})"] if last else []
    full = [re.escape(name).replace(re.escape("{}"), r"\d+") for name in sorted(tower)]
    parts = decoder + full
    return ".*" + (parts[0] if len(parts) == 1 else f"({'|'.join(parts)})")


def _merge_it(folder: str | Path, config: dict, head: str = "lm", *, untie: bool = False) -> str:
    """The fix for an adapter that is more than A and B. `untie`: the base's embedding and head are
    one, and PEFT would merge into both what one of them has."""
    base = config.get("base_model_name_or_path") or "BASE"
    kind = "AutoModelForCausalLM" if head == "lm" else "AutoModelForSequenceClassification"
    apart = (
        "base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone()); "
        "base.config.tie_word_embeddings = False; "
    )
    return (
        f"merge it with PEFT and start from that: base = {kind}.from_pretrained({base!r}); "
        f"{apart * untie}PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload()."
        f"save_pretrained(FOLDER), the tokenizer by AutoTokenizer.from_pretrained({base!r})."
        "save_pretrained(FOLDER); then --config.model=FOLDER and no lora.adapter"
    )


def _read_config(folder: Path, model: Model) -> dict:
    """adapter_config.json. Raises InputError where `model` has no adapters of its kind."""
    path = folder / "adapter_config.json"
    config = read_json_object(path)
    merge = _merge_it(folder, config, model.head)
    kind = config.get("peft_type")
    if kind != "LORA":
        lost = kind in _VIRTUAL_TOKENS
        rule = "no weights of the model can hold it" if lost else "supported: LORA"
        fix = "train an adapter of type LORA" if lost else merge
        raise InputError(f"{path}: peft_type", value=kind, rule=rule, fix=fix)
    for key, value in config.items():
        if key not in _PLAIN and value:
            lost = key in _UNMERGEABLE
            rule = "PEFT does not merge it into weights, either" if lost else "plain A and B only"
            fix = f"train an adapter without {key}" if lost else merge
            raise InputError(f"{path}: {key}", value=value, rule=rule, fix=fix)
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        rule = "it changes the base's weights, too: one of gaussian, orthogonal, eva, true, false"
        raise InputError(f"{path}: init_lora_weights", value=start, rule=rule, fix=merge)
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias", value=config["bias"], rule="none", fix=merge)
    saved = config.get("modules_to_save") or ()
    saved = set(map(str, saved if isinstance(saved, list | tuple) else [saved]))
    if saved - ({"score", "classifier"} if model.head == "scalar" else set()):
        rule = "embeddings and heads are a part of the base here, which is not trained"
        raise InputError(f"{path}: modules_to_save", value=sorted(saved), rule=rule, fix=merge)
    numbers = {key: config.get(key) for key in ("r", "lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            fix = f"write {key} as an object of names and numbers, or leave it out"
            raise InputError(f"{path}: {key}", value=patterns, rule="{name: number}", fix=fix)
        numbers |= {f"{key}: {name}": value for name, value in patterns.items()}
        for name in patterns:
            _check_pattern(path, key, name)
    for key, value in numbers.items():
        kinds = int if key.startswith("r") else int | float
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            fix = f"set {key} to such a number, as the adapter was trained"
            raise InputError(f"{path}: {key}", value=value, rule="a number above 0", fix=fix)
    return config


def _check_pattern(path: Path, key: str, name: str) -> None:
    """Raises InputError for a pattern that might match for ever: a folder is data."""
    rest = name.replace(".*", "").replace(r"\d+", "")
    if len(name) > _LONGEST_PATTERN or not re.fullmatch(r"(\\\.|[\w.|()^$-])*", rest):
        rule = r"names, and of regular expressions | ( ) ^ $ \. .* \d+ alone"
        raise InputError(f"{path}: {key}", value=name, rule=rule, fix="write the names in full")
    try:
        re.compile(name)
    except re.error as error:
        raise InputError(
            f"{path}: {key}", value=name, rule=str(error), fix="write the names in full"
        ) from None


def _scaled(config: dict, key: str, half: Half) -> tuple[int, float]:
    """(the rank, the factor of B A) that an adapter's config says of a tensor: those of the first
    pattern that its module's name ends in, else of all."""
    module = key.removeprefix("base_model.model.").rpartition(".lora_")[0]
    if half.experts:
        module = module.removesuffix(".base_layer")
        module += ".down_proj" if half.path[-2] == "down" else ".gate_up_proj"

    def of(patterns: str, usual: str):
        listed = (config.get(patterns) or {}).items()
        found = (v for name, v in listed if re.match(rf"(.*\.)?({name})$", module))
        return next(found, config[usual])

    rank, alpha = of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _require_size(path: Path, config: dict, model: Model, ranks: list[int]) -> None:
    """Raises InputError where the model's adapters have another rank or alpha than the file's:
    `ranks` of the maps that are one of ours each."""
    largest, own = max(ranks, default=config["r"]), model.config.lora
    wanted = {"rank": largest, "alpha": config["lora_alpha"]}
    if wrong := {name: value for name, value in wanted.items() if vars(own)[name] != value}:
        raise InputError(
            f"{path}: " + ", ".join({"rank": "r", "alpha": "lora_alpha"}[name] for name in wrong),
            value=list(wrong.values()),
            rule=f"the model has {', '.join(f'lora.{n}={vars(own)[n]}' for n in wrong)}",
            fix=" ".join(f"--config.lora.{name}={value}" for name, value in wrong.items()),
        )


def _require_tensors(file: Path, config: dict, model: Model, names: set[str]) -> None:
    """Raises InputError where a file has other tensors than the model has adapters, with the
    targets that it has, where any pattern says them."""
    wanted = set(_halves(model))
    if names == wanted:
        return
    extra, missing = sorted(names - wanted), sorted(wanted - names)
    merge = _merge_it(file.parent, config, model.head)
    ours = tuple(f".{half}.weight" for half in _HALVES.values())
    others = [name for name in extra if not name.endswith(ours)]
    if model.config.tie_embeddings and any(re.search(r"lm_head|embed_tokens", n) for n in extra):
        merge = _merge_it(file.parent, config, model.head, untie=True)
    if others:
        raise InputError(
            f"{file} has {len(others)} tensors beside the A and B of linear maps",
            value=others[:4],
            rule="they are weights of the base, or change what A and B mean",
            fix=merge,
        )
    targets = sorted({_target(name) for name in names if ".lora_" in name})
    own = dataclasses.replace(model.config.lora, targets=tuple(targets or ("*",)))
    config_there = dataclasses.replace(model.config, lora=own)
    try:
        fits = set(_halves(dataclasses.replace(model, config=config_there))) == names
    except InputError:  # a map that is no layer's, such as the head
        fits = False
    raise InputError(
        f"{file} "
        + (f"has {len(extra)} tensors that the model does not have" if extra else "")
        + (" and " if extra and missing else "")
        + (f"lacks {len(missing)} tensors that the model needs" if missing else ""),
        value=(extra or missing)[:4],
        rule=f"lora.targets={','.join(model.config.lora.targets)}"
        + ("" if fits else "; no targets say which maps it has: the same of all layers"),
        fix=f"--config.lora.targets={','.join(targets)}" if fits else merge,
    )


def _target(name: str) -> str:
    """The pattern of lora.targets that a tensor's map matches."""
    module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
    if "visual." in module:
        return "visual." + re.sub(r"\.\d+(?=\.)", "", module.partition("visual.")[2])
    if module.endswith((".experts", ".experts.base_layer")):
        return "*.experts.*"
    return module.rpartition(".")[2]


def load_adapter(folder: str | Path, model: Model, params: dict) -> dict:
    """Returns `params` with its adapters replaced by those of a PEFT folder or of a repository of
    the hub, which holds exactly those that the model has.

    What the file says of the factor of each map (rank_pattern, alpha_pattern, use_rslora) goes into
    B: the model has one alpha and one rank for all. A map of a smaller rank keeps the fresh rows of
    A beside its own, and zeros in B. Raises InputError for a file that cannot be read, and for an
    adapter that is not of the model's kind, rank, alpha or targets.
    """
    folder = hub.model_folder(folder, hub.ADAPTER)
    config = _read_config(folder, model)
    file = folder / "adapter_model.safetensors"
    os.close(open_file(file))  # the library would wait for a pipe
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} is not readable", rule=str(error), fix="copy it again") from None
    wanted = _halves(model)
    scales = {
        key: _scaled(config, key, held[0])
        for key, held in wanted.items()
        if held[0].path[-1] in _HALVES
    }
    plain = {k for k, held in wanted.items() if len(held) == 1 and not held[0].experts} & {*scales}
    ranks = [scales[key][0] for key in plain if key in tensors]
    _require_size(folder / "adapter_config.json", config, model, ranks)
    _require_tensors(file, config, model, set(tensors))
    flat, paths = flattened(params), {half.path for held in wanted.values() for half in held}
    rank, factor = model.config.lora.rank, model.config.lora.alpha / model.config.lora.rank
    narrow = {wanted[key][0].path for key in plain if scales[key][0] < rank}
    fresh = fetch({path: flat[path] for path in narrow if path[-1] == "lora_a"})
    new = {path: np.zeros(flat[path].shape, flat[path].dtype) for path in paths}
    new |= {path: np.array(x) for path, x in fresh.items()}
    for key, held in wanted.items():
        own_rank, own_factor = scales.get(key, (rank, factor))
        tensor = tensors[key]
        require_finite(tensor, file, key)
        if not held[0].is_a and own_factor != factor:
            # In 16 bits the factor and each product would be rounded.
            wide = np.promote_types(tensor.dtype, np.float32)
            tensor = tensor.astype(wide) * np.asarray(own_factor / factor, wide)
        own_rank = own_rank if key in plain else rank
        for half, block in _blocks(file, key, tensor, held, own_rank, rank):
            target = new[half.path] if half.layer is None else new[half.path][half.layer]
            if own_rank < rank:
                target = target[..., :own_rank] if half.is_a else target[:own_rank]
            target[...] = half.transposed(block).reshape(target.shape)
    layout = flattened(model.shardings())
    return nested(flat | {path: put_whole(x, layout[path]) for path, x in new.items()})


def _blocks(file: Path, key: str, tensor: np.ndarray, held: list[Half], own_rank: int, rank: int):
    """(half, its block) of a tensor of `own_rank` of the model's `rank`. Of maps that are one on
    disk an adapter may also be PEFT's own, whose rank is that of one part: its A is that of every
    part, its B has their rows alone."""
    whole, parts, every = held[0].shape, len(held), slice(None)
    if own_rank < rank:
        whole = (own_rank, whole[1]) if held[0].is_a else (whole[0], own_rank)
        held = [dataclasses.replace(held[0], rows=every, columns=every)]
    shared = (whole[0] // parts, *whole[1:])
    if not held[0].is_a:
        shared = (whole[0], *(size // parts for size in whole[1:]))
    if parts > 1 and tensor.shape == shared:
        for half in held:
            own = {"rows": every} if half.is_a else {"columns": every}
            yield half, dataclasses.replace(half, **own).block(tensor)
        return
    if tensor.shape != whole:
        rule = f"by adapter_config.json {whole}"
        fix = "copy both files of the adapter again"
        raise InputError(f"{file}: the shape of {key}", value=tensor.shape, rule=rule, fix=fix)
    outside = tensor.copy()
    for half in held:
        half.block(outside)[...] = 0
        yield half, half.block(tensor)
    if np.any(outside):
        raise InputError(
            f"{file}: {key} mixes the parts of a map that are apart here",
            rule="zero outside of one block for each part, as save_adapter writes it",
            fix=_merge_it(file.parent, {}),
        )
