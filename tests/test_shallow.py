"""Which of a deep model's layers a shallow one's stand for."""

import pytest
import torch
from zoo import tiny

from normgeo.conversion.shallow import Spread, check_alike, shallow_model, spread
from normgeo.errors import ConversionError


def test_layers_at_other_places_are_not_guessed():
    """Where the last layer is of a kind that no shallow model ends with, all layers of its kind must be alike."""
    shallow, deep = (torch.nn.ModuleDict({"h": torch.nn.ModuleList()}) for _ in range(2))
    for model, kinds in ((shallow, "aba"), (deep, "ababab")):
        for kind in kinds:
            model["h"].append(torch.nn.Linear(2, 2 + (kind == "b")))
    to = spread(deep, shallow)
    assert to.assigned == {"h": (0, 1, 0, 1, 0, 1)}
    assert to.unsure == {("h", (1,))}
    with pytest.raises(ConversionError, match="layers of h are treated in different ways"):
        check_alike(to, [])
    to = Spread(to.assigned, frozenset({("h", (0, 2))}))
    check_alike(to, [("h.0.weight", 1), ("h.2.weight", 1), ("h.1.bias", 0)])
    with pytest.raises(ConversionError, match="convert it in memory"):
        check_alike(to, [("h.0.weight", 1), ("h.2.weight", 0)])


def test_as_many_layers_are_looked_at_as_end_like_the_model():
    """GPT-Neo's layers alternate; of six, four are looked at, for the last to be of the last one's kind."""
    model = tiny("gpt_neo", num_layers=6, attention_types=[[["global", "local"], 3]])
    _, to = shallow_model(type(model), model.config)
    assert not to.unsure
    assert to.depth == 3  # they have the same parameters
