"""The errors this package raises; each message says what was wrong, what was found and what to do next."""

from __future__ import annotations


class InflightError(RuntimeError):
    """Base of every error raised by hpc_inflight; a ``RuntimeError``, which is what c10d's callers catch."""


class MPIUnavailableError(InflightError, ImportError):
    """No usable MPI library was found, or it could not be initialised."""


class NCCLUnavailableError(InflightError, ImportError):
    """CUDA tensors cannot be communicated: CuPy, its NCCL or a usable GPU is missing, on this rank or another."""


class NCCLError(InflightError):
    """A call of NCCL or CUDA failed; the text has its status number."""


class LaunchError(InflightError):
    """No job can be started here, or the ranks that the launcher started are not the ranks that MPI sees."""


class NotInitializedError(InflightError):
    """A call came before ``init()`` or after ``finalize()``."""


class AlreadyInitializedError(InflightError):
    """``init()`` was called while a default group exists."""


class InvalidArgumentError(InflightError, ValueError):
    """An argument of a collective cannot be right on this rank, whatever the others pass."""


class UnsupportedError(InflightError, NotImplementedError):
    """The combination of operation, dtype, operator or device is not defined for this package."""


class GroupDestroyedError(InflightError):
    """A group was used after it was destroyed, or in a process that did not make it."""


class CommunicatorAborted(GroupDestroyedError):  # noqa: N818  # NCCL's and MPI's word
    """A group cannot be used any more: it was aborted, after a deadline, a failure, or by the program."""


class CollectiveTimeout(InflightError, TimeoutError):  # noqa: N818  # the name that users of c10d look for
    """A collective or a point-to-point operation did not complete before its deadline."""


class CollectiveMismatch(InflightError):  # noqa: N818  # named beside CollectiveTimeout
    """In debug mode: the ranks were about to issue different collectives."""


class CaptureError(InflightError):
    """A collective cannot be captured as it was issued."""


class DrainTimeout(InflightError, TimeoutError):  # noqa: N818  # named beside CollectiveTimeout
    """``wait_for_all_pending_works`` reached its deadline with work still enqueued."""


class StoreError(InflightError):
    """The key-value store was used where it cannot serve, or its server did not answer."""


class StoreTimeout(StoreError, TimeoutError):  # noqa: N818  # named beside CollectiveTimeout
    """A store operation did not complete before its deadline."""


class UnwaitedError(InflightError):
    """With ``on_unwaited="raise"``: collectives were registered that nobody waited for."""


class UnwaitedWarning(UserWarning):
    """Collectives were registered that nobody waited for."""


class MissedWaitWarning(UserWarning):
    """In strict mode: a wait by tensor found no collective in flight."""
