"""``hpc-inflight trace``: where the ranks of a job part, from their flight recorder dumps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  # typer looks at it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hpc_inflight.cli._trace_chrome import timeline
from hpc_inflight.cli._trace_compare import Finding, compare
from hpc_inflight.cli._trace_load import Dump, Entry, TraceError, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_APART_S = 60
_SHOWN = 4


def trace(
    directory: Annotated[Path, typer.Argument(help="Where the dumps are, one file per rank.", show_default=False)],
    *,
    chrome: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto or chrome://tracing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    prefix: Annotated[str | None, typer.Option(help="What the dumps' names begin with, before the rank.")] = None,
) -> None:
    """Read the ranks' flight recorder dumps and say where the ranks part.

    Reads what dump_flight_recorder() writes, and the dumps of PyTorch's own NCCL backend.
    """
    try:
        job = examine(load(directory, prefix))
        if chrome is not None:
            chrome.write_text(json.dumps(timeline(job.dumps)), encoding="utf-8")
    except TraceError as error:
        typer.echo(f"hpc-inflight trace: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"hpc-inflight trace: {error.filename} cannot be written: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(job.as_json(), indent=2))
        return
    console = Console()
    # a line that is read by a program stays one line
    console.print(job.text(), soft_wrap=not console.is_terminal, markup=False, highlight=False)
    (console if console.is_terminal else Console(width=120)).print(job.table())
    if chrome is not None:
        typer.echo(f"timeline: {chrome}; open it in https://ui.perfetto.dev or chrome://tracing")


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0 to 5, 7 and 9``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]  # noqa: PLR2004  # 0 and 1
    return "ranks " + " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _what(entry: Entry, *, number: bool = True) -> str:
    sizes = " ".join(str(list(size)) for size in (entry.inputs or entry.outputs)[:_SHOWN])
    more = " ..." if len(entry.inputs or entry.outputs) > _SHOWN else ""
    shape = f" ({' '.join(filter(None, [sizes + more, ' and '.join(entry.dtypes)]))})" if entry.dtypes else ""
    if entry.channel is not None:
        src, dst, tag = entry.channel
        ends = f" from rank {'any' if src is None else src} to rank {dst}" + (f" with tag {tag}" if tag else "")
        return f"{entry.op}{ends}{shape} in group {entry.group}"
    return f"{entry.op}{shape}" + (f", collective {entry.seq} of group {entry.group}" if number else "")


@dataclass(frozen=True)
class Job:
    """The dumps of a job and what was found in them."""

    dumps: Sequence[Dump]
    findings: Sequence[Finding]
    missing: Sequence[int]

    def text(self) -> str:
        """Return one paragraph: where the ranks part, who is missing, and what does not match."""
        head = f"{_plural(len(self.dumps), 'dump')} of {_plural(len(self.dumps) + len(self.missing), 'rank')}."
        parts = [head, *(self._say(finding) for finding in self.findings)]
        if not self.findings:
            count = len({(e.group, e.seq) for dump in self.dumps for e in dump.entries if e.channel is None})
            parts.append(f"The ranks agree on {_plural(count, 'collective')}, and nothing is pending.")
        if self.missing:
            parts.append(
                f"There is no dump of {ranks_text(self.missing)}: killed, on a node that was lost, or not asked."
            )
        written = {dump.rank: dump.written for dump in self.dumps}
        newest = max(written.values())
        old = [rank for rank, time in written.items() if newest - time > _APART_S * 1e9]
        if old:
            age = (newest - min(written[rank] for rank in old)) / 1e9
            parts.append(f"The dump of {ranks_text(old)} is up to {age:.0f} s older than the newest: of another job?")
        return " ".join(parts)

    def _say(self, finding: Finding) -> str:
        where = f"collective {finding.seq} of group {finding.group} ({finding.desc})"
        if finding.kind == "failed":
            ((rank, entry),) = finding.entries.items()
            return f"On rank {rank}, {_what(entry)} failed: {finding.detail.rstrip('.')}."
        if finding.kind == "message":
            (entry, *_) = finding.entries.values()
            return f"A {_what(entry)} does not fit: {finding.detail}."
        if finding.kind == "pending":
            waiting = [rank for rank, entry in finding.entries.items() if entry.pending]
            (entry, *_) = finding.entries.values()
            return (
                f"All have issued {entry.op} at {where}, and {ranks_text(waiting)} "
                f"{'has' if len(waiting) == 1 else 'have'} not completed it."
            )
        variants: dict[str, list[int]] = {}
        for rank, entry in finding.entries.items():
            variants.setdefault(_what(entry, number=False), []).append(rank)
        issued = "; ".join(f"{ranks_text(ranks)} issued {what}" for what, ranks in variants.items())
        text = f"The ranks part at {where}: {issued}"
        if finding.detail:
            text += f"; {finding.detail}"
        if finding.absent:
            text += f"; {ranks_text(finding.absent)} did not come to it"
        sites = {entry.site for entry in finding.entries.values() if entry.site}
        if sites:
            text += f"; issued at {' and '.join(sorted(sites))}"
        lasts = "".join(self._last_words(rank) for rank in finding.absent[:3])
        return f"{text}.{lasts}"

    def _last_words(self, rank: int) -> str:
        dump = next(dump for dump in self.dumps if dump.rank == rank)
        if not dump.entries:
            return f" Rank {rank} has issued nothing."
        entry = dump.entries[-1]
        since = (dump.written - (entry.completed or entry.created)) / 1e9
        done = "completed" if entry.state == "completed" else f"{entry.state}, not complete"
        site = f", issued at {entry.site}" if entry.site else ""
        return f" The last that rank {rank} did was {_what(entry)}{site}: {done}, {since:.1f} s before its dump."

    def _lasts(self) -> dict[tuple[str, str], list[Dump]]:
        """Return the ranks by what they did last: what is not complete, else what they issued last."""
        found: dict[tuple[str, str], list[Dump]] = {}
        for dump in self.dumps:
            pending = [entry for entry in dump.entries if entry.pending]
            for last in (pending or dump.entries[-1:])[:1]:
                found.setdefault((_what(last), "failed" if last.error else last.state), []).append(dump)
            if not dump.entries:
                found.setdefault(("nothing", ""), []).append(dump)
        return found

    def table(self) -> Table:
        """Return what each rank did last, ranks that did the same in one row."""
        table = Table(title="what the ranks did last")
        for column in ("ranks", "where", "operation", "state"):
            table.add_column(column)
        for (what, state), dumps in self._lasts().items():
            hosts = sorted({dump.host for dump in dumps if dump.host})
            where = ", ".join(hosts) if len(hosts) <= _SHOWN else f"{len(hosts)} nodes"
            table.add_row(ranks_text(dump.rank for dump in dumps).split(" ", 1)[1], where, what, state)
        if self.missing:
            table.add_row(ranks_text(self.missing).split(" ", 1)[1], "", "no dump", "")
        return table

    def as_json(self) -> dict[str, Any]:
        """Return everything that the text says as plain data."""
        return {
            "text": self.text(),
            "ranks": len(self.dumps) + len(self.missing),
            "dumps": [{"rank": d.rank, "file": d.file, "host": d.host, "entries": len(d.entries)} for d in self.dumps],
            "missing_dumps": list(self.missing),
            "findings": [
                {
                    "kind": finding.kind,
                    "group": finding.group,
                    "description": finding.desc,
                    "seq": finding.seq,
                    "absent_ranks": finding.absent,
                    "detail": finding.detail,
                    "issued": {
                        str(rank): {
                            "op": entry.op,
                            "state": entry.state,
                            "inputs": entry.inputs,
                            "outputs": entry.outputs,
                            "dtypes": entry.dtypes,
                            "call_site": entry.site,
                        }
                        for rank, entry in finding.entries.items()
                    },
                }
                for finding in self.findings
            ],
            "last": [
                {"ranks": [dump.rank for dump in dumps], "operation": what, "state": state}
                for (what, state), dumps in self._lasts().items()
            ],
        }


def examine(dumps: Sequence[Dump]) -> Job:
    """Compare the dumps."""
    known = {rank for dump in dumps for ranks in dump.groups.values() for rank in ranks}
    known.update(rank for dump in dumps for rank in range(dump.world_size or 0))
    return Job(dumps, compare(dumps), sorted(known - {dump.rank for dump in dumps}))
