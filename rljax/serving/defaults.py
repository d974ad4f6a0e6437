"""Defaults of sampling for requests and options that set nothing: the settings of a run, or those
in the generation_config.json of a model folder, or else a temperature of the caller."""

import dataclasses

from rljax.errors import InputError
from rljax.policies import SavedPolicy
from rljax.sampler import Sampling

CHAT_TEMPERATURE = 0.0  # of `rljax chat`: greedy, as transformers' generate
API_TEMPERATURE = 1.0  # OpenAI's default, and vLLM's
FIELDS = ("temperature", "top_k", "top_p", "min_p")
GENERATION = "generation_config.json"
# Fields of generation_config.json that would change the samples and are not supported, with the
# values that change nothing.
_NOT_SUPPORTED = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "num_beams": (1,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Values of the fields of Sampling that a request leaves out, and where they come from."""

    temperature: float = API_TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    source: str = "the default"
    not_done: tuple[str, ...] = ()  # settings of the source that are not supported

    def fields(self) -> dict[str, float | int]:
        """Returns {name of a field of Sampling: value}."""
        return {name: getattr(self, name) for name in FIELDS}

    def line(self) -> str:
        """Returns the fields in a line, without those that are off."""
        defaults = vars(Defaults())
        shown_names = [n for n in FIELDS if n == "temperature" or getattr(self, n) != defaults[n]]
        text = ", ".join(f"{name} {getattr(self, name):g}" for name in shown_names)
        if not self.temperature:
            text = "temperature 0, greedy"
        text += f" ({self.source})"
        return text + (f"; {', '.join(self.not_done)} is not done" if self.not_done else "")


def defaults_of(policy: SavedPolicy, temperature: float) -> Defaults:
    """Returns the defaults of a saved policy. `temperature` is used if neither its run nor its
    generation_config.json sets one. Raises InputError for a generation_config.json with values that
    Sampling does not accept."""
    if policy.step is not None:
        run_values = {name: getattr(policy.config.sampler, name) for name in FIELDS}
        return Defaults(**run_values, source="as the run sampled")
    values = {n: v for n in FIELDS if (v := policy.generation.get(n)) is not None}
    if values.get("top_k") == -1:  # vLLM's word for all tokens
        del values["top_k"]
    if policy.generation.get("do_sample") is False:  # transformers then reads none of them
        values = {"temperature": 0.0}
    for name, value in values.items():
        kind = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            fix = f"write a number, or leave {name} out"
            raise InputError(f"{GENERATION}: {name}", value=value, fix=fix)
    try:
        Sampling(**values)
    except InputError as error:
        raise error.within(f"{GENERATION}: ") from None
    not_done = tuple(
        f"{name}={value!r:.40}"
        for name, neutral in _NOT_SUPPORTED.items()
        if (value := policy.generation.get(name)) is not None and value not in neutral
    )
    source = f"as {GENERATION} says"
    if policy.generation.get("do_sample") or values:
        values = {"temperature": 1.0} | values  # what transformers samples at without another one
    else:
        values, source = {"temperature": temperature}, f"no {GENERATION} says how to sample"
    return Defaults(**values, source=source, not_done=not_done)
