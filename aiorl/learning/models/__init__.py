"""Networks on TensorFlow and Keras, their action distributions, and the export of their acting
graphs.
"""
