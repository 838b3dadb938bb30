"""`moetune doctor`: checks of this machine and of a run file on it."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.requirements import Requirement

from moetune.adapt.guard import compared, compared_as
from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted
from moetune.files import free_bytes
from moetune.memory.allocator import allocator_here
from moetune.memory.host import process_here, this_machine
from moetune.memory.measurement.live import processes_on
from moetune.memory.measurement.measure import catalog_name
from moetune.planning.predict import predict
from moetune.report.units import gib
from moetune.run.dtypes import this_device
from moetune.run.resolve import resolve

Outcome = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked, such as `Python` or a package.
        outcome: `ok`; `problem` if a run would fail; `note` if a run would work, but the finding is worth knowing.
        found: what was found, such as a version or free memory.
        remedy: what the user can do; empty if the outcome is `ok`.
    """

    name: str
    outcome: Outcome
    found: str
    remedy: str = ""


def _check(is_right: bool, name: str, found: str, remedy: str, otherwise: Outcome = "problem") -> Check:
    """Return a check that is `ok` if `is_right`, else has the outcome `otherwise` and the remedy."""
    return Check(name, "ok", found) if is_right else Check(name, otherwise, found, remedy)


def examine_machine() -> Iterator[Check]:
    """Yield the checks of what every run on this machine needs: packages, CUDA, GPUs, kernels, memory and disk."""
    yield Check("Python", "ok", sys.version.split()[0])
    yield from _packages()
    from bitsandbytes.cextension import lib

    library = type(lib).__name__
    remedy = "pip install --force-reinstall bitsandbytes, of a build for this CUDA version"
    yield _check("Mock" not in library, "bitsandbytes' library", library, remedy)
    yield from _cuda()
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "none"
    remedy = "unset PYTORCH_ALLOC_CONF, or write expandable_segments:True in it"
    yield _check(allocator_here() == "expandable", "allocator settings", settings, remedy, "note")
    memory = this_machine()
    yield Check("host memory", "ok", "unknown" if memory is None else f"{gib(memory.value)} {memory.source}")
    yield Check("disk", "ok", f"{gib(free_bytes(Path()))} free in {Path().absolute()}")


def examine_run(config: RunConfig) -> Iterator[Check]:
    """Yield the checks of whether a run fits this machine: run file, kernels, number of GPUs, GPU and host memory.

    An error in the run file is a check with the outcome `problem`, not an exception.
    """
    device, kernels = this_device(), []
    try:
        run = resolve(config, device)
        if device == "cuda":  # before the prediction, which depends on what is found
            kernels = [_kernels(torch.device("cuda", 0), (compared_as(run),), "kernels at the sizes of the run")]
        card = catalog_name(torch.device("cuda", 0)) if device == "cuda" else None
        report = predict(run, gpu=card, advise=False)
    except UserError as error:
        yield Check("run file", "problem", str(error), "correct the run file")
        return
    yield Check("run file", "ok", f"{config.model.path}, for {device}")
    yield from kernels
    ranks, gpus = config.parallel.ranks, torch.cuda.device_count()
    if device == "cuda" and gpus < ranks > 1:
        finding = f"{counted(gpus, 'GPU')} for {ranks} ranks"
        yield Check("GPUs", "problem", finding, "divide the run over fewer ranks in parallel:")
    needs = report.required - report.fullest.outside_allocator
    assert report.host is not None
    host = replace(report.host, process=process_here()).required + (ranks * needs if device == "cpu" else 0)
    available = this_machine()
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]  # free memory: this process's CUDA context is already taken
        remedy = "moetune predict lists changes that save memory; nvidia-smi lists other processes on the GPU"
        yield _check(needs <= free, "GPU memory", f"{gib(needs)} needed, {gib(free)} free", remedy)
    if available is not None:
        remedy = "end other programs, or use fewer settings that move tensors to host memory"
        finding = f"{gib(host)} needed, {gib(available.value)} {available.source}"
        yield _check(host <= available.value, "host memory of the run", finding, remedy)


def _packages() -> Iterator[Check]:
    """Yield a check for each package that moetune requires: whether it is installed in a version that fits."""
    try:
        wanted = [Requirement(line) for line in metadata.requires("moetune") or ()]
    except metadata.PackageNotFoundError:
        yield Check("packages", "note", "moetune runs from its source folder, not installed", "pip install .")
        return
    for req in wanted:
        if req.marker is not None and not req.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(req.name)
        except metadata.PackageNotFoundError:
            yield Check(req.name, "problem", "not installed", f"pip install '{req}'")
            continue
        yield _check(req.specifier.contains(version, prereleases=True), req.name, version, f"pip install '{req}'")


def _cuda() -> Iterator[Check]:
    """Yield checks of torch's CUDA build, of each GPU's capability, free memory and kernels, and of NCCL."""
    if torch.version.cuda is None:
        yield Check("CUDA", "note", "torch is a CPU build: runs train on the CPU", "install a CUDA build of torch")
        return
    if not torch.cuda.is_available():
        remedy = "nvidia-smi shows the driver's CUDA version; install a newer driver, or a torch build for this version"
        yield Check("CUDA", "problem", f"torch is built for CUDA {torch.version.cuda} and finds no GPU", remedy)
        return
    yield Check("CUDA", "ok", f"torch is built for {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        remedy = "set model.dtype: fp16, because this GPU has no fast bfloat16"
        yield _check(major >= 8, name, f"compute capability {major}.{minor}", remedy, "note")
        free, total = torch.cuda.mem_get_info(number)
        processes = [f"process {proc.pid} ({proc.name}) {gib(proc.bytes)}" for proc in processes_on(device)]
        finding, remedy = f"{gib(free)} free of {gib(total)}", "end other processes on the GPU; nvidia-smi lists them"
        yield _check(free > 0.95 * total, f"{name}, memory", ", ".join([finding, *processes]), remedy, "note")
        yield _kernels(device, [*samples("bf16")], "kernels of the experts")
    if torch.cuda.device_count() > 1:
        remedy = "install a torch build with NCCL"
        yield _check(torch.distributed.is_nccl_available(), "NCCL", "for several GPUs", remedy)


def samples(dtype: str) -> Iterator[RunConfig]:
    """Yield run files of a tiny model, computed in `dtype`, that together call every operator that has a kernel."""
    lora: dict[str, Any] = {"rank": 8, "alpha": 8, "targets": ["attention", "experts"]}
    split = {"router": "all", "experts": {"ids": [0, 2]}, "lora": lora | {"gate_up": "split", "ids": [1, 3]}}
    runs = [(base, {"lora": lora}, "auto") for base in ("nf4", "int8", "fp8", "nvfp4", "mxfp4", "int4-g32")]
    for base, adapt, memory in (*runs, ("nf4", split, "0")):
        model = {"path": "tiny-mixtral", "weights": "random", "dtype": dtype, "base": base}
        yield RunConfig.model_validate({"model": model, "adapt": adapt, "train": {"expert_memory": memory}})


def _kernels(device: torch.device, runs: Sequence[RunConfig], name: str) -> Check:
    """Run the kernels and torch's operations in the calls of `runs`; return the check, called `name`, of whether they
    agree. The first call compiles the kernels, which takes seconds."""
    verdict = compared(device, runs)
    failures = [f"{operator} {why}" for operator, why in verdict.failed.items()]
    if verdict.stopped:
        failures.append(f"not compared: {verdict.stopped}")
    remedy = "torch's slower operations run instead; install gcc, Python's headers, and the Triton that torch requires"
    return _check(not failures, name, "; ".join(failures) or "agree with torch's operations", remedy, "note")
