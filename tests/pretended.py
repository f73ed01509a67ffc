"""A CUDA device that is not there: tensors that say they are on one, and compute on the CPU.

It is strict where a GPU is. Tensors on different devices do not mix, and nobody reads their memory but through a copy.
What is copied without waiting, as to pinned memory, arrives when an event behind it is waited for and not before: on a
stream aside as late as can be, so that it has what is there then.
"""

import contextlib
import threading
import time
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

OWN = {"device", "is_cuda", "is_cpu", "is_meta", "shape", "dtype", "layout", "ndim", "requires_grad", "_version"}
MIXING = {"copy_", "to", "__getitem__", "__setitem__", "type_as", "index_put_", "set_data"}


class Pretended(torch.Tensor):
    """A tensor on a device that is not there; `inside` is what it is made of."""

    @staticmethod
    def __new__(cls, inside, index=0, requires_grad=None):
        if isinstance(inside, Pretended):  # as a parameter, which is made again of a tensor
            inside, index = inside.inside, inside.device.index
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), dtype=inside.dtype, device=f"cuda:{index}",
            requires_grad=False,
        )  # fmt: skip
        made.inside = inside
        if requires_grad is not None:
            made._is_param = True
        return made

    def __init__(self, inside, index=0, requires_grad=None):
        pass

    def record_stream(self, stream):
        stream.kept.append(self.inside)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} reached a device that is not there")


def plainly(func, args, kwargs):
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def called(func, args, kwargs):
    """What a function of torch gives, computed with what is inside, on the device that it would be on."""
    name = getattr(func, "__name__", "")
    asked = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
    if asked in OWN or name in ("_parse_to", "_has_compatible_shallow_copy_type"):
        return plainly(func, args, kwargs)
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    mine = [t for t in tensors if isinstance(t, Pretended)]
    check_places(name, tensors, mine)
    first = next(iter([*args, *kwargs.values()]), None)
    index = place(name, args, kwargs, mine, first)
    inside, options = tree_map(
        lambda t: t.inside if isinstance(t, Pretended) else "cpu" if moves(t) else t, (args, kwargs)
    )
    options.pop("pin_memory", None)
    if name == "copy_" and mine and index is None and kwargs.get("non_blocking"):
        current.now().later(*inside[:2])
        return first
    out = inside[0] if name in ("cuda", "cpu") else plainly(func, inside, options)
    if inside and out is inside[0] and index != (first.device.index if isinstance(first, Pretended) else None):
        out = out.clone()  # it moved
    of = {id(t.inside): t for t in mine}

    def wrapped(t):
        return of[id(t)] if id(t) in of else Pretended(t, index) if isinstance(t, torch.Tensor) else t

    result = out if index is None else tree_map(wrapped, out)
    if name == "__deepcopy__" and hasattr(first, "_is_param"):
        result._is_param = True
    return result


def check_places(name, tensors, mine):
    places = {t.device for t in tensors if isinstance(t, Pretended) or t.dim()}
    if len({t.device for t in mine}) > 1 or (mine and len(places) > 1 and name not in MIXING):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {[t.device for t in tensors]}")
    if mine and name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def place(name, args, kwargs, mine, first):
    """The number of the device that a result is on; None for the CPU."""
    to = {"cuda": "cuda", "cpu": "cpu"}.get(name) or next((d for d in tree_iter((args, kwargs)) if moves(d)), None)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return first.device.index if isinstance(first, Pretended) else None
    if to is not None:
        return (torch.device(to).index or 0) if torch.device(to).type == "cuda" else None
    return mine[0].device.index if mine else None


def moves(value):
    """Whether an argument says where a tensor should be."""
    said = value.type if isinstance(value, torch.device) else value if isinstance(value, str) else ""
    return said.partition(":")[0] in ("cpu", "cuda")


class Device(TorchFunctionMode):
    """While inside, tensors can be made on it, and moved to it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return called(func, args, kwargs or {})


class Stream:
    """The first does at once what it is told; others when someone waits for them."""

    def __init__(self, device=None, *, aside=True):
        self.device, self.aside, self.waiting, self.kept = device, aside, [], []
        self.lock = threading.Lock()

    def later(self, to, source):
        self.waiting.append((to, source if self.aside else source.clone()))

    def wait_stream(self, other):
        other.synchronize() if other.aside else None

    def synchronize(self):
        time.sleep(0.005)  # who waits is woken late
        with self.lock, torch.inference_mode():
            for to, source in self.waiting:
                to.copy_(source)
            self.waiting.clear()


class Event:
    def __init__(self, enable_timing=False, blocking=False):
        self.stream, self.device = None, torch.device("cuda:0")

    def record(self, stream=None):
        self.stream = stream or current.now()

    def synchronize(self):
        self.stream.synchronize()

    def elapsed_time(self, other):
        return 1.0


class Current(threading.local):
    """The stream that each thread is on."""

    def __init__(self):
        self.stack = [main]

    def now(self, device=None):
        return self.stack[-1]

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()


main = Stream(aside=False)
current = Current()


def projected(x, units, centered, out, nothing):
    from normgeo.kernels import fallback

    assert all(isinstance(t, Pretended) for t in (x, units, out))
    fallback.project(x.inside, units.inside, centered, out.inside)
    if centered:
        norms = out.inside
        norms[4].masked_fill_(norms[4] <= nothing * norms[0], 0.0)


def gathered(x, index, scalars, centered, out):
    from normgeo.kernels import fallback

    assert all(isinstance(t, Pretended) for t in (x, index, scalars, out))
    fallback.gather(x.inside, index.inside, scalars.inside, centered, out.inside)


def tallied(norms, degrees, sines, group, histogram, out):
    from normgeo.kernels import fallback

    assert all(isinstance(t, Pretended) and t.is_contiguous() for t in (norms, degrees, sines, group))
    inside = fallback.Histogram(histogram.counts.inside, histogram.sites.inside, histogram.phase)
    fallback.tally(*(t.inside for t in (norms, degrees, sines, group)), inside, fallback.Sums(*(t.inside for t in out)))


class Packed:
    """An ensemble on a device, which gives moments in parts: of one as many as of its kind."""

    def __init__(self, vectors, device, centered):
        self.units, self.centered = torch.nn.functional.normalize(vectors.double()).to(device), centered

    def moments(self, x, index, scalars):
        assert all(isinstance(t, Pretended) for t in (x, index, scalars, self.units))
        index, lengths = index.inside, scalars.inside
        rows = x.inside[index].double()
        kinds = [rows / lengths[0, index, None]]
        if self.centered:
            kinds.append((rows - rows.mean(1, keepdim=True)) / lengths[4, index, None])
        both = torch.stack([vectors @ self.units.inside.T for vectors in kinds])
        parts = [
            torch.stack([c.asin().sum(1), c.asin().square().sum(1), c.square().sum(1)], 1).flatten(0, 1)
            for c in both.tensor_split(2 + (x.device.index or 0), 1)
        ]
        return torch.stack(parts).to(x.device)


@contextlib.contextmanager
def pretended_cuda(monkeypatch):
    """While inside there are two CUDA devices."""
    patches = {
        "is_available": lambda: True, "device_count": lambda: 2, "_lazy_init": lambda: None, "Stream": Stream,
        "Event": Event, "stream": current.on, "current_stream": current.now, "current_device": lambda: 0,
        "synchronize": lambda device=None: main.synchronize(), "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(), "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda device=None: "Pretended",
        "max_memory_allocated": lambda device: {"cuda": 0}[device.type],
    }  # fmt: skip
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("normgeo.kernels.on_cuda", lambda *_: SimpleNamespace(project=projected, gather=gathered))
    monkeypatch.setattr("normgeo.kernels.angles_on_cuda", lambda *_: SimpleNamespace(tally=tallied, packed=Packed))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with Device():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
