"""The conversation: one topic after another, each option asked for by its own name and help."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accel_core import PluginError
from accel_core.api.launcher import KNOWN_PROVIDERS, SECTIONS, choices, expected, fields_of, from_text, to_data
from accel_launch.options import LaunchOptions
from accel_launch.output import DOUBTFUL
from accel_launch.questionnaire import screen
from accel_launch.questionnaire.answers import NOT_GIVEN, Answers, default_of, shown
from accel_launch.questionnaire.screen import Entry
from accel_launch.questionnaire.topics import FURTHER, FURTHER_SECTIONS, GATED, TOPICS, Question
from accel_launch.settings.catalog import ALL, GROUPS, ROLES, SEVERAL
from accel_launch.starting.checks import check_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_core.api.launcher import Offer
    from accel_launch.settings.catalog import Option

_YES, _NO = "yes", "no"
_OTHER = "another one"
_DONE = "no more"


class Interview:
    """Asks, and puts what it is told into the answers.

    Args:
        answers: what is known already, which is what Enter takes.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def run(self) -> None:
        """Goes through all topics. `KeyboardInterrupt` or `EOFError` from the terminal ends it."""
        for topic, questions in TOPICS.items():
            screen.title(topic)
            if topic not in GATED or self._wants(topic.lower(), [question.option for question in questions]):
                for question in questions:
                    self._ask(question)
        self._further()

    def _ask(self, question: Question) -> None:
        option = self.answers.find(question.option)
        if option is None:
            return
        if not question.matters(self.answers):
            if question.otherwise and self.answers.has(option):
                screen.remark(
                    f"{option.key}: {shown(self.answers.value_of(option))} is left out: {question.otherwise}."
                )
                self.answers.drop(option)
            return
        if question.option in SEVERAL:
            self._choose_several(option)
        elif question.option in ROLES:
            self._choose(option)
        elif question.option == "dynamo_backend":
            self._choose_backend(option)
        else:
            self._ask_option(option)

    def _wants(self, name: str, options: list[str]) -> bool:
        listed = ", ".join(options)
        return screen.pick(f"{name} options", f"change any? {listed}", [Entry(_NO), Entry(_YES)], _NO) == _YES

    def _ask_option(self, option: Option) -> None:
        kind, current = option.field.type, self.answers.value_of(option)
        default = default_of(option)
        about = option.help
        if current != default:
            about += f" (default: {shown(default)})"
        values = {shown(to_data(each)): to_data(each) for each in choices(kind)}
        if values:
            values = {**({NOT_GIVEN: None} if default is None else {}), **values}
            picked = screen.pick(option.key, about, [Entry(name) for name in values], shown(current))
            self.answers.put(option, values[picked])
            return
        typed = screen.type_in(option.key, about, self._shown_now(option), lambda text: self._problem(option, text))
        if typed:
            self.answers.put(option, to_data(from_text(kind, typed)))

    def _shown_now(self, option: Option) -> str:
        current = shown(self.answers.value_of(option))
        if option.key == "num_processes" and current == NOT_GIVEN:
            return f"{NOT_GIVEN}: {max(self.answers.accelerators.count, 1)} on this machine"
        return current

    def _problem(self, option: Option, text: str) -> str:
        """The problem with a text as the value of an option; empty if there is none."""
        try:
            value = from_text(option.field.type, text)
        except ValueError:
            return f"expected {expected(option.field.type)}"
        if option.section or option.field.name not in LaunchOptions.__dataclass_fields__:
            return ""
        return self._problem_of_run({option.field.name: value})

    def _problem_of_run(self, changed: dict[str, Any]) -> str:
        names = [name for name in LaunchOptions.__dataclass_fields__ if self.answers.is_given(name)]
        options = {name: option for name in names if (option := self.answers.find(name)) is not None}
        try:
            check_values(LaunchOptions(**{**self.answers.converted(options), **changed}))
        except ValueError as error:
            # The value is on the screen; what remains has to fit into one line.
            return next((str(error).partition(". ")[2] for name in changed if str(error).startswith(f"{name}=")), "")
        return ""

    def _choose(self, option: Option) -> None:
        """One of the installed components, then its options."""
        role = option.field.name
        default, current = shown(default_of(option)), shown(self.answers.value_of(option))
        entries = [*([Entry(NOT_GIVEN)] if default == NOT_GIVEN else []), *self._offered(role)]
        if current not in {entry.name for entry in entries}:  # a name that says its distribution, too
            entries.append(Entry(current))
        hint = self._not_installed(role)
        if not [entry for entry in entries if not entry.problem]:
            screen.remark(f"{role}: {hint or 'none is installed'}")
            return
        picked = screen.pick(role, option.help, entries, current, hint)
        self.answers.put(option, None if picked == NOT_GIVEN else picked)
        if role == "loader":
            self.answers.catalog = self.answers.catalog.with_loader(picked)
        if picked != NOT_GIVEN:
            self._ask_section(picked, role)

    def _choose_several(self, option: Option) -> None:
        """Any number of the installed components, then the options of each."""
        role = option.field.name
        current = self.answers.value_of(option) or []
        # What is chosen may be meant for other machines than this one.
        offered = [_several_entry(entry, entry.name in current) for entry in self._offered(role)]
        hint = self._not_installed(role)
        if not offered:
            screen.remark(f"{role}: {hint or 'none is installed'}")
            return
        entries = [*offered, Entry(ALL, "all of these that can be used where the script runs")]
        entries += [Entry(name) for name in current if name not in {entry.name for entry in entries}]
        picked = screen.pick_several(role, option.help, entries, current, hint)
        self.answers.put(option, picked or None)
        for name in picked:
            if name != ALL:
                self._ask_section(name, role)

    def _offered(self, role: str) -> list[Entry]:
        """The installed choices for a role, as entries of a list."""
        offered = self.answers.catalog.choices(role)
        longest = max((len(choice.provider) for choice in offered), default=0)
        return [
            Entry(choice.name, f"{choice.provider:<{longest}}  {_without_name(choice.summary)}", choice.problem)
            for choice in offered
        ]

    def _not_installed(self, role: str) -> str:
        """The names for a role that are not installed, and how to install them; empty if there are none."""
        providers: dict[str, list[str]] = {}
        installed = self.answers.catalog.names(role)
        for name, provider in KNOWN_PROVIDERS.get(ROLES[role], {}).items():
            if provider is not None and name not in installed:
                providers.setdefault(provider, []).append(name)
        parts = [f"{', '.join(names)} (pip install {provider})" for provider, names in providers.items()]
        return f"not installed: {'; '.join(parts)}" if parts else ""

    def _choose_backend(self, option: Option) -> None:
        """A backend of the compiler. Listing all of them takes torch seconds, so that is done only if it is asked for."""
        default, current = shown(default_of(option)), shown(self.answers.value_of(option))
        usual = shown(fields_of(SECTIONS["dynamo"].handler)["backend"].default)
        names = dict.fromkeys([default, usual, current])
        picked = screen.pick(option.key, option.help, [Entry(name) for name in (*names, _OTHER)], current)
        if picked == _OTHER:
            entries = [Entry(choice.name) for choice in self.answers.catalog.choices(option.field.name)]
            picked = screen.pick(option.key, option.help, entries, usual)
        self.answers.put(option, picked)
        if picked != default:
            self._ask_section("dynamo")

    def _ask_section(self, name: str, role: str = "") -> None:
        """The options of a component, until it can be built with them or the user leaves it at that.

        Args:
            name: of the section.
            role: what the component was chosen for; empty if it cannot be built, because it has
                options only.
        """
        options = self._expressible(name)
        plain = name.rpartition(":")[2]
        wanted = bool(options) and self._wants(plain, list(options))
        while True:
            for option in options.values() if wanted else []:
                self._ask_option(option)
            problem = self._problem_of_component(self.answers.catalog.component(name, role), options) if role else ""
            if not problem:
                return
            screen.remark(problem, DOUBTFUL)
            entries = [Entry("answer again"), Entry("keep it", "the run will end with this message")]
            if not options or screen.pick(f"{plain} options", "what now?", entries, "answer again") == "keep it":
                return
            wanted = True

    def _expressible(self, section: str) -> dict[str, Option]:
        """The options of a section that can be typed; none where it is not clear whose they are."""
        try:
            options = self.answers.catalog.section(section)
        except PluginError as error:
            screen.remark(str(error), DOUBTFUL)
            return {}
        return {name: option for name, option in options.items() if not option.field.python_only}

    def _problem_of_component(self, offer: Offer, options: Mapping[str, Option]) -> str:
        """The error of a component that is built with the answers; empty if there is none."""
        try:
            offer.load()(**self.answers.converted(options))
        except Exception as error:  # noqa: BLE001  # whatever a constructor of a third party finds; it is shown
            return str(error) or type(error).__name__
        return ""

    def _further(self) -> None:
        asked = {question.option for questions in TOPICS.values() for question in questions}
        groups = {}
        for group in FURTHER:
            names = [name for name in GROUPS[group] if name not in asked]
            found = [option for name in names if (option := self.answers.find(name)) is not None]
            if found:
                groups[group] = found
        groups |= {section: list(self._expressible(section).values()) for section in FURTHER_SECTIONS}
        entries = [
            Entry(_DONE),
            *(Entry(group, ", ".join(each.field.name for each in found)) for group, found in groups.items()),
        ]
        while (picked := screen.pick("more", "look at any of these?", entries, _DONE, is_quiet=True)) != _DONE:
            screen.title(picked.capitalize())
            for option in groups[picked]:
                self._ask_option(option)


def _several_entry(entry: Entry, is_chosen: bool) -> Entry:
    """An entry that says what speaks against it, if anything does, instead of what it is; what is chosen can be picked all the same."""
    if not entry.problem:
        return entry
    return Entry(entry.name, entry.problem) if is_chosen else Entry(entry.name, "", entry.problem)


def _without_name(summary: str) -> str:
    """The first line of a docstring without the way to choose the component that some begin with: it stands beside it."""
    return re.sub(r"^`[^`]*`: ", "", summary)
