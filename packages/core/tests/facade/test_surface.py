"""What the Accelerator passes on arrives: every public name that delegates, in a world of one and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_core import (
    DDP,
    Accelerator,
    AcceleratorState,
    DistributedType,
    LocalSGD,
    NonFiniteError,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_testing import run_ranks


def where_it_runs(accelerator: Accelerator) -> dict[str, bool]:
    ran: dict[str, bool] = {}

    @accelerator.on_main_process
    def main() -> None:
        ran["main"] = True

    @accelerator.on_local_main_process()
    def local() -> None:
        ran["local"] = True

    @accelerator.on_last_process
    def last() -> None:
        ran["last"] = True

    @accelerator.on_process(process_index=1)
    def second() -> None:
        ran["second"] = True

    @accelerator.on_local_process(local_process_index=0)
    def first_of_machine() -> None:
        ran["first of machine"] = True

    for function in (main, local, last, second, first_of_machine):
        function()
    return ran


def tour(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, project_dir=folder, strategy=DDP(), kwargs_handlers=[ProfileKwargs()])
    rank = accelerator.process_index
    order: list[int] = []
    with accelerator.main_process_first():
        order = sorted(int(path.name) for path in Path(folder).glob("[0-9]"))
        (Path(folder) / str(rank)).touch()
    with accelerator.local_main_process_first():
        pass
    before = accelerator.check_trigger()
    if rank == 1:
        accelerator.set_trigger()
    after = [accelerator.check_trigger(), accelerator.check_trigger()]
    with pytest.warns(FutureWarning, match="check_breakpoint"):
        accelerator.check_breakpoint()
    with accelerator.profile(ProfileKwargs(output_trace_dir=f"{folder}/traces")):
        torch.ones(3).add(1)
    accelerator.save({"rank": rank}, Path(folder) / "saved.pt")
    model = accelerator.prepare(nn.Linear(2, 1))
    return {
        "type": accelerator.distributed_type,
        "state": type(accelerator.state) is AcceleratorState and accelerator.state.ddp_plugin is not None,
        "ran": where_it_runs(accelerator),
        "seen": order,
        "trigger": [before, *after],
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1)).tolist(),
        "project": accelerator.project_dir,
        "names": sorted(accelerator.get_state_dict(model)),
    }


def test_ranks_find_everything_under_the_accelerator(tmp_path: Path) -> None:
    first, second = run_ranks(tour, 2, str(tmp_path))
    assert first["type"] == second["type"] == DistributedType.MULTI_CPU
    assert first["state"]
    assert second["state"]
    assert first["ran"] == {"main": True, "local": True, "first of machine": True}
    assert second["ran"] == {"last": True, "second": True}
    assert (first["seen"], second["seen"]) == ([], [0])
    assert first["trigger"] == second["trigger"] == [False, True, False]
    assert (first["padded"], second["padded"]) == ([1.0, 0.0], [1.0, 1.0])
    assert first["project"] == str(tmp_path)
    assert second["names"] == ["bias", "weight"]
    assert torch.load(tmp_path / "saved.pt", weights_only=True) == {"rank": 0}
    for rank in range(2):
        assert "traceEvents" in json.loads((tmp_path / f"traces/profile_{rank}.json").read_text())


def test_one_process_finds_the_same_names(tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    accelerator = Accelerator(cpu=True, project_config=config)
    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.project_configuration.project_dir == str(tmp_path)
    assert accelerator.logging_dir == str(tmp_path / "logs")
    assert set(where_it_runs(accelerator)) == {"main", "local", "last", "second", "first of machine"}
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert "Strategy: single" in repr(accelerator.state)


def test_options_of_the_constructor_reach_what_they_are_for() -> None:
    with pytest.raises(ValueError, match="dynamo_backend"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with pytest.warns(FutureWarning, match="kwarg_handler"):
        accelerator = Accelerator(cpu=True, kwarg_handler=[ProfileKwargs(record_shapes=True)])
    with accelerator.profile() as profiler:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert any(event.input_shapes for event in profiler.key_averages(group_by_input_shape=True))
    compiled = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = compiled.prepare(nn.Linear(2, 1))
    assert model(torch.ones(1, 2)).shape == (1, 1)
    compiled.free_memory()


def test_explanation_shows_where_the_option_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DETECT_NONFINITE", "1")
    shown = str(Accelerator(cpu=True).explain())
    assert "detect_nonfinite" in shown
    assert "ACCELERATE_DETECT_NONFINITE" in shown


def test_first_value_that_is_not_finite_is_named_by_its_module() -> None:
    accelerator = Accelerator(cpu=True, detect_nonfinite=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 2)).mean())
    with torch.no_grad():
        model[1].weight.fill_(float("inf"))
    optimizer.zero_grad()
    with pytest.raises(NonFiniteError, match=r"1\.weight|module '1'"):
        accelerator.backward(model(torch.ones(4, 2)).mean())
    accelerator.free_memory()
    assert not model._forward_hooks


def average_locally() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(2):
            accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return [parameter.item() for parameter in model.parameters()]


def test_local_sgd_averages_what_ranks_learned_apart() -> None:
    assert run_ranks(average_locally, 2) == [[-3.0], [-3.0]]  # the mean of -2 and -4


def collective_alone() -> str:
    """In the same order, but not the same call: no deadlock, and a table on both ranks."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(Exception, match="The ranks called different collectives") as caught:
        if accelerator.is_main_process:
            accelerator.get_state_dict(nn.Linear(1, 1))
        else:
            accelerator.gather(torch.ones(1))
    return str(caught.value)


def test_mismatch_shows_the_line_of_each_rank_without_any_checks() -> None:
    for text in run_ranks(collective_alone, 2):
        assert "rank 0: get_state_dict()" in text
        assert "accelerator.get_state_dict(nn.Linear(1, 1))" in text
        assert "accelerator.gather(torch.ones(1))" in text
