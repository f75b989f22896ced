"""Keys of other tools that change nothing about the training: where it runs, what it writes, how fast it is."""

_HOUSEKEEPING = {
    "a run is kept below cluster.root, by its name": (
        "output_dir overwrite_output_dir run_name export_dir dataset_prepared_path tokenized_path overwrite_cache"
    ),
    "metrics are in metrics.jsonl of the run; to publish them, set tracking.trackers": (
        "report_to plot_loss include_num_input_tokens_seen use_tensorboard use_wandb use_otel_metrics eval_table_size"
    ),
    "a run does not upload its model; `hyperpod-ft push` does": "push_to_hub push_dataset_to_hub",
    "degrees and sharding are chosen for the instance type (section parallelism)": (
        "deepspeed fsdp accelerate_config accelerator_config num_processes num_machines local_rank world_size"
        " sequence_parallel_degree context_parallel_size tensor_parallel_size dp_shard_size dp_replicate_size"
        " device_map use_ray low_cpu_mem_usage experimental_skip_move_to_device"
    ),
    "answers are sampled by transformers; on GPUs, trl: {use_vllm: true} has vLLM sample them": "use_vllm vllm",
    "the lengths and rewards of answers are in metrics.jsonl": (
        "log_completions log_unique_prompts num_completions_to_print"
    ),
    "the engine has kernels of its own, or chooses them": (
        "attn_implementation xformers_attention sdp_attention sdpa_attention attention gemma4_hybrid_attn_impl"
        " use_kernels tf32 use_liger_kernel enable_liger_kernel cut_cross_entropy lora_mlp_kernel lora_qkv_kernel"
        " lora_o_kernel activation_memory_budget torch_compile_mode torch_compile_backend padding_free"
        " pad_to_sequence_len pad_to_multiple_of eval_sample_packing eval_packing"
    ),
    "the kit chooses how many processes read data (dataset.workers)": (
        "dataset_num_proc dataset_processes preprocessing_num_workers preprocessing_batch_size remove_unused_columns"
        " dataset_keep_in_memory dataset_streaming"
    ),
    "is taken from the model's own files": (
        "tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy is_llama_derived_model"
        " is_mistral_derived_model is_falcon_derived_model lora_fan_in_fan_out pad_token"
    ),
    "a vocabulary without room grows to a multiple of 64 rows, which begin at the mean of the others": (
        "resize_vocab resize_token_embeddings_to_32x mean_resizing_embeddings"
    ),
    "the kit runs no code of a model": "trust_remote_code",
    "`hyperpod-ft resume` continues a run": "resume_from_checkpoint auto_resume_from_checkpoints",
    "the kit's checkpoints can be resumed from": "save_only_model save_safetensors",
    "the kit counts steps: set training.save_every_steps": "saves_per_epoch",
    "the kit counts steps: set training.validate_every_steps": "evals_per_epoch",
    "validation uses training.micro_batch_size": "per_device_eval_batch_size eval_batch_size eval_accumulation_steps",
    "one seed is for everything": "data_seed",
    "training.sanity_steps stops a run that diverges": "loss_watchdog_threshold loss_watchdog_patience",
    "the kit's DPO always computes the reference once, before the training": "precompute_ref_log_probs",
    "stage dataset prepares the rows, once": "skip_prepare_dataset",
    "rows of video or sound are refused": "use_audio_in_video audio_sampling_rate",
    "has no counterpart": (
        "debug strict ds_type gradient_checkpointing_kwargs use_bnb_nested_quant bnb_4bit_quant_storage"
    ),
    "export variables in the shell that submits, or set cluster.environment": "env",
}
_BY_KEY = {key: reason for reason, keys in _HOUSEKEEPING.items() for key in keys.split()}
_BY_PREFIX = {
    prefix: _BY_KEY[key]
    for key, prefixes in (
        ("report_to", "wandb_ mlflow_ swanlab_ trackio_ comet_ otel_ logging_ use_swanlab"),
        ("push_to_hub", "hub_"),
        ("deepspeed", "fsdp_ ddp_ ray_ torchdistx_"),
        ("use_kernels", "liger_ flash_ flex_attn_"),
        ("dataset_num_proc", "dataloader_"),
        ("use_vllm", "vllm_"),
        ("use_audio_in_video", "video_"),
    )
    for prefix in prefixes.split()
}


def reason_of(key: str) -> str | None:
    """Why a key of another tool is not needed; None if it may change the training, or is unknown."""
    return _BY_KEY.get(key) or next((why for prefix, why in _BY_PREFIX.items() if key.startswith(prefix)), None)
