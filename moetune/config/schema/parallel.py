"""`parallel:` and `hardware:` of a run file: ranks, and the GPUs to predict for."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from moetune.config.fields import FilePath, Gpu, HostSize, Positive, Size, Text, parse_stages
from moetune.config.schema.section import Section


class ParallelConfig(Section):
    """The ranks of a run (`parallel:`): replicate · fsdp · tp · pp processes with a GPU each.

    Attributes:
        engine: FSDP2 of torch, or DeepSpeed.
        fsdp: ranks that share one copy of the model and the optimizer states, and read different data.
        ep: number of ranks that each layer's experts are divided over, out of the replicate · fsdp · tp ranks; adds no
            rank.
        tp: ranks that split the matrices of attention, and read the same data.
        pp: ranks that divide the decoder layers among them, and read the same data: the stages of a pipeline.
        schedule: order of the stages' forward and backward passes. With `interleaved1f1b` a rank has several stages.
        stages: first and last decoder layer of each stage, such as ((0, 13), (14, 31)); `auto` divides them evenly by
            the memory that ranks need.
        replicate: groups of `fsdp` ranks, each with a copy of the model; they read different data.
        zero: what is sharded over `fsdp` ranks: 1 optimizer states, 2 also gradients, 3 also weights.
        reshard: with `zero: 3`, free gathered weights between forward and backward.
        deepspeed: a JSON file with further settings for DeepSpeed; None for none.
        offload: `optimizer` updates on the host (ZeRO-Offload of DeepSpeed).
        load: a file with tokens per expert, such as a run's memory.json, to balance experts over `ep` ranks; None to
            assume an even load.
        timeout: seconds that a rank waits for another.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    fsdp: Size = 1
    ep: Size = 1
    tp: Size = 1
    pp: Size = 1
    schedule: Literal["1f1b", "gpipe", "interleaved1f1b"] = "1f1b"
    stages: Annotated[Literal["auto"] | tuple[tuple[int, int], ...], BeforeValidator(parse_stages)] = "auto"
    replicate: Size = 1
    zero: Literal[1, 2, 3] = 3
    reshard: bool = True
    deepspeed: FilePath | None = None
    offload: Literal["none", "optimizer"] = "none"
    load: FilePath | None = None
    timeout: Positive = 600

    @property
    def ranks(self) -> int:
        """Number of ranks: replicate · fsdp · tp · pp."""
        return self.replicate * self.fsdp * self.tp * self.pp

    @model_validator(mode="after")
    def _consistent(self) -> "ParallelConfig":
        """Raise `ValueError` for `deepspeed:` without its engine, and for an `ep` that does not divide the ranks."""
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError("deepspeed: has settings of another engine; set engine: deepspeed, or leave it out")
        sharing = self.replicate * self.fsdp * self.tp
        if sharing % self.ep:
            raise ValueError(f"ep {self.ep} does not divide replicate · fsdp · tp = {sharing} ranks, which it regroups")
        return self


class HardwareConfig(Section):
    """The GPUs that memory is predicted for (`hardware:`). Training itself runs on this machine's GPUs.

    Attributes:
        gpu: a name of the GPU catalog such as `l40s`, or a memory size such as `44GiB`; None to predict without a
            limit.
        gpus: the GPU of each stage of a pipeline (`parallel.pp`), where they are of unlike sizes, in place of `gpu`.
        host_memory: memory that the machine of the GPUs has for the run, such as `64GiB`. None: unknown, except in a
            prediction for this machine's GPU, where it is what is free now.
        count: number of GPUs. `RunConfig` sets it to the number of ranks if it is not given, and refuses any other
            number.
        without_kernels: operators that run torch's operations instead of their kernel on a GPU, in training and in
            predictions. A run adds those whose kernel does not work on its machine (adapt/guard).
    """

    gpu: Gpu | None = None
    gpus: tuple[Gpu, ...] = ()
    host_memory: HostSize | None = None
    count: Size = 1
    without_kernels: tuple[Text, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The GPUs: one for all ranks, or one for each stage of a pipeline; empty if none is given."""
        return self.gpus or (() if self.gpu is None else (self.gpu,))

    @model_validator(mode="after")
    def _one_way(self) -> "HardwareConfig":
        """Raise `ValueError` for both `gpu` and `gpus`."""
        if self.gpu is not None and self.gpus:
            raise ValueError("gpu and gpus: both name the cards; leave one of them out")
        return self
