"""Every name that Accelerate 1.15 has is here, or says what to use instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from accel_compat.missing_names import ADVICE, MODULES

LINES = (Path(__file__).parent / "public_names.txt").read_text(encoding="ascii").splitlines()
MODULES_OF = {name: modules for name, *modules in map(str.split, LINES)}

# What its examples import, and its documentation. Those of pipelines and Megatron-LM are missing, and say what to use.
EXAMPLES = {
    "accelerate": """Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs
        ParallelismConfig PartialState ProfileKwargs __version__ debug_launcher dispatch_model infer_auto_device_map
        init_empty_weights load_checkpoint_and_dispatch notebook_launcher skip_first_batches""",
    "accelerate.local_sgd": "LocalSGD",
    "accelerate.logging": "get_logger",
    "accelerate.parallelism_config": "ParallelismConfig",
    "accelerate.state": "AcceleratorState GradientState PartialState",
    "accelerate.utils": """AORecipeKwargs BnbQuantizationConfig DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
        DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler
        FP8RecipeKwargs FullyShardedDataParallelPlugin GradientAccumulationPlugin InitProcessGroupKwargs LoggerType
        MSAMPRecipeKwargs MegatronLMPlugin ParallelismConfig PrepareForLaunch ProfileKwargs ProjectConfiguration TERecipeKwargs
        TorchContextParallelConfig TorchDynamoPlugin TorchTensorParallelPlugin find_executable_batch_size gather_object
        get_active_deepspeed_plugin is_hpu_available is_npu_available is_schedulefree_available is_wandb_available
        is_xpu_available load_and_quantize_model merge_fsdp_weights patch_environment release_memory set_seed
        synchronize_rng_states tqdm write_basic_config""",
    "accelerate.utils.dataclasses": "DeepSpeedSequenceParallelConfig",
    "accelerate.utils.memory": "find_executable_batch_size",
    "accelerate.utils.other": "is_compiled_module",
}
READ = """accumulate backward check_trigger clip_grad_norm_ device distributed_type end_training fp8_recipe_handler free_memory gather
    gather_for_metrics get_state_dict gradient_accumulation_steps init_trackers is_local_main_process is_main_process load_state
    local_main_process_first log main_process_first maybe_context_parallel mixed_precision num_processes parallelism_config prepare
    print profile reduce save save_state set_trigger skip_first_batches state sync_gradients torch_device_mesh unwrap_model
    use_distributed wait_for_everyone"""
"""Of an Accelerator, by its examples."""


def is_absent(module: str) -> bool:
    return any(module == gone or module.startswith(f"{gone}.") for gone in MODULES)


def has(module: str, name: str) -> bool:
    try:
        getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError):
        return False
    return True


def test_every_name_is_importable_or_says_what_to_use():
    unknown = []
    for name, modules in MODULES_OF.items():
        there = [module for module in modules if not is_absent(module)]
        advised = name in ADVICE or any(f"{module}.{name}" in ADVICE for module in there)
        if there and not advised and not any(has(module, name) for module in there):
            unknown.append(name)
    assert unknown == []


def test_a_name_with_advice_is_an_import_error_where_it_is_missing():
    silent = []
    for name, modules in MODULES_OF.items():
        for module in modules:
            if name not in ADVICE or is_absent(module):
                continue
            try:
                getattr(importlib.import_module(module), name)
            except ImportError as error:
                if ADVICE[name] not in str(error):
                    silent.append((module, name))
    assert silent == []
    with pytest.raises(ImportError, match=r"accelerate\.inference\.prepare_pippy has no .*: pipelines are torch's"):
        exec("from accelerate.inference import prepare_pippy")


def test_advice_names_nothing_that_does_not_exist():
    known = {*MODULES_OF, *(f"megatron_lm_{name}" for name in MODULES_OF)}
    assert {name.rpartition(".")[2] for name in ADVICE} <= known


@pytest.mark.parametrize("module", EXAMPLES)
def test_names_of_the_examples_are_importable(module):
    assert [name for name in EXAMPLES[module].split() if not has(module, name)] == []


def test_an_accelerator_has_what_the_examples_read():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert [name for name in READ.split() if not hasattr(accelerator, name)] == []


def test_what_a_module_lists_is_there():
    for path in sorted(Path(importlib.import_module("accelerate").__file__).parent.rglob("*.py")):
        parts = path.relative_to(Path(importlib.import_module("accelerate").__file__).parent).with_suffix("").parts
        if parts[-1] in ("__main__", "distribution_file"):  # the second is of packages/compat-metadata
            continue
        module = importlib.import_module(".".join(["accelerate", *parts]).removesuffix(".__init__"))
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
