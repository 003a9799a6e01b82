"""Algorithms, one folder each: config.py, algorithm.py, update.py and a README naming the paper.

Configs load without TensorFlow; `aiorl.learning.algorithms.registry` finds everything by name.
"""
