"""`moetune quantize --predict`: the memory of quantizing, by its own code on fake tensors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetune.adapt.weights.published import CheckpointReader
from moetune.adapt.weights.quantize import target_of
from moetune.adapt.weights.quantized_base import plain_tensors, rest_of
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.fake_mode import QuickFakeMode, add_missing_fakes, answering_no
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.nf4 import BLOCK, Nf4
from moetune.memory.about import base_in_words
from moetune.memory.commands.unread import Reading, described, report_of, unread
from moetune.memory.report import MemoryReport
from moetune.memory.trace.tracing import refusing_values
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import Gpu
from moetune.models.hub.key_mapping import KeyMapping, key_mappings, published_tensors
from moetune.run.resolve import ResolvedModel
from moetune.tensor_files import NAMES, Stored


def predict_quantize(model: ResolvedModel, gpu: str | Gpu | None = None) -> MemoryReport:
    """Predict the peak memory of `quantize`, on a GPU, or on this machine's CPU (`gpu` None).

    Of layers whose experts have equal shapes only one is quantized, because each is written before the next is read. If
    the checkpoint is not on this machine, it is taken to be stored as transformers stores models of its type.

    Raises:
        NotTraceable: how to read the checkpoint's format depends on stored values, which fake tensors do not have.
        UserError: the tensors of the checkpoint do not fit the model.
    """
    folder = model.source.local_folder()
    tensors = _published(model) if folder is None else open_checkpoint(folder)
    add_missing_fakes()
    tracker, device = Tracker({}, on_cpu=gpu is None), torch.device("cpu")
    reading = Reading(tracker, device, gpu is not None)
    stored = unread(tensors, reading)
    target, on_meta = target_of(model, device, kind=_FakeTarget), target_of(model, torch.device("meta"))
    reader = CheckpointReader(folder or Path(), model.plain, model.source.name, target, stored)
    for format in {*target.formats.values()}:
        tiny = QuantizedExperts(1, (BLOCK, BLOCK), format.name, double_quant=model.config.double_quant)
        tiny.quantize_(0, torch.zeros(BLOCK, BLOCK))  # creates the real lookup tables that bitsandbytes caches
    different = {(layer.shape, target.formats[path]): path for path, layer in target.layers.items()}
    target.banks |= {path: on_meta.bank(path) for path in different.values()}  # its tables need real tensors
    del on_meta
    mappings = key_mappings(model.plain, stored)
    with refusing_values(model.config.path, model.structure.model_type), QuickFakeMode(), tracker, torch.no_grad():
        _convert(target, reader, stored, mappings, reading)
    name = model.config.path
    return report_of(tracker, name, {"quantizes": f"{name} to {base_in_words(model.config)}"}, gpu)


def _published(model: ResolvedModel) -> dict[str, Stored]:
    """Return name -> stored tensor, as a published checkpoint of a model has them: in the dtype of its config.json, or
    in bfloat16."""
    dtype = model.source.config.dtype
    return described(published_tensors(model.plain), NAMES[dtype if isinstance(dtype, torch.dtype) else torch.bfloat16])


def _convert(
    target: LoadTarget,
    reader: CheckpointReader,
    stored: dict[str, Stored],
    mappings: dict[str, KeyMapping],
    reading: Reading,
) -> None:
    """Read and quantize as `quantize` does: the experts of each layer by `reader` into `target`, then all other
    tensors; `reading` copies to the host what would be written.

    `stored` are the checkpoint's tensors by name; `mappings` say which of them each parameter is made of.
    """
    for path in target.layers:
        if path in target.banks:
            target.bank(path).to_empty(device=target.device)
            reader.read_experts(path)
            written = [reading.on_host(tensor) for tensor in target.bank(path).buffers()]
            del written
        target.release(path)
    with answering_no():  # whether a buffer that was computed is not a number
        reader.read_rest(target.model)
    tensors = rest_of(plain_tensors(target.model), stored, mappings)
    written = [reading.on_host(tensor) for tensor in tensors.values()]
    del written


class _FakeTarget(LoadTarget):
    """A model whose linear layers are quantized to NF4 on fake tensors: bitsandbytes' parameters cannot hold these, so
    buffers of a plain module take their place."""

    def put_linear(self, path: str, weight: Tensor) -> None:
        if not isinstance(format := self.formats[path], Nf4):
            super().put_linear(path, weight)
            return
        linear: Any = self.model.get_submodule(path)
        holder = nn.Module()
        for name, tensor in format.quantized(weight.contiguous()).items():
            holder.register_buffer("weight" if name == "data" else name, tensor)
        holder.register_parameter("bias", linear.bias)
        self.model.set_submodule(path, holder)
