"""Measurements of resile beside its peers, each in one run on one machine, as ratios."""
