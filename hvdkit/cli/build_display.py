"""What `hvdkit install` shows: the plan as a table, the build as a bar or as lines."""

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hvdkit.install import build_log
from hvdkit.install.plan import Plan
from hvdkit.install.toolchain import Tool

__all__ = ["BuildDisplay", "show_plan"]

LINE_EVERY_PERCENT = 10


def show_plan(plan: Plan, cached: Path | None, edits: bool = False) -> None:
    """Print the plan as a table; name the compatibility edits one by one if asked to."""
    table = Table(title="hvdkit install", title_justify="left")
    # Folded, since the end of a path must not be cut off.
    for heading in ("", "Plan"):
        table.add_column(heading, overflow="fold")
    for framework in plan.frameworks:
        gpu = f"CUDA {framework.cuda}" if framework.cuda else "CPU build"
        gpu = f"ROCm {framework.rocm}" if framework.rocm else gpu
        table.add_row(framework.name, f"{framework.version} ({gpu})")
    mpi = f" ({plan.mpi.version})" if plan.mpi else ""
    table.add_row("controllers", ", ".join(plan.controllers) + mpi)
    nccl = f"NCCL {plan.nccl.version}" if plan.nccl else "NCCL"
    table.add_row("GPU reduction", nccl if plan.gpu else "none")
    tools = plan.toolchain
    table.add_row("compiler", _describe(tools.compiler))
    table.add_row("make", _describe(tools.make))
    table.add_row("CMake", _describe(tools.cmake, "to be got through pip"))
    table.add_row("jobs", str(plan.jobs))
    names = (
        ": " + ", ".join(edit.name for edit in plan.edits) if edits else "; --dry-run names them"
    )
    table.add_row("source edits", f"{len(plan.edits)} for compatibility{names}")
    table.add_row("wheel", f"in the cache: {cached}" if cached else f"to be built, key {plan.key}")
    console = Console(highlight=False)
    console.print(table)
    for note in plan.notes:
        console.print(f"Note: {note}", markup=False)


class BuildDisplay:
    """Tells a person how the build goes: a bar on a terminal, plain lines anywhere else."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._shown_percent = 0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("Compiling"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[step]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("build", total=100, step="", visible=False)

    def __enter__(self) -> "BuildDisplay":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, text: str) -> None:
        """Show that a step of the work begins."""
        self._console.print(f"{text} ...", markup=False)

    def progress(self, progress: build_log.Progress) -> None:
        """Move the bar, or print a line every ten percent."""
        if self._bar:
            self._bar.update(
                self._task, completed=progress.percent, step=progress.step, visible=True
            )
        elif progress.percent >= self._shown_percent + LINE_EVERY_PERCENT:
            self._shown_percent = progress.percent - progress.percent % LINE_EVERY_PERCENT
            self._console.print(f"  {progress.percent:3d} %  {progress.step}", markup=False)


def _describe(tool: Tool | None, otherwise: str = "missing") -> str:
    return f"{Path(tool.path).name} {tool.version}".strip() if tool else otherwise
