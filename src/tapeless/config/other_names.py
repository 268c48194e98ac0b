"""What nanoGPT, LitGPT, the Trainer of transformers, torchtitan and common usage call our options.

    ALIASES         other names that the command line accepts
    NAMES           other names that it does not accept, each with what to give instead: the hint of an unknown flag or key
    COMMAND_NAMES   likewise for commands
A name is written without dashes in front and with _ between words. `section.*` are all names of a section.
Tested by: tests/cli/test_other_names.py, acceptance/new_user.py."""

from collections.abc import Iterable

# field or option -> accepted names: common ones, and flags of the systems before this one
ALIASES = {
    "preset": ["model"],
    "dataset_path": ["data"],
    "out_dir": ["output_dir", "checkpoint_path"],
    "max_seq_len": ["context_length"],
    "batch_size": ["batch"],
    "max_steps": ["steps"],
    "lr": ["learning_rate"],
    "grad_clip": ["gradient_clip"],
    "save_every": ["checkpoint_interval"],
    "keep_last": ["max_checkpoints"],
    "log_every": ["log_interval"],
}

# The command that has a flag is not named here: the command line knows it.
_GIVEN = {
    # data and tokenizers
    "--dataset-path": "dataset dataset_name dataset_config_name train_file data_dir data_path text input_file training.dataset "
    "training.dataset_path data.* dataloader.dataset dataloader.dataset_path streaming",
    "--val-path": "validation_file val_file eval_file validation.dataset validation.dataset_path",
    "--text-field": "text_column dataset_text_field text_key",
    "--tokenizer": "tokenizer_name tokenizer_path tokenizer_dir use_fast_tokenizer model.tokenizer_path model.hf_assets_path "
    "hf_assets_path",
    "--vocab-size": "vocab n_vocab num_tokens",
    "--document-attention": "packing intra_document_masking block_causal attn_mask_type",
    # the model
    "--preset": "model_name model_type model_config config_name model.name model.flavor flavor arch architecture",
    "--hidden-dim": "n_embd d_model dim hidden_size embed_dim embedding_size width n_embed emb_dim",
    "--num-layers": "n_layer n_layers num_hidden_layers layers depth",
    "--num-heads": "n_head n_heads num_attention_heads heads",
    "--num-kv-heads": "n_query_groups n_kv_heads n_kv_head num_key_value_heads kv_heads",
    "--head-dim": "head_size",
    "--intermediate-dim": "intermediate_size ffn_dim hidden_dim_multiplier d_ff mlp_dim n_inner ffn_hidden_size",
    "--max-seq-len": "block_size max_position_embeddings n_positions n_ctx ctx_len context_size context_len context",
    "--seq-len": "seq_length sequence_length max_seq_length max_length train.max_seq_length training.seq_len "
    "training.max_context_length validation.seq_len",
    "--attn-bias and --ffn-bias": "bias use_bias",
    "--tie-embeddings": "tie_word_embeddings train.tie_embeddings weight_tying tie_weights",
    "--ffn": "activation hidden_act activation_function act_fn mlp_type",
    "--label-smoothing": "label_smoothing_factor",
    "--init-from RUN": "model_name_or_path checkpoint_dir initial_checkpoint_dir checkpoint.initial_load_path pretrained "
    "pretrained_model base_model load_from finetune from_pretrained checkpoint.initial_load_model_only "
    "checkpoint.initial_load_in_hf",
    "--lora-rank": "lora_r lora lora_dim use_lora use_peft",
    "--lora-targets": "lora_query lora_key lora_value lora_projection lora_mlp lora_head target_modules lora_target_modules",
    # batches and steps
    "--batch-size": "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size train.micro_batch_size bs bsz "
    "train_batch_size training.batch_size training.local_batch_size local_batch_size device_batch_size "
    "training.num_tokens_per_microbatch_per_dp_rank auto_find_batch_size",
    "--batch-size times --grad-accum": "global_batch_size train.global_batch_size training.global_batch_size "
    "total_batch_size training.num_tokens_per_train_step",
    "--grad-accum": "gradient_accumulation_steps gradient_accumulation_iters accumulate_grad_batches accumulation_steps "
    "grad_accum_steps num_microbatches",
    "--max-steps": "max_iters iters iterations num_steps train_steps training.steps max_train_steps total_steps "
    "num_iterations train.max_steps num_iters n_steps",
    "--max-steps: steps are batch-size x grad-accum x seq-len tokens": "max_tokens train.max_tokens num_train_tokens",
    "--epochs": "num_train_epochs num_epochs epoch train.epochs max_epochs n_epochs",
    "--max-time": "train.max_time time_limit max_train_time",
    # optimizer and schedule
    "--lr": "optimizer.lr train.learning_rate rate base_lr max_lr peak_lr learningrate",
    "--min-lr": "train.min_lr lr_scheduler.min_lr_factor end_lr final_lr lr_end lr_scheduler.min_lr",
    "--lr-schedule": "lr_scheduler_type lr_scheduler lr_scheduler_kwargs lr_scheduler.decay_type decay_type scheduler "
    "schedule lr_decay lr_scheduler.decay_ratio",
    "--lr-schedule constant or warmup-cosine": "decay_lr",
    "--max-steps: the schedule ends with the run": "lr_decay_iters lr_decay_steps",
    "--warmup-steps": "warmup_iters lr_warmup_steps train.lr_warmup_steps lr_scheduler.warmup_steps warmup num_warmup_steps",
    "--warmup-steps, a number of steps": "warmup_ratio lr_warmup_fraction train.lr_warmup_fraction",
    "--optimizer": "optim optim_args optimizer.name opt optimizer.implementation adafactor optimizer.class_path "
    "optim_target_modules",
    "--weight-decay": "optimizer.weight_decay wd train.weight_decay",
    "--beta1": "adam_beta1 optimizer.beta1 b1 train.beta1",
    "--beta2": "adam_beta2 optimizer.beta2 b2 train.beta2",
    "--eps": "adam_epsilon optimizer.eps epsilon adam_eps",
    "--grad-clip": "max_grad_norm max_norm train.max_norm training.max_norm clip_grad clip_grad_norm gradient_clip_val "
    "clip_norm clip",
    "--ema-decay": "ema use_ema ema_rate",
    # evaluation, checkpoints, output
    "--eval-every": "eval_interval eval.interval eval_steps eval_strategy evaluation_strategy do_eval eval_freq "
    "validation.freq validation.enable validate_every val_interval val_check_interval validation.steps eval_delay "
    "eval_on_start eval.initial_validation eval.final_validation",
    "--eval-windows": "eval_iters eval.max_iters max_eval_samples eval_batches max_eval_steps limit_val_batches",
    "--patience": "early_stopping early_stopping_patience",
    "--save-every": "save_interval train.save_interval save_steps save_strategy checkpoint.interval checkpoint_every save_freq "
    "always_save_checkpoint ckpt_interval checkpoint.enable_checkpoint checkpoint.enable",
    "--keep-last": "save_total_limit checkpoint.keep_latest_k keep_latest_k max_to_keep",
    "--log-every": "logging_steps logging_strategy logging_first_step train.log_interval metrics.log_freq log_freq log_steps "
    "print_every",
    "--out-dir": "overwrite_output_dir checkpoint.folder job.dump_folder dump_folder save_dir run_dir checkpoint_folder "
    "logging_dir run_name log.run wandb_run_name project log.project wandb_project metrics.save_tb_folder name output out "
    "checkpoint.base_folder experiment_name",
    "--report-to": "wandb_log wandb use_wandb logger_name logger tensorboard metrics.enable_wandb metrics.enable_tensorboard "
    "enable_wandb enable_tensorboard log_to trackio_space_id",
    "--sample-every": "sample_interval sample_freq eval.max_new_tokens generate_every eval.evaluate_example",
    "--layer-stats-every": "log_grad_norm profile_freq",
    "--seed": "data_seed training.seed debug.seed random_seed",
    # device and numerics
    "--device": "no_cuda use_cpu use_mps_device cuda gpu cpu use_gpu accelerator job.device",
    "--dtype": "precision torch_dtype training.dtype training.mixed_precision_param mixed_precision_param amp mixed_precision "
    "model.dtype model_dtype float16 half",
    "--dtype bfloat16": "bf16 bf16_full_eval bfloat16 use_bf16",
    "--dtype bfloat16: float16 is not supported, its small range needs loss scaling": "fp16 fp16_full_eval fp16_backend "
    "fp16_opt_level half_precision_backend",
    "--dtype fp8": "fp8 float8.* quantize.* model.converters",
    "--threads": "num_threads n_threads cpu_threads num_workers workers",
    "--recompute": "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpoint "
    "activation_checkpointing_kwargs activation_checkpoint.* grad_checkpointing checkpoint_activations ac_mode",
    "--deterministic": "full_determinism training.deterministic debug.deterministic debug.batch_invariant "
    "debug.deterministic_warn_only use_deterministic_algorithms",
    "--no-verify": "skip_gradient_check no_check",
    "--check-invariants-every": "detect_anomaly debug.detect_anomaly",
    # generation
    "--max-tokens": "max_new_tokens length num_tokens_to_generate n_predict max_gen_len",
    "--prompt": "start starting_prompt input_text",
    "--num-samples": "num_return_sequences n_samples",
    "--temperature": "temp",
    "--checkpoint WHICH": "step ckpt checkpoint.load_step checkpoint_name epoch_to_load",
    "--debug": "traceback full_trace",
    "--config FILE": "config_file job.config_file config_path config_overrides",
}
_SAID = {
    "`tapeless train resume RUN` continues a run": "resume resume_from_checkpoint resume_from continue restore "
    "restore_callback_states_from_checkpoint ignore_data_skip enable_jit_checkpoint",
    "`tapeless eval RUN` evaluates": "eval_only do_predict evaluate eval test",
    "`tapeless train new` trains": "do_train train",
    "`tapeless bench` and `tapeless train info` show where the time goes": "profile profiling.* profiler.* "
    "memory_estimation.* skip_memory_metrics enable_profiling",
    "`tapeless export RUN --to hf` writes a model for transformers": "push_to_hub hub_model_id hub_strategy hub_token "
    "hub_private_repo hub_always_push hub_revision save_safetensors export_dtype checkpoint.export_dtype "
    "checkpoint.last_save_in_hf checkpoint.last_save_model_only save_only_model push_to_hub_model_id "
    "push_to_hub_organization push_to_hub_token access_token token",
    "the step is compiled kernels already, captured and replayed: leave it out": "compile torch_compile compile.* "
    "torch_compile_backend torch_compile_mode torchdynamo training.compile use_liger_kernel liger_kernel_config "
    "jit_mode_eval use_ipex training.disable_cuda_graphs fused flash_attention flash_attn attn_implementation",
    "training runs on one device, in one process: leave it out": "fsdp fsdp_config fsdp_min_num_params deepspeed ddp_backend "
    "fsdp_transformer_layer_cls_to_wrap ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
    "ddp_timeout backend local_rank devices num_nodes nodes gpus num_gpus world_size nproc_per_node parallelism.* comm.* "
    "experimental.* fault_tolerance.* accelerator_config parallelism_config strategy mp_parameters tpu_num_cores "
    "tpu_metrics_debug training.enable_cpu_offload training.data_parallel_degree training.tensor_parallel_degree "
    "average_tokens_across_devices dispatch_batches split_batches log_on_each_node save_on_each_node distributed fabric "
    "tensor_parallel_size sharding_strategy ray_scope",
    "batches are read ahead from tokens in the run's directory: leave it out": "dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last dataloader_in_order dataloader.* "
    "dataloader_multiprocessing_context preprocessing_num_workers pin_memory remove_unused_columns label_names "
    "group_by_length length_column_name train_sampling_strategy keep_linebreaks overwrite_cache cache_dir shuffle",
    "the best and the last checkpoints are always kept: leave it out": "load_best_model_at_end metric_for_best_model "
    "greater_is_better checkpoint.async_mode checkpoint.* save_best keep_best",
    "metrics.jsonl in the run's directory has every step: leave it out": "logging_nan_inf_filter log.* metrics.* "
    "include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen include_tokens_per_second "
    "batch_eval_metrics",
    "the computation is float32 or bfloat16 with float32 master weights and sums: leave it out": "tf32 "
    "training.mixed_precision_reduce allow_tf32",
    "`> log.txt` keeps the terminal free, with a line every --log-every steps; --json prints every event": "disable_tqdm "
    "log_level log_level_replica quiet silent q log_to_file debug.print_config job.print_args job.print_config "
    "metrics.disable_color_printing no_progress progress verbosity",
    "nothing of the kind is needed here: leave it out": "training.gc_freq training.gc_debug torch_empty_cache_steps debug "
    "debug.* job.* past_index prediction_loss_only per_device_eval_batch_size per_gpu_eval_batch_size "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object use_cache trackio_bucket_id "
    "trackio_static_space_id use_legacy_prediction_loop low_cpu_mem_usage trust_remote_code validation.local_batch_size "
    "optimizer.early_step_in_backward validation.* override.* eval_packing hooks",
    "tapeless does not have it: leave it out": "neftune_noise_alpha lora_dropout quantize load_in_8bit load_in_4bit sys_prompt "
    "multiline log",
    "a tenth of the data is held out; --val-path names another text for that": "validation_split_percentage val_split "
    "val_fraction test_size",
    "shorten the file, or give fewer --max-steps": "max_train_samples",
    "the interactive mode is a command: tapeless chat RUN": "interactive chat repl i",
    "--stop TEXT ends a text there; it also ends at the model's own end-of-text token": "stop_token stop_sequence eos "
    "eos_token",
}

# Words given as a command -> the command.
_COMMANDS = {
    "train new": "new pretrain fit run start finetune",
    "train resume": "resume continue",
    "train info": "info show status runs",
    "generate": "sample inference infer chat complete",
    "data prepare": "prepare tokenize preprocess",
    "eval": "evaluate test validate",
    "export": "convert save",
    "import": "load",
    "gradcheck": "check verify",
    "estimate": "memory plan",
    "bench": "benchmark profile speed",
    "report": "plot compare",
}


def _by_name(table: dict[str, str], front: str) -> dict[str, str]:
    return {name: front + hint for hint, names in table.items() for name in names.split()}


NAMES = _by_name(_GIVEN, "here it is ") | _by_name(_SAID, "")
COMMAND_NAMES = _by_name(_COMMANDS, "")


def other_name(word: str) -> str | None:
    """The hint for a name that another tool, or common usage, has for an option. word: a flag or a key."""
    name = word.lstrip("-").replace("-", "_").lower()
    section, dot, rest = name.rpartition(".")
    for candidate in (name, f"{section}.*", f"{section.partition('.')[0]}.*", rest if dot else ""):
        if candidate in NAMES:
            return NAMES[candidate]
    return None


def accepted(field: str) -> Iterable[str]:
    """Other flags for a field: its aliases, and each name with underscores."""
    names = ALIASES.get(field, [])
    spelled = [spelling for name in (field, *names) for spelling in (name.replace("_", "-"), name)]
    return [f"--{name}" for name in dict.fromkeys(spelled) if name != field.replace("_", "-")]
