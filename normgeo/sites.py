"""Normalization sites: found by what passes through them, classified by what they do.

No list of class names is involved. A module is a norm when its output is gamma * y + beta with y the LayerNorm or the
RMSNorm of its input (*Geometry* eq. 9 and 11; *Pre-RMSNorm* eq. 1 and 2), which three probes with random vectors
decide; and so is a call of torch's `layer_norm` or `rms_norm` in the code of a module. Where it sits is read off one
forward pass on a few tokens (`normgeo.roles`).
"""

from __future__ import annotations

import fnmatch
import itertools
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from normgeo.behaviour import Behaviour, Kind, behaviour_of
from normgeo.converted import is_compressed
from normgeo.errors import DataError, ModelError
from normgeo.examples import example_inputs, processes_of
from normgeo.functional import FunctionNorm, function_of
from normgeo.models import check_model, dtype_name, on_cpu
from normgeo.roles import Placer, Role
from normgeo.trace import Call, Function, Trace, traced

__all__ = ["NormSite", "Role", "find_sites", "select_sites", "sites_of"]


@dataclass(frozen=True)
class NormSite:
    """One norm of a model: a module, or a function that the code of a module calls.

    Attributes:
        name: the module's dotted name; of a function the one of the module that calls it, and its own:
            `transformer.h.0.rms_norm()`.
        kind: `layernorm` when a shift of its input along the uniform vector changes nothing, else `rmsnorm`.
        role: who reads its output (`attention`, `mlp`, both: `parallel`), whose output it normalizes (`post_*`), or
            where it sits: `embedding`, `final`, `qk` (on heads), `inner` (inside a branch), `head` (after the model).
        layer: index of its layer; 0 for `embedding`, the number of layers for `final`.
        stack: dotted name of the list its layer is in ("" outside of any).
        d: width of the vectors it normalizes.
        eps: the constant added to the mean square.
        gain, bias: whether it has a gamma and a beta.
        heads: how many vectors it normalizes for each token (more than 1 for norms on heads).
        head_major: whether its input is laid out [batch, heads, time, d] instead of [batch, time, heads, d].
        call: which of several calls in one forward pass, as of modules that layers share; `calls`: of how many, 0
            where nobody said.
        dtype: of the vectors, as torch names it.
        time_major: whether its input is laid out [time, batch, d].
        gain_name, bias_name: of a norm that is a function, the names of the parameters that are its gamma and beta.
    """

    name: str
    kind: Kind
    role: Role
    layer: int
    stack: str
    d: int
    eps: float
    gain: bool = True
    bias: bool = False
    heads: int = 1
    head_major: bool = False
    call: int = 0
    dtype: str = "float32"
    time_major: bool = False
    calls: int = 0
    gain_name: str = ""
    bias_name: str = ""

    @property
    def key(self) -> str:
        """The dotted name, with the call where there are several: unique within a model."""
        return f"{self.name}@{self.call}" if self.call else self.name

    @property
    def is_function(self) -> bool:
        """Whether it is no module."""
        return function_of(self.name) is not None

    @property
    def owner(self) -> str:
        """The name of the module whose hooks see it: itself, or the one whose code calls it."""
        function = function_of(self.name)
        return self.name if function is None else function[0]

    def module_of(self, model: nn.Module) -> nn.Module:
        """The module in a model, or one that does what the function does."""
        function = function_of(self.name)
        if function is None:
            return model.get_submodule(self.name)
        gains = (model.get_parameter(name) if name else None for name in (self.gain_name, self.bias_name))
        return FunctionNorm(function[1], self.d, self.eps, *gains)


@on_cpu
def find_sites(model: PreTrainedModel, inputs: dict[str, Tensor] | None = None, *, qk: bool = False) -> list[NormSite]:
    """Find every norm that the model calls, in the order of the forward pass.

    Warns of norms in the code of a module that cannot be measured: torch's whose gains are computed, and those that are
    written out, which are known by vectors that become as long as each other; and of those on heads that are divided
    among processes, which are not returned.

    Args:
        model: any transformers model.
        inputs: keyword arguments for one small forward pass; made from the configuration when None.
        qk: also return the norms on the heads of queries and keys.

    Raises:
        ModelError: it is no model of transformers, no input could be made, the forward pass failed, there is no norm,
            or a device map offloaded one, or the weights are not there.

    >>> from normgeo import find_sites, load_model
    >>> [(site.name, site.kind, site.role) for site in find_sites(load_model("embedded-layernorm"))][-2:]
    [('transformer.h.5.ln_2', 'layernorm', 'mlp'), ('transformer.ln_f', 'layernorm', 'final')]
    """
    check_model(model)
    if model.device.type == "meta":
        raise ModelError(f"the weights of {type(model).__name__} are not here (meta): load them, or do not offload it")
    made = example_inputs(model, cross=False) if inputs is None else inputs  # a stream of text has no encoder
    trace, found = _norms(model, made)
    heads = {call.inputs[0].shape[1] for call, _ in found if call.inputs[0].ndim == 4}
    if inputs is None and any(_is_square(call.inputs[0]) for call, _ in found) and "input_ids" in made:
        even = processes_of(model)
        other = max({*range(even, 7 * even, even)} - heads)  # as many heads as tokens: which are which would not show
        made = example_inputs(model, other, cross=False)
        trace, found = _norms(model, made)
    if not found:
        hint = "; it is compressed, decompress it (normgeo convert --to rmsnorm)" if is_compressed(model) else ""
        raise ModelError(f"{type(model).__name__} called no LayerNorm and no RMSNorm in a forward pass{hint}")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sites = _placed(found, trace, _bases(model), names, made.get("input_ids"))
    wanted = {site: call for site, (call, _) in zip(sites, found, strict=True) if qk or site.role != "qk"}
    return _undivided(model, trace, wanted)


def _norms(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Trace, list[tuple[Call, Behaviour]]]:
    """What happened in a forward pass, with the functions among the calls that are norms, and the calls of norms."""
    trace = traced(model, inputs)
    modules = dict(model.named_modules())
    verdicts: dict[str, Behaviour | None] = {}
    found: list[tuple[Call, Behaviour]] = []
    for call in sorted((c for c in trace.calls if c.leaf), key=lambda c: c.began):
        if not _could_be_a_norm(call, *modules[call.name].parameters()):
            continue
        if any(parameter.is_meta for parameter in modules[call.name].parameters()):
            hint = "the model does not fit on the GPUs: give more of them, or a smaller --dtype"
            raise ModelError(f"{call.name} was left on the CPU or the disk, where it is not measured; {hint}")
        if call.name not in verdicts:
            verdicts[call.name] = behaviour_of(modules[call.name], call.inputs[0].shape, call.inputs[0].dtype)
        if (behaviour := verdicts[call.name]) is not None:
            found.append((call, behaviour))
    batch = max((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), default=1)
    functions = _functions(model, trace, {call for call, _ in found}, batch)
    trace.calls = sorted([*trace.calls, *(call for call, _ in functions)], key=lambda c: c.began)
    return trace, sorted([*found, *functions], key=lambda pair: pair[0].began)


def _functions(model: PreTrainedModel, trace: Trace, norms: set[Call], batch: int) -> list[tuple[Call, Behaviour]]:
    """The calls of functions that are norms, but for those in modules that are norms; `batch` sequences went in."""
    found, others = list[tuple[Call, Behaviour]](), dict[str, None]()
    own = {id(parameter) for parameter in model.parameters()}
    for function in (f for f in trace.functions if f.owner not in norms):
        if function.norm is not None and own.issuperset(map(id, function.norm.parameters())):
            x = function.call.inputs[0]
            behaviour = behaviour_of(function.norm, x.shape, x.dtype) if _could_be_a_norm(function.call) else None
            if behaviour is not None:
                found.append((function.call, behaviour))
        elif _is_of_tokens(function, batch) and any(c.began > function.call.ended for c in trace.calls):
            others[function.owner.name or "the model itself"] = None
    if others:
        names = ", ".join([*others][:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        warnings.warn(
            f"{type(model).__name__} seems to normalize in the code of {names}, which is not measured: a norm has to "
            "be a module that does nothing else, or torch's function, given parameters or no gains", stacklevel=5,
        )  # fmt: skip
    return found


def _is_of_tokens(function: Function, batch: int) -> bool:
    """Whether the code of a module normalizes more than one vector a sequence, and was not looked at as a whole."""
    out = function.call.output
    return out.numel() > batch * out.shape[-1] and (not function.owner.leaf or function.owner.weight)


def _undivided(model: PreTrainedModel, trace: Trace, calls: dict[NormSite, Call]) -> list[NormSite]:
    """All but the norms that read a Linear of which this process has a part of the outputs (tensor parallel).

    So it is with queries and keys, whose heads are divided: statistics would be those of some of the heads.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and hasattr(m.weight, "device_mesh")}
    made = [c for c in trace.calls if c.name in linears and isinstance(c.output, Tensor)]
    parts = [c for c in made if c.output.shape[-1] < linears[c.name].out_features]
    divided = {site: c.name for site, call in calls.items() for c in parts if c.feeds(call)}
    if divided:
        site, linear = next(iter(divided.items()))
        more = f" and {len(divided) - 1} more norms are" if len(divided) > 1 else " is"
        warnings.warn(
            f"{site.name}{more} given the heads of this process alone, a part of what {linear} and its like give, and "
            "not measured: load the model whole, without a plan of tensor parallelism", stacklevel=4,
        )  # fmt: skip
    return [site for site in calls if site not in divided]


def _bases(model: PreTrainedModel) -> list[tuple[str, str]]:
    """How names begin in a model and in its base, for every model within: what is in the first alone is its head."""
    found = []
    for name, module in model.named_modules():
        base = module.base_model_prefix if isinstance(module, PreTrainedModel) else ""
        if base and hasattr(module, base):
            whole = f"{name}." if name else ""
            found.append((whole, f"{whole}{base}."))
    return found


def _is_time_major(x: Tensor, ids: Tensor | None) -> bool:
    """Whether a norm's input has time first; with as many sequences as tokens in each that would not show."""
    return ids is not None and ids.ndim == 2 and x.ndim > 2 and x.shape[:2] == ids.shape[::-1] != ids.shape


def _could_be_a_norm(call: Call, *parameters: nn.Parameter) -> bool:
    out = call.output
    table = bool(call.inputs) and isinstance(call.inputs[0], nn.Parameter) and call.inputs[0].ndim == 2
    return (
        not table  # of weights, such as relative positions, which are no hidden states
        and len(call.inputs) == 1
        and isinstance(out, Tensor)
        and out.shape == call.inputs[0].shape
        and out.ndim >= 2
        and out.shape[-1] > 1
        and out.numel() > 0
        and all(p.numel() <= call.inputs[0].numel() for p in parameters)
    )


def _placed(
    found: list[tuple[Call, Behaviour]],
    trace: Trace,
    bases: list[tuple[str, str]],
    names: dict[int, str],
    ids: Tensor | None,
) -> list[NormSite]:
    """Give every norm its layer and role from the order of calls and from who reads its output."""
    n_tokens = None if ids is None else ids.numel()
    placer, numbers = Placer([call for call, _ in found], trace), trace.numbered()
    functions = {function.call: function.norm for function in trace.functions}
    sites = []
    for call, behaviour in found:
        role, stack, layer = placer.place(call)
        around = [whole for whole, base in bases if call.name.startswith(whole) and not call.name.startswith(base)]
        if "" in around or (around and role == "final"):  # a model within may have other towers beside its base
            role = "head"
        d = call.inputs[0].shape[-1]
        vectors = call.inputs[0].numel() // d
        several = role in ("qk", "inner") or call.inputs[0].ndim > 3  # vectors a token
        per_head = several and n_tokens is not None and vectors % n_tokens == 0
        heads = vectors // n_tokens if per_head and n_tokens else 1
        sites.append(
            NormSite(
                call.name, behaviour.kind, role, layer, stack, d, behaviour.eps,
                behaviour.gain, behaviour.bias, heads, heads > 1 and _is_head_major(call.inputs[0], heads),
                numbers[call][0], dtype_name(call.inputs[0].dtype), _is_time_major(call.inputs[0], ids),
                numbers[call][1], *_named(functions.get(call), names),
            )
        )  # fmt: skip
    return sites


def _named(norm: FunctionNorm | None, names: dict[int, str]) -> tuple[str, str]:
    """The names of gamma and beta of a norm that is a function."""
    return ("", "") if norm is None else (names.get(id(norm.weight), ""), names.get(id(norm.bias), ""))


def _is_square(x: Tensor) -> bool:
    return x.ndim == 4 and x.shape[1] == x.shape[2]


def _is_head_major(x: Tensor, heads: int) -> bool:
    """Whether heads come before tokens; where both are as many, as in inputs of a user's, whether they were moved."""
    return x.ndim == 4 and x.shape[1] == heads and (x.shape[2] != heads or x.stride(1) < x.stride(2))


def select_sites(sites: Sequence[NormSite], pattern: str | None) -> list[NormSite]:
    """The sites whose role, dotted name or key matches one of these patterns (`mlp`, `*ln_1`, `model.layers.1?.*`).

    The key of a norm that is a function is of that call alone, though others go by its name.

    Raises:
        DataError: no site matches one of the patterns.
    """
    if pattern is None:
        return list(sites)
    named = defaultdict[str, list[NormSite]](list)
    for site in sites:
        for name in {site.role, site.key} if site.is_function else {site.role, site.name, site.key}:
            named[name].append(site)
    matching = {p: [s for name in _matching(p, named) for s in named[name]] for p in map(str.strip, pattern.split(","))}
    if absent := [p for p, found in matching.items() if not found]:
        there = [f"roles are {sorted({s.role for s in sites})}", *(f"names are like {s.name}" for s in sites[:1])]
        raise DataError(f"no site matches {absent[0]!r}; {', '.join(there)}")
    chosen = set(itertools.chain.from_iterable(matching.values()))
    return [site for site in sites if site in chosen]


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    """The names that match; of a pattern without wildcards itself, looked up: a user may list thousands of names."""
    if set(pattern).isdisjoint("*?["):
        return [pattern] if pattern in names else []
    match = re.compile(fnmatch.translate(pattern)).match
    return [name for name in names if match(name)]


def sites_of(model: PreTrainedModel, sites: str | Sequence[NormSite] | NormSite | None, *, qk: bool) -> list[NormSite]:
    """The sites that a user asks for: by a pattern for `select_sites`, or as `find_sites` gave them; None is all.

    Args:
        model: whose they are.
        sites: which.
        qk: with the norms on the heads of queries and keys, where they are not given themselves.

    Raises:
        DataError: a pattern matches none.
        ModelError: as `find_sites`.
    """
    if sites is None or isinstance(sites, str):
        return select_sites(find_sites(model, qk=qk), sites)
    return list(sites) if isinstance(sites, Iterable) else [sites]
