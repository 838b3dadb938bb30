"""Keys of other training tools (`learning_rate`, `lora_r`, …) and the run-file key to suggest for each."""

OTHER_NAMES = {
    **dict.fromkeys(("base_model", "model_name_or_path", "model_name", "pretrained_model_name_or_path"), "model.path"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization"), "model.base"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "model.dtype"),
    **dict.fromkeys(("attn_implementation", "flash_attention"), "model.attention"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "adapt.lora.rank"),
    "lora_alpha": "adapt.lora.alpha",
    "lora_dropout": "adapt.lora.dropout",
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules"), "adapt.lora.targets"),
    "use_rslora": "adapt.lora.rslora",
    "loraplus_lr_ratio": "adapt.lora.lr_ratio",
    **dict.fromkeys(("learning_rate", "lr"), "optimizer.lr"),
    "optim": "optimizer.name",
    "weight_decay": "optimizer.weight_decay",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps"), "train.steps"),
    **dict.fromkeys(("batch_size", "micro_batch_size", "per_device_train_batch_size"), "train.micro_batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "train.accumulate"),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "sequence_len", "cutoff_len", "block_size"), "train.sequence_length"
    ),
    "gradient_checkpointing": "train.checkpointing",
    "auto_find_batch_size": "train.on_oom",
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "warmup_ratio"), "train.warmup"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "train.schedule"),
    "neftune_noise_alpha": "train.neftune_alpha",
    "logging_steps": "train.log_every",
    **dict.fromkeys(("eval_steps", "evals_per_epoch"), "train.eval_every"),
    **dict.fromkeys(("early_stopping_patience", "patience"), "train.early_stopping.patience"),
    "load_best_model_at_end": "train.early_stopping",
    **dict.fromkeys(("save_steps", "saves_per_epoch"), "train.save_every"),
    **dict.fromkeys(("dataset", "datasets", "train_file", "dataset_name", "data_path"), "data.train"),
    **dict.fromkeys(("val_set_size", "val_size", "validation_split"), "data.validation"),
    "sample_packing": "data.packing",
    **dict.fromkeys(("output_dir", "save_dir"), "output"),
}
"""Key of another tool -> the key of a run file with the same meaning, for hints in messages."""
