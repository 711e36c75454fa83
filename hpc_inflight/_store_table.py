"""The key-value table behind the store, on the rank that serves it: plain data and one condition variable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Reply = Callable[[str, Any], None]


class Table:
    """Keys and values in memory, and the requests that wait for keys to appear.

    Every operation is atomic. Waiting requests are parked with a callback and a deadline, so that one thread
    serves any number of them.
    """

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._parked: list[tuple[tuple[str, ...], float, Callable[[], Any], Reply]] = []

    def _put(self, key: str, value: bytes) -> None:
        self._data[key] = value
        self._changed.notify_all()
        self._answer_parked()

    def _answer_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for item in waiting:
            keys, _, produce, reply = item
            if all(key in self._data for key in keys):
                reply("ok", produce())
            else:
                self._parked.append(item)

    def expire(self) -> None:
        """Answer the parked requests whose deadline has passed."""
        if not self._parked:
            return
        with self._changed:
            now = time.monotonic()
            late = [item for item in self._parked if item[1] <= now]
            self._parked = [item for item in self._parked if item[1] > now]
            for keys, _, _, reply in late:
                reply("timeout", [key for key in keys if key not in self._data])

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        with self._changed:
            self._put(key, value)

    def append(self, key: str, value: bytes) -> None:
        """Add to the end of a value, from empty."""
        with self._changed:
            self._put(key, self._data.get(key, b"") + value)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Store several values as one step."""
        with self._changed:
            self._data.update(zip(keys, values, strict=True))
            self._changed.notify_all()
            self._answer_parked()

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal number, from zero, and return the sum."""
        with self._changed:
            total = int(self._data.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, or if there is none and ``expected`` is empty.

        Returns:
            The value afterwards; ``expected`` for a key that does not exist, as torch's own stores answer.
        """
        with self._changed:
            current = self._data.get(key)
            if current is None:
                if expected:
                    return expected
            elif current != expected:
                return current
            self._put(key, desired)
            return desired

    def delete_key(self, key: str) -> bool:
        """Remove a key and say whether it existed."""
        with self._changed:
            return self._data.pop(key, None) is not None

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys exist."""
        with self._changed:
            return all(key in self._data for key in keys)

    def num_keys(self) -> int:
        """Count the keys."""
        with self._changed:
            return len(self._data)

    def list_keys(self) -> list[str]:
        """List the keys."""
        with self._changed:
            return list(self._data)

    def park(self, keys: Sequence[str], produce: str, timeout_s: float, reply: Reply) -> None:
        """Answer once all keys exist.

        Args:
            keys: What to wait for.
            produce: ``"values"`` to answer with the keys' values, ``"nothing"`` to answer with None.
            timeout_s: Seconds; then the answer is ``("timeout", missing keys)``.
            reply: Called once, from whichever thread completes the request, with the table locked.
        """

        def value() -> Any:
            return [self._data[key] for key in keys] if produce == "values" else None

        with self._changed:
            if all(key in self._data for key in keys):
                reply("ok", value())
            else:
                self._parked.append((tuple(keys), time.monotonic() + timeout_s, value, reply))

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Block this thread until all keys exist.

        Returns:
            The keys that are missing at the deadline; empty when all exist.
        """
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._data for key in keys), timeout_s)
            return [key for key in keys if key not in self._data]

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        with self._changed:
            return [self._data[key] for key in keys]
