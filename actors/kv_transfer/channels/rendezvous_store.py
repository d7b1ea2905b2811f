"""torch's key-value store over the rendezvous, in place of a TCP listener."""

from datetime import timedelta

import torch.distributed as dist

from actors.kv_transfer.contracts import RendezvousClient


class RendezvousStore(dist.Store):
    """The key-value store through which gloo and NCCL form a group.

    Called by them, from C++, in the thread that opens the group. Must outlive the group: keep a
    reference to the Python object.
    """

    def __init__(self, client: RendezvousClient, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._client.get([key], self._timeout.total_seconds())[0]

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Up to the store's own deadline: a group's `timeout` is meant for its operations."""
        self._client.get(keys, self._timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._client.has(keys)

    def num_keys(self) -> int:
        return self._client.num_keys()

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._client.get(keys, self._timeout.total_seconds())

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)
