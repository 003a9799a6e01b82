"""APPO: asynchronous proximal policy optimisation."""
