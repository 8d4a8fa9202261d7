"""`meshwright plan`: choose a plan, compare two, or improve on a configuration of another library."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from meshwright.cli import options
from meshwright.cli.plan_answers import answer, check_plan_file, compare_files, improve_on, show
from meshwright.core.errors import InputError
from meshwright.core.request import PlanRequest
from meshwright.interop.accelerate import load_accelerate
from meshwright.interop.deepspeed import load_deepspeed
from meshwright.jobs.output import make_console
from meshwright.jobs.runs import planned_run, write_page
from meshwright.planner.clusters import LOCAL, asked_cluster
from meshwright.planner.foreign import ForeignQuestion
from meshwright.planner.plan import Limits, PlanQuestion, check_offload
from meshwright.planner.subject import NamedModel


@options.plan_flags
def plan(
    flags: options.PlanFlags,
    model: Annotated[str | None, Argument(metavar="MODEL", show_default=False)] = None,
    cluster: Annotated[
        str | None, Option(help="A cluster's name, a .json or .toml file, or 'local', the default.")
    ] = None,
    hosts: options.HostsOption = None,
    devices: Annotated[int | None, Option(help="Use exactly so many devices.")] = None,
    nproc: options.NprocOption = None,
    memory: options.MemoryOption = None,
    search: options.SearchOption = "joint",
    prefer_fastest: options.PreferFastestFlag = False,
    diff: Annotated[
        tuple[str, str] | None, Option(metavar="A B", help="Compare two plan files; search nothing.")
    ] = None,
    from_deepspeed: Annotated[
        str | None, Option(metavar="FILE.json", help="Start from a DeepSpeed configuration.")
    ] = None,
    from_accelerate: Annotated[
        str | None, Option(metavar="FILE.yaml", help="Start from an Accelerate configuration.")
    ] = None,
    output: Annotated[str | None, Option("-o", "--output", help="Save the plan, .json or .toml.")] = None,
    html: Annotated[str | None, Option(metavar="FILE.html", help="Write what is predicted as one page.")] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Search the best plan for a model on a cluster. A plan flag fixes that part; the rest is searched.

    \b
    The best plan, on one screen, and as a file:
      meshwright plan gpt:layers=24,hidden=2048,heads=16,seq=1024,vocab=50304 \\
          --cluster a100-80g-selene --hosts 2 --global-batch 256 -o plan.json
    The same as a page, with the predicted step and memory drawn:
      meshwright plan MODEL --cluster a100-80g-selene --html plan.html
    What if?  Fix any part and search the rest:
      meshwright plan MODEL --cluster a100-80g-selene --tp 4 --no-offload --memory 40GiB
    What differs between two plans, and what it costs:
      meshwright plan --diff a.json b.json
      meshwright plan --diff a.json b.json --cluster a100-80g-selene --hosts 2
    What would be better than the configuration I have?
      meshwright plan MODEL --cluster a100-80g-selene --from-deepspeed ds_config.json
      meshwright plan MODEL --cluster a100-80g-selene --from-accelerate config.yaml --global-batch 64
    """
    if flags.file is not None:
        raise InputError(
            "--plan gives a whole plan, and this verb searches one: use `meshwright estimate` to cost a plan"
        )
    if html is not None and (diff, from_deepspeed, from_accelerate) != (None, None, None):
        raise InputError("--html shows one searched plan: leave --diff, --from-deepspeed and --from-accelerate out")
    if html is not None and not html.endswith((".html", ".htm")):
        raise InputError(f"--html {html}: a report is an .html file")
    if sum(given is not None for given in (diff, from_deepspeed, from_accelerate)) > 1:
        raise InputError("--diff, --from-deepspeed and --from-accelerate are different questions: ask one at a time")
    if output is not None:
        check_plan_file(output)
    check_offload(flags.request)
    console = make_console(as_json)
    if diff is not None:
        if flags.request != PlanRequest() or output is not None or devices is not None:
            raise InputError("--diff compares two files as they are: leave plan flags, --devices and -o out")
        compare_files(console, diff, model, cluster, hosts, memory, as_json)
        return
    if model is None:
        raise InputError("no MODEL was given: name one, such as gpt:layers=12,hidden=768,heads=12,seq=1024,vocab=50304")
    limits = Limits(devices, memory, search, prefer_fastest)
    subject, name = NamedModel(model), cluster or LOCAL
    if from_deepspeed is not None or from_accelerate is not None:
        foreign = load_deepspeed(from_deepspeed) if from_deepspeed else load_accelerate(str(from_accelerate))
        found = asked_cluster(name, foreign.num_hosts if hosts is None else hosts, nproc, console.print)
        theirs = ForeignQuestion.ask(foreign, subject, found, flags.request, limits)
        improve_on(console, theirs, output, as_json)
        return
    # not a spinner: it is a thread, and beside one no second process could capture the other casting
    if console.is_terminal and not as_json:
        console.print("following the model …", end="\r")
    found = asked_cluster(name, hosts, nproc, console.print)
    asked = PlanQuestion.ask(subject, found, flags.request, limits)
    result = answer(asked, console, as_json)
    if html is not None:
        console.print(f"saved as {write_page([planned_run(result, asked)], html)}")
    show(console, result, asked, output, as_json)
