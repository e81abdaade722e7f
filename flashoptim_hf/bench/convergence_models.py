"""Small models for `bench convergence`: a byte-level GPT, and a ResNet and a ViT for 8x8 images in ten classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES, CLASSES, SIDE, PATCH = 256, 10, 8, 2


class Block(nn.Module):
    """A transformer block: attention and an MLP, each behind a LayerNorm.

    Args:
        width: of a token; a multiple of `heads`.
        heads: of the attention.
        causal: whether a token sees only those before it.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Bytes to logits of the next byte.

    Args:
        width, layers: of the transformer; heads of 32.
        length: most tokens of a sequence.
    """

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 32, causal=True) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [batch, tokens] to [batch, tokens, BYTES]."""
        return self.head(self.blocks(self.tokens(ids) + self.places[: ids.shape[1]]))


class Vit(nn.Module):
    """Images to logits of their class: patches of 2x2, mean over tokens.

    Args:
        width, layers: of the transformer; heads of 16.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, width // 16, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, SIDE, SIDE] to [batch, CLASSES]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm beside a shortcut, which is a 1x1 convolution where channels or size change."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if inside != outside or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inside, n, n] to [batch, outside, n / stride, n / stride]."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images to logits of their class: `layers` blocks at 8x8, as many at 4x4 with twice the channels.

    Args:
        width: channels of the first half.
        layers: blocks in each half.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        halves = [(width, width, 1)] * layers + [(width, 2 * width, 2)] + [(2 * width, 2 * width, 1)] * (layers - 1)
        self.blocks = nn.Sequential(*(Residual(*shape) for shape in halves))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, SIDE, SIDE] to [batch, CLASSES]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
