"""Names that scripts import from `accelerate` and that have no counterpart here: what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

_MEGATRON = "models are built by accelerator.build_model(factory) and trained by accelerator.forward_backward, under Megatron of accel-megatron"
_SAGEMAKER = "SageMaker's launcher is not offered; start the script by `accelerate launch` or torchrun"
_TPU = "TPUs are not supported"
_PIPELINE = (
    "pipelines are torch's, torch.distributed.pipelining; load_checkpoint_and_dispatch spreads a model over devices"
)
_LAUNCHER = "start processes by `accelerate launch`, notebook_launcher or torchrun"
_FSDP = "accelerator.prepare shares a model out under FSDP, with its optimizer"
_SCALER = "pass GradScalerKwargs in kwargs_handlers; accelerator.scaler has the scale"
_BNB = "load_and_quantize_model does all of it"
_PLANNER = "infer_auto_device_map places modules"
_CONSTANTS = "import it from accelerate.utils.constants"
_ESTIMATE = "`accel estimate-memory`, or estimate_memory of accel_big_model"
_CONFIG = "`accelerate config` writes configuration files, and write_basic_config one without questions"
_PICKLED = "collectives compare what they are given by themselves, and raise CollectiveMismatchError"

_GROUPS: Mapping[str, str] = {
    _MEGATRON: """AbstractTrainStep BertTrainStep GPTTrainStep MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronEngine
        MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group finish_mpu_init
        gather_across_data_parallel_groups accelerate.utils.megatron_lm.initialize megatron_lm_initialize megatron_lm_prepare_data_loader
        megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler
        model_provider_func parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config
        prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler""",
    _SAGEMAKER: """SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
        SAGEMAKER_TRANSFORMERS_VERSION get_sagemaker_input prepare_sagemager_args_inputs sagemaker_launcher""",
    _TPU: "install_xla prepare_tpu tpu_command_launcher tpu_command_parser tpu_launcher tpu_pod_launcher",
    _PIPELINE: "build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy",
    _LAUNCHER: """CustomArgumentGroup CustomHelpFormatter TORCH_LAUNCH_PARAMS clean_option deepspeed_launcher
        env_var_path_add multi_gpu_launcher prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config
        prepare_multi_gpu_env prepare_simple_launcher_cmd_env setup_fp8_env simple_launcher test_launch""",
    _CONFIG: """DYNAMO_BACKENDS SubcommandHelpFormatter config_command_parser default_command_parser get_cluster_input
        get_user_input update_command_parser""",
    "`accelerate to-fsdp2` converts configuration files": (
        "ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus convert_config_to_fsdp2"
    ),
    _ESTIMATE: """add_timm_hub_prefix check_has_model create_ascii_table create_empty_model estimate_training_usage
        gather_data verify_on_hub""",
    _FSDP: """ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict
        fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters""",
    _SCALER: "get_fsdp2_grad_scaler get_grad_scaler",
    "accelerator.autocast() gives the context": "get_mixed_precision_context_manager",
    "Accelerator(mixed_precision='fp8') converts models, with TERecipeKwargs in kwargs_handlers": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model"
    ),
    _BNB: """get_keys_to_not_convert get_parameter_device get_quantized_model_device_map quantize_and_offload_8bit
        replace_with_bnb_layers""",
    _PLANNER: "fallback_allocate get_module_leaves get_module_size_with_ties",
    "find_tied_parameters says which weights are tied": "check_tied_parameters_in_config",
    "get_state_dict_offloaded_model gives the weights of a whole model": "get_state_dict_from_offload",
    "Accelerator(deepspeed_plugin=DeepSpeedPlugin()) takes any optimizer": "map_pytorch_optim_to_deepspeed",
    _PICKLED: "TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT chained_operation verify_operation",
    "tensor.device.type says on what device a tensor is": "is_torch_xpu_tensor",
    "torch.serialization.safe_globals lists what a file may name; accelerate.utils.load does it": "TORCH_SAFE_GLOBALS",
    "prepare_data_loader makes loaders; they keep the class of the DataLoader": "DataLoaderAdapter",
    "prepared optimizers say by step_was_skipped whether a step was taken": "patch_optimizer_step",
    "state is one dictionary per process: PartialState._shared_state": "ThreadLocalSharedDict",
    "write a function of your own": "do_nothing",
    "accelerator.save_state and load_state": "load_accelerator_state save_accelerator_state",
    _CONSTANTS: """BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION CUDA_DISTRIBUTED_TYPES
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY
        FSDP_BACKWARD_PREFETCH FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME
        SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
        SCHEDULER_NAME SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES
        WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
    "import it from accelerate.tracking": "LOGGER_TYPE_TO_CLASS",
    "import it from accelerate.data_loader": "prepare_data_loader",
}

ADVICE: Mapping[str, str] = MappingProxyType(
    {name: advice for advice, names in _GROUPS.items() for name in names.split()}
)
"""Name, with its module if it is a common word → what to use. It holds in modules that do not have the name."""

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "accelerate.commands.config.cluster": _CONFIG,
        "accelerate.commands.config.config_utils": _CONFIG,
        "accelerate.commands.config.sagemaker": _SAGEMAKER,
        "accelerate.commands.menu": "`accelerate config` asks in plain lines; there is no menu",
        "accelerate.commands.tpu": _TPU,
    }
)
"""Modules, with all that is in them, that are not there → what to use."""


def refuse_from(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for a module of `accelerate`: names that are known to be missing say what to use.

    Raises `ImportError` for these, which `from … import` passes on, and `AttributeError` for others.
    """

    def refuse(name: str) -> NoReturn:
        if (advice := ADVICE.get(f"{module}.{name}") or ADVICE.get(name)) is not None:
            raise ImportError(f"{module}.{name} has no counterpart in accel-compat: {advice}.", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse
