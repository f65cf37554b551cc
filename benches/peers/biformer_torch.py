"""BiFormer in plain PyTorch: the twin of the Rust model, to measure against.

Written for this project from the published description of BiFormer (Zhu et al., CVPR 2023) and
held to the published model's numbers by `check.py`. Parameter names are those of the published
state_dict, so the same weight file loads on both sides. The layout is the T/S/B one (convolutional
stem, position-encoding convolution in every block); the number of stages is free.

Shapes: maps outside the blocks are (N, C, H, W), tokens inside them are (N, H, W, C). In
channels-last memory these are the same bytes, so that a permute between them copies nothing.
"""

import json

import torch
import torch.nn.functional as F
from torch import nn

# The published biformer_tiny. Every other configuration is given as differences from it.
DEFAULTS = {
    "depth": [2, 2, 8, 2],
    "embed_dim": [64, 128, 256, 512],
    "n_win": 7,  # regions per side, one number or one per stage
    "topks": [1, 4, 16, -2],  # routed regions per region; -2: full attention
    "head_dim": 32,  # of the routed stages
    "full_attention_heads": 8,  # of the stages with full attention
    "mlp_ratio": 3,
    "auto_pad": False,
    "drop_path": 0.0,
    "num_classes": 1000,
    "stem": "conv",
    "stem_strides": [2, 2],
}

# Keys that describe a configuration without shaping the model.
LABELS = {"name", "image_size"}

# Fields of the Rust model's configuration for which the twin has this one value.
FIXED = {
    "family": "biformer",
    "features": "logits",
    "lce_kernel": 5,
    "pos_kernel": 3,
    "soft_routing": False,
    "layer_scale": 0.0,
}

PRESETS = {
    "tiny": {},
    "small": {"depth": [4, 4, 18, 4]},
    # For 32x32 images. The Rust program is the authority: `run.py` takes the configuration from it.
    "nano": {
        "depth": [2, 3, 2],
        "embed_dim": [48, 96, 192],
        "n_win": 4,
        "topks": [4, 8, -2],
        "head_dim": 24,
        "full_attention_heads": 6,
        "num_classes": 10,
        "stem_strides": [2, 1],
    },
}


def load_config(source):
    """Complete configuration from a preset's name, a JSON file or a dict; unknown keys are errors."""
    if isinstance(source, str):
        if source in PRESETS:
            source = PRESETS[source]
        else:
            with open(source) as file:
                source = json.load(file)
    for key, value in FIXED.items():
        if source.get(key, value) != value:
            raise ValueError(f"the twin has {key} = {value!r} only, not {source[key]!r}")
    source = {key: value for key, value in source.items() if key not in LABELS | FIXED.keys()}
    unknown = set(source) - set(DEFAULTS)
    if unknown:
        raise ValueError(f"configuration keys that the twin does not know: {sorted(unknown)}")
    config = {**DEFAULTS, **source}
    if config["stem"] != "conv":
        raise ValueError(f"stem {config['stem']!r}: the twin has only \"conv\"")
    stages = len(config["depth"])
    if isinstance(config["n_win"], int):
        config["n_win"] = [config["n_win"]] * stages
    for key in ("embed_dim", "n_win", "topks"):
        if len(config[key]) != stages:
            raise ValueError(f"{key} has {len(config[key])} entries for {stages} stages")
    return config


def to_regions(x, s):
    """(N, H, W, C) to (N, S*S, tokens of a region, C); regions and tokens row-major."""
    n, h, w, c = x.shape
    x = x.view(n, s, h // s, s, w // s, c).transpose(2, 3)
    return x.reshape(n, s * s, (h // s) * (w // s), c)


def from_regions(x, s, h, w):
    """The inverse of `to_regions`; images and regions may also come as one dimension."""
    c = x.shape[-1]
    x = x.reshape(-1, s, s, h // s, w // s, c).transpose(2, 3)
    return x.reshape(-1, h, w, c)


def gather_published(kv, routes):
    """Keys and values of the routed regions, (N, S*S, k*t, C) each, as the published code reads
    them: expand kv (N, S*S, t, 2C) to all pairs of regions, then gather along the pairs. Its
    backward writes a gradient of the expanded size, S*S times that of kv."""
    n, s2, t, c2 = kv.shape
    k = routes.shape[-1]
    pairs = kv.view(n, 1, s2, t, c2).expand(n, s2, s2, t, c2)
    index = routes.view(n, s2, k, 1, 1).expand(n, s2, k, t, c2)
    return torch.gather(pairs, 2, index).flatten(2, 3).chunk(2, -1)


def gather_index(kv, routes):
    """The same by row selection, the fastest way found in PyTorch: a row holds the keys or the
    values of a region, and its backward adds rows. (`kv[rows]` gives the same but its backward runs
    on one thread; gathering keys and values together costs a concatenation in backward.)"""
    n, s2, t, c2 = kv.shape
    first = torch.arange(0, n * s2, s2, device=kv.device).view(n, 1, 1)
    rows = (routes + first).flatten()
    k, v = (x.reshape(n * s2, -1).index_select(0, rows) for x in kv.chunk(2, -1))
    return k.view(n, s2, -1, c2 // 2), v.view(n, s2, -1, c2 // 2)


GATHERS = {"published": gather_published, "index": gather_index}


def attend(q, k, v, heads, scale, sdpa):
    """Attention of (B, tokens, C) tensors whose channels are (head, head channel)."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if sdpa:
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    else:
        out = ((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def depthwise(conv, x):
    """A convolution over tokens (N, H, W, C)."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class QkvLinear(nn.Module):
    """Carries the published name `qkv.qkv`."""

    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        return self.qkv(x)


class BiLevelRoutingAttention(nn.Module):
    """Each region attends to the tokens of its k best regions; (N, H, W, C) to the same."""

    def __init__(self, dim, heads, n_win, topk, auto_pad, gather, sdpa):
        super().__init__()
        if topk > n_win * n_win:
            raise ValueError(f"topk {topk} exceeds the {n_win * n_win} regions")
        self.heads, self.n_win, self.topk, self.auto_pad = heads, n_win, topk, auto_pad
        self.scale = dim**-0.5  # of the full width, not of a head: as published
        self.gather, self.sdpa = GATHERS[gather], sdpa
        self.lepe = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.qkv = QkvLinear(dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        n, h0, w0, c = x.shape
        s = self.n_win
        if self.auto_pad:
            # Before the projection, so that padded tokens hold its bias: as published.
            x = F.pad(x, (0, 0, 0, -w0 % s, 0, -h0 % s))
        h, w = x.shape[1:3]
        if h % s or w % s:
            raise ValueError(f"{h}x{w} tokens do not divide into {s}x{s} regions; set auto_pad")

        return self.wo(self.mix(self.qkv(to_regions(x, s)), h, w))[:, :h0, :w0]

    def mix(self, qkv, h, w):
        """Attention itself, without the layers around it: from queries, keys and values of regions,
        (N, S*S, t, 3C), to (N, H, W, C)."""
        s, c = self.n_win, qkv.shape[-1] // 3
        q, kv = qkv.split([c, 2 * c], -1)  # (N, S*S, t, C), (.., 2C)
        k, v = kv.chunk(2, -1)  # (N, S*S, t, C)
        lepe = depthwise(self.lepe, from_regions(v, s, h, w))

        # Routing is shared by the heads and carries no gradient: as published.
        q_region, k_region = q.detach().mean(2), k.detach().mean(2)  # (N, S*S, C)
        affinity = (q_region * self.scale) @ k_region.transpose(-2, -1)
        routes = affinity.topk(self.topk, -1).indices  # (N, S*S, k)

        k, v = self.gather(kv, routes)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = attend(q, k, v, self.heads, self.scale, self.sdpa)
        return from_regions(out, s, h, w) + lepe


class FullAttention(nn.Module):
    """Attention over all tokens. Its local convolution reads the input, not the values."""

    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.lepe = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)

    def forward(self, x):
        _, h, w, c = x.shape
        q, k, v = self.qkv(x.flatten(1, 2)).chunk(3, -1)
        out = attend(q, k, v, self.heads, (c // self.heads) ** -0.5, self.sdpa)
        return self.proj(out.unflatten(1, (h, w)) + depthwise(self.lepe, x))


class Block(nn.Module):
    """Position convolution, attention, MLP, each with its residual; (N, C, H, W) to the same."""

    def __init__(self, dim, attn, mlp_ratio, drop_path):
        super().__init__()
        hidden = int(mlp_ratio * dim)
        self.drop_path = drop_path
        self.pos_embed = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        # The published MLP has an optional convolution at index 1, off in T/S/B.
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.Identity(), nn.GELU(), nn.Linear(hidden, dim))

    def drop(self, x):
        if self.drop_path == 0 or not self.training:
            return x
        keep = 1 - self.drop_path
        return x * (x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep) / keep)

    def forward(self, x):
        x = (x + self.pos_embed(x)).permute(0, 2, 3, 1)
        x = x + self.drop(self.attn(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x.permute(0, 3, 1, 2)


def conv_bn(c_in, c_out, stride):
    return [nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1), nn.BatchNorm2d(c_out)]


class BiFormer(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, config, gather="index", sdpa=True):
        super().__init__()
        config = load_config(config)
        depth, dims = config["depth"], config["embed_dim"]
        first, second = config["stem_strides"]
        stem = [*conv_bn(3, dims[0] // 2, first), nn.GELU(), *conv_bn(dims[0] // 2, dims[0], second)]
        self.downsample_layers = nn.ModuleList([nn.Sequential(*stem)])
        for c_in, c_out in zip(dims, dims[1:]):
            self.downsample_layers.append(nn.Sequential(*conv_bn(c_in, c_out, 2)))

        def attention(dim, n_win, topk):
            if topk == -2:
                return FullAttention(dim, config["full_attention_heads"], sdpa)
            if topk > 0:
                heads = dim // config["head_dim"]
                return BiLevelRoutingAttention(dim, heads, n_win, topk, config["auto_pad"], gather, sdpa)
            raise ValueError(f"topk {topk}: the twin has routing (> 0) and full attention (-2)")

        drops = iter(torch.linspace(0, config["drop_path"], sum(depth)).tolist())
        self.stages = nn.ModuleList()
        for blocks, dim, n_win, topk in zip(depth, dims, config["n_win"], config["topks"]):
            stage = [Block(dim, attention(dim, n_win, topk), config["mlp_ratio"], next(drops)) for _ in range(blocks)]
            self.stages.append(nn.Sequential(*stage))
        self.norm = nn.BatchNorm2d(dims[-1])
        self.head = nn.Linear(dims[-1], config["num_classes"])
        for module in self.modules():  # convolutions keep PyTorch's default, as published
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x):
        for downsample, stage in zip(self.downsample_layers, self.stages):
            x = stage(downsample(x))
        return self.head(self.norm(x).mean((2, 3)))


def parameter_groups(model, weight_decay=0.05):
    """AdamW's groups: matrices and filters decay, biases and norms do not."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def count_macs(config, image_size):
    """Multiply-adds of one image's forward pass: convolutions, linears and matrix products."""
    config = load_config(config)
    dims, r = config["embed_dim"], config["mlp_ratio"]

    def halve(side, stride):
        return -(-side // stride)

    total, side, c_in = 0, image_size, 3
    for c, stride in zip((dims[0] // 2, dims[0]), config["stem_strides"]):
        side = halve(side, stride)
        total += 9 * c_in * c * side * side
        c_in = c
    stages = zip(config["depth"], dims, config["n_win"], config["topks"])
    for stage, (blocks, c, s, k) in enumerate(stages):
        if stage > 0:
            side = halve(side, 2)
            total += 9 * c_in * c * side * side
            c_in = c
        tokens = side * side
        padded = (side + -side % s) ** 2 if k > 0 else tokens
        keys = k * padded // (s * s) if k > 0 else tokens
        block = 9 * c * tokens + 2 * int(r * c) * c * tokens  # position convolution, MLP
        block += 4 * c * c * padded + 25 * c * padded + 2 * c * keys * padded  # qkv and out, LCE, attention
        block += c * s**4 if k > 0 else 0  # routing
        total += blocks * block
    return total + dims[-1] * config["num_classes"]
