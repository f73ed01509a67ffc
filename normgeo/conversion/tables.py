"""Buffers that write into a stream, such as sinusoidal positions; found by shifting them: models cut their gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.conversion.probing import INVISIBLE, outputs_of, same, site_inputs
from normgeo.converted import held_by
from normgeo.examples import example_inputs
from normgeo.sites import NormSite

__all__ = ["written_by_tables"]


@torch.no_grad()
def written_by_tables(
    model: PreTrainedModel, sites: Sequence[NormSite], inputs: dict[str, Tensor]
) -> list[tuple[str, int]]:
    """Names of buffers, and their axes, along which a shift moves what a LayerNorm is given, and no output.

    Args:
        model: in float64; it is left as it is.
        sites: its norms.
        inputs: a small input.

    Raises:
        ModelError: outputs are NaN.
    """
    layernorms = [site for site in sites if site.kind == "layernorm"]
    widths = {site.d for site in layernorms}

    def means() -> list[Tensor]:
        with site_inputs(model, layernorms) as given:
            outputs_of(model, inputs)
        return [x.mean(-1) for tensors in given.values() for x in tensors]

    wide = [(n, b) for n, b in model.named_buffers() if b.ndim > 1 and b.is_floating_point()]
    candidates = [(n, b, axis) for n, b in wide for axis, size in enumerate(b.shape) if size in widths]
    if not candidates:
        return []
    found, outputs, before = list[tuple[str, int]](), outputs_of(model, inputs), means()
    generator = torch.Generator().manual_seed(2)
    for name, buffer, axis in candidates:
        kept = buffer.clone()
        shifts = torch.randn(buffer.mean(axis, keepdim=True).shape, generator=generator)
        try:
            buffer += shifts.to(buffer)
            hidden = same(outputs, outputs_of(model, inputs), INVISIBLE)
            moves = not same(before, means(), INVISIBLE)
        finally:
            buffer.copy_(kept)
        if hidden and moves and not _made_anew(model, name, axis, inputs):
            found.append((name, axis))
    return found


def _made_anew(model: PreTrainedModel, name: str, axis: int, inputs: dict[str, Tensor]) -> bool:
    """Whether a model makes a table again that is too short: what was centered would be undone."""
    (module, last), table = held_by(model, name), model.get_buffer(name)
    short = table[tuple(slice(None) if i == axis else slice(1) for i in range(table.ndim))].clone()
    for there, longest in ((short, None), (table, max(table.shape))):  # some go by the table, some by what they noted
        setattr(module, last, there)
        with contextlib.suppress(Exception):  # it takes no longer inputs, whatever it raises then
            outputs_of(model, example_inputs(model, longest + 8) if longest else inputs)
        found = getattr(module, last)
        setattr(module, last, table)
        if found is not there:
            return True
    return False
