"""Keys that users of other trainers look for, and why profile ``native_online_lora_v1`` has none of them.

A key listed here is refused in every table and every form of a config, with its reason in place of "is no key".
"""

from __future__ import annotations

REFUSED_KEYS = {
    **dict.fromkeys(
        (
            "batch_size",
            "micro_batch_size",
            "per_device_batch_size",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "auto_find_batch_size",
            "gradient_accumulation_steps",
            "group_by_length",
            "length_grouping",
            "max_steps",
            "dataloader_drop_last",
        ),
        "native_online_lora_v1 takes one conversation a step, and every row once an epoch",
    ),
    **dict.fromkeys(
        (
            "scheduler",
            "lr_scheduler",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "warmup",
            "warmup_steps",
            "warmup_ratio",
            "lr_decay",
            "min_lr",
            "cosine_min_lr_ratio",
            "loraplus_lr_ratio",
        ),
        "native_online_lora_v1 keeps one constant learning rate",
    ),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clipping", "clip_grad_norm"), "native_online_lora_v1 does not clip gradients"
    ),
    **dict.fromkeys(
        ("lora_dropout", "dropout", "attention_dropout", "neftune_noise_alpha", "noisy_embedding_alpha"),
        "native_online_lora_v1 has no dropout and no noise",
    ),
    **dict.fromkeys(
        (
            "packing",
            "sample_packing",
            "eval_packing",
            "neat_packing",
            "pad_to_sequence_len",
            "pad_to_multiple_of",
            "padding",
            "padding_free",
            "max_length",
            "max_seq_length",
            "max_sequence_length",
            "sequence_len",
            "cutoff_len",
            "truncation",
        ),
        "rows are never packed, cut, or padded to the length of another; [admit] max_tokens refuses long ones",
    ),
    **dict.fromkeys(
        (
            "row_weight",
            "row_weights",
            "sample_weight",
            "weight",
            "label_smoothing_factor",
            "average_tokens_across_devices",
        ),
        "native_online_lora_v1 takes each row's plain mean over its supervised tokens",
    ),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt", "assistant_only_loss", "completion_only_loss", "mask_history"),
        "what is supervised is proven by `kiln admit`: the assistant's turns and nothing else",
    ),
    **dict.fromkeys(
        (
            "modules_to_save",
            "lora_modules_to_save",
            "use_dora",
            "use_rslora",
            "lora_bias",
            "load_in_4bit",
            "load_in_8bit",
            "quantization_bit",
            "finetuning_type",
            "stage",
        ),
        "native_online_lora_v1 trains plain LoRA on an unquantized base and nothing else",
    ),
    **dict.fromkeys(
        (
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "ddp",
            "tensor_parallel_size",
            "num_processes",
            "torch_compile",
            "compile",
        ),
        "native_online_lora_v1 runs in one process on one device, without a compiler, so that a run can be repeated",
    ),
    **dict.fromkeys(
        ("bf16", "fp16", "tf32", "torch_dtype", "precision", "pure_bf16"), 'say dtype = "bfloat16" or "float32"'
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
        "grad_checkpoint_segments says how many segments are computed again",
    ),
    **dict.fromkeys(("optim", "optim_args"), "say optimizer = { kind = ... }"),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"), "[train.optimizer] has it for its kind"
    ),
    **dict.fromkeys(("lora_r", "r"), "the key is lora_rank"),
    **dict.fromkeys(("lora_target", "lora_target_modules", "lora_target_linear"), "the key is target_modules"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "the key is epochs"),
    **dict.fromkeys(("save_steps", "save_strategy", "saves_per_epoch"), "the key is checkpoint_interval"),
    **dict.fromkeys(("output_name", "adapter_name"), "the key is [train] adapter"),
    **dict.fromkeys(("output_dir", "overwrite_output_dir"), "--out names the run directory"),
    **dict.fromkeys(
        ("report_to", "wandb_project", "logging_dir", "push_to_hub", "hub_model_id"), "kiln never uses the network"
    ),
    **dict.fromkeys(("training_profile",), "the key is profile"),
    **dict.fromkeys(("invalid_row_policy",), "[admit] has it"),
    **dict.fromkeys(("base_model", "model_name_or_path"), "the key is [model] path"),
    **dict.fromkeys(
        ("seed", "data_seed", "shuffle_seed"), "[project] seed feeds every choice; rows have a new order each epoch"
    ),
    **dict.fromkeys(
        ("resume_checkpoint", "resume_from_checkpoint"), "`kiln resume RUN --checkpoint NAME` goes on from a checkpoint"
    ),
}
