"""Keys of other training tools (`learning_rate`, `lora_r`, …) and the key here for each."""

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
    **dict.fromkeys(("dataset_split", "train_split"), "data.split"),
    **dict.fromkeys(("val_set_size", "val_size", "validation_split"), "data.validation"),
    "sample_packing": "data.packing",
    "chat_template_kwargs": "data.template",
    **dict.fromkeys(("output_dir", "save_dir"), "output"),
}
"""Key of another tool -> the key of a run file with the same meaning, for hints in messages."""
_TOOLS = {
    "datasets": "Axolotl", "sequence_len": "Axolotl", "finetuning_type": "LLaMA-Factory", "do_train": "LLaMA-Factory",
    "train_type": "ms-swift", "tuner_type": "ms-swift", "checkpointer": "torchtune", "lora_parameters": "mlx-lm",
    "step_scheduler": "NeMo AutoModel", "actor_rollout_ref": "verl", "per_device_train_batch_size": "a trainer",
}  # fmt: skip
MADE_FOR = {
    "architectures": "is a model's config.json; model.path takes its folder",
    "peft_type": "is an adapter's settings; adapt.start_from takes its folder",
    "log_history": "is the state of a trainer of transformers; resume it with that trainer",
    "compute_environment": "is for accelerate launch --config_file; moetune train starts its own ranks",
    "zero_optimization": "is DeepSpeed's; parallel.deepspeed takes it",
    **{key: f"is for {tool}; moetune init writes one, and its keys are named below" for key, tool in _TOOLS.items()},
}
"""Key at the top of a file of another tool -> what the file is, and what to do with it."""
