"""The key-value store and the barriers that the hosts of a run share: JAX's coordination service,
which the first host serves.

It needs no device, so a host that waits here can be told that another one has failed.
"""

import re

import jax
from jax._src import distributed


class Client:
    """The coordination service between hosts: texts under keys, and barriers. It is there after
    `jax.distributed.initialize`."""

    def __init__(self) -> None:
        self._client = distributed.global_state.client

    def set(self, key: str, value: str) -> None:
        """Writes a key; an old value is replaced."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def set_first(self, key: str, value: str) -> bool:
        """Writes a key unless it exists; returns whether it was written."""
        try:
            self._client.key_value_set(key, value, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, timeout_s: float) -> str | None:
        """Returns the value of a key, waiting until it exists; None after timeout_s."""
        try:
            return self._client.blocking_key_value_get(key, max(1, int(timeout_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Removes a key, and all keys under it."""
        self._client.key_value_delete(key)

    def barrier(self, name: str, timeout_s: float) -> list[int]:
        """Waits for all hosts; returns those missing after timeout_s, as JAX's error names them. A
        name serves once."""
        try:
            self._client.wait_at_barrier(name, max(1, int(timeout_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            # "... Some timed out task names:\n2\n1\n\n\nRPC: ..."
            numbers = str(error).partition("timed out task names:")[2].partition("RPC")[0]
            if "DEADLINE_EXCEEDED" not in str(error) or not numbers:
                raise
            return sorted(int(n) for n in re.findall(r"^\D*(\d+)\s*$", numbers, re.MULTILINE))
        return []

    def list(self, prefix: str) -> dict[str, str]:
        """Returns {key: value} of every key under `prefix`, which ends with "/"."""
        return dict(self._client.key_value_dir_get(prefix))
