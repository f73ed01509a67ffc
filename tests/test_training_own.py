"""Training with what one hands over in Python."""

import pytest
from training_zoo import small, text_like, trained

from normgeo.errors import DataError


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        (lambda: text_like(200, context=17), "contexts of 17 tokens are longer than the model's 16"),
        (lambda: text_like(200, vocabulary=60), "array has the id 58, beyond a vocabulary of 48"),
    ],
)
def test_held_out_text_of_another_model_is_refused(held_out, says):
    with pytest.raises(DataError, match=says):
        trained("rmsnorm", small(steps=2, evaluate_every=1), held_out=held_out())
