"""`meshwright models`: the reference models and their options."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from meshwright.cli.options import JsonFlag
from meshwright.jobs.output import make_console, print_json


def models(as_json: JsonFlag = False) -> None:
    """List the reference models, their options and defaults."""
    from meshwright.models.reference import REFERENCE

    options = {
        name: {field.name: field.default for field in dataclasses.fields(entry.options)}
        for name, entry in REFERENCE.items()
    }
    if as_json:
        print_json({name: {"about": entry.about, "options": options[name]} for name, entry in REFERENCE.items()})
        return
    table = Table(title="models", title_justify="left")
    for column in ("name", "about", "options and defaults"):
        table.add_column(column)
    for name, entry in REFERENCE.items():
        table.add_row(name, entry.about, ", ".join(f"{key}={value}".lower() for key, value in options[name].items()))
    table.add_row(
        "path/to/file.py:function", "your own: returns a module, (module, batch) or (module, batch, loss)", ""
    )
    table.add_row(
        "hf:CONFIG.json",
        "a Hugging Face config, random weights (pip install 'meshwright[hf]')",
        "seq=2048 or the config's limit",
    )
    make_console(as_json).print(table)
