"""All verbs in one application. A verb's module is loaded when the verb is asked for: each imports only the rooms it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright.core.errors import InputError
from meshwright.core.version import VERSION
from meshwright.interop.flag_names import our_name

VERBS = (
    "probe", "clusters", "models", "capture", "estimate", "plan", "sweep", "train", "export", "parity", "compare", "report",
    "watch", "score", "launch", "doctor",
)  # fmt: skip


class Verb(TyperCommand):
    """A verb that knows what other libraries call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        check_options(args, {option for parameter in self.params for option in parameter.opts})
        return super().parse_args(ctx, args)


def check_options(words: list[str], options: set[str]) -> None:
    """Refuse an option by another library's name, or with one dash, with ours; all other wrong ones are told as misspelt."""
    for word in words:
        name = word.partition("=")[0]
        if name in options or not name.startswith("-"):
            continue
        ours = our_name(name) if name.startswith("--") else name[1:]
        option, _, value = f"--{ours}".replace("_", "-").partition("=")
        if len(name) > 2 and option in options:
            raise InputError(f"no option is called {name}: it is {option}{' ' if value else ''}{value} here")


class Verbs(TyperGroup):
    """The function NAME of `meshwright.cli.NAME`, for each verb."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in VERBS and self.commands[cmd_name] is None:
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(cls=Verb)(getattr(import_module(f"meshwright.cli.{cmd_name}"), cmd_name))
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
