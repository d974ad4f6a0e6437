"""Parts that rljax.validation's checks share."""

import math

from rljax.components import resolve
from rljax.config import NAMESPACES, Config
from rljax.config.checks import Problems, check_bare_name
from rljax.config.schema import FIELDS
from rljax.errors import InputError


def shards_of(config: Config) -> int:
    """Returns the number of shards of the rows of a batch; 1 where a size is not known."""
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.expert)
    return math.prod(sizes) if min(sizes) > 0 else 1


def resolve_field(problems: Problems, field: str, text: str, home: str):
    """The component that a field names; None, and a problem, if there is none."""
    if (
        field in FIELDS
        and FIELDS[field].component == home
        and not check_bare_name(field, text, problems)
    ):
        return None
    try:
        return resolve(text, NAMESPACES[home])
    except InputError as error:
        problems.add(field, text, error)
        return None
