"""A search of a saved policy: its method, and the value model of a folder."""

import dataclasses

from rljax import hub
from rljax.checkpoint.checkpoint import Checkpoints
from rljax.components import resolve
from rljax.config import NAMESPACES, from_dict
from rljax.data.online.encoded import load_run_tokenizer
from rljax.errors import InputError
from rljax.files import read_json_object
from rljax.models.model import Model
from rljax.policies.saved import Policy, SavedPolicy
from rljax.rollout import SearchActor
from rljax.runs.mirror import local_copy
from rljax.runs.store import is_folder
from rljax.search import Search, Value
from rljax.search.evaluators import Reads
from rljax.setup.same_ids import differing_ids, line_ids_of
from rljax.setup.weights import scalar_model, step_separator_of


def searching(policy: Policy, saved: SavedPolicy, method: str, folder: str, reads: Reads) -> Policy:
    """Returns the policy that decodes by the search `method`, guided by the value model of `folder`
    ("": none): a Hugging Face folder with a scalar head, or a run whose critic it is. Raises
    InputError for a policy of episodes, which cannot be searched."""
    if saved.config.environment.function:
        rule = "a search continues one response; episodes are sampled"
        raise InputError("--search", value=method, rule=rule, fix="leave --search out")
    value = _value(saved, folder, reads) if folder else None
    search = Search(resolve(method, NAMESPACES["search"]), value)
    return dataclasses.replace(policy, actor=SearchActor(policy.actor, lambda prompts, n: search))


def _value(saved: SavedPolicy, folder: str, reads: Reads) -> Value:
    if not is_folder(folder):
        if hub.model_name(folder) is None:
            raise InputError(
                "--search_model",
                value=folder,
                rule="a folder",
                fix="--search_model=RUN_DIR with a critic, or the folder of a reward model",
            )
        folder = str(hub.model_folder(folder))
    with local_copy(folder) as local:
        saved_config = read_json_object(local / "config.json")
        is_run = "dataflow" in saved_config
    if is_run != (reads == "critic"):
        rule = "critic for a run folder, outcome or process for a reward model's folder"
        raise InputError(
            "--search_reads",
            value=reads,
            rule=rule,
            fix=f"--search_reads={'critic' if is_run else 'outcome'}",
        )
    if is_run:
        tokenizer = load_run_tokenizer(from_dict(saved_config, f"{folder}/config.json"))
        if difference := differing_ids(saved.tokenizer, tokenizer):
            rule = "a critic that reads the ids of the policy's tokenizer"
            raise InputError(
                f"--search_model={folder}",
                value=difference,
                rule=rule,
                fix="take the critic of a run with the policy's tokenizer",
            )
        return _critic(saved, folder)
    field = "--search_model"
    source = (saved.config, saved.model, saved.tokenizer, field, folder)
    model, params = scalar_model(*source, trained=False)
    lines = ()
    if reads == "process":
        separator = step_separator_of(folder)
        lines = line_ids_of(saved.tokenizer, model.config.vocab_size, separator, field)
    return Value(model, params, reads, lines)


def _critic(saved: SavedPolicy, folder: str) -> Value:
    """The critic of a run's newest checkpoint, which has the shape of the policy."""
    if saved.model.config.lora or saved.config.critic_model:
        rule = "a critic of the policy's own shape: no adapters, no critic_model"
        raise InputError(
            "--search_model", value=folder, rule=rule, fix="--search_model=FOLDER of a reward model"
        )
    config = dataclasses.replace(saved.model.config, labels=1)
    model = Model(config, saved.model.mesh, "scalar")
    checkpoints = Checkpoints(f"{folder}/checkpoints")
    step = checkpoints.latest()
    if step is None:
        raise InputError(f"{folder} holds no checkpoint", fix="wait for the run's first one")
    like = {"critic": {"params": model.abstract()}}
    params = checkpoints.read_arrays(step, like, some=True)["critic"]["params"]
    return Value(model, params, "critic")
