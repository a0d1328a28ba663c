"""Activation: one owner or many listeners, checked, bound, and nobody overridden in silence."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
import weakref
from dataclasses import dataclass
from types import ModuleType

import pytest
from fake_distributions.installed import install

from accel_core.base.errors import PluginError
from accel_core.contract.hook_specs import HookSpecs, hookimpl
from accel_core.plugins import Relay, activate, build, passed
from accel_core.plugins.manager import hook_specs

OWNERS = [name for name, spec in hook_specs().items() if spec.kind == "owner"]


class Defaults:
    """Stands in for the core's: implements every owner hook but the one that a strategy must have."""

    @hookimpl
    def layout(self, world):
        return "default layout"

    @hookimpl
    def scale_loss(self, loss):
        return loss

    @hookimpl
    def backward(self, loss, weight, closes, options):
        return ("default backward", loss, weight, closes, options)


for _name in OWNERS:
    if _name not in (*vars(Defaults), "prepare_model"):
        setattr(Defaults, _name, hookimpl(lambda self: None))


class Plain:
    """The least strategy."""

    @hookimpl
    def prepare_model(self, model, optimizers, request):
        return model


def bound(*plugins, strategy=None):
    strategies = [passed(strategy or Plain(), "accel.strategies")]
    return activate([*strategies, *map(passed, plugins)], Defaults())


def refused(*plugins, **kwargs):
    with pytest.raises(PluginError) as error:
        bound(*plugins, **kwargs)
    return str(error.value)


# The relay


def test_the_relay_has_one_slot_per_hook_and_no_method_of_the_specs():
    assert set(Relay.__slots__) == {*hook_specs(), "__weakref__"}
    assert not issubclass(Relay, HookSpecs)
    with pytest.raises(AttributeError):
        Relay().backward


def test_an_owner_that_takes_every_argument_is_called_without_anything_between():
    class Mine:
        @hookimpl
        def backward(self, loss, weight, closes, options):
            return "mine"

    mine = Mine()
    assert bound(mine).relay.backward == mine.backward


def test_arguments_that_an_owner_does_not_take_are_dropped_and_others_arrive_in_any_order():
    class Mine:
        @hookimpl
        def backward(self, options, loss):
            return (loss, options)

        @hookimpl
        def clip_gradients(self, parameters, *, norm_type):
            return (parameters, norm_type)

        @hookimpl
        def unscale_gradients(self):
            return "nothing needed"

    relay = bound(Mine()).relay
    assert relay.backward(1, 2, 3, 4) == (1, 4)
    assert relay.clip_gradients("parameters", 1.0, 2.0) == ("parameters", 2.0)
    assert relay.unscale_gradients("optimizer") == "nothing needed"
    with pytest.raises(TypeError):
        relay.backward(1, 2, 3)


def test_none_from_an_owner_is_its_answer_and_not_a_call_for_the_default():
    class Mine:
        @hookimpl
        def scale_loss(self, loss):
            return None

    assert bound(Mine()).relay.scale_loss("loss") is None


def test_a_component_wins_over_the_default_and_the_default_over_nobody():
    class Mine:
        @hookimpl
        def layout(self, world):
            return "mine"

    mine = passed(Mine())
    activation = activate([passed(Plain(), "accel.strategies"), mine], Defaults())
    assert activation.relay.layout("world") == "mine"
    assert activation.relay.backward(1, 2, 3, 4) == ("default backward", 1, 2, 3, 4)
    assert activation.owners["layout"] is mine
    assert activation.owners["backward"] is None


def test_a_precision_may_be_a_value_without_hooks():
    activate([passed(Plain(), "accel.strategies"), passed(object(), "accel.precisions")], Defaults())


def test_a_module_with_marked_functions_is_a_plugin():
    module = ModuleType("my_hooks")
    module.layout = hookimpl(lambda world: ("from a module", world))
    assert bound(module).relay.layout("here") == ("from a module", "here")


def test_static_and_class_methods_can_be_hooks():
    class Mine:
        @staticmethod
        @hookimpl
        def layout(world):
            return world

        @classmethod
        @hookimpl
        def scale_loss(cls, loss):
            return (cls, loss)

    relay = bound(Mine()).relay
    assert relay.layout("world") == "world"
    assert relay.scale_loss("loss") == (Mine, "loss")


def test_attributes_and_properties_with_the_name_of_a_hook_are_neither_hooks_nor_run():
    class Mine:
        layout = "an attribute"

        @hookimpl
        def finish(self):
            pass

        @property
        def scale_loss(self):
            raise AssertionError("a property was run")

    assert bound(Mine()).relay.layout("world") == "default layout"


def test_a_component_dies_with_the_relay_that_holds_it():
    strategy, observer = Plain(), Recorder([])
    dead = [weakref.ref(strategy), weakref.ref(observer)]
    gc.disable()
    try:
        activation = bound(observer, strategy=strategy)
        dead.append(weakref.ref(activation.relay))
        del strategy, observer, activation
        assert [reference() for reference in dead] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_relay_says_why_it_cannot_be_copied(copied):
    with pytest.raises(
        TypeError, match=r"(?s)bound methods of components.*Build an Accelerator with the same arguments"
    ):
        copied(bound().relay)


def test_two_activations_live_side_by_side():
    first, second = bound(strategy=Plain()), bound(strategy=Plain())
    assert first.relay.prepare_model != second.relay.prepare_model


# Listeners


class Recorder:
    def __init__(self, calls, name="recorder"):
        self.calls = calls
        self.name = name

    @hookimpl
    def start(self, layout):
        self.calls.append((self.name, layout))

    @hookimpl
    def finish(self):
        self.calls.append((self.name, "finish"))


class Faulty:
    @hookimpl
    def start(self):
        raise LookupError("no such run")

    @hookimpl
    def finish(self):
        raise AssertionError("called although it was switched off")


def test_listeners_are_called_in_the_order_of_registration_with_the_arguments_that_they_take():
    calls = []
    relay = bound(Recorder(calls, "first"), Recorder(calls, "second")).relay
    assert relay.start("world", "layout", True) is None
    relay.finish()
    assert calls == [("first", "layout"), ("second", "layout"), ("first", "finish"), ("second", "finish")]


def test_a_hook_without_listeners_can_be_called():
    assert bound().relay.start("world", "layout", True) is None


def test_a_failing_listener_is_warned_of_once_and_switched_off_and_the_next_is_called():
    calls = []
    relay = bound(Faulty(), Recorder(calls)).relay
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        relay.start("world", "layout", True)
        relay.start("world", "layout", True)
        relay.finish()
    assert [one.category for one in warned] == [RuntimeWarning]
    message = str(warned[0].message)
    assert f"Hook 'start' of the plugin 'Faulty' ({__name__}.Faulty, passed as an object) raised" in message
    assert "LookupError: no such run" in message
    assert "The run goes on without its listeners. Repair it, or leave it out." in message
    assert [hook for _, hook in calls] == ["layout", "layout", "finish"]


def test_the_warning_names_the_distribution_of_the_plugin(monkeypatch):
    install(monkeypatch, "fsdp")
    strategy = build("accel.strategies", "fsdp")
    type(strategy.component).start = hookimpl(Faulty.start)
    relay = activate([strategy], Defaults()).relay
    with pytest.warns(RuntimeWarning, match=r"the strategy 'fsdp' \(fake_fsdp.FSDP of accel-fsdp 0.3.0\) raised"):
        relay.start("world", "layout", True)


def test_a_listener_switched_off_in_one_relay_is_heard_in_another():
    calls = []
    observer = Recorder(calls)
    first, second = bound(observer).relay, bound(observer).relay
    observer.calls = None
    with pytest.warns(RuntimeWarning):
        first.finish()
    observer.calls = calls
    first.finish()
    second.finish()
    assert calls == [("recorder", "finish")]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_the_users_interrupt_passes_through_a_listener(exception):
    class Stops:
        @hookimpl
        def finish(self):
            raise exception

    with pytest.raises(exception):
        bound(Stops()).relay.finish()


def test_observers_with_equal_settings_are_two():
    @dataclass
    class Equal:
        every: int = 1

        @hookimpl
        def finish(self):
            calls.append(self)

    calls = []
    bound(Equal(), Equal()).relay.finish()
    assert len(calls) == 2


# What is refused


def test_a_method_named_like_a_hook_but_without_the_marker_is_refused():
    class Mine:
        @hookimpl
        def start(self):
            pass

        def backward(self, loss):
            pass

    message = refused(Mine())
    assert message.startswith("The plugin 'Mine' (")
    assert (
        "has a method 'backward', which is the name of a hook, without the marker: it would never be called" in message
    )
    assert message.endswith("Mark a hook with @accel_core.hookimpl, or give the method another name.")


def test_a_strategy_whose_prepare_model_lacks_the_marker_is_refused():
    from accel_core.contract.strategy import Strategy

    class Mine(Strategy):
        def prepare_model(self, model, optimizers, request):
            return model

    message = refused(strategy=Mine())
    assert message.startswith("The strategy 'Mine' (")
    assert "'prepare_model'" in message
    assert "Mark a hook with @accel_core.hookimpl" in message


def test_an_override_that_loses_the_marker_of_its_base_is_refused():
    class Mine(Plain):
        def prepare_model(self, model, optimizers, request):
            return model

    assert "without the marker" in refused(strategy=Mine())


def test_a_misspelt_hook_is_answered_with_the_nearest_one(monkeypatch):
    install(monkeypatch, "fsdp")
    strategy = build("accel.strategies", "fsdp")
    type(strategy.component).backwards = hookimpl(lambda self, loss: None)
    with pytest.raises(PluginError) as error:
        activate([strategy], Defaults())
    assert str(error.value) == (
        "The strategy 'fsdp' (fake_fsdp.FSDP of accel-fsdp 0.3.0) marks 'backwards' as a hook, "
        "but there is no such hook in the installed accel-core.\n"
        "Type 'backward' if that was meant."
    )


def test_a_marked_method_that_resembles_no_hook_is_answered_with_the_list():
    class Mine:
        @hookimpl
        def zzz(self):
            pass

    message = refused(Mine())
    assert "marks 'zzz' as a hook" in message
    assert "Hooks are: start, finish, layout, build_model," in message


def test_an_argument_that_the_spec_does_not_have_is_answered_with_its_arguments():
    class Mine:
        @hookimpl
        def backward(self, loss, factor):
            pass

    message = refused(Mine())
    assert message.startswith("Hook 'backward' of the plugin 'Mine' (")
    assert "takes factor, which the hook does not have" in message
    assert "Its arguments are: loss, weight, closes, options. Take those that are needed, by these names." in message


def test_a_misspelt_argument_with_a_default_is_refused_for_it_would_never_be_given():
    class Mine:
        @hookimpl
        def backward(self, loss, wieght: float = 1.0):
            pass

    assert "takes wieght, which the hook does not have" in refused(Mine())


def test_arguments_are_taken_by_name_and_not_by_stars():
    class Stars:
        @hookimpl
        def finish(self, *arguments, **others):
            pass

    class NamedLikeAnArgument:
        @hookimpl
        def layout(self, *world):
            pass

    message = refused(Stars())
    assert "takes *arguments, **others, which the hook does not have" in message
    assert "Its arguments are: none." in message
    assert "takes *world, which the hook does not have" in refused(NamedLikeAnArgument())


@pytest.mark.parametrize("options", [{"tryfirst": True}, {"wrapper": True}, {"specname": "finish"}])
def test_options_of_the_marker_are_refused_for_hooks_are_not_dispatched(options):
    class Mine:
        @hookimpl(**options)
        def finish(self):
            yield

    message = refused(Mine())
    assert message.startswith("Hook 'finish' of the plugin 'Mine'")
    assert f"is marked with {next(iter(options))}=..., but hooks are bound as they are" in message
    assert message.endswith("Write @accel_core.hookimpl without options.")


def test_two_owners_of_one_hook_are_both_named_with_their_distributions(monkeypatch):
    install(monkeypatch, "fsdp")

    class Mine:
        @hookimpl
        def prepare_model(self, model):
            return model

    with pytest.raises(PluginError) as error:
        activate([build("accel.strategies", "fsdp"), passed(Mine())], Defaults())
    message = str(error.value)
    assert message.startswith("Hook 'prepare_model' has one owner, but 2 active components implement it: ")
    assert "the strategy 'fsdp' (fake_fsdp.FSDP of accel-fsdp 0.3.0) and the plugin 'Mine' (" in message
    assert message.endswith("Leave out the strategy 'fsdp' or the plugin 'Mine'.")


def test_without_a_strategy_nothing_is_activated():
    with pytest.raises(PluginError) as error:
        activate([passed(Recorder([]))], Defaults())
    message = str(error.value)
    assert message.startswith("No strategy: hook 'prepare_model' has no owner among the active components")
    assert "Active: the plugin 'Recorder' (" in message
    assert message.endswith("Pass a strategy that implements it, for example Accelerator(strategy='single').")


def test_a_plugin_without_hooks_is_refused():
    message = refused(object())
    assert message.startswith("The plugin 'object' (builtins.object, passed as an object) was passed as a plugin")
    assert "it implements no hook.\nHooks are: start, finish," in message
    assert message.endswith("Mark a hook with @accel_core.hookimpl, or leave the object out.")


def test_one_object_in_two_roles_is_refused():
    both = Plain()
    message = refused(both, strategy=both)
    assert message.startswith("One object was passed twice: as the strategy 'Plain'")
    assert "and as the plugin 'Plain'" in message
    assert message.endswith("Pass it once: all its hooks are found, whatever its role.")


def test_the_core_as_it_stands_activates_with_its_own_defaults():
    defaults = pytest.importorskip("accel_core.facade.default_hooks")
    activation = activate([passed(Plain(), "accel.strategies")], defaults.CoreDefaults())
    assert activation.owners["backward"] is None


def test_importing_the_plugin_machinery_has_no_effects_and_needs_no_plugin():
    code = "import sys, accel_core.plugins; print([name for name in sys.modules if name.startswith('packaging')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
