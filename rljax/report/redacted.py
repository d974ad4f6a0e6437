"""Removes what a page or a model card that leaves this machine must not say: keys, passwords, and
the names of machines and of the user's own folders."""

import os
import re
from collections.abc import Mapping

HIDDEN = "[hidden]"
# What services call their keys, whatever stands before them.
_KEYS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
# A value whose name says that it is secret; the name of a variable that holds one (api_key_env) is
# none.
_NAME = r"(?:api[_-]?key|secret|passw(?:or)?d|(?:access|auth|hf|bearer)[_-]?token|credentials?)"
_NAMED = re.compile(
    rf"""(\b\w*{_NAME}s?(?!\w)['"]?\s*[=:]\s*)(\\?['"]|&quot;|&\#x?\d+;)?(?(2)(?:(?!\2).)+|[^\s'",)&]+)""",
    re.IGNORECASE,
)
_USER = re.compile(r"(\b[a-z][\w+.-]*://)[^/\s:@'\"]+(?::[^/\s@'\"]*)?@")
_SIGNED = re.compile(
    r"([?&](?:token|key|sig|signature|x-amz-[\w-]+|x-goog-[\w-]+)=)[^&\s'\"]+", re.IGNORECASE
)


def redacted(text: str) -> str:
    """Returns the text without keys, passwords and the path of the user's home folder."""
    text = _KEYS.sub(HIDDEN, text)
    text = _NAMED.sub(lambda m: m[1] + (m[2] or "") + HIDDEN, text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", _USER.sub(r"\1", text))
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?=/|\b)", "~", text) if len(home) > 1 else text


def redacted_values(value: object) -> object:
    """Returns a value of JSON with every text in it redacted; a text in a field that is named like
    a secret is hidden whole."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        hides = re.compile(rf"\w*{_NAME}s?", re.IGNORECASE)
        return {
            k: HIDDEN
            if v and isinstance(v, str) and hides.fullmatch(str(k))
            else redacted_values(v)
            for k, v in value.items()
        }
    return [redacted_values(item) for item in value] if isinstance(value, list) else value
