"""Who a group is, and what c10d's Python asks of a backend: everything that issues nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hpc_inflight import _torch_compat as compat
from hpc_inflight import flight_recorder

BACKEND = "hpc_inflight"
DEVICES = ("cpu", "cuda")


class GroupIdentity(compat.BaseProcessGroup):  # type: ignore[misc]  # torch's stubs leave it Any
    """Rank, size, names, store and options of a group, under every name that torch 2.8 to 2.14 ask for them.

    A Python group has to answer these itself: torch's own answers look into C++ backends that it does not have.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        # without the store: torch's binding makes an overridable object only in this form
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._name = self._desc = "undefined"
        self._flight = flight_recorder.Group(rank, size, timeout_s)

    def getRank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    size = getSize

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    name = getBackendName

    def getGroupName(self) -> str:
        """Return the name that c10d gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name under which functional collectives and DeviceMesh find the group."""
        self._name = name
        self._flight.rename(name)

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """Return the description that the user gave the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the description."""
        self._desc = self._flight.desc = desc

    _set_group_desc = setGroupDesc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def describe(self) -> str:
        """Return the group's name and this rank's place in it, for messages."""
        return f"group {self._name} (rank {self._rank} of {self._size})"

    # what c10d's Python asks of a backend -------------------------------------------------------------------

    def _get_backend(self, _device: Any) -> GroupIdentity:
        return self

    def _get_backend_name(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in DEVICES]

    def get_group_store(self) -> Any:
        """Return the group's own view of the store."""
        return self._store

    def perform_nocolor_split(self, _device: Any) -> None:
        """Do nothing: only the members of a new group take part in making it."""

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = self._flight.timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    @property
    def options(self) -> Any:
        """Return c10d's options of a backend: the timeout."""
        return compat.Options(BACKEND, timedelta(seconds=self._timeout_s))
