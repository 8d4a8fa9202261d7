"""All verbs in one application. A verb's module is loaded when the verb is asked for: each imports only the rooms it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from meshwright.core.version import VERSION

VERBS = (
    "probe", "models", "capture", "estimate", "plan", "sweep", "train", "export", "parity", "compare", "report", "watch",
    "score", "launch", "doctor",
)  # fmt: skip


class Verbs(TyperGroup):
    """The function NAME of `meshwright.cli.NAME`, for each verb."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in VERBS and self.commands[cmd_name] is None:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command()(getattr(import_module(f"meshwright.cli.{cmd_name}"), cmd_name))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=Verbs,
    name="meshwright",
    help=(
        "Which parallelism, for my model, on my cluster? Plan it, run it, see how the run compared with the promise.\n\n"
        "A MODEL is gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304, or path/to/file.py:function, or hf:CONFIG.json.\n\n"
        "A CLUSTER is a name, a file, or 'local': this machine, measured."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version and end."),
) -> None:
    if show:
        print(VERSION)
        raise typer.Exit
