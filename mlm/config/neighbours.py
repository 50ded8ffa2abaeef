"""Names that other programs have for our keys and choices: what someone who comes from there types.

nanoGPT and minGPT, Megatron-LM's and DeepSpeed's flags, `transformers`' configurations and TrainingArguments.
"""

_KEYS = {
    "data.seq_length seq_length": "block_size context_length context_size max_seq_len max_seq_length n_ctx",
    "optimizer.lr": "learning_rate max_lr base_lr peak_lr",
    "train.steps steps": "max_iters max_steps train_iters num_steps iterations num_train_steps",
    "train.epochs": "epochs num_epochs num_train_epochs",
    "model.num_layers": "n_layer n_layers num_hidden_layers layers depth",
    "model.num_heads": "n_head n_heads num_attention_heads heads",
    "model.hidden_size": "n_embd d_model dim embed_dim width",
    "model.ffn_hidden_size": "n_inner d_ff intermediate_size mlp_dim",
    "model.max_positions": "n_positions max_position_embeddings",
    "model.hidden_dropout dropout": "dropout resid_pdrop embd_pdrop dropout_rate",
    "model.attention_dropout": "attn_pdrop attn_dropout attention_probs_dropout_prob",
    "model.init_std": "init_method_std initializer_range",
    "model.layer_norm_eps": "layer_norm_epsilon layernorm_epsilon norm_eps",
    "train.micro_batch_size batch_size": (
        "batch_size per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size"
    ),
    "train.global_batch_size": "global_batch_size train_batch_size gradient_accumulation_steps",
    "train.validate_every": "eval_interval eval_steps val_interval val_every",
    "train.validate_batches": "eval_iters",
    "schedule.warmup_steps schedule.warmup": "warmup_iters num_warmup_steps lr_warmup_iters warmup",
    "schedule.decay_steps": "lr_decay_iters decay_iters",
    "schedule.decay": "lr_decay_style lr_scheduler_type scheduler decay_lr",
    "schedule.min_lr": "min_learning_rate lr_min",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_grad_norm": "grad_clip clip_grad max_grad_norm gradient_clip_val",
    "precision.dtype": "dtype bf16 fp16 mixed_precision torch_dtype",
    "tp": "tensor_model_parallel_size tensor_parallel tensor_parallel_size",
    "pp": "pipeline_model_parallel_size pipeline_parallel pipeline_parallel_size",
    "vp": "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size",
    "dp": "data_parallel data_parallel_size world_size",
    "zero": "zero_stage fsdp use_distributed_optimizer",
    "recompute": "activation_checkpointing gradient_checkpointing recompute_granularity",
    "checkpoint.save_every": "save_interval save_steps",
    "log.every": "log_interval logging_steps",
    "log.wandb_project": "wandb wandb_log",
    "dist.device": "device",
    "out": "out_dir output_dir save save_dir",
    "ckpt": "checkpoint load load_dir init_from model_name_or_path pretrained",
    "data.path data.train path input": "dataset data_dir data_path train_file",
    "max_new_tokens": "max_length max_tokens",
    "prompt": "start text",
}
KEYS: dict[str, tuple[str, ...]] = {
    theirs: tuple(ours.split()) for ours, names in _KEYS.items() for theirs in names.split()
}
"""Their name, in lower case and with underscores → our keys, of which a command has one."""

CHOICES: dict[str, str] = {
    "gpt2": "gpt2_124m",
    "gpt2_small": "gpt2_124m",
    "gpt2_medium": "gpt2_355m",
    "gpt2_large": "gpt2_774m",
    "gpt2_xl": "gpt2_1_5b",
    "bert_base_uncased": "bert_base",
    "bert_large_uncased": "bert_large",
    "adam": "adamw_v1",
    "adamw": "adamw_v1",
    "16": "fp16",
    "32": "fp32",
    "64": "fp64",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "sst_2": "sst2",
    "sts_b": "stsb",
    "squad2": "squad_v2",
}
"""Their name of a choice → ours."""

COMMANDS: dict[str, str] = {
    "sample": "generate",
    "train": "pretrain",
    "fit": "pretrain",
    "evaluate": "eval",
    "test": "eval",
    "prepare": "data build",
    "preprocess": "data build",
    "tokenize": "data tokenizer",
    "convert": "import hf",
    "checkpoint": "ckpt inspect",
    "fine_tune": "finetune",
}
"""Their name of a command → ours."""

FLAGS: dict[str, str] = {
    "dry_run": "--cfg job prints what would run, and stops",
    "config": "--config-dir DIR --config-name NAME composes a config of yours",
    "config_file": "--config-dir DIR --config-name NAME composes a config of yours",
    "print_config": "--cfg job prints what would run, and stops",
    "verbose": "log.every=1 logs every step",
}
"""Their name of a flag that is no key here → what does it."""
