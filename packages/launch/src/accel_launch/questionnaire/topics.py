"""The questions, their order, and the conditions for each. Their names and help are those of the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from accel_core.api.launcher import LOADER_OPTIONS, SECTIONS

if TYPE_CHECKING:
    from accel_launch.questionnaire.answers import Answers


def _always(_: Answers) -> bool:
    return True


class Question(NamedTuple):
    """One question.

    Args:
        option: whose value is asked for.
        matters: whether it is asked, given the answers so far.
        otherwise: why an older answer has to go where the question does not matter; empty if it may
            stay.
    """

    option: str
    matters: Callable[[Answers], bool] = _always
    otherwise: str = ""


def _several_machines(answers: Answers) -> bool:
    return bool(answers.value("num_machines") > 1)


def _numbered_machines(answers: Answers) -> bool:
    return _several_machines(answers) and answers.value("rdzv_backend") in {None, "static"}


def _several_devices(answers: Answers) -> bool:
    return answers.accelerators.count > 1 and not answers.value("cpu")


TOPICS: Mapping[str, tuple[Question, ...]] = MappingProxyType(
    {
        "Machines": (
            Question("num_machines"),
            Question("machine_rank", _numbered_machines, "machines are not told apart by it"),
            Question("main_process_ip", _several_machines, "there is one machine"),
            Question("main_process_port", _several_machines),
        ),
        "Processes": (
            Question("num_processes"),
            Question("cpu", lambda answers: answers.accelerators.count > 0 or answers.is_given("cpu")),
            Question("device_ids", _several_devices, "there is no choice of accelerators"),
        ),
        "Training": (
            Question("strategy"),
            Question("mixed_precision"),
            Question("gradient_accumulation_steps"),
            Question("dynamo_backend"),
        ),
        "Tracking": (Question("log_with"),),
        "Data": (Question("loader"), *(Question(name) for name in LOADER_OPTIONS)),
        "Checks": (Question("debug"), Question("detect_nonfinite")),
    }
)
"""Topic → its questions, in order."""

GATED = ("Data",)
"""Topics that most runs need not touch: they are behind a question of their own."""

FURTHER = ("processes", "machines", "failures", "output", "training")
"""Groups of options of which those that no topic asks about can be reached from a menu at the end."""

FURTHER_SECTIONS = tuple(name for name in SECTIONS if name != "dynamo")
"""Sections that can be reached from there; the options of the compiler are asked for where its backend is."""
