"""peft, trl, diffusers and `device_map="auto"` over the module `accelerate`: figures and files of the peer."""

from __future__ import annotations

import pytest
from scenario_figures import differences
from scenario_launches import Launch, expected, launched

FIGURES = expected()
ALWAYS = [
    Launch(1, "libraries", ("lora", "sft", "dpo")),
    Launch(2, "diffusion", ("unconditional",)),
    Launch(1, "device_map", ("device_map",)),
]
OTHERS = [
    Launch(2, "libraries", ("lora", "sft", "dpo")),
    Launch(1, "diffusion", ("unconditional",)),
    *(Launch(world, "diffusion", ("text_to_image",)) for world in (1, 2)),
]


def compare(launch, folder):
    found = launched(launch, folder)
    assert not [
        f"{scenario}: {line}"
        for scenario, figures in found.items()
        for line in differences(scenario, figures, FIGURES[f"{launch.world}/{scenario}"])
    ]


def named(launch):
    return f"{launch.world}-{launch.scenarios[0]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", ALWAYS, ids=named)
def test_libraries_give_the_figures_of_the_peer(launch, tmp_path):
    compare(launch, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launch", OTHERS, ids=named)
def test_libraries_give_the_figures_of_the_peer_in_every_world_and_shape(launch, tmp_path):
    compare(launch, tmp_path)
