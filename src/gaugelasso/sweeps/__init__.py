"""Sweeps: many runs (seeds and arms) side by side, as local processes or cluster jobs."""
