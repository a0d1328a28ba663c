"""P13: what a step costs under ZeRO on ranks of one machine. Run by `run.py` under torchrun; `--size` is the stage."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from libraries import BATCH, Epoch
from sharding import WIDTH, Blocks
from steps import timed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker import alternate, arguments, finish, join

CLIPPING = 0.5


class Job:
    """What every loop trains: the same blocks, data and AdamW, clipped."""

    def __init__(self, batches: int, world: int, rank: int, stage: int) -> None:
        self.world, self.rank, self.stage = world, rank, stage
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(batches * BATCH * world, WIDTH, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
        torch.manual_seed(2)
        self.model = Blocks()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def config(self) -> dict[str, Any]:
        """The same for all."""
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIPPING,
            "steps_per_print": 2**31,  # else each tenth step is followed by a report
            "zero_optimization": {"stage": self.stage},
        }

    def loader(self) -> DataLoader[Any]:
        """This rank's part of the data."""
        sampler = DistributedSampler(self.data, self.world, self.rank, shuffle=False)
        return DataLoader(self.data, batch_size=BATCH, sampler=sampler)

    def moments(self) -> torch.Tensor:
        """The norms of both moments on this rank, and the steps: of flat partitions, or of the parts of parameters in them."""
        states = [state for state in self.optimizer.state.values() if state]
        norms = [torch.stack([state[key].norm() for state in states]).norm() for key in ("exp_avg", "exp_avg_sq")]
        return torch.stack([*norms, states[0]["step"]])

    def weights(self) -> torch.Tensor:
        """All weights, whole and flat. Collective."""
        from deepspeed import zero

        parameters = list(self.model.parameters())
        with zero.GatheredParameters(parameters, enabled=self.stage == 3):
            return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])


def plain(job: Job) -> Epoch:
    """DeepSpeed's own loop."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=job.model, optimizer=job.optimizer, config=job.config)
    loader, device = job.loader(), torch.device("cpu")

    def epoch() -> None:
        for inputs, targets in loader:
            engine.backward(mse_loss(engine(inputs.to(device)), targets.to(device)))
            engine.step()

    return epoch


def accel(job: Job) -> Epoch:
    """Ours."""
    from accel_core import Accelerator
    from accel_deepspeed import DeepSpeed

    strategy = DeepSpeed(config={**job.config, "gradient_clipping": 0.0})
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, DataLoader(job.data, batch_size=BATCH))

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def accelerate(job: Job) -> Epoch:
    """The peer, with the same configuration; it clips in its engine."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=job.config))
    assert accelerator.distributed_type == "DEEPSPEED", f"it took {accelerator.distributed_type}"
    model, optimizer = accelerator.prepare(job.model, job.optimizer)
    loader = job.loader()  # with cpu=True it would leave DeepSpeed out, and without it takes this for one process

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


LOOPS: dict[str, Callable[[Job], Epoch]] = {"plain": plain, "accel": accel, "accelerate": accelerate}


def main() -> None:
    options = arguments()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rank, world = join()
    warnings.filterwarnings("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and nobody here needs it
    names = sorted((name for name in options.libraries if name in LOOPS), key=list(LOOPS).index)
    jobs, epochs = {}, {}
    for (
        name
    ) in names:  # one after the other, for whoever makes an engine takes over what DeepSpeed keeps in the process
        jobs[name] = Job(options.batches, world, rank, options.size)
        epochs[name] = LOOPS[name](jobs[name])
    for name, job in jobs.items():
        epochs[name]()
        difference = f"after an epoch, {name} has other {{}} than plain"
        torch.testing.assert_close(job.weights(), jobs["plain"].weights(), msg=difference.format("weights"))
        torch.testing.assert_close(job.moments(), jobs["plain"].moments(), msg=difference.format("moments"))
    turns = {name: timed(epoch, options.batches) for name, epoch in epochs.items()}
    dist.barrier()
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
