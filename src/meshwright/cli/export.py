"""`meshwright export`: a run's newest checkpoint as a folder that transformers loads."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from meshwright.cli.options import JsonFlag
from meshwright.core.errors import InputError, check_choice
from meshwright.core.units import format_bytes, parse_bytes
from meshwright.jobs.output import make_console, print_json
from meshwright.jobs.ready import OF_TRAINING, ready_ranks
from meshwright.training.folder import RunFolder
from meshwright.training.places import places_of

DTYPES = ("trained", "float32", "bfloat16", "float16")


def export(
    run: Annotated[str, Argument(metavar="RUN_FOLDER")],
    output: Annotated[str, Option("-o", "--output", metavar="FOLDER", help="Where to; must not exist yet.")],
    dtype: Annotated[
        str, Option(help=f"What weights are rounded to, of {', '.join(DTYPES)} (trained: as they are).")
    ] = "trained",
    shard: Annotated[str, Option(metavar="SIZE", help="Files of at most this much, such as 5GB or 500MiB.")] = "5GB",
    as_json: JsonFlag = False,
) -> None:
    """Write the newest checkpoint of a run as safetensors and config.json, for transformers and all that reads its folders.

    \b
      meshwright export runs/demo -o demo-hf
      python -c "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained('demo-hf'))"
    \b
    The run must train a transformers model (hf:CONFIG.json). Any plan's checkpoint will do: it is put together here, in one
    process on the CPU, which needs memory for the model twice. Before the folder gets its name, transformers reads it
    back: every tensor must be the trained one, tied where it was, and the outputs on an example batch must be the same; else the
    export fails and leaves nothing. Tokenizer files are copied from beside the weights or the config.
    To train from such a folder, write in a settings file:
    \b
      model = "hf:demo-hf/config.json"
      weights = "demo-hf"
    """
    from meshwright.runtime.launch import launch
    from meshwright.training.checkpoint import latest

    check_choice("--dtype", dtype, DTYPES)
    folder = RunFolder(run)
    if not folder.settings.exists() or latest(places_of(folder)) is None:
        raise InputError(f"{folder.path} holds no checkpoint to export: give the folder of a run that has saved one")
    payload = {"run": run, "folder": output, "dtype": dtype, "shard_bytes": parse_bytes(shard)}
    with ready_ranks((*OF_TRAINING, "transformers.modeling_utils")):
        found = launch("meshwright.jobs.rank:export_rank", payload, 1)
    console = make_console(as_json)
    console.print(
        f"step {found['step']} of {run} is in {found['folder']}: {found['num_tensors']} tensors, "
        f"{format_bytes(found['num_bytes'])}, {found['dtypes']}",
    )
    console.print(
        "transformers reads back the same tensors, and outputs that differ by at most "
        f"{found['largest_difference']:.1g} of their largest",
    )
    if found["copied"]:
        console.print(f"copied as they were: {', '.join(found['copied'])}")
    if as_json:
        print_json(found)
