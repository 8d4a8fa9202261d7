"""Which samples of a global batch a rank trains on, and in which microbatches."""

from __future__ import annotations

from meshwright.core.errors import PlanError
from meshwright.core.plan import Plan
from meshwright.models.objective import Batch, num_samples, slice_batch


def share_of(batch: Batch, plan: Plan, replica: int) -> Batch:
    """The samples of one dp coordinate. A batch that already is the share is returned as it is."""
    own = plan.microbatch * plan.num_microbatches
    found = num_samples(batch)
    if found == own:
        return batch
    if found != plan.global_batch:
        raise PlanError(
            f"the batch has {found} samples: give this rank's {own}, or the global batch of {plan.global_batch}"
        )
    return slice_batch(batch, replica * own, (replica + 1) * own)


def microbatches_of(share: Batch, plan: Plan) -> list[Batch]:
    size = plan.microbatch
    return [slice_batch(share, size * index, size * (index + 1)) for index in range(plan.num_microbatches)]
