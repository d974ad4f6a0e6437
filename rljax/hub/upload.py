"""Writes a folder as the state of a model repository of the hub."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from rljax.errors import InputError
from rljax.hub import client
from rljax.hub.names import HubName

# What an earlier push may have left: shards of another number.
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]
# Bytes of all answers to a push. Each counts for a thousand at least, so that pages end as well.
_MOST_SAID, _LEAST = 64_000_000, 1000
_ADDRESS = re.compile("https?://[!-~]{1,1000}")


def upload(name: HubName, folder: Path, *, private: bool, message: str) -> str:
    """Commits the files of a folder to a repository, which is made if it does not exist, and
    removes weights of an earlier push; returns the address of the commit. Raises InputError if the
    hub refuses."""
    hub = client.library()
    if not hub.get_token():
        problem = "nobody is logged in to the hub"
        rule, fix = "a push needs a token that may write", "hf auth login, or HF_TOKEN=..."
        raise InputError(problem, value=name.repository, rule=rule, fix=fix)
    api = hub.HfApi()
    try:
        with _bounded_answers():
            client.ask(name, lambda: _make(api, name, private))
            commit = client.ask(name, lambda: _push(api, name, folder, message))
    except client.Unreachable as problem:
        rule, fix = str(problem), "start again; --out=FOLDER writes the folder without the hub"
        raise InputError(f"{name.repository} could not be pushed", rule=rule, fix=fix) from None
    address = str(commit.commit_url)
    return address if _ADDRESS.fullmatch(address) else client.page(name)


@contextlib.contextmanager
def _bounded_answers() -> Iterator[None]:
    """Makes the library's session give up answers without end in the block: a push asks through the
    library, which reads each answer whole."""
    from huggingface_hub.utils import get_session

    session, remaining = get_session(), _MOST_SAID
    hooks = session.event_hooks

    def plain(request) -> None:
        request.headers["Accept-Encoding"] = "identity"

    def count(size: int) -> None:
        nonlocal remaining
        remaining -= size
        if remaining < 0:
            raise ValueError(f"its answers have more than {_MOST_SAID} bytes")

    def look(answer) -> None:
        count(_LEAST)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError("it packs an answer that was to be plain bytes")
        read_raw = answer.iter_raw

        def counted(chunk_size=None) -> Iterator[bytes]:
            for data in read_raw(chunk_size):
                count(len(data))
                yield data

        answer.iter_raw = counted

    try:
        request, response = [*hooks["request"], plain], [*hooks["response"], look]
        session.event_hooks = {"request": request, "response": response}
        yield
    finally:
        session.event_hooks = hooks


def _push(api, name: HubName, folder: Path, message: str):
    """The commit with the files of a folder."""
    try:
        return api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns=_REPLACED,
        )
    except RuntimeError as error:  # the client's, around what has ended the upload of a file
        raise error.__cause__ or OSError(str(error)) from None


def _make(api, name: HubName, private: bool) -> None:
    """Makes the repository, if it is not there. That is asked first, within a limit of time."""
    from huggingface_hub import errors

    try:
        client.information(name)
    except errors.RepositoryNotFoundError:
        api.create_repo(name.repository, private=private, exist_ok=True)
