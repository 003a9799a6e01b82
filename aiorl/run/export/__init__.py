"""Trained policies as files that run without aiorl: ONNX, SavedModel, Keras and TFLite."""
