"""From a model's name to a certified checkpoint of the converted model: what `normgeo convert` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normgeo.cards import EMBEDDED
from normgeo.conversion.checkpoint import native_class, save
from normgeo.conversion.checks import check_options
from normgeo.conversion.convert import Conversion, convert, decompress
from normgeo.conversion.probing import tied
from normgeo.conversion.sharded import convert_sharded
from normgeo.converted import is_compressed
from normgeo.errors import ConversionError, DataError
from normgeo.examples import example_inputs, max_context
from normgeo.loading import ADAPTER, commit_of, explained, label_of, load_model, load_tokenizer, whence
from normgeo.models import loaded_dtype, weights_digest
from normgeo.norms import CRMSNorm
from normgeo.numbers import check_numbers
from normgeo.sites import find_sites
from normgeo.stream import check_context, vocabulary
from normgeo.system.folders import whole_directory
from normgeo.tokens import TokenStream, counted, load_tokens

__all__ = ["convert_checkpoint"]

TOKENS = 2048  # to certify on
OF_TEXT = {"input_ids", "decoder_input_ids", "attention_mask", "token_type_ids", "bbox"}  # boxes have a default


def convert_checkpoint(
    name: str,
    out: Path,
    *,
    to: str = "rmsnorm",
    data: str | None = None,
    n_tokens: int | None = None,
    context: int | None = None,
    dtype: str = "auto",
    device: str | None = None,
    keep_tie: bool = False,
    fold_affine: bool = False,
    padded: bool = False,
    outputs: Sequence[str] = (),
    by_shard: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    announce: Callable[[str], Any] = lambda line: None,
) -> tuple[Conversion, str]:
    """Load a model, convert it, certify the result on text, and save it; everything or nothing.

    Args:
        name: hub id, local directory or embedded name.
        out: a new directory.
        to: `rmsnorm` or `crmsnorm`; `rmsnorm` for a compressed model decompresses it.
        data: what `load_tokens` takes, to certify on; None is the embedded sample, where the model has a tokenizer.
        n_tokens: exactly so many tokens of it to compare on; None is 2048, or all of them where there are fewer.
        context: tokens the model sees together; up to 256 when None.
        dtype: `auto` (the checkpoint's own) or a floating-point type.
        device: a torch device; the CPU when None.
        keep_tie: as for `convert`, like the next two.
        fold_affine: see there.
        padded: see there.
        outputs: see there.
        by_shard: convert tensor by tensor, with the memory of one shard, certified on a few of the layers; None
            does so where float64 copies of the whole model would not fit into memory. Only `outputs`, `revision`
            and `trust_remote_code` go with it.
        revision: commit, branch or tag on the hub.
        trust_remote_code: run the repository's own code.
        announce: takes a line for each step.

    Returns:
        The conversion, and how its checkpoint loads: `native` or `remote`.

    Raises:
        ConversionError: it cannot be converted, or the certificate failed.
        RunError: it cannot be written.
        ModelError, DataError: whatever is wrong with the model or the data.
    """
    if to not in ("rmsnorm", "crmsnorm"):
        raise ConversionError(f"convert to rmsnorm or crmsnorm, not {to!r}; the naive swap is not saved, only compared")
    check_options(to, keep_tie=keep_tie, padded=padded, fold_affine=fold_affine)
    if (Path(name) / ADAPTER).is_file():
        raise ConversionError(f"{name} is an adapter that is not merged: call merge_and_unload() and save that first")
    with whole_directory(out, keep=False):
        pass  # say that it cannot be written before hours of work
    plain = to == "rmsnorm" and not (keep_tie or fold_affine)
    folder = _folder(name, revision)
    short = by_shard is None and plain and _needs(folder) > _available()
    if by_shard or short:
        if not plain:
            raise ConversionError("by shard only rmsnorm, untied and unfolded, can be made; convert in memory")
        unused = {
            "data": data is not None, "tokens": n_tokens is not None, "context": context is not None,
            "dtype": dtype != "auto", "device": device is not None,
        }  # fmt: skip
        _refuse_unused(unused, short)
        announce(f"{name}: shard by shard, certified on a few of its layers")
        own = torch.float32 if name in EMBEDDED else None  # as `load_model` has it
        sharded = convert_sharded(
            folder, out, outputs=outputs, dtype=own, trust_remote_code=trust_remote_code,
            about=_original(name, revision),
        )  # fmt: skip
        return sharded, "remote"
    check_numbers(tokens=n_tokens)
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = load_model(name, dtype=dtype, device=device or "cpu", **where)
    _check_saveable(model)
    about = _original(name, revision, weights_sha256=weights_digest(model))
    tokenizer = load_tokenizer(name, **where)
    if to == "rmsnorm" and is_compressed(model):
        given = data is not None or n_tokens is not None or context is not None
        if given or keep_tie or fold_affine or padded or outputs:
            raise ConversionError(
                f"{name} is compressed, and gets all its numbers again as they were: leave out --data, --tokens, "
                "--context, --fold-affine, --keep-tie, --padded and --outputs"
            )
        announce(f"{name} is compressed: giving it all d numbers again")
        conversion = decompress(model)
    else:
        batches, of_text = _text(model, data, tokenizer, n_tokens, context)
        parameters = sum(p.numel() for p in model.parameters())
        announce(f"{name}: {parameters:,} parameters, {loaded_dtype(model)}; finding what to center")
        options: dict[str, Any] = {"keep_tie": keep_tie, "fold_affine": fold_affine, "padded": padded}
        conversion = convert(model, to, outputs=outputs, certify_on=batches, **options)
        for line in _sizes(model, conversion.model):
            announce(line)
        about |= of_text
    extras = [] if tokenizer is None else [tokenizer]
    return conversion, save(conversion, out, beside=folder, extras=extras, about=about)


def _check_saveable(model: PreTrainedModel) -> None:
    """Say before the work that a model with code of its own cannot be saved, where there is a LayerNorm to convert."""
    try:
        native_class(type(model))
    except ConversionError:
        if is_compressed(model) or any(site.kind == "layernorm" for site in find_sites(model, qk=True)):
            raise


def _refuse_unused(unused: dict[str, bool], short: bool) -> None:
    """Refuse what is given and would be ignored by shard; it may be the memory that decided for that."""
    if given := ", ".join(option for option, is_given in unused.items() if is_given):
        why = "memory is short, so that it is converted by shard; " if short else ""
        hint = ", or ask for --in-memory (by_shard=False)" if short else ""
        raise ConversionError(f"{why}by shard these would be ignored: {given}; leave them out{hint}")


def _sizes(model: PreTrainedModel, converted: PreTrainedModel) -> list[str]:
    """How many parameters a conversion has where that is another number, and why, in lines."""
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, converted))
    own = [group for group in tied(model) if group not in tied(converted)]
    untied = before + sum(model.get_parameter(group[0]).numel() * (len(group) - 1) for group in own)
    lines = []
    if own:
        lines = [f"the head is no longer tied to the embedding: {untied:,} parameters; --keep-tie keeps {before:,}"]
    widths = {module.d for module in converted.modules() if isinstance(module, CRMSNorm) and not module.padded}
    if widths:
        streams = " and ".join(f"{d:,} numbers for {d + 1:,}" for d in sorted(widths))
        lines += [f"streams of {streams}: {after:,} parameters, for {untied:,} before"]
    return lines


def _original(name: str, revision: str | None, **more: str) -> dict[str, Any]:
    """What conversion.json says of the model that was converted: a directory by its own name."""
    return {"original": {"name": label_of(name), "revision": commit_of(name, revision), **more}}


def _folder(name: str, revision: str | None) -> Path:
    """Where the checkpoint is on this machine; a hub's is downloaded."""
    path, options = whence(name, revision)
    if Path(path).is_dir():
        return Path(path)
    options["allow_patterns"] = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(path, **options))
    except (OSError, ValueError) as error:
        raise explained(name, error) from error


def _needs(folder: Path) -> int:
    """Bytes that converting in memory takes: two models in their own dtype and four in float64."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    return 2 * stored + 4 * 4 * stored  # float64 is four times as wide as the half precision of large models


def _available() -> int:
    """Bytes of memory that can be had, what files are cached in included, in this container if it is one."""
    available = psutil.virtual_memory().available
    home = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((home / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (home / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # there is no limit, or none that is told so
        return available
    return min(available, limit - used + int(cached))


def _text(
    model: PreTrainedModel, data: str | None, tokenizer: Any, n_tokens: int | None, context: int | None
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Batches of real text for the certificate, and what conversion.json says of it; none where no token ids are taken.

    Raises:
        DataError: there is a data source but the model takes no text, or it is not to be had, or has too few tokens.
    """
    others = sorted(set(example_inputs(model)) - OF_TEXT)
    if data is None and (tokenizer is None or others):
        return [], {}
    if others:
        raise DataError(f"{type(model).__name__} takes {', '.join(others)}, not text alone; leave --data out")
    if context is not None and context < 2:
        raise DataError(f"--context must be at least 2, received {context}: a certificate is on what follows tokens")
    length = context or min(256, max_context(model) or 256)
    check_context(model, length)
    text, n_tokens = counted(load_tokens("sample" if data is None else data, tokenizer, length), n_tokens, TOKENS)
    return _batches(model, text, n_tokens), {"text": text.about | {"tokens": n_tokens}}


def _batches(model: PreTrainedModel, text: TokenStream, n_tokens: int) -> list[dict[str, Tensor]]:
    """The text as the model takes it.

    Raises:
        DataError: ids are beyond the vocabulary.
    """
    known, batches = vocabulary(model), []
    for batch in text.batches(n_tokens, 2):
        if int(batch.ids.max()) >= known:
            raise DataError(f"token id {batch.ids.max()} is beyond the model's vocabulary of {known}")
        ids = torch.from_numpy(batch.ids).to(model.device)
        decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        if ids.shape[1] > 1:
            batches.append({"input_ids": ids, **decoder})
    return batches
