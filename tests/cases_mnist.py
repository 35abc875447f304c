"""Images in the files of MNIST: IDX, a header and one byte for each pixel."""

import struct

import torch

TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"


def idx(images, magic=0x803):
    """The content of a file with these images (n, H, W) of uint8."""
    return struct.pack(">4I", magic, *images.shape) + images.numpy().tobytes()


def noise(n):
    """Images of noise, (n, 28, 28) of uint8."""
    return torch.randint(256, (n, 28, 28), dtype=torch.uint8)


def write_mnist(folder, train, test):
    """Write the two files of a data set, from images (n, 28, 28) or that many images of noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in ((TRAIN, train), (TEST, test)):
        given = noise(images) if isinstance(images, int) else images
        (folder / name).write_bytes(idx(given))
    return folder
