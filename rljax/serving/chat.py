"""A conversation with a policy that may use tools: every question is an episode of an environment,
played in this process and shown while it is written.

What the policy reads and writes is what a run with that environment trains: the same log of ids.
"""

import dataclasses
import json
from collections.abc import Iterator

import jax

from rljax.batch import FinishReason
from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.config.service_options import ChatOptions
from rljax.data.text.contents import unwritten_tools
from rljax.environments.calls import parser
from rljax.environments.conversation import TAIL
from rljax.environments.episode import Episode
from rljax.environments.messages import EpisodeLimits, Step
from rljax.errors import InputError
from rljax.policies import SavedPolicy
from rljax.reasoning import beginning_of
from rljax.rollout.players.episodes.log import limited_sampling
from rljax.sampler import Engine, Sampler
from rljax.sampler.sample import Sample
from rljax.serving.call_stream import CallStream
from rljax.serving.defaults import CHAT_TEMPERATURE, Defaults, defaults_of
from rljax.setup.decoding import decoding_of

TEXT_TOKENS = 128  # of a response without a chat template: a base model's text has no end
# A text of the policy, a call that it made, what a tool or the environment answers, how it ended.
TEXT, CALL, ANSWER, END = "text", "call", "answer", "end"
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def answer():
    """Plays the environment without tools: the policy answers once."""
    yield None


class Chat:
    """A conversation with a policy. With a chat template it remembers what was said; without one
    every question stands alone."""

    def __init__(self, policy: SavedPolicy, options: ChatOptions):
        settings, context = policy.config.environment, policy.model.config.max_tokens
        function = options.environment or settings.function
        self._policy, self._system, self._questions = policy, options.system, 0
        self._component = resolve(function or f"{__name__}.answer", NAMESPACES["environment"])
        self.messages: list[dict] = []
        self.limits = EpisodeLimits(
            max_turns=options.max_turns or settings.max_turns,
            max_tokens=min(options.tokens, context),
            max_reply_tokens=settings.max_reply_tokens,
            max_calls=settings.max_calls,
            calls=options.calls or settings.calls,
            on_bad_call=settings.on_bad_call,
            control_tokens=settings.control_tokens,
        )
        self._format = parser(self.limits.calls if function else "", policy.tokenizer)
        limit = options.max_response_tokens
        if limit is None and policy.step is None and not policy.tokenizer.has_chat_template:
            limit = TEXT_TOKENS
        defaults = defaults_of(policy, CHAT_TEMPERATURE)
        if (temperature := options.temperature) is not None:
            defaults = dataclasses.replace(
                defaults, temperature=temperature, source="--temperature"
            )
        sampling = policy.sampling(max_response_tokens=limit)
        self.notes = list(_start_notes(policy, defaults, sampling.max_response_tokens))
        if function and self._format.name and not _writes_tools(policy.tokenizer):
            self.notes.append(
                "the chat template tells of no tools: say in --system which there are and how they "
                "are called"
            )
        stop_ids = (*sampling.stop_ids, *self._format.stop_ids(policy.tokenizer))
        self.sampling = dataclasses.replace(
            sampling,
            **defaults.fields(),
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            stop_strings=(*sampling.stop_strings, *self._format.stop_strings),
        )
        decoding = decoding_of(policy.config, policy.tokenizer)
        self._params = decoding.weights(policy.model, policy.params)
        engine = Engine(
            decoding.of(policy.model),
            1,
            self.limits.max_tokens,
            steps=options.steps,
            stop_ids=max(16, len(self.sampling.stop_ids)),
        )

        def decode(ids):
            return policy.tokenizer.decode(ids, skip_special_tokens=False)

        self._sampler = Sampler(engine, key=jax.random.key(options.seed), decode=decode)

    def forget(self) -> None:
        """Begins the conversation anew."""
        self.messages = []

    def ask(self, question: str) -> Iterator[tuple[str, str]]:
        """Plays one episode and yields (kind, text) while it goes: pieces of TEXT, each CALL, each
        ANSWER that is read next, and at last END with the reason. Raises InputError if a turn ends
        without an answer, as with logits that are not finite, and for a question that does not fit.
        After an error or a failure the conversation is what it was before the question."""
        self._questions += 1
        episode, sample, log_tokens, turns = self._episode(question), None, 0, 0
        question_number = self._questions
        step = episode.begin()
        try:
            while not step.ended:
                free_tokens = self.limits.max_tokens - log_tokens - len(step.ids)
                if turns == self.limits.max_turns or free_tokens < 1:
                    yield END, "turns" if free_tokens > 0 else "length"
                    break
                turn = limited_sampling(self.sampling, step, free_tokens)
                if step.new_row or sample is None:
                    self._release(sample)
                    log_tokens = 0
                    ids = [question_number + turns * 2**16]
                    (sample,) = self._sampler.submit(step.ids, turn, request_ids=ids, hold=True)
                else:
                    self._sampler.deliver([(sample, step.ids, turn)])
                ids = yield from self._decode_turn(sample)
                log_tokens, turns = log_tokens + len(step.ids) + len(ids), turns + 1
                step = episode.reply(
                    ids,
                    REASONS.get(sample.finish_reason, "stop"),
                    self.limits.max_turns - turns,
                    self.limits.max_tokens - log_tokens,
                )
                yield from ((ANSWER, message.get("content") or "") for message in step.messages)
            if episode.overlong:
                raise self._too_long(episode.overlong)
            if step.ended:
                yield END, _end_reason(step)
            if not step.failure:  # else as it was before the question
                self.messages = episode.messages or []
        finally:
            self._release(sample)
            episode.close()

    def _too_long(self, size: str) -> InputError:
        """Returns the error for a conversation that leaves no room for an answer."""
        limit, context = self.limits.max_tokens, self._policy.model.config.max_tokens
        fixes = ["/new, which forgets what was said"] if self.messages else ["a shorter question"]
        rule = f"the model's context is {context} tokens"
        if limit < context:
            rule = f"a conversation has at most --tokens={limit}, with the answer"
            fixes.append(f"a larger --tokens, up to the model's context of {context}")
        problem = "the conversation is too long with this question, which was not asked"
        return InputError(problem, value=size, rule=rule, fix=", or ".join(fixes))

    def _episode(self, question: str) -> Episode:
        tokenizer, messages, ids = self._policy.tokenizer, None, None
        if tokenizer.has_chat_template:
            system = [{"role": "system", "content": self._system}] if self._system else []
            messages = [*(self.messages or system), {"role": "user", "content": question}]
        else:
            ids = tokenizer.encode(self._system + question, add_special_tokens=True)
        fields = {"prompt": question, "ground_truth": "", "data_source": "chat", "extra_info": {}}
        return Episode(
            self._questions,
            self._component,
            fields,
            tokenizer,
            self.limits,
            seed=self._questions,
            sample_seed=self._questions,
            prompt_ids=ids,
            messages=messages,
        )

    def _decode_turn(self, sample: Sample) -> Iterator[tuple[str, str]]:
        """Decodes a turn and yields its text and calls; returns its ids."""
        tail = self._policy.tokenizer.decode(sample.ids[-TAIL:].tolist(), skip_special_tokens=False)
        text = CallStream(self._policy.tokenizer, self._format, (), (), beginning_of(tail))
        ids: list[int] = []
        ended = False
        while not ended:
            for event in self._sampler.step(self._params):
                new_ids = event.sample.tokens[len(event.sample.tokens) - event.count :].tolist()
                ids += new_ids
                for token in new_ids:
                    if piece := text.push(token):
                        yield TEXT, piece
                ended = event.sample.finish_reason is not None
        if sample.error:
            fix = "ask again with fewer tokens, or restart rljax chat"
            raise InputError("the policy's turn has no end", value=sample.error, fix=fix)
        if last_piece := text.finish():
            yield TEXT, last_piece
        for call in text.calls:
            arguments = json.loads(call["function"]["arguments"])
            argument_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            yield CALL, f"{call['function']['name']}({argument_text})"
        return ids

    def _release(self, sample: Sample | None) -> None:
        if sample is None:
            return
        if sample.finish_reason is None:
            self._sampler.abort(sample)
        else:
            self._sampler.release(sample)


def _writes_tools(tokenizer) -> bool:
    """Returns whether the tokenizer's chat template writes the tools that it is given."""
    if not tokenizer.has_chat_template:
        return False
    tool = {"type": "function", "function": {"name": "search", "description": "Searches."}}
    try:
        return not unwritten_tools(tokenizer, [{"role": "user", "content": "?"}], {"tools": [tool]})
    except InputError:  # a template that knows no tools
        return False


def _start_notes(
    policy: SavedPolicy, defaults: Defaults, max_response_tokens: int
) -> Iterator[str]:
    """Yields lines that say how questions are asked."""
    greedy = defaults.temperature == 0
    changed = "--temperature=0.7 samples" if greedy else "--temperature=0: greedy"
    yield defaults.line() + ("" if defaults.source == "--temperature" else f"; {changed}")
    if not policy.tokenizer.has_chat_template:
        yield (
            "no chat template: the model reads your text as it stands and goes on with it, for at "
            f"most {max_response_tokens} tokens (--max_response_tokens)"
        )


def _end_reason(step: Step) -> str:
    """Returns the reason why an episode has ended, and its score if the environment gives one."""
    if step.failure:
        return f"failed: {step.failure}"
    scores = ", ".join(f"{score:g}" for score in (step.outcome or {}).values())
    return f"{step.limit or 'stop'}" + (f", score {scores}" if scores else "")
