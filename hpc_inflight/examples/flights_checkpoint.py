"""Checkpoints of the flights training, with ``torch.distributed.checkpoint``, and the signal that asks for one.

A checkpoint holds every table under its own name, saved by the rank that owns it, and what all ranks hold alike once.
So a job may go on with another number of ranks, though only the same number gives the same losses to the last bit.
"""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpc_inflight.examples.flights_model import ShardedDLRM

_LATEST = "latest.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; every rank raises it."""


class StopSignal:
    """SIGUSR1, which batch systems send before the time limit, as a question that all ranks answer alike."""

    def __init__(self) -> None:
        """Take the signal over for this process."""
        self._came = False
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def on_any_rank(self) -> bool:
        """Say whether any rank got the signal; every rank calls it at the same step."""
        came = torch.tensor([int(self._came)])
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        return bool(came.item())


class Checkpoints:
    """The checkpoints of one training in one folder, of which the newest is kept."""

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        model: ShardedDLRM,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[torch.optim.lr_scheduler.LRScheduler],
    ) -> None:
        """Name what is saved; ``options`` are those that a resumed training must share."""
        self.folder = folder
        self._options = dict(options)
        self._model = model
        self._adam, self._adagrad = optimizers
        self._schedules = schedules

    def load(self) -> list[float]:
        """Put the newest checkpoint's values in place and return the losses up to it; none without a checkpoint.

        Every rank calls it, before the first step.

        Raises:
            CheckpointError: The checkpoint is of a training with other options, or unreadable.
        """
        latest = self.folder / _LATEST
        if not latest.exists():
            return []
        try:
            found = json.loads(latest.read_text(encoding="utf-8"))
            steps, options = int(found["steps"]), dict(found["options"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"{latest}: a checkpoint's description is expected ({error!r}); remove it to start anew"
            raise CheckpointError(message) from error
        for name, value in self._options.items():
            if options.get(name) != value:
                message = (
                    f"--checkpoint: {self.folder} holds a training with {name} {options.get(name)}, found {value}; "
                    "use the same options, or another folder"
                )
                raise CheckpointError(message)
        state = self._state([0.0] * steps)
        load(state, checkpoint_id=self.folder / f"step-{steps}")
        for schedule, values in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(values)
        for optimizer, rate in zip((self._adam, self._adagrad), state["rates"], strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        losses: list[float] = state["losses"].tolist()
        return losses

    def save(self, losses: Sequence[float]) -> Path:
        """Write a checkpoint; every rank calls it after the same step. Returns its folder, on a shared file system."""
        target = self.folder / f"step-{len(losses)}"
        with warnings.catch_warnings():
            # torch warns that a tensor of one rank alone is not a sharded one, and that is as it should be here
            warnings.simplefilter("ignore")
            save(self._state(losses), checkpoint_id=target)
        if dist.get_rank() == 0:
            # save() returns here once every rank has written; the renaming is what makes the new one count
            latest = self.folder / _LATEST
            fresh = latest.with_suffix(".new")
            fresh.write_text(json.dumps({"steps": len(losses), "options": self._options}), encoding="utf-8")
            fresh.replace(latest)
            for old in self.folder.glob("step-*"):
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)
        return target

    def _state(self, losses: Sequence[float]) -> dict[str, Any]:
        """Name all values; the tensors are the live ones, so that loading fills them in place."""
        state: dict[str, Any] = {
            "losses": torch.tensor(losses, dtype=torch.float64),
            "rates": [o.param_groups[0]["lr"] for o in (self._adam, self._adagrad)],
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }
        for index, parameter in enumerate(self._model.dense_parameters()):
            kept = self._adam.state[parameter]
            if not kept:  # Adam makes them in its first step
                kept["step"] = torch.tensor(0.0)
                kept["exp_avg"], kept["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state[f"dense.{index}"] = parameter.detach()
            state |= {f"dense.{index}.{name}": kept[name] for name in ("step", "exp_avg", "exp_avg_sq")}
        weight = self._model.tables.weight
        kept = self._adagrad.state[weight]
        state["tables.step"] = kept["step"]
        for table, rows in self._model.tables.row_slices().items():
            state[f"tables.{table}"] = weight.detach()[rows]
            state[f"tables.{table}.sum"] = kept["sum"][rows]
        return state
