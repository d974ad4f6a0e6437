"""Notes about a run's data when it starts: which rows were kept, and which look like a mistake.

The counts are those of encoding (rljax.data.online.prompts, rljax.data.offline.encode).
"""

import logging
import re
from collections.abc import Iterable, Sequence

from rljax.components import Component, resolve
from rljax.config import NAMESPACES
from rljax.data.dropped import reasons
from rljax.data.online.prompts import SPLIT, UNASKED
from rljax.data.rows.columns import CONVERSATIONAL
from rljax.data.rows.sources import Check
from rljax.data.text.messages import LEARN, REASONING
from rljax.data.text.tokenizer import Tokenizer
from rljax.rewards.mixing import reward_of_source
from rljax.rewards.pool.calling import HOME, asks_nobody, call_reward, members, wanted_fields
from rljax.rewards.pool.foreign import takes_column

LOG = logging.getLogger("rljax")
# Keys of messages that are read, or that say nothing to be learned or answered.
_KNOWN_KEYS = (
    *"role content tool_calls tool_call_id name".split(),
    LEARN,
    *REASONING,
    *"images id uuid message_id parent_id index turn timestamp created created_at date".split(),
    *"time metadata model source lang language finish_reason usage token_count num_tokens".split(),
)


def kept_line(source: str, items: str, counts: dict, limit: int) -> str:
    """Returns a line such as "train.jsonl: 20 of 21 prompts kept (1 over 128 tokens)"."""
    reasons_text = reasons(counts, f"{limit:,} tokens")
    dropped = f" ({reasons_text})" if reasons_text else ""
    notes = f"; {counts['truncated']:,} cut to {limit:,} tokens" if counts.get("truncated") else ""
    if counts.get(SPLIT):
        notes += (
            f"; {counts[SPLIT]:,} conversations make an example of each turn, because the chat"
            " template rewrites earlier turns (data.turns)"
        )
    if counts.get(UNASKED):
        notes += (
            f"; {counts[UNASKED]:,} turns of the assistant before the first question are read and"
            " not learned"
        )
    rows = f"{counts['kept']:,} of {counts['total']:,} {items} kept"
    if counts["kept"] > counts["total"]:
        rows = f"{counts['kept']:,} examples of {counts['total']:,} {items}"
    return f"{source}: {rows}{dropped}{notes}"


def bare_prompts(records: Sequence[dict], tokenizer: Tokenizer) -> int:
    """Counts the records that have a text for a prompt, where the model knows conversations."""
    if not tokenizer.has_chat_template:
        return 0
    return sum(isinstance(record.get("prompt"), str) for record in records)


def warn_unread(source: str, records: Iterable[dict], tokenizer: Tokenizer) -> None:
    """Warns, once for each, of keys of messages and variables that the chat template does not read,
    and of tools and variables that it is not given because the prompt is a text."""
    # (kind of problem, name of the key or variable) -> the rows that have it
    rows_by_problem: dict[tuple[str, str], list[int]] = {}
    for record in records:
        extra_info, index = record.get("extra_info") or {}, record["index"]
        variables = record.get("variables") or extra_info.get("chat_template_kwargs") or {}
        variables = variables if isinstance(variables, dict) else {}
        if any(isinstance(record.get(name), str) for name in ("text", "prompt")):
            if not tokenizer.has_chat_template:
                continue
            if record.get("tools") or _tools_in(extra_info):
                rows_by_problem.setdefault(("text", "tools"), []).append(index)
            if variables:
                rows_by_problem.setdefault(("text", "chat_template_kwargs"), []).append(index)
            continue
        for name, value in variables.items():
            if value is not None and not tokenizer.reads_variable(str(name)):
                rows_by_problem.setdefault(("variable", str(name)), []).append(index)
        for name in CONVERSATIONAL:
            for message in record[name] if isinstance(record.get(name), list) else ():
                for key, value in message.items():
                    is_empty = value is None or value in ("", [], {})
                    if is_empty or key in _KNOWN_KEYS:
                        continue
                    if not tokenizer.reads_key(str(key)):
                        rows_by_problem.setdefault(("key", str(key)), []).append(index)
    for (problem, name), rows in rows_by_problem.items():
        text = {
            "text": f"{len(rows)} rows have {name} and a text for a prompt, of which no template"
            " reads them (the first is row %d). Fix: write the prompt as messages",
            "variable": f"{len(rows)} rows give the chat template a variable {name!r}, which it"
            " does not read (the first is row %d). Fix: correct the name, or remove it",
            "key": f"{len(rows)} messages have the key {name!r}, which the chat template does not"
            " read: the model sees nothing of it (the first is in row %d). Fix: write it into"
            " 'content', or remove it",
        }[problem]
        LOG.warning("%s: %s", source, text % rows[0])


def warn_hidden(source: str, records: Iterable[dict], texts: Iterable[str]) -> None:
    """Warns, once for each name, of entries of extra_info in place of which a reward of these texts
    is handed the column, or the ground truth, of the same name and another value."""
    rows_by_name: dict[str, list[int]] = {}
    for record in records:
        for name in record["ground_truth"].hidden:
            rows_by_name.setdefault(name, []).append(record["index"])
    if not rows_by_name:
        return
    rewards = [resolve(text, NAMESPACES["reward"]) for text in texts if text]
    for reward in rewards:  # grows by the rewards of a mixture
        rewards += members(reward)
    for name, rows in rows_by_name.items():
        if reward := next((r for r in rewards if takes_column(r, name)), None):
            LOG.warning(
                "%s: %d rows have another %r in extra_info than the column or the ground truth that"
                " the reward %r is handed by this name (the first is row %d). Fix: where the entry"
                " is meant, read extra_info[%r]; or rename it",
                *(source, len(rows), name, reward.text, rows[0], name),
            )


def _tools_in(extra: dict) -> bool:
    tools = extra.get("tools")
    return isinstance(tools, list) and any(isinstance(tool, dict) for tool in tools)


def reference_check(texts: Iterable[str]) -> Check | None:
    """Returns a function of a record that calls the rewards with an empty response. It returns the
    problem with the record's ground truth, "" if they can read it. Only rljax's own rewards that
    ask no server and no model are called; None if there are none."""
    rewards = [resolve(text, NAMESPACES["reward"]) for text in texts if text]
    rewards_and_fields = [
        (reward, wanted_fields(reward))
        for reward in rewards
        if _is_ours(reward) and asks_nobody(reward)
    ]
    if not rewards_and_fields:
        return None

    def check(record: dict) -> str:
        sample = {"response": "", "num_tokens": 0, "finish_reason": "stop", **record}
        for reward, fields in rewards_and_fields:
            try:
                call_reward(reward, sample, fields)
            except Exception as error:
                if message := _ground_truth_message(error):
                    return f"{_name(reward, record)}: {message}"
        return ""

    return check


def _ground_truth_message(error: BaseException | None) -> str:
    """Returns the sentence about the ground truth in the error, or in the innermost of its causes
    that has one."""
    message = ""
    while error is not None:
        message = str(error) if re.search("ground.truth", str(error)) else message
        error = error.__cause__
    return message


def _is_ours(reward: Component) -> bool:
    parts = members(reward)
    return reward.function.__module__.startswith(f"{HOME}.") and all(map(_is_ours, parts))


def _name(reward: Component, record: dict) -> str:
    """Returns the name of the reward that a user knows: of a mixture by data source, the one of the
    source."""
    if reward.short_name != "by_source":
        return f"the reward {reward.text}"
    options = {n: p.default for n, p in reward.signature.parameters.items()} | reward.options
    pairs = (*options["sources"], *options["defaults"])
    text = reward_of_source(record["data_source"], pairs) or options["otherwise"]
    return f"the reward of data source {record['data_source']!r} is {text}"
