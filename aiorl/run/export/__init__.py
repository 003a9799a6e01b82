"""Export of trained policies to files that run without aiorl:

ONNX, SavedModel, Keras and TFLite.
"""
