"""Settings of sampling and scoring: a part of rljax.config.schema."""

import dataclasses

from rljax.config.declare import LIMITS, option
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
        'What decoding computes in: float32 | bfloat16 | float16, "" = model_settings.dtype, as '
        "the trainer does. The log-probs that it records are its own.",
        choices=("", "float32", "bfloat16", "float16"),
    )
    head_in_float32: str = option(
        "",
        'Whether its logits are a float32 product: on | off, "" = model_settings.head_in_float32.',
        choices=("", "on", "off"),
    )
    temperature: float = option(1.0, "above 0", low=0)
    top_k: int = option(0, "sample from the so many likeliest tokens; 0 = off", low=0)
    top_p: float = option(
        1.0,
        "sample from the likeliest tokens of this mass; 1 = off",
        above=0,
        high=1,
        rule="0 < top_p <= 1 (1 = off)",
        fix="write 1.0",
    )
    min_p: float = option(
        0.0,
        "drop tokens less likely than min_p x the top token; 0 = off",
        low=0,
        high=1,
        rule="from 0 (off) to 1",
        fix="write 0.0",
    )
    max_response_tokens: int = option(512, "where a response is cut", low=1)
    stop_strings: tuple[str, ...] = option(
        (),
        "besides the tokenizer's end-of-sequence ids",
        fits=all,
        rule="no empty string",
        fix="leave the empty one out",
        safe="any",
    )
    layout: str = option(
        "",
        'The mesh of decoding, over the same devices: "" = training\'s own, "mesh(data=4, '
        'tensor=2)", or "auto" = what the plan finds fastest within memory. Another one is a copy '
        "of the weights, made after each update and dropped after the rollout "
        '(docs/guides/sampler.md). With rollouts.sampler_devices it is over those, and "" = '
        "weights whole on each of them.",
    )
    weight_dtype: str = option(
        "",
        'How decoding holds the weights: float32 | bfloat16 | float16 | int8, "" = as they are. '
        "int8: codes of the linear maps, of a quantised base its own; the rest is in "
        "sampler.dtype.",
        choices=("", "float32", "bfloat16", "float16", "int8"),
    )
    slots: int = option(
        0,
        "Rows decoded at a time, refilled as they end. 0: all of a round; in flight those of 1 + "
        "ahead.",
        low=0,
    )
    loop: str = option(
        "device",
        'Where slots are refilled: on the "device", inside one program, or by the "host", between '
        "dispatches (docs/guides/sampler.md).",
        choices=("device", "host"),
    )
    kv_dtype: str = option(
        "",
        'How keys and values are held: float32 | bfloat16 | float16 | int8, "" = as decoding '
        "computes.",
        choices=("", "float32", "bfloat16", "float16", "int8"),
    )
    page_tokens: int = option(
        0,
        "Tokens of a page of keys and values: slots take pages of a pool as they grow, and share "
        'those of a prompt (with loop="host", and in environments). 0 = each slot has its columns '
        "to itself.",
        low=0,
    )
    pages: int = option(
        0, "of all slots together; 0 = as many as their columns take", low=0, needs="page_tokens"
    )
    draft_tokens: int = option(
        0,
        "Speculative decoding: so many tokens, copied from where the newest ones have stood "
        "before, are read in a step and kept where they are what is drawn; samples stay what they "
        "are. 0 = off.",
        low=0,
    )
    router_replay: bool = option(
        False,
        "Rollout routing replay of a mixture of experts (arXiv 2510.11370): the experts that the "
        "sampler chose for each token are recorded, and the policy's passes in training send it "
        'there again, with weights by its router as it is. With loop="device", without '
        "environments.",
    )
    thinking_tokens: tuple[int, ...] = option(
        (),
        "(low, high): each sample may think for a number of tokens drawn from this range; where "
        "end_of_thinking has not come by then, interrupt_phrase is forced (mask 0) and the answer "
        "goes on. () = off.",
        **LIMITS,
    )
    end_of_thinking: str = option(
        "</think>", "the text that ends thinking", needs="thinking_tokens", safe="any"
    )
    interrupt_phrase: str = option(
        "Okay, time is up. Let me stop thinking and formulate a final answer now.</think>",
        "Forced where thinking is over.",
        needs="thinking_tokens",
        safe="any",
    )


@dataclasses.dataclass
class RewardConfig(Settings):
    """Scoring of responses. `function` is one of rljax.rewards, a dotted name, or
    "file.py:function"; a call of it ends after timeout_s."""

    function: str = option(
        "",
        '"" = the task\'s own; of a file by its data_source (by_source), else exact_match.',
        component="reward",
    )
    model: str = option(
        "",
        'A reward model\'s folder (outcome scores): the only reward where function is "", else its '
        "score is reward_model() in a mixture, or the parameter model_score of your own function.",
        path="model",
    )
    cost_model: str = option(
        "",
        'A cost model\'s folder (configs/offline/cost_model.py), for dataflow="safe_rlhf": its '
        'score is the cost of a response, above 0 = unsafe. "" = the part `cost` of the reward '
        "is.",
        path="model",
    )
    judge_model: str = option(
        "", "a chat model's folder, which judge() and rubric() ask, on the mesh", path="model"
    )
    judge_grades: tuple[str, ...] = option(
        (),
        "its answers, a token each, worst first; () = 0 to scale",
        needs="judge_model",
        safe="word",
    )
    rubrics: str = option(
        "", '"evolving_rubrics(generator=\'...\')": of each prompt; "" = off', component="rubrics"
    )
    process_model: str = option(
        "",
        "A process reward model's folder: its scores of the lines of a response are added to the "
        'outcome, by functions of rljax.shaping.steps or your own; "" = off.',
        path="model",
    )
    process_reward: str = option(
        "dense_step_rewards(lambda_fail=0.25, lambda_pass=0.025)",
        "How scores of lines become rewards.",
        component="process_reward",
        needs="process_model",
    )
    process_lines: str = option(
        "line_ids()",
        '"line_ids(code_only=True)": of the last fenced block alone',
        component="process_reward",
        needs="process_model",
    )
    workers: int = option(
        2,
        "Processes that score at once, on each host; of a reward that asks a server, on all "
        "together.",
        low=1,
        may_change=True,
    )
    timeout_s: float = option(
        10.0, "seconds of one call; each member of a mixture has them anew", **_SECONDS
    )
    memory_gb: float = option(
        8.0, "of a worker (RLIMIT_DATA): more is a MemoryError; 0 = no limit", low=0
    )


@dataclasses.dataclass
class EnvironmentConfig(Settings):
    """The environment of the policy's episodes: a generator function (docs/guides/environments.md).
    Limits end an episode; it is scored as it stands."""

    function: str = option(
        "",
        'Of rljax.environments, dotted, or "file.py:function": "tools(functions=(\'python()\',))". '
        '"" = the policy answers once.',
        component="environment",
    )
    max_turns: int = option(
        8, "replies of the policy; sampler.max_response_tokens limits each", low=1
    )
    max_calls: int = option(0, "tool calls of an episode; 0 = no limit", low=0)
    max_tokens: int = option(
        0,
        "Of an episode: prompt, replies and observations, the columns of a row. 0 = the most that "
        "data.max_prompt_tokens, max_turns replies and the observations between them may take.",
        low=0,
    )
    max_reply_tokens: int = option(
        1024, "of an observation; a longer one keeps its head and its tail", low=1
    )
    control_tokens: bool = option(
        False,
        "Whether a text that the environment yields may hold a control token, such as <|im_end|>. "
        "Else such a text gets a space and is read as ordinary tokens. Answers of tools never "
        "hold one.",
    )
    turn_timeout_s: float = option(10.0, "of one step of the environment", **_SECONDS)
    episode_timeout_s: float = option(
        0.0, "of a whole episode, decoding included; 0 = no limit", low=0
    )
    calls: str = option(
        "auto",
        'How tool calls are written: a format of rljax.environments.calls; "auto" = as the chat '
        'template writes them; "" = none are looked for.',
    )
    on_bad_call: str = option(
        "reply",
        "What the policy gets for a call that cannot be parsed: the reason, at most three times "
        'in a row ("reply"), or the end of the episode ("end").',
        choices=("reply", "end"),
    )
    mask_bad_turns: bool = option(False, "turns with such a call are not learned from")
    history: str = option(
        "append",
        'Where a chat template drops old reasoning: "append" keeps what was read, "rewrite" '
        "begins another row with what the template shows.",
        choices=("append", "rewrite"),
    )
    max_rows: int = option(
        1,
        'Rows that a seat of an episode may take: one for each history that "rewrite" begins, or '
        "that a later Opening of the environment does.",
        low=1,
    )
    workers: int = option(
        2, "processes that play, on each host; each holds hundreds of episodes", low=1
    )
    memory_gb: float = option(8.0, "of a worker (RLIMIT_DATA); 0 = no limit", low=0)
    retries: int = option(
        1, "how often a failed episode is played again before it is masked", low=0
    )
    max_failed: float = option(
        0.05,
        "Share of a step's episodes; a run ends where more fail (but not for one of several, "
        "unless 0).",
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
        "By how many steps the weights that drew a token may be older than those that learn from "
        "it; 0: every step samples with the newest weights, and begins when the last one is over.",
        low=0,
    )
    ahead: int = option(
        -1,
        "How many steps' prompts begin before their step. Less than max_staleness: a step learns "
        "from groups that have ended, the oldest first; max_staleness: in the order of the data. "
        "-1: half of max_staleness, at least 1.",
        needs="max_staleness",
    )
    in_flight_cache: str = option(
        "keep",
        "What new weights do with what older ones have read of responses in flight: keep it "
        '(PipelineRL), or read the tokens again (AReaL). or "reread"',
        choices=("keep", "reread"),
        needs="max_staleness",
    )
    partial_mask: str = option(
        "none",
        "Of a response that several versions of the policy wrote, learn from: all (none), or the "
        'part that the newest of them wrote (stale). or "stale"',
        choices=("none", "stale"),
        needs="max_staleness",
    )
    sampler_devices: int = option(
        0,
        "So many devices, the last ones, sample, and the others train: the next samples are "
        "decoded while the weights are learned. 0: one mesh does both, one after the other.",
        low=0,
    )
    clock: str = option(
        "wall",
        'When a score counts: as soon as it is there ("wall"), or from the second dispatch of '
        'decoding after it was asked for, whatever it takes ("logical(2)"): runs are then equal '
        "bit by bit. With sampler_devices the weights that are learned count as soon as they are "
        'there ("wall"), or once the samples of the next step are complete.',
        needs="max_staleness",
        safe="word",
    )

    replay: str = option(
        "",
        'A file of trajectories with their log-probs (rljax sample --trajectories); "" = none.',
        component="data",
    )
    replay_share: float = option(
        1.0, "of the prompts of a step that come from it; 1 = all: off-policy", needs="replay"
    )

    @property
    def steps_ahead(self) -> int:
        """`ahead`, or its default if the config does not set it."""
        if self.ahead != -1:
            return self.ahead
        return max(1, self.max_staleness // 2) if self.max_staleness else 0
