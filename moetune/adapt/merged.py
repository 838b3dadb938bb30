"""Linear layers under `train.merge_into`: those with LoRA compute with the rounded merged weight."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from moetune.adapt.layers.low_rank import merged
from moetune.compat.peft import merge_in_forward
from moetune.errors import UserError, raise_problems
from moetune.formats.base import largest_of
from moetune.formats.rounding import joined_name, rounding_into
from moetune.run.merge_into import rounded_names, unmerged
from moetune.run.resolved import ResolvedRun
from moetune.tensor_files import Stored


@torch.no_grad()
def round_linears(
    model: PreTrainedModel, run: ResolvedRun, held: ResolvedRun, base: Mapping[str, Stored] | None
) -> None:
    """Make linear layers outside of experts compute with what `export --into` writes: those that are frozen are rounded
    here, unless the base is published so, those with LoRA in each forward pass.

    Args:
        model: the model with LoRA.
        run, held: the run, and the run with only the layers that this rank holds.
        base: the tensors of the base checkpoint; None on the meta device and for random weights.

    Raises:
        UserError: the base is quantized otherwise than its configuration says, and training cannot round so.
    """
    rounding, into = run.rounding, run.config.train.merge_into
    assert rounding is not None
    assert into is not None
    if base is not None and rounding_into(into, run.model.source.quantization.base, base.values()) != rounding:
        raise UserError(f"train.merge_into: not all of {run.config.model.path!r} is in {into}; leave it out")
    names = rounded_names(run.model, rounding, base)
    raise_problems(unmerged(run, names))
    linears: dict[str, Any] = {}
    for path in held.structure.linears():
        if f"{path}.weight" in names:
            linear = model.get_submodule(path)
            linears[path] = getattr(linear, "base_layer", linear)
    joined: dict[str, float] = {}
    for path, linear in linears.items():
        if not rounding.keep and not linear.weight.is_meta:
            name = joined_name(path)
            joined[name] = max(joined.get(name, 0.0), float(largest_of(linear.weight)))
    for path, linear in linears.items():
        of_base = joined.get(joined_name(path), 1.0)
        if path in held.selection.lora_linears:
            merge_in_forward(model.get_submodule(path), partial(merged, rounding=rounding, of_base=of_base))
        elif not rounding.keep and not linear.weight.is_meta:
            weight = linear.weight.data
            weight.copy_(rounding.rounded([weight.float()], 1, weight.dtype, of_base=of_base)[0])
