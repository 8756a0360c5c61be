"""Rules about what is done when numbers go wrong or ranks die."""

from __future__ import annotations

from megatron_moe.config.rules.wording import refuse
from megatron_moe.config.schema import Run


def spikes_have_a_folder(run: Run, world_size: int) -> None:
    """The batch of a spike is written somewhere."""
    if run.faults.loss_spike_factor is not None and run.faults.fault_dir is None and run.checkpoint.save is None:
        raise refuse(
            run,
            ("loss_spike_factor", "fault_dir", "save"),
            "there is no folder for the batches; add --fault-dir FOLDER or --save FOLDER",
        )
