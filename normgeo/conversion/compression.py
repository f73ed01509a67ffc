r"""Folding of gamma and beta into the readers of a norm, and compression to width d - 1 (*Pre-RMSNorm* section 3.2).

With z = gamma * y + beta read as W z + b, W' = W diag(gamma) and b' = b + W beta read y itself, which has zero mean, so
that its last number is redundant: W' y = (W' - w_d 1^T) y for the last column w_d (eq. 6), a matrix whose last column
is zero and can be dropped. Writers drop their last row, and CRMSNorm (eq. 5) does without the last number.

A norm whose readers are not all known parameters (a model's own output, an embedding norm that is read by the stream)
keeps gamma and beta and gives all d numbers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from transformers import PreTrainedModel

from normgeo.conversion.gauge import Gauge, Reader, Shift
from normgeo.conversion.gradients import reached
from normgeo.conversion.probing import INVISIBLE, outputs_of, same, site_inputs, with_padding
from normgeo.conversion.reaching import beside
from normgeo.converted import add_bias, held_by, rebuild, reshape
from normgeo.errors import ConversionError, said
from normgeo.sites import NormSite

__all__ = ["compress", "expand", "fold", "rounded"]

ROWS = 2048  # of a writer that are rounded at once
PORTIONS = 8  # of a model's parameters, one of which is folded at once, and copied twice meanwhile


def _along(vector: Tensor, parameter: Tensor, axis: int) -> Tensor:
    return vector.view([-1 if a == axis else 1 for a in range(parameter.ndim)])


# --- folding ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fold(
    exact: PreTrainedModel, gauge: Gauge, names: Sequence[str], inputs: dict[str, Tensor], recipe: dict[str, Any]
) -> None:
    """Fold gamma and beta of these norms into their readers where outputs stay equal; the recipe notes where."""
    truth = outputs_of(exact, inputs)
    readers: dict[str, list[Reader]] = {name: [] for name in names}
    for reader in gauge.readers:
        if reader.norm in readers:
            readers[reader.norm].append(reader)
    recipe["biases"], recipe["readers"], recipe["folded"] = [], [], {}
    once = {name for name in names if sum(site.name == name for site in gauge.sites) == 1}
    known = [(name, group) for name, group in readers.items() if group and name in once]  # what reads them, is known
    for some in _portions(exact, known):
        for name, group, biases in _folded(exact, some, inputs, truth):
            recipe["norms"][name] = recipe["norms"][name] | {"affine": False, "bias": False, "offset": 0.0}
            recipe["folded"][name] = [r.parameter for r in group]
            recipe["biases"] += biases
            recipe["readers"] += [[r.parameter, r.axis] for r in group]


def _portions(
    exact: PreTrainedModel, norms: list[tuple[str, list[Reader]]]
) -> Iterator[list[tuple[str, list[Reader]]]]:
    """Norms whose readers are together a small part of the model, for they are copied meanwhile."""
    room, some, size = sum(p.numel() for p in exact.parameters()) // PORTIONS, [], 0
    for name, group in norms:
        more = sum(exact.get_parameter(parameter).numel() for parameter, _, _ in group)
        if some and size + more > room:
            yield some
            some, size = [], 0
        some.append((name, group))
        size += more
    yield some


def _folded(
    exact: PreTrainedModel, norms: Sequence[tuple[str, list[Reader]]], inputs: dict[str, Tensor], truth: list[Tensor]
) -> Iterator[tuple[str, list[Reader], list[str]]]:
    """Fold what can be: all at once, for a pass a norm takes long, or else each half of them; with who got a bias."""
    if not norms:
        return
    done = [(name, group, *_fold_one(exact, name, group)) for name, group in norms]
    if same(truth, outputs_of(exact, inputs), INVISIBLE) and _reads_all(exact, norms, inputs, truth):
        yield from ((name, group, biases) for name, group, _, biases in done)
        return
    while done:  # from the last, for two may have one reader; and what was copied is let go
        done.pop()[2]()
    if len(norms) > 1:
        middle = len(norms) // 2
        yield from _folded(exact, norms[:middle], inputs, truth)
        yield from _folded(exact, norms[middle:], inputs, truth)


def _fold_one(exact: PreTrainedModel, name: str, group: list[Reader]) -> tuple[Any, list[str]]:
    """Fold one norm; what undoes it, and the modules that got a bias."""
    norm: Any = exact.get_submodule(name)
    weight, beta = norm.weight, norm.bias
    gamma = None if weight is None else weight + norm.offset
    kept: dict[str, Tensor] = {}
    new: list[str] = []
    for parameter_name, axis, _ in group:
        parameter = exact.get_parameter(parameter_name)
        kept[parameter_name] = parameter.clone()
        if beta is not None:
            shift = (parameter * _along(beta, parameter, axis)).sum(axis)
            bias = _bias_of(exact, parameter_name, shift, new)
            if bias is not None:
                kept[bias] = exact.get_parameter(bias).clone()
                exact.get_parameter(bias).add_(shift)
        if gamma is not None:
            parameter.mul_(_along(gamma, parameter, axis))
    norm.weight = norm.bias = None

    def undo() -> None:
        norm.weight, norm.bias = weight, beta
        for key, value in kept.items():
            exact.get_parameter(key).copy_(value)
        for module in new:
            exact.get_submodule(module).register_parameter("bias", None)

    return undo, new


def _bias_of(exact: PreTrainedModel, name: str, like: Tensor, new: list[str]) -> str | None:
    """The bias that goes with a weight; a linear layer that has none gets one."""
    owner, _, last = name.rpartition(".")
    module = exact.get_submodule(owner)
    bias = last.replace("weight", "bias")
    if bias != last and getattr(module, bias, None) is None and isinstance(module, nn.Linear):
        add_bias(module)
        new.append(owner)
    found = getattr(module, bias, None) if bias != last else None
    return f"{owner}.{bias}" if isinstance(found, nn.Parameter) and found.shape == like.shape else None


def _reads_all(
    exact: PreTrainedModel, norms: Sequence[tuple[str, list[Reader]]], inputs: dict[str, Tensor], truth: list[Tensor]
) -> bool:
    """Whether nothing else reads the norms: then the readers may forget the component of their input along 1."""
    parameters = [(exact.get_parameter(p), axis) for _, group in norms for p, axis, _ in group]
    handles = [exact.get_submodule(name).register_forward_hook(_last_dropped) for name, _ in norms]
    kept: list[Tensor] = []
    for parameter, axis in parameters:
        kept.append(parameter.clone())
        _take_last(parameter, axis)
    try:
        return same(truth, outputs_of(exact, inputs), INVISIBLE)
    finally:
        for handle in handles:
            handle.remove()
        for (parameter, _), value in zip(reversed(parameters), reversed(kept), strict=True):
            parameter.copy_(value)


def _last_dropped(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.nn.functional.pad(output[..., :-1], (0, 1))


def _take_last(parameter: Tensor, axis: int) -> None:
    """Subtract what is last along an axis from all that is there (eq. 6), in place: zero is last then."""
    parameter.sub_(parameter.narrow(axis, -1, 1).clone())


# --- compression ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compress(
    exact: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor], recipe: dict[str, Any], *, padded: bool
) -> None:
    """Drop (or set to zero) the last number of every stream of a centered, folded model.

    Raises:
        ConversionError: the model cannot do without it.
    """
    truth = outputs_of(exact, inputs)
    writers = [*_downstream(exact, gauge, inputs, recipe["norms"]), *gauge.tables]
    recipe["writers"] = [list(shift) for shift in writers]
    recipe["scales"] = sorted(set(gauge.scaled.values()))
    for name, axis in recipe["readers"]:
        _take_last(exact.get_parameter(name), axis)
    for name, axis in writers:
        _tensor(exact, name).narrow(axis, -1, 1).zero_()
    for name, spec in recipe["norms"].items():
        spec |= {"kind": "crmsnorm", "padded": True, "expand": name not in recipe["folded"]}
    _renew(exact, recipe["norms"])
    for place in recipe["recenter"]:
        place[3] = "pad"
    _hooks_again(exact, recipe)
    if not same(truth, outputs_of(exact, inputs), INVISIBLE):
        raise _uncompressed(exact, [site for site in gauge.layernorms if site.name in recipe["norms"]], inputs)
    if not padded:
        _narrow(exact, recipe)
        _check_narrow(exact, inputs, truth)


def _uncompressed(exact: PreTrainedModel, norms: list[NormSite], inputs: dict[str, Tensor]) -> ConversionError:
    """Why a model is another one without the last numbers: they are written still, or read by what is no norm."""
    with site_inputs(exact, norms) as given:
        outputs_of(exact, inputs)
    for name, tensors in given.items():
        if any(float(x[..., -1].norm()) > INVISIBLE * float(x.norm()) for x in tensors):
            return ConversionError(
                f"{name} is given what is not of plain parameters alone, as of one that is centered where it is read "
                "(parametrized): its last number cannot be left out, and the stream cannot be compressed"
            )
    return ConversionError("a stream is read by something that is no norm: it cannot be compressed")


def _downstream(
    exact: PreTrainedModel, gauge: Gauge, inputs: dict[str, Tensor], replaced: Container[str]
) -> list[Shift]:
    """The writers whose streams are compressed.

    A writer stays whole if its output is recentered later on, so that no norm sees its mean, or if only norms that stay
    read it, as norms on heads read queries: both need all its numbers.
    """
    writers = [*gauge.writers, *gauge.scaled]
    if not writers:  # every mean is removed explicitly
        return []
    with_padding(exact)
    parameters = [exact.get_parameter(name).requires_grad_(True) for name, _ in writers]
    norms = [site for site in gauge.layernorms if site.name in replaced]
    # as by x += f(norm(x)), which writes over what the norm has read
    with torch.enable_grad(), allow_mutation_on_saved_tensors(), site_inputs(exact, norms) as given:
        outputs_of(exact, inputs)
        streams = [x for tensors in given.values() for x in tensors]
        written = torch.autograd.grad(_weighed(streams), parameters, allow_unused=True, retain_graph=True)
        moved = torch.autograd.grad(_weighed([x.mean(-1) for x in streams]), parameters, allow_unused=True)
    sums = [0.0 if g is None else float(g.sum(shift.axis).norm()) for shift, g in zip(writers, moved, strict=True)]
    kept = {shift for shift, size in zip(writers, sums, strict=True) if size > INVISIBLE * max(sums)}

    def as_beside(shift: Shift) -> bool:
        _, rest, others = beside(exact, shift.parameter)
        return any(Shift(f"{other}.{rest}", shift.axis) in kept for other in others)

    def as_tied(shift: Shift) -> bool:
        """Whether it is a table that nothing reads, and that may take the place of one it was tied to."""
        return any(k.axis == shift.axis and torch.equal(values[k], values[shift]) for k in kept)

    values = dict(zip(writers, parameters, strict=True))
    # as unused experts
    idle = {shift for shift, gradient in zip(writers, written, strict=True) if not reached(gradient)}
    return [s for s in writers if s in kept or (s in idle and (as_beside(s) or as_tied(s)))]


def _weighed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all numbers, each of which counts otherwise than its neighbours."""
    return torch.stack([(x * torch.linspace(1, 2, x.numel()).to(x).view(x.shape)).sum() for x in tensors]).sum()


def _tensor(model: nn.Module, name: str) -> Tensor:
    return getattr(*held_by(model, name))


def _renew(exact: nn.Module, norms: dict[str, dict[str, Any]]) -> None:
    """Make norms anew, as they are described by now, and keep their gammas and betas."""
    old: dict[str, Any] = {name: exact.get_submodule(name) for name in norms}
    rebuild(exact, {"norms": norms})
    for name, norm in old.items():
        new: Any = exact.get_submodule(name)
        for target, value in ((new.weight, norm.weight), (new.bias, norm.bias)):
            if target is not None:
                target.copy_(value)


def _hooks_again(exact: PreTrainedModel, recipe: dict[str, Any]) -> None:
    for module, *_ in recipe["recenter"]:
        where = exact.get_submodule(module)
        where._forward_hooks.clear()
        where._forward_pre_hooks.clear()
    rebuild(exact, {"norms": {}, "recenter": recipe["recenter"]})


def _narrow(exact: PreTrainedModel, recipe: dict[str, Any]) -> None:
    for name, axis in (*recipe["writers"], *recipe["readers"], *((name, 0) for name in recipe["scales"])):
        value = _tensor(exact, name)
        reshape(exact, name, value.narrow(axis, 0, value.shape[axis] - 1).clone())
    for spec in recipe["norms"].values():
        spec |= {"d": spec["d"] - 1, "padded": False}
    _renew(exact, recipe["norms"])
    for place in recipe["recenter"]:
        place[3] = "drop"
    _hooks_again(exact, recipe)


def _check_narrow(exact: PreTrainedModel, inputs: dict[str, Tensor], truth: list[Tensor]) -> None:
    hint = "the model's code relies on the stream's width; compress with padded=True"
    try:
        outputs = outputs_of(exact, inputs)
    except Exception as error:  # whatever a reshape raises at another width
        raise ConversionError(f"{hint} ({said(error.__cause__ or error)})") from error  # in its own words
    if not same(truth, outputs, INVISIBLE):
        raise ConversionError(hint)


def rounded(exact: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """A compressed writer in its own dtype, with the sums along an axis kept: minus these is what was dropped.

    The writer was in half precision before its mean was taken away. Where the mean is less than half a step, rounding
    would put every number back where it was, and the dropped one would be wrong by d times the mean. So as many numbers
    as needed are rounded to the other side, those nearest the middle first.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return exact.to(dtype)
    rows = exact.movedim(axis, -1)
    done = [_with_sums(some, dtype) for some in rows.reshape(-1, rows.shape[-1]).split(ROWS)]
    return torch.cat(done).view(rows.shape).movedim(-1, axis)


def _with_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    near = rows.to(dtype)
    left = rows - near
    missing = left.sum(1, keepdim=True)
    signed = near.where(near != 0, torch.zeros_like(near).copysign(left.to(dtype)))
    grows = signed.signbit() == left.signbit()
    other = (signed.view(torch.int16) + (2 * grows.to(torch.int16) - 1)).view(dtype)  # the next one, on the other side
    steps = (other.double() - near).where((left * missing > 0) & other.isfinite(), 0.0).abs()
    order = (left.abs() / steps).nan_to_num(posinf=0.0).argsort(1, descending=True)
    ordered = steps.gather(1, order)
    enough = ordered.cumsum(1) - ordered / 2 < missing.abs()
    return other.where(torch.zeros_like(enough).scatter(1, order, enough) & (steps > 0), near)


@torch.no_grad()
def expand(model: PreTrainedModel, recipe: dict[str, Any]) -> None:
    """The inverse of `compress`, in place: all d numbers of every stream, and RMSNorms."""
    padded = any(spec["padded"] for spec in recipe["norms"].values())
    for name, axis in recipe["writers"]:
        value = _tensor(model, name)
        value = value.narrow(axis, 0, value.shape[axis] - padded)
        reshape(model, name, torch.cat([value, -value.sum(axis, keepdim=True)], axis))
    for name, axis in [] if padded else [*recipe["readers"], *([name, 0] for name in recipe["scales"])]:
        value = _tensor(model, name)
        last = torch.zeros_like(value.narrow(axis, 0, 1)) + (name in recipe["scales"])
        reshape(model, name, torch.cat([value, last], axis))
    for spec in recipe["norms"].values():
        wide = spec["d"] + (not spec.pop("padded"))
        spec.pop("expand")
        spec |= {"kind": "rmsnorm", "d": wide}
    _renew(model, recipe["norms"])
    for place in recipe["recenter"]:
        place[3] = "keep"
    _hooks_again(model, recipe)
    recipe["to"] = "rmsnorm"
    for key in ("writers", "readers", "scales"):
        recipe.pop(key)
