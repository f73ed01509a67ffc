"""A slow reference in float64 numpy that shares no code with normgeo's statistics, stream and geometry.

It keeps every hidden state, takes angles as arccos of a normalized dot product, and standardizes by the definitions of
LayerNorm and RMSNorm, eps included. Only the directions come from normgeo, since they are a matter of convention.
"""

import numpy as np
import torch

QUANTILES = {"q01": 0.01, "q05": 0.05, "q25": 0.25, "median_deg": 0.5, "q75": 0.75, "q95": 0.95, "q99": 0.99}


def degrees(x, u):
    """[vectors] angles between the rows of x and u."""
    return np.degrees(np.arccos(np.clip(x @ u / (np.linalg.norm(x, axis=1) * np.linalg.norm(u)), -1, 1)))


def energy(x, u):
    """[vectors] shares of the rows' squared norm along u."""
    return (x @ u) ** 2 / (x**2).sum(1) / (u**2).sum()


def standardized(x, kind, eps):
    """LayerNorm or RMSNorm of the rows, without gain and bias."""
    if kind == "layernorm":
        x = x - x.mean(1, keepdims=True)
    return x / np.sqrt((x**2).mean(1, keepdims=True) + eps)


def capture(model, ids, names):
    """{name: [(input, output) of each call]} of the named modules in one forward pass; float64 [vectors, width]."""
    kept = {name: [] for name in names}

    def hook(name):
        def keep(module, args, kwargs, output):
            x = args[0] if args else next(iter(kwargs.values()))
            kept[name].append(tuple(t.detach().clone().double().flatten(0, -2).numpy() for t in (x, output)))

        return keep

    modules, was_training = dict(model.named_modules()), model.training
    handles = [modules[name].register_forward_hook(hook(name), with_kwargs=True) for name in names]
    ids = torch.as_tensor(ids)
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, **decoder)
    for handle in handles:
        handle.remove()
    model.train(was_training)
    return kept


def row(x, u):
    """What a table says of vectors x and one direction u."""
    theta = degrees(x, u)
    found = {
        "mean_deg": theta.mean(), "std_deg": theta.std(), "min_deg": theta.min(), "max_deg": theta.max(),
        "n_tokens": len(theta), "n_excluded": 0, "mean_norm": np.linalg.norm(x, axis=1).mean(),
        "energy_share": energy(x, u).mean(),
    }  # fmt: skip
    return found | {name: np.quantile(theta, q, method="inverted_cdf") for name, q in QUANTILES.items()}


def null_row(x, null):
    """The row of the null ensemble: the distribution of the mean angles of its directions."""
    theta = np.stack([degrees(x, v) for v in null])
    means, share = theta.mean(1), np.array([energy(x, v).mean() for v in null])
    found = {
        "mean_deg": means.mean(), "std_deg": means.std(ddof=1), "min_deg": means.min(), "max_deg": means.max(),
        "within_deg": np.sqrt(theta.var(1).mean()), "n_tokens": len(x), "n_excluded": 0,
        "mean_norm": np.linalg.norm(x, axis=1).mean(), "energy_share": share.mean(),
        "energy_q95": np.quantile(share, 0.95), "n_directions": len(null),
    }  # fmt: skip
    return found | {name: np.quantile(means, q) for name, q in QUANTILES.items()}


def against_null(x, null):
    """Where the uniform vector's mean angle and energy lie among those of the null ensemble."""
    one = np.ones(x.shape[1])
    means = np.array([degrees(x, v).mean() for v in null])
    share = np.array([energy(x, v).mean() for v in null])
    mean = degrees(x, one).mean()
    return {
        "null_percentile": 100 * ((means < mean).mean() + (means == mean).mean() / 2),
        "null_z": (mean - means.mean()) / means.std(ddof=1),
        "energy_percentile": 100 * (share < energy(x, one).mean()).mean(),
    }


def table(model, ids, sites, directions):
    """{(site key, phase, direction): {column: value}} for every site of a model, every token in the null ensemble."""
    kept, found = capture(model, ids, {site.name for site in sites}), {}
    for site in sites:
        pre, post = kept[site.name][site.call]
        y = standardized(pre, site.kind, site.eps)
        named, null = (t.numpy() for t in (directions[site.d].named, directions[site.d].null))
        for phase, x in (("pre", pre), ("standardized", y), ("post", post)):
            for name, u in zip(("uniform", "random_a", "random_b"), named, strict=True):
                found[site.key, phase, name] = row(x, u)
            found[site.key, phase, "null"] = null_row(x, null)
            if not (phase == "standardized" and site.kind == "layernorm"):  # 90 degrees there, by construction
                found[site.key, phase, "uniform"] |= against_null(x, null)
        turned = np.degrees(
            np.arccos(np.clip((pre * y).sum(1) / np.linalg.norm(pre, axis=1) / np.linalg.norm(y, axis=1), -1, 1))
        )
        found[site.key, "standardized", "uniform"] |= {
            "rotation_deg": turned.mean(),
            "rotation_std_deg": turned.std(),
        }
    return found
