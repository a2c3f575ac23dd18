"""What ``hvdkit profile`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["show_profiles"]

_PHASES = {
    "step": "step, of its slowest rank",
    "backward": "backward pass",
    "wait": "wait for reductions",
    "update": "update",
    "negotiation": "negotiation",
    "queue": "queue",
    "copy": "copy",
    "transfer": "transfer",
    "operations": "copy or transfer",
}


def show_profiles(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """Print summaries of ``hvdkit.profile.summary``: phases side by side, then the rest of each."""
    if any(run["steps"]["phases"] for run in runs):
        console.print(_tabulate_phases(runs))
    for run in runs:
        title = f"{run['workers']} worker(s)" if run["workers"] else "this timeline"
        _show_hidden(console, run, title)
        _show_stragglers(console, run, title)
        if run["tensors"]:
            console.print(_tabulate_tensors(run, title))
        cut = f", {run['unfinished']} unfinished" if run["unfinished"] else ""
        console.print(
            f"{title}: {run['span_s']:.2f} s, {run['operations']} operations{cut}, "
            f"{run['steps']['count']} steps by {run['steps']['by']} (without first and last)"
        )
        for note in run["notes"]:
            console.print(f"Note: {note}", markup=False)


def _tabulate_phases(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="A step: median time in each phase, share of all steps (phases overlap)")
    table.add_column("phase")
    for run in runs:
        heading = f"{run['workers']} worker(s)" if run["workers"] else "time"
        table.add_column(heading, justify="right")
    for name, label in _PHASES.items():
        cells = []
        for run in runs:
            phase = run["steps"]["phases"].get(name)
            if phase is None:
                cells.append("")
            elif name == "step":
                cells.append(f"{_show(phase['median_s'])} (p95 {_show(phase['p95_s'])})")
            else:
                cells.append(f"{_show(phase['median_s'])}  {phase['share']:6.1%}")
        if any(cells):
            table.add_row(label, *cells)
    if any(run["hidden"] for run in runs):
        table.add_section()
        shares = [(run["hidden"] and f"{run['hidden']['share']:.1%}") or "" for run in runs]
        table.add_row("communication that was hidden", *shares)
    return table


def _show_hidden(console: Console, run: Mapping[str, Any], title: str) -> None:
    hidden, gaps = run["hidden"], run["gaps"]["share"]
    if hidden is not None:
        console.print(
            f"{title}: reductions took {_show(hidden['exchange_s'])} a step, of which "
            f"{hidden['share']:.1%} was hidden behind the backward pass; beside that, ranks waited "
            f"{_show(hidden['waited_for_ranks_s'])} for slower ones and negotiation"
        )
        table = Table("rank", *("backward", "waited", "for transfers", "for ranks", "hidden"))
        table.title = f"{title}: means of a step on each rank"
        for rank in hidden["ranks"]:
            names = ("backward_s", "wait_s", "exposed_s", "waited_for_ranks_s")
            table.add_row(
                str(rank["rank"]), *(_show(rank[name]) for name in names), f"{rank['share']:.1%}"
            )
        console.print(table)
    elif gaps is not None:
        console.print(f"{title}: no operation was carried out in {gaps:.1%} of the steps' time")


def _show_stragglers(console: Console, run: Mapping[str, Any], title: str) -> None:
    for kind, what in (("waits", "step(s)"), ("negotiations", "negotiation(s)")):
        found = run["stragglers"][kind]
        if found is None or not found["meetings"]:
            continue
        table = Table("rank", "came last", "late, mean", "late, most")
        table.title = f"{title}: who came last in {found['meetings']} {what}, {found['ties']} ties"
        for rank in found["ranks"]:
            table.add_row(
                str(rank["rank"]),
                str(rank["last"]),
                _show(rank["mean_late_s"]),
                _show(rank["max_late_s"]),
            )
        console.print(table)
        if found["straggler"] is None:
            console.print(f"{title}: no straggler among these {what}")
        else:
            rank = next(r for r in found["ranks"] if r["rank"] == found["straggler"])
            console.print(
                f"{title}: rank {rank['rank']} is the straggler: last in {rank['last']} of "
                f"{found['meetings']} {what}, by {_show(rank['mean_late_s'])} on average",
                style="bold",
            )


def _tabulate_tensors(run: Mapping[str, Any], title: str) -> Table:
    table = Table(
        title=f"{title}: the {len(run['tensors'])} with the most time, of "
        f"{run['tensors_in_all']} names; mean (p95) of an operation"
    )
    table.add_column("tensor", overflow="fold")
    for heading in ("size", "times", "in all", "negotiation", "queue", "copy", "transfer"):
        table.add_column(heading, justify="right")
    for tensor in run["tensors"]:
        phases = tensor["phases"].values()
        cells = [f"{_show(one['mean_s'])} ({_show(one['p95_s'])})" for one in phases]
        size = "" if tensor["size_bytes"] is None else _show_size(tensor["size_bytes"])
        table.add_row(
            escape(tensor["name"]), size, str(tensor["count"]), _show(tensor["total_s"]), *cells
        )
    return table


def _show(time_s: float) -> str:
    return f"{1e3 * time_s:.2f} ms"


def _show_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"
