"""The learner's side of reinforcement learning: from completions with rewards to an update.

advantage.py, packing.py, loss.py and learner.py are GRPO; stop there. corrections.py has what the loss can do about a
rollout that is not quite the learner's policy, updates.py adds up, balance.py spreads sequences over processes,
mismatch.py measures the gap, scores.py and evaluate.py judge a policy, rewards/ judges single responses.
"""
