"""Holds the program's gradients against PyTorch's, on random models of the twin's layout.

    cargo build --release
    python benches/peers/random_models.py [--models 200] [--first 0]

For each seed a configuration, weights, images and labels are drawn; `biformer forward --gradients`
and the twin compute the same pass of training in f64. Compared are the loss, the logits and the
gradient of every weight, each by its largest difference, relative to the tensor's largest element.
What the twin refuses (a batch normalisation of a single pixel) the program has to refuse, too.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from biformer_torch import FIXED, BiFormer

PROGRAM = Path(__file__).resolve().parents[2] / "target/release/biformer"
TOLERANCE = 1e-6
# A bias before a batch normalisation has the gradient zero, up to rounding: what is smaller than
# this part of the largest gradient is compared with that.
SMALL = 1e-5


def draw_config(pick):
    head_dim, full_heads = pick.choice([1, 2, 3, 5, 8, 12, 16, 24]), pick.choice([1, 2, 3, 4, 8])
    config = {
        "depth": [],
        "embed_dim": [],
        "n_win": [],
        "topks": [],
        "head_dim": head_dim,
        "full_attention_heads": full_heads,
        "mlp_ratio": pick.choice([1.0, 2.5, 3.0, 4.0]),
        "auto_pad": pick.random() < 0.8,
        "num_classes": pick.choice([1, 2, 3, 10, 17]),
        "stem_strides": [pick.randint(1, 4), pick.randint(1, 3)],
    }
    for stage in range(pick.randint(1, 4)):
        n_win, routed = pick.randint(1, 7), pick.random() < 0.7
        dim = (head_dim if routed else full_heads) * pick.randint(1, 6)
        config["depth"].append(pick.randint(1, 3))
        config["embed_dim"].append(2 * dim if stage == 0 else dim)  # the stem halves the first
        config["n_win"].append(n_win)
        config["topks"].append(pick.choice([1, n_win**2, pick.randint(1, n_win**2)]) if routed else -2)
    return config


def draw_weights(model, pick, generator):
    """Normal ones, as large as keep a map's size; now and then with sharp attention."""
    sharp = pick.choice([1, 1, 4])
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        if name.endswith("running_var"):
            value.copy_(0.5 + noise.abs())
        elif value.ndim == 1:
            value.copy_(0.2 * noise + (0 if name.endswith(("bias", "running_mean")) else 1))
        else:
            value.copy_(noise * (sharp if "qkv" in name else 1) / value[0].numel() ** 0.5)


def as_fields(config):
    def text(value):
        if isinstance(value, bool):
            return str(value).lower()
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    return [f"{key}={text(value)}" for key, value in {**config, **FIXED}.items() if key != "features"]


def twins(model, images, labels):
    """What the twin makes of it; nothing where it refuses."""
    try:
        logits = model.train()(images)
    except ValueError as refused:
        if "auto_pad" in str(refused) or "more than 1 value" in str(refused):
            return None
        raise
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    gradients = {f"{name}.grad": weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients}


def programs(config, model, images, labels, folder):
    """What the program makes of it; nothing where it refuses."""
    weights, given, output = (folder / f"{name}.safetensors" for name in ("weights", "input", "output"))
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    save_file({"input": images, "labels": labels}, given)
    command = [PROGRAM, "forward", "--gradients", "--dtype", "f64", "--model", "tiny", "--weights", weights]
    command += ["--input", given, "--output", output, "--set", *as_fields(config)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode not in (0, 2):
        sys.exit(f"it should compute, or say why not: {ran}")
    return load_file(output) if ran.returncode == 0 else None


def compare(ours, wanted):
    """The largest error, and where it is."""
    if ours.keys() != wanted.keys():
        return float("inf"), f"names: {sorted(ours.keys() ^ wanted.keys())}"
    largest = max(float(value.abs().max()) for name, value in wanted.items() if name.endswith(".grad"))

    def error(name):
        difference = ours[name].reshape(wanted[name].shape) - wanted[name]
        scale = float(wanted[name].abs().max())
        scale = max(scale, SMALL * largest) if name.endswith(".grad") else scale
        found = float(difference.abs().max())
        return found / scale if scale > 0 else found

    return max(((error(name), name) for name in wanted), key=lambda found: (found[0] != found[0], found[0]))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", type=int, default=200, metavar="N")
    options.add_argument("--first", type=int, default=0, metavar="SEED")
    options = options.parse_args()
    computed, refused, failed, errors = 0, 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.models):
            pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            config = draw_config(pick)
            model = BiFormer(config, "published", sdpa=False).double()
            with torch.no_grad():
                draw_weights(model, pick, generator)
            side = pick.choice([8, 20, 40, 64])
            shape = (pick.randint(1, 6), 3, pick.randint(1, side), pick.randint(1, side))
            images = torch.randn(shape, generator=generator, dtype=torch.float64)
            labels = torch.randint(config["num_classes"], shape[:1], generator=generator)
            ours = programs(config, model, images, labels, Path(folder))
            wanted = twins(model, images, labels)
            if ours is None or wanted is None:
                refused += 1
                if (ours is None) != (wanted is None):
                    failed.append(seed)
                    print(f"seed {seed}: only {'the program' if ours is None else 'the twin'} refuses it: {config}, {shape}")
                continue
            computed += 1
            error, where = compare(ours, wanted)
            errors.append(error)
            if not error <= TOLERANCE:
                failed.append(seed)
                print(f"seed {seed}: {error:.1e} in {where}: {config}, {shape}", flush=True)
    errors.sort()
    if errors:
        print(f"{computed} models, errors: median {errors[len(errors) // 2]:.1e}, largest {errors[-1]:.1e}")
    print(f"{refused} that both refuse" if not failed else f"failed: seeds {failed}")
    sys.exit(1 if failed or not errors else 0)


if __name__ == "__main__":
    main()
