"""The options of FSDP under their older names: what is translated, and what is an error that says what to write."""

import inspect
from enum import Enum
from functools import partial

import pytest
from torch import nn

from accel_core import Accelerator
from accel_core.api.strategy import chosen_strategy
from accel_fsdp import FSDP, FullyShardedDataParallelPlugin
from accel_testing import run_ranks


def options_of(strategy):
    """What differs from an FSDP with defaults."""
    given, default = vars(strategy._options), vars(FSDP()._options)
    return {name: value for name, value in given.items() if value != default[name]}


def translated(**options):
    return options_of(FullyShardedDataParallelPlugin(**options))


def test_nothing_given_is_an_fsdp_with_defaults():
    strategy = FullyShardedDataParallelPlugin()
    assert type(strategy) is FSDP
    assert options_of(strategy) == translated(fsdp_version=2) == {}


def test_it_has_the_options_of_its_older_name_in_their_order():
    names = list(inspect.signature(FullyShardedDataParallelPlugin.__new__).parameters)[1:]
    assert len(names) == 21
    assert names[:3] == ["fsdp_version", "sharding_strategy", "reshard_after_forward"]
    assert options_of(FullyShardedDataParallelPlugin(2, None, False)) == {"reshard_after_forward": False}


def test_options_that_stand_for_one_of_fsdp_are_translated():
    head = nn.Linear(2, 2)
    assert translated(
        reshard_after_forward=2, cpu_offload=True, activation_checkpointing=True, ignored_modules=iter([head])
    ) == {"reshard_after_forward": 2, "cpu_offload": True, "activation_checkpointing": True, "ignored_modules": [head]}
    assert translated(cpu_ram_efficient_loading=False, activation_checkpointing_offload=False, min_num_params=0) == {}


def test_a_regular_expression_ignores_the_modules_whose_whole_names_it_matches():
    ignores = translated(ignored_modules=r"head|blocks\.\d")["ignored_modules"]
    names = ["head", "blocks.1", "head.bias", "blocks.10"]
    assert [name for name in names if ignores(nn.Identity(), name)] == ["head", "blocks.1"]


def is_block(module, name):
    return name == "block"


def test_the_ways_to_choose_units_are_one_now():
    assert translated(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["A", "B"]) == {
        "wrap": ["A", "B"]
    }
    assert translated(transformer_cls_names_to_wrap="A,B") == {"wrap": "A,B"}
    assert translated(auto_wrap_policy="transformer_based_wrap") == {}
    assert (
        translated(auto_wrap_policy="size_based_wrap", min_num_params=7) == translated(min_num_params=7) == {"wrap": 7}
    )
    assert translated(auto_wrap_policy="no_wrap") == {"wrap": "none"}
    assert translated(auto_wrap_policy=is_block) == {"wrap": is_block}


def test_policies_of_torch_are_read():
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer, nn.Linear})
    assert translated(auto_wrap_policy=by_class) == {"wrap": ["Linear", "TransformerEncoderLayer"]}
    by_size = partial(size_based_auto_wrap_policy, min_num_params=9)
    assert translated(auto_wrap_policy=by_size) == {"wrap": 9}


def of_the_first_generation(module, recurse, nonwrapped_numel):
    return True


def with_anything_behind(module, recurse, *args, **kwargs):
    return True


@pytest.mark.parametrize("policy", [of_the_first_generation, with_anything_behind])
def test_a_policy_function_of_the_first_generation_is_refused(policy):
    with pytest.raises(ValueError, match=r"as policies of the first generation.*\(module, name\) -> bool"):
        FullyShardedDataParallelPlugin(auto_wrap_policy=policy)


def test_policies_that_contradict_or_say_nothing_are_refused():
    for policy in ("transformer_wrap", ["Block"]):
        with pytest.raises(ValueError, match="is none of 'transformer_based_wrap', 'size_based_wrap', 'no_wrap'"):
            FullyShardedDataParallelPlugin(auto_wrap_policy=policy, min_num_params=7)
    with pytest.raises(ValueError, match="without min_num_params"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap")
    for options in (
        {"auto_wrap_policy": "no_wrap", "min_num_params": 7},
        {"auto_wrap_policy": is_block, "min_num_params": 7},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 7, "transformer_cls_names_to_wrap": ["A"]},
        {"min_num_params": 7, "transformer_cls_names_to_wrap": ["A"]},
    ):
        with pytest.raises(ValueError, match="says in more than one way which modules are units"):
            FullyShardedDataParallelPlugin(**options)


class ShardingStrategy(Enum):
    """As in the first generation."""

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2


@pytest.mark.parametrize(
    ("value", "newer"),
    [
        ("FULL_SHARD", "for FULL_SHARD write reshard_after_forward=True"),
        (2, "for SHARD_GRAD_OP write reshard_after_forward=False"),
        (ShardingStrategy.SHARD_GRAD_OP, "for SHARD_GRAD_OP write reshard_after_forward=False"),
        ("hybrid_shard", r"for HYBRID_SHARD write strategy=FSDP\(replicate=n\)"),
        ("NO_SHARD", "for NO_SHARD write strategy='ddp'"),
        ("SOME_SHARD", "for FULL_SHARD write .*; for SHARD_GRAD_OP write .*; for HYBRID_SHARD write "),
    ],
)
def test_a_sharding_strategy_is_refused_with_what_it_is_called_now(value, newer):
    with pytest.raises(ValueError, match=newer):
        FullyShardedDataParallelPlugin(sharding_strategy=value)


def test_a_sharding_strategy_in_the_place_of_another_option_is_refused_alike():
    with pytest.raises(ValueError, match=r"reshard_after_forward='FULL_SHARD'\).*for FULL_SHARD write"):
        FullyShardedDataParallelPlugin(reshard_after_forward="FULL_SHARD")


@pytest.mark.parametrize("version", [1, 3, "1"])
def test_another_version_is_refused(version):
    with pytest.raises(ValueError, match="only 2 is offered"):
        FullyShardedDataParallelPlugin(fsdp_version=version)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("backward_prefetch", "BACKWARD_PRE", "gathered while gradients are computed"),
        ("forward_prefetch", False, "gathered while the forward computes"),
        ("limit_all_gathers", True, "limited by itself"),
        ("use_orig_params", True, "always the model's own"),
        ("sync_module_states", True, "always begin with the weights and buffers of rank 0"),
        ("param_init_fn", print, r"accelerator\.build_model\(factory\)"),
        ("mixed_precision_policy", "bf16", r"Accelerator\(mixed_precision='bf16'\)"),
    ],
)
def test_an_option_of_the_first_generation_is_refused_with_the_reason(option, value, reason):
    with pytest.raises(ValueError, match=rf"\({option}=.*an option of the first generation of FSDP.*{reason}"):
        FullyShardedDataParallelPlugin(**{option: value})


def test_what_is_done_elsewhere_or_not_offered_is_refused():
    with pytest.raises(ValueError, match=r"Write model = accelerator.build_model\(factory, checkpoint\)"):
        FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    with pytest.raises(ValueError, match="activation_checkpointing=True alone is offered"):
        FullyShardedDataParallelPlugin(activation_checkpointing_offload=True)
    with pytest.raises(TypeError, match=r"cpu_offload='true'\) is a str: give True"):
        FullyShardedDataParallelPlugin(cpu_offload="true")


def test_options_of_state_dicts_have_no_effect_and_say_so():
    with pytest.warns(UserWarning, match=r"\(state_dict_type, state_dict_config\) has no effect") as caught:
        assert translated(state_dict_type="FULL_STATE_DICT", state_dict_config=object()) == {}
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="known are 'FULL_STATE_DICT' and 'SHARDED_STATE_DICT'"):
        FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT")


def test_every_fsdp_is_an_instance_of_the_older_name_and_nothing_else_is():
    assert isinstance(FSDP(), FullyShardedDataParallelPlugin)
    assert not isinstance(object(), FullyShardedDataParallelPlugin)


def test_an_accelerator_takes_it_as_fsdp_plugin_and_shows_it():
    assert run_ranks(shown, 1) == [(True, True, "FSDP")]


def shown():
    plugin = FullyShardedDataParallelPlugin(min_num_params=10)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    held = accelerator.state.fsdp_plugin
    return held is plugin, isinstance(held, FullyShardedDataParallelPlugin), str(accelerator.distributed_type.value)


def test_several_of_them_go_by_keys():
    plugins = {"one": FullyShardedDataParallelPlugin(), "two": FSDP()}
    assert chosen_strategy(None, {"fsdp_plugins": plugins})[1] == plugins
