"""The experts' kernels as a GPU has them, executed without one.

Triton compiles the kernels for a compute capability as on a GPU. Their PTX, the compiler's last text before machine
code, is executed here by numpy, and the results are compared with torch's operations. An access outside of the kernel's
tensors, a misaligned one, a race in shared memory or a barrier that some threads never reach is a `Fault`. What is not
shown: machine code, time, the exactness of approximate instructions. An instruction that these kernels do not use
raises NotImplementedError; add it to instructions.py when a kernel needs it.

To run one kernel, on tensors of the CPU and with Triton installed:

    from tests.ptx.driver import emulated
    with torch.no_grad(), emulated(86):
        act = triton_kernels.gated(gate_up, False, 1.0, 0.0)

The tests run with `pytest -m ptx tests/ptx`, and in scripts/test_cuda.sh; more of them with `--all`.
"""
