"""A decoder-only transformer over bytes, small enough for a laptop."""

import keras
from keras import layers, ops

BYTES = 256


class Block(layers.Layer):
    """Attention to what came before, then a network of its own for each position."""

    def __init__(self, width: int):
        """Make a block of ``width`` features."""
        super().__init__()
        self.attention_norm = layers.LayerNormalization(epsilon=1e-5)
        self.attention = layers.MultiHeadAttention(width // 32, 32)
        self.network_norm = layers.LayerNormalization(epsilon=1e-5)
        self.widen = layers.Dense(4 * width, activation="relu")
        self.narrow = layers.Dense(width)

    def call(self, hidden):
        """Map activations (batch x length x width) to new ones."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed, use_causal_mask=True)
        return hidden + self.narrow(self.widen(self.network_norm(hidden)))


class Transformer(keras.Model):
    """Predicts the next byte at every position; the embedding doubles as the output layer."""

    def __init__(self, context: int, width: int, depth: int):
        """Make ``depth`` blocks of ``width`` features for texts of up to ``context`` bytes."""
        super().__init__()
        small = keras.initializers.RandomNormal(stddev=0.02)
        self.embedding = layers.Embedding(BYTES, width, embeddings_initializer=small)
        self.position = self.add_weight((context, width), small.clone(), name="position")
        self.blocks = [Block(width) for _ in range(depth)]
        self.norm = layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens):
        """Map bytes (int32, batch x length) to scores (batch x length x 256)."""
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return ops.matmul(self.norm(hidden), ops.transpose(self.embedding.embeddings))
