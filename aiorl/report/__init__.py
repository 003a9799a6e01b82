"""The place of `python -m aiorl.report.plot`, which earlier versions had for `python -m
aiorl.plot`.
"""
