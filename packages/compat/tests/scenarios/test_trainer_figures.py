"""Libraries over the module `accelerate` compute what they compute over the distribution whose names it has, to 1e-6.

peer_figures.json has its figures. Of the grid a few are compared always, all of them in `full`.
"""

from __future__ import annotations

import pytest
from scenario_figures import differences
from scenario_launches import GRID, RESUMED, Launch, expected, interrupted, launched

FIGURES = expected()
ALWAYS = [
    Launch(1, "trainer", ("ddp/window/fp32", "ddp/plain/bf16", "unbroken/ddp")),
    Launch(2, "trainer", ("ddp/window/fp32", "fsdp/window/fp32", "fsdp/plain/bf16")),
]
ENGINES = [
    Launch(world, "trainer", tuple(f"{engine}/{each}" for each in (*GRID, *more)))
    for world in (1, 2)
    for engine, more in (("ddp", ()), ("fsdp", ()), ("zero2", ("unclipped/bf16",)))
]


def peer(world, scenario):
    """Figures of the peer. Its own FSDP is DDP on hosts without accelerators, so what is sharded here is compared with that."""
    return FIGURES[f"{world}/{scenario.replace('fsdp', 'ddp').replace('zero3', 'zero2')}"]


def compare(launch, folder):
    found = launched(launch, folder)
    assert not [
        f"{scenario}: {line}"
        for scenario, figures in found.items()
        for line in differences(scenario, figures, peer(launch.world, scenario))
    ]


def named(launch):
    return f"{launch.world}-{launch.scenarios[0].partition('/')[0]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", ALWAYS, ids=("alone", "in two processes"))
def test_trainer_gives_the_figures_of_the_peer(launch, tmp_path):
    compare(launch, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", ENGINES, ids=named)
def test_every_engine_and_precision_gives_the_figures_of_the_peer(launch, tmp_path):
    compare(launch, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["fsdp", "zero2", "zero3"])
def test_a_killed_run_of_sharded_weights_goes_on_as_if_nothing_had_happened(engine, tmp_path):
    found = interrupted(2, 2, engine, tmp_path)
    assert not list(differences(f"resumed/{engine}", found, peer(2, f"{engine}/plain/fp32")))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("before", "after", "engine"), RESUMED)
def test_a_killed_run_goes_on_as_it_does_in_the_peer(before, after, engine, tmp_path):
    found = interrupted(before, after, engine, tmp_path)
    assert not list(differences("resumed", found, FIGURES[f"{before}-{after}/resumed/{engine}"]))
