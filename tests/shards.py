"""The command `normgeo` in processes that share a model's parameters (FSDP 2), on CPUs; `VERSION` is FSDP's.

accelerate shards on GPUs alone, so that it has to be told that it does here; torch does it on both.
"""

import os
import time

import accelerate
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from normgeo.cli.main import main
from normgeo.training import runs


def sharding(begin):
    def begun(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(os.environ.get("VERSION", "2")), cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
        )  # fmt: skip
        self.state._shared_state.update({"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin})

    return begun


def late(load):
    """The second process reads its tokenizer when the first would have failed, and removed it, long ago."""

    def loaded(name):
        time.sleep(2 * (os.environ["RANK"] == "1"))
        return load(name)

    return loaded


if __name__ == "__main__":
    if "VERSION" in os.environ:
        runs.load_tokenizer = late(runs.load_tokenizer)
    accelerate.Accelerator.__init__ = sharding(accelerate.Accelerator.__init__)
    main()
