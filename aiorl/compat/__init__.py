"""RLlib's older faces over today's parts: nothing in ``sampling`` or below imports from here."""
