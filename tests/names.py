"""The older names: what scripts of the library's users may say, as data. tests/test_names.py compares it with what there is.

`OLDER_NAMES` has, under the letter and number of a row of features and its heading, one text per name:

- `owner.name`: something that exists there, an attribute of a class for instance;
- `owner.name(a, b, *, **)`: it takes these arguments, under these names and maybe more; `*` and `**` stand for any number of
  positional and of keyword arguments;
- `owner.Name: A B`: an enumeration with these members.

The owner is `Accelerator` or a package, or a class of a package with a dot before it: `accel_core.PartialState.device`.
"""

from __future__ import annotations

OLDER_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("A1", "The constructor"): (
        (
            "accel_core.Accelerator(device_placement, split_batches, mixed_precision, gradient_accumulation_steps, cpu, "
            "dataloader_config, rng_types, log_with, project_dir, project_config, gradient_accumulation_plugin, dispatch_batches, "
            "even_batches, use_seedable_sampler, step_scheduler_with_optimizer, kwargs_handlers, dynamo_backend)"
        ),
        "accel_core.KwargsHandler()",
        "accel_core.AutocastKwargs(enabled, cache_enabled)",
        "accel_core.GradientAccumulationPlugin(num_steps, adjust_scheduler, sync_with_dataloader, sync_each_batch)",
        "accel_core.InitProcessGroupKwargs(backend, init_method, timeout)",
        (
            "accel_core.ProfileKwargs(activities, schedule_option, on_trace_ready, record_shapes, profile_memory, with_stack, "
            "with_flops, with_modules, output_trace_dir)"
        ),
        "accel_core.TorchDynamoPlugin(backend, mode, fullgraph, dynamic, options, disable, use_regional_compilation)",
        (
            "accel_core.DynamoBackend: NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT "
            "TENSORRT TVM"
        ),
        "accel_core.LoggerType: ALL AIM CLEARML COMETML DVCLIVE JSONL MLFLOW SWANLAB TENSORBOARD TRACKIO WANDB",
        "accel_core.PrecisionType: NO FP8 FP16 BF16",
        "accel_core.RNGType: TORCH CUDA XLA GENERATOR",
    ),
    ("A2", "Attributes"): (
        "Accelerator.device",
        "Accelerator.distributed_type",
        "Accelerator.process_index",
        "Accelerator.local_process_index",
        "Accelerator.num_processes",
        "Accelerator.mixed_precision",
        "Accelerator.optimizer_step_was_skipped",
        "Accelerator.state",
        "Accelerator.step",
        "Accelerator.sync_gradients",
        "Accelerator.use_distributed",
        "Accelerator.is_main_process",
        "Accelerator.is_local_main_process",
        "Accelerator.is_last_process",
        "Accelerator.project_dir",
        "accel_core.AcceleratorState",
        "accel_core.AcceleratorState.distributed_type",
        "accel_core.AcceleratorState.mixed_precision",
        "accel_core.DistributedType: NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_XPU DEEPSPEED FSDP MEGATRON_LM XLA",
    ),
    ("A3", "Preparing"): (
        "Accelerator.prepare(*, device_placement)",
        "Accelerator.prepare_model(model, device_placement, evaluation_mode)",
        "Accelerator.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)",
        "Accelerator.prepare_optimizer(optimizer, device_placement)",
        "Accelerator.prepare_scheduler(scheduler)",
        "accel_core.AcceleratedOptimizer(optimizer, device_placement, scaler)",
        "accel_core.AcceleratedScheduler(scheduler, optimizers, step_with_optimizer, split_batches)",
    ),
    ("A4", "The loop"): (
        "Accelerator.accumulate(*)",
        "Accelerator.autocast(cache_enabled, autocast_handler)",
        "Accelerator.backward(loss, **)",
        "Accelerator.clip_grad_norm_(parameters, max_norm, norm_type)",
        "Accelerator.clip_grad_value_(parameters, clip_value)",
        "Accelerator.join_uneven_inputs(joinables, even_batches)",
        "Accelerator.lomo_backward(loss, learning_rate)",
        "Accelerator.no_sync(model)",
        "Accelerator.trigger_sync_in_backward(model)",
        "Accelerator.unscale_gradients(optimizer)",
    ),
    ("A6", "Around the loop"): (
        "Accelerator.check_breakpoint()",
        "Accelerator.check_trigger()",
        "Accelerator.clear(*)",
        "Accelerator.free_memory(*)",
        "Accelerator.print(*, **)",
        "Accelerator.profile(profile_handler)",
        "Accelerator.set_trigger()",
        "Accelerator.unwrap_model(model, keep_fp32_wrapper)",
        "Accelerator.verify_device_map(model)",
        "accel_core.release_memory(*)",
    ),
    ("B1", "Processes"): (
        "Accelerator.local_main_process_first()",
        "Accelerator.main_process_first()",
        "Accelerator.on_last_process(function)",
        "Accelerator.on_local_main_process(function)",
        "Accelerator.on_local_process(function, local_process_index)",
        "Accelerator.on_main_process(function)",
        "Accelerator.on_process(function, process_index)",
        "Accelerator.split_between_processes(inputs, apply_padding)",
        "Accelerator.wait_for_everyone()",
        "accel_core.PartialState(cpu, backend, timeout, init_method)",
        "accel_core.PartialState.device",
        "accel_core.PartialState.distributed_type",
        "accel_core.PartialState.is_last_process",
        "accel_core.PartialState.is_local_main_process",
        "accel_core.PartialState.is_main_process",
        "accel_core.PartialState.local_process_index",
        "accel_core.PartialState.num_processes",
        "accel_core.PartialState.process_index",
        "accel_core.PartialState.use_distributed",
        "accel_core.PartialState.local_main_process_first()",
        "accel_core.PartialState.main_process_first()",
        "accel_core.PartialState.on_last_process(function)",
        "accel_core.PartialState.on_local_main_process(function)",
        "accel_core.PartialState.on_local_process(function, local_process_index)",
        "accel_core.PartialState.on_main_process(function)",
        "accel_core.PartialState.on_process(function, process_index)",
        "accel_core.PartialState.print(*, **)",
        "accel_core.PartialState.split_between_processes(inputs, apply_padding)",
        "accel_core.PartialState.wait_for_everyone()",
    ),
    ("B2", "Collectives"): (
        "Accelerator.gather(tensor)",
        "Accelerator.gather_for_metrics(input_data, use_gather_object)",
        "Accelerator.pad_across_processes(tensor, dim, pad_index, pad_first)",
        "Accelerator.reduce(tensor, reduction, scale)",
        "accel_core.broadcast(tensor, from_process)",
        "accel_core.broadcast_object_list(object_list, from_process)",
        "accel_core.gather_object(object)",
    ),
    ("B3", "Randomness, logs, memory"): (
        "accel_core.LocalSGD(accelerator, model, local_sgd_steps, enabled)",
        "accel_core.find_executable_batch_size(function, starting_batch_size)",
        "accel_core.get_logger(name, log_level)",
        "accel_core.set_seed(seed, device_specific, deterministic)",
        "accel_core.synchronize_rng_state(rng_type, generator)",
        "accel_core.synchronize_rng_states(rng_types, generator)",
    ),
    ("C1", "Loaders"): (
        "Accelerator.skip_first_batches(dataloader, num_batches)",
        "accel_data.BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)",
        "accel_data.DataLoaderDispatcher(dataset, split_batches, skip_batches, _drop_last, slice_fn, **)",
        "accel_data.DataLoaderDispatcher.total_batch_size",
        "accel_data.DataLoaderDispatcher.total_dataset_length",
        "accel_data.DataLoaderShard(dataset, device, rng_types, synchronized_generator, skip_batches, _drop_last, **)",
        "accel_data.DataLoaderShard.total_batch_size",
        "accel_data.DataLoaderShard.total_dataset_length",
        "accel_data.IterableDatasetShard(dataset, batch_size, drop_last, num_processes, process_index, split_batches)",
        "accel_data.SeedableRandomSampler",
        (
            "accel_data.prepare_data_loader(dataloader, device, num_processes, process_index, split_batches, put_on_device, "
            "rng_types, dispatch_batches, even_batches, slice_fn_for_dispatch, use_seedable_sampler)"
        ),
        "accel_data.skip_first_batches(dataloader, num_batches)",
        "accel_data.slice_tensors(data, tensor_slice, process_index, num_processes)",
    ),
    ("C2", "Options of loaders"): (
        (
            "accel_data.DataLoaderConfiguration(split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, "
            "non_blocking, use_stateful_dataloader)"
        ),
        "Accelerator.even_batches",
        "Accelerator.rng_types",
        "Accelerator.split_batches",
    ),
    ("D1", "DDP"): (
        (
            "accel_core.DistributedDataParallelKwargs(broadcast_buffers, bucket_cap_mb, find_unused_parameters, "
            "gradient_as_bucket_view, static_graph, comm_hook, comm_wrapper, comm_state_option)"
        ),
    ),
    ("D2", "FSDP"): (
        (
            "accel_fsdp.FullyShardedDataParallelPlugin(fsdp_version, sharding_strategy, reshard_after_forward, backward_prefetch, "
            "mixed_precision_policy, auto_wrap_policy, cpu_offload, ignored_modules, state_dict_type, state_dict_config, "
            "optim_state_dict_config, limit_all_gathers, use_orig_params, param_init_fn, sync_module_states, forward_prefetch, "
            "activation_checkpointing, activation_checkpointing_offload, cpu_ram_efficient_loading, "
            "transformer_cls_names_to_wrap, min_num_params)"
        ),
    ),
    ("D3", "DeepSpeed"): (
        (
            "accel_deepspeed.DeepSpeedPlugin(hf_ds_config, gradient_accumulation_steps, gradient_clipping, zero_stage, "
            "offload_optimizer_device, offload_param_device, zero3_init_flag)"
        ),
        "accel_deepspeed.DummyOptim(params, lr, weight_decay, **)",
        "accel_deepspeed.DummyScheduler(optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, **)",
    ),
    ("D4", "Megatron"): (
        (
            "accel_megatron.MegatronLMPlugin(tp_degree, pp_degree, sequence_parallelism, use_distributed_optimizer, "
            "expert_model_parallel_size, is_train_batch_min, **)"
        ),
    ),
    ("D5", "Long sequences"): ("Accelerator.maybe_context_parallel(buffers, buffer_seq_dims, no_restore_buffers)",),
    ("E", "Precision"): (
        "accel_precision.GradScalerKwargs(init_scale, growth_factor, backoff_factor, growth_interval, enabled)",
        "accel_precision.AORecipeKwargs(config, module_filter_func, enable_fsdp_float8_all_gather)",
        (
            "accel_precision.TERecipeKwargs(use_autocast_during_eval, margin, interval, fp8_format, amax_history_len, "
            "amax_compute_algo, override_linear_precision, use_mxfp8_block_scaling)"
        ),
        (
            "accel_precision.FP8RecipeKwargs(backend, use_autocast_during_eval, margin, interval, fp8_format, amax_history_len, "
            "amax_compute_algo, override_linear_precision, opt_level)"
        ),
    ),
    ("F1", "Checkpoints"): (
        "Accelerator.get_state_dict(model, unwrap)",
        "Accelerator.load_state(input_dir, **)",
        "Accelerator.register_for_checkpointing(*)",
        "Accelerator.register_load_state_pre_hook(hook)",
        "Accelerator.register_save_state_pre_hook(hook)",
        "Accelerator.save(obj, f, safe_serialization)",
        "Accelerator.save_model(model, save_directory, max_shard_size, safe_serialization)",
        "Accelerator.save_state(output_dir, safe_serialization, **)",
        (
            "accel_core.ProjectConfiguration(project_dir, logging_dir, automatic_checkpoint_naming, total_limit, iteration, "
            "save_on_each_node)"
        ),
        "accel_core.ProjectConfiguration.set_directories(project_dir)",
    ),
    ("G", "Trackers"): (
        "Accelerator.end_training()",
        "Accelerator.get_tracker(name, unwrap)",
        "Accelerator.init_trackers(project_name, config, init_kwargs)",
        "Accelerator.log(values, step, log_kwargs)",
        "Accelerator.trackers",
        "accel_core.GeneralTracker",
    ),
    ("H3", "Starting"): (
        "accel_launch.debug_launcher(function, args, num_processes)",
        "accel_launch.notebook_launcher(function, args, num_processes, mixed_precision, use_port)",
    ),
    ("I", "Big models"): (
        "accel_core.load_checkpoint_in_model(model, checkpoint, device_map)",
        "accel_big_model.BnbQuantizationConfig(load_in_8bit, load_in_4bit, torch_dtype, skip_modules)",
        "accel_big_model.cpu_offload(model, execution_device, offload_buffers, state_dict)",
        "accel_big_model.disk_offload(model, offload_dir, execution_device, offload_buffers)",
        "accel_big_model.dispatch_model(model, device_map, main_device, state_dict, offload_dir, offload_index, offload_buffers)",
        (
            "accel_big_model.infer_auto_device_map(model, max_memory, no_split_module_classes, dtype, special_dtypes, "
            "offload_buffers)"
        ),
        "accel_big_model.init_empty_weights(include_buffers)",
        "accel_big_model.load_and_quantize_model(model, bnb_quantization_config, weights_location, device_map, offload_folder)",
        (
            "accel_big_model.load_checkpoint_and_dispatch(model, checkpoint, device_map, max_memory, no_split_module_classes, "
            "offload_folder, offload_buffers, dtype, offload_state_dict, strict)"
        ),
    ),
}

OLDER_ARGUMENTS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "kwarg_handler",
    "megatron_lm_plugin",
    "step_with_optimizer",
)
"""Arguments of the constructor that its signature does not have, and that it takes all the same."""

COMES_WITH: dict[str, str] = {}
"""What is not there yet, and the part of the library that brings it."""
