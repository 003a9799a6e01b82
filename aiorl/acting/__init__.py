"""Acting: policies, distributions, filters, checkpoints and loaded policies, on NumPy and ONNX Runtime only."""
