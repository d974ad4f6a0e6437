"""Text for pre-training tiny models, made of the prompts of another task."""

import dataclasses
import random

from rljax.components import resolve
from rljax.config import NAMESPACES
from rljax.contracts import component_in, contract
from rljax.data.online.stream import Stream
from rljax.errors import InputError
from rljax.tasks.task import Task, check_range

TaskText = component_in(NAMESPACES["data"])


@contract(safe=True)
def prompt_texts(
    *, of: TaskText, texts: int = 512, prompts_per_text: int = 3, test: int = 64, seed: int = 0
) -> Task:
    """Rows of text that a language model is pre-trained on: prompts of the task `of`, one after
    another, "bca>dab>acc>". Nothing in them answers a prompt, so a base model that has learned them
    goes on with the next question.

    Prompts for evaluation, rewards and the alphabet are those of `of`, whose prompts are texts.
    Raises InputError for an `of` that is no task, or whose prompts are not all texts.
    """
    check_range("prompt_texts", "texts", texts, 1, 10**7)
    check_range("prompt_texts", "prompts_per_text", prompts_per_text, 1, 1000)
    check_range("prompt_texts", "test", test, 1, 10**6)
    task = resolve(of, "rljax.tasks")()
    if not isinstance(task, Task):
        rule = "a task, such as 'letter_count()'"
        fix = "name a task of rljax.tasks, or a function of yours that returns a Task"
        raise InputError("prompt_texts(of)", value=of, rule=rule, fix=fix)
    is_stream = isinstance(task.train, Stream)
    rows = task.train.first(texts) if is_stream else task.train
    prompts = [row["prompt"] for row in rows]
    if not all(isinstance(prompt, str) for prompt in prompts):
        rule = "a task whose prompts are texts"
        fix = "take a task without conversations and images, such as 'letter_count()'"
        raise InputError("prompt_texts(of)", value=of, rule=rule, fix=fix)
    rng = random.Random(f"prompt_texts/{seed}")
    count = texts + test
    samples = [{"text": "".join(rng.choices(prompts, k=prompts_per_text))} for _ in range(count)]
    return dataclasses.replace(task, worked_examples=samples[:texts], worked_test=samples[texts:])
