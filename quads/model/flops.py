"""FLOPs of training, from the shapes of a model."""

from collections.abc import Iterable

from quads.model.config import ModelConfig


def train_flops(config: ModelConfig, lengths: Iterable[int]) -> float:
    """Model FLOPs of forward and backward over sequences of so many tokens; what is computed again is not counted.

    A token: 6 for each parameter that it meets (not the embedding, a table). A pair of tokens of which one attends to
    the other: 12 for each channel of each head of each layer; a sequence of L tokens has L * L / 2.
    """
    c, sizes = config, list(lengths)
    table = 0 if c.tie_embeddings else c.vocab_size * c.hidden_size  # a tied one is the output head, too
    active = c.num_parameters()[1] - table
    attention = 12 * c.num_layers * c.num_heads * c.head_dim
    return 6.0 * active * sum(sizes) + attention * sum(size * size for size in sizes) / 2
