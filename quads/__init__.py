"""quads: 4-bit reinforcement learning for mixture-of-experts models (arXiv 2607.15810)."""
