r"""How far one model's outputs are from another's: sums over positions in float64, batch by batch.

With p and q the softmax of the reference's and the other model's logits at a position, in nats:

    KL(p || q) = sum_i p_i (log p_i - log q_i)        perplexity = exp(mean over predictions of -log q[next token])

Nothing that is kept grows with the number of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Agreement", "next_tokens", "wide"]

AT_ONCE = 1 << 18
"""Logits in float64 at once on a CPU: 2 MiB stay in the cache, which is three times as fast as 32 MiB."""
ON_A_DEVICE = 1 << 23
"""And elsewhere, where every sum is waited for: 64 MiB, of which there are half a dozen."""


def next_tokens(ids: Int[Tensor, "*rows time"]) -> Int[Tensor, "*rows time"]:
    """The token behind each token in the same context, -1 behind the last: what a causal model predicts there.

    >>> next_tokens(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -1]]
    """
    return torch.cat([ids[..., 1:], torch.full_like(ids[..., :1], -1)], dim=-1)


def _ruled_out(x: Tensor) -> Tensor:
    """Which logits are no numbers of the model's, but the least there is: of tokens that it must not give."""
    return x == torch.finfo(x.dtype).min


def wide(x: Tensor) -> Tensor:
    """The same in float64, where the device has that."""
    return (x.cpu() if x.device.type == "mps" else x).double()  # MPS has no float64


@dataclass
class Agreement:
    """Sums over positions of what tells a model's outputs from the reference's.

    Attributes:
        positions: positions compared.
        error_max, error_square: largest |difference| of an output, and the sum of squared differences.
        reference_max, reference_square: the same of the reference's outputs themselves.
        kl_sum, kl_max: KL(reference || model) in nats, summed and largest over positions.
        same_top: positions where both prefer the same token.
        nats, predictions: -log q of the next tokens, summed, and how many there were.
    """

    positions: int = 0
    error_max: float = 0.0
    error_square: float = 0.0
    reference_max: float = 0.0
    reference_square: float = 0.0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    same_top: int = 0
    nats: float = 0.0
    predictions: int = 0

    def add(
        self,
        reference: Float[Tensor, "positions width"],
        other: Float[Tensor, "positions width"],
        following: Int[Tensor, " positions"] | None = None,
        *,
        logits: bool = True,
    ) -> None:
        """Take the outputs of both models at the same positions.

        Args:
            reference: the reference's outputs.
            other: the model's.
            following: the next token at each position, -1 where there is none; None where none is predicted.
            logits: whether the outputs are logits of several classes; of hidden states, and of a single score, there is
                no KL, no token preferred, no loss.

        What both have ruled out, by the least number of their dtype, is in no error.
        """
        step = max(1, (AT_ONCE if reference.device.type in ("cpu", "mps") else ON_A_DEVICE) // reference.shape[-1])
        for start in range(0, len(reference), step):
            part = slice(start, start + step)
            x = wide(reference[part])
            y = x if other is reference else wide(other[part]).to(x.device)
            self._errors(x, y, _ruled_out(reference[part]) & _ruled_out(other[part]).to(x.device))
            if logits:
                self._probabilities(x, y, None if following is None else following[part].to(x.device))

    def _errors(self, x: Tensor, y: Tensor, nothing: Tensor) -> None:
        if nothing.any():
            x, y = x.masked_fill(nothing, 0.0), y.masked_fill(nothing, 0.0)
        difference = x - y
        self.positions += len(x)
        self.error_max = max(self.error_max, difference.abs().max().item())
        self.error_square += difference.square().sum().item()
        self.reference_max = max(self.reference_max, x.abs().max().item())
        self.reference_square += x.square().sum().item()

    def _probabilities(self, x: Tensor, y: Tensor, following: Tensor | None) -> None:
        log_p = x.log_softmax(-1)
        log_q = log_p if y is x else y.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)  # never negative but by rounding
        self.kl_sum += kl.sum().item()
        self.kl_max = max(self.kl_max, kl.max().item())
        self.same_top += int((x.argmax(-1) == y.argmax(-1)).sum())
        if following is not None:
            known = following >= 0
            self.nats -= log_q[known, following[known]].sum().item()
            self.predictions += int(known.sum())

    def metrics(self, *, logits: bool = True) -> dict[str, float]:
        """What the sums come to; NaN where it has no meaning (see `add`)."""
        n = self.positions
        loss = self.nats / self.predictions if self.predictions else math.nan
        return {
            "cross_entropy": loss,
            "perplexity": math.exp(loss) if not loss > 700 else math.inf,
            "kl_mean": self.kl_sum / n if logits else math.nan,
            "kl_max": self.kl_max if logits else math.nan,
            "top1": self.same_top / n if logits else math.nan,
            "error_max": self.error_max,
            "error_max_rel": _ratio(self.error_max, self.reference_max),
            "error_rms_rel": math.sqrt(_ratio(self.error_square, self.reference_square)),
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else (0.0 if a == 0 else math.inf)
