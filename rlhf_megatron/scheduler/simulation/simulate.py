"""Which supply simulates a schedule."""

from __future__ import annotations

from rlhf_megatron.scheduler.schedules import Schedule
from rlhf_megatron.scheduler.schedules.synchronous import Synchronous
from rlhf_megatron.scheduler.simulation.background import Background
from rlhf_megatron.scheduler.simulation.foreground import Foreground
from rlhf_megatron.scheduler.simulation.history import History
from rlhf_megatron.scheduler.simulation.lengths import Workload
from rlhf_megatron.scheduler.simulation.plan import Plan


def simulate(plan: Plan, schedule: Schedule, workload: Workload, keeps_all: bool = False) -> History:
    """The first `plan.num_steps` steps, as a run would make them. `keeps_all`: also the events of the flow and how many
    responses each engine had when. Raises Stuck where the schedule awaits what will not come."""
    kind = Foreground if isinstance(schedule, Synchronous) else Background
    return kind(plan, schedule, workload, keeps_all).run()
