"""The options of Megatron under their older names."""

import pytest

from accel_core import Accelerator
from accel_megatron import Megatron, MegatronLMPlugin
from accel_megatron.plugin import REFUSED

TRANSLATED = {
    "tp_degree": 2,
    "pp_degree": 2,
    "sequence_parallelism": True,
    "use_distributed_optimizer": True,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
}


def test_every_older_option_has_a_place():
    assert len({*REFUSED, *TRANSLATED, "is_train_batch_min"}) == 63


def test_it_gives_the_strategy():
    strategy = MegatronLMPlugin()
    assert type(strategy) is Megatron
    assert isinstance(strategy, MegatronLMPlugin)
    assert not isinstance(object(), MegatronLMPlugin)
    assert strategy.details() == Megatron().details()


def test_options_are_translated():
    found = MegatronLMPlugin(**TRANSLATED, is_train_batch_min=False)
    wanted = Megatron(2, 2, sequence_parallel=True, distributed_optimizer=True, context_parallel=2, expert_parallel=2)
    assert found.details() == wanted.details()
    assert MegatronLMPlugin(3, 2).details() == Megatron(tensor_parallel=3, pipeline_parallel=2).details()


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_is_refused_with_what_to_write(name):
    with pytest.raises(
        ValueError, match=rf"MegatronLMPlugin\({name}='other'\) was given, which is no option of a str.*\. \w"
    ):
        MegatronLMPlugin(**{name: "other"})


def test_values_that_say_nothing_are_accepted():
    nothing = {name: value for name, (value, _) in REFUSED.items()}
    assert MegatronLMPlugin(**nothing).details() == Megatron().details()
    assert MegatronLMPlugin(**dict.fromkeys(REFUSED)).details() == Megatron().details()


def test_a_name_that_is_none_of_the_older_options_is_refused():
    with pytest.raises(TypeError, match="MegatronLMPlugin has no options tp_size. Write strategy=Megatron"):
        MegatronLMPlugin(tp_size=2)


def test_what_the_strategy_refuses_is_refused():
    with pytest.raises(ValueError, match=r"Megatron\(sequence_parallel=True\) cuts activations"):
        MegatronLMPlugin(sequence_parallelism=True)


def test_the_accelerator_takes_it_by_the_older_argument():
    with pytest.raises(ValueError, match="megatron_lm_plugin=.* and strategy='ddp' were both given"):
        Accelerator(strategy="ddp", megatron_lm_plugin=MegatronLMPlugin(), cpu=True)
    with pytest.raises(ValueError, match="fsdp_plugin=.*Megatron goes by other names: megatron, megatron_lm"):
        Accelerator(fsdp_plugin=MegatronLMPlugin(), cpu=True)
