"""A configuration of transformers made small by the meaning of its attributes' names.

Every width becomes `WIDTH`, every stack two layers deep, and so on through all sub-configurations (`RULES`). What no
rule can know is in `EXCEPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PretrainedConfig

from normgeo.errors import ModelError, said

__all__ = ["tiny_config"]

WIDTH, HEADS, HEAD_DIM, FFN, LAYERS, VOCABULARY = 64, 4, 16, 96, 2, 160

Value = Any
Rule = Callable[[Value, dict[str, Value]], Value]


def _each(value: Value, make: Callable[[Value], Value]) -> Value:
    if isinstance(value, (list, tuple)):
        return [_each(v, make) for v in value]
    return make(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _flat(value: Value) -> Iterator[Value]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    else:
        yield value


def _to(size: int) -> Rule:
    """One size; in a list of stages: a quarter of it for the smallest value, doubled for every larger one."""

    def rule(value: Value, _: dict[str, Value]) -> Value:
        order = sorted({v for v in _flat(value) if isinstance(v, int) and v > 0})
        if len(order) > 1:
            return _each(value, lambda v: size // 4 * 2 ** order.index(v) if v > 0 else v)
        return _each(value, lambda v: size if v > 0 else v)

    return rule


def _all(size: int) -> Rule:
    return lambda value, _: _each(value, lambda v: size if v > 0 else v)


def _at_most(size: int) -> Rule:
    return lambda value, _: _each(value, lambda v: min(v, size))


def _leave(value: Value, _: dict[str, Value]) -> Value:
    return value


def _depth(value: Value, config: dict[str, Value]) -> Value:
    """As many layers as are kept; in a list, or elsewhere than in the main stack, no more than two."""
    return _each(value, lambda v: len(_kept_layers(config)) if v == _n_layers(config) else min(v, LAYERS))


def _head_dim(value: Value, _: dict[str, Value]) -> Value:
    return HEAD_DIM if value == "auto" else _all(HEAD_DIM)(value, _)


def _main_head_dim(value: Value, config: dict[str, Value]) -> Value:
    """Where it is the width of queries and keys with a rotated part and another, twice `HEAD_DIM` as theirs is."""
    if value is None:
        return HEAD_DIM
    return 2 * HEAD_DIM if value == config.get("qk_head_dim") else _head_dim(value, config)


def _unless_none(usual: Value, rule: Rule) -> Rule:
    """What another rule says, and what is usual where the defaults have nothing."""
    return lambda value, config: usual if value is None else rule(value, config)


def _key_value_heads(value: Value, config: dict[str, Value]) -> Value:
    """As many as query heads where that is so in the original, else half as many."""
    queries = [v for k, v in config.items() if re.fullmatch(r".*(attention_heads|n_heads|num_heads)", k)]
    return HEADS if value is None else _each(value, lambda v: HEADS if v in queries else min(v, HEADS // 2))


def _width(value: Value, config: dict[str, Value]) -> Value:
    """`WIDTH`, or a quarter of it where it is the first of several stages that double it."""
    stages = ("depths", "embed_dim_per_stage", "downsampling_ratios")
    staged = any(isinstance(config.get(k), (list, tuple)) for k in stages) and not isinstance(value, (list, tuple))
    if staged and (first := config.get("patch_embeds_hidden_size")):
        return WIDTH // 4 * value // first  # the last width is told, too
    return _to(WIDTH // 4 if staged else WIDTH)(value, config)


def _mels(value: Value, config: dict[str, Value]) -> Value:
    """16, of a spectrogram seen as an image 32; where a mask has features, it is a width."""
    return _at_most(WIDTH if "mask_feature_size" in config else 32 if "spec_size" in config else 16)(value, config)


def _index(value: Value, config: dict[str, Value], first: int = 0) -> Value:
    """A layer's index, or a list of them, moved in proportion to the depth; a list stays strictly increasing."""
    depth, layers = _n_layers(config), len(_kept_layers(config))
    if not isinstance(depth, int) or depth == layers:
        return value
    moved = _each(value, lambda v: v if v <= 0 else max(first, v * layers // depth))
    if isinstance(moved, list) and len(set(moved)) < len(moved):
        last = max(moved)
        moved = list(range(max(0, last + 1 - len(moved)), last + 1))
    return moved


def _rope(value: Value, config: dict[str, Value]) -> Value:
    """Rotary embeddings in several sections, in proportion to the head's width; nested where layers differ."""
    if not isinstance(value, dict) or not value:
        return value
    if any(isinstance(v, dict) for v in value.values()):
        return {k: _rope(v, config) for k, v in value.items()}
    sections = value.get("mrope_section", (2, 3, 3))
    half = int(HEAD_DIM // 2 * value.get("partial_rotary_factor", 1.0))
    rest = [max(1, int(half * v / sum(sections) + 0.5)) for v in sections[1:]]
    return value | {"mrope_section": [half - sum(rest), *rest]}


def _window(value: Value, config: dict[str, Value]) -> Value:
    """Two, or as many as a rate of so many in one needs."""
    return 2 * config.get("downsample_rate", 1) if isinstance(value, int) and value <= 32 else value


def _special(name: str) -> Rule:
    """Special tokens that were beyond the small vocabulary: the usual three first, the others at its end.

    There, too, those that stand for images or sounds where the defaults have none.
    """
    first = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}

    def rule(value: Value, config: dict[str, Value]) -> Value:
        names = [k for k in config if SPECIAL.fullmatch(k)]
        place = first.get(name.split("_token_")[0], VOCABULARY - 1 - names.index(name))
        value = place if value is None and re.match("(image|video|audio)_token_(id|index)$", name) else value
        return _each(value, lambda v: place if v >= VOCABULARY - len(names) else v)

    return rule


SPECIAL = re.compile(r"(.+)_token_(?:id|index|ids)")

INDICES = r".*(_indexes|_indices|_layer_id|_feature_layer|_only_layers|extract_layers|_hook_ids)"

RULES: tuple[tuple[str, Rule], ...] = (
    (r"initializer_range|init_std", lambda value, _: 0.1),
    (r"num_feat_extract_layers|num_labels|.*dropout.*|.*_ratio|.*kernel_size.*|.*_std|.*_eps", _leave),
    (r"out_indices", lambda value, config: _index(value, config, first=1)),  # 0 is what comes before the layers
    (r"vision_feature_layer", lambda value, _: [-2, -1, 1] if isinstance(value, (list, tuple)) else value),
    (r"attn_layer_indices", _unless_none([1], _index)),  # some layer has attention, which caches need
    (INDICES, _index),
    (r"out_features|stage_names|_out_.*", _leave),
    (r"rope_parameters|rope_scaling", _rope),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"num_kv_shared_layers|n_(input|output)_layers", _at_most(0)),
    (r"global_attention_blocks", lambda value, _: value and [2, 4]),  # no stage's first
    (r"vocabulary_map", _unless_none({"<image>": VOCABULARY - 1}, _leave)),
    (r"attn_layer_period", _all(LAYERS)),
    (r"attn_layer_offset", _all(LAYERS - 1)),
    (r"block_types", lambda value, _: list(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else value),
    (r"layer_types", _unless_none(["conv", "full_attention"], _leave)),
    (r"qk_dim_factor", lambda value, _: 1.0),
    (r"attention_hidden_size", lambda value, config: WIDTH * (1 if value == config.get("hidden_size") else 2)),
    (r"depths|block_sizes|.*num_blocks|.*layers_per_stage|blocks_per_stage|stage_numb_of_layers", _at_most(LAYERS)),
    (r"(.*_)?(num_layers|layers?|n_layers?|num_hidden_layers|depth|decoder_blocks|num_hidden_groups)", _depth),
    (r"head_dim", _main_head_dim),
    (r"qk_head_dim|index_head_dim|attention_head_dim", _all(2 * HEAD_DIM)),
    (r"rotary_dim", _all(HEAD_DIM // 2)),
    (r"(.*_)?(head_dim|head_size|d_head|dim_head|d_kv|attention_key_size|key_dim|kv_channels|headdim)", _head_dim),
    (r"(.*_)?(num_key_value_heads|kv_n_heads|num_kv_heads|kv_heads|num_key_value_groups)", _key_value_heads),
    (r"linear_num_(key|value)_heads", _all(HEADS)),
    (r"expand|mamba_expand|mamba_ngroups|mamba_n_groups|n_groups|mamba_d_groups", _at_most(1)),
    (r"n_mamba_heads", _at_most(2)),
    (r"mamba_d_ssm", _all(WIDTH)),
    (r"(.*_)?(n_heads?|heads?|num_heads|num_attention_heads(_per_stage|_per_layer)?|attn_heads)", _all(HEADS)),
    (r".*_rank|time_step_rank", _all(HEAD_DIM)),
    (r"window_size", _window),
    (r"upsample_groups|pad_head_dim_to_multiple_of", _all(WIDTH)),
    (r"num_pos_feats", _all(WIDTH // 2)),
    (r"codebook_size", _at_most(128)),
    (r"vocab_size", lambda value, _: VOCABULARY if value is None else min(value, VOCABULARY)),
    (r"(.*_)?(vocab_size|vocab_size_per_layer_input|byte_group_vocab|entity_vocab)", _at_most(VOCABULARY)),
    (r"num_(bpe|wordpiece|character)_labels", _at_most(VOCABULARY)),
    (r"num_self_attends_per_block", _at_most(LAYERS)),
    (r"prediction_length", lambda value, _: value or 12),
    (r"axial_pos_embds_dim", lambda value, _: [WIDTH // 2, WIDTH // 2]),
    (r"num_filters|n_filters|base_channels", _at_most(WIDTH // 2)),
    (r"coordinate_size", _all(12)),
    (r"shape_size", _all(8)),
    (r"(.*_)?(n_positions|max_(position_embeddings|seq_len|sequence_length|target_positions))", _at_most(128)),
    (r"block_size|seq_length|.*chunk_size|.*attention_window|sliding_window.*|local_attention", _at_most(32)),
    (r"max_source_positions", _at_most(32)),
    (r"(.*_)?(image_size|img_size|crop_size|input_size|spec_size)|size", _at_most(64)),
    (r"(.*_)?(patch_sizes?|prompt_size)", _at_most(8)),
    (r"image_grid_pinpoints", lambda value, _: value and [[64, 128], [128, 64], [128, 128]]),
    (r"mm_tokens_per_image", _at_most(16)),
    (r"projector_patch_to_query_dict", lambda value, _: {64: 8}),  # queries for so many patches
    (r"n_routed_experts", _unless_none(4, _at_most(4))),
    (r"(num|n)_(local|routed)?_?experts|moe_num_experts|num_experts", _at_most(4)),
    (r"num_experts_per_tok|n_shared_experts", _unless_none(2, _at_most(2))),
    (r".*experts_per_tok(en)?|moe_k|moe_topk|top_k|moe_top_k|.*shared_experts", _at_most(2)),
    (r"n_group|topk_group|num_expert_group", _at_most(1)),
    (r"num_queries|num_query_tokens|latent_query_num|num_latents|num_denoising|.*n_latents", _at_most(8)),
    (r"num_mel_bins|feature_size|num_mels|input_feat.*", _mels),
    (r".*(state_size|d_state)", _at_most(16)),
    (r"(.*_)?(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|dim_ff|mlp_dim|n_inner|dim_feedforward|"
     r"feedforward_dim|mlp_hidden_size|intermediate_dim|feed_forward_hidden_size)", _to(FFN)),
    (r"embed_dim|embedding_dim|hidden_size|patch_embeds_hidden_size|encoder_hidden_size", _width),
    (r"(.*_)?(hidden_(sizes?|dims?|dimension)|d_model|d_latents|n_embd|embed_dims?|dim|width|embedding_(dim|size)|"
     r"emb_(dim|size)|conv_(dim|channels)|proj(ect)?_dim|projection_size|\w*projection_dim|\w+_proj_size|"
     r"embed_dim_per_stage|backbone_channel_list|channel_list|mid_channels|layer_channels|output_channels|"
     r"post_conv_in_channels|upsample_initial_channel|post_process_channels|(mask|fpn)_feature_size|"
     r"intra_bottleneck_size)", _to(WIDTH)),
)  # fmt: skip
"""What to do with an attribute, by its whole name; the first rule that matches says, and what none matches stays."""

SHARED = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}

EXCEPTIONS: dict[str, dict[str, Value]] = {
    "cvt": {"depth": [1, 2, 3]},  # the model reads one rate for every stage from a list as long as the stage is deep
    "dbrx": {"attn_config": {"kv_n_heads": HEADS, "rope_theta": 1e4, "clip_qkv": 8.0}},  # its own lack rope_theta
    "esm": {"pad_token_id": 0, "mask_token_id": VOCABULARY - 1},  # its defaults have none
    "glmasr_encoder": {"intermediate_size": 2 * WIDTH},  # frames are put together up to this
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},  # its defaults have no attention
    "moonshine_streaming": {"num_key_value_heads": HEADS},  # its defaults have none
    "voxtral_encoder": {"intermediate_size": 2 * WIDTH},
    "xmod": {"default_language": "en_XX"},  # its defaults name none
    "zamba": SHARED,  # what its layers share is tied from the second on
    "zamba2": SHARED | {"n_mamba_heads": HEADS},
}
"""By model type: what no rule over names can know."""


def _n_layers(config: dict[str, Value]) -> int | None:
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
    return next((config[k] for k in names if k in config), None)


def _per_layer(config: dict[str, Value]) -> list[str]:
    """Names of the lists with one entry a layer."""
    depth = _n_layers(config)
    if not isinstance(depth, int) or depth <= 4:
        return []
    return [k for k, v in config.items() if isinstance(v, (list, tuple)) and len(v) == depth and k[0] != "_"]


def _kept_layers(config: dict[str, Value]) -> list[int]:
    """Which layers stay: the first of every kind that the lists with one entry a layer tell apart, two at least.

    Where the configuration names some layers by their indices, there are as many layers as indices.
    """
    lists, depth = [config[k] for k in _per_layer(config)], _n_layers(config)
    if not isinstance(depth, int):
        return list(range(LAYERS))
    named = [len(v) for k, v in config.items() if re.fullmatch(INDICES, k) and isinstance(v, (list, tuple))]
    named = [n for n in named if n <= 4]
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(str([v[i] for v in lists if isinstance(v[i], str)]), i)
    kept = sorted(kinds.values())[:4]
    more = [i for i in range(depth) if i not in kept]
    return sorted(kept + more[: max(0, max([LAYERS, *named]) - len(kept))])


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """The same configuration, small.

    Raises:
        ModelError: the configuration's class does not accept the small values.
    """
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    values |= {"out_indices": getattr(config, "_out_indices", None)} if hasattr(config, "_out_indices") else {}
    layers, lists, changed = _kept_layers(values), _per_layer(values), {}
    for name, value in values.items():
        if name in lists:
            value = [value[i] for i in layers]
        if isinstance(value, PretrainedConfig):
            changed[name] = tiny_config(value)
        elif SPECIAL.fullmatch(name):
            changed[name] = _special(name)(value, values)
        else:
            rule = next((r for pattern, r in RULES if re.fullmatch(pattern, name)), _leave)
            changed[name] = rule(value, values)
    try:
        cls: Any = type(config)
        usual = vars(cls())
        changed = {k: v for k, v in changed.items() if isinstance(v, PretrainedConfig) or v != usual.get(k)}
        return cls(**(changed | EXCEPTIONS.get(config.model_type, {})))
    except Exception as error:  # whatever a configuration's own checks raise
        raise ModelError(f"{type(config).__name__} does not accept small values: {said(error)}") from error
