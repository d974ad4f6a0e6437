"""What every malformed input must meet: an error of ours that names the culprit."""

import pytest

from rljax.errors import InputError


def refused(action, *names: str) -> str:
    """action() raises InputError, and its text holds each name and no Python of ours."""
    with pytest.raises(InputError) as error:
        action()
    text = str(error.value)
    for name in names:
        assert name in text, text
    assert len(text) < 3000
    return text
