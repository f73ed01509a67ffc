"""Tiny random Hugging Face models, built from configs, with every gain and bias perturbed unless asked otherwise."""

import functools

import torch
import transformers as hf
from torch.nn.functional import cross_entropy

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96,
         "max_position_embeddings": 64}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2_LIKE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}

CONFIGS = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2_LIKE),
    "gpt_neo": (hf.GPTNeoForCausalLM, hf.GPTNeoConfig, {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]]}),
    "gptj": (hf.GPTJForCausalLM, hf.GPTJConfig, GPT2_LIKE | {"rotary_dim": 4}),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, SMALL),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 96,
        "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "falcon": (hf.FalconForCausalLM, hf.FalconConfig, SMALL | {"new_decoder_architecture": False, "alibi": False}),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, SMALL),
    "stablelm": (hf.StableLmForCausalLM, hf.StableLmConfig, SMALL | {"num_key_value_heads": 4}),
    "mpt": (hf.MptForCausalLM, hf.MptConfig, {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_seq_len": 64}),
    "olmo": (hf.OlmoForCausalLM, hf.OlmoConfig, SMALL),
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, SMALL | {"num_key_value_heads": 4} | TOKENS),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, SMALL),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, SMALL | {"num_key_value_heads": 2}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "nemotron": (hf.NemotronForCausalLM, hf.NemotronConfig, SMALL | {"num_key_value_heads": 2}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, SMALL),
    "albert": (hf.AlbertForMaskedLM, hf.AlbertConfig, SMALL | {"embedding_size": 32}),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig, {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
        "patch_size": 8}),
    "whisper": (hf.WhisperForConditionalGeneration, hf.WhisperConfig, {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96,
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "decoder_start_token_id": 1}
        | TOKENS),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
        "decoder_start_token_id": 0}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, SMALL | {"num_key_value_heads": 4}),
}  # fmt: skip


def perturb(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Move every vector parameter off its initial value: gamma 1 and beta 0 hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += (0.3 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    return model


DEPTH = {
    "gpt2": {"n_layer": 5}, "bloom": {"n_layer": 5}, "opt": {"num_hidden_layers": 5}, "gptj": {"n_layer": 5},
    "gpt_neox": {"num_hidden_layers": 5}, "vit": {"num_hidden_layers": 5}, "olmo": {"num_hidden_layers": 5},
    "whisper": {"encoder_layers": 4, "decoder_layers": 5}, "bert": {"num_hidden_layers": 5},
    "gpt_neo": {"num_layers": 6, "attention_types": [[["global", "local"], 3]]},
}  # fmt: skip


def fresh(name: str, seed: int = 0, **changes) -> hf.PreTrainedModel:
    """A tiny model of an architecture as it is before training, in evaluation mode."""
    cls, config, shape = CONFIGS[name]
    torch.manual_seed(seed)
    return cls(config(**(shape | changes))).eval()


def tiny(name: str, seed: int = 0, **changes) -> hf.PreTrainedModel:
    """A tiny random model of an architecture, in evaluation mode."""
    return perturb(fresh(name, seed, **changes), seed)


@functools.cache
def _architectures():
    from normgeo.architectures import architectures  # not above, as for what follows

    return {each.model_type: each for each in architectures()}


def by_type(model_type: str) -> hf.PreTrainedModel:
    """A tiny random model of any of transformers' architectures, as `normgeo.architectures` makes it."""
    from normgeo.architectures import tiny as built

    return built(_architectures()[model_type])


@functools.cache
def converted(name: str):
    """A tiny model of several layers, and its conversion in memory, for tests that leave both as they are."""
    from normgeo import convert  # not above, as for what follows

    model = tiny(name, **DEPTH[name])
    return model, convert(model)


def trained(model, inputs, labels, steps=50):
    """The losses of steps of AdamW, in the model's dtype: transformers' own are computed in float32."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    model.train()
    for step in range(steps):
        torch.manual_seed(step)
        loss = cross_entropy(model(**inputs).logits.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(expected, losses):
    """How far losses are from others at most, as a share."""
    return max(abs(a - b) / a for a, b in zip(expected, losses, strict=True))


def fingerprint(model):
    """What a model is: its weights, the classes, modes and hooks of its modules, and its configuration."""
    # not above: what is imported within normgeo while its types are checked is compiled anew, its warnings are errors
    from normgeo.models import weights_digest

    modules = [(name, type(m), m.training, *map(hooks, (m._forward_hooks, m._forward_pre_hooks)))
               for name, m in model.named_modules()]  # fmt: skip
    return weights_digest(model), modules, model.config.to_json_string()


def hooks(own):
    """How many there are beside those that transformers leaves where it was asked for hidden states."""
    return sum(not getattr(hook, "__module__", "").startswith("transformers") for hook in own.values())
