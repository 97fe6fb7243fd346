"""The decoder, Qwen3-MoE compatible: single-device code, for the learner and the engines alike.

Read model.py, attention.py and moe.py; linear.py is the seam where the quant room comes in. Stop there, unless you
train on several processes (parallelize.py, dispatch.py), read other checkpoints (hf.py) or care for the loss's memory
(logprobs.py).
"""
