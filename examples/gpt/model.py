"""A GPT over characters, as small as one likes: causal attention, pre-norm blocks, tied embeddings."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""What it reads and writes: fixed, so that a model means the same whatever text it was trained on."""
_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}


def encode(text: str) -> torch.Tensor:
    """The numbers of the characters; those it does not know are left out."""
    return torch.tensor([_NUMBERS[character] for character in text if character in _NUMBERS], dtype=torch.uint8)


def decode(numbers: torch.Tensor) -> str:
    """The text again."""
    return "".join(CHARACTERS[number] for number in numbers.tolist())


class Block(nn.Module):
    """Attention and a small network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.to_attention = nn.Linear(width, 3 * width)
        self.from_attention = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        mixed = self.to_attention(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_attention(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(x)


class GPT(nn.Module):
    """Scores for the next character at every place of a text."""

    def __init__(self, *, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.after = nn.LayerNorm(width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) numbers of characters to (batch, length, characters) scores."""
        x = self.characters(text.long()) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.after(self.blocks(x)) @ self.characters.weight.T

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """How badly it foresees each character of (batch, length + 1) from those before it: the mean, in nats."""
        scores = self(windows[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten().long())

    @torch.no_grad()
    def write(self, beginning: str, length: int, *, seed: int, temperature: float = 0.8) -> str:
        """Go on with a text, character by character; the same seed writes the same."""
        device = self.characters.weight.device
        text = encode(beginning).to(device)
        chance = torch.Generator().manual_seed(seed)
        for _ in range(length):
            scores = self(text[None, -self.context :])[0, -1] / temperature
            following = torch.multinomial(scores.softmax(0).cpu(), 1, generator=chance)
            text = torch.cat([text, following.to(text)])
        return decode(text)
