"""Operators of the experts' forward and backward, in torch and in Triton."""

INT8_STEP = 7.874015718698502e-3
"""1/127 as bitsandbytes writes it: int8 dequantization multiplies data · absmax · INT8_STEP."""
FP8_BLOCK = 128
"""Rows, and columns, of a block of weights that share one scale in FP8."""
AT_ONCE = 1 << 22
"""Weights that are scaled in float32 at a time; they take 16 MiB."""
