"""Classifies pictures in PyTorch and Pillow as `biformer predict` does: an example of how to use a trained model there.

    biformer export --checkpoint runs/mine --output mine.safetensors
    python benches/peers/predict.py mine.safetensors PICTURE...

It needs torch, numpy, safetensors and Pillow (up to 12, whose resizing the program reproduces to the byte), and the
program, as `biformer` on the path or named by --program.
"""

import argparse
import json
import subprocess

import numpy as np
import torch
from biformer_torch import BiFormer
from PIL import Image, ImageOps
from safetensors.torch import load_file

TINY = 32  # up to this side, pictures are shown up to their edges


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights")
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--program", default="biformer")
    arguments = parser.parse_args()
    # The file's metadata say the same.
    asked = [arguments.program, "info", "--checkpoint", arguments.weights, "--json"]
    known = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
    model = BiFormer(known["config"]).eval()
    model.load_state_dict(load_file(arguments.weights))
    statistics = known["run"]["data"]["statistics"]
    for path in arguments.pictures:
        pixels = np.asarray(shown(opened(path), known["run"]["config"]), dtype=np.float64) / 255
        pixels = (pixels - statistics["mean"]) / statistics["std"]
        with torch.no_grad():
            logits = model(torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None])[0]
        probabilities = logits.double().softmax(0).tolist()
        likeliest = sorted(zip(probabilities, known["run"]["data"]["classes"]), reverse=True)[:5]
        print(path, *(f"  {100 * probability:5.1f}%  {name}" for probability, name in likeliest), sep="\n")


def opened(path):
    """A picture file, upright, in three colours of bytes."""
    picture = Image.open(path)
    if picture.mode.startswith("I;16"):  # grey in 16 bits, which `convert` would cut off at 255
        picture = Image.fromarray(np.round(np.asarray(picture) / 257).astype(np.uint8))
    return ImageOps.exif_transpose(picture).convert("RGB")  # alpha is ignored


def shown(picture, config):
    """The part of a picture that the model sees, at its size: torchvision's Resize(zoomed) and CenterCrop(size)."""
    size, share = config["image_size"], config["preprocessing"]["eval_crop"]
    if picture.size == (size, size):
        return picture
    if share == 0:
        share = 1 if config["augmentation"]["crop"] == "padded" else 224 / 256
    zoomed = size if max(picture.size) <= TINY else int(size / share)
    width, height = (zoomed * side // min(picture.size) for side in picture.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    return picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))


if __name__ == "__main__":
    main()
