"""A decoder-only transformer over bytes, small enough for a laptop."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


class Transformer(nn.Module):
    """Predicts the next byte at every position; the embedding doubles as the output layer."""

    def __init__(self, context: int, width: int, layers: int):
        """Make ``layers`` blocks of ``width`` features for texts of up to ``context`` bytes."""
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        block = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (int64, batch x length) to scores (batch x length x 256)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embedding(tokens) + self.position[:length]
        hidden = self.norm(self.blocks(hidden, mask=mask, is_causal=True))
        return functional.linear(hidden, self.embedding.weight)
