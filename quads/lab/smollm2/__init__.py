"""A mixture of experts from a dense model (SmolLM2), and its supervised warm-up. Nothing else needs this room."""
