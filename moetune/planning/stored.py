"""`Stored` and `least_bytes`: a lower bound of the GPU memory that a run needs, from the sizes of what it stores."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from moetune.config.schema import LINEAR_STORAGES, ModelConfig, Part, RunConfig, Storage
from moetune.experts.quantized import QuantizedExperts
from moetune.models.selection import NOTHING
from moetune.run.linears import linears_to_quantize
from moetune.run.resolved import ResolvedModel
from moetune.training.optim.saved import saved_bytes


@dataclass(frozen=True)
class Stored:
    """Sizes in bytes of a model's frozen weights, with their scales, if a single rank stores all of them.

    Attributes:
        experts: all experts of all layers.
        expert: one expert, the largest if layers differ.
        weights: parameters of that expert; a count, not bytes. 0, as `expert`, for a dense model.
        two_layers: all experts of two layers that follow each other, the smallest such pair; 0 with fewer than two.
        layers: number of layers with experts; a count.
        rest: everything but the experts.
    """

    experts: int
    expert: int
    weights: int
    two_layers: int
    layers: int
    rest: int

    @classmethod
    def of(cls, model: ResolvedModel, section: ModelConfig) -> "Stored":
        """Return the sizes in the storage of the `model:` section `section`, whose `base` is not `auto`."""
        assert section.base != "auto"
        base, double_quant, width = section.base, section.double_quant, model.dtype.itemsize
        structure, quantization = model.structure, model.source.quantization
        layers: list[int] = []
        largest, weights = 0, 0
        for layer in structure.moe_layers:
            shape = layer.shape
            split = quantization.keeps_gate_up_apart(section) and shape.can_be_split
            expert = _matrix((shape.gate_up_rows, shape.hidden), base, double_quant, 2 if split else 1)
            expert += _matrix((shape.hidden, shape.intermediate), base, double_quant)
            expert += (shape.gate_up_rows + shape.hidden) * width if shape.has_bias else 0
            layers.append(shape.num_experts * expert)
            largest, weights = max((largest, weights), (expert, shape.parameters_per_expert))
        rest = width * sum(part.numel for part in structure.parameters if part.component != "experts")
        if base in LINEAR_STORAGES:
            linears = structure.linears()
            leaves_out = partial(quantization.leaves_out, config=section)
            for path in linears_to_quantize(model.plain, structure, NOTHING, leaves_out):
                size = linears[path].out_features, linears[path].in_features
                rest += _matrix(size, base, double_quant) - size[0] * size[1] * width
        two_layers = min(map(sum, pairwise(layers)), default=0)
        return cls(sum(layers), largest, weights, two_layers, len(layers), rest)


def least_bytes(config: RunConfig, stored: Stored, experts: int = 0, lora: int = 0) -> int:
    """Return a lower bound, in bytes, of what a run stores on each GPU.

    It adds the frozen weights and, for all that trains, its gradient and what the optimizer keeps (`saved_bytes`).
    Of frozen experts that are kept on the host, two layers are on the GPU at a time (`ExpertPrefetcher`).

    Args:
        config: the run.
        stored: the model's frozen weights.
        experts: the number of experts that train, in all layers together.
        lora: the number of LoRA's parameters.
    """
    parallel = config.parallel
    needed, gradients = stored.rest // parallel.ranks, 0
    # (part, parameters, bytes of each, how often); factors are float32 (adapt/lora.py)
    parts: tuple[tuple[Part, int, int, int], ...] = (("experts", stored.weights, 2, experts), ("lora", lora, 4, 1))
    for part, numel, width, times in parts:
        if not numel * times:
            continue
        optimizer = config.optimizers[part]
        kept = width * numel if optimizer.offload else saved_bytes(optimizer, (numel,), width)
        needed += times * kept // parallel.ranks
        if not (optimizer.offload or optimizer.fused_backward):
            gradients += times * width * numel // parallel.ranks
    if config.model.experts_on != "host":  # frozen experts are divided by `ep` only
        return needed + gradients + (stored.experts - experts * stored.expert) // parallel.ep
    # in a pair of layers, at most the mean of all pairs trains
    trained = 2 * experts * stored.expert // (stored.layers - 1) if stored.layers > 1 else 0
    pair = max(0, stored.two_layers - trained) // parallel.ep
    return needed + (max(gradients, pair) if config.train.accumulate == 1 else gradients + pair)


@cache
def _matrix(shape: tuple[int, int], storage: Storage, double_quant: bool, pieces: int = 1) -> int:
    """Return the bytes of one frozen matrix [rows, columns]; bitsandbytes' linear layers take as many for NF4."""
    stack = QuantizedExperts(1, shape, storage, double_quant=double_quant, pieces=pieces, device="meta")
    tables = ("nested_code", "pairs")  # one for all matrices
    return sum(one.nbytes for name, one in stack.named_buffers() if name not in tables)
