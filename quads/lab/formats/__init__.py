"""Recipes x formats in one table: the log-prob gap of each pair on fixed tokens, and what RL makes of it."""
