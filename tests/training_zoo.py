"""What the tests of training share: a recipe of seconds, ids with a pattern, articles, and the words of the command."""

import json

import numpy as np

from normgeo.tokens import TokenStream
from normgeo.training import train as training
from normgeo.training.corpus import Shuffled
from normgeo.training.recipe import recipe_for

SMALL = {"layers": 1, "d": 32, "heads": 2, "context": 16, "batch": 4, "warmup": 2, "precision": "no"}


def small(**changes):
    return recipe_for("tiny", **({"steps": 12} | SMALL | changes))


def text_like(n=3000, vocabulary=48, context=16):
    rng = np.random.default_rng(0)
    return TokenStream.from_array(np.cumsum(rng.integers(0, 3, n)) % vocabulary, context=context)


def trained(norm, recipe, folder=None, **options):
    return training.train(norm, recipe, Shuffled(text_like(), 16, 0), 48, folder, device="cpu", **options)


def stopping(function, at):
    """The function, which the user interrupts in its call number `at`."""
    calls = []

    def call(*args, **kwargs):
        calls.append(0)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return call


def articles(folder):
    texts = [{"text": f"Article {i}. " + "The quick brown fox jumps over the lazy dog. " * 40} for i in range(12)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, texts[:2])))


def command(folder, out, *more):
    words = [
        "train", "--data", folder / "text.jsonl", "--exclude", folder / "held.jsonl", "--out", folder / out,
        "--vocabulary", 300, "--context", 16, "--batch", 4, "--warmup", 2, "--checkpoint-every", 4, "--save-every", 2,
        "--precision", "no", "--device", "cpu", "--evaluate-every", 100, *more,
    ]  # fmt: skip
    return list(map(str, words))
