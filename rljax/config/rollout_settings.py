"""Settings of sampling and scoring: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import ANY, LIMITS, WORD, option
from rljax.config.names import Settings

_SECONDS = {
    "above": 0,
    "rule": "must be > 0 seconds",
    "fix": "write 10, or as long as one takes at most",
}


@dataclasses.dataclass
class SamplerConfig(Settings):
    """Sampling of responses. `temperature` is that of the sampler and of every log-prob of
    the trainer."""

    dtype: str = option(
        "",
        'Dtype of decoding: float32 | bfloat16 | float16; "" = model_settings.dtype, as in the '
        "trainer. The log-probs that the sampler records are its own.",
        choices=("", "float32", "bfloat16", "float16"),
    )
    head_in_float32: str = option(
        "",
        'Computes the logits of decoding as a float32 product: on | off; "" = as '
        "model_settings.head_in_float32.",
        choices=("", "on", "off"),
    )
    temperature: float = option(
        1.0, "Sampling temperature, above 0.", low=0, read_by="a policy", per_run=True
    )
    top_k: int = option(0, "Number of likeliest tokens that are sampled from; 0 = off.", low=0)
    top_p: float = option(
        1.0,
        "Probability mass of the likeliest tokens that are sampled from; 1 = off.",
        above=0,
        high=1,
        rule="0 < top_p <= 1 (1 = off)",
        fix="write 1.0",
    )
    min_p: float = option(
        0.0,
        "Smallest probability of a token, relative to that of the likeliest one; less likely "
        "tokens are not sampled. 0 = off.",
        low=0,
        high=1,
        rule="from 0 (off) to 1",
        fix="write 0.0",
    )
    max_response_tokens: int = option(
        512,
        "Largest length of a response, in tokens; a longer one is cut.",
        low=1,
        read_by="prompts",
    )
    stop_strings: tuple[str, ...] = option(
        (),
        "Texts that end a response, besides the end-of-sequence ids of the tokenizer.",
        fits=all,
        rule="no empty string",
        fix="leave the empty one out",
        safe=ANY,
    )
    layout: str = option(
        "",
        'Mesh of decoding, over the same devices: "" = that of training, "mesh(data=4, '
        'tensor=2)", or "auto" = the fastest by the plan that fits into memory. Any other mesh '
        "than that of training needs a copy of the weights, made after each update and dropped "
        "after the rollout, but for the base under adapters (docs/guides/sampler.md). With "
        'rollouts.sampler_devices, the mesh is over those, and "" = whole weights on each of them.',
        holds="layout",
        safe="auto",
    )
    weight_dtype: str = option(
        "",
        'Dtype of the weights while decoding: float32 | bfloat16 | float16 | int8; "" = as they '
        "are trained. int8: linear maps have int8 codes with float32 scales, and the rest is in "
        "sampler.dtype; a base that is quantised already keeps its own codes.",
        choices=("", "float32", "bfloat16", "float16", "int8"),
    )
    slots: int = option(
        0,
        "Rows decoded at a time; when one ends, another takes its slot. 0 = all rows of a round; "
        "with rollouts in flight those of one step, and never more than those of 1 + ahead steps.",
        low=0,
    )
    loop: str = option(
        "device",
        'Loop that refills slots: "device", inside one program, or "host", between dispatches '
        "(docs/guides/sampler.md).",
        choices=("device", "host"),
    )
    kv_dtype: str = option(
        "",
        'Dtype of keys and values: float32 | bfloat16 | float16 | int8; "" = the dtype of '
        "decoding.",
        choices=("", "float32", "bfloat16", "float16", "int8"),
    )
    page_tokens: int = option(
        0,
        "Tokens in a page of keys and values: slots take pages of a pool as they grow, and share "
        'those of a prompt (with loop="host", and in environments). 0 = no pages; each slot has '
        "columns of its own.",
        low=0,
    )
    pages: int = option(
        0,
        "Number of pages of all slots together; 0 = as many as the slots' columns take.",
        low=0,
        needs="page_tokens",
    )
    draft_tokens: int = option(
        0,
        "Draft tokens of speculative decoding: tokens that followed an earlier occurrence of the "
        "newest ones are read in one step and kept as long as they equal the tokens that are "
        "drawn, so that samples do not change. 0 = off.",
        low=0,
    )
    router_replay: bool = option(
        False,
        "Repeats the routing of a mixture of experts in training (rollout routing replay, arXiv "
        "2510.11370): the experts that the sampler chose for each token are recorded, and the "
        "policy's passes send the token to them again, weighted by the current router. Needs "
        'loop="device" and no environment.',
    )
    thinking_tokens: tuple[int, ...] = option(
        (),
        "(low, high): range of the number of tokens that a sample may think for, drawn for each "
        "sample. If end_of_thinking has not come by then, interrupt_phrase is forced (mask 0), "
        "and the answer follows. () = off.",
        **LIMITS,
    )
    end_of_thinking: str = option(
        "</think>", "Text that ends thinking.", needs="thinking_tokens", safe=ANY
    )
    interrupt_phrase: str = option(
        "Okay, time is up. Let me stop thinking and formulate a final answer now.</think>",
        "Text that is forced after the last token of thinking.",
        needs="thinking_tokens",
        safe=ANY,
    )


@dataclasses.dataclass
class RewardConfig(Settings):
    """Scoring of responses. `function` is one of rljax.rewards, a dotted name, or
    "file.py:function"; a call of it ends after timeout_s."""

    function: str = option(
        "",
        'Reward function; "" = that of the task; for files the one that their data_source names '
        "(by_source), else exact_match.",
        component="reward",
    )
    model: str = option(
        "",
        "Folder of a reward model, which scores whole responses: the only reward if function is "
        '"", else its score is reward_model() in a mixture, or the parameter model_score of your '
        "own function.",
        path="model",
        read_by="samples",
        refused=True,
    )
    cost_model: str = option(
        "",
        'Folder of a cost model (configs/offline/cost_model.py), for dataflow="safe_rlhf": its '
        'score is the cost of a response, above 0 = unsafe. "" = the part `cost` of the reward is '
        "the cost.",
        path="model",
        read_by="samples",
        refused=True,
    )
    judge_model: str = option(
        "",
        'Folder of a chat model that judge() and rubric() ask, on the mesh; "" = none.',
        path="model",
    )
    judge_grades: tuple[str, ...] = option(
        (),
        "Answers of the judge model, one token each, worst first; () = 0 to scale.",
        needs="judge_model",
        safe=WORD,
    )
    rubrics: str = option(
        "",
        "Buffer that holds the rubrics of each prompt, such as "
        '"evolving_rubrics(generator=\'...\')"; "" = off.',
        component="rubrics",
    )
    process_model: str = option(
        "",
        "Folder of a process reward model: its scores of the lines of a response are added to the "
        'outcome, by functions of rljax.shaping.steps or your own; "" = off.',
        path="model",
        read_by="samples",
        refused=True,
    )
    process_reward: str = option(
        "dense_step_rewards(lambda_fail=0.25, lambda_pass=0.025)",
        "Function of rljax.shaping.steps that turns the scores of lines into rewards.",
        component="process_reward",
        needs="process_model",
    )
    process_lines: str = option(
        "line_ids()",
        'Function that selects the lines that are scored; "line_ids(code_only=True)" = those of '
        "the last fenced block only. A line ends where the steps on which process_model was "
        "trained ended: at the offline.step_separator of its run.",
        component="process_reward",
        needs="process_model",
    )
    workers: int = option(
        2,
        "Processes that score at once, on each host; for a reward that asks a server, on all "
        "hosts together.",
        low=1,
        may_change=True,
    )
    timeout_s: float = option(
        10.0,
        "Longest time of one call, in seconds; each member of a mixture has all of it.",
        **_SECONDS,
    )
    memory_gb: float = option(
        8.0,
        "Memory limit of a worker, in GB (RLIMIT_DATA); more is a MemoryError. 0 = no limit.",
        low=0,
    )


@dataclasses.dataclass
class EnvironmentConfig(Settings):
    """The environment of the policy's episodes: a generator function (docs/guides/environments.md).
    Limits end an episode; it is scored as it stands."""

    function: str = option(
        "",
        'Environment: a name of rljax.environments, a dotted name or "file.py:function", such as '
        '"tools(functions=(\'python()\',))". "" = none: the policy answers once.',
        component="environment",
    )
    max_turns: int = option(
        8,
        "Largest number of replies of the policy in an episode; sampler.max_response_tokens "
        "limits the length of each.",
        low=1,
    )
    max_calls: int = option(0, "Largest number of tool calls in an episode; 0 = no limit.", low=0)
    max_tokens: int = option(
        0,
        "Largest length of an episode, in tokens: prompt, replies and observations, which are the "
        "columns of a row. 0 = the most that data.max_prompt_tokens, max_turns replies and the "
        "observations between them may take.",
        low=0,
    )
    max_reply_tokens: int = option(
        1024,
        "Largest length of an observation, in tokens; a longer one keeps its head and its tail.",
        low=1,
    )
    control_tokens: bool = option(
        False,
        "Lets texts that the environment yields hold control tokens, such as <|im_end|>. If "
        "false, such a text gets a space and is read as ordinary tokens. Answers of tools never "
        "hold one.",
    )
    turn_timeout_s: float = option(
        10.0, "Longest time of one step of the environment, in seconds.", **_SECONDS
    )
    episode_timeout_s: float = option(
        0.0, "Longest time of a whole episode, decoding included, in seconds; 0 = no limit.", low=0
    )
    calls: str = option(
        "auto",
        'Format of tool calls, one of rljax.environments.calls; "auto" = as the chat template '
        'writes them; "" = none are looked for.',
        holds="calls",
        safe="auto",
    )
    on_bad_call: str = option(
        "reply",
        "Answer to a call that cannot be parsed: the reason, at most three times in a row "
        '("reply"), or the end of the episode ("end").',
        choices=("reply", "end"),
    )
    mask_bad_turns: bool = option(
        False, "Leaves turns with a call that cannot be parsed out of the loss."
    )
    history: str = option(
        "append",
        'Treatment of old reasoning that the chat template drops: "append" keeps what was read, '
        '"rewrite" begins another row with what the template shows.',
        choices=("append", "rewrite"),
    )
    max_rows: int = option(
        1,
        "Largest number of rows that a seat of an episode takes: one for each history that "
        '"rewrite" begins, or that a later Opening of the environment does.',
        low=1,
    )
    workers: int = option(
        2, "Processes that play episodes, on each host; each holds hundreds of episodes.", low=1
    )
    memory_gb: float = option(
        8.0, "Memory limit of a worker, in GB (RLIMIT_DATA); 0 = no limit.", low=0
    )
    retries: int = option(
        1, "Number of times that a failed episode is played again before it is masked.", low=0
    )
    max_failed: float = option(
        0.05,
        "Largest share of a step's episodes that may fail; the run ends if more do, unless it is "
        "only one of several (with 0, always).",
        low=0,
        high=1,
        rule="a share, from 0 to 1",
        fix="write 0.5",
    )


@dataclasses.dataclass
class RolloutSettings(Settings):
    """Source of a step's samples: the newest weights, weights of the steps before (in flight), or a
    file of stored rollouts."""

    max_staleness: int = option(
        0,
        "Largest number of steps by which the weights that drew a token may be older than those "
        "that learn from it. 0 = every step samples with the newest weights, and begins when the "
        "last one is over.",
        low=0,
        refused=True,
    )
    ahead: int = option(
        -1,
        "Number of later steps whose prompts are started early. If it is less than max_staleness, "
        "a step learns from finished groups, the oldest first; if it equals max_staleness, in the "
        "order of the data. -1 = half of max_staleness, at least 1.",
        needs="max_staleness",
    )
    in_flight_cache: str = option(
        "keep",
        'Keys and values of responses in flight when the weights change: "keep" continues with '
        'those of the older weights (PipelineRL), "reread" computes them again (AReaL).',
        choices=("keep", "reread"),
        needs="max_staleness",
    )
    partial_mask: str = option(
        "none",
        "Tokens left out of the loss in a response that was sampled with weights of several "
        'steps: "none", or the "stale" ones, which are all but the part by the newest of these '
        "weights.",
        choices=("none", "stale"),
        needs="max_staleness",
    )
    sampler_devices: int = option(
        0,
        "Devices that only sample, the last ones of the mesh; the others learn at the same time. "
        "0 = all devices sample and learn, one after the other.",
        low=0,
    )
    clock: str = option(
        "wall",
        'Time at which a score counts: as soon as it is there ("wall"), or from the second '
        'dispatch of decoding after it was asked for ("logical(2)"), which makes runs equal bit '
        'by bit. With sampler_devices, new weights are used as soon as they are there ("wall"), '
        "or once the samples of the next step are complete.",
        needs="max_staleness",
        safe=WORD,
    )

    replay: str = option(
        "",
        'File of trajectories with their log-probs (rljax sample --trajectories); "" = none.',
        component="data",
        refused=True,
    )
    replay_share: float = option(
        1.0,
        "Share of a step's prompts that come from replay; 1 = all (off-policy).",
        needs="replay",
    )

    @property
    def steps_ahead(self) -> int:
        """`ahead`, or its default if the config does not set it."""
        if self.ahead != -1:
            return self.ahead
        return max(1, self.max_staleness // 2) if self.max_staleness else 0
