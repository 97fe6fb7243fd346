"""What a run needs, without the hardware: memory by phase, times of a step, and what would make it fit or go faster.

You may stop at `__main__.py`, which prints all of it. `arrangement.py` adds up memory, `rollout_time.py` and
`learn_time.py` are the two large terms of a step, `lengths.py` says how long responses are, `compare.py` holds a plan
against a run.
"""
