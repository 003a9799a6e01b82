"""Older interfaces of RLlib on top of aiorl's parts;

``sampling`` and lower packages import nothing from here.
"""
