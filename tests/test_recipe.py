"""Recipes: table 2 and appendix A.2, and what makes no sense."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from training_zoo import small, trained

from normgeo.errors import NormGeoError
from normgeo.training.recipe import SIZES, is_kept, learning_rate, recipe_for
from normgeo.training.runs import TrainConfig
from normgeo.training.twins import build_twin


def test_sizes_are_those_of_table_2():
    rows = {k: (r.layers, r.d, r.heads, r.lr, r.steps, r.context, r.batch) for k, r in SIZES.items()}
    assert rows["70m"] == (6, 512, 8, 1e-3, 100_000, 1024, 64)
    assert rows["160m"] == (12, 768, 12, 6e-4, 100_000, 1024, 64)
    assert rows["410m"] == (24, 1024, 16, 3e-4, 50_000, 1024, 64)
    assert rows["1b"] == (16, 2048, 8, 3e-4, 50_000, 1024, 64)


def test_checkpoints_are_those_of_appendix_a2():
    thousands = [*range(1000, 10_000, 1000), *range(10_000, 100_001, 10_000)]
    kept = lambda recipe: [step for step in range(recipe.steps + 1) if is_kept(step, recipe)]  # noqa: E731
    assert kept(SIZES["70m"]) == thousands
    assert kept(SIZES["1b"]) == [step for step in thousands if step <= 50_000]
    assert kept(recipe_for("70m", steps=2500)) == [1000, 2000, 2500]
    assert is_kept(10**9, recipe_for("70m", steps=2 * 10**9))


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    recipe = recipe_for("70m")
    rates = [learning_rate(s, recipe) for s in range(recipe.steps + 1)]
    assert rates[0] == recipe.lr / recipe.warmup
    assert max(rates) == rates[recipe.warmup] == recipe.lr
    assert math.isclose(rates[-1], recipe.lr / 10)
    assert all(b <= a for a, b in zip(rates[recipe.warmup :], rates[recipe.warmup + 1 :], strict=False))


def test_recipes_that_make_no_sense_are_refused(untyped):
    for changes, says in (
        ({"steps": 0}, "--steps must be at least 1"), ({"lr": math.inf}, "learning rate"), ({"heads": 5}, "multiple"),
        ({"context": 1}, "--context must be at least 2"), ({"seed": 2**63}, "--seed must be at most"),
        ({"precision": "fp8"}, "no precision 'fp8'"), ({"checkpoint_every": 0}, "--checkpoint-every"),
        ({"clip": -1.0}, "clip above 0"), ({"clip": 0.0}, "clip above 0"), ({"beta2": 1.5}, "beta2 in"),
        ({"steps": 2.0}, r"--steps must be a whole number, received 2\.0"),
        ({"lr": "1e-3"}, "--lr must be a number, received '1e-3'"), ({"steps": True}, "whole number, received True"),
        ({"weight_decay": -0.1}, "weight_decay is finite"), ({"weight_decay": math.nan}, "weight_decay is finite"),
    ):  # fmt: skip
        with pytest.raises(NormGeoError, match=says):
            recipe_for("tiny", **changes)
    assert recipe_for("tiny", clip=math.inf).clip == math.inf
    with pytest.raises(NormGeoError, match="no size 'huge'"):
        recipe_for("huge")
    with pytest.raises(NormGeoError, match="multiple of 3"):
        trained("rmsnorm", small(accumulate=3))
    with pytest.raises(NormGeoError, match="cannot train in fp16 on a CPU"):
        trained("rmsnorm", small(precision="fp16"))
    with pytest.raises(NormGeoError, match="no norm 'batchnorm'"):
        build_twin("batchnorm", small(), 48)


def test_numbers_of_numpys_are_plain_ones(untyped):
    """Which a run's record has: else it would be said after steps that nothing keeps."""
    changes = {"seed": 3, "steps": 5, "checkpoint_every": 1, "lr": 0.5, "clip": 2, "tied": False}
    given = {"seed": np.int64(3), "steps": np.int32(5), "checkpoint_every": np.uint8(1), "lr": np.float32(0.5),
             "clip": np.int64(2), "tied": np.bool_(False)}  # fmt: skip
    assert json.dumps(asdict(recipe_for("tiny", **given))) == json.dumps(asdict(recipe_for("tiny", **changes)))
    config = TrainConfig(data=Path("a.txt"), tokenizer=Path("b"), exclude=Path("c.txt"), vocabulary=np.int64(300))
    assert json.dumps(asdict(config)) == json.dumps(asdict(TrainConfig("both", "a.txt", "c.txt", "b", 300)))
    assert build_twin("rmsnorm", small(), np.int64(48)).config.vocab_size == 48


def test_half_way_through_the_decay_the_rate_is_half_way_down():
    recipe = recipe_for("tiny", steps=30, warmup=10, lr=1.0)
    assert [learning_rate(step, recipe) for step in (10, 20, 30)] == pytest.approx([1.0, 0.55, 0.1])
    assert learning_rate(29, recipe) > 0.1  # which the step after the last would have
