"""Adapted models in TRL's trainers: the reference, arguments from the run file."""

import json
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn
from transformers import PreTrainedTokenizerBase

from moetune.adapt.build import Adapted
from moetune.adapt.reference import Reference
from moetune.compat.trl import SelfReferencing
from moetune.config.schema import RunConfig, TrainConfig
from moetune.errors import UserError, suggest
from moetune.run.resolve import AnyRun, ResolvedRun, resolve

TrlTrainer = Literal["sft", "dpo", "kto", "orpo", "grpo"]
TRAINERS: tuple[TrlTrainer, ...] = get_args(TrlTrainer)


@dataclass(frozen=True)
class InTrl:
    """A kind of trainer of TRL, and arguments of its configuration that replace or extend those of `trl_arguments`.

    `arguments` is the text of a JSON object, such as `{"beta": 0.1}`.
    """

    trainer: TrlTrainer
    arguments: str = "{}"

    @property
    def more(self) -> dict[str, Any]:
        """The `arguments` as a dict."""
        return dict(json.loads(self.arguments))


_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw8bit": "paged_adamw_8bit",
    "lion8bit": "lion_8bit",
    "ademamix8bit": "ademamix_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Optimizer of a run file -> its name in transformers, whose Trainer makes it."""
_THIRD_BETA = 0.9999
"""The third beta that transformers' Trainer gives AdEMAMix."""


def trl_model(adapted: Adapted) -> SelfReferencing:
    """Return the model for TRL's trainers whose reference is the model itself, as it is now.

    Pass it as `model`, without `ref_model`. TRL's reference passes then run with LoRA switched off, and with whole
    experts, routers and other trained weights as they are now, from copies in host memory (`adapt/reference.py`). The
    model is needed for GRPO with a `beta`, and for DPO and KTO without `precompute_ref_log_probs`; elsewhere
    `adapted.model` does, without copies.

    Raises:
        UserError: the model is distributed over ranks, or its LM head is not a plain linear layer, whose weight TRL
            multiplies with.
    """
    if not adapted.ranks.is_single:
        raise UserError("TRL trains a model of one rank; set parallel: to 1 rank, or train with moetune train")
    head = adapted.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"TRL multiplies with the weight of the LM head, which is a {type(head).__name__}; leave lm_head out of "
            "adapt.lora.targets"
        )
    return SelfReferencing(adapted.model, Reference(adapted).active)


def trl_tokenizer(run: AnyRun) -> PreTrainedTokenizerBase:
    """Return the tokenizer for TRL's trainers, their `processing_class`, which formats chats as the run file says.

    Its chat template is that of `data.chat_template`, with the arguments of `data.template` as defaults.

    Args:
        run: a resolved run, the values of a run file, or its path.

    Raises:
        UserError: there is no tokenizer or no such template, or the template reads no such argument.
    """
    from moetune.training.data.load import set_template, tokenizer_of  # imports datasets, which predictions do not need

    run = resolve(run)
    tokenizer = tokenizer_of(run.model.source.name, run.model.source.folder)
    if run.config.data is not None:
        set_template(tokenizer, run.config.data)
    return tokenizer


def trl_arguments(run: AnyRun, trainer: TrlTrainer) -> dict[str, Any]:
    """Return the arguments of a TRL configuration, such as `DPOConfig`, with which a run trains as its run file says.

    They are those of the run file that TRL has, and those whose defaults in TRL would waste memory or break a quantized
    model (docs/guides/preferences.md says why). What a run file does not have, such as `beta`, is left to TRL.

    Args:
        run: a resolved run, the values of a run file, or its path.
        trainer: `sft`, `dpo`, `kto`, `orpo` or `grpo`.

    Raises:
        UserError: TRL has no such trainer here, or the run's optimizer does not exist in transformers' Trainer; or TRL
            would ignore settings of the run file that change what is learned.
    """
    if trainer not in TRAINERS:
        raise UserError(f"no arguments for the trainer {trainer!r}: {', '.join(TRAINERS)}.{suggest(trainer, TRAINERS)}")
    run = resolve(run)
    _refuse_what_trl_lacks(run, trainer)
    config, train = run.config, run.config.train
    if config.model.dtype == "bf16" and (parts := sorted({*run.parts.values()} - {"lora"})):
        warnings.warn(
            f"TRL's optimizers update {' and '.join(parts)} in bf16, without a float32 copy: changes of less than a "
            "256th of a weight are lost; set model.dtype: fp32, or train with moetune train, which has "
            "optimizer.master_weights: fp32 and stochastic",
            stacklevel=2,
        )
    arguments = {
        "per_device_train_batch_size": train.micro_batch,
        "per_device_eval_batch_size": train.eval_micro_batch or train.micro_batch,
        "gradient_accumulation_steps": train.accumulate,
        **({"max_steps": train.steps} if train.epochs is None else {"num_train_epochs": train.epochs}),
        **_optimizer_arguments(run),
        "lr_scheduler_type": "constant_with_warmup" if train.schedule == "constant" else train.schedule,
        "warmup_steps": train.warmup,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "logging_steps": train.log_every,
        "save_strategy": "no",
        "report_to": list(train.report_to) or "none",
        "use_cpu": run.device_type == "cpu",
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
    }
    if config.output is not None:
        arguments["output_dir"] = config.output
    if trainer == "grpo":
        completions = train.micro_batch * train.accumulate
        arguments["num_generations"] = next((n for n in range(8, 1, -1) if completions % n == 0), completions)
        arguments["max_completion_length"] = min(512, train.sequence_length // 2)
        arguments["generation_kwargs"] = {"use_cache": True}
    else:
        arguments["max_length"] = train.sequence_length
    if trainer != "orpo":
        arguments["router_aux_loss_coef"] = train.router_aux_loss
    if trainer in ("dpo", "kto"):
        arguments["precompute_ref_log_probs"] = True
    return arguments


def prompt_length(config: RunConfig, completion: Any) -> int:
    """Return how many tokens a prompt of GRPO may have, so that with `completion` tokens after it, TRL's
    `max_completion_length`, it fits `train.sequence_length`. Raise `UserError` if that is none."""
    if not isinstance(completion, int) or not 0 < completion < config.train.sequence_length:
        raise UserError(
            f"max_completion_length={completion}: give 1 to {config.train.sequence_length - 1}, so that a prompt has a "
            f"token of train.sequence_length = {config.train.sequence_length}"
        )
    return config.train.sequence_length - completion


def _refuse_what_trl_lacks(run: ResolvedRun, trainer: TrlTrainer) -> None:
    """Raise one `UserError` that names all settings that TRL would ignore and that change what is learned, or ask for
    another order of micro-batches."""
    train, lora, usual = run.config.train, run.config.adapt.lora, TrainConfig()
    keys = ("max_grad_value", "on_nonfinite", "router_z_loss", "router_aux_scope", "router_bias_rate", "early_stopping")
    ignored = [f"train.{key}: {value}" for key in keys if (value := getattr(train, key)) != getattr(usual, key)]
    kind = type(run.model.plain)
    if train.router_aux_loss and not hasattr(sys.modules[kind.__module__], "load_balancing_loss_func"):
        ignored.append(f"train.router_aux_loss: {train.router_aux_loss}, since {kind.__name__} has no such loss")
    elif train.router_aux_loss and trainer == "orpo":
        ignored.append(f"train.router_aux_loss: {train.router_aux_loss}")
    if run.layer_by_layer:
        ignored.append("train.layer_by_layer: true")
    if lora is not None and lora.lr_ratio != 1:
        ignored.append(f"adapt.lora.lr_ratio: {lora.lr_ratio:g}")
    if lora is not None and lora.dtype == "bf16":
        ignored.append("the stochastic rounding of adapt.lora.dtype: bf16")
    if run.config.model.dtype == "fp16":
        ignored.append("the loss scale of model.dtype: fp16")
    thirds = {beta for optimizer in run.optimizers.values() for beta in (optimizer.betas or ())[2:]}
    ignored += [f"the third of optimizer.betas, {beta:g}" for beta in thirds if beta != _THIRD_BETA]
    if ignored:
        raise UserError(
            f"TRL's trainers would ignore {', '.join(ignored)}; leave that out, or train with moetune train"
        )


def _optimizer_arguments(run: ResolvedRun) -> dict[str, Any]:
    """Return the arguments of the run's optimizer; raise `UserError` if transformers' Trainer has none like it."""
    optimizer, *rest = set(run.optimizers.values())
    if rest:
        raise UserError("TRL's trainers have one optimizer; give optimizer: one name, for all parts")
    momentum = optimizer.momentum and 0.0
    plain = optimizer.but(fused_backward=False, offload=False, master_weights="none", momentum=momentum)
    if optimizer.name not in _OPTIMIZERS or optimizer != plain:
        named = [optimizer.name, *(key for key, value in optimizer if value != getattr(plain, key))]
        raise UserError(
            f"TRL's trainers have no optimizer like {' with '.join(named)}; use one of {', '.join(_OPTIMIZERS)}, "
            "without fused_backward, offload, master_weights and momentum"
        )
    betas = optimizer.betas or (None, None)
    arguments = {
        "optim": _OPTIMIZERS[optimizer.name],
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": optimizer.eps,
    }
    return {name: value for name, value in arguments.items() if value is not None}
