"""Acting: policies, distributions, filters, checkpoints and loaded policies, with only NumPy and
ONNX Runtime.
"""
