"""Plans that can be written and costed, but that this version cannot run yet; and the alternatives."""

from __future__ import annotations

from meshwright.core.axes import MODEL_AXES
from meshwright.core.errors import PlanError
from meshwright.core.names import is_list_item
from meshwright.core.pipeline.kinds import KINDS
from meshwright.core.plan import Plan


def check_runs(plan: Plan) -> None:
    """A plan that cannot run yet is refused before any rank starts."""
    if found := not_yet(plan):
        raise PlanError(
            f"this version cannot yet run {', nor '.join(found)}: {'; '.join(dict.fromkeys(found.values()))}"
        )


def not_yet(plan: Plan) -> dict[str, str]:
    """The parts of a plan that are not built yet, in words, each with what to do instead."""
    schedule, splits = plan.schedule, plan.splits_backward
    whole = ", ".join(name for name, kind in KINDS.items() if not kind.splits_backward)
    parts = [
        (
            "selective recompute of compiled blocks",
            "recompute them in full, or leave compile out",
            bool(plan.recomputed("selective")) and plan.compile,
        ),
        (
            "compile with tp or cp, whose exchanges the compiler cannot follow",
            "leave compile out, or set tp and cp to 1",
            plan.compile and (plan.mesh.tp > 1 or plan.mesh.cp > 1),
        ),
        (
            "offload to disk without a folder",
            "name one in offload.folder",
            plan.offload.what != "none" and plan.offload.where == "disk" and not plan.offload.folder,
        ),
        (
            "offload of activations of compiled blocks, whose code decides itself what it keeps",
            "leave compile out, or recompute these blocks",
            bool(plan.offload.activations) and plan.compile,
        ),
        (
            "16-bit moments of fp64 masters",
            "use fp32 moments, or another precision",
            plan.offload.moments == "bf16" and plan.precision == "fp64",
        ),
        *_streaming(plan),
        (
            f"schedule {schedule} without pp",
            "raise pp, or leave the schedule out",
            schedule != "1f1b" and plan.mesh.pp == 1,
        ),
        (
            f"ZeRO 3 with schedule {schedule}, which makes gradients of weights after their parameters are freed",
            f"use ZeRO 2, or one of the schedules {whole}",
            plan.zero == 3 and splits,
        ),
        (
            f"compile with schedule {schedule}, which cuts backward in two",
            f"leave compile out, or use one of the schedules {whole}",
            plan.compile and splits,
        ),
    ]
    return {words: instead for words, instead, asked in parts if asked}


def _streaming(plan: Plan) -> list[tuple[str, str, bool]]:
    """Parts of a plan that streamed parameters cannot be combined with."""
    if plan.offload.what != "parameters":
        return []
    mesh, offload = plan.mesh, plan.offload
    repeated = {name for name in plan.blocks if is_list_item(name)}
    others = [f"{axis}={degree}" for axis, degree in mesh.used.items() if axis in MODEL_AXES]
    sharded = plan.zero == 3 and plan.hybrid is None
    return [
        (f"offload of parameters with {' and '.join(others)}", "set these axes to 1, or offload to none", bool(others)),
        ("offload of parameters over dp without ZeRO 3", "set zero to 3, without hybrid", mesh.dp > 1 and not sharded),
        (
            "offload of parameters without full recompute of every repeated block",
            "set recompute to full: a block is run again from its input when its parameters come back",
            plan.recomputed("full") != repeated,
        ),
        ("offload of parameters in fp16", "use bf16", plan.precision == "fp16"),
        ("offload of parameters with synchronised batch norm", "set sync_batch_norm to false", plan.sync_batch_norm),
        ("offload of a share of the parameters", "set share to 1", offload.share < 1),
        ("16-bit moments of streamed parameters", "set moments to fp32", offload.moments == "bf16"),
        ("delayed updates of streamed parameters", "set delayed to false", offload.delayed),
    ]
