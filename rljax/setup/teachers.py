"""Finds the teacher of each prompt among several, by its data_source."""

import logging
from fnmatch import fnmatchcase

from rljax.config import Config
from rljax.data.online.encoded import STREAM_ITEMS, Data
from rljax.data.online.stream import Stream
from rljax.errors import InputError

LOG = logging.getLogger("rljax")
_SHOWN = 5


def teacher_number(config: Config, data_source: str) -> int:
    """Returns the number of the teacher of a prompt: 1.. for those of `teachers`, the next one for
    teacher_model, 0 for none."""
    patterns = enumerate(config.teacher_sources, 1)
    fits = (i for i, pattern in patterns if fnmatchcase(data_source, pattern))
    return next(fits, len(config.teachers) + 1 if config.teacher_model else 0)


def check_teachers(config: Config, data: Data) -> None:
    """Warns of teachers that no prompt has. Raises InputError if no prompt has any: nothing would
    be learned from them. Of a stream the first rows are looked at."""
    if not config.teachers:
        return
    read = [x.first(STREAM_ITEMS) if isinstance(x, Stream) else x for x in data.sources]
    sources = sorted({row.data_source for rows in read for row in rows if row is not None})
    numbers = {teacher_number(config, source) for source in sources}
    shown = ", ".join(map(repr, sources[:_SHOWN])) + ", ..." * (len(sources) > _SHOWN)
    rule = f"the data_source of the data is {shown}"
    fix = "write patterns that fit them; rows without data_source have the name of their file"
    if sources and not numbers - {0}:
        raise InputError("teacher_sources", value=config.teacher_sources, rule=rule, fix=fix)
    for i, pattern in enumerate(config.teacher_sources, 1):
        if i not in numbers:
            text = "teacher_sources: no prompt has the teacher of %r (%s). Fix: %s"
            LOG.warning(text, pattern, rule, fix)
