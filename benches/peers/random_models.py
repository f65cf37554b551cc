"""Holds the program against a plain PyTorch model, `reference.py`, on random configurations.

    cargo build --release
    python benches/peers/random_models.py [--models 200] [--first 0] [--gradients] [--dtype f32] [--device emulated]

For each seed a configuration of any family, weights and images are drawn, and both sides compute
the same pass: in evaluation mode what the configuration asks for (logits, pooled features or dense
maps) and the routes; with --gradients, in training mode, the logits, the loss and the gradient of
every weight. The reference computes in f64. Each tensor's error is its largest difference, relative
to its largest element, or for gradients to a small part of the model's largest one, if that is more.
What the reference refuses (a batch normalisation of a single pixel, a map that does not divide into
regions) the program has to refuse, too, in one line.
"""

import argparse
import collections
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from reference import Impossible, Reference, WrongRoutes, attention_of, parameter_shapes

PROGRAM = Path(__file__).resolve().parents[2] / "target/release/biformer"
# Gradients through the statistics of a few pixels magnify rounding.
TOLERANCES = {("f64", False): 1e-11, ("f64", True): 1e-6, ("f32", False): 1e-4, ("f32", True): 1e-2}
# A bias before a batch normalisation has the gradient zero, up to rounding: what is smaller than
# this part of the largest gradient is compared with that.
SMALL = {"f64": 1e-5, "f32": 1e-2}


def draw_config(pick, gradients):
    family = pick.choice(["biformer", "biformer", "biformer_stl", "biformer_stl_nchw"])
    published, nchw = family == "biformer", family == "biformer_stl_nchw"
    features = ["logits"] * 4 + ([] if gradients else ["pooled"] if nchw else ["pooled", "dense"])
    config = {
        "family": family,
        "features": pick.choice(features),
        "num_classes": pick.choice([1, 2, 3, 10, 17]),
        "depth": [],
        "embed_dim": [],
        "topks": [],
        "n_win": [],
        "mlp_ratio": [],
        "head_dim": pick.choice([1, 2, 3, 5, 8, 12, 16, 24, 32, 40]),
        "full_attention_heads": pick.choice([1, 2, 3, 4, 8]),
        "lce_kernel": pick.choice([0, 3, 5, 5, 7]),
        "pos_kernel": pick.choice([0, 3, 3, 5, 7] if published else [0, 0, 3, 5]),
        "stem_strides": [pick.randint(1, 4), pick.randint(1, 4)],
        "auto_pad": pick.random() < 0.65,
        "soft_routing": not nchw and pick.random() < 0.3,
        "layer_scale": pick.choice([0.0, 0.0, 0.1, 1.0]),
    }
    for stage in range(pick.randint(1, 4)):
        n_win, routed = pick.randint(1, 8), pick.random() < 0.65
        topk = pick.choice([1, n_win**2, pick.randint(1, n_win**2)]) if routed else pick.choice([-1, -2])
        dim = config["head_dim" if routed else "full_attention_heads"] * pick.randint(1, 6)
        config["depth"].append(pick.choice([1, 1, 2]))
        config["embed_dim"].append(2 * dim if stage == 0 else dim)  # the published stem halves the first
        config["topks"].append(topk)
        config["n_win"].append(n_win)
        config["mlp_ratio"].append(pick.choice([1.0, 1.5, 2.3, 4.0]))
        if attention_of(config, stage) not in ("routed", "full") and config["lce_kernel"] == 0:
            config["lce_kernel"] = 5  # these have a context in any case
    return config


def map_side(config, side, stage):
    """How many tokens remain in a stage of an image's side."""
    if config["family"] != "biformer":
        return side // 4 >> stage
    for stride in config["stem_strides"] + [2] * stage:
        side = -(-side // stride)
    return side


def draw_side(pick, config):
    """Mostly one that suits the model."""

    def suits(side):
        sides = [map_side(config, side, stage) for stage in range(len(config["depth"]))]
        if config["family"] != "biformer_stl_nchw":
            cuts = zip(sides, config["n_win"], config["topks"])
            return min(sides) > 0 and (config["auto_pad"] or all(k < 0 or side % n == 0 for side, n, k in cuts))
        return all(side >= (n if k > 0 else 1) for side, n, k in zip(sides, config["n_win"], config["topks"]))

    fitting = [side for side in range(1, 97) if suits(side) and map_side(config, side, 0) <= 40]
    return pick.choice(fitting) if fitting and pick.random() < 0.95 else pick.randint(1, 64)


def draw_tensors(config, pick, generator, exact):
    """Weights as large as keep a map's size, now and then with sharp attention; with `exact`, numbers of f32."""
    sharp, tensors = pick.choice([1, 1, 4]), {}
    for name, shape in parameter_shapes(config).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            value = torch.zeros((), dtype=torch.int64)
        elif name.endswith("running_var"):
            value = 0.5 + value.abs()
        elif len(shape) <= 1:
            value = 0.2 * value + (0 if name.endswith(("bias", "running_mean")) else 1)
        else:
            value = value * (sharp if "qkv" in name else 1) / value[0].numel() ** 0.5
        tensors[name] = value.float().to(value.dtype) if exact else value
    return tensors


def references(config, tensors, images, labels, routes, gradients):
    """What the reference computes, and how far the routes are from its own; nothing where it refuses."""
    learned = {name for name in tensors if "running" not in name and "num_batches" not in name}
    tensors = {name: value.clone().requires_grad_(gradients and name in learned) for name, value in tensors.items()}
    model = Reference(config, tensors, training=gradients, routes=routes)
    try:
        results = model(images)
    except Impossible:
        return None
    if gradients:
        results["loss"] = F.cross_entropy(results["logits"], labels)
        results["loss"].backward()
        for name in learned:
            gradient = tensors[name].grad
            results[f"{name}.grad"] = torch.zeros_like(tensors[name]) if gradient is None else gradient
    return {name: value.detach() for name, value in results.items()}, model.route_error


def programs(config, tensors, images, labels, folder, options):
    """What the program computes, and the routes; nothing where it refuses."""

    def text(value):
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)

    weights, given, output = (folder / f"{name}.safetensors" for name in ("weights", "input", "output"))
    save_file({name: value.contiguous() for name, value in tensors.items()}, weights)
    save_file({"input": images, "labels": labels}, given)
    command = [PROGRAM, "forward", "--model", "tiny", "--weights", weights, "--input", given, "--output", output]
    command += ["--dtype", options.dtype, "--device", options.device, "--routes"]
    command += ["--gradients"] if options.gradients else []
    command += ["--set", *(f"{key}={text(value)}" for key, value in config.items())]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode == 2 and ran.stderr.count("\n") == 1:
        return None
    if ran.returncode != 0:
        sys.exit(f"it should compute, or say in a line why not: {ran}")
    results = load_file(output)
    suffix = ".routes"
    routes = {name.removesuffix(suffix): results.pop(name) for name in list(results) if name.endswith(suffix)}
    return results, routes


def compare(ours, wanted, small):
    """The largest error, and where it is."""
    if ours.keys() != wanted.keys():
        return float("inf"), f"names: {sorted(ours.keys() ^ wanted.keys())}"
    largest = max((float(value.abs().max()) for name, value in wanted.items() if name.endswith(".grad")), default=0)

    def error(name):
        if ours[name].numel() != wanted[name].numel():
            return float("inf")
        difference = ours[name].double().reshape(wanted[name].shape) - wanted[name]
        scale = float(wanted[name].abs().max())
        scale = max(scale, small * largest) if name.endswith(".grad") else scale
        found = float(difference.abs().max())
        return found / scale if scale > 0 else found

    return max(((error(name), name) for name in wanted), key=by_size)


def by_size(found):
    """NaN is the largest error."""
    return found[0] != found[0], found[0]


def traits(config, shape):
    """What a configuration covers, for the count at the end."""
    yield from (config["family"], config["features"])
    for stage, n_win in enumerate(config["n_win"]):
        kind = attention_of(config, stage)
        yield f"attention: {kind}"
        if kind == "routed":
            sides = [map_side(config, side, stage) for side in shape[2:]]
            if config["soft_routing"]:
                yield "soft routing"
            if any(side % n_win for side in sides):
                yield "maps that regions do not divide"
            elif config["topks"][stage] == n_win**2:
                yield "all regions routed to"
    if config["layer_scale"] > 0:
        yield "layer scale"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--gradients", action="store_true", help="a pass of training, with the gradients")
    parser.add_argument("--dtype", choices=["f64", "f32"], default="f64", help="what the program computes in")
    parser.add_argument("--device", default="cpu", help="where the program computes")
    options = parser.parse_args()
    tolerance = TOLERANCES[options.dtype, options.gradients]
    torch.set_default_dtype(torch.float64)
    refused, failed, errors, covered = 0, [], [], collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.models):
            pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            config = draw_config(pick, options.gradients)
            exact = options.dtype == "f32"
            tensors = draw_tensors(config, pick, generator, exact)
            shape = (pick.randint(1, 4), 3, draw_side(pick, config), draw_side(pick, config))
            images = torch.randn(shape, generator=generator)
            images = images.float().double() if exact else images
            labels = torch.randint(config["num_classes"], shape[:1], generator=generator)
            ours = programs(config, tensors, images, labels, Path(folder), options)
            routes = ours[1] if ours else None
            try:
                wanted = references(config, tensors, images, labels, routes, options.gradients)
            except WrongRoutes as wrong:
                failed.append(seed)
                print(f"seed {seed}: {wrong}: {config}, {shape}", flush=True)
                continue
            if ours is None or wanted is None:
                refused += 1
                if (ours is None) != (wanted is None):
                    failed.append(seed)
                    side = "the program" if ours is None else "the reference"
                    print(f"seed {seed}: only {side} refuses it: {config}, {shape}", flush=True)
                continue
            error, where = max(compare(ours[0], wanted[0], SMALL[options.dtype]), (wanted[1], "routes"), key=by_size)
            errors.append(error)
            covered.update(set(traits(config, shape)))
            if not error <= tolerance:
                failed.append(seed)
                print(f"seed {seed}: {error:.1e} in {where}: {config}, {shape}", flush=True)
    errors.sort()
    if errors:
        print(f"{len(errors)} models, errors: median {errors[len(errors) // 2]:.1e}, largest {errors[-1]:.1e}")
        print(", ".join(f"{name} {count}" for name, count in sorted(covered.items())))
    print(f"failed: seeds {failed}" if failed else f"{refused} that both refuse")
    sys.exit(1 if failed or not errors else 0)


if __name__ == "__main__":
    main()
