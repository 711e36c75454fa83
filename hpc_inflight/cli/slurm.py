"""``hpc-inflight slurm``: print a batch script for this installation."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from hpc_inflight.errors import LaunchError
from hpc_inflight.launch_command import srun_mpi


@dataclass(frozen=True)
class Script:
    """What the script asks for; None and empty texts are left to the site.

    Attributes:
        mpi: What srun's ``--mpi`` needs: ``"pmix"`` or ``"pmi2"``.
        command: The program, such as ``("python", "train.py")``.
        requeue_s: Seconds before the time limit at which the program gets SIGUSR1 and the job queues again.
        setup: Lines that make the environment, such as ``module load openmpi``.
    """

    mpi: str
    command: tuple[str, ...]
    name: str = "train"
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int | None = None
    gpus_per_rank: int | None = None
    time: str = "01:00:00"
    partition: str = ""
    account: str = ""
    array: str = ""
    requeue_s: int | None = None
    setup: tuple[str, ...] = ()


def slurm_script(script: Script) -> str:
    """Write the script.

    **Local:** pure.

    Args:
        script: What it asks for.

    Returns:
        Its text, for ``sbatch``.
    """
    head = {
        "job-name": script.name,
        "partition": script.partition,
        "account": script.account,
        "array": script.array,
        "nodes": script.nodes,
        "ntasks-per-node": script.ranks_per_node,
        "cpus-per-task": script.cpus_per_rank,
        "gpus-per-task": script.gpus_per_rank,
        "time": script.time,
        "signal": "" if script.requeue_s is None else f"B:USR1@{script.requeue_s}",
        "output": "%x-%A_%a.out" if script.array else "%x-%j.out",
    }
    lines = ["#!/usr/bin/env bash"]
    lines += [f"#SBATCH --{option}={value}" for option, value in head.items() if value not in {None, ""}]
    if script.requeue_s is not None:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += ["set -euo pipefail", "", *script.setup]
    threads = "${SLURM_CPUS_PER_TASK:-1}"
    lines.append(f"export OMP_NUM_THREADS={threads}")
    srun = ["srun", f"--mpi={script.mpi}", "--kill-on-bad-exit=1"]
    if script.cpus_per_rank is not None:
        srun.append(f"--cpus-per-task={script.cpus_per_rank}")  # not taken from the job since Slurm 22.05
    step = " ".join([*srun, shlex.join(script.command)])
    if script.requeue_s is None:
        return "\n".join([*lines, f"exec {step}", ""])
    return "\n".join([*lines, f"{step} &", *_REQUEUE, ""])


_REQUEUE = (
    "step=$!",
    "again=''",
    "trap 'again=1; kill -USR1 \"$step\"' USR1",
    "status=0",
    'wait "$step" || status=$?',
    "if [[ -n $again ]]; then",
    "    # The signal ended the first wait, and srun has passed it on: the program writes its checkpoint and ends.",
    "    status=0",
    '    wait "$step" || status=$?',
    "fi",
    'if [[ -n $again && $status == 0 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    'exit "$status"',
)


def _time(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", text):
        msg = f"minutes, hours:minutes:seconds or days-hours:minutes:seconds are expected, found {text!r}"
        raise typer.BadParameter(msg)
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:%/+-]*", text):
        msg = f"a word without spaces is expected, found {text!r}"
        raise typer.BadParameter(msg)
    return text


def slurm(
    command: Annotated[list[str] | None, typer.Argument(help="The program; default: python train.py.")] = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    cpus_per_rank: Annotated[int | None, typer.Option(min=1, help="CPUs of each rank.")] = None,
    gpus_per_rank: Annotated[int | None, typer.Option(min=1, help="GPUs of each rank, which sees no other.")] = None,
    time: Annotated[str, typer.Option(callback=_time, help="Time limit.")] = "01:00:00",
    name: Annotated[str, typer.Option(callback=_word, help="Name of the job.")] = "train",
    partition: Annotated[str, typer.Option(callback=_word, help="Partition.")] = "",
    account: Annotated[str, typer.Option(callback=_word, help="Account.")] = "",
    array: Annotated[str, typer.Option(callback=_word, help="Indices of a job array, such as 0-3.")] = "",
    requeue: Annotated[
        int | None, typer.Option(min=1, help="Seconds before the limit at which it gets SIGUSR1 and queues again.")
    ] = None,
    setup: Annotated[list[str] | None, typer.Option(help="A line before the program; may be repeated.")] = None,
    mpi: Annotated[
        str, typer.Option(callback=_word, help="For srun --mpi=; default: what the MPI library needs.")
    ] = "",
) -> None:
    """Print a batch script that starts a program with srun, as this installation's MPI library needs it.

    hpc-inflight slurm --nodes 2 --ranks-per-node 4 --gpus-per-rank 1 python train.py > train.sbatch
    """
    if not mpi:
        try:
            mpi = srun_mpi(os.environ)
        except LaunchError as error:
            typer.echo(f"hpc-inflight slurm: {error}", err=True)
            raise typer.Exit(code=2) from None
    script = Script(
        mpi=mpi,
        command=tuple(command or ("python", "train.py")),
        name=name,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_rank=cpus_per_rank,
        gpus_per_rank=gpus_per_rank,
        time=time,
        partition=partition,
        account=account,
        array=array,
        requeue_s=requeue,
        setup=tuple(setup or ()),
    )
    typer.echo(slurm_script(script), nl=False)
