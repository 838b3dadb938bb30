"""The experts' operators, in torch and in Triton."""

INT8_STEP = 7.874015718698502e-3
"""1/127, as bitsandbytes writes it."""
