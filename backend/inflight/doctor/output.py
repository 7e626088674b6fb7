"""Write findings as JSON or as lines; on a terminal, lines are coloured by the package rich."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from inflight.doctor.finding import Finding, Level, worst

_NAME_WIDTH = 20
_MARGIN = " " * (_NAME_WIDTH + 9)
_SUMMARY = {
    Level.GREEN: "green: this machine is ready",
    Level.YELLOW: "yellow: this machine will serve, and could do better",
    Level.RED: "red: this machine will not serve until the red findings are fixed",
}


def write_json(findings: Sequence[Finding], stream: TextIO) -> None:
    """Write a JSON object with `status`, the worst level, and `findings`, each with name, level, says and mend."""
    values = [{**asdict(finding), "level": finding.level.value} for finding in findings]
    json.dump({"status": worst(findings).value, "findings": values}, stream, indent=2)
    stream.write("\n")


def write_text(findings: Sequence[Finding], stream: TextIO) -> None:
    """Write a line per finding, in colours if the stream is a terminal and rich is installed."""
    if stream.isatty():
        try:
            _write_rich(findings, stream)
            return
        except ImportError:
            pass
    for finding in findings:
        says = finding.says + (f"\nmend: {finding.mend}" if finding.mend else "")
        first, *others = says.splitlines()
        stream.write(f"{finding.level.value:7} {finding.name:{_NAME_WIDTH}} {first}\n")
        stream.writelines(f"{_MARGIN}{line.strip()}\n" for line in others)
    stream.write(f"\n{_SUMMARY[worst(findings)]}\n")


def _write_rich(findings: Sequence[Finding], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = finding.level.value
        says = Text(finding.says)
        if finding.mend:
            says.append(f"\n→ {finding.mend}", style="bold")
        table.add_row(Text(f"● {colour}", style=colour), Text(finding.name), says)
    console = Console(file=stream, highlight=False)
    console.print(table)
    level = worst(findings)
    console.print(Text(f"\n{_SUMMARY[level]}", style=f"bold {level.value}"))
