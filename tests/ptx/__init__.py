"""The experts' kernels as a GPU has them, executed without one.

Triton compiles the kernels for a compute capability as on a GPU. Their PTX, the compiler's last text before machine
code, is executed here by numpy, and the results are compared with torch's operations. An access outside of the kernel's
tensors, a misaligned one, a race in shared memory or a barrier that some threads never reach is a `Fault`. Kernels are
compiled for every capability; the same instructions on the same values are executed once. What is not shown: machine
code, time, the exactness of approximate instructions. An instruction that these kernels do not use raises
NotImplementedError; add it to instructions.py when a kernel needs it.

To run one kernel, on tensors of the CPU and with Triton installed:

    from tests.ptx.driver import emulated
    with torch.no_grad(), emulated(86):
        act = triton_kernels.gated(gate_up, False, 1.0, 0.0)

The tests run with `pytest -m ptx tests/ptx`, and in scripts/test_cuda.sh; more of them with `--all`. With another
Triton, as in scripts/test_cuda.sh --all: `pip install --no-deps --target FOLDER triton==3.9.0`, PYTHONPATH=FOLDER.

| | on a push | with `--all` also |
|---|---|---|
| capabilities | 8.6, 9.0 | 8.0, 8.9, 10.0, 12.0 |
| ranks | 1 to 64 in random calls; 12, 64, 300 | 4 to 1,024: eleven on 8.6 and 9.0, five elsewhere |
| odd sizes | 20 random calls: widths from 7, ranks 20 and 48 | 40 more, by turns |
| real widths | none | Mixtral, Qwen3, gpt-oss, OLMoE |
| shared memory of a block | of all that runs | Qwen3's widths to rank 256, float32 to 64 |
| Triton | the installed one | 3.8 and 3.9: every kernel on every capability |

Grouped products are torch's on 9.0. On 10.0 they are compiled and not executed, because tcgen05 is not emulated.
"""
