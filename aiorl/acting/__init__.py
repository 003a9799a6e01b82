"""Acting: policies, action distributions and postprocessing, on NumPy and ONNX Runtime only."""
