"""Models whose weights, or hidden states, are divided among several processes: measured as the whole model is."""

import re
import warnings

import blocks
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import free_port
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from zoo import tiny

from normgeo import compare, convert, find_sites, measure_angles, wrap
from normgeo.errors import NormGeoError

ATTENTION = "model.layers.*.self_attn."
HEADS = {f"{ATTENTION}{name}_proj": ColwiseParallel() for name in "qkv"} | {f"{ATTENTION}o_proj": RowwiseParallel()}


class Scaled(nn.Embedding):
    """As Gemma's: where its rows are divided, what it scales is a sum that is yet to be made, once."""

    def forward(self, ids):
        return super().forward(ids) * 2.0


def whole():
    model = blocks.built(blocks.Block)
    model.tok.__class__ = Scaled
    return model


def parallel(by_sequence):
    """A model by tensor parallelism, whose stream is whole in each process, or a part of each sequence."""
    stream = Shard(1) if by_sequence else Replicate()
    plan = {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.mix": ColwiseParallel(output_layouts=stream),
        "blocks.*.mlp.0": ColwiseParallel(input_layouts=stream),
        "blocks.*.mlp.2": RowwiseParallel(output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }  # fmt: skip
    norms = ("blocks.*.norm1", "blocks.*.norm2", "final") if by_sequence else ()
    plan |= {name: SequenceParallel() for name in norms}
    return parallelize_module(whole(), init_device_mesh("cpu", (2,)), plan)


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def angles(model, ids=blocks.IDS, **options):
    return measure_angles(model, ids, null=8, null_every=1, progress=False, **options).frame.drop(columns="model")


def refused(do, model):
    with pytest.raises(NormGeoError) as error:
        do(model)
    return str(error.value)


def rank(number, port, out):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
    torch.set_num_threads(1)
    found = {"tensor": angles(wrap(parallel(by_sequence=False))), "sequence": angles(wrap(parallel(by_sequence=True)))}
    heads = parallelize_module(tiny("qwen3"), init_device_mesh("cpu", (2,)), HEADS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["heads"] = [site.name for site in find_sites(heads, qk=True)], [str(each.message) for each in said]
    before = wrap(whole())
    sites, model = find_sites(before), sharded(before.module)
    found["sharded"] = angles(before, sites=sites)
    model(blocks.IDS).sum().backward()  # what was measured is trained on
    models = {"whole": wrap(whole()), "sharded": wrap(sharded(whole()))}
    found["compared"] = compare(models, blocks.IDS, null=8, rounds=0, progress=False).frame
    for name, given in {"FSDP 2": before, "tensor parallel": wrap(parallel(by_sequence=False))}.items():
        found[name] = refused(convert, given)
    found["FSDP 1"] = refused(find_sites, wrap(FullyShardedDataParallel(whole(), device_id=torch.device("cpu"))))
    found["DDP"] = refused(wrap, DistributedDataParallel(whole()))
    if number == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("spread") / "out.pt"
    mp.start_processes(rank, (free_port(), str(out)), nprocs=2, start_method="forkserver")
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("how", ["tensor", "sequence", "sharded"])
def test_angles_are_those_of_the_whole_model(how, found):
    pd.testing.assert_frame_equal(found[how], angles(wrap(whole())), rtol=1e-3, atol=1e-3)


def test_norms_that_are_given_some_of_the_heads_are_left_out(found):
    """As of queries and keys: statistics would be those of the heads of one process."""
    names, said = found["heads"]
    assert names == [site.name for site in find_sites(tiny("qwen3"))]
    norm = "model.layers.0.self_attn.q_norm"
    assert [text for text in said if text.startswith(f"{norm} and 3 more norms are given the heads of this process")]


def test_a_comparison_counts_a_model_as_a_whole(found):
    columns = found["compared"].set_index("model")[["parameters", "bytes", "perplexity"]]
    np.testing.assert_allclose(columns.loc["sharded"], columns.loc["whole"], rtol=1e-5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("FSDP 2", r"divided among processes \(DTensor\): convert the whole model"),
        ("tensor parallel", r"divided among processes \(DTensor\): convert the whole model"),
        ("FSDP 1", r"sharded by FullyShardedDataParallel.*: shard it by FSDP 2 \(fully_shard\) to measure it"),
        ("DDP", r"received a DistributedDataParallel: give wrap the module within, its \.module"),
    ],
)
def test_what_is_not_taken_is_told(how, message, found):
    assert re.search(message, found[how])
