"""The models of *Geometry* table 1, and the pair that ships with the package: no more than their names and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ASSETS", "EMBEDDED", "TABLE_1", "ModelCard"]

ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {"embedded-layernorm": ASSETS / "layernorm", "embedded-rmsnorm": ASSETS / "rmsnorm"}
"""The pair that ships with the package: GPT-2 twins that differ in nothing but their norm."""


@dataclass(frozen=True)
class ModelCard:
    """One line of *Geometry* table 1; `revision` pins the commit of the hub repository."""

    name: str
    hub_id: str
    revision: str
    d: int
    layers: int
    norm: Literal["LayerNorm", "RMSNorm"]
    parameters: int

    @property
    def memory_gb(self) -> float:
        """Gigabytes of weights in 16-bit precision."""
        return 2 * self.parameters / 1e9


TABLE_1 = (
    ModelCard("GPT-2 XL", "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", 1600, 48,
              "LayerNorm", 1_557_611_200),
    ModelCard("GPT-Neo 1.3B", "EleutherAI/gpt-neo-1.3B", "dbe59a7f4a88d01d1ba9798d78dbe3fe038792c8", 2048, 24,
              "LayerNorm", 1_315_575_808),
    ModelCard("Pythia-1.4B", "EleutherAI/pythia-1.4b", "fedc38a16eea3bd36a96b906d78d11d2ce18ed79", 2048, 24,
              "LayerNorm", 1_414_647_808),
    ModelCard("GPT-J 6B", "EleutherAI/gpt-j-6b", "47e169305d2e8376be1d31e765533382721b2cc1", 4096, 28,
              "LayerNorm", 6_050_882_784),
    ModelCard("Pythia-6.9B", "EleutherAI/pythia-6.9b", "f271943e880e60c0c715fd10e4dc74ec4e31eb44", 4096, 32,
              "LayerNorm", 6_857_302_016),
    ModelCard("Llama-2-7B", "meta-llama/Llama-2-7b-hf", "01c7f73d771dfac7d292323805ebc428287df4f9", 4096, 32,
              "RMSNorm", 6_738_415_616),
    ModelCard("Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "8cde5ca8380496c9a6cc7ef3a8b46a0372a1d920", 4096, 32,
              "RMSNorm", 8_030_261_248),
)  # fmt: skip
"""The models of *Geometry* table 1, in its order."""
