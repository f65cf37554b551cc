"""BiFormer in PyTorch, as plainly as possible: every option that the Rust program has, and no care for speed.

Written from a description of the published code, not from the Rust code, so that a mistake in one
of them is unlikely to be in the other. A model is a configuration (the names of `biformer info
--json`) and a dictionary of tensors under the names of the published state_dict; it computes in the
type of these tensors. `random_models.py` compares it with the program.
"""

import math

import torch
import torch.nn.functional as F


class Impossible(Exception):
    """This model cannot run on this map."""


class WrongRoutes(Exception):
    """These are no routes: too many or too few, one twice, or to a region that there is not."""


def of_stage(setting, stage):
    return setting[stage] if isinstance(setting, list) else setting


def attention_of(config, stage):
    """Routed attention; or full attention, without a local context, with one of its input or of its values."""
    topk = config["topks"][stage]
    if topk > 0:
        return "routed"
    if config["family"] == "biformer_stl_nchw":
        return "full, context of values"
    return "full" if topk == -1 else "full, context of input"


def block_name(config, stage, block):
    return f"stages.{stage}.{block}" if config["family"] == "biformer" else f"stages.{stage}.blocks.{block}"


def parameter_shapes(config):
    """The shape of every tensor of the state_dict, by name."""
    shapes = {}
    dims, family, lce = config["embed_dim"], config["family"], config["lce_kernel"]
    published, nchw = family == "biformer", family == "biformer_stl_nchw"
    pixel = (1, 1) if nchw else ()  # linear layers are 1x1 convolutions there

    def weights(name, *shape, bias=True):
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    def layer_norm(name, channels):
        weights(name, channels)

    def batch_norm(name, channels):
        weights(name, channels)
        shapes[f"{name}.running_mean"] = shapes[f"{name}.running_var"] = (channels,)
        shapes[f"{name}.num_batches_tracked"] = ()

    def context(name, channels):
        weights(name, channels, 1, lce, lce)

    for stage, dim in enumerate(dims):
        down = f"downsample_layers.{stage}"
        if published and stage == 0:
            weights(f"{down}.0", dim // 2, 3, 3, 3)
            batch_norm(f"{down}.1", dim // 2)
            weights(f"{down}.3", dim, dim // 2, 3, 3)
            batch_norm(f"{down}.4", dim)
        elif published:
            weights(f"{down}.0", dim, dims[stage - 1], 3, 3)
            batch_norm(f"{down}.1", dim)
        elif stage == 0:
            weights(f"{down}.0", dim, 3, 4, 4)
            batch_norm(f"{down}.1", dim)
        else:
            batch_norm(f"{down}.0", dims[stage - 1])
            weights(f"{down}.1", dim, dims[stage - 1], 2, 2)
        hidden, attention = int(of_stage(config["mlp_ratio"], stage) * dim), attention_of(config, stage)
        for block in range(config["depth"][stage]):
            name = block_name(config, stage, block)
            if kernel := config["pos_kernel"]:
                weights(f"{name}.pos_embed", dim, 1, kernel, kernel)
            layer_norm(f"{name}.norm1", dim)
            if attention == "routed":
                if lce:
                    context(f"{name}.attn.lepe", dim)
                weights(f"{name}.attn.qkv_linear" if nchw else f"{name}.attn.qkv.qkv", 3 * dim, dim, *pixel)
                weights(f"{name}.attn.output_linear" if nchw else f"{name}.attn.wo", dim, dim, *pixel)
            else:
                weights(f"{name}.attn.qkv", 3 * dim, dim, *pixel, bias=False)
                weights(f"{name}.attn.proj", dim, dim, *pixel)
                if attention != "full":
                    context(f"{name}.attn.lepe", dim)
            layer_norm(f"{name}.norm2", dim)
            weights(f"{name}.mlp.0", hidden, dim, *pixel)
            weights(f"{name}.mlp.{3 if published else 2}", dim, hidden, *pixel)
            if config["layer_scale"] > 0:
                shapes[f"{name}.gamma1"] = shapes[f"{name}.gamma2"] = (dim,)
    if config["features"] == "dense":
        for stage, dim in enumerate(dims):
            layer_norm(f"extra_norms.{stage}", dim)
        return shapes
    batch_norm("norm", dims[-1])
    if config["features"] == "logits":
        weights("head", config["num_classes"], dims[-1])
    return shapes


class Reference:
    """A model: `Reference(config, tensors)(images)` gives its results by name.

    Where `routes` holds the regions that each region is routed to, (N, P, k) by the attention's
    name, these are taken, and `route_error` says by how much, relative to the largest affinity, the
    worst of them falls short of what the reference would have chosen: which of two equal regions
    comes first, rounding decides.
    """

    def __init__(self, config, tensors, training=False, routes=None):
        self.config, self.tensors, self.training, self.routes = config, tensors, training, routes
        self.route_error = 0.0

    def __call__(self, x):
        """Images (N, 3, H, W) that have been normalised."""
        config, results = self.config, {}
        for stage, depth in enumerate(config["depth"]):
            x = self.downsample(stage, x)
            for block in range(depth):
                x = self.block(block_name(config, stage, block), stage, x)
            if config["features"] == "dense":
                normed = self.layer_norm(f"extra_norms.{stage}", x.permute(0, 2, 3, 1))
                results[f"out{stage}"] = normed.permute(0, 3, 1, 2)
        if results:
            return results
        pooled = self.batch_norm("norm", x).mean((2, 3))
        return {"pooled": pooled} if config["features"] == "pooled" else {"logits": self.linear("head", pooled)}

    def downsample(self, stage, x):
        name = f"downsample_layers.{stage}"
        if self.config["family"] == "biformer":
            if stage > 0:
                return self.batch_norm(f"{name}.1", self.convolution(f"{name}.0", x, stride=2, padding=1))
            first, second = self.config["stem_strides"]
            x = gelu(self.batch_norm(f"{name}.1", self.convolution(f"{name}.0", x, stride=first, padding=1)))
            return self.batch_norm(f"{name}.4", self.convolution(f"{name}.3", x, stride=second, padding=1))
        if stage == 0:
            return self.batch_norm(f"{name}.1", self.convolution(f"{name}.0", x, stride=4))
        return self.convolution(f"{name}.1", self.batch_norm(f"{name}.0", x), stride=2)

    def block(self, name, stage, x):
        config = self.config
        if config["pos_kernel"]:
            x = x + self.depthwise(f"{name}.pos_embed", x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x.permute(0, 2, 3, 1)  # (N, H, W, C) from here on
        attention = self.routed if attention_of(config, stage) == "routed" else self.full
        scales = [self.tensors.get(f"{name}.gamma{branch}", 1.0) for branch in (1, 2)]
        x = x + scales[0] * attention(f"{name}.attn", stage, self.layer_norm(f"{name}.norm1", x))
        hidden = gelu(self.linear(f"{name}.mlp.0", self.layer_norm(f"{name}.norm2", x)))
        second = f"{name}.mlp.{3 if config['family'] == 'biformer' else 2}"
        return (x + scales[1] * self.linear(second, hidden)).permute(0, 3, 1, 2)

    def full(self, name, stage, x):
        images, height, width, channels = x.shape
        heads = self.config["full_attention_heads"]
        q, k, v = self.linear(f"{name}.qkv", x).split(channels, -1)
        q, k, values = (by_head(part.reshape(images, height * width, channels), heads) for part in (q, k, v))
        out = attend(q, k, values, (channels // heads) ** -0.5).reshape(images, height, width, channels)
        if (kind := attention_of(self.config, stage)) != "full":
            out = out + self.depthwise(f"{name}.lepe", x if kind == "full, context of input" else v)
        return self.linear(f"{name}.proj", out)

    def routed(self, name, stage, x):
        config, side, channels = self.config, of_stage(self.config["n_win"], stage), x.shape[-1]
        height, width = x.shape[1:3]
        nchw = config["family"] == "biformer_stl_nchw"
        if nchw:
            # As many regions as regions of this size make; the last ones are cut short.
            if min(height, width) < side:
                raise Impossible(f"{height}x{width} tokens in {side}x{side} regions")
            region = height // side, width // side
            grid = math.ceil(height / region[0]), math.ceil(width / region[1])
        else:
            if (height % side or width % side) and not config["auto_pad"]:
                raise Impossible(f"{height}x{width} tokens do not divide into {side}x{side} regions")
            # Padded before the projection, so that padding has keys and values, too: those of the bias.
            x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
            region, grid = (x.shape[1] // side, x.shape[2] // side), (side, side)
        q, k, v = self.linear(f"{name}.qkv_linear" if nchw else f"{name}.qkv.qkv", x).split(channels, -1)
        context = self.depthwise(f"{name}.lepe", v) if config["lce_kernel"] else 0
        means = [mean_of_regions(part, region, grid) for part in (q, k)]
        q, k, v = (regions(part, region, grid) for part in (q, k, v))

        # The published scale is that of all channels, not of a head's.
        scale, heads = channels**-0.5, channels // config["head_dim"]
        affinity = scale * means[0] @ means[1].transpose(1, 2)
        routes = self.choose(name, affinity, config["topks"][stage])
        weights = affinity.gather(-1, routes).softmax(-1)

        images, image = len(x), torch.arange(len(x))[:, None]
        out = []
        for place in range(grid[0] * grid[1]):
            keys, values = (part[image, routes[:, place]] for part in (k, v))  # (N, k, tokens, C)
            if config["soft_routing"]:
                weight = weights[:, place, :, None, None]
                keys, values = weight * keys, weight * values
            keys, values = (by_head(part.reshape(images, -1, channels), heads) for part in (keys, values))
            out.append(attend(by_head(q[:, place], heads), keys, values, scale))
        out = torch.stack(out, 1).reshape(images, *grid, *region, channels).permute(0, 1, 3, 2, 4, 5)
        out = out.reshape(images, grid[0] * region[0], grid[1] * region[1], channels)
        if nchw:
            return self.linear(f"{name}.output_linear", out[:, :height, :width] + context)
        return self.linear(f"{name}.wo", out + context)[:, :height, :width]

    def choose(self, name, affinity, count):
        """The regions with the highest affinities, of equal ones the first; or the routes that were given, checked."""
        affinity = affinity.detach()
        highest, routes = affinity.sort(dim=-1, descending=True, stable=True)
        if self.routes is None:
            return routes[..., :count]
        given = self.routes.get(name)
        if given is None or given.shape != routes[..., :count].shape:
            raise WrongRoutes(f"{name}: routes {given if given is None else tuple(given.shape)}")
        given = given.long()
        ordered = given.sort(dim=-1).values
        if given.max() >= affinity.shape[-1] or (ordered.diff(dim=-1) == 0).any():
            raise WrongRoutes(f"{name}: routes {given.tolist()}")
        short = (affinity.gather(-1, given) - highest[..., :count]).abs().max() / affinity.abs().max().clamp(min=1e-30)
        if not short <= self.route_error:  # NaN is no number that is smaller
            self.route_error = float(short)
        return given

    def convolution(self, name, x, stride=1, padding=0, groups=1):
        weight = self.tensors[f"{name}.weight"]
        if any(size + 2 * padding < kernel for size, kernel in zip(x.shape[2:], weight.shape[2:])):
            raise Impossible(f"{name}: nothing is left of the map")
        return F.conv2d(x, weight, self.tensors[f"{name}.bias"], stride, padding, groups=groups)

    def depthwise(self, name, x):
        """On (N, H, W, C), with a result of the same size."""
        padding, groups = self.tensors[f"{name}.weight"].shape[2] // 2, x.shape[-1]
        return self.convolution(name, x.permute(0, 3, 1, 2), padding=padding, groups=groups).permute(0, 2, 3, 1)

    def linear(self, name, x):
        weight = self.tensors[f"{name}.weight"].flatten(1)
        return x @ weight.T + self.tensors.get(f"{name}.bias", 0)

    def layer_norm(self, name, x):
        return self.affine(name, x, x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True), 1e-6)

    def batch_norm(self, name, x):
        x = x.permute(0, 2, 3, 1)
        if not self.training:
            mean, variance = (self.tensors[f"{name}.running_{what}"] for what in ("mean", "var"))
        elif x.shape[:-1].numel() == 1:
            raise Impossible(f"{name}: the statistics of a single pixel")
        else:
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2), unbiased=False)
        return self.affine(name, x, mean, variance, 1e-5).permute(0, 3, 1, 2)

    def affine(self, name, x, mean, variance, eps):
        return (x - mean) / (variance + eps).sqrt() * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def by_head(x, heads):
    """(N, tokens, C) as (N, heads, tokens, C/heads)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q, k, v, scale):
    """Of each head; their results side by side, (N, tokens, C)."""
    return ((scale * q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def regions(x, region, grid):
    """(N, H, W, C) cut into regions, (N, P, tokens, C); where they reach beyond the map they hold zeros."""
    missing = [count * size - there for count, size, there in zip(grid, region, x.shape[1:3])]
    x = F.pad(x, (0, 0, 0, missing[1], 0, missing[0]))
    x = x.unflatten(2, (grid[1], region[1])).unflatten(1, (grid[0], region[0])).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


def mean_of_regions(x, region, grid):
    """The mean of each region's tokens, without what lies beyond the map: (N, P, C)."""
    there = regions(torch.ones_like(x[:1, :, :, :1]), region, grid).sum(2)
    return regions(x, region, grid).sum(2) / there
