"""Writes a folder as the state of a model repository of the hub."""

from pathlib import Path

from rljax.errors import InputError
from rljax.hub import client
from rljax.hub.names import HubName

# What an earlier push may have left: shards of another number.
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]


def upload(name: HubName, folder: Path, *, private: bool, message: str) -> str:
    """Commits the files of a folder to a repository, which is made where it is not there; weights
    of an earlier push leave -> the address of the commit. Raises InputError for a refusal."""
    hub = client.library()
    if not hub.get_token():
        raise InputError(
            "nobody is logged in to the hub",
            value=name.repository,
            rule="a push needs a token that may write",
            fix="hf auth login, or HF_TOKEN=...",
        )
    api = hub.HfApi()
    try:
        client.ask(name, lambda: _make(api, name, private))
        done = client.ask(name, lambda: _push(api, name, folder, message))
    except client.Unreachable as problem:
        raise InputError(
            f"{name.repository} could not be pushed",
            rule=str(problem),
            fix="start again; --out=FOLDER writes the folder without the hub",
        ) from None
    return str(done.commit_url)


def _push(api, name: HubName, folder: Path, message: str):
    """The commit with the files of a folder."""
    try:
        return api.upload_folder(
            repo_id=name.repository, folder_path=folder, commit_message=message,
            delete_patterns=_REPLACED,
        )  # fmt: skip
    except RuntimeError as error:  # the client's, around what has ended the upload of a file
        raise error.__cause__ or OSError(str(error)) from None


def _make(api, name: HubName, private: bool) -> None:
    """Makes the repository, if it is not there. That is asked first, within a limit of time."""
    from huggingface_hub import constants, errors

    try:
        api.repo_info(name.repository, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.RepositoryNotFoundError:
        api.create_repo(name.repository, private=private, exist_ok=True)
