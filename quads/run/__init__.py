"""A run on disk: checkpoints, metrics, its folder, and how it is stopped.

checkpoint.py draws the states of a save; stop there unless you change what is saved (checkpoint_state.py). metrics.py
writes what a step measured, measure.py times it, folder.py names who ran what, signals.py ends a run.
"""
