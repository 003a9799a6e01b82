"""`aiorl launch ENGINE`: a learner and its workers on many hosts, placed and started by what people
already use.

`job` has what all engines share and describes an engine; each engine is a module of its own.
Nothing here loads TensorFlow or Gymnasium: a child process checks the learner's options.
"""
