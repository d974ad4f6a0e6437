"""Chat: rljax chat RUN_OR_MODEL_FOLDER [--environment="tools(functions=('search(corpus=...)',))"]

A conversation in the terminal; the policy calls the tools of the environment, and what they answer
is shown (grey). /new forgets what was said, an empty line or Ctrl-D ends.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator

from rljax.command.launch import complain
from rljax.config import Config
from rljax.config.service_options import ChatOptions
from rljax.config.trust import unscored
from rljax.errors import InputError, printable

SHOWN = 600  # characters of what a tool answers


def main(options: ChatOptions) -> None:
    """Asks the questions of the terminal, or the one that is given, and shows the answers."""
    from rljax.policies import load_policy
    from rljax.serving.chat import Chat
    from rljax.tracking.screen import Terminal

    def read(config: Config) -> Config:
        config = unscored(config)
        if options.environment:  # the run's own function is not called
            settings = dataclasses.replace(config.environment, function="")
            config = dataclasses.replace(config, environment=settings)
        return config

    arguments = dict(trust_code=options.trust_code, read=read, today=True)
    policy = load_policy(options.model, options.step, **arguments)
    chat = Chat(policy, options)
    console = Terminal(highlight=False)
    for note in chat.notes:  # beside the answers, which may be read by a program
        print(printable(note), file=sys.stderr, flush=True)
    if options.question:
        _answer(console, chat, [options.question])
    else:
        _answer(console, chat, _lines(), goes_on=sys.stdin.isatty())


def _answer(console, chat, questions: Iterable[str], goes_on: bool = False) -> None:
    """Shows the answers. Where `goes_on`, a question that cannot be asked, as with a character that
    the tokenizer does not know, is an error on the screen, and the next one is read."""
    for question in questions:
        if question == "/new":
            chat.forget()
            continue
        try:
            _show(console, chat.ask(question))
        except InputError as error:
            if not goes_on:
                raise
            complain(error)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
            line.encode()  # other locales than UTF-8 read a byte as half a surrogate pair
        except EOFError:
            return
        except UnicodeError as error:
            raise InputError(
                "a line of the input is not UTF-8", rule=str(error), fix="write it as UTF-8"
            ) from None
        if not line:
            return
        yield line


def _show(console, pieces: Iterable[tuple[str, str]]) -> None:
    """Prints each piece as it arrives: texts as they are, the others on lines of their own."""
    inside = False  # a line
    for kind, text in pieces:
        if kind == "text":
            console.print(text, end="", markup=False, soft_wrap=True)
            inside = True
            continue
        console.print("\n" if inside else "", end="")
        inside = False
        if kind == "call":
            console.print(f"[calls {text}]", style="cyan", markup=False, soft_wrap=True)
        elif kind == "answer":
            cut = f"{text[:SHOWN]} ..." if len(text) > SHOWN else text
            console.print(cut, style="bright_black", markup=False, soft_wrap=True)
        elif text != "stop":
            console.print(f"[{text}]", style="yellow", markup=False, soft_wrap=True)
